"""Real engines for the tests: one pair per configuration and module.

Two pairs at a time would not fit two cores, so starting one stops another; what a
pair answered is kept for the module, and a stopped pair starts again when needed.
Every engine's log lies in one folder (``$KVPAD_LOG_DIR``, else pytest's own), and the
end of it is part of the report of a test that failed with it.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from checkpoint import ensure_checkpoint
from engines import Engine, EngineSpec, Handover, PrefillDecodePair
from prompts import prompts

MAX_TOKENS = 24
PROBE = Path(__file__).parent / "probe"


@dataclass(frozen=True)
class Answers:
    """What a pair did with the eight prompts.

    Attributes:
        handovers: In the prompts' order.
        failed_transfers: On both sides.
        num_blocks: KV cache blocks of the prefill and of the decode engine.
    """

    handovers: list[Handover]
    failed_transfers: int
    num_blocks: tuple[int, int]

    @property
    def texts(self) -> list[str]:
        return [handover.text for handover in self.handovers]


class Fleet:
    """The engines of a module. Use through the fixture ``fleet``."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._pairs: dict[str, PrefillDecodePair] = {}
        self._answers: dict[str, Answers] = {}
        self.used: dict[str, Path] = {}  # log files, by engine, since a test began

    def spec(self, name: str) -> EngineSpec:
        """The configuration called ``name``, made of words joined by ``-``.

        ``stock`` or ``kvpad`` first; then ``blhnc`` for the block-outermost layout,
        ``tp2`` for two ranks.
        """
        kind, *words = name.split("-")
        plugins = {"stock": ["kvpad_probe"], "kvpad": ["kvpad_probe", "kvpad"]}[kind]
        env: dict[str, str] = {}
        changes = []
        tensor_parallel = 1
        for word in words:
            if word == "blhnc":
                env["VLLM_KV_CACHE_LAYOUT"] = "BLHNC"
                changes.append("block_outermost_layout")
            elif word == "tp2":
                tensor_parallel = 2
                env["VLLM_LOGGING_LEVEL"] = "DEBUG"  # rank 1 says nothing else
            else:
                raise ValueError(f"configuration {name!r}: unknown word {word!r}")
        if name == "stock":
            plugins = []  # as stock as can be
        else:
            env |= probe_environment(self.probe_dir(name), *changes)
        # Three KV heads cannot be split over two ranks.
        model = ensure_checkpoint(kv_heads=4 if tensor_parallel == 2 else 3)
        return EngineSpec(
            model, plugins=tuple(plugins), env=env, tensor_parallel=tensor_parallel
        )

    def probe_dir(self, name: str) -> Path:
        """Where the probe of configuration ``name`` writes."""
        return self._log_dir / f"{name}-probe"

    def pair(self, name: str) -> PrefillDecodePair:
        """The running pair of configuration ``name``, started if it is not."""
        if name not in self._pairs:
            self.stop()
            spec = self.spec(name)
            for role in ("prefill", "decode"):
                self._note(f"{name}-{role}")
            self._pairs[name] = PrefillDecodePair(name, spec, self._log_dir)
        pair = self._pairs[name]
        for engine in (pair.prefill, pair.decode):
            self._note(engine.name)
        return pair

    def answers(self, name: str) -> Answers:
        """What the pair of configuration ``name`` makes of the eight prompts.

        With two ranks an engine, every second one: four workers share two cores.
        """
        if name not in self._answers:
            pair = self.pair(name)
            step = pair.decode.spec.tensor_parallel
            self._answers[name] = Answers(
                handovers=[
                    pair.run(prompt, MAX_TOKENS)
                    for prompt in prompts()[step - 1 :: step]
                ],
                failed_transfers=pair.failed_transfers(),
                num_blocks=(pair.prefill.num_blocks(), pair.decode.num_blocks()),
            )
        return self._answers[name]

    @contextlib.contextmanager
    def engines(self, specs: Mapping[str, EngineSpec]) -> Iterator[dict[str, Engine]]:
        """Start single engines side by side, by name; they are not waited for."""
        self.stop()
        with contextlib.ExitStack() as stack:
            started = {}
            for name, spec in specs.items():
                self._note(name)
                engine = Engine(name, spec, self._log_dir)
                started[name] = stack.enter_context(engine)
            yield started

    @contextlib.contextmanager
    def own_pair(
        self, name: str, prefill: EngineSpec, decode: EngineSpec
    ) -> Iterator[PrefillDecodePair]:
        """Start a pair that its user may harm, and stop what is left of it."""
        self.stop()
        for role in ("prefill", "decode"):
            self._note(f"{name}-{role}")
        pair = PrefillDecodePair(name, prefill, self._log_dir, decode_spec=decode)
        with pair:
            yield pair

    def stop(self) -> None:
        """Stop the running pair."""
        while self._pairs:
            self._pairs.popitem()[1].stop()

    def _note(self, engine: str) -> None:
        self.used[engine] = self._log_dir / f"{engine}.log"


def probe_environment(folder: Path, *changes: str) -> dict[str, str]:
    """Environment for an engine with ``kvpad_probe`` among its plugins."""
    folder.mkdir(parents=True, exist_ok=True)
    return {
        "PYTHONPATH": str(PROBE),
        "KVPAD_PROBE_DIR": str(folder),
        "KVPAD_PROBE_CHANGES": ",".join(changes),
    }


def registered_regions(folder: Path, pids: list[int]) -> dict[int, list[Any]]:
    """The address and length of all that NIXL registered, by worker pid."""
    regions = {}
    for pid in pids:
        file = folder / f"registered-{pid}"
        if file.exists():
            lines = file.read_text().splitlines()
            regions[pid] = [region for line in lines for region in json.loads(line)]
    return regions


def kvpad_samples(engine: Engine) -> dict[str, tuple[dict[str, str], float]]:
    """Labels and value of each of kvpad's samples on ``/metrics``, by name."""
    found = [
        sample
        for family in text_string_to_metric_families(engine.metrics())
        for sample in family.samples
        if "kvpad" in sample.name
    ]
    by_name = {sample.name: (sample.labels, sample.value) for sample in found}
    assert len(by_name) == len(found)  # one engine, so one sample of each
    return by_name


def assert_metrics_are_the_logged_facts(engine: Engine) -> None:
    """``/metrics`` says of rank 0 what the log says, under vLLM's labels."""
    facts = engine.supplied()[0]
    samples = kvpad_samples(engine)
    for name, fact in (
        ("committed_blocks", "blocks"),
        ("capacity_blocks", "capacity_blocks"),
        ("physical_bytes", "physical_bytes"),
        ("padding_bytes", "padding_bytes"),
        ("chunks", "chunks"),
    ):
        labels, value = samples.pop(f"vllm:kvpad_{name}")
        assert labels == {"model_name": "model", "engine": "0"}
        assert value == facts[fact], name
    labels, value = samples.pop("vllm:kvpad_info")
    assert value == 1
    assert labels == {
        "model_name": "model",
        "engine": "0",
        "mode": "supplied",
        "reason": "",
        "connector": facts["connector"] or "",
        "registers_device_memory": str(facts["registers_device_memory"]).lower()
        if facts["connector"]
        else "",
        "source": facts["source"] if facts["connector"] else "",
    }
    assert samples.pop("vllm:kvpad_commit_seconds_count")[1] == 1
    assert 0 < samples.pop("vllm:kvpad_commit_seconds_sum")[1] < 60
    assert samples == {}
    assert engine.num_blocks() == facts["blocks"]


def kvpad_lines(engine: Engine) -> list[str]:
    """The log lines of any level that kvpad wrote."""
    _, *log = engine.log_text().splitlines()  # the first is the command
    model = str(engine.spec.model)  # its folder is named after the project
    return [line for line in log if re.search(r"\bkvpad\b", line.replace(model, ""))]
