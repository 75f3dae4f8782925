"""Stands for ``vllm.v1.worker.extensible_kv_cache`` where the cache is padded."""

from __future__ import annotations

from typing import Any

import torch
from vllm.utils.extensible_tensor import ExtensibleTensor
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.extensible_kv_cache import (
    ExtensibleKVCache as _Packed,
)
from vllm.v1.worker.extensible_kv_cache import (
    ensure_kv_cache_blocks,
    measure_kv_cache_bytes,
    num_committable_kv_blocks,
)
from vllm.v1.worker.gpu.kv_connector import get_kv_connector

from vllm_kvpad.placement import kv_cache_segments

__all__ = [
    "ensure_kv_cache_blocks",
    "measure_kv_cache_bytes",
    "num_committable_kv_blocks",
]

# Assumed, as is the function below: its home, and that it takes the VllmConfig.
_REGISTERING = {"NixlConnector", "MooncakeConnector", "MultiConnector"}


def registers_kv_cache_memory(vllm_config: Any) -> bool:
    config = vllm_config.kv_transfer_config
    return config is not None and config.kv_connector in _REGISTERING


class ExtensibleKVCache(_Packed):
    """Takes gaps between segments."""

    def __init__(self, kv_cache_config: KVCacheConfig, device: torch.device) -> None:
        (self.size,) = {tensor.size for tensor in kv_cache_config.kv_cache_tensors}
        self.capacity_blocks = kv_cache_config.num_blocks
        # Nobody in this double has another kind of layout that pads.
        from vllm.v1.kv_cache_layout import KVCacheLayout

        segments = kv_cache_segments(
            kv_cache_config, KVCacheLayout[kv_cache_config.kv_cache_layout or "LBHNC"]
        )
        self.segment_offsets = [segment.offset for segment in segments]
        self.segment_strides = [segment.block_stride for segment in segments]
        self.bytes_per_block = sum(self.segment_strides)
        self.num_committed_blocks = 0
        self.reserved_headroom_bytes = 0
        ends = [*self.segment_offsets[1:], self.size]
        self.buffer = ExtensibleTensor(
            self.size,
            device=device,
            segment_capacities=[
                end - start
                for start, end in zip(self.segment_offsets, ends, strict=True)
            ],
        )

    def blocks_within(self, num_bytes: int) -> int:
        return super().blocks_within(num_bytes, aligned=False)


def extend_kv_cache(runner: Any, num_blocks: int) -> None:
    kv_cache = runner.extensible_kv_cache
    kv_cache.commit(
        num_blocks,
        defragment=registers_kv_cache_memory(runner.vllm_config),
        shrink=True,
    )
    runner.kv_cache_config.num_blocks = kv_cache.num_committed_blocks
    kv_caches = kv_cache.committed_views(
        runner.kv_cache_config,
        runner.cache_config.get_resolved_kv_cache_layout(),
        runner.kernel_block_sizes,
    )
    for name, view in kv_caches.items():
        runner.compilation_config.static_forward_context[name].kv_cache = view
    runner.kv_caches = list(kv_caches.values())
    runner.kv_connector = get_kv_connector(runner.vllm_config, kv_caches)
