"""Text prefilled in one engine and decoded in another, out of padded memory."""

from __future__ import annotations

import pytest
from fleet import (
    MAX_TOKENS,
    Fleet,
    assert_metrics_are_the_logged_facts,
    kvpad_lines,
    probe_environment,
    registered_regions,
)
from mappings import covering, kvpad_memory, mappings, straddling

from engines import EngineSpec, nixl
from prompts import prompts

pytestmark = pytest.mark.e2e

MIB = 1 << 20
LAYERS = 30
# Keys and values, 3 heads of 64 bfloat16, 32 tokens.
PAGE = 2 * 3 * 64 * 2 * 32


def test_the_checkpoint_answers_questions(fleet: Fleet) -> None:
    assert fleet.answers("stock").texts[0].startswith(" Paris")


def test_the_prompts_fill_and_overflow_blocks(fleet: Fleet) -> None:
    lengths = [h.prompt_tokens for h in fleet.answers("stock").handovers]
    assert len(set(lengths)) == 8
    assert sum(length > 512 for length in lengths) >= 2
    assert min(lengths) < 32


def test_decoded_text_is_the_stock_pairs(fleet: Fleet) -> None:
    stock = fleet.answers("stock")
    assert fleet.answers("kvpad").texts == stock.texts


def test_no_transfer_fails(fleet: Fleet) -> None:
    assert fleet.answers("kvpad").failed_transfers == 0


def test_bytes_transferred_are_blocks_times_bytes_per_block(fleet: Fleet) -> None:
    for handover in fleet.answers("kvpad").handovers:
        assert handover.blocks == -(-handover.prompt_tokens // 32)
        assert handover.bytes_transferred == handover.blocks * LAYERS * PAGE


def test_the_engine_has_the_blocks_that_stock_has(fleet: Fleet) -> None:
    stock = fleet.answers("stock")
    assert fleet.answers("kvpad").num_blocks == stock.num_blocks


def test_each_registered_region_lies_in_one_mapping_of_one_memfd(
    fleet: Fleet,
) -> None:
    pair = fleet.pair("kvpad")
    for engine in (pair.prefill, pair.decode):
        regions = registered_regions(fleet.probe_dir("kvpad"), engine.pids())
        assert len(regions) == 1
        for pid, ranges in regions.items():
            found = mappings(pid)
            assert straddling(found, ranges) == []
            # A chunk and a granule's start for each layer, none shared.
            assert len(ranges) == LAYERS
            assert len({covering(found, *each)[0].inode for each in ranges}) == LAYERS
            assert {address % (2 * MIB) for address, _ in ranges} == {0}
            committed = engine.num_blocks() * PAGE
            assert {length for _, length in ranges} == {committed}


def test_memory_behind_the_cache_is_its_bytes_rounded_up_by_layer(
    fleet: Fleet,
) -> None:
    pair = fleet.pair("kvpad")
    for engine in (pair.prefill, pair.decode):
        (facts,) = engine.supplied()
        (pid,) = registered_regions(fleet.probe_dir("kvpad"), engine.pids())
        by_layer = engine.num_blocks() * PAGE
        in_granules = -(-by_layer // (2 * MIB)) * 2 * MIB
        assert facts["committed_bytes"] == LAYERS * by_layer
        assert facts["physical_bytes"] == LAYERS * in_granules
        assert sum(m.end - m.start for m in kvpad_memory(pid)) == LAYERS * in_granules


def test_the_log_says_what_was_supplied(fleet: Fleet) -> None:
    (facts,) = fleet.pair("kvpad").decode.supplied()
    assert facts["connector"] == "NixlConnector"
    assert facts["registers_device_memory"] is True
    assert facts["layout"] == "LBHNC"
    assert facts["segments"] == facts["chunks"] == LAYERS
    assert facts["granule_bytes"] == 2 * MIB
    assert facts["blocks"] == 1456
    assert facts["bytes_per_block"] == LAYERS * PAGE
    assert facts["padding_bytes"] > 0
    # 24 KiB pages meet 2 MiB granules every 256 blocks.
    assert facts["rounded_blocks"] == 1280


def test_the_metrics_say_what_the_log_says(fleet: Fleet) -> None:
    pair = fleet.pair("kvpad")
    for engine in (pair.prefill, pair.decode):
        assert_metrics_are_the_logged_facts(engine)


def test_there_is_one_line_at_start_up_and_one_after_sizing(fleet: Fleet) -> None:
    first, second = kvpad_lines(fleet.pair("kvpad").decode)
    assert "INFO" in first
    assert "kvpad supplies the KV cache; KV connector NixlConnector" in first
    assert "INFO" in second
    assert "kvpad: KV cache supplied: {" in second


def test_flipped_bytes_in_one_transferred_block_change_the_text(fleet: Fleet) -> None:
    expected = fleet.answers("stock").texts
    pair = fleet.pair("kvpad")
    folder = fleet.probe_dir("kvpad")
    (folder / "corrupted").unlink(missing_ok=True)
    (folder / "corrupt").touch()
    number = 4
    corrupted = pair.run(prompts()[number], MAX_TOKENS).text
    assert (folder / "corrupted").exists()
    assert corrupted != expected[number]
    # And the damage ends with the request.
    assert pair.run(prompts()[number], MAX_TOKENS).text == expected[number]


def test_unpadded_placement_is_caught_by_the_one_mapping_check(fleet: Fleet) -> None:
    folder = fleet.probe_dir("unpadded")
    spec = EngineSpec(
        fleet.spec("stock").model,
        plugins=("kvpad_probe", "kvpad"),
        kv_transfer=nixl("kv_producer"),
        env=probe_environment(folder, "unpadded"),
    )
    with fleet.engines({"unpadded": spec}) as engines:
        engine = engines["unpadded"]
        engine.wait_healthy()
        (regions,) = registered_regions(folder, engine.pids()).items()
        assert len(straddling(mappings(regions[0]), regions[1])) >= LAYERS // 2
