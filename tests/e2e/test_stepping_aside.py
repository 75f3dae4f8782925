"""Where kvpad is off, or does not know the vLLM it meets, vLLM runs as stock."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

import pytest
from fleet import Fleet, probe_environment
from mappings import kvpad_memory

from engines import Engine, nixl

pytestmark = pytest.mark.e2e

NAMES = ["empty", "unset", "disabled", "unknown"]


@pytest.fixture(scope="module")
def engines(fleet: Fleet) -> Iterator[dict[str, Engine]]:
    stock = dataclasses.replace(fleet.spec("stock"), kv_transfer=nixl("kv_producer"))
    probe = probe_environment(fleet.probe_dir("unknown"), "missing_patch_point")
    specs = {
        "empty": stock,
        "unset": dataclasses.replace(stock, plugins=None),
        "disabled": dataclasses.replace(
            stock, plugins=("kvpad",), env={"VLLM_KVPAD_DISABLE": "1"}
        ),
        "unknown": dataclasses.replace(
            stock, plugins=("kvpad_probe", "kvpad"), env=probe
        ),
    }
    with fleet.engines(specs) as started:
        for engine in started.values():
            engine.wait_healthy()
        yield started


@pytest.mark.parametrize("name", NAMES)
def test_the_engine_runs_as_stock(engines: dict[str, Engine], name: str) -> None:
    engine = engines[name]
    assert engine.supplied() == []
    assert [pid for pid in engine.pids() if kvpad_memory(pid)] == []
    assert engine.num_blocks() == engines["empty"].num_blocks()
    answer = engine.complete("The capital of France is", max_tokens=8)
    assert answer.text.startswith(" Paris")


@pytest.mark.parametrize("name", ["empty", "unset", "disabled"])
def test_kvpad_says_nothing_when_it_is_off(
    engines: dict[str, Engine], name: str
) -> None:
    assert kvpad_lines(engines[name]) == []


def test_a_missing_patch_point_is_named_in_one_warning(
    engines: dict[str, Engine],
) -> None:
    (line,) = kvpad_lines(engines["unknown"])
    assert "WARNING" in line
    assert "Worker.sleep_mode_backend: not found" in line
    assert "runs as stock" in line


def kvpad_lines(engine: Engine) -> list[str]:
    """The log lines of any level that kvpad wrote."""
    _, *log = engine.log_text().splitlines()  # the first is the command
    model = str(engine.spec.model)  # its folder is named after the project
    return [line for line in log if re.search(r"\bkvpad\b", line.replace(model, ""))]
