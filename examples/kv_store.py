"""Prompts asked twice: the second time their KV cache comes from a store, over NIXL.

Starts one engine on this machine's CPU with kvpad and the connector of
``nixl_store_connector.py``, asks eight prompts, makes the engine forget its prefix
cache and asks again:

    python examples/kv_store.py

Exit status: 0 if every text is the same, the tokens came from the store and every
registered region lies in one memory mapping; 1 if not; 2 if the engine did not start
or died.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
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

MAX_TOKENS = 24
STORE_BLOCKS = 256


@dataclass(frozen=True)
class Answer:
    """The answer to one prompt, and where the prompt's KV cache came from.

    Attributes:
        text: What the model wrote.
        prompt_tokens: Length of the prompt.
        local_tokens: Tokens that the engine's own prefix cache still had.
        store_tokens: Tokens that the connector brought back.
    """

    text: str
    prompt_tokens: int
    local_tokens: int
    store_tokens: int

    @property
    def storable_tokens(self) -> int:
        """Tokens in whole blocks, the one left that the model must compute."""
        return (self.prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE


def store_spec(
    model: Path,
    plugins: tuple[str, ...] = ("kvpad",),
    store_blocks: int = STORE_BLOCKS,
) -> EngineSpec:
    """An engine with the store connector, prefix caching and its reset.

    In float32: a prefix that is loaded leaves fewer tokens to compute at once, and
    bfloat16 rounds visibly differently then; now and then that changes a word.
    """
    return EngineSpec(
        model,
        plugins=plugins,
        kv_transfer={
            "kv_connector": "NixlStoreConnector",
            "kv_connector_module_path": "nixl_store_connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"store_blocks": store_blocks},
        },
        args=("--enable-prefix-caching", "--dtype", "float32"),
        env={
            "PYTHONPATH": str(Path(__file__).resolve().parent),
            "VLLM_SERVER_DEV_MODE": "1",
        },
    )


def ask(engine: Engine, prompt: str, max_tokens: int = MAX_TOKENS) -> Answer:
    """Ask one prompt, and read off vLLM's own counters what was cached."""
    names = [
        "vllm:prefix_cache_hits_total",
        "vllm:external_prefix_cache_hits_total",
    ]
    before = [engine.metric(name) for name in names]
    completion = engine.complete(prompt, max_tokens)
    local, store = (
        int(engine.metric(name) - then)
        for name, then in zip(names, before, strict=True)
    )
    return Answer(completion.text, completion.prompt_tokens, local, store)


def logged(engine: Engine, what: str) -> dict[str, Any]:
    """The connector's last log line about ``what``: ``registered`` or ``totals``.

    Raises:
        EngineError: It has logged none.
    """
    mark = f"NIXL store {what}: "
    lines = [x for x in engine.log_text().splitlines() if mark in x]
    if not lines:
        raise EngineError(f"engine {engine.name}: no line {mark!r} in its log")
    facts: dict[str, Any] = json.loads(lines[-1].partition(mark)[2])
    return facts


def mappings_of(pid: int, address: int, size: int) -> int:
    """How many of the process's memory mappings the range lies in."""
    count = 0
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        count += start < address + size and address < end
    return count


def main(argv: list[str] | None = None) -> int:
    """Run the demo; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--logs", type=Path, help="folder for the engine's log (default: a new one)"
    )
    arguments = parser.parse_args(argv)
    logs = (arguments.logs or Path(tempfile.mkdtemp(prefix="kvpad-store-"))).absolute()
    console = Console(highlight=False)
    # A kill is an exception like any other: the engine is stopped on its way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began = time.monotonic()
    try:
        model = ensure_checkpoint(progress=console.print)
        console.print(f"engine log: {logs}")
        with (
            live_line(console) as show,
            Engine("store", store_spec(model), logs) as engine,
        ):
            engine.wait_healthy(show)
            rounds = []
            for name in ("first", "second"):
                show(f"asking for the {name} time")
                rounds.append([ask(engine, prompt) for prompt in prompts()])
                engine.reset_prefix_cache()
            totals = logged(engine, "totals")
            facts = logged(engine, "registered")
            spread = [
                mappings_of(facts["pid"], address, size)
                for address, size in facts["regions"]
            ]
            supplied = engine.supplied()
    except EngineError as error:
        console.print(Text(f"error: {error}", style="red"))
        return 2

    first, second = rounds
    console.print(answer_table(first, second))
    same = sum(a.text == b.text for a, b in zip(first, second, strict=True))
    expected = sum(answer.storable_tokens for answer in second)
    stored = sum(answer.store_tokens for answer in second)
    single = spread.count(1)
    console.print(
        f"{same} of {len(second)} texts the same; {stored} of {expected} tokens in "
        f"whole blocks came from the store"
    )
    console.print(
        f"over NIXL: {totals['written']} blocks and {totals['bytes_written']:,} bytes "
        f"written, {totals['read']} blocks and {totals['bytes_read']:,} bytes read"
    )
    console.print(
        f"{single} of {len(spread)} registered regions in one mapping each; "
        f"{time.monotonic() - began:.0f} s"
    )
    good = (
        same == len(second)
        and stored == expected == totals["read"] * BLOCK_SIZE
        and single == len(spread)
    )
    if not supplied:
        console.print(f"kvpad supplied no KV cache; see {logs}", style="red")
    return 0 if supplied and good else 1


def answer_table(first: list[Answer], second: list[Answer]) -> Table:
    """One row a prompt: what it took the second time."""
    table = Table(title="asked again after the prefix cache was reset", expand=True)
    table.add_column("continuation", ratio=1, overflow="ellipsis", no_wrap=True)
    table.add_column("as before", no_wrap=True)
    for heading in ("prompt tokens", "from the store", "computed"):
        table.add_column(heading, justify="right", no_wrap=True)
    for before, after in zip(first, second, strict=True):
        same = before.text == after.text
        table.add_row(
            # Texts, not markup: a model may well write brackets.
            Text(" ".join(after.text.split())),
            Text("same", style="green") if same else Text("DIFFERENT", style="red"),
            str(after.prompt_tokens),
            str(after.store_tokens),
            str(after.prompt_tokens - after.store_tokens - after.local_tokens),
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
