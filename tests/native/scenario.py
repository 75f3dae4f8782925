"""One start of an engine, whoever's cache it is, and what must hold after it.

Plan, reserve capacity, commit for warm-up, measure, commit the measured count, let the
connector register. :func:`observe` looks at memory, not at anybody's books: at the
regions that were registered and at what the system has mapped there. The same checks
are made of the doubles of vLLM's own cache and of a real engine with kvpad's.

Pages are 20 KiB for 2 MiB granules, or 40 KiB for 4 MiB: one granule holds 102 blocks
and 13 hold 1331, neither of which is a multiple of the 512 blocks after which pages
and granules meet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vllm_kvpad.vmm import HostVmmDriver
from vllm_kvpad.vmm.base import VmmError

MIB = 1 << 20
COUNTS = {102: 1, 1331: 13}
"""Blocks, and the granules that they fill in each segment."""


@dataclass(frozen=True)
class Region:
    """What a connector registered for one layer."""

    address: int
    num_bytes: int
    num_blocks: int


@dataclass(frozen=True)
class Facts:
    """What was observed of one worker after its start."""

    blocks: int
    capacity: int
    page: int  # bytes of one layer's block
    granule: int
    regions: int
    region_bytes: list[int]
    region_blocks: list[int]
    starts_in_granule: list[int]
    in_one_chunk: list[bool]
    fresh_are_zero: bool  # blocks that warm-up did not have
    contents_right: bool


def registered_regions(kv_caches: Mapping[str, torch.Tensor]) -> dict[str, Region]:
    """What a connector like NIXL's takes out of the views: whole storages."""
    return {
        name: Region(
            view.untyped_storage().data_ptr(),
            view.untyped_storage().nbytes(),
            view.shape[0],
        )
        for name, view in kv_caches.items()
    }


def observe(
    kv_caches: Mapping[str, torch.Tensor],
    regions: Mapping[str, Region],
    *,
    blocks: int,
    capacity: int,
    granule: int,
    warm_up_blocks: int,
) -> Facts:
    """Look at memory; then write every block through the views, read it by region."""
    host = HostVmmDriver()
    page = next(v.stride(0) * v.element_size() for v in kv_caches.values())
    fresh_are_zero = not any(
        bool(_bytes_of(region)[warm_up_blocks * page :].any())
        for region in regions.values()
    )
    for number, view in enumerate(kv_caches.values()):
        for block in range(view.shape[0]):
            view[block].view(torch.int8).fill_(_pattern(number, block))
    right = True
    for number, region in enumerate(regions.values()):
        by_block = _bytes_of(region).view(region.num_blocks, -1)
        for block in range(region.num_blocks):
            right &= bool((by_block[block] == _pattern(number, block)).all())
    return Facts(
        blocks=blocks,
        capacity=capacity,
        page=page,
        granule=granule,
        regions=len(regions),
        region_bytes=sorted({region.num_bytes for region in regions.values()}),
        region_blocks=sorted({region.num_blocks for region in regions.values()}),
        starts_in_granule=[r.address % granule for r in regions.values()],
        in_one_chunk=[_in_one_chunk(host, region) for region in regions.values()],
        fresh_are_zero=fresh_are_zero,
        contents_right=right,
    )


def check_start(facts: Facts, blocks: int) -> None:
    """What every connector gets: the measured count, and blocks that are its own."""
    assert facts.blocks == blocks < facts.capacity
    assert facts.region_blocks == [blocks]
    assert facts.region_bytes == [blocks * facts.page]
    assert facts.fresh_are_zero
    assert facts.contents_right


def check_registrable(facts: Facts, blocks: int) -> None:
    """What a registering connector gets besides: one chunk for each region."""
    check_start(facts, blocks)
    assert all(facts.in_one_chunk)
    assert set(facts.starts_in_granule) == {0}


def _pattern(layer: int, block: int) -> int:
    return (layer * 37 + block * 11) % 127 + 1


def _bytes_of(region: Region) -> torch.Tensor:
    return HostVmmDriver().tensor(region.address, region.num_bytes)


def _in_one_chunk(host: HostVmmDriver, region: Region) -> bool:
    last = region.address + region.num_bytes - 1
    try:
        start, size = host.backing_range(region.address)
    except VmmError:
        return False
    return start <= region.address and last < start + size


def as_json(facts: Facts) -> dict[str, Any]:
    return dict(vars(facts))
