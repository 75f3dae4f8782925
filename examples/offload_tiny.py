"""About a hundred blocks of KV cache and a connector that offloads them: what starts?

Reproduces vLLM issue 65204 on a GPU: a budget that holds some hundred blocks, which an
extensible cache that rounds to whole granules turns into none. Starts one engine with
kvpad to learn what weights and activations take, computes the utilisation that leaves
about ``--blocks`` blocks beside them, and starts stock vLLM and kvpad with it:

    python examples/offload_tiny.py

Needs an NVIDIA GPU that nothing else uses meanwhile, and vLLM for CUDA. Exit status: 0
if kvpad started with a count that rounding would have cut and both engines, if both
started, wrote the same; 1 if not; 2 if the first engine did not start or died.
"""

from __future__ import annotations

import argparse
import dataclasses
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from checkpoint import ensure_checkpoint
from engines import BLOCK_SIZE, Engine, EngineError, EngineSpec
from prefill_decode import live_line
from prompts import prompts

WIDE_UTILISATION = 0.1
MAX_TOKENS = 24


@dataclass(frozen=True)
class Outcome:
    """What became of one engine.

    Attributes:
        error: Why it did not start, its log's last error; None if it did.
        blocks: Blocks that its scheduler deals out; 0 if it did not start.
        texts: What it wrote.
        facts: What kvpad logged about the cache, empty on a stock engine.
    """

    error: str | None
    blocks: int
    texts: list[str]
    facts: dict[str, Any]


def offloading_spec(model: Path, gpu: str, plugins: tuple[str, ...]) -> EngineSpec:
    """An engine that offloads blocks to 1 GiB of host memory."""
    return EngineSpec(
        model,
        plugins=plugins,
        gpus=(gpu,),
        gpu_memory_utilization=WIDE_UTILISATION,
        args=("--kv-offloading-size", "1"),
    )


def utilisation_for(wanted_blocks: int, facts: dict[str, Any], wide: float) -> float:
    """The utilisation that leaves about ``wanted_blocks`` blocks.

    Args:
        wanted_blocks: How many.
        facts: What kvpad logged of an engine that started at ``wide``.
        wide: That engine's utilisation.

    Raises:
        ValueError: The engine's size was not measured.
    """
    measured = facts.get("measured")
    if measured is None:
        raise ValueError(f"the size was not measured but is {facts['size_from']}")
    total = measured["budget_bytes"] / wide
    rest = measured["resident_bytes"] + measured["activation_peak_bytes"]
    # Each segment loses up to a granule to rounding, half of one on average.
    rounding = facts["segments"] * facts["granule_bytes"] // 2
    return (rest + wanted_blocks * facts["bytes_per_block"] + rounding) / total


def last_error(log: str) -> str:
    """The line of an engine's log that says why it ended."""
    lines = [line for line in log.splitlines() if "Error: " in line]
    return lines[-1].partition("] ")[2] or lines[-1] if lines else "no error in its log"


def start(name: str, spec: EngineSpec, logs: Path, show: Any) -> Outcome:
    """Start an engine and ask it two prompts; that it fails to start is an outcome."""
    with Engine(name, spec, logs) as engine:
        try:
            engine.wait_healthy(show)
        except EngineError:
            return Outcome(last_error(engine.log_text()), 0, [], {})
        show(f"{name}: asking")
        texts = [engine.complete(prompt, MAX_TOKENS).text for prompt in prompts()[:2]]
        supplied = engine.supplied()
        return Outcome(
            None, engine.num_blocks(), texts, supplied[0] if supplied else {}
        )


def main(argv: list[str] | None = None) -> int:
    """Run the reproducer; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gpu", default="0", help="CUDA device (default: 0)")
    parser.add_argument(
        "--blocks", type=int, default=102, help="blocks to aim at (default: 102)"
    )
    parser.add_argument(
        "--logs", type=Path, help="folder for the engines' logs (default: a new one)"
    )
    arguments = parser.parse_args(argv)
    logs = (arguments.logs or Path(tempfile.mkdtemp(prefix="kvpad-tiny-"))).absolute()
    console = Console(highlight=False)
    # A kill is an exception like any other: the engines are stopped on their way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        model = ensure_checkpoint(progress=console.print)
        console.print(f"engine logs: {logs}")
        spec = offloading_spec(model, arguments.gpu, ("kvpad",))
        with live_line(console) as show:
            wide = start("wide", spec, logs, show)
            if wide.error is not None or not wide.facts:
                raise EngineError(wide.error or "kvpad supplied no KV cache")
            utilisation = utilisation_for(
                arguments.blocks, wide.facts, WIDE_UTILISATION
            )
            tiny = dataclasses.replace(spec, gpu_memory_utilization=utilisation)
            stock, kvpad = (
                start(name, dataclasses.replace(tiny, plugins=plugins), logs, show)
                for name, plugins in [("stock", ()), ("kvpad", ("kvpad",))]
            )
    except (EngineError, ValueError) as error:
        console.print(Text(f"error: {error}", style="red"))
        return 2
    console.print(outcome_table(utilisation, stock, kvpad))
    return verdict(stock, kvpad)


def verdict(stock: Outcome, kvpad: Outcome) -> int:
    """The exit status."""
    good = (
        kvpad.error is None
        and kvpad.blocks == kvpad.facts.get("blocks")
        and kvpad.facts["rounded_blocks"] < kvpad.blocks
        and (stock.error is not None or stock.texts == kvpad.texts)
    )
    return 0 if good else 1


def outcome_table(utilisation: float, stock: Outcome, kvpad: Outcome) -> Table:
    """Both engines side by side."""
    table = Table(title=f"CPU offloading at utilisation {utilisation:.5f}")
    for heading in ("", "stock", "kvpad"):
        table.add_column(heading)
    both = (stock, kvpad)
    table.add_row("starts", *(Text(each.error or "yes") for each in both))
    table.add_row(
        f"blocks of {BLOCK_SIZE} tokens", *(f"{each.blocks:,}" for each in both)
    )
    rounded = kvpad.facts.get("rounded_blocks")
    table.add_row("blocks that rounding would leave", "", f"{rounded}")
    if stock.error is None:
        same = stock.texts == kvpad.texts
        table.add_row("texts as stock's", "", "yes" if same else "NO")
    return table


if __name__ == "__main__":
    sys.exit(main())
