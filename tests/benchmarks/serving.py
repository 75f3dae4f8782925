"""Throughput, time to first token and inter-token latency of vLLM servers, in turn.

The client is vLLM's own (``vllm bench serve``), called by its module: the ``vllm``
command of the CPU wheel does not find its own metadata.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results import Recorder, Series

from engines import Engine, EngineSpec

_CLIENT = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""

METRICS = {
    # Name in the client's result: name, unit, factor to that unit.
    "output_throughput": ("output throughput", "tokens/s", 1.0),
    "median_ttft_ms": ("time to first token, median", "s", 1e-3),
    "p99_ttft_ms": ("time to first token, 99th percentile", "s", 1e-3),
    "median_itl_ms": ("inter-token latency, median", "s", 1e-3),
    "p99_itl_ms": ("inter-token latency, 99th percentile", "s", 1e-3),
}


@dataclass(frozen=True)
class Load:
    """Random prompts that arrive at random (a Poisson process).

    Attributes:
        tokenizer: Folder that holds it.
        requests: How many.
        request_rate: Arrivals a second.
        input_len: Tokens of a prompt.
        output_len: Tokens of an answer.
    """

    tokenizer: Path
    requests: int
    request_rate: float
    input_len: int
    output_len: int


def serve_in_turn(
    recorder: Recorder,
    where: str,
    specs: Mapping[str, EngineSpec],
    load: Load,
    rounds: int,
    logs: Path,
) -> None:
    """Start a server for each spec, load them in turn, add a series for each metric.

    Raises:
        EngineError: A server did not start.
        RuntimeError: The client failed, or requests did.
    """
    with ExitStack() as stack:
        engines = {}
        for name, spec in specs.items():
            engine = stack.enter_context(Engine(f"serving-{name}", spec, logs))
            # One after the other: two that measure at once see each other grow.
            engine.wait_healthy()
            engines[name] = engine
        for engine in engines.values():
            _drive(engine, load, seed=0)  # kernels that are compiled on first use
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
        for number in range(1, rounds + 1):
            for name, engine in engines.items():
                found[name].append(_drive(engine, load, seed=number))
        blocks = {name: engine.num_blocks() for name, engine in engines.items()}
        supplied = {name: bool(engine.supplied()) for name, engine in engines.items()}
    for key, (name, unit, factor) in METRICS.items():
        recorder.add(
            Series(
                name=f"{name}: {where}",
                unit=unit,
                reference="stock",
                samples={
                    variant: [each[key] * factor for each in of]
                    for variant, of in found.items()
                },
                facts={"blocks": blocks, "kvpad_supplied": supplied},
            )
        )


def _drive(engine: Engine, load: Load, seed: int) -> dict[str, Any]:
    """Send the load once; the client's own result.

    Raises:
        RuntimeError: The client failed, or requests did.
    """
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                *(sys.executable, "-c", _CLIENT),
                *("--backend", "openai", "--endpoint", "/v1/completions"),
                *("--base-url", f"http://127.0.0.1:{engine.port}"),
                *("--model", "model", "--tokenizer", str(load.tokenizer)),
                *("--dataset-name", "random", "--ignore-eos"),
                *("--random-input-len", str(load.input_len)),
                *("--random-output-len", str(load.output_len)),
                *("--num-prompts", str(load.requests)),
                *("--request-rate", str(load.request_rate)),
                *("--seed", str(seed), "--disable-tqdm"),
                *("--percentile-metrics", "ttft,itl"),
                *("--metric-percentiles", "99"),
                *("--save-result", "--result-dir", folder),
                *("--result-filename", "result.json"),
            ],
            env={**os.environ, "VLLM_PLUGINS": "", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        result_file = Path(folder, "result.json")
        if done.returncode or not result_file.exists():
            raise RuntimeError(f"the client failed:\n{done.stderr[-4000:]}")
        result: dict[str, Any] = json.loads(result_file.read_text())
    if result["completed"] != load.requests:
        raise RuntimeError(
            f"{engine.name}: {result['completed']} of {load.requests} requests "
            f"completed; {engine.log_path} ends:\n{engine.log_tail()}"
        )
    return result
