"""Stands for ``vllm.v1.worker.extensible_kv_cache`` of vLLM PR 56492."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from typing import Any

import torch
from vllm.utils.extensible_tensor import (
    ExtensibleTensor,
    granule_aligned_blocks,
    granule_block_alignment,
)
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheTensor,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.gpu.kv_connector import get_kv_connector


class ExtensibleKVCache:
    """Refuses any placement whose segments do not lie one right behind another."""

    def __init__(self, kv_cache_config: KVCacheConfig, device: torch.device) -> None:
        tensors = kv_cache_config.kv_cache_tensors
        (self.size,) = {tensor.size for tensor in tensors}
        self.capacity_blocks = kv_cache_config.num_blocks
        self.bytes_per_block, rest = divmod(self.size, self.capacity_blocks)
        if rest:
            raise ValueError("not a whole number of blocks")
        self.segment_offsets, self.segment_strides = self._segments(tensors)
        self.num_committed_blocks = 0
        self.reserved_headroom_bytes = 0
        self.buffer = ExtensibleTensor(
            self.size,
            device=device,
            segment_capacities=[
                self.capacity_blocks * stride for stride in self.segment_strides
            ],
        )

    def _segments(self, tensors: list[KVCacheTensor]) -> tuple[list[int], list[int]]:
        strides = {tensor.block_stride for tensor in tensors}
        if len(strides) == 1:
            (stride,) = strides
            segment = self.capacity_blocks * stride
            count = self.size // segment
            return [index * segment for index in range(count)], [stride] * count
        by_offset = {
            tensor.offset + index * tensor.layer_stride: tensor.block_stride
            for tensor in tensors
            for index in range(len(tensor.layers))
        }
        end = 0
        for offset in sorted(by_offset):
            if offset != end:
                raise ValueError("KV cache tensors do not tile the allocation")
            end += self.capacity_blocks * by_offset[offset]
        return sorted(by_offset), [by_offset[offset] for offset in sorted(by_offset)]

    def allocate(self, size: int) -> torch.Tensor:
        assert size == self.size
        self.commit(1)
        return self.buffer.full_view()

    def commit(
        self, num_blocks: int, defragment: bool = False, shrink: bool = False
    ) -> None:
        num_blocks = min(num_blocks, self.capacity_blocks)
        sizes = [num_blocks * stride for stride in self.segment_strides]
        scattered = not all(self.buffer.segments_backed_by_one_chunk(sizes))
        shrinks = shrink and num_blocks < self.num_committed_blocks
        if (defragment and scattered) or shrinks:
            self.buffer.release_physical()
            self.num_committed_blocks = 0
        if num_blocks > self.num_committed_blocks:
            self.buffer.resize_segments_(sizes, zero_new=True)
            self.num_committed_blocks = num_blocks

    def committed_views(
        self,
        kv_cache_config: KVCacheConfig,
        layout: KVCacheLayout,
        kernel_block_sizes: list[int] | None = None,
    ) -> dict[str, torch.Tensor] | None:
        if not layout.is_block_compact:
            return None
        assert kv_cache_config.num_blocks == self.num_committed_blocks
        (spec,) = {group.kv_cache_spec for group in kv_cache_config.kv_cache_groups}
        views = {}
        for tensor in kv_cache_config.kv_cache_tensors:
            for index, layer in enumerate(tensor.layers):
                segment, offset = self._locate(
                    tensor.offset + index * tensor.layer_stride
                )
                (views[layer],) = create_kv_cache_views(
                    self.buffer.segment_view(segment),
                    spec,
                    kv_cache_config.num_blocks,
                    layout,
                    replace(tensor, layers=[layer], offset=offset),
                )
        return views

    def committable_blocks(self) -> int:
        return min(4, self.capacity_blocks)

    @property
    def physical_bytes(self) -> int:
        return self.buffer.physical_bytes

    def physical_bytes_for(self, num_blocks: int) -> int:
        granule = self.buffer.granularity
        granules = (-(-num_blocks * s // granule) for s in self.segment_strides)
        return granule * sum(granules)

    @property
    def block_alignment(self) -> int:
        return granule_block_alignment(self.segment_strides, self.buffer.granularity)

    def blocks_within(self, num_bytes: int, aligned: bool = False) -> int:
        num_blocks = min(num_bytes // self.bytes_per_block, self.capacity_blocks)
        if aligned:
            return granule_aligned_blocks(
                num_blocks, self.segment_strides, self.buffer.granularity
            )
        counts = range(1, num_blocks + 1)
        return bisect_right(counts, num_bytes, key=self.physical_bytes_for)

    def _locate(self, start: int) -> tuple[int, int]:
        begun = [offset for offset in self.segment_offsets if offset <= start]
        return len(begun) - 1, start - begun[-1]

    def committed_kv_cache_tensors(
        self, kv_cache_config: KVCacheConfig, layout: KVCacheLayout, num_blocks: int
    ) -> list[KVCacheTensor]:
        size = num_blocks * self.bytes_per_block
        if layout.is_block_outermost:
            return [replace(t, size=size) for t in kv_cache_config.kv_cache_tensors]
        return [
            replace(
                tensor,
                size=size,
                layers=[layer],
                layer_stride=num_blocks * tensor.block_stride,
                offset=self._locate(tensor.offset + index * tensor.layer_stride)[1],
            )
            for tensor in kv_cache_config.kv_cache_tensors
            for index, layer in enumerate(tensor.layers)
        ]

    def release_physical(self) -> None:
        self.buffer.release_physical()

    def recommit(self) -> None:
        num_blocks, self.num_committed_blocks = self.num_committed_blocks, 0
        self.commit(num_blocks)

    def free(self) -> None:
        self.buffer.free()
        self.num_committed_blocks = 0


def num_committable_kv_blocks(runner: Any) -> int:
    return int(runner.extensible_kv_cache.committable_blocks())


def ensure_kv_cache_blocks(runner: Any, num_blocks: int) -> None:
    runner.extensible_kv_cache.commit(num_blocks)


def extend_kv_cache(runner: Any, num_blocks: int) -> None:
    kv_cache = runner.extensible_kv_cache
    kv_cache.commit(
        num_blocks,
        defragment=runner.vllm_config.kv_transfer_config is not None,
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


def measure_kv_cache_bytes(
    *,
    init_free_memory: int,
    free_memory: int,
    committed_bytes: int,
    requested_memory: int,
    transient_peak_bytes: int = 0,
    margin_floor_bytes: int = 1 << 30,
) -> int:
    in_use = init_free_memory - free_memory - committed_bytes
    headroom = free_memory + committed_bytes - margin_floor_bytes
    return max(min(requested_memory - in_use, headroom) - transient_peak_bytes, 0)
