"""Real text prefilled in one vLLM and decoded in another, out of kvpad's KV cache.

Runs eight prompts through a stock prefill/decode pair, then through a pair with
``VLLM_PLUGINS=kvpad``, with the KV cache handed over by NIXL, and prints what was the
same and where the bytes lay. On this machine's CPU, and on GPUs in an environment with
vLLM for CUDA:

    tox run -e demo
    python examples/prefill_decode.py --gpus 0     # both engines on one GPU
    python examples/prefill_decode.py --gpus 0,1   # one each

Exit status: 0 if every text equals the stock pair's and no transfer failed, 1 if
not, 2 if an engine did not start or died.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from checkpoint import ensure_checkpoint
from engines import (
    BLOCK_SIZE,
    EngineError,
    EngineSpec,
    Handover,
    PrefillDecodePair,
)
from prompts import prompts

MAX_TOKENS = 24


def main(argv: list[str] | None = None) -> int:
    """Run the demo; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--logs", type=Path, help="folder for the engines' logs (default: a new one)"
    )
    parser.add_argument(
        "--gpus",
        default="",
        help="one or two CUDA devices, comma-separated (default: run on the CPU)",
    )
    parser.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=EngineSpec.gpu_memory_utilization,
        help="share of a GPU's memory for each engine (default: %(default)s)",
    )
    arguments = parser.parse_args(argv)
    gpus = tuple(filter(None, arguments.gpus.split(",")))
    if len(gpus) > 2:
        parser.error("--gpus names more than two devices")
    logs = (arguments.logs or Path(tempfile.mkdtemp(prefix="kvpad-demo-"))).absolute()
    console = Console(highlight=False)
    # A kill is an exception like any other: the engines are stopped on its way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    began = time.monotonic()
    try:
        model = ensure_checkpoint(progress=console.print)
        console.print(f"engine logs: {logs}")
        spec = EngineSpec(
            model, gpus=gpus, gpu_memory_utilization=arguments.gpu_memory_utilization
        )
        stock, stock_failed, _ = run_pair(console, "stock", spec, logs)
        spec = dataclasses.replace(spec, plugins=("kvpad",))
        padded, padded_failed, supplied = run_pair(console, "kvpad", spec, logs)
    except EngineError as error:
        console.print(Text(f"error: {error}", style="red"))
        return 2

    console.print(prompt_table(stock, padded))
    if supplied:
        console.print(placement_table(supplied[0]))
    different = sum(a.text != b.text for a, b in zip(stock, padded, strict=True))
    failed = stock_failed + padded_failed
    total = sum(handover.bytes_transferred for handover in padded)
    blocks = sum(handover.blocks for handover in padded)
    console.print(
        f"{len(padded) - different} of {len(padded)} texts as the stock pair's, "
        f"{blocks} blocks and {total:,} bytes transferred, {failed} failed "
        f"transfers, {time.monotonic() - began:.0f} s"
    )
    if not supplied:
        console.print(f"kvpad supplied no KV cache; see {logs}", style="red")
    return 0 if supplied and not different and not failed else 1


def run_pair(
    console: Console, name: str, spec: EngineSpec, logs: Path
) -> tuple[list[Handover], int, list[dict[str, Any]]]:
    """Run every prompt through a pair of engines.

    Returns:
        The handovers in the prompts' order, the failed transfers, and what kvpad
        logged of the decode engine's workers (nothing on a stock engine).
    """
    with (
        live_line(console) as show,
        PrefillDecodePair(name, spec, logs, progress=show) as pair,
    ):
        handovers = []
        texts = prompts()
        for number, prompt in enumerate(texts, start=1):
            show(f"{name}: prompt {number} of {len(texts)}")
            handovers.append(pair.run(prompt, MAX_TOKENS))
        result = handovers, pair.failed_transfers(), pair.decode.supplied()
        show(f"{name}: stopping")
    console.print(f"{name} pair: {len(handovers)} prompts done")
    return result


@contextlib.contextmanager
def live_line(console: Console) -> Iterator[Any]:
    """Yield a function that shows its argument as the one line of progress.

    On a terminal the line is rewritten; in a log file a new one appears every ten
    seconds.
    """
    if console.is_terminal:
        with console.status("") as status:
            yield status.update
        return
    printed = float("-inf")

    def show(line: str) -> None:
        nonlocal printed
        if (now := time.monotonic()) - printed >= 10:
            printed = now
            console.print(line)

    yield show


def prompt_table(stock: list[Handover], padded: list[Handover]) -> Table:
    """One row a prompt: is the text the stock pair's, and what was moved for it."""
    table = Table(title="prefilled in one engine, decoded in another", expand=True)
    table.add_column("prompt", ratio=1, overflow="ellipsis", no_wrap=True)
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("continuation", ratio=1, overflow="ellipsis", no_wrap=True)
    table.add_column("as stock", no_wrap=True)
    table.add_column("bytes", justify="right", no_wrap=True)
    for reference, handover in zip(stock, padded, strict=True):
        same = reference.text == handover.text
        table.add_row(
            # Texts, not markup: a model may well write brackets.
            Text(" ".join(handover.prompt.split())),
            str(handover.prompt_tokens),
            Text(" ".join(handover.text.split())),
            Text("same", style="green") if same else Text("DIFFERENT", style="red"),
            f"{handover.bytes_transferred:,}",
        )
    return table


def placement_table(facts: dict[str, Any]) -> Table:
    """Where one engine's KV cache lies, as its worker logged it."""
    table = Table(title="the decode engine's KV cache", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for label, value in [
        ("layout", facts["layout"]),
        ("segments (one a layer)", f"{facts['segments']:,}"),
        ("granule, bytes", f"{facts['granule_bytes']:,}"),
        ("chunks of physical memory", f"{facts['chunks']:,}"),
        ("blocks", f"{facts['blocks']:,} of {BLOCK_SIZE} tokens"),
        ("committed bytes", f"{facts['committed_bytes']:,}"),
        ("address space, bytes", f"{facts['address_space_bytes']:,}"),
        ("of which padding", f"{facts['padding_bytes']:,}"),
        ("physical memory, bytes", f"{facts['physical_bytes']:,}"),
        ("blocks that rounding would have left", f"{facts['rounded_blocks']:,}"),
    ]:
        table.add_row(label, value)
    return table


if __name__ == "__main__":
    sys.exit(main())
