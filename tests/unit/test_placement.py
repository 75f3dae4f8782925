"""Placement: what padding may change, where segments lie, and what blocks cost."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import (
    BLOCK_OUTERMOST,
    KIB,
    LAYER_OUTERMOST,
    MIB,
    Placement,
    attention_spec,
    attention_specs,
    block_counts,
    block_outermost_placements,
    granules,
    group_of,
    layer_names,
    layer_outermost_placements,
    one_run_per_layer,
    paddable_placements,
    placements,
    plan,
    plan_uniform,
)
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_kvpad.placement import (
    Segment,
    allocation_bytes,
    block_alignment,
    blocks_within,
    bytes_per_block,
    kv_cache_segments,
    pad_kv_cache_segments,
    padding_bytes,
    physical_bytes,
    rounded_blocks,
)

LBHNC, LHBNC, BLHNC = KVCacheLayout.LBHNC, KVCacheLayout.LHBNC, KVCacheLayout.BLHNC


def forall(*strategies, **named):
    """``given`` without a clock: the machine may be busy with engines."""
    relaxed = settings(
        deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow]
    )
    return lambda test: relaxed(given(*strategies, **named)(test))


def layer_starts(config: KVCacheConfig) -> dict[str, int]:
    return {
        layer: tensor.offset + index * tensor.layer_stride
        for tensor in config.kv_cache_tensors
        for index, layer in enumerate(tensor.layers)
    }


def aliasing(config: KVCacheConfig) -> list[list[str]]:
    """The layers that share a region, region by region in address order."""
    by_start = defaultdict(list)
    for layer, start in layer_starts(config).items():
        by_start[start].append(layer)
    return [by_start[start] for start in sorted(by_start)]


def spec_of(config: KVCacheConfig, layer: str):
    (spec,) = (
        group.kv_cache_spec
        for group in config.kv_cache_groups
        if layer in group.layer_names
    )
    return (
        spec.kv_cache_specs[layer]
        if isinstance(spec, UniformTypeKVCacheSpecs)
        else spec
    )


def views_of(
    config: KVCacheConfig, layout: KVCacheLayout, raw: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Each layer's ``[B, H, N, C]`` view, made by vLLM."""
    views = {}
    for tensor in config.kv_cache_tensors:
        spec = spec_of(config, tensor.layers[0])
        made = create_kv_cache_views(raw, spec, config.num_blocks, layout, tensor)
        views.update(zip(tensor.layers, made, strict=True))
    return views


def byte_range(view: torch.Tensor) -> tuple[int, int]:
    """First byte of ``view`` in its storage and the byte after its last."""
    last = sum(
        (size - 1) * stride
        for size, stride in zip(view.shape, view.stride(), strict=True)
    )
    start = view.storage_offset() * view.element_size()
    return start, start + (last + 1) * view.element_size()


class TestPadding:
    @forall(paddable_placements, granules)
    def test_changes_only_offset_layer_stride_and_size(
        self, placement: Placement, granule: int
    ) -> None:
        padded = pad_kv_cache_segments(placement.config, placement.layout, granule)
        for tensor, original in zip(
            padded.kv_cache_tensors, placement.config.kv_cache_tensors, strict=True
        ):
            tensor.offset = original.offset
            tensor.layer_stride = original.layer_stride
            tensor.size = original.size
        assert padded == placement.config

    @forall(placements.filter(one_run_per_layer), granules)
    def test_never_touches_the_input(self, placement: Placement, granule: int) -> None:
        before = copy.deepcopy(placement.config)
        padded = pad_kv_cache_segments(placement.config, placement.layout, granule)
        # Nor does whatever the worker then does to its own copy.
        for tensor in padded.kv_cache_tensors:
            tensor.layers.append("added")
            tensor.offset += 1
        padded.kv_cache_tensors.clear()
        for group in padded.kv_cache_groups:
            group.layer_names.append("added")
            if isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs):
                group.kv_cache_spec.kv_cache_specs.clear()
        padded.kv_cache_groups.clear()
        assert placement.config == before

    @forall(paddable_placements, granules)
    def test_starts_every_segment_on_a_granule(
        self, placement: Placement, granule: int
    ) -> None:
        padded = pad_kv_cache_segments(placement.config, placement.layout, granule)
        segments = kv_cache_segments(padded, placement.layout)
        assert [segment.offset % granule for segment in segments] == [0] * len(segments)

    @forall(paddable_placements, granules)
    def test_keeps_the_segments_in_order_and_apart(
        self, placement: Placement, granule: int
    ) -> None:
        before = kv_cache_segments(placement.config, placement.layout)
        padded = pad_kv_cache_segments(placement.config, placement.layout, granule)
        after = kv_cache_segments(padded, placement.layout)
        assert [(s.block_stride, s.num_blocks) for s in after] == [
            (s.block_stride, s.num_blocks) for s in before
        ]
        for low, high in itertools.pairwise(after):
            assert low.end <= high.offset

    @forall(paddable_placements, granules)
    def test_keeps_aliases_aliases_and_distinct_layers_distinct(
        self, placement: Placement, granule: int
    ) -> None:
        padded = pad_kv_cache_segments(placement.config, placement.layout, granule)
        assert aliasing(padded) == aliasing(placement.config)

    @forall(paddable_placements, granules)
    def test_allocates_whole_granules_less_than_one_wasted_a_segment(
        self, placement: Placement, granule: int
    ) -> None:
        padded = pad_kv_cache_segments(placement.config, placement.layout, granule)
        segments = kv_cache_segments(padded, placement.layout)
        size = allocation_bytes(padded)
        assert size % granule == 0
        assert segments[-1].end <= size
        used = sum(segment.nbytes for segment in segments)
        assert 0 <= size - used < granule * len(segments)

    @forall(placements.filter(one_run_per_layer), granules)
    def test_is_idempotent(self, placement: Placement, granule: int) -> None:
        once = pad_kv_cache_segments(placement.config, placement.layout, granule)
        assert pad_kv_cache_segments(once, placement.layout, granule) == once

    @forall(block_outermost_placements, granules)
    def test_leaves_block_outermost_placements_equal(
        self, placement: Placement, granule: int
    ) -> None:
        padded = pad_kv_cache_segments(placement.config, placement.layout, granule)
        assert padded == placement.config
        assert padded is not placement.config

    @forall(attention_specs(), block_counts, st.integers(1, 8), granules)
    def test_pads_head_runs_only_where_it_needs_no_head_stride(
        self, spec, num_blocks: int, num_layers: int, granule: int
    ) -> None:
        config = plan_uniform(num_layers, num_blocks, LHBNC, spec)
        run = num_blocks * spec.page_size_bytes // spec.num_heads
        if spec.num_heads > 1 and run % granule:
            with pytest.raises(ValueError, match="no head stride"):
                pad_kv_cache_segments(config, LHBNC, granule)
            return
        padded = pad_kv_cache_segments(config, LHBNC, granule)
        segments = kv_cache_segments(padded, LHBNC)
        assert len(segments) == num_layers * spec.num_heads
        assert not any(segment.offset % granule for segment in segments)

    @pytest.mark.parametrize("num_indexers", [1, 2])
    def test_spaces_each_tensor_by_its_own_padded_region(
        self, num_indexers: int
    ) -> None:
        # MLA with its indexer: 18 KiB and 4 KiB pages, ten blocks, 64 KiB granule.
        latent, indexer = (
            MLAAttentionSpec(
                block_size=16, num_kv_heads=1, head_size=head_size, dtype=torch.bfloat16
            )
            for head_size in (576, 128)
        )
        specs = dict.fromkeys(layer_names("latent", 3), latent)
        specs |= dict.fromkeys(layer_names("indexer", num_indexers), indexer)
        config = plan([group_of(specs)], LBHNC, num_blocks=10)
        padded = pad_kv_cache_segments(config, LBHNC, 64 * KIB)
        size = 3 * 192 + num_indexers * 64
        assert [
            (t.offset // KIB, t.layer_stride // KIB, t.size // KIB)
            for t in padded.kv_cache_tensors
        ] == [(0, 192, size), (576, 64, size)]

    def test_overlays_groups_of_five_and_three_layers(self) -> None:
        spec = attention_spec()
        groups = [
            group_of(dict.fromkeys(layer_names(name, count), spec))
            for name, count in (("a", 5), ("b", 3))
        ]
        padded = pad_kv_cache_segments(plan(groups, LBHNC, 102), LBHNC, 2 * MIB)
        starts = layer_starts(padded)
        assert [starts[name] for name in layer_names("a", 5)] == [
            index * 2 * MIB for index in range(5)
        ]
        assert [starts[name] for name in layer_names("b", 3)] == [0, 2 * MIB, 4 * MIB]
        assert len(kv_cache_segments(padded, LBHNC)) == 5

    def test_refuses_what_one_layer_stride_cannot_describe(self) -> None:
        # Layers a0, a1, a2 at equal distances, b between the first two only.
        spec = attention_spec(num_heads=1)
        page = spec.page_size_bytes
        tensors = [
            KVCacheTensor(5 * page, ["a0", "a1", "a2"], 2 * page, page, 0),
            KVCacheTensor(5 * page, ["b"], page, page, page),
        ]
        groups = [group_of(dict.fromkeys(["a0", "a1", "a2", "b"], spec))]
        config = KVCacheConfig(1, tensors, groups)
        with pytest.raises(ValueError, match=r"'a0' to 'a2'.*'a1' and 'a2'.*\['b'\]"):
            pad_kv_cache_segments(config, LBHNC, 2 * MIB)

    def test_carries_what_subclasses_add_and_drops_what_was_cached(self) -> None:
        @dataclass
        class LaterTensor(KVCacheTensor):
            note: str = "tensor"
            tags: list[str] = field(default_factory=list)

        @dataclass
        class LaterConfig(KVCacheConfig):
            note: str = "config"
            derived: int = field(init=False, default=0)

        config = plan_uniform(4, 102)
        tensor = LaterTensor(**vars(config.kv_cache_tensors[0]), tags=["x"])
        later = LaterConfig(**vars(config) | {"kv_cache_tensors": [tensor]}, note="n")
        later.derived = 7
        _ = later.transfer_groups  # cached from now on
        padded = pad_kv_cache_segments(later, LBHNC, 2 * MIB)
        assert type(padded) is LaterConfig
        assert (padded.note, padded.derived) == ("n", 7)
        assert type(padded.kv_cache_tensors[0]) is LaterTensor
        assert padded.kv_cache_tensors[0].tags == ["x"]
        assert padded.kv_cache_tensors[0].tags is not tensor.tags
        padded.kv_cache_groups.clear()
        assert padded.transfer_groups == ()

    def test_accepts_a_model_without_a_kv_cache(self) -> None:
        config = plan([], LBHNC, num_blocks=1)
        for layout in KVCacheLayout:
            assert pad_kv_cache_segments(config, layout, 2 * MIB) == config
            assert kv_cache_segments(config, layout) == []

    @pytest.mark.parametrize(("tensors", "layers"), [(1, 10_000), (10_000, 1)])
    def test_takes_ten_thousand_layers_in_linear_time(
        self, tensors: int, layers: int
    ) -> None:
        # Tens of milliseconds of CPU time; quadratic code takes many seconds.
        spec = attention_spec(num_heads=1)
        region = 102 * spec.page_size_bytes
        names = layer_names("model", tensors * layers)
        config = KVCacheConfig(
            102,
            [
                KVCacheTensor(
                    len(names) * region,
                    names[index * layers : (index + 1) * layers],
                    region,
                    spec.page_size_bytes,
                    index * layers * region,
                )
                for index in range(tensors)
            ],
            [group_of(dict.fromkeys(names, spec))],
        )
        start = time.process_time()
        padded = pad_kv_cache_segments(config, LHBNC, 2 * MIB)
        segments = kv_cache_segments(padded, LHBNC)
        assert blocks_within(segments, 10_000 * 2 * MIB, 2 * MIB) == 102
        assert time.process_time() - start < 3


class TestSegments:
    @forall(placements)
    def test_hold_every_byte_of_every_block_vllm_views(
        self, placement: Placement
    ) -> None:
        assert_blocks_lie_in_segments(placement.config, placement.layout)

    @forall(paddable_placements, granules)
    def test_hold_every_block_of_a_padded_placement_too(
        self, placement: Placement, granule: int
    ) -> None:
        padded = pad_kv_cache_segments(placement.config, placement.layout, granule)
        assert_blocks_lie_in_segments(padded, placement.layout)

    @forall(layer_outermost_placements)
    def test_are_one_for_each_region_or_head_run(self, placement: Placement) -> None:
        heads = (
            1
            if placement.layout.is_block_compact
            else placement.config.kv_cache_groups[0].kv_cache_spec.num_heads
        )
        segments = kv_cache_segments(placement.config, placement.layout)
        assert len(segments) == len(aliasing(placement.config)) * heads
        assert segments == sorted(segments, key=lambda segment: segment.offset)

    @forall(block_outermost_placements)
    def test_are_the_whole_allocation_where_blocks_are_outermost(
        self, placement: Placement
    ) -> None:
        (segment,) = kv_cache_segments(placement.config, placement.layout)
        assert segment.offset == 0
        assert segment.end == allocation_bytes(placement.config)
        assert segment.num_blocks == placement.config.num_blocks

    @forall(placements)
    def test_take_as_many_bytes_a_block_as_vllm_plans_with(
        self, placement: Placement
    ) -> None:
        # Overlaid placements built by hand have gaps, which no block uses.
        segments = kv_cache_segments(placement.config, placement.layout)
        planned = allocation_bytes(placement.config) // placement.config.num_blocks
        assert bytes_per_block(segments) <= planned

    def test_know_their_bytes(self) -> None:
        segment = Segment(offset=100, block_stride=30, num_blocks=4)
        assert (segment.nbytes, segment.end) == (120, 220)
        assert [segment.committed_bytes(n) for n in (0, 1, 4)] == [0, 30, 120]
        for count in (-1, 5):
            with pytest.raises(ValueError, match=f"{count} blocks of a segment of 4"):
                segment.committed_bytes(count)


def assert_blocks_lie_in_segments(config: KVCacheConfig, layout: KVCacheLayout) -> None:
    """Commit n blocks of every segment, and a kernel may use the first n blocks."""
    segments = {s.offset: s for s in kv_cache_segments(config, layout)}
    raw = torch.empty(allocation_bytes(config), dtype=torch.int8, device="meta")
    starts = layer_starts(config)
    for layer, view in views_of(config, layout, raw).items():
        num_blocks, num_heads = view.shape[:2]
        assert num_blocks == config.num_blocks
        for block in {0, num_blocks // 2, num_blocks - 1}:
            if layout.is_block_outermost:
                first, end = segments[0], segments[0].end
                parts = [(segments[0], view[block])]
            elif layout.is_block_compact:
                parts = [(segments[starts[layer]], view[block])]
            else:
                run = segments[starts[layer]].nbytes
                parts = [
                    (segments[starts[layer] + head * run], view[block, head])
                    for head in range(num_heads)
                ]
            for segment, part in parts:
                first, end = byte_range(part)
                assert segment.offset + segment.committed_bytes(block) <= first
                assert end <= segment.offset + segment.committed_bytes(block + 1)


@pytest.mark.parametrize("layout", [LBHNC, KVCacheLayout.LBNHC, LHBNC])
def test_vllm_reads_back_what_it_wrote_through_padded_views(
    layout: KVCacheLayout,
) -> None:
    spec = attention_spec(num_heads=1, dtype=torch.int32)
    config = plan_uniform(num_layers=5, num_blocks=7, layout=layout, spec=spec)
    padded = pad_kv_cache_segments(config, layout, 64 * KIB)
    raw = torch.zeros(allocation_bytes(padded), dtype=torch.int8)
    views = views_of(padded, layout, raw)
    for index, view in enumerate(views.values()):
        for block in range(7):
            view[block] = 1 + 7 * index + block
    for index, view in enumerate(views.values()):
        for block in range(7):
            assert (view[block] == 1 + 7 * index + block).all()


class TestTheProblemsNumbers:
    """20 KiB pages, 32 layers, 2 MiB granules (vLLM issue 65204), and the demo's."""

    @pytest.mark.parametrize(
        ("page", "heads", "layers"), [(20 * KIB, 5, 32), (12 * KIB, 3, 30)]
    )
    @pytest.mark.parametrize(("blocks", "rounded"), [(102, 0), (1331, 1024)])
    def test_padding_keeps_what_rounding_loses(
        self, page: int, heads: int, layers: int, blocks: int, rounded: int
    ) -> None:
        config = plan_uniform(layers, blocks, spec=attention_spec(num_heads=heads))
        padded = pad_kv_cache_segments(config, LBHNC, 2 * MIB)
        segments = kv_cache_segments(padded, LBHNC)
        assert bytes_per_block(segments) == page * layers
        assert {segment.num_blocks for segment in segments} == {blocks}
        assert len(segments) == layers
        assert block_alignment(segments, 2 * MIB) == 512
        assert rounded_blocks(segments, blocks, 2 * MIB) == rounded

    def test_costs_one_partial_granule_a_layer(self) -> None:
        config = plan_uniform(32, 102)
        padded = pad_kv_cache_segments(config, LBHNC, 2 * MIB)
        # 102 blocks of 20 KiB are 1.99 MiB: one granule each of 32 layers.
        assert allocation_bytes(config) == 102 * 20 * KIB * 32
        assert allocation_bytes(padded) == 64 * MIB
        assert padding_bytes(config, padded) == 64 * MIB - 102 * 20 * KIB * 32
        segments = kv_cache_segments(padded, LBHNC)
        assert physical_bytes(segments, 102, 2 * MIB) == 64 * MIB
        assert blocks_within(segments, 64 * MIB, 2 * MIB) == 102
        assert blocks_within(segments, 64 * MIB - 1, 2 * MIB) == 0

    def test_shows_how_far_awkward_strides_round(self) -> None:
        # A 1 KiB step in the page needs 2048 blocks to come out even.
        segment = Segment(offset=0, block_stride=181 * KIB, num_blocks=10_000)
        assert block_alignment([segment], 2 * MIB) == 2048
        assert rounded_blocks([segment], 2047, 2 * MIB) == 0


@st.composite
def segment_lists(draw: st.DrawFn) -> list[Segment]:
    num_blocks = draw(st.integers(1, 60))
    segments, end = [], 0
    for _ in range(draw(st.integers(1, 6))):
        offset = end + draw(st.integers(0, 3000))
        segments.append(Segment(offset, draw(st.integers(1, 700)), num_blocks))
        end = segments[-1].end
    return segments


small_granules = st.integers(0, 12).map(lambda bits: 1 << bits)


class TestFootprint:
    @forall(segment_lists(), small_granules, st.data())
    def test_counts_each_touched_granule_once(
        self, segments: list[Segment], granule: int, data: st.DataObject
    ) -> None:
        count = data.draw(st.integers(0, segments[0].num_blocks))
        touched = set()
        for s in segments:
            committed = range(s.offset, s.offset + s.committed_bytes(count))
            touched.update(byte // granule for byte in committed)
        assert physical_bytes(segments, count, granule) == len(touched) * granule
        shuffled = data.draw(st.permutations(segments))
        assert physical_bytes(shuffled, count, granule) == len(touched) * granule

    @forall(segment_lists(), small_granules, st.integers(-10, 300_000))
    def test_fits_the_largest_count(
        self, segments: list[Segment], granule: int, num_bytes: int
    ) -> None:
        capacity = segments[0].num_blocks
        fitting = [
            count
            for count in range(1, capacity + 1)
            if physical_bytes(segments, count, granule) <= num_bytes
        ]
        assert blocks_within(segments, num_bytes, granule) == max(fitting, default=0)

    @forall(paddable_placements, granules, st.data())
    def test_of_a_padded_placement_rounds_each_segment_up(
        self, placement: Placement, granule: int, data: st.DataObject
    ) -> None:
        padded = pad_kv_cache_segments(placement.config, placement.layout, granule)
        segments = kv_cache_segments(padded, placement.layout)
        count = data.draw(st.integers(0, placement.config.num_blocks))
        assert physical_bytes(segments, count, granule) == sum(
            -(-segment.committed_bytes(count) // granule) * granule
            for segment in segments
        )

    @forall(segment_lists(), small_granules, st.integers(0, 20_000))
    def test_rounding_finds_the_largest_count_of_whole_granules(
        self, segments: list[Segment], granule: int, num_blocks: int
    ) -> None:
        rounded = rounded_blocks(segments, num_blocks, granule)
        strides = [segment.block_stride for segment in segments]
        assert rounded == max(
            count
            for count in range(num_blocks, -1, -1)
            if not any(count * stride % granule for stride in strides)
        )

    def test_of_nothing(self) -> None:
        segments = kv_cache_segments(plan_uniform(2, 5), LBHNC)
        assert physical_bytes(segments, 0, 2 * MIB) == 0
        assert physical_bytes([], 0, 2 * MIB) == 0
        assert blocks_within(segments, -1, 2 * MIB) == 0
        with pytest.raises(ValueError, match="no segments"):
            blocks_within([], 2 * MIB, 2 * MIB)


class TestBadInput:
    """One line that says what was found, what was expected and what to do."""

    @pytest.mark.parametrize(
        "granule", [0, -4096, 3, 2 * MIB + 1, 4096.0, "2MiB", None]
    )
    def test_granule_that_is_no_power_of_two(self, granule) -> None:
        config = plan_uniform(2, 5)
        segments = kv_cache_segments(config, LBHNC)
        for call in (
            lambda: pad_kv_cache_segments(config, LBHNC, granule),
            lambda: physical_bytes(segments, 1, granule),
            lambda: blocks_within(segments, 1, granule),
            lambda: block_alignment(segments, granule),
            lambda: rounded_blocks(segments, 1, granule),
        ):
            with pytest.raises(ValueError, match=f"power of two.*got {granule!r}"):
                call()

    @pytest.mark.parametrize("num_blocks", [0, -1])
    @pytest.mark.parametrize("layout", KVCacheLayout)
    def test_block_count_that_is_not_positive(
        self, layout: KVCacheLayout, num_blocks: int
    ) -> None:
        config = dataclasses.replace(plan_uniform(2, 5, layout), num_blocks=num_blocks)
        assert_refused(config, layout, f"positive block count, got {num_blocks}")

    def test_footprint_of_a_negative_block_count(self) -> None:
        segments = kv_cache_segments(plan_uniform(2, 5), LBHNC)
        for count in (-1, 6):
            with pytest.raises(ValueError, match=f"commit {count} blocks"):
                physical_bytes(segments, count, 2 * MIB)
        with pytest.raises(ValueError, match="not negative, got -1"):
            rounded_blocks(segments, -1, 2 * MIB)

    @pytest.mark.parametrize("layout", [LBHNC, BLHNC])
    def test_tensors_that_do_not_share_one_allocation(
        self, layout: KVCacheLayout
    ) -> None:
        config = two_tensors(layout)
        config.kv_cache_tensors[1].size += 4096
        assert_refused(config, layout, r"share one allocation.*sizes are \[\d+, \d+\]")

    @pytest.mark.parametrize("change", [4096, -(10**9)])
    def test_tensor_outside_the_allocation(self, change: int) -> None:
        config = two_tensors(LBHNC)
        config.kv_cache_tensors[1].offset += change
        assert_refused(config, LBHNC, "'b.layers.0.attn'.*not inside the allocation")

    @pytest.mark.parametrize("layout", BLOCK_OUTERMOST)
    def test_layer_outside_its_block(self, layout: KVCacheLayout) -> None:
        config = plan_uniform(2, 5, layout)
        config.kv_cache_tensors[0].offset += 40 * KIB
        assert_refused(config, layout, "outside the block of 40960 bytes")

    def test_layers_that_overlap_partially(self) -> None:
        config = two_tensors(LBHNC)
        config.kv_cache_tensors[1].offset -= 4096
        assert_refused(config, LBHNC, "'a.layers.1.attn'.*'b.layers.0.attn'.*partially")

    def test_layers_that_overlap_within_their_tensor(self) -> None:
        config = plan_uniform(3, 5)
        config.kv_cache_tensors[0].layer_stride -= 1
        assert_refused(config, LBHNC, "must not overlap its own layers")

    def test_aliased_tensors_with_different_strides(self) -> None:
        config = two_tensors(LBHNC)
        config.kv_cache_tensors[1].offset = 0
        assert_refused(
            config, LBHNC, "'a.layers.0.attn' and 'b.layers.0.attn' alias.*strides"
        )

    @pytest.mark.parametrize("layout", BLOCK_OUTERMOST)
    def test_placement_planned_for_another_layout(self, layout: KVCacheLayout) -> None:
        assert_refused(plan_uniform(2, 5, LBHNC), layout, "another layout")

    @pytest.mark.parametrize("layout", LAYER_OUTERMOST)
    def test_block_outermost_placement_called_layer_outermost(
        self, layout: KVCacheLayout
    ) -> None:
        config = plan_uniform(2, 5, BLHNC, attention_spec(num_heads=1))
        assert_refused(config, layout, "must not overlap")

    def test_head_runs_planned_for_another_block_count(self) -> None:
        config = dataclasses.replace(plan_uniform(2, 5, LHBNC), num_blocks=4)
        assert_refused(config, LHBNC, "another count than 4 blocks")

    @pytest.mark.parametrize("layout", ["LBHNC", None, 3, object()])
    def test_unknown_layout(self, layout) -> None:
        assert_refused(plan_uniform(2, 5), layout, "unknown KV cache layout")

    def test_hisparse(self) -> None:
        config = plan_uniform(2, 5, BLHNC)
        config.kv_cache_tensors[0].host_resident = True
        assert_refused(config, BLHNC, "HiSparse is not supported")
        config = dataclasses.replace(
            plan_uniform(2, 5, BLHNC), hisparse_host_num_blocks=5
        )
        assert_refused(config, BLHNC, "HiSparse is not supported")

    @pytest.mark.parametrize("stride", ["block_stride", "layer_stride"])
    def test_stride_that_is_not_positive(self, stride: str) -> None:
        config = plan_uniform(2, 5)
        setattr(config.kv_cache_tensors[0], stride, 0)
        assert_refused(config, LBHNC, "strides must be positive")

    def test_tensor_without_layers(self) -> None:
        config = plan_uniform(2, 5)
        config.kv_cache_tensors[0].layers.clear()
        assert_refused(config, LBHNC, "without layers")

    def test_padding_between_different_block_counts(self) -> None:
        with pytest.raises(ValueError, match="5 blocks, the padded one 6"):
            padding_bytes(plan_uniform(2, 5), plan_uniform(2, 6))


def two_tensors(layout: KVCacheLayout) -> KVCacheConfig:
    """Two layers of 20 KiB pages, then two of 4 KiB pages, five blocks."""
    specs = dict.fromkeys(layer_names("a", 2), attention_spec())
    specs |= dict.fromkeys(layer_names("b", 2), attention_spec(num_heads=1))
    return plan([group_of(specs)], layout, num_blocks=5)


def assert_refused(config: KVCacheConfig, layout: KVCacheLayout, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        kv_cache_segments(config, layout)
    with pytest.raises(ValueError, match=match):
        pad_kv_cache_segments(config, layout, 2 * MIB)


def test_layers_without_a_group_are_taken_by_arithmetic() -> None:
    """A region full of runs is that many runs; one with room to spare is padded."""
    config = plan_uniform(3, 10, LHBNC, attention_spec(num_heads=4))
    config.kv_cache_groups.clear()
    assert len(kv_cache_segments(config, LHBNC)) == 3 * 4
    config = plan_uniform(3, 10, LHBNC, attention_spec(num_heads=1))
    padded = pad_kv_cache_segments(config, LHBNC, 2 * MIB)
    padded.kv_cache_groups.clear()
    assert len(kv_cache_segments(padded, LHBNC)) == 3


def test_a_spec_tells_one_padded_run_from_many() -> None:
    """512 runs of 4 KiB would fill the padded region just as one does."""
    spec = attention_spec(num_heads=1)
    config = plan_uniform(3, 1, LHBNC, spec)
    padded = pad_kv_cache_segments(config, LHBNC, 2 * MIB)
    assert kv_cache_segments(padded, LHBNC) == [
        Segment(index * 2 * MIB, 4 * KIB, 1) for index in range(3)
    ]


def test_sliding_window_alias_of_a_later_region() -> None:
    """A tensor that starts at the third region of another moves with it."""
    full = attention_spec()
    sliding = SlidingWindowSpec(
        block_size=16, num_kv_heads=5, head_size=64, dtype=torch.bfloat16,
        sliding_window=512,
    )  # fmt: skip
    config = plan_uniform(6, 102, spec=full)
    (tensor,) = config.kv_cache_tensors
    late = dataclasses.replace(
        tensor, layers=["s0", "s1"], offset=2 * tensor.layer_stride,
        layer_stride=3 * tensor.layer_stride,
    )  # fmt: skip
    config.kv_cache_tensors.append(late)
    config.kv_cache_groups.append(KVCacheGroupSpec(["s0", "s1"], sliding))
    padded = pad_kv_cache_segments(config, LBHNC, 2 * MIB)
    starts = layer_starts(padded)
    assert (starts["s0"], starts["s1"]) == (4 * MIB, 10 * MIB)
    assert len(kv_cache_segments(padded, LBHNC)) == 6


def test_import_needs_neither_vllm_nor_torch() -> None:
    """So that a broken vLLM can still be diagnosed."""
    code = (
        "import sys, vllm_kvpad.placement;"
        "print({'torch', 'vllm', 'numpy'} & set(sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (result.stdout, result.stderr) == ("set()\n", "")
