"""Caches of a few blocks, in the forms that vLLM plans them in, on awkward strides."""

from __future__ import annotations

import torch
from strategies import attention_spec, group_of, layer_names, plan, plan_uniform
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_kvpad import placement
from vllm_kvpad.kv_cache import ExtensibleKVCache
from vllm_kvpad.vmm import VmmDriver

LBHNC = KVCacheLayout.LBHNC
CPU = torch.device("cpu")
CAPACITY = 24
PAGE = 20 << 10
"""Bytes of the default spec's page: awkward to every power of two above 4 KiB."""


def make_cache(
    driver: VmmDriver,
    config: KVCacheConfig,
    layout: KVCacheLayout = LBHNC,
    *,
    padded: bool = True,
) -> ExtensibleKVCache:
    if padded:
        config = placement.pad_kv_cache_segments(config, layout, driver.granularity)
    return ExtensibleKVCache(config, layout, CPU, driver)


def planned(
    num_blocks: int = CAPACITY, layout: KVCacheLayout = LBHNC, num_layers: int = 3
) -> KVCacheConfig:
    """What the engine core plans for so many blocks."""
    return plan_uniform(num_layers, num_blocks, layout)


def hybrid(num_blocks: int, layout: KVCacheLayout = LBHNC) -> KVCacheConfig:
    """Three full and two sliding-window layers overlaid on three regions."""
    full = attention_spec()
    sliding = SlidingWindowSpec(
        block_size=full.block_size,
        num_kv_heads=full.num_kv_heads,
        head_size=full.head_size,
        dtype=full.dtype,
        sliding_window=64,
    )
    groups = [
        group_of(dict.fromkeys(layer_names("full", 3), full)),
        group_of(dict.fromkeys(layer_names("sliding", 2), sliding)),
    ]
    return plan(groups, layout, num_blocks)


def mixed(num_blocks: int, layout: KVCacheLayout = LBHNC) -> KVCacheConfig:
    """Layers with pages of three sizes in one group."""
    sizes = [64, 80, 96, 64]
    specs = [attention_spec(head_size=size) for size in sizes]
    names = layer_names("mixed", len(sizes))
    return plan([group_of(dict(zip(names, specs, strict=True)))], layout, num_blocks)


def gapped(num_blocks: int, layout: KVCacheLayout = LBHNC) -> KVCacheConfig:
    """Three layers with gaps between them, and one more over the third region.

    vLLM's planner leaves no gaps; its data classes can say them. Layers outermost
    only.
    """
    spec = attention_spec()
    spacing = num_blocks * spec.page_size_bytes + 5000
    start = 512

    def tensor(names: list[str], first: int) -> KVCacheTensor:
        return KVCacheTensor(
            size=start + 3 * spacing,
            layers=names,
            layer_stride=spacing,
            block_stride=spec.page_size_bytes,
            offset=start + first * spacing,
        )

    below, above = layer_names("below", 3), layer_names("above", 1)
    return KVCacheConfig(
        num_blocks,
        [tensor(below, 0), tensor(above, 2)],
        [
            group_of(dict.fromkeys(below, spec)),
            group_of(dict.fromkeys(above, spec)),
        ],
    )
