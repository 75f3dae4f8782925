"""Two ranks, one of which cannot get its cache from kvpad: both run as stock."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from fleet import Fleet, probe_environment
from mappings import kvpad_memory

from engines import Engine

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def engine(fleet: Fleet) -> Iterator[Engine]:
    """Started as on a GPU, where ranks go in lockstep through warm-up."""
    spec = dataclasses.replace(
        fleet.spec("kvpad-tp2"),
        env=probe_environment(
            fleet.probe_dir("one-rank"), "measured_path", "rank1:missing_patch_point"
        ),
    )
    with fleet.engines({"one-rank": spec}) as started:
        started["one-rank"].wait_healthy()
        yield started["one-rank"]


def test_no_rank_gets_its_cache_from_kvpad(engine: Engine) -> None:
    assert engine.supplied() == []
    assert [pid for pid in engine.pids() if kvpad_memory(pid)] == []
    answer = engine.complete("The capital of France is", max_tokens=8)
    assert answer.text.startswith(" Paris")


def test_one_warning_names_the_rank_and_its_reason(engine: Engine) -> None:
    (line,) = [
        line
        for line in engine.log_text().splitlines()
        if "WARNING" in line and "kvpad steps aside" in line
    ]
    assert "vLLM runs as stock: rank 1: " in line
    assert "Worker.sleep_mode_backend: not found" in line
