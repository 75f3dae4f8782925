"""Where each layer's KV cache lies, and how to place it so that RDMA can have it.

Pure arithmetic over vLLM's ``KVCacheConfig``: no device, no driver, no torch, and
no vLLM at import. Three questions are answered here and nowhere else:

* which contiguous ranges (*segments*) does a configuration divide its allocation
  into (:func:`kv_cache_segments`);
* where do they go when each must start on a granule, so that the physical memory
  behind the first n blocks of a segment can be one chunk that is its alone
  (:func:`pad_kv_cache_segments`);
* how many physical bytes do n blocks take, how many blocks fit into so many bytes,
  and what would rounding block counts have left (the footprint functions).

Sizes, strides and offsets are in bytes; a *granule* is a power of two, in bytes.
Every public function is linear in the number of layers and raises ``ValueError``
on input it cannot be right about, before it has computed anything.

How vLLM places layers is documented at ``KVCacheTensor`` (v1/kv_cache_interface.py):
block b of layer l starts at ``offset + l * layer_stride + b * block_stride``.
"""

from __future__ import annotations

import bisect
import copy
import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor
    from vllm.v1.kv_cache_layout import KVCacheLayout

__all__ = [
    "Segment",
    "kv_cache_segments",
    "pad_kv_cache_segments",
    "allocation_bytes",
    "padding_bytes",
    "bytes_per_block",
    "physical_bytes",
    "blocks_within",
    "block_alignment",
    "rounded_blocks",
]


@dataclass(frozen=True, slots=True)
class Segment:
    """A contiguous range of the allocation that holds ``num_blocks`` blocks.

    Its first n blocks are its first ``n * block_stride`` bytes, which is what makes
    it the unit of commits and of registration: a growing block count only ever
    extends a segment's backed bytes at the end.
    """

    offset: int
    """Bytes from the start of the allocation to block 0."""
    block_stride: int
    """Bytes between consecutive blocks."""
    num_blocks: int
    """Blocks the segment has room for."""

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return self.num_blocks * self.block_stride

    @property
    def end(self) -> int:
        """Bytes from the start of the allocation to the byte after the last block."""
        return self.offset + self.nbytes

    def committed_bytes(self, num_blocks: int) -> int:
        """Bytes of the first ``num_blocks`` blocks.

        Raises:
            ValueError: ``num_blocks`` is negative or more than the segment holds.
        """
        if not 0 <= num_blocks <= self.num_blocks:
            raise ValueError(
                f"cannot commit {num_blocks} blocks of a segment of "
                f"{self.num_blocks} blocks"
            )
        return num_blocks * self.block_stride


# --- Placement ----------------------------------------------------------------------


def kv_cache_segments(
    kv_cache_config: KVCacheConfig, layout: KVCacheLayout
) -> list[Segment]:
    """Return the segments of a placement in address order, aliased ones once.

    * Block-outermost layouts (BLHNC, BLNHC, BHLNC): one, the whole allocation.
    * Layer-outermost with heads inside the block (LBHNC, LBNHC): one per distinct
      layer region.
    * LHBNC: one per head of each distinct layer region, because a head's blocks
      are contiguous there and a layer's are not.

    Works on padded and unpadded configurations alike, and returns no segments for a
    model without a KV cache.

    Raises:
        ValueError: the layout is unknown; the block count is not positive; the
            tensors do not share one allocation, lie outside it, overlap partially,
            or alias each other with different strides; the configuration is
            HiSparse's.
    """
    _check_config(kv_cache_config)
    if _is_block_outermost(layout):
        return _block_outermost_segments(kv_cache_config)
    return [
        segment
        for region in _layer_regions(kv_cache_config, layout)
        for segment in region.segments
    ]


def pad_kv_cache_segments(
    kv_cache_config: KVCacheConfig, layout: KVCacheLayout, granule: int
) -> KVCacheConfig:
    """Return a copy whose segments each start on a multiple of ``granule``.

    Distinct layer regions keep their order and are laid one after another, each
    rounded up to whole granules; layers that shared a region still do. Only
    ``offset``, ``layer_stride`` and ``size`` of the tensors change. ``size`` becomes
    the padded allocation, a whole number of granules, so that the chunk behind the
    last segment lies inside it too. Padding spends address space only, less than
    one granule a region.

    Block-outermost placements come back equal to the input: their one segment
    starts at 0. Padding a padded configuration changes nothing. The result shares
    no mutable state with the input.

    Raises:
        ValueError: as :func:`kv_cache_segments`, and: ``granule`` is not a positive
            power of two; a layer has several head runs (LHBNC) that are not whole
            granules; or tensors interleave such that one ``layer_stride`` cannot
            describe the padded positions of all of a tensor's layers.
    """
    _check_granule(granule)
    _check_config(kv_cache_config)
    if _is_block_outermost(layout):
        _block_outermost_segments(kv_cache_config)  # for its checks
        return _copy_config(kv_cache_config)

    regions = _layer_regions(kv_cache_config, layout)
    padded_start: dict[int, int] = {}
    size = 0
    for region in regions:
        if region.num_runs > 1 and region.run_bytes % granule:
            raise ValueError(
                f"layer {region.layer!r} has {region.num_runs} head runs of "
                f"{region.run_bytes} bytes in layout {layout.name}; they cannot "
                f"each start on a granule of {granule} bytes, because KVCacheTensor "
                "has no head stride (vLLM derives it from the block count). Use a "
                "layout that keeps the heads of a block together, such as LBHNC."
            )
        padded_start[region.start] = size
        size += _round_up(region.nbytes, granule)

    padded = _copy_config(kv_cache_config)
    for tensor in padded.kv_cache_tensors:
        layer_stride = _padded_layer_stride(tensor, regions, padded_start, granule)
        tensor.offset = padded_start[tensor.offset]
        tensor.layer_stride = layer_stride
        tensor.size = size
    return padded


def allocation_bytes(kv_cache_config: KVCacheConfig) -> int:
    """Bytes of the one allocation that all tensors are placed in, 0 without any.

    Raises:
        ValueError: the tensors give different sizes.
    """
    sizes = {tensor.size for tensor in kv_cache_config.kv_cache_tensors}
    if len(sizes) > 1:
        raise ValueError(
            "KV cache tensors must share one allocation, but their sizes are "
            f"{sorted(sizes)} bytes"
        )
    return sizes.pop() if sizes else 0


def padding_bytes(original: KVCacheConfig, padded: KVCacheConfig) -> int:
    """Bytes of address space by which ``padded`` is larger than ``original``.

    Raises:
        ValueError: the block counts differ, so that the difference says nothing
            about padding; or as :func:`allocation_bytes`.
    """
    if original.num_blocks != padded.num_blocks:
        raise ValueError(
            "cannot tell padding from capacity: the original has "
            f"{original.num_blocks} blocks, the padded one {padded.num_blocks}"
        )
    return allocation_bytes(padded) - allocation_bytes(original)


# --- Footprint ----------------------------------------------------------------------


def bytes_per_block(segments: Iterable[Segment]) -> int:
    """Bytes that one block takes over all segments, before granule rounding."""
    return sum(segment.block_stride for segment in segments)


def physical_bytes(segments: Iterable[Segment], num_blocks: int, granule: int) -> int:
    """Bytes to map so that the first ``num_blocks`` blocks of each segment are backed.

    A granule that two segments share (unpadded neighbours) counts once.

    Raises:
        ValueError: ``granule`` is not a positive power of two; ``num_blocks`` is
            negative or more than a segment holds.
    """
    _check_granule(granule)
    granules = 0
    next_unmapped = 0  # the first granule that no earlier segment has touched
    for segment in sorted(segments, key=lambda segment: segment.offset):
        nbytes = segment.committed_bytes(num_blocks)
        if not nbytes:
            continue
        first = max(segment.offset // granule, next_unmapped)
        end = -(-(segment.offset + nbytes) // granule)
        if end > first:
            granules += end - first
            next_unmapped = end
    return granules * granule


def blocks_within(segments: Sequence[Segment], num_bytes: int, granule: int) -> int:
    """Return the largest block count whose physical footprint fits ``num_bytes``.

    At most what every segment has room for; 0 if not even one block fits, which
    includes a negative ``num_bytes`` (a budget that is already overdrawn).

    Raises:
        ValueError: ``granule`` is not a positive power of two; no segments, so
            there is no count to return.
    """
    _check_granule(granule)
    if not segments:
        raise ValueError("no segments: a cache without layers holds no blocks")
    capacity = min(segment.num_blocks for segment in segments)
    # The footprint never shrinks with the count, so its values are sorted.
    return bisect.bisect_right(
        range(1, capacity + 1),
        num_bytes,
        key=lambda num_blocks: physical_bytes(segments, num_blocks, granule),
    )


def block_alignment(segments: Iterable[Segment], granule: int) -> int:
    """Return the block count whose multiples fill whole granules in every segment.

    The rule of vLLM's own extensible cache (vLLM PR 56492): the least common
    multiple over the strides of ``granule / gcd(granule, stride)``.

    Raises:
        ValueError: ``granule`` is not a positive power of two.
    """
    _check_granule(granule)
    strides = {segment.block_stride for segment in segments}
    return math.lcm(*(granule // math.gcd(granule, stride) for stride in strides))


def rounded_blocks(segments: Iterable[Segment], num_blocks: int, granule: int) -> int:
    """Blocks that would be left of ``num_blocks`` if counts were rounded, not padded.

    Raises:
        ValueError: ``granule`` is not a positive power of two; ``num_blocks`` is
            negative.
    """
    alignment = block_alignment(segments, granule)
    if num_blocks < 0:
        raise ValueError(f"block counts are not negative, got {num_blocks}")
    return num_blocks - num_blocks % alignment


# --- Regions: what one layer takes in a layer-outermost placement -------------------


@dataclass(frozen=True, slots=True)
class _Region:
    """The bytes of one layer, or of several that alias each other exactly."""

    start: int
    block_stride: int
    num_blocks: int
    num_runs: int
    """Block-strided runs, one after another: the heads in LHBNC, otherwise 1."""
    layer: str
    """The first layer placed here, for messages."""

    @property
    def run_bytes(self) -> int:
        return self.num_blocks * self.block_stride

    @property
    def nbytes(self) -> int:
        return self.num_runs * self.run_bytes

    @property
    def end(self) -> int:
        return self.start + self.nbytes

    @property
    def segments(self) -> list[Segment]:
        return [
            Segment(start, self.block_stride, self.num_blocks)
            for start in range(self.start, self.end, self.run_bytes)
        ]


def _layer_regions(
    kv_cache_config: KVCacheConfig, layout: KVCacheLayout
) -> list[_Region]:
    """Distinct regions of a layer-outermost placement, checked, in address order."""
    num_blocks = kv_cache_config.num_blocks
    size = allocation_bytes(kv_cache_config)
    specs = {} if layout.is_block_compact else _layer_specs(kv_cache_config)
    by_start: dict[int, _Region] = {}
    for tensor in kv_cache_config.kv_cache_tensors:
        num_runs = (
            1
            if layout.is_block_compact
            else _num_runs(tensor, specs.get(tensor.layers[0]), num_blocks)
        )
        nbytes = num_runs * num_blocks * tensor.block_stride
        if len(tensor.layers) > 1 and tensor.layer_stride < nbytes:
            raise ValueError(
                f"{_describe(tensor)}: layers lie {tensor.layer_stride} bytes apart "
                f"but each takes {nbytes} bytes ({num_blocks} blocks of "
                f"{tensor.block_stride} bytes, {num_runs} runs); a placement of "
                f"layout {layout.name} must not overlap its own layers"
            )
        end = tensor.offset + (len(tensor.layers) - 1) * tensor.layer_stride + nbytes
        if tensor.offset < 0 or end > size:
            raise ValueError(
                f"{_describe(tensor)}: bytes {tensor.offset} to {end} are not "
                f"inside the allocation of {size} bytes"
            )
        for layer, start in zip(tensor.layers, _layer_starts(tensor), strict=True):
            known = by_start.get(start)
            if known is None:
                by_start[start] = _Region(
                    start, tensor.block_stride, num_blocks, num_runs, layer
                )
            elif (known.block_stride, known.num_runs) != (
                tensor.block_stride,
                num_runs,
            ):
                raise ValueError(
                    f"layers {known.layer!r} and {layer!r} alias each other at byte "
                    f"{start} with different strides: {known.num_runs} runs of "
                    f"{known.block_stride}-byte blocks and {num_runs} runs of "
                    f"{tensor.block_stride}-byte blocks; the first n blocks of both "
                    "would not be the same bytes"
                )
    regions = sorted(by_start.values(), key=lambda region: region.start)
    for below, above in itertools.pairwise(regions):
        if below.end > above.start:
            raise ValueError(
                f"layers {below.layer!r} (bytes {below.start} to {below.end}) and "
                f"{above.layer!r} (bytes {above.start} to {above.end}) overlap "
                "partially; layers must share a region exactly or not at all"
            )
    return regions


def _num_runs(tensor: KVCacheTensor, spec: Any, num_blocks: int) -> int:
    """Head runs in each layer region of ``tensor`` where heads lie outside blocks.

    ``create_kv_cache_views`` (v1/kv_cache_interface.py) puts the heads of an LHBNC
    layer ``num_blocks * block_stride`` bytes apart, so a region as vLLM plans it is
    exactly full of runs. A region of one run that has been padded can look the same
    (its ``layer_stride`` may be a multiple of the run); the KVCacheSpec of the
    layers, ``spec``, tells them apart. Layers that no group has, and a spec that
    does not describe blocks of this stride, leave only the arithmetic.
    """
    run_bytes = num_blocks * tensor.block_stride
    num_runs = 1
    if spec is not None and (
        spec.page_size_bytes == spec.num_heads * tensor.block_stride
    ):
        num_runs = spec.num_heads
    elif tensor.layer_stride % run_bytes == 0:
        num_runs = tensor.layer_stride // run_bytes
    if num_runs > 1 and tensor.layer_stride != num_runs * run_bytes:
        raise ValueError(
            f"{_describe(tensor)}: {num_runs} head runs of {run_bytes} bytes take "
            f"{num_runs * run_bytes} bytes, but layer_stride is "
            f"{tensor.layer_stride}; runs cannot be spaced out, so the placement "
            f"must have been planned for another count than {num_blocks} blocks"
        )
    return num_runs


def _layer_specs(kv_cache_config: KVCacheConfig) -> dict[str, Any]:
    """Each grouped layer's own KVCacheSpec."""
    specs: dict[str, Any] = {}
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        # UniformTypeKVCacheSpecs wraps one spec a layer; the others are specs.
        per_layer = getattr(spec, "kv_cache_specs", None)
        specs.update(
            dict.fromkeys(group.layer_names, spec) if per_layer is None else per_layer
        )
    return specs


def _layer_starts(tensor: KVCacheTensor) -> list[int]:
    return [
        tensor.offset + index * tensor.layer_stride
        for index in range(len(tensor.layers))
    ]


def _padded_layer_stride(
    tensor: KVCacheTensor,
    regions: list[_Region],
    padded_start: dict[int, int],
    granule: int,
) -> int:
    """The one distance between the padded regions of ``tensor``'s layers."""
    starts = _layer_starts(tensor)
    if len(starts) == 1:
        # No distance to keep: what vLLM writes here is the region itself.
        return _round_up(_region_at(regions, starts[0]).nbytes, granule)
    padded = [padded_start[start] for start in starts]
    layer_stride = padded[1] - padded[0]
    for index in range(1, len(padded) - 1):
        if padded[index + 1] - padded[index] == layer_stride:
            continue
        between = [
            region.layer
            for low, high in ((0, 1), (index, index + 1))
            for region in regions
            if starts[low] < region.start < starts[high]
        ]
        raise ValueError(
            f"{_describe(tensor)}: its padded layers would lie {layer_stride} bytes "
            f"apart at first, but {padded[index + 1] - padded[index]} bytes between "
            f"{tensor.layers[index]!r} and {tensor.layers[index + 1]!r}, because "
            f"layers of other tensors lie unevenly between them ({between}); a "
            "KVCacheTensor has one layer_stride for all of its layers"
        )
    return layer_stride


def _region_at(regions: list[_Region], start: int) -> _Region:
    return regions[bisect.bisect_left(regions, start, key=lambda region: region.start)]


# --- Checks and copies --------------------------------------------------------------


def _block_outermost_segments(kv_cache_config: KVCacheConfig) -> list[Segment]:
    """The whole allocation, once its tensors are known to lie in it block by block."""
    if not kv_cache_config.kv_cache_tensors:
        return []
    num_blocks = kv_cache_config.num_blocks
    size = allocation_bytes(kv_cache_config)
    block_stride = size // num_blocks
    for tensor in kv_cache_config.kv_cache_tensors:
        if tensor.block_stride != block_stride:
            raise ValueError(
                f"{_describe(tensor)}: blocks lie {tensor.block_stride} bytes apart, "
                f"but a block-outermost allocation of {size} bytes for {num_blocks} "
                f"blocks has one every {block_stride} bytes; was the placement "
                "planned for another layout or block count?"
            )
        last = tensor.offset + (len(tensor.layers) - 1) * tensor.layer_stride
        if not 0 <= tensor.offset <= last < block_stride:
            raise ValueError(
                f"{_describe(tensor)}: its layers start at bytes {tensor.offset} to "
                f"{last} of a block, outside the block of {block_stride} bytes"
            )
    return [Segment(0, block_stride, num_blocks)]


def _is_block_outermost(layout: KVCacheLayout) -> bool:
    """Whether blocks are outermost; if not, layers are."""
    try:
        block_outermost: bool = layout.is_block_outermost
        layer_outermost: bool = layout.is_layer_compact
    except AttributeError:
        block_outermost = layer_outermost = False
    if block_outermost == layer_outermost:
        raise ValueError(
            f"unknown KV cache layout {layout!r}: expected a member of "
            "vllm.v1.kv_cache_layout.KVCacheLayout with layers or blocks outermost"
        )
    return block_outermost


def _check_config(kv_cache_config: KVCacheConfig) -> None:
    """What no placement can do without, whatever the layout."""
    if kv_cache_config.num_blocks <= 0:
        raise ValueError(
            f"a KV cache needs a positive block count, got {kv_cache_config.num_blocks}"
        )
    if kv_cache_config.hisparse_host_num_blocks is not None or any(
        tensor.host_resident for tensor in kv_cache_config.kv_cache_tensors
    ):
        raise ValueError(
            "HiSparse is not supported: its host pool has its own block count and "
            "allocation"
        )
    allocation_bytes(kv_cache_config)
    for tensor in kv_cache_config.kv_cache_tensors:
        if not tensor.layers:
            raise ValueError("a KV cache tensor without layers has no placement")
        if tensor.block_stride <= 0 or tensor.layer_stride <= 0:
            raise ValueError(
                f"{_describe(tensor)}: strides must be positive, got a block stride "
                f"of {tensor.block_stride} and a layer stride of "
                f"{tensor.layer_stride} bytes"
            )


def _check_granule(granule: int) -> None:
    if not isinstance(granule, int) or granule <= 0 or granule & (granule - 1):
        raise ValueError(
            f"a granule is a power of two in bytes (2097152 is 2 MiB), got {granule!r}"
        )


def _copy_config(kv_cache_config: KVCacheConfig) -> KVCacheConfig:
    """Deep copy without the original's cached answers.

    A copy, not ``dataclasses.replace``: what a subclass or a later vLLM adds,
    initialised fields or not, comes along.
    """
    tensors = [_copy_tensor(tensor) for tensor in kv_cache_config.kv_cache_tensors]
    # What deepcopy finds in its memo it takes instead of copying.
    config = copy.deepcopy(
        kv_cache_config, {id(kv_cache_config.kv_cache_tensors): tensors}
    )
    for cls in type(config).__mro__:
        for name, attribute in vars(cls).items():
            if isinstance(attribute, functools.cached_property):
                vars(config).pop(name, None)
    return config


def _copy_tensor(tensor: KVCacheTensor) -> KVCacheTensor:
    """Like ``copy.deepcopy``, without its cost: there can be one tensor a layer."""
    tensor = copy.copy(tensor)
    for name, value in vars(tensor).items():
        if type(value) not in (int, bool, str):
            setattr(tensor, name, copy.deepcopy(value))
    return tensor


def _describe(tensor: KVCacheTensor) -> str:
    first, last = tensor.layers[0], tensor.layers[-1]
    if len(tensor.layers) == 1:
        return f"KV cache tensor of layer {first!r}"
    return f"KV cache tensor of {len(tensor.layers)} layers {first!r} to {last!r}"


def _round_up(num_bytes: int, granule: int) -> int:
    return -(-num_bytes // granule) * granule
