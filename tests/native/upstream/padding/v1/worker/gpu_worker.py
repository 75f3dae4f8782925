"""Stands for ``vllm.v1.worker.gpu_worker`` where the worker pads its own copy."""

from __future__ import annotations

import copy

from vllm.utils.vmm_driver import get_vmm_driver
from vllm.v1.core.kv_cache_utils import pad_kv_cache_segments
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.extensible_kv_cache import (
    extend_kv_cache,
    measure_kv_cache_bytes,
    registers_kv_cache_memory,
)
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import WARM_UP_GARBAGE, ensure_kv_transfer_initialized
from vllm.v1.worker.gpu_worker import Worker as _Worker

__all__ = ["WARM_UP_GARBAGE"]


class Worker(_Worker):
    def init_device(self) -> None:
        super().init_device()
        self.model_runner = GPUModelRunner(self.vllm_config, self.device)

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        if self.cache_config.enable_extensible_kv_cache and registers_kv_cache_memory(
            self.vllm_config
        ):
            kv_cache_config = pad_kv_cache_segments(
                kv_cache_config,
                self.cache_config.get_resolved_kv_cache_layout(),
                get_vmm_driver().granularity(0),
            )
        super().initialize_from_config(kv_cache_config)

    def _measure_kv_cache_blocks(self) -> int:
        kv_cache = self.model_runner.extensible_kv_cache
        device = self.vllm_config.device
        return int(
            kv_cache.blocks_within(
                measure_kv_cache_bytes(
                    init_free_memory=device.total,
                    free_memory=device.total
                    - device.resident
                    - kv_cache.physical_bytes,
                    committed_bytes=kv_cache.physical_bytes,
                    requested_memory=self.requested_memory,
                    margin_floor_bytes=0,
                )
            )
        )

    def extend_kv_cache(self, num_blocks: int) -> None:
        kv_cache = self.model_runner.extensible_kv_cache
        kv_cache_config = copy.copy(self._kv_cache_config)
        kv_cache_config.num_blocks = num_blocks
        kv_cache_config.kv_cache_tensors = kv_cache.committed_kv_cache_tensors(
            kv_cache_config,
            self.cache_config.get_resolved_kv_cache_layout(),
            num_blocks,
        )
        ensure_kv_transfer_initialized(self.vllm_config, kv_cache_config)
        extend_kv_cache(self.model_runner, num_blocks)
        self.cache_config.num_gpu_blocks = num_blocks
