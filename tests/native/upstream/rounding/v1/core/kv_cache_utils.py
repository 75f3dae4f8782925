"""Stands for ``vllm.v1.core.kv_cache_utils``: what planning does for this cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from vllm.utils.extensible_tensor import (
    granule_aligned_blocks,
    granule_block_alignment,
)
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_config_from_groups,
    get_kv_cache_groups,
)
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

__all__ = ["generate_scheduler_kv_cache_config", "get_kv_cache_groups"]


def get_kv_cache_configs(
    vllm_config: Any, kv_cache_specs: list[Any], available_memory: list[int]
) -> list[KVCacheConfig]:
    configs = []
    for specs, memory in zip(kv_cache_specs, available_memory, strict=True):
        spec = next(iter(specs.values()))
        groups = [KVCacheGroupSpec(list(specs), spec)]
        configs.append(get_kv_cache_config_from_groups(vllm_config, groups, memory))
    return configs


def align_extensible_kv_cache_capacity(
    vllm_config: Any,
    kv_cache_configs: Sequence[KVCacheConfig],
    scheduler_kv_cache_config: KVCacheConfig,
    granule: int,
) -> None:
    for config in (*kv_cache_configs, scheduler_kv_cache_config):
        strides = [tensor.block_stride for tensor in config.kv_cache_tensors]
        old = config.num_blocks
        new = old - old % granule_block_alignment(strides, granule)
        _require_blocks(new)
        config.num_blocks = new
        layout = vllm_config.cache_config.get_resolved_kv_cache_layout()
        for index, tensor in enumerate(config.kv_cache_tensors):
            scaled = {"size": tensor.size * new // old}
            if not layout.is_block_outermost:
                scaled["offset"] = tensor.offset * new // old
                scaled["layer_stride"] = tensor.layer_stride * new // old
            config.kv_cache_tensors[index] = dataclasses.replace(tensor, **scaled)


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
    if vllm_config.kv_transfer_config is not None:
        # Assumed: that the agreed count is rounded once more, here.
        from vllm.utils.vmm_driver import get_vmm_driver

        tensors = scheduler_kv_cache_config.kv_cache_tensors
        num_blocks = granule_aligned_blocks(
            num_blocks,
            [tensor.block_stride for tensor in tensors],
            get_vmm_driver().granularity(0),
        )
    _require_blocks(num_blocks)
    for config in (*kv_cache_configs, scheduler_kv_cache_config):
        config.num_blocks = num_blocks
    vllm_config.cache_config.num_gpu_blocks = num_blocks
    return num_blocks


def _require_blocks(num_blocks: int) -> None:
    if num_blocks <= 0:
        raise ValueError("No available memory for the cache blocks")
