"""Every rank measures, or none does: two real ranks that meet different things."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

RANKS = 2
RANK = """
import json, sys
from types import SimpleNamespace
import torch.distributed as dist
from vllm.distributed.parallel_state import init_distributed_environment
from vllm_kvpad.capabilities import resolve
from vllm_kvpad.config import KvpadConfig
from vllm_kvpad.hosts import StepAside, agreement, supplied_cache
from vllm_kvpad.vmm import VmmOutOfMemoryError

rank, store, scenarios = json.loads(sys.argv[1])
init_distributed_environment(2, rank, store, rank, backend="gloo")
agreement.announce(None)

def worker(meets):
    given = 1 << 30 if meets == "a given size" else None
    return SimpleNamespace(
        rank=rank,
        cache_config=SimpleNamespace(
            kv_cache_memory_bytes=given, num_gpu_blocks_override=None
        ),
    )

def reserve(meets):
    if meets == "a reason to step aside":
        raise StepAside("no driver")
    if meets == "no address space":
        raise VmmOutOfMemoryError("cuda reserve failed")
    if meets == "a reason not to measure":
        raise supplied_cache._NotMeasured("sinks")
    return "plan"

def stock():
    dist.barrier()  # stock's profile run is full of collectives
    return "stock"

for met, strict in scenarios:
    meets = met[rank]
    supply = supplied_cache.SuppliedKVCache(KvpadConfig(strict=strict), resolve(None))
    supply._reserve_capacity = lambda worker: reserve(meets)
    supply._measure = lambda worker, plan, without_graphs: "measured"
    try:
        result = supply.determine_available_memory(worker(meets), stock)
    except RuntimeError as error:
        result = f"{type(error).__name__}: {error}"
    print("RESULT" + json.dumps([result, supply.stepped_aside]), flush=True)
dist.destroy_process_group()
"""


def results(folder: Path, scenarios: list[Any]) -> list[list[Any]]:
    """For each scenario what each rank returned, and whether it stepped aside."""
    store = f"file://{folder / 'store'}"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, json.dumps([rank, store, scenarios])],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    found = []
    try:
        for process in ranks:
            out, errors = process.communicate(timeout=180)
            assert process.returncode == 0, errors
            found.append(
                [
                    json.loads(line.removeprefix("RESULT"))
                    for line in out.splitlines()
                    if line.startswith("RESULT")
                ]
            )
    finally:
        for process in ranks:
            process.kill()
    return [list(each) for each in zip(*found, strict=True)]


def test_ranks_that_meet_different_things_start_up_alike(tmp_path: Path) -> None:
    nothing = "nothing"
    cases = [
        ([nothing, nothing], False, ["measured", False]),
        ([nothing, "a given size"], False, ["stock", False]),
        (["a given size", nothing], False, ["stock", False]),
        ([nothing, "a reason not to measure"], False, ["stock", False]),
        ([nothing, "a reason to step aside"], False, ["stock", True]),
        (["no address space", nothing], False, ["stock", True]),
        (["a given size", "a reason to step aside"], False, ["stock", True]),
        (
            [nothing, "a reason to step aside"],
            True,
            [
                "RuntimeError: kvpad cannot supply the KV cache and strict is set: "
                "rank 1: no driver. Remove the cause, unset strict, or set "
                "VLLM_KVPAD_DISABLE=1.",
                True,
            ],
        ),
    ]
    found = results(tmp_path, [(met, strict) for met, strict, _ in cases])
    for (met, strict, expected), outcome in zip(cases, found, strict=True):
        assert outcome == [expected] * RANKS, (met, strict)
