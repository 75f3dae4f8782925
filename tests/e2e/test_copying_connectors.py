"""Connectors that copy blocks and register nothing: they pay nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from fleet import MAX_TOKENS, Fleet, assert_metrics_are_the_logged_facts
from mappings import kvpad_memory

from engines import Engine, EngineSpec
from prompts import prompts

pytestmark = pytest.mark.e2e

MIB = 1 << 20


@pytest.fixture(scope="module")
def engines(
    fleet: Fleet, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Engine]]:
    """An engine that keeps KV caches in files, stock and kvpad, and one that
    offloads them to host memory."""

    def spec(plugin: bool, connector: str, **extra: Any) -> EngineSpec:
        return EngineSpec(
            fleet.spec("stock").model,
            plugins=("kvpad",) if plugin else (),
            kv_transfer={
                "kv_connector": connector,
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
            },
        )

    def folder(name: str) -> str:
        return str(tmp_path_factory.mktemp(name))

    example = "ExampleConnector"
    specs = {
        "stock-files": spec(False, example, shared_storage_path=folder("stock")),
        "kvpad-files": spec(True, example, shared_storage_path=folder("kvpad")),
        "kvpad-offload": spec(
            True, "SimpleCPUOffloadConnector", cpu_bytes_to_use=256 * MIB
        ),
    }
    # As several API servers have it: /metrics is merged from files of all processes.
    specs["kvpad-offload"] = dataclasses.replace(
        specs["kvpad-offload"],
        env={"PROMETHEUS_MULTIPROC_DIR": folder("prometheus")},
    )
    with fleet.engines(specs) as started:
        for engine in started.values():
            engine.wait_healthy()
        yield started


@pytest.mark.parametrize("name", ["kvpad-files", "kvpad-offload"])
def test_blocks_and_bytes_are_stocks_and_nothing_is_padded(
    engines: dict[str, Engine], name: str
) -> None:
    engine = engines[name]
    (facts,) = engine.supplied()
    assert facts["registers_device_memory"] is False
    assert facts["blocks"] == engine.num_blocks() == engines["stock-files"].num_blocks()
    assert facts["committed_bytes"] == facts["blocks"] * facts["bytes_per_block"]
    assert facts["address_space_bytes"] == facts["committed_bytes"]
    assert facts["padding_bytes"] == 0
    # Segments share granules: less than one is rounded up for the whole cache.
    held = sum(m.end - m.start for pid in engine.pids() for m in kvpad_memory(pid))
    assert 0 <= held - facts["committed_bytes"] < 2 * MIB


@pytest.mark.parametrize("name", ["kvpad-files", "kvpad-offload"])
def test_the_metrics_say_what_the_log_says(
    engines: dict[str, Engine], name: str
) -> None:
    assert_metrics_are_the_logged_facts(engines[name])


@pytest.fixture(scope="module")
def stock_texts(engines: dict[str, Engine]) -> list[list[str]]:
    """What stock answers first, and then with what it kept in files."""
    return [texts(engines["stock-files"]) for _ in range(2)]


def texts(engine: Engine) -> list[str]:
    return [engine.complete(prompt, MAX_TOKENS).text for prompt in prompts()[2:6]]


@pytest.mark.parametrize("name", ["kvpad-files", "kvpad-offload"])
def test_text_is_stocks_computed_or_loaded(
    engines: dict[str, Engine], stock_texts: list[list[str]], name: str
) -> None:
    # The second time ExampleConnector brings back what it kept of the first. (The
    # offloading one keeps nothing here: on a CPU it runs only while it has nothing
    # to do, and is there for its placement.)
    assert [texts(engines[name]) for _ in range(2)] == stock_texts
