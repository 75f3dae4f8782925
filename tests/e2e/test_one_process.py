"""Engines that follow each other in one process, and a cache that sleeps often."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from programs import run_program

from checkpoint import ensure_checkpoint
from engines import EngineSpec

pytestmark = pytest.mark.e2e

PROGRAM = Path(__file__).with_name("two_engines_program.py")
MIB = 1 << 20


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the engines left behind, in their order."""
    model = ensure_checkpoint()
    left, _ = run_program(
        PROGRAM,
        str(model),
        spec=EngineSpec(model, plugins=("kvpad",)),
        folder=tmp_path_factory.mktemp("one-process"),
    )
    return left


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


def test_the_process_does_not_grow_from_engine_to_engine(
    engines: list[dict[str, Any]],
) -> None:
    """The first one loads libraries and fills caches; those after it add nothing."""
    _, second, third = (engine["after"] for engine in engines)
    assert third["resident"] - second["resident"] < 32 * MIB
    assert third["mappings"] - second["mappings"] < 16
    assert third["files"] <= second["files"]


def test_twenty_sleeps_change_nothing(engines: list[dict[str, Any]]) -> None:
    *_, last = engines
    cycles = last["cycles"]
    assert len(cycles) == 20
    for cycle in cycles:
        assert cycle["asleep"]["cache_bytes"] == 0
        assert cycle["answers"] == last["answers"]
        for same in ("cache_bytes", "cache_mappings", "files"):
            assert cycle["awake"][same] == last["awake"][same]
    early, late = cycles[4]["awake"], cycles[-1]["awake"]
    assert late["resident"] - early["resident"] < 16 * MIB
    assert late["mappings"] - early["mappings"] < 8
