"""Two worker processes an engine: each has its own cache, both the same count."""

from __future__ import annotations

import pytest
from fleet import Fleet, registered_regions
from mappings import mappings, straddling

pytestmark = pytest.mark.e2e

RANKS = 2
# Keys and values, 2 of the 4 heads, 64 bfloat16, 32 tokens, 30 layers.
BYTES_PER_BLOCK_AND_RANK = 30 * 2 * 2 * 64 * 2 * 32


def test_decoded_text_is_that_of_a_stock_pair_with_two_ranks(fleet: Fleet) -> None:
    stock = fleet.answers("stock-tp2")
    answers = fleet.answers("kvpad-tp2")
    assert answers.texts == stock.texts
    assert answers.num_blocks == stock.num_blocks
    assert answers.failed_transfers == 0
    for handover in answers.handovers:
        assert (
            handover.bytes_transferred
            == handover.blocks * RANKS * BYTES_PER_BLOCK_AND_RANK
        )


def test_both_ranks_commit_the_same_count(fleet: Fleet) -> None:
    pair = fleet.pair("kvpad-tp2")
    for engine in (pair.prefill, pair.decode):
        first, second = engine.supplied()
        assert first == second
        assert first["blocks"] == engine.num_blocks()
        assert first["committed_bytes"] == first["blocks"] * BYTES_PER_BLOCK_AND_RANK


def test_each_ranks_regions_lie_in_one_mapping_each(fleet: Fleet) -> None:
    pair = fleet.pair("kvpad-tp2")
    for engine in (pair.prefill, pair.decode):
        regions = registered_regions(fleet.probe_dir("kvpad-tp2"), engine.pids())
        assert len(regions) == RANKS
        for pid, ranges in regions.items():
            assert len(ranges) == 30
            assert straddling(mappings(pid), ranges) == []
