"""Engines that are copies of each other, and engines in stages: a cache each.

Data parallel: two engines behind one front end, which sends each request to one of
them. Pipeline parallel: one engine, whose two workers hold half of the layers each.
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from fleet import Fleet, probe_environment
from mappings import kvpad_memory
from prometheus_client.parser import text_string_to_metric_families

from engines import Engine
from prompts import prompts

pytestmark = [pytest.mark.e2e, pytest.mark.extended]

LAYERS = 30
# Keys and values, 3 heads of 64 float32, 32 tokens.
PAGE = 2 * 3 * 64 * 4 * 32
MAX_TOKENS = 16
MIB = 1 << 20


@dataclass(frozen=True)
class Run:
    """What a server did with some prompts, and what there was to see of it.

    Attributes:
        texts: In the prompts' order.
        served: Prompt tokens that each engine worked on, by its number.
        blocks: What each engine's scheduler deals out.
        samples: Values of kvpad's metrics, by name and engine.
        supplied: What kvpad logged of each worker.
        held: Bytes behind the KV cache of each process that has one.
        warnings: Of kvpad.
    """

    texts: list[str]
    served: dict[str, float]
    blocks: dict[str, int]
    samples: dict[str, dict[str, float]]
    supplied: list[dict[str, Any]]
    held: list[int]
    warnings: list[str]


def run(fleet: Fleet, name: str, *args: str, plugins: tuple[str, ...]) -> Run:
    probe = probe_environment(fleet.probe_dir(name), "eager_warm_up")
    spec = dataclasses.replace(
        fleet.spec("stock"),
        plugins=("kvpad_probe", *plugins),
        # In float32 a text does not depend on what is computed beside it.
        args=(*args, "--dtype", "float32"),
        # Rank 1 says what it was supplied with at this level only.
        env={**probe, "VLLM_LOGGING_LEVEL": "DEBUG"},
    )
    with fleet.engines({name: spec}) as started:
        engine = started[name]
        engine.wait_healthy()
        with ThreadPoolExecutor() as pool:  # at once, so that no engine is idle
            texts = list(
                pool.map(
                    lambda prompt: engine.complete(prompt, MAX_TOKENS).text,
                    prompts()[:6],
                )
            )
        return look_at(engine, texts)


def look_at(engine: Engine, texts: list[str]) -> Run:
    served, blocks, samples = {}, {}, dict[str, dict[str, float]]()
    for family in text_string_to_metric_families(engine.metrics()):
        for sample in family.samples:
            number = sample.labels.get("engine", "")
            if sample.name == "vllm:prompt_tokens_total":
                served[number] = sample.value
            elif sample.name == "vllm:cache_config_info":
                blocks[number] = int(sample.labels["num_gpu_blocks"])
            elif "kvpad" in sample.name:
                samples.setdefault(sample.name, {})[number] = sample.value
    held = [
        sum(m.end - m.start for m in memory)
        for pid in engine.pids()
        if (memory := kvpad_memory(pid))
    ]
    return Run(
        texts=texts,
        served=served,
        blocks=blocks,
        samples=samples,
        supplied=engine.supplied(),
        held=held,
        warnings=[
            line
            for line in engine.log_text().splitlines()
            if "WARNING" in line and "kvpad steps aside" in line
        ],
    )


def both(fleet: Fleet, kind: str) -> dict[str, Run]:
    """One after the other: four engines at a time would not fit 16 GiB."""
    args = f"--{kind}-parallel-size", "2"
    return {
        name: run(fleet, f"{kind}-parallel-{name}", *args, plugins=plugins)
        for name, plugins in {"stock": (), "kvpad": ("kvpad",)}.items()
    }


@pytest.fixture(scope="module")
def data(fleet: Fleet) -> dict[str, Run]:
    return both(fleet, "data")


@pytest.fixture(scope="module")
def pipeline(fleet: Fleet) -> dict[str, Run]:
    return both(fleet, "pipeline")


def test_data_parallel_engines_answer_as_stocks(data: dict[str, Run]) -> None:
    stock, kvpad = data["stock"], data["kvpad"]
    assert stock.texts[0].startswith(" Paris")
    assert kvpad.texts == stock.texts
    assert kvpad.blocks == stock.blocks
    # Both engines did some of it.
    assert set(kvpad.served) == {"0", "1"}
    assert min(kvpad.served.values()) > 0


def test_each_data_parallel_engine_has_a_cache_of_its_own(
    data: dict[str, Run],
) -> None:
    stock, kvpad = data["stock"], data["kvpad"]
    assert stock.held == stock.supplied == []
    assert kvpad.warnings == []
    first, second = kvpad.supplied
    assert first == second
    assert kvpad.held == [first["physical_bytes"]] * 2


def test_the_metrics_show_both_engines(data: dict[str, Run]) -> None:
    stock, kvpad = data["stock"], data["kvpad"]
    assert stock.samples == {}
    facts, _ = kvpad.supplied
    assert kvpad.samples["vllm:kvpad_info"] == {"0": 1, "1": 1}
    for name, fact in (
        ("committed_blocks", "blocks"),
        ("physical_bytes", "physical_bytes"),
    ):
        values = kvpad.samples[f"vllm:kvpad_{name}"]
        assert values == {"0": facts[fact], "1": facts[fact]}


def test_a_pipeline_answers_as_stocks(pipeline: dict[str, Run]) -> None:
    stock, kvpad = pipeline["stock"], pipeline["kvpad"]
    assert stock.texts[0].startswith(" Paris")
    assert kvpad.texts == stock.texts
    assert kvpad.blocks == stock.blocks
    assert stock.held == stock.supplied == []


def test_each_stage_of_a_pipeline_has_its_layers(pipeline: dict[str, Run]) -> None:
    kvpad = pipeline["kvpad"]
    assert kvpad.warnings == []
    assert len(kvpad.supplied) == 2
    assert sum(facts["segments"] for facts in kvpad.supplied) == LAYERS
    (blocks,) = kvpad.blocks.values()
    for facts in kvpad.supplied:
        assert facts["blocks"] == blocks
        assert facts["committed_bytes"] == facts["segments"] * blocks * PAGE
        assert 0 <= facts["physical_bytes"] - facts["committed_bytes"] < 2 * MIB
    assert sorted(kvpad.held) == sorted(f["physical_bytes"] for f in kvpad.supplied)
