"""The example connector: prefixes come back from its store after a reset."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fleet import PROBE, Fleet, probe_environment, registered_regions
from mappings import mappings, straddling

from engines import BLOCK_SIZE, Engine
from kv_store import Answer, ask, logged, store_spec
from prompts import prompts

pytestmark = pytest.mark.e2e

EXAMPLES = Path(__file__).parents[2] / "examples"
LAYERS = 30
PROMPTS = [0, 3, 4, 7]
MAX_TOKENS = 12
SMALL_STORE = 12  # blocks; the longest prompt fills 26


@dataclass(frozen=True)
class Rounds:
    """The prompts, asked four times of one engine.

    Attributes:
        computed: The first time.
        cached: Again at once.
        stored: After the prefix cache was reset.
        forgotten: After the store was reset as well.
        totals: What the connector had counted before and after ``stored``.
    """

    computed: list[Answer]
    cached: list[Answer]
    stored: list[Answer]
    forgotten: list[Answer]
    totals: tuple[dict[str, Any], dict[str, Any]]


@pytest.fixture(scope="module")
def engines(fleet: Fleet) -> Iterator[dict[str, Engine]]:
    model = fleet.spec("stock").model
    probed = store_spec(model, plugins=("kvpad_probe", "kvpad"))
    probed = dataclasses.replace(
        probed,
        env={
            **probed.env,
            **probe_environment(fleet.probe_dir("store")),
            "PYTHONPATH": f"{EXAMPLES}:{PROBE}",
        },
    )
    specs = {
        "store": probed,
        "store-stock": store_spec(model, plugins=()),
        "store-small": store_spec(model, store_blocks=SMALL_STORE),
    }
    with fleet.engines(specs) as started:
        for engine in started.values():
            engine.wait_healthy()
        yield started


@pytest.fixture(scope="module")
def rounds(engines: dict[str, Engine]) -> dict[str, Rounds]:
    def run(engine: Engine) -> Rounds:
        def answers() -> list[Answer]:
            return [ask(engine, prompts()[i], MAX_TOKENS) for i in PROMPTS]

        computed, cached = answers(), answers()
        engine.reset_prefix_cache()
        before = logged(engine, "totals")
        stored = answers()
        after = logged(engine, "totals")
        engine.reset_prefix_cache(external=True)
        return Rounds(computed, cached, stored, answers(), (before, after))

    return {name: run(engines[name]) for name in ("store", "store-stock")}


def test_texts_are_the_same_wherever_the_prefix_came_from(
    rounds: dict[str, Rounds],
) -> None:
    expected = [answer.text for answer in rounds["store-stock"].computed]
    assert expected[0].startswith(" Paris")
    for mine in rounds.values():
        for answers in (mine.computed, mine.cached, mine.stored, mine.forgotten):
            assert [answer.text for answer in answers] == expected


@pytest.mark.parametrize("name", ["store", "store-stock"])
def test_all_whole_blocks_come_from_the_store_after_a_reset(
    rounds: dict[str, Rounds], name: str
) -> None:
    for answer in rounds[name].stored:
        assert answer.store_tokens == answer.storable_tokens
        assert answer.local_tokens == 0
    assert sum(answer.store_tokens for answer in rounds[name].stored) > 1000


def test_the_store_is_not_read_while_the_engine_has_the_prefix(
    rounds: dict[str, Rounds],
) -> None:
    for answer in rounds["store"].cached:
        assert answer.store_tokens == 0
        assert answer.local_tokens == answer.storable_tokens
    before, _ = rounds["store"].totals
    assert before["read"] == before["bytes_read"] == 0


def test_bytes_are_blocks_times_bytes_per_block(
    engines: dict[str, Engine], rounds: dict[str, Rounds]
) -> None:
    (facts,) = engines["store"].supplied()
    before, after = rounds["store"].totals
    tokens = sum(answer.store_tokens for answer in rounds["store"].stored)
    assert (after["read"] - before["read"]) * BLOCK_SIZE == tokens
    for done in ("read", "written"):
        assert after[f"bytes_{done}"] == after[done] * facts["bytes_per_block"]
    # What is in the store is not written again.
    assert after["written"] == before["written"]


def test_resetting_the_store_too_leaves_nothing_to_load(
    rounds: dict[str, Rounds],
) -> None:
    for answer in rounds["store"].forgotten:
        assert answer.store_tokens == answer.local_tokens == 0


def test_a_full_store_gives_up_the_end_of_the_oldest_prefix(
    engines: dict[str, Engine],
) -> None:
    engine = engines["store-small"]
    long, short = prompts()[7], prompts()[4]

    def blocks_from_store(prompt: str) -> int:
        engine.reset_prefix_cache()
        return ask(engine, prompt, max_tokens=1).store_tokens // BLOCK_SIZE

    assert blocks_from_store(long) == 0
    assert blocks_from_store(long) == SMALL_STORE
    assert blocks_from_store(short) == 0
    # Its six blocks took the place of the last six.
    assert blocks_from_store(long) == SMALL_STORE - 6
    expected = engines["store-stock"].complete(long, MAX_TOKENS).text
    assert engine.complete(long, MAX_TOKENS).text == expected


def test_each_registered_region_lies_in_one_mapping_of_one_memfd(
    fleet: Fleet, engines: dict[str, Engine]
) -> None:
    facts = logged(engines["store"], "registered")
    regions = [tuple(region) for region in facts["regions"]]
    assert len(regions) == LAYERS
    assert straddling(mappings(facts["pid"]), regions) == []
    # The agent says the same; it has the store's buffer besides.
    seen = registered_regions(fleet.probe_dir("store"), engines["store"].pids())
    registered = [tuple(region) for region in seen[facts["pid"]]]
    assert set(regions) < set(registered)
    assert len(registered) == LAYERS + 1


def test_stock_has_regions_that_do_not(engines: dict[str, Engine]) -> None:
    """The check above can fail: stock's cache is not made of memfds."""
    facts = logged(engines["store-stock"], "registered")
    regions = [tuple(region) for region in facts["regions"]]
    assert len(straddling(mappings(facts["pid"]), regions)) == len(regions)


def test_the_log_names_the_attribute(engines: dict[str, Engine]) -> None:
    (facts,) = engines["store"].supplied()
    assert facts["connector"] == "NixlStoreConnector"
    assert facts["source"] == "NixlStoreConnector.REGISTERS_DEVICE_MEMORY = True"
    assert facts["segments"] == facts["chunks"] == LAYERS
