"""Two worker processes an engine: each has its own cache, both the same count."""

from __future__ import annotations

import json

import pytest
from fleet import Fleet, assert_metrics_are_the_logged_facts, registered_regions
from mappings import mappings, straddling

pytestmark = [pytest.mark.e2e, pytest.mark.extended]

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


def test_the_metrics_are_those_of_one_rank(fleet: Fleet) -> None:
    assert_metrics_are_the_logged_facts(fleet.pair("kvpad-tp2").decode)


def test_each_rank_lists_its_segments_as_they_were_registered(fleet: Fleet) -> None:
    decode = fleet.pair("kvpad-tp2").decode
    mark = "kvpad: KV cache segments: "
    listed = [
        [(int(each["address"], 16), each["bytes"]) for each in json.loads(line)]
        for line in (
            x.partition(mark)[2] for x in decode.log_text().splitlines() if mark in x
        )
    ]
    regions = registered_regions(fleet.probe_dir("kvpad-tp2"), decode.pids())
    registered = [[tuple(each) for each in ranges] for ranges in regions.values()]
    assert len(listed) == RANKS
    assert sorted(listed) == sorted(registered)


def test_each_ranks_regions_lie_in_one_mapping_each(fleet: Fleet) -> None:
    pair = fleet.pair("kvpad-tp2")
    for engine in (pair.prefill, pair.decode):
        regions = registered_regions(fleet.probe_dir("kvpad-tp2"), engine.pids())
        assert len(regions) == RANKS
        for pid, ranges in regions.items():
            assert len(ranges) == 30
            assert straddling(mappings(pid), ranges) == []
