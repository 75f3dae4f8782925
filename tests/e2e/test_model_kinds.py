"""Warm up first, then size, for models and features beyond plain full attention.

Each answers as stock does, from a cache that was measured, remapped into one chunk for
each segment (a registering connector is configured) and adopted.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from test_measured_path import NIXL, start
from tiny_models import SLIDING_WINDOW, save_hybrid, save_lora, save_mla

from checkpoint import ensure_checkpoint

pytestmark = pytest.mark.e2e


def token_prompts(vocabulary: int) -> list[list[int]]:
    """Long and short prompts, and two that differ only in their first tokens."""
    draw = random.Random(0)
    lengths = (20, 700, SLIDING_WINDOW + 9, 300)
    prompts = [[draw.randrange(3, vocabulary) for _ in range(n)] for n in lengths]
    end = prompts[0][4:]
    return [*prompts, [draw.randrange(3, vocabulary) for _ in range(4)] + end]


def hybrid(folder: Path) -> dict[str, Any]:
    model = save_hybrid(folder / "model")
    return {"model": str(model), "token_prompts": token_prompts(4096)}


def mla(folder: Path) -> dict[str, Any]:
    model = save_mla(folder / "model")
    return {"model": str(model), "token_prompts": token_prompts(4096)}


def ngram(folder: Path) -> dict[str, Any]:
    speculation = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 3,
    }
    return {"engine": {"speculative_config": speculation}}


def draft_model(folder: Path) -> dict[str, Any]:
    speculation = {
        "method": "draft_model",
        "model": str(ensure_checkpoint()),
        "num_speculative_tokens": 3,
    }
    return {"engine": {"speculative_config": speculation}}


def lora(folder: Path) -> dict[str, Any]:
    adapter = save_lora(ensure_checkpoint(), folder / "adapter")
    return {"lora": str(adapter), "engine": {"enable_lora": True}}


FEATURES = ngram, draft_model, lora


@pytest.mark.parametrize(
    "kind",
    [
        hybrid,
        mla,
        *(pytest.param(k, marks=pytest.mark.extended) for k in FEATURES),
    ],
    ids=lambda kind: kind.__name__,
)
def test_answers_as_stock_from_a_measured_cache(
    kind: Callable[[Path], dict[str, Any]], tmp_path: Path
) -> None:
    options = kind(tmp_path)
    if "token_prompts" in options:
        options.setdefault("engine", {})["skip_tokenizer_init"] = True
    options |= {"kv_transfer_config": NIXL, "budget_mib": 1200}
    with ThreadPoolExecutor() as pool:
        stock, kvpad = pool.map(
            lambda plugin: start(tmp_path, plugin=plugin, **options), (False, True)
        )
    assert kvpad["answers"] == stock["answers"]
    assert kvpad["warm_ups"] == 1
    assert "kvpad steps aside" not in kvpad["log"]
    assert kvpad["blocks"] == kvpad["committed"]
    assert kvpad["blocks"] * kvpad["bytes_per_block"] == kvpad["measured_bytes"]
    assert all(kvpad["one_chunk_each"])
    assert all(kvpad["aligned"])
    if "token_prompts" in options:
        # What is said depends on the whole context, so on what the cache holds.
        answers = stock["answers"]
        assert answers[0] != answers[-1]
