"""KV cache placements for tests: real vLLM specs, planned by vLLM, drawn at random.

:func:`plan` has vLLM place a set of groups, which is what an engine core hands to
its workers. The strategies draw from it what models look like; the ones at the end
build by hand what vLLM's data classes can say but its planner does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups
except ImportError:  # vLLM 0.32
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups

KIB = 1 << 10
MIB = 1 << 20

LAYER_OUTERMOST = [KVCacheLayout.LBHNC, KVCacheLayout.LBNHC, KVCacheLayout.LHBNC]
BLOCK_OUTERMOST = [KVCacheLayout.BLHNC, KVCacheLayout.BLNHC, KVCacheLayout.BHLNC]
BLOCK_COMPACT_LAYER_OUTERMOST = [KVCacheLayout.LBHNC, KVCacheLayout.LBNHC]


@dataclass(frozen=True)
class Placement:
    """A configuration and the layout that it was planned for."""

    config: KVCacheConfig
    layout: KVCacheLayout


def attention_spec(
    num_heads: int = 5,
    head_size: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    **fields: Any,
) -> FullAttentionSpec:
    """Full attention; the defaults give a 20 KiB page."""
    return FullAttentionSpec(
        block_size=block_size,
        num_kv_heads=num_heads,
        head_size=head_size,
        dtype=dtype,
        **fields,
    )


def group_of(specs: dict[str, KVCacheSpec]) -> KVCacheGroupSpec:
    """One cache group, wrapped as vLLM does where its layers' specs differ."""
    first, *others = specs.values()
    if all(spec == first for spec in others):
        return KVCacheGroupSpec(list(specs), first)
    return KVCacheGroupSpec(
        list(specs),
        UniformTypeKVCacheSpecs(block_size=first.block_size, kv_cache_specs=specs),
    )


def plan(
    groups: list[KVCacheGroupSpec], layout: KVCacheLayout, num_blocks: int
) -> KVCacheConfig:
    """Place ``groups`` as vLLM's engine core does, for a given block count."""
    vllm_config: Any = SimpleNamespace(
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: layout,
            num_gpu_blocks_override=num_blocks,
            prefix_cache_retention_interval=None,
        ),
    )
    return get_kv_cache_config_from_groups(vllm_config, groups, available_memory=0)


def plan_uniform(
    num_layers: int,
    num_blocks: int,
    layout: KVCacheLayout = KVCacheLayout.LBHNC,
    spec: KVCacheSpec | None = None,
) -> KVCacheConfig:
    """A model of equal layers; the default has SmolLM2-360M's 20 KiB pages."""
    spec = spec or attention_spec()
    layers = dict.fromkeys(layer_names("model", num_layers), spec)
    return plan([group_of(layers)], layout, num_blocks)


def layer_names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}.layers.{index}.attn" for index in range(count)]


granules = st.integers(min_value=12, max_value=26).map(lambda bits: 1 << bits)
"""4 KiB to 64 MiB."""

block_counts = st.one_of(
    st.sampled_from([1, 2, 102, 512, 1024, 1331]), st.integers(1, 20_000)
)


@st.composite
def attention_specs(
    draw: st.DrawFn, block_size: int = 16, max_heads: int = 8
) -> FullAttentionSpec:
    return attention_spec(
        num_heads=draw(st.integers(1, max_heads)),
        head_size=draw(st.sampled_from([8, 64, 72, 80, 96, 128, 192, 256])),
        block_size=block_size,
        dtype=draw(st.sampled_from([torch.int8, torch.bfloat16, torch.float32])),
    )


@st.composite
def mla_specs(draw: st.DrawFn, block_size: int = 16) -> MLAAttentionSpec:
    """A latent cache or its indexer: one head, odd sizes, sometimes aligned blocks."""
    return MLAAttentionSpec(
        block_size=block_size,
        num_kv_heads=1,
        head_size=draw(st.sampled_from([128, 132, 512, 576, 656])),
        dtype=draw(st.sampled_from([torch.uint8, torch.bfloat16])),
        block_stride_alignment=draw(st.sampled_from([None, 576, 4096])),
    )


@st.composite
def uniform_placements(
    draw: st.DrawFn, layouts: Sequence[KVCacheLayout] = tuple(KVCacheLayout)
) -> Placement:
    """One group of equal layers, in any layout."""
    layout = draw(st.sampled_from(layouts))
    config = plan_uniform(
        num_layers=draw(st.integers(1, 40)),
        num_blocks=draw(block_counts),
        layout=layout,
        # MLA's aligned blocks need a layout that keeps a block's bytes together.
        spec=draw(
            st.one_of(attention_specs(), mla_specs())
            if layout.is_block_compact
            else attention_specs()
        ),
    )
    return Placement(config, layout)


@st.composite
def mixed_placements(
    draw: st.DrawFn,
    layouts: Sequence[KVCacheLayout] = tuple(
        layout for layout in KVCacheLayout if layout.is_block_compact
    ),
) -> Placement:
    """One group whose layers have pages of different sizes: several tensors."""
    layout = draw(st.sampled_from(layouts))
    specs = draw(st.lists(st.one_of(attention_specs(), mla_specs()), min_size=1))
    pattern = draw(st.lists(st.sampled_from(specs), min_size=1, max_size=24))
    names = layer_names("model", len(pattern))
    group = group_of(dict(zip(names, pattern, strict=True)))
    return Placement(plan([group], layout, draw(block_counts)), layout)


@st.composite
def hybrid_placements(
    draw: st.DrawFn, layouts: Sequence[KVCacheLayout] = tuple(KVCacheLayout)
) -> Placement:
    """Full and sliding-window groups of different lengths overlaid from byte 0."""
    layout = draw(st.sampled_from(layouts))
    full = draw(attention_specs())
    sliding = SlidingWindowSpec(
        block_size=full.block_size,
        num_kv_heads=full.num_kv_heads,
        head_size=full.head_size,
        dtype=full.dtype,
        sliding_window=512,
    )
    lengths = draw(st.lists(st.integers(1, 12), min_size=2, max_size=5))
    groups = [
        group_of(
            dict.fromkeys(
                layer_names(f"group{index}", length), sliding if index else full
            )
        )
        for index, length in enumerate(lengths)
    ]
    return Placement(plan(groups, layout, draw(block_counts)), layout)


@st.composite
def overlaid_placements(
    draw: st.DrawFn, layouts: Sequence[KVCacheLayout] = tuple(LAYER_OUTERMOST)
) -> Placement:
    """Tensors over every s-th region of a first one, from any region on, with gaps.

    vLLM's planner starts every group at byte 0 and leaves no gaps; KVCacheTensor can
    say more, and a placement that it can say must be padded right.
    """
    layout = draw(st.sampled_from(layouts))
    spec = draw(attention_specs(max_heads=8 if layout.is_block_compact else 1))
    num_blocks = draw(block_counts)
    num_regions = draw(st.integers(1, 16))
    spacing = num_blocks * spec.page_size_bytes + draw(st.sampled_from([0, 8, 5000]))
    start = draw(st.sampled_from([0, 512]))
    size = start + num_regions * spacing

    tensors, groups = [], []
    for index in range(draw(st.integers(1, 5))):
        first, step, count = 0, 1, num_regions
        if index:
            first = draw(st.integers(0, num_regions - 1))
            step = draw(st.integers(1, num_regions))
            count = draw(st.integers(1, (num_regions - first - 1) // step + 1))
        names = layer_names(f"group{index}", count)
        groups.append(group_of(dict.fromkeys(names, spec)))
        tensors.append(
            KVCacheTensor(
                size=size,
                layers=names,
                layer_stride=step * spacing,
                block_stride=spec.page_size_bytes,
                offset=start + first * spacing,
            )
        )
    return Placement(KVCacheConfig(num_blocks, tensors, groups), layout)


def one_run_per_layer(placement: Placement) -> bool:
    """Whether :func:`pad_kv_cache_segments` must accept it at any granule."""
    return placement.layout.is_block_compact or all(
        group.kv_cache_spec.num_heads == 1 for group in placement.config.kv_cache_groups
    )


layer_outermost_placements = st.one_of(
    uniform_placements(LAYER_OUTERMOST),
    mixed_placements(BLOCK_COMPACT_LAYER_OUTERMOST),
    hybrid_placements(LAYER_OUTERMOST),
    overlaid_placements(),
)

block_outermost_placements = st.one_of(
    uniform_placements(BLOCK_OUTERMOST),
    mixed_placements([KVCacheLayout.BLHNC, KVCacheLayout.BLNHC]),
    hybrid_placements(BLOCK_OUTERMOST),
)

placements = st.one_of(layer_outermost_placements, block_outermost_placements)

paddable_placements = layer_outermost_placements.filter(one_run_per_layer)
