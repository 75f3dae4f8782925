"""Start-up, commit, serving and NIXL transfer on a GPU, stock and kvpad in turn.

Engines and jobs are those of ``tests/gpu``; serving runs vLLM's own servers and
``vllm bench serve``'s client. Run by ``tests/benchmarks/run.py gpu``.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from engine_process import EngineProcess, run
from gpu_jobs import GIB, chunked_times, zeroing_limit
from jobs import (
    commit_times,
    start_and_answer,
    token_prompts,
    transfer_peer,
    write_geometry,
    zeros_times,
)
from results import Recorder, Series
from serving import Load, serve_in_turn

from checkpoint import ensure_checkpoint
from engines import EngineSpec, free_ports

# Llama-3.1-8B, but for a vocabulary that SmolLM2's tokenizer has.
GEOMETRY_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
}

# As in engine_process: FlashInfer's would be compiled, which takes nvcc.
SAMPLER = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}

STOCK = {"VLLM_KVPAD_DISABLE": "1"}
"""``VLLM_PLUGINS`` is part of the key of vLLM's compile cache; stock is kvpad switched
off, so that both use one."""


@contextmanager
def geometry(**changes: Any) -> Iterator[Path]:
    """A model without weights, SmolLM2-360M's shape but for ``changes``."""
    with tempfile.TemporaryDirectory() as folder:
        yield write_geometry(Path(folder, "model"), **changes)


def _log(recorder: Recorder, name: str) -> Path:
    folder = recorder.path.parent / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{name}.log"


def startup(rounds: int = 3, utilisations: tuple[float, ...] = (0.3, 0.9)) -> None:
    """Seconds of engine initialisation, and blocks; eager and with graphs."""
    recorder = Recorder("gpu_startup")
    with geometry() as model:
        for mode, options in (
            ("eager", {"enforce_eager": True}),
            ("graphs", {"enforce_eager": False}),
        ):

            def start(variant: str, utilisation: float, **options: Any) -> Any:
                return run(
                    start_and_answer,
                    plugin=True,
                    log=_log(recorder, f"startup-{variant}"),
                    timeout=400,
                    environment=STOCK if variant == "stock" else {},
                    model=str(model),
                    load_format="dummy",
                    skip_tokenizer_init=True,
                    gpu_memory_utilization=utilisation,
                    **options,
                )

            start("kvpad", utilisations[0], **options)  # fills compile caches
            for utilisation in utilisations:
                found: dict[str, list[Any]] = {"stock": [], "kvpad": []}
                for _ in range(rounds):
                    for variant, each in found.items():
                        each.append(start(variant, utilisation, **options))
                _add_startup(recorder, mode, utilisation, found)


def _add_startup(
    recorder: Recorder, mode: str, utilisation: float, found: dict[str, list[Any]]
) -> None:
    where = f"{mode}, utilisation {utilisation}"
    kvpad = found["kvpad"]
    facts = {
        "same_answers": all(
            s["answers"] == k["answers"]
            for s, k in zip(found["stock"], kvpad, strict=True)
        ),
        "kvpad_supplied": [each["kvpad"] for each in kvpad],
        "limit_blocks": [
            (each["budget"] - each["resident"] - each["peak"]) / each["bytes_per_block"]
            for each in kvpad
        ],
        "segments": kvpad[0]["segments"],
        "bytes_per_block": kvpad[0]["bytes_per_block"],
    }
    for name, unit, key, its_facts in (
        ("engine initialisation", "s", "seconds", {}),
        ("blocks", "blocks", "blocks", facts),
        ("device memory in use under load", "B", "used_under_load", {}),
    ):
        recorder.add(
            Series(
                name=f"{name}: {where}",
                unit=unit,
                reference="stock",
                samples={
                    variant: [each[key] for each in of_variant]
                    for variant, of_variant in found.items()
                },
                facts=its_facts,
            )
        )


def commit(rounds: int = 5, sizes: tuple[int, ...] = (1, 10, 40, 80)) -> None:
    """Time to commit zeroed memory and to free it, by how it is cut into chunks.

    Each time in a fresh process, after a rest: the driver goes on reclaiming what was
    freed last, and whoever allocates next waits for it.
    """
    recorder = Recorder("gpu_commit")
    log = _log(recorder, "commit")
    layers = 80

    def once(variant: str, gib: int) -> tuple[float, float]:
        time.sleep(1)
        if variant == "torch.zeros":
            found = run(zeros_times, plugin=False, log=log, gib=gib, layers=layers)
            return found["torch.zeros"], found["torch.zeros, freed"]
        if variant == "kvpad":
            found = run(commit_times, plugin=False, log=log, gib=gib, layers=layers)
        else:
            chunk_mib = int(variant.partition(" ")[0])
            found = run(
                chunked_times, plugin=False, log=log, gib=gib, chunk_mib=chunk_mib
            )
        return found["commit"], found["free"]

    for gib in sizes:
        limit = run(zeroing_limit, plugin=False, log=log, gib=gib, rounds=rounds)
        commits: dict[str, list[float]] = {}
        frees: dict[str, list[float]] = {}
        for _ in range(rounds):
            for variant in ("torch.zeros", "kvpad", "64 MiB chunks", "2 MiB chunks"):
                committed, freed = once(variant, gib)
                commits.setdefault(variant, []).append(committed)
                frees.setdefault(variant, []).append(freed)
        recorder.add(
            Series(
                name=f"commit of {gib} GiB, zeroed",
                unit="s",
                reference="torch.zeros",
                samples={**commits, "limit: zeroing mapped memory": limit["seconds"]},
                facts={
                    "chunks_kvpad": layers,
                    "limit_by_clock_and_bus_seconds": gib * GIB / limit["bandwidth"],
                },
            )
        )
        recorder.add(
            Series(
                name=f"free {gib} GiB",
                unit="s",
                reference="torch.zeros",
                samples=frees,
            )
        )


def serving(rounds: int = 3) -> None:
    """Throughput and latencies of vLLM's server, both up, loaded in turn."""
    recorder = Recorder("gpu_serving")
    checkpoint = ensure_checkpoint()
    with geometry(**GEOMETRY_8B) as model:
        for file in checkpoint.iterdir():
            if "token" in file.name or file.name in ("vocab.json", "merges.txt"):
                shutil.copy(file, model)
        common = (
            *("--load-format", "dummy", "--no-enforce-eager"),
            *("--block-size", "16", "--max-num-seqs", "256"),
            *("--gpu-memory-utilization", "0.4"),
        )
        load = Load(model, requests=200, request_rate=20, input_len=512, output_len=128)
        for where, more in (
            ("each at its own block count", ()),
            ("same block count", ("--num-gpu-blocks-override", "8192")),
        ):
            serve_in_turn(
                recorder,
                where,
                {
                    name: EngineSpec(
                        model,
                        plugins=("kvpad",),
                        args=(*common, *more),
                        env={**SAMPLER, **env},
                    )
                    for name, env in (("stock", STOCK), ("kvpad", {}))
                },
                load,
                rounds,
                recorder.path.parent / "logs",
            )


def transfer(rounds: int = 5) -> None:
    """NIXL between two engines on one GPU: stock, padded, blocks outermost."""
    recorder = Recorder("gpu_transfer")
    options = {
        "model": str(ensure_checkpoint()),
        "gpu_memory_utilization": 0.04,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "max_tokens": 1,
    }
    prompts = [prompt[:896] for prompt in token_prompts(64, seed=5)]
    prompts = [prompt for prompt in prompts if len(prompt) >= 512][:16]
    kinds = {
        "stock": (False, "LBNHC"),
        "kvpad, padded": (True, "LBNHC"),
        "kvpad, blocks outermost": (True, "BLHNC"),
    }
    with ExitStack() as stack:
        pairs: dict[str, tuple[EngineProcess, EngineProcess]] = {}
        for kind, (plugin, layout) in kinds.items():
            peers: list[EngineProcess] = []
            for role in ("prefill", "decode"):
                port = free_ports(2)
                peer = EngineProcess(
                    transfer_peer,
                    plugin=plugin,
                    log=_log(recorder, f"transfer-{kind}-{role}"),
                    environment={
                        "VLLM_KV_CACHE_LAYOUT": layout,
                        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
                    },
                    side_channel_port=port,
                    **options,
                )
                stack.callback(peer.stop)
                # One after the other: stock asserts when two profile at once.
                assert peer.receive() == "ready"
                peers.append(peer)
            prefill, decode = peers
            pairs[kind] = prefill, decode
            _hand_over(prefill, decode, prompts)  # the first one shakes hands
        found: dict[str, list[dict[str, float]]] = {kind: [] for kind in pairs}
        for _ in range(rounds):
            for kind, (prefill, decode) in pairs.items():
                found[kind].append(_hand_over(prefill, decode, prompts))
    for name, unit in (("bandwidth", "B/s"), ("time per request", "s")):
        recorder.add(
            Series(
                name=f"NIXL on one GPU: {name}",
                unit=unit,
                reference="stock",
                samples={
                    kind: [each[name] for each in of] for kind, of in found.items()
                },
                facts={
                    "requests": len(prompts),
                    "bytes": {kind: of[0]["bytes"] for kind, of in found.items()},
                    "descriptors": {
                        kind: of[0]["descriptors"] for kind, of in found.items()
                    },
                    "failed": {kind: of[-1]["failed"] for kind, of in found.items()},
                },
            )
        )


def _hand_over(
    prefill: EngineProcess, decode: EngineProcess, prompts: list[list[int]]
) -> dict[str, float]:
    """Move the prompts' blocks one request at a time; bytes, seconds, bandwidth."""
    before = _transfers(decode)
    spent = 0.0
    for prompt in prompts:
        prefill.send(("prefill", [prompt]))
        parameters = prefill.receive()
        began = time.perf_counter()
        decode.send(("decode", ([prompt], parameters)))
        decode.receive()
        spent += time.perf_counter() - began
    after = _transfers(decode)
    moved = {name: after[name] - before[name] for name in after}
    return {
        "bytes": moved["bytes"],
        "descriptors": moved["descriptors"],
        "failed": after["failed"],
        "bandwidth": moved["bytes"] / moved["seconds"],
        "time per request": spent / len(prompts),
    }


def _transfers(decode: EngineProcess) -> dict[str, float]:
    decode.send(("facts", None))
    transfers: dict[str, float] = decode.receive()["transfers"]
    return transfers
