"""Engines that follow each other in one process, and a cache that sleeps often."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from programs import run_program

from checkpoint import ensure_checkpoint
from engines import EngineSpec

pytestmark = pytest.mark.e2e

PROGRAM = Path(__file__).with_name("two_engines_program.py")
MIB = 1 << 20
CYCLES = 20


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each engine left behind, in their order, of stock vLLM and with kvpad."""
    model = ensure_checkpoint()

    def run(name: str, plugins: tuple[str, ...], cycles: int) -> list[dict[str, Any]]:
        left, _ = run_program(
            PROGRAM,
            str(model),
            str(cycles),
            spec=EngineSpec(model, plugins=plugins),
            folder=tmp_path_factory.mktemp(name),
        )
        return left

    with ThreadPoolExecutor() as pool:
        stock = pool.submit(run, "stock", (), 0)
        kvpad = pool.submit(run, "kvpad", ("kvpad",), CYCLES)
        return {"stock": stock.result(), "kvpad": kvpad.result()}


@pytest.fixture(scope="module")
def engines(runs: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What each of kvpad's engines left behind."""
    return runs["kvpad"]


def test_each_engine_answers_alike_and_leaves_no_cache(
    engines: list[dict[str, Any]],
) -> None:
    first, *_ = engines
    assert first["answers"][0].startswith(" Paris")
    for engine in engines:
        assert engine["answers"] == first["answers"]
        assert engine["awake"]["cache_bytes"] > 1000 * MIB
        assert engine["after"]["cache_bytes"] == 0
        assert engine["after"]["cache_mappings"] == 0


def test_the_process_grows_from_engine_to_engine_as_with_stock(
    runs: dict[str, list[dict[str, Any]]],
) -> None:
    """The first engine loads libraries; of each later one vLLM keeps some 40 MiB."""

    def growth(kind: str, what: str) -> int:
        _, second, third = (engine["after"] for engine in runs[kind])
        return int(third[what] - second[what])

    assert growth("kvpad", "resident") - growth("stock", "resident") < 16 * MIB
    assert growth("kvpad", "mappings") - growth("stock", "mappings") < 16
    assert growth("kvpad", "files") <= 0


def test_twenty_sleeps_change_nothing(engines: list[dict[str, Any]]) -> None:
    *_, last = engines
    cycles = last["cycles"]
    assert len(cycles) == CYCLES
    for cycle in cycles:
        assert cycle["asleep"]["cache_bytes"] == 0
        assert cycle["answers"] == last["answers"]
        for same in ("cache_bytes", "cache_mappings", "files"):
            assert cycle["awake"][same] == last["awake"][same]
    early, late = cycles[4]["awake"], cycles[-1]["awake"]
    assert late["resident"] - early["resident"] < 16 * MIB
    assert late["mappings"] - early["mappings"] < 8
