"""Where kvpad is off, or does not know the vLLM it meets, vLLM runs as stock."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from fleet import Fleet, kvpad_lines, kvpad_samples, probe_environment
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


@pytest.mark.parametrize("name", ["empty", "unset", "disabled"])
def test_there_are_no_kvpad_metrics_when_it_is_off(
    engines: dict[str, Engine], name: str
) -> None:
    assert "vllm:num_requests_running" in engines[name].metrics()
    assert kvpad_samples(engines[name]) == {}


def test_the_metrics_give_the_reason(engines: dict[str, Engine]) -> None:
    ((name, (labels, value)),) = kvpad_samples(engines["unknown"]).items()
    assert (name, value) == ("vllm:kvpad_info", 1)
    assert labels["mode"] == "stepped_aside"
    assert "Worker.sleep_mode_backend: not found" in labels["reason"]
    assert labels["connector"] == "NixlConnector"
    assert (labels["model_name"], labels["engine"]) == ("model", "0")
