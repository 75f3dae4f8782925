"""NIXL between two CPU engines over shared memory: stock, padded, blocks outermost."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from pathlib import Path

from results import Recorder, Series

from checkpoint import ensure_checkpoint
from engines import EngineSpec, PrefillDecodePair
from prompts import prompts

PROBE = Path(__file__).resolve().parent.parent / "e2e" / "probe"
REQUESTS = 6  # a round and pair


def specs() -> dict[str, EngineSpec]:
    """What each pair runs. A small cache: six engines share the machine."""
    model = ensure_checkpoint()
    args = ("--num-gpu-blocks-override", "128")
    path = os.pathsep.join(filter(None, (str(PROBE), os.environ.get("PYTHONPATH"))))
    return {
        "stock": EngineSpec(model, args=args),
        "kvpad, padded": EngineSpec(model, plugins=("kvpad",), args=args),
        "kvpad, blocks outermost": EngineSpec(
            model,
            # vLLM does not list the layout for its CPU kernels, which can use it.
            plugins=("kvpad_probe", "kvpad"),
            args=args,
            env={
                "PYTHONPATH": path,
                "KVPAD_PROBE_CHANGES": "block_outermost_layout",
                "VLLM_KV_CACHE_LAYOUT": "BLHNC",
            },
        ),
    }


def main(rounds: int = 7) -> None:
    recorder = Recorder("transfer")
    logs = recorder.path.parent / "logs"
    prompt = prompts()[-1]
    with ExitStack() as stack:
        pairs = {}
        for number, (kind, spec) in enumerate(specs().items()):
            pair = PrefillDecodePair(f"transfer-{number}", spec, logs, print)
            pairs[kind] = stack.enter_context(pair)
            pair.run(prompt, 1)  # the first one shakes hands
        found: dict[str, list[dict[str, float]]] = {kind: [] for kind in pairs}
        for _ in range(rounds):
            for kind, pair in pairs.items():
                found[kind].append(hand_over(pair, prompt))
        failed = {kind: pair.failed_transfers() for kind, pair in pairs.items()}
        supplied = {kind: pair.decode.supplied() for kind, pair in pairs.items()}
    facts = {
        "requests_per_round": REQUESTS,
        "bytes_per_request": {kind: of[0]["bytes"] for kind, of in found.items()},
        "descriptors_per_request": {
            kind: of[0]["descriptors"] for kind, of in found.items()
        },
        "failed": failed,
        "segments": {
            kind: each[0]["segments"] if each else None
            for kind, each in supplied.items()
        },
    }
    for name, unit in (("bandwidth", "B/s"), ("decode engine's time to answer", "s")):
        recorder.add(
            Series(
                name=f"NIXL over shared memory: {name}",
                unit=unit,
                reference="stock",
                samples={
                    kind: [each[name] for each in of] for kind, of in found.items()
                },
                facts=facts,
            )
        )


def hand_over(pair: PrefillDecodePair, prompt: str) -> dict[str, float]:
    """Hand the prompt's blocks over a few times; averages of one request.

    Raises:
        EngineError: A server refused or died.
        TimeoutError: The decode engine reports fewer transfers than were asked for.
    """
    before = _transferred(pair)
    spent = 0.0
    for _ in range(REQUESTS):
        offered = pair.prefill.complete(
            prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True}
        )
        began = time.perf_counter()
        pair.decode.complete(
            prompt, max_tokens=1, kv_transfer_params=offered.kv_transfer_params
        )
        spent += time.perf_counter() - began
    # The worker's numbers reach /metrics with a later step's output.
    deadline = time.monotonic() + 10
    while (after := _transferred(pair))["count"] < before["count"] + REQUESTS:
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{pair.decode.name} reports {after['count'] - before['count']:.0f} "
                f"transfers after 10 s, not {REQUESTS}"
            )
        time.sleep(0.05)
    moved = {name: after[name] - before[name] for name in after}
    return {
        "bytes": moved["bytes"] / REQUESTS,
        "descriptors": moved["descriptors"] / REQUESTS,
        "bandwidth": moved["bytes"] / moved["seconds"],
        "decode engine's time to answer": spent / REQUESTS,
    }


def _transferred(pair: PrefillDecodePair) -> dict[str, float]:
    metric = pair.decode.metric
    return {
        "count": metric("vllm:nixl_bytes_transferred_count"),
        "bytes": metric("vllm:nixl_bytes_transferred_sum"),
        "seconds": metric("vllm:nixl_xfer_time_seconds_sum"),
        "descriptors": metric("vllm:nixl_num_descriptors_sum"),
    }
