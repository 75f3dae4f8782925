"""NIXL between two CPU engines over shared memory: stock, padded, blocks outermost."""

from __future__ import annotations

import os
import time
from pathlib import Path

from results import Recorder, Series

from checkpoint import ensure_checkpoint
from engines import EngineSpec, PrefillDecodePair
from prompts import prompts

PROBE = Path(__file__).resolve().parent.parent / "e2e" / "probe"
REQUESTS = 2  # a round
PASSES = 2


def specs() -> dict[str, EngineSpec]:
    """What each pair runs; a small cache, which is all that one prompt needs."""
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


def main(rounds: int = 4) -> None:
    """Two passes over the kinds of pairs, ``rounds`` in each.

    One pair at a time, unlike elsewhere: NIXL's progress threads poll, and those of
    three pairs would leave a small machine no time for anything else.
    """
    recorder = Recorder("transfer")
    logs = recorder.path.parent / "logs"
    prompt = prompts()[-1]
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in specs()}
    failed = dict.fromkeys(found, 0)
    segments: dict[str, int | None] = {}
    for number in range(PASSES):
        for index, (kind, spec) in enumerate(specs().items()):
            name = f"transfer-{number}-{index}"
            print(f"pass {number + 1} of {PASSES}: {kind}", flush=True)
            with PrefillDecodePair(name, spec, logs) as pair:
                hand_over(pair, prompt)  # the first one shakes hands
                found[kind] += [hand_over(pair, prompt) for _ in range(rounds)]
                failed[kind] += pair.failed_transfers()
                supplied = pair.decode.supplied()
                segments[kind] = supplied[0]["segments"] if supplied else None
    facts = {
        "requests_per_round": REQUESTS,
        "bytes_per_request": {kind: of[0]["bytes"] for kind, of in found.items()},
        "descriptors_per_request": {
            kind: of[0]["descriptors"] for kind, of in found.items()
        },
        "failed": failed,
        "segments": segments,
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
