"""Warm up first, then size: the GPU start-up order on a real CPU engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from programs import run_program

from checkpoint import ensure_checkpoint
from engines import EngineSpec

pytestmark = pytest.mark.e2e

PROGRAM = Path(__file__).with_name("measured_path_program.py")
NIXL = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
}


def start(tmp_path: Path, plugin: bool = True, **options: Any) -> dict[str, Any]:
    options = {"model": str(ensure_checkpoint()), "plugin": plugin, **options}
    spec = EngineSpec(ensure_checkpoint(), plugins=("kvpad",) if plugin else ())
    facts, log = run_program(PROGRAM, json.dumps(options), spec=spec, folder=tmp_path)
    return {"log": log, **facts}


STARTS: dict[str, dict[str, Any]] = {
    "stock": {"plugin": False},
    "registered": {"kv_transfer_config": NIXL, "budget_mib": 1200},
    "unregistered": {"budget_mib": 1200},
    # Warm-up takes more than the budget leaves.
    "overdrawn": {
        "kv_transfer_config": NIXL,
        "budget_mib": 480,
        "resident_mib": 200,
        "max_num_seqs": 64,
    },
    "another-plan": {
        "kv_transfer_config": NIXL,
        "budget_mib": 1200,
        "plan_differently": True,
    },
}


@pytest.fixture(scope="module")
def starts(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Future[dict[str, Any]]]]:
    """The engines, two at a time: each is one process and keeps one core busy."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        yield {
            name: pool.submit(start, tmp_path_factory.mktemp(name), **options)
            for name, options in STARTS.items()
        }


@pytest.fixture(scope="module")
def stock_answers(starts: dict[str, Future[dict[str, Any]]]) -> list[str]:
    return starts["stock"].result()["answers"]


@pytest.fixture(scope="module")
def registered(starts: dict[str, Future[dict[str, Any]]]) -> dict[str, Any]:
    return starts["registered"].result()


def test_registering_connector_gets_the_measured_count_in_one_chunk_each(
    registered: dict[str, Any], stock_answers: list[str]
) -> None:
    facts = registered
    assert facts["answers"] == stock_answers
    assert facts["warm_ups"] == 1
    assert facts["blocks"] == facts["committed"] == facts["view_blocks"][0]
    assert facts["blocks"] * facts["bytes_per_block"] == facts["measured_bytes"]
    assert facts["warm_up_blocks"] < facts["blocks"] < facts["capacity"]
    assert all(facts["one_chunk_each"])
    assert all(facts["aligned"])
    nominal = facts["blocks"] * facts["bytes_per_block"]
    assert facts["physical_bytes"] - nominal >= 0
    assert facts["physical_bytes"] - nominal < facts["segments"] * facts["granule"]


def test_log_and_metrics_have_the_final_count(registered: dict[str, Any]) -> None:
    metrics, blocks = registered["metrics"], registered["blocks"]
    assert metrics["vllm:cache_config_info"]["num_gpu_blocks"] == str(blocks)
    assert metrics["vllm:kvpad_info"]["mode"] == "supplied"
    assert metrics["vllm:kvpad_committed_blocks"] == blocks
    assert metrics["vllm:kvpad_capacity_blocks"] == registered["capacity"]
    assert metrics["vllm:kvpad_physical_bytes"] == registered["physical_bytes"]
    assert metrics["vllm:kvpad_chunks"] == registered["segments"]
    # What warm-up touched, then the final count in one chunk each.
    assert metrics["vllm:kvpad_commit_seconds_count"] == 2
    first, second = (x for x in registered["log"].splitlines() if "] kvpad" in x)
    assert "kvpad supplies the KV cache" in first
    supplied = json.loads(second.partition("KV cache supplied: ")[2])
    assert supplied["blocks"] == blocks
    assert supplied["size_from"] == "measurement after warm-up"
    measured = supplied["measured"]
    assert measured["budget_bytes"] == 1200 << 20
    left = measured["budget_bytes"] - measured["resident_bytes"]
    assert measured["left_bytes"] == left - measured["activation_peak_bytes"]


def test_addresses_stay_and_nothing_of_warm_up_is_left(
    starts: dict[str, Future[dict[str, Any]]], stock_answers: list[str]
) -> None:
    """Without a connector: no padding, and captured addresses stay valid."""
    facts = starts["unregistered"].result()
    assert facts["answers"] == stock_answers
    assert facts["final_addresses"] == facts["warm_up_addresses"]
    assert facts["address_space"] == facts["capacity"] * facts["bytes_per_block"]
    # Aligned by the choice of the capacity, so that rounding costs little.
    assert all(facts["aligned"])
    assert facts["blocks"] == facts["committed"]


def test_registered_cache_is_zero_where_no_request_wrote(
    registered: dict[str, Any],
) -> None:
    assert registered["final_addresses"] == registered["warm_up_addresses"]
    assert registered["untouched_block_is_zero"]


def test_fewer_blocks_than_warm_up_took_are_remapped(
    starts: dict[str, Future[dict[str, Any]]], stock_answers: list[str]
) -> None:
    """A budget that warm-up overdraws ends at the smaller, measured count."""
    facts = starts["overdrawn"].result()
    assert facts["answers"] == stock_answers
    assert facts["blocks"] < facts["warm_up_blocks"]
    assert facts["blocks"] == facts["committed"]
    # Budget less what is resident and the peak, within a granule for each segment.
    left = (480 - 200 - 64) << 20
    assert facts["physical_bytes"] <= left
    assert left - facts["physical_bytes"] <= facts["segments"] * facts["granule"]
    assert all(facts["one_chunk_each"])


def test_plan_that_differs_from_the_warm_up_falls_back(
    starts: dict[str, Future[dict[str, Any]]], stock_answers: list[str]
) -> None:
    facts = starts["another-plan"].result()
    assert facts["answers"] == stock_answers
    assert facts["warm_ups"] == 2
    assert "measurement after warm-up, which runs again" in facts["log"]
    assert facts["blocks"] == facts["committed"] == facts["capacity"]
    assert all(facts["one_chunk_each"])
