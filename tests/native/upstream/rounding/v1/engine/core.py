"""Stands for ``vllm.v1.engine.core``: how an engine core settles the KV cache."""

from __future__ import annotations

from typing import Any

from vllm.utils.vmm_driver import get_vmm_driver
from vllm.v1.core.kv_cache_utils import (
    align_extensible_kv_cache_capacity,
    finalize_extensible_kv_cache,
    generate_scheduler_kv_cache_config,
    get_kv_cache_configs,
)
from vllm.v1.kv_cache_interface import KVCacheConfig


class EngineCore:
    def __init__(self, vllm_config: Any, executor_class: Any, log_stats: bool) -> None:
        self.vllm_config = vllm_config
        self.model_executor = executor_class(vllm_config)
        self.kv_cache_config = self._initialize_kv_caches(vllm_config)

    def _initialize_kv_caches(self, vllm_config: Any) -> KVCacheConfig:
        cache_config = vllm_config.cache_config
        kv_cache_specs = self.model_executor.get_kv_cache_specs()
        if cache_config.enable_extensible_kv_cache:
            self.model_executor.resolve_extensible_kv_cache(kv_cache_specs)
        self.model_executor.set_kv_cache_layout(vllm_config.layout.name)
        available_gpu_memory = self.model_executor.determine_available_memory()
        kv_cache_configs = get_kv_cache_configs(
            vllm_config, kv_cache_specs, available_gpu_memory
        )
        for kv_cache_config in kv_cache_configs:
            kv_cache_config.kv_cache_layout = cache_config.kv_cache_layout
        scheduler_kv_cache_config = generate_scheduler_kv_cache_config(kv_cache_configs)
        extensible = cache_config.enable_extensible_kv_cache
        if extensible and vllm_config.kv_transfer_config is not None:
            # Assumed: when, and where the granule comes from.
            align_extensible_kv_cache_capacity(
                vllm_config,
                kv_cache_configs,
                scheduler_kv_cache_config,
                get_vmm_driver().granularity(0),
            )
        cache_config.num_gpu_blocks = scheduler_kv_cache_config.num_blocks
        self.model_executor.initialize_from_config(kv_cache_configs)
        compilation_times = self.model_executor.compile_or_warm_up_model()
        if extensible:
            num_blocks = finalize_extensible_kv_cache(
                vllm_config,
                kv_cache_configs,
                scheduler_kv_cache_config,
                compilation_times,
            )
            self.model_executor.extend_kv_cache(num_blocks)
        self.worker_kv_cache_configs = kv_cache_configs  # for tests: never padded
        return scheduler_kv_cache_config
