"""Block-outermost layouts: one segment for all layers, placed where it was planned."""

from __future__ import annotations

import pytest
from fleet import Fleet, registered_regions
from mappings import mappings, straddling

pytestmark = [pytest.mark.e2e, pytest.mark.extended]

BYTES_PER_BLOCK = 30 * 2 * 3 * 64 * 2 * 32


def test_decoded_text_is_that_of_a_stock_pair_of_the_same_layout(fleet: Fleet) -> None:
    stock = fleet.answers("stock-blhnc")
    answers = fleet.answers("kvpad-blhnc")
    assert answers.texts == stock.texts
    assert answers.num_blocks == stock.num_blocks
    assert answers.failed_transfers == 0
    for handover in answers.handovers:
        assert handover.bytes_transferred == handover.blocks * BYTES_PER_BLOCK


def test_there_is_one_segment_and_no_padding(fleet: Fleet) -> None:
    pair = fleet.pair("kvpad-blhnc")
    for engine in (pair.prefill, pair.decode):
        (facts,) = engine.supplied()
        assert facts["layout"] == "BLHNC"
        assert facts["segments"] == facts["chunks"] == 1
        assert facts["padding_bytes"] == 0
        assert facts["committed_bytes"] == engine.num_blocks() * BYTES_PER_BLOCK


def test_the_registered_region_lies_in_one_mapping_of_one_memfd(fleet: Fleet) -> None:
    pair = fleet.pair("kvpad-blhnc")
    for engine in (pair.prefill, pair.decode):
        regions = registered_regions(fleet.probe_dir("kvpad-blhnc"), engine.pids())
        ((pid, ranges),) = regions.items()
        assert straddling(mappings(pid), ranges) == []
        assert [n for _, n in ranges] == [engine.num_blocks() * BYTES_PER_BLOCK]
