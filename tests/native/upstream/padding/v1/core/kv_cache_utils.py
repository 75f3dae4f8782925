"""Stands for ``vllm.v1.core.kv_cache_utils`` where the cache is padded."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_configs,
    get_kv_cache_groups,
)
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_kvpad import placement

__all__ = [
    "generate_scheduler_kv_cache_config",
    "get_kv_cache_configs",
    "get_kv_cache_groups",
]


def pad_kv_cache_segments(
    kv_cache_config: KVCacheConfig, layout: KVCacheLayout, granule: int
) -> KVCacheConfig:
    return placement.pad_kv_cache_segments(kv_cache_config, layout, granule)


def finalize_extensible_kv_cache(
    vllm_config: Any,
    kv_cache_configs: list[KVCacheConfig],
    scheduler_kv_cache_config: KVCacheConfig,
    compilation_times: list[Any],
) -> int:
    num_blocks = min(
        scheduler_kv_cache_config.num_blocks,
        *(times.num_kv_blocks for times in compilation_times),
    )
    for config in (*kv_cache_configs, scheduler_kv_cache_config):
        config.num_blocks = num_blocks
    vllm_config.cache_config.num_gpu_blocks = num_blocks
    return num_blocks
