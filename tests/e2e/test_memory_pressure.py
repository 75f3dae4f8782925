"""Memory that is gone when the cache is committed ends the start, with the numbers.

The scheduler already deals out the planned blocks by then, so fewer will not do. The
probe makes the memory go; the refusal, and all that follows, is the driver's own.
vLLM's CPU build has the V1 runner only.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

import pytest
from fleet import Fleet, probe_environment

from engines import Engine, EngineSpec, nixl, process_group

pytestmark = pytest.mark.e2e

LAYERS = 30
ADVICE = re.compile(
    r"(?:VmmOutOfMemoryError: |VmmError: rank 1: )"
    r"the KV cache's (\d+) blocks take (\d+) bytes .*, but "
    r"1048576 bytes \(1.00 MiB\) are free\..* lower gpu_memory_utilization"
)


def spec(
    fleet: Fleet, name: str, *changes: str, chunks: int, ranks: int
) -> dict[str, EngineSpec]:
    """An engine whose memory is taken after ``chunks`` chunks of its cache."""
    probe = probe_environment(fleet.probe_dir(f"memory-{name}"), *changes)
    return {
        name: dataclasses.replace(
            fleet.spec("kvpad-tp2" if ranks == 2 else "kvpad"),
            kv_transfer=nixl("kv_producer"),
            env={
                **probe,
                "KVPAD_PROBE_CHUNKS": str(chunks),
                "VLLM_LOGGING_LEVEL": "DEBUG",  # what was measured is said there
            },
        )
    }


@pytest.fixture(scope="module")
def given(fleet: Fleet) -> Iterator[dict[str, Engine]]:
    specs = {
        **spec(fleet, "given", "memory_is_taken", chunks=3, ranks=1),
        **spec(fleet, "given-rank-1", "rank1:memory_is_taken", chunks=3, ranks=2),
    }
    with fleet.engines(specs) as started:
        yield started


@pytest.fixture(scope="module")
def measured(fleet: Fleet) -> Iterator[dict[str, Engine]]:
    changes = "measured_path", "rank1:memory_is_taken"
    specs = {
        # Segments are apart, so warm-up too takes a chunk for each layer.
        **spec(fleet, "warm-up-rank-1", *changes, chunks=LAYERS // 2, ranks=2),
        **spec(fleet, "measured-rank-1", *changes, chunks=LAYERS + 3, ranks=2),
    }
    with fleet.engines(specs) as started:
        yield started


@pytest.mark.parametrize("name", ["given", "given-rank-1"])
def test_a_given_size_that_is_not_there(given: dict[str, Engine], name: str) -> None:
    log = log_of_failed_start(given[name])
    assert "measured after warm-up" not in log


@pytest.mark.parametrize("name", ["warm-up-rank-1", "measured-rank-1"])
def test_memory_taken_from_one_rank_around_measuring(
    measured: dict[str, Engine], name: str
) -> None:
    log = log_of_failed_start(measured[name])
    assert ("measured after warm-up" in log) == (name == "measured-rank-1")
    # Before warm-up the other rank must say it too: its own log may come too late.
    assert ("VmmError: rank 1: the KV cache" in log) == (name == "warm-up-rank-1")


def log_of_failed_start(engine: Engine) -> str:
    """Check that ``engine`` ends by itself and says why; return its log."""
    # A rank left in a collective would wait there for half an hour.
    assert engine.wait_exit() != 0
    assert process_group(engine.pid) == []
    log = engine.log_text()
    assert "outlived their server" not in log
    said = ADVICE.search(log)
    assert said is not None
    blocks, wanted = map(int, said.groups())
    assert blocks > 0
    assert wanted % (2 << 20) == 0
    # Whoever failed supplied nothing.
    assert len(engine.supplied()) < engine.spec.tensor_parallel
    return log
