"""Tensor parallel 2: both ranks agree, and the answers are stock's."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_process import Conversation
from jobs import build_engine, greedy, token_prompts
from test_engines import in_turn

# Worker processes look their facts up themselves; functions travel to them, by name
# where Ray starts the worker.
_ENVIRONMENT = {
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    "RAY_USAGE_STATS_ENABLED": "0",
}


def _rank_facts(worker: Any) -> dict[str, Any]:
    from vllm_kvpad.hosts.supply import supply_of

    supply = supply_of(getattr(worker, "worker", worker))  # unwrapped
    cache = supply.cache if supply is not None else None
    return {
        "rank": worker.rank,
        "blocks": worker.cache_config.num_gpu_blocks,
        "committed": cache.num_committed_blocks if cache else None,
        "one_chunk_each": all(cache.segments_backed_by_one_chunk()) if cache else None,
    }


def answer_on_two_gpus(
    conversation: Conversation, model: str, executor: str
) -> dict[str, Any]:
    engine, seconds = build_engine(
        model=model,
        tensor_parallel_size=2,
        distributed_executor_backend=executor,
        gpu_memory_utilization=0.05,
        # Ray differs in how workers are started and told what to do; without graphs
        # they are there sooner.
        enforce_eager=executor == "ray",
    )
    facts = engine.collective_rpc(_rank_facts)
    answers = greedy(engine, token_prompts(16))
    engine.llm_engine.engine_core.shutdown()
    return {"ranks": facts, "answers": answers, "seconds": round(seconds, 1)}


@pytest.mark.parametrize("executor", ["mp", "ray"])
def test_both_ranks_commit_the_same_and_answers_equal_stock(
    executor: str, log: Callable[[str], Path], figure: Callable[..., None]
) -> None:
    import torch

    from checkpoint import ensure_checkpoint

    if len(list(Path("/dev").glob("nvidia[0-9]*"))) < 2:
        pytest.skip("needs two GPUs")
    if executor == "ray" and importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed")
    assert not torch.cuda.is_initialized()
    # Four KV heads: three cannot be split over two ranks.
    model = str(ensure_checkpoint(kv_heads=4))
    stock, kvpad = in_turn(
        answer_on_two_gpus,
        log,
        environment=_ENVIRONMENT,
        timeout=280,
        model=model,
        executor=executor,
    )
    figure(ranks_stock=stock["ranks"], ranks_kvpad=kvpad["ranks"])
    assert kvpad["answers"] == stock["answers"]
    counts = {(rank["blocks"], rank["committed"]) for rank in kvpad["ranks"]}
    assert len(kvpad["ranks"]) == 2
    assert len(counts) == 1
    blocks, committed = counts.pop()
    assert blocks == committed
