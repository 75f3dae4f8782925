"""Connectors that cannot live with VMM memory, and where an answer comes from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fleet import Fleet
from mappings import kvpad_memory

from engines import Engine, EngineSpec

pytestmark = [pytest.mark.e2e, pytest.mark.extended]

CONNECTORS = Path(__file__).parent / "connectors"
PROMPT = "The capital of France is"
EXPORTS = "ExportingConnector hands the KV cache out through legacy CUDA IPC handles"
POOL = "PoolConnector brings its own memory pool for the KV cache"


@pytest.fixture(scope="module")
def engines(fleet: Fleet) -> Iterator[dict[str, Engine]]:
    def spec(connector: str, plugin: bool = True, **kvpad: Any) -> EngineSpec:
        return EngineSpec(
            fleet.spec("stock").model,
            plugins=("kvpad",) if plugin else (),
            kv_transfer={
                "kv_connector": connector,
                "kv_connector_module_path": "quiet_connectors",
                "kv_role": "kv_both",
            },
            additional={"kvpad": kvpad} if kvpad else None,
            env={"PYTHONPATH": str(CONNECTORS)},
        )

    specs = {
        "stock": spec("ExportingConnector", plugin=False),
        "exports": spec("ExportingConnector"),
        "exports-strict": spec("ExportingConnector", strict=True),
        "pool": spec("PoolConnector"),
        "hook": spec("QuietConnector"),
        "override": spec(
            "QuietConnector", registers_device_memory={"QuietConnector": False}
        ),
    }
    with fleet.engines(specs) as started:
        for name, engine in started.items():
            if name != "exports-strict":
                engine.wait_healthy()
        yield started


@pytest.mark.parametrize("name", ["exports", "pool"])
def test_the_engine_runs_and_answers_as_stock(
    engines: dict[str, Engine], name: str
) -> None:
    engine, stock = engines[name], engines["stock"]
    assert engine.supplied() == []
    assert [pid for pid in engine.pids() if kvpad_memory(pid)] == []
    assert engine.num_blocks() == stock.num_blocks()
    answer = engine.complete(PROMPT, max_tokens=8).text
    assert answer == stock.complete(PROMPT, max_tokens=8).text
    assert answer.startswith(" Paris")


@pytest.mark.parametrize(("name", "reason"), [("exports", EXPORTS), ("pool", POOL)])
def test_one_warning_names_the_reason(
    engines: dict[str, Engine], name: str, reason: str
) -> None:
    warnings = [
        line
        for line in engines[name].log_text().splitlines()
        if "WARNING" in line and re.search(r"\bkvpad\b.*stock", line)
    ]
    assert len(warnings) == 1
    assert reason in warnings[0]


def test_strict_ends_the_server_with_the_reason(engines: dict[str, Engine]) -> None:
    engine = engines["exports-strict"]
    assert engine.wait_exit() != 0
    assert "strict is set" in engine.log_text()
    assert EXPORTS in engine.log_text()


def test_a_packages_hook_answers_and_is_named(engines: dict[str, Engine]) -> None:
    (facts,) = engines["hook"].supplied()
    assert facts["registers_device_memory"] is True
    assert facts["source"] == "plugin hooked (kvpad-hooked 1.0)"
    assert facts["chunks"] == facts["segments"]


def test_the_operators_word_is_nearer_than_the_hooks(
    engines: dict[str, Engine],
) -> None:
    (facts,) = engines["override"].supplied()
    assert facts["registers_device_memory"] is False
    assert facts["source"].startswith("the operator")
    assert facts["padding_bytes"] == 0
