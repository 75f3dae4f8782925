"""Stock vLLM and vLLM with kvpad on one GPU, in turn, on the same prompts."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_process import EngineProcess, run
from jobs import (
    commit_times,
    serve_rounds,
    sleep_and_wake,
    start_and_answer,
    start_and_fail_or_answer,
    start_stop_cycles,
    start_while_memory_is_taken,
    take_all_but,
    token_prompts,
    transfer_peer,
    write_geometry,
    zeros_times,
)

MIB = 1 << 20
PAIRS = int(os.environ.get("KVPAD_GPU_PAIRS", "3"))
Log = Callable[[str], Path]
Figure = Callable[..., None]

V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"}


def in_turn(function: Callable[..., Any], log: Log, **options: Any) -> tuple[Any, Any]:
    """What ``function`` returns beside stock vLLM, and then beside kvpad's."""
    stock, kvpad = (
        run(function, plugin=plugin, log=log(str(plugin)), **options)
        for plugin in (False, True)
    )
    return stock, kvpad


def dummy(model: str, **options: Any) -> dict[str, Any]:
    return {
        "model": model,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        **options,
    }


def limit_in_blocks(facts: dict[str, Any]) -> float:
    """(budget - resident - peak) / bytes per block: what cannot be exceeded."""
    left = facts["budget"] - facts["resident"] - facts["peak"]
    return left / facts["bytes_per_block"]


def granules_in_blocks(facts: dict[str, Any], granule: int = 2 * MIB) -> float:
    """One granule for each segment, in blocks."""
    return facts["segments"] * granule / facts["bytes_per_block"]


def test_start_is_faster_with_more_blocks_and_no_more_memory(
    model_360m: str, log: Log, figure: Figure
) -> None:
    """Graphs on, utilisation 0.05, caches warm, three pairs in turn.

    Stock is kvpad switched off: ``VLLM_PLUGINS`` is part of the key of vLLM's compile
    cache, and both sides are to use one.
    """
    options = dummy(model_360m, gpu_memory_utilization=0.05)

    def start(name: str, **environment: str) -> dict[str, Any]:
        facts: dict[str, Any] = run(
            start_and_answer,
            plugin=True,
            log=log(name),
            environment=environment,
            **options,
        )
        assert facts["kvpad"] == (name == "kvpad")
        return facts

    start("kvpad")  # fill compile and kernel caches
    pairs: list[tuple[Any, Any]] = []
    for _ in range(PAIRS):
        pairs.append((start("stock", VLLM_KVPAD_DISABLE="1"), start("kvpad")))
        figure(init_seconds_so_far=[[each["seconds"] for each in p] for p in pairs])
    stock, kvpad = zip(*pairs, strict=True)
    seconds = [k["seconds"] / s["seconds"] for s, k in pairs]
    figure(
        init_seconds_stock=[round(s["seconds"], 2) for s in stock],
        init_seconds_kvpad=[round(k["seconds"], 2) for k in kvpad],
        init_ratio_median=round(statistics.median(seconds), 3),
        blocks_stock=[s["blocks"] for s in stock],
        blocks_kvpad=[k["blocks"] for k in kvpad],
        limit_kvpad=[round(limit_in_blocks(k), 1) for k in kvpad],
        used_mib_after_start_stock=[s["used_after_start"] // MIB for s in stock],
        used_mib_after_start_kvpad=[k["used_after_start"] // MIB for k in kvpad],
        used_mib_under_load_stock=[s["used_under_load"] // MIB for s in stock],
        used_mib_under_load_kvpad=[k["used_under_load"] // MIB for k in kvpad],
    )
    for s, k in pairs:
        assert k["answers"] == s["answers"]
        limit = limit_in_blocks(k)
        assert limit - granules_in_blocks(k) - 1 <= k["blocks"] <= limit
        assert k["used_after_start"] <= s["used_after_start"] + 16 * MIB
        assert k["used_under_load"] <= s["used_under_load"] + 16 * MIB
    assert statistics.median(seconds) <= 0.7


@pytest.mark.parametrize("wanted", [102, 1331])
def test_tiny_utilisation_with_offloading_keeps_the_measured_count(
    wanted: int, model_360m: str, log: Log, figure: Figure
) -> None:
    """vLLM issue 65204: rounding made 102 blocks 0 with an offloading connector."""
    options = dummy(
        model_360m, enforce_eager=True, kv_offloading_size=1, max_model_len=1024
    )
    wide = run(
        start_and_answer,
        plugin=True,
        log=log("wide"),
        gpu_memory_utilization=0.05,
        **options,
    )
    rest = wide["resident"] + wide["peak"]
    # Each segment also loses up to a granule to rounding, half of one on average.
    target = rest + wanted * wide["bytes_per_block"] + wide["segments"] * MIB
    utilisation = target / wide["total"]
    stock, kvpad = in_turn(
        start_and_fail_or_answer,
        log,
        gpu_memory_utilization=utilisation,
        **options,
    )
    assert kvpad["error"] is None, kvpad["error"]
    blocks = kvpad["blocks"]
    figure(
        utilisation=utilisation,
        blocks_kvpad=blocks,
        blocks_stock=stock.get("blocks", stock["error"]),
        blocks_rounding_would_leave=blocks - blocks % 512,
        limit=round(limit_in_blocks(kvpad), 1),
    )
    assert limit_in_blocks(kvpad) - granules_in_blocks(kvpad) - 1 <= blocks
    assert blocks % 512
    if stock["error"] is None:
        assert kvpad["answers"] == stock["answers"]


@pytest.mark.parametrize("runner", [V2, V1], ids=["v2", "v1"])
@pytest.mark.parametrize("mode", ["graphs", "full_graphs", "eager"])
def test_greedy_tokens_equal_stock(
    mode: str, runner: dict[str, str], model_135m: str, log: Log, figure: Figure
) -> None:
    """64 prompts of 10 to 900 tokens, shared prefixes, chunked prefill.

    ``graphs`` is vLLM's default; ``full_graphs`` captures the model as it is, without
    compiling it, which starts much sooner on a machine with cold caches.
    """
    options: dict[str, Any] = {
        "graphs": {},
        "full_graphs": {
            "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        },
        "eager": {"enforce_eager": True},
    }[mode]
    stock, kvpad = in_turn(
        start_and_answer,
        log,
        environment=runner,
        model=model_135m,
        gpu_memory_utilization=0.05,
        max_num_batched_tokens=2048,
        prompts=token_prompts(64),
        **options,
    )
    same = sum(a == b for a, b in zip(stock["answers"], kvpad["answers"], strict=True))
    figure(
        same_answers=f"{same} of 64",
        blocks_stock=stock["blocks"],
        blocks_kvpad=kvpad["blocks"],
        limit_kvpad=round(limit_in_blocks(kvpad), 1),
        init_seconds=[round(stock["seconds"], 1), round(kvpad["seconds"], 1)],
    )
    assert [stock["kvpad"], kvpad["kvpad"]] == [False, True]
    assert same == 64
    limit = limit_in_blocks(kvpad)
    assert limit - granules_in_blocks(kvpad) - 1 <= kvpad["blocks"] <= limit + 1


def exchange(
    plugin: bool,
    log: Log,
    name: str,
    ports: tuple[int, int],
    environment: dict[str, str],
    sleep: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Prefill in one engine, decode in another; answers and both sides' facts."""
    prompts = [prompt[:600] for prompt in token_prompts(8, seed=5)]
    peers = []
    try:
        for role, port in zip(("prefill", "decode"), ports, strict=True):
            peer = EngineProcess(
                transfer_peer,
                plugin=plugin,
                log=log(f"{name}-{role}"),
                environment={
                    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                    "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
                    **environment,
                },
                side_channel_port=port,
                **options,
            )
            peers.append(peer)
            # One after the other: stock asserts when two profile at once.
            assert peer.receive() == "ready"
        prefill, decode = peers

        def hand_over() -> Any:
            prefill.send(("prefill", prompts))
            parameters = prefill.receive()
            decode.send(("decode", (prompts, parameters)))
            return decode.receive()

        result: dict[str, Any] = {"answers": hand_over()}
        for peer, role in zip(peers, ("prefill", "decode"), strict=True):
            peer.send(("facts", None))
            result[role] = peer.receive()
        if sleep:
            for peer in peers:
                peer.send(("sleep", None))
                result.setdefault("slept", []).append(peer.receive())
            result["answers_after_wake"] = hand_over()
            for peer, role in zip(peers, ("prefill", "decode"), strict=True):
                peer.send(("facts", None))
                result[f"{role}_after_wake"] = peer.receive()
        return result
    finally:
        for peer in peers:
            peer.stop()


@pytest.mark.parametrize("layout", ["LBNHC", "BLHNC"])
def test_prefill_decode_over_nixl_equals_a_stock_pair(
    layout: str, model_135m: str, log: Log, figure: Figure
) -> None:
    environment = {"VLLM_KV_CACHE_LAYOUT": layout}
    options: dict[str, Any] = {
        "model": model_135m,
        "gpu_memory_utilization": 0.04,
        "enforce_eager": True,
        "enable_prefix_caching": False,
    }
    stock = exchange(False, log, "stock", (15601, 15602), environment, **options)
    kvpad = exchange(True, log, "kvpad", (15603, 15604), environment, **options)
    regions = kvpad["prefill"]["regions"] + kvpad["decode"]["regions"]
    figure(
        regions=len(regions),
        regions_in_one_chunk=sum(region["one_chunk"] for region in regions),
        blocks=[kvpad[role]["blocks"] for role in ("prefill", "decode")],
        transfers_kvpad=kvpad["decode"]["transfers"],
        transfers_stock=stock["decode"]["transfers"],
    )
    assert kvpad["answers"] == stock["answers"]
    assert regions
    assert all(region["one_chunk"] for region in regions)
    transfers = kvpad["decode"]["transfers"]
    assert transfers["failed"] == 0
    assert transfers["bytes"] == stock["decode"]["transfers"]["bytes"] > 0


def test_nixl_transfers_again_after_sleep(
    model_135m: str, log: Log, figure: Figure
) -> None:
    kvpad = exchange(
        True,
        log,
        "kvpad",
        (15611, 15612),
        {},
        sleep=True,
        model=model_135m,
        gpu_memory_utilization=0.04,
        enforce_eager=True,
        enable_prefix_caching=False,
        enable_sleep_mode=True,
    )
    regions = kvpad["decode_after_wake"]["regions"]
    figure(
        slept=kvpad["slept"],
        regions_registered_in_all=len(regions),
        transfers=kvpad["decode_after_wake"]["transfers"],
    )
    assert kvpad["answers_after_wake"] == kvpad["answers"]
    assert len(regions) == 2 * len(kvpad["decode"]["regions"])
    assert all(region["one_chunk"] for region in regions)
    assert kvpad["decode_after_wake"]["transfers"]["failed"] == 0


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_sleep_gives_the_cache_back_and_wake_up_answers_right(
    eager: bool, model_135m: str, log: Log, figure: Figure
) -> None:
    kvpad = run(
        sleep_and_wake,
        plugin=True,
        log=log("kvpad"),
        model=model_135m,
        gpu_memory_utilization=0.05,
        enforce_eager=eager,
    )
    figure(
        cache_mib=kvpad["cache_bytes"] // MIB,
        freed_by_sleep_mib=kvpad["freed_by_sleep"] // MIB,
    )
    assert kvpad["cache_bytes_asleep"] == 0
    assert kvpad["freed_by_sleep"] >= kvpad["cache_bytes"]
    assert kvpad["cache_bytes_weights_awake"] == 0
    assert kvpad["cache_bytes_level_2"] == 0
    assert kvpad["after_wake"] == kvpad["before"]
    assert kvpad["after_tagged_wake"] == kvpad["before"]
    assert kvpad["after_level_2"] == kvpad["before"]


def test_high_utilisation_leaves_as_much_free_as_stock(
    model_135m: str, log: Log, figure: Figure
) -> None:
    stock, kvpad = in_turn(
        start_and_answer,
        log,
        model=model_135m,
        gpu_memory_utilization=0.9,
    )
    free = [
        facts["total"] - max(facts["used_after_start"], facts["used_under_load"])
        for facts in (stock, kvpad)
    ]
    figure(
        free_mib_stock=free[0] // MIB,
        free_mib_kvpad=free[1] // MIB,
        blocks=[stock["blocks"], kvpad["blocks"]],
    )
    assert kvpad["answers"] == stock["answers"]
    assert free[1] >= free[0]


def test_ten_starts_and_stops_leave_no_memory_behind(
    model_135m: str, log: Log, figure: Figure
) -> None:
    cycles = run(
        start_stop_cycles,
        plugin=True,
        log=log("kvpad"),
        timeout=300,
        cycles=10,
        model=model_135m,
        gpu_memory_utilization=0.05,
        enforce_eager=True,
    )
    used = [n // MIB for n in cycles["used"]]
    figure(used_mib_after_each_stop=used)
    assert cycles["kvpad"]
    # The first cycles load kernels and libraries that stay; the rest must be flat.
    assert used[-1] - used[2] <= 4


def test_decoding_is_as_fast_as_stock(
    model_135m: str, log: Log, figure: Figure
) -> None:
    options: dict[str, Any] = {"model": model_135m, "gpu_memory_utilization": 0.1}
    engines = []
    try:
        for plugin in (False, True):
            engine = EngineProcess(
                serve_rounds, plugin=plugin, log=log(str(plugin)), **options
            )
            engines.append(engine)
            assert engine.receive() == "ready"
        rates: tuple[list[float], list[float]] = ([], [])
        for _ in range(5):
            for engine, rate in zip(engines, rates, strict=True):
                engine.send("round")
                rate.append(engine.receive())
    finally:
        for engine in engines:
            engine.stop()
    ratio = statistics.median(k / s for s, k in zip(*rates, strict=True))
    figure(
        tokens_per_second_stock=[round(rate) for rate in rates[0]],
        tokens_per_second_kvpad=[round(rate) for rate in rates[1]],
        ratio_median=round(ratio, 3),
    )
    assert ratio >= 0.98


def test_commit_of_80_gib_beats_torch_zeros(log: Log, figure: Figure) -> None:
    """Each time in a fresh process, after a rest: the driver goes on reclaiming what
    was freed last, and whoever allocates next waits for it."""
    seconds: dict[str, list[float]] = {}
    for _ in range(5):
        for job in (commit_times, zeros_times):
            time.sleep(1)
            times = run(job, plugin=False, log=log("commit"), gib=80, layers=80)
            for name, value in times.items():
                seconds.setdefault(name, []).append(value)
    figure(
        milliseconds={
            name: [round(value * 1e3, 1) for value in sorted(each)]
            for name, each in seconds.items()
        }
    )
    assert statistics.median(seconds["commit"]) < statistics.median(
        seconds["torch.zeros"]
    )


@pytest.mark.parametrize("runner", [V2, V1], ids=["v2", "v1"])
def test_memory_taken_after_measuring_is_an_error_that_says_so(
    runner: dict[str, str], model_135m: str, log: Log, figure: Figure
) -> None:
    engine = EngineProcess(
        start_while_memory_is_taken,
        plugin=True,
        log=log("kvpad"),
        environment=runner,
        model=model_135m,
        gpu_memory_utilization=0.05,
        enforce_eager=True,
    )
    other = None
    try:
        assert engine.receive() == "measured"
        other = EngineProcess(
            take_all_but, plugin=False, log=log("other"), num_bytes=512 * MIB
        )
        other.receive()
        engine.send("go on")
        error = engine.result()
    finally:
        engine.stop()
        if other is not None:
            other.stop()
    figure(error=error)
    assert error is not None
    for part in ("KV cache", "blocks", "free", "gpu_memory_utilization"):
        assert part in error


def test_utilisation_of_98_percent_with_graphs_starts(
    model_360m: str, log: Log, figure: Figure
) -> None:
    """vLLM issue 57475: start-up ran out of memory while graphs were captured."""
    options = dummy(model_360m, gpu_memory_utilization=0.98)
    stock, kvpad = in_turn(start_and_fail_or_answer, log, **options)
    assert kvpad["error"] is None, kvpad["error"]
    figure(
        blocks_stock=stock.get("blocks", stock["error"]),
        blocks_kvpad=kvpad["blocks"],
        free_mib_kvpad=(kvpad["total"] - kvpad["used_under_load"]) // MIB,
    )
    if stock["error"] is None:
        assert kvpad["answers"] == stock["answers"]


def test_more_blocks_where_the_graph_estimate_is_too_large(
    tmp_path: Path, log: Log, figure: Figure
) -> None:
    """vLLM issues 45178 and 50780: an estimate too large shrinks the cache."""
    wide = write_geometry(
        tmp_path / "wide",
        num_hidden_layers=16,
        hidden_size=2048,
        intermediate_size=8192,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    options = dummy(
        str(wide),
        gpu_memory_utilization=0.08,
        max_num_seqs=1024,
        compilation_config={"cudagraph_capture_sizes": list(range(1, 513, 4))},
    )
    stock, kvpad = in_turn(start_and_fail_or_answer, log, **options)
    assert kvpad["error"] is None, kvpad["error"]
    figure(
        blocks_stock=stock.get("blocks", stock["error"]),
        blocks_kvpad=kvpad["blocks"],
        init_seconds=[round(facts.get("seconds", 0.0), 1) for facts in (stock, kvpad)],
    )
    assert stock["error"] is not None or kvpad["blocks"] > stock["blocks"]
