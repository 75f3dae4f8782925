"""Runs ``bench_host.py`` and keeps its figures: microseconds a layer by layers."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from results import Recorder, Spread


def main(rounds: int = 1) -> None:
    """Run once; pytest-benchmark has rounds of its own.

    Raises:
        subprocess.CalledProcessError: A benchmark failed; pytest has said which.
    """
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "pytest-benchmark.json")
        subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
                str(Path(__file__).with_name("bench_host.py")),
                "--benchmark-columns=min,median,max,rounds",
                "--benchmark-sort=name",
                # Of this process alone: a machine that others load still shows growth.
                "--benchmark-timer=time.process_time",
                f"--benchmark-json={found}",
            ],
            check=True,
        )
        growth = growth_by_layers(json.loads(found.read_text())["benchmarks"])
    Recorder("host").note(seconds_by_layers=growth)
    for line in lines(growth):
        print(line)


def growth_by_layers(benchmarks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Median, smallest and largest seconds of each benchmark, by layers."""
    growth: dict[str, dict[str, Any]] = {}
    for benchmark in benchmarks:
        name = str(benchmark["name"]).partition("[")[0].removeprefix("test_")
        if benchmark["params"].get("tensor_per_layer"):
            name += ", a tensor for each layer"
        times = Spread.of(benchmark["stats"]["data"])
        layers = str(benchmark["extra_info"]["layers"])
        of_this = growth.setdefault(name, {"name": name, "seconds": {}})
        of_this["seconds"][layers] = [times.median, times.low, times.high]
    return list(growth.values())


def lines(growth: list[dict[str, Any]]) -> list[str]:
    """One line a benchmark: microseconds a layer at each number of layers."""
    return [
        f"{each['name']}: "
        + ", ".join(
            f"{layers} layers {median / int(layers) * 1e6:.2f} us a layer"
            for layers, (median, *_) in each["seconds"].items()
        )
        for each in growth
    ]
