"""What the GPU tests do beside an engine; each function runs in an engine process."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_process import Conversation

GEOMETRY_360M = {
    "hidden_size": 960,
    "intermediate_size": 2560,
    "num_hidden_layers": 32,
    "num_attention_heads": 15,
    "num_key_value_heads": 5,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_geometry(folder: Path, **changes: Any) -> Path:
    """Write a ``config.json`` without weights, for ``load_format="dummy"``."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000,
        **GEOMETRY_360M,
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def token_prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts of 10 to 900 tokens; every other one shares a prefix with the last."""
    draw = random.Random(seed)
    prompts: list[list[int]] = []
    for index in range(count):
        length = draw.randint(10, 900)
        fresh = [draw.randrange(100, 40000) for _ in range(length)]
        if index % 2 and prompts:
            shared = prompts[-1][: len(prompts[-1]) // 2]
            fresh = (shared + fresh)[:900]
        prompts.append(fresh)
    return prompts


def used_device_bytes() -> int:
    import torch

    free, total = torch.cuda.mem_get_info()
    return total - free


def build_engine(**options: Any) -> tuple[Any, float]:
    """Build an offline engine; return it and the seconds its initialisation took.

    That is what vLLM itself logs as "init engine": profile, KV cache, warm-up.
    Loading the model and making the tokenizer is not in it.
    """
    from vllm import LLM
    from vllm.v1.engine.core import EngineCore

    seconds = 0.0
    initialize_kv_caches = EngineCore._initialize_kv_caches

    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal seconds
        started = time.perf_counter()
        try:
            return initialize_kv_caches(self, *args, **kwargs)
        finally:
            seconds = time.perf_counter() - started

    defaults = {
        "max_model_len": 1024,
        "block_size": 16,
        "disable_log_stats": True,
        "seed": 0,
    }
    EngineCore._initialize_kv_caches = timed
    try:
        engine = LLM(**{**defaults, **options})
    finally:
        EngineCore._initialize_kv_caches = initialize_kv_caches
    return engine, seconds


def worker_of(engine: Any) -> Any:
    return engine.llm_engine.model_executor.driver_worker.worker


def supply_of(engine: Any) -> Any:
    from vllm_kvpad.hosts.supply import supply_of as supply

    return supply(worker_of(engine))


def greedy(engine: Any, prompts: list[list[int]], max_tokens: int = 32) -> list[Any]:
    """Token ids of every answer."""
    from vllm import SamplingParams

    outputs = engine.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
        use_tqdm=False,
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


def memory_facts(engine: Any) -> dict[str, Any]:
    """What the worker budgeted and what is resident, in bytes, from the driver."""
    worker = worker_of(engine)
    supply = supply_of(engine)
    config = worker.model_runner.kv_cache_config
    num_blocks = worker.cache_config.num_gpu_blocks
    if supply is None or supply.cache is None:
        bytes_per_block = config.kv_cache_tensors[0].size // config.num_blocks
        cache_bytes = num_blocks * bytes_per_block
        segments = 1
    else:
        bytes_per_block = supply.cache.bytes_per_block
        cache_bytes = supply.cache.physical_bytes
        segments = len(supply.cache.segments)
    import torch

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    resident = worker.init_snapshot.free_memory - free - cache_bytes
    peak = getattr(worker, "peak_activation_memory", 0) if supply else 0
    return {
        "blocks": num_blocks,
        "bytes_per_block": bytes_per_block,
        "segments": segments,
        "budget": int(worker.requested_memory),
        "resident": resident,
        "peak": peak,
        "total": total,
        "free": free,
        "kvpad": supply is not None and supply.cache is not None,
        "one_chunk_each": None
        if supply is None or supply.cache is None
        else all(supply.cache.segments_backed_by_one_chunk()),
    }


def start_and_answer(
    conversation: Conversation,
    prompts: list[list[int]] | None = None,
    max_tokens: int = 32,
    **options: Any,
) -> dict[str, Any]:
    """Start, measure, answer, measure again."""
    engine, seconds = build_engine(**options)
    used_after_start = used_device_bytes()
    answers = greedy(engine, prompts or token_prompts(8), max_tokens)
    used_under_load = used_device_bytes()
    return {
        "seconds": seconds,
        "used_after_start": used_after_start,
        "used_under_load": used_under_load,
        "answers": answers,
        **memory_facts(engine),
    }


def start_and_fail_or_answer(
    conversation: Conversation, **options: Any
) -> dict[str, Any]:
    """As :func:`start_and_answer`, but a start that fails is a result too."""
    try:
        return {"error": None, **start_and_answer(conversation, **options)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def start_stop_cycles(
    conversation: Conversation, cycles: int, **options: Any
) -> dict[str, Any]:
    """Start and stop an engine in one process; used bytes after each stop."""
    import gc

    import torch

    used = []
    for _ in range(cycles):
        engine, _ = build_engine(**options)
        greedy(engine, token_prompts(2), 4)
        kvpad = supply_of(engine) is not None
        engine.llm_engine.engine_core.shutdown()
        del engine
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()
        gc.collect()
        torch.cuda.empty_cache()
        used.append(used_device_bytes())
    return {"used": used, "kvpad": kvpad}


def sleep_and_wake(conversation: Conversation, **options: Any) -> dict[str, Any]:
    """Answer, sleep, wake, answer again; levels 1 and by tags."""
    engine, _ = build_engine(enable_sleep_mode=True, **options)
    prompts = token_prompts(8)
    supply = supply_of(engine)
    result: dict[str, Any] = {"before": greedy(engine, prompts)}
    used_awake = used_device_bytes()
    cache_bytes = supply.cache.physical_bytes if supply else 0
    engine.sleep(level=1)
    result["freed_by_sleep"] = used_awake - used_device_bytes()
    result["cache_bytes"] = cache_bytes
    result["cache_bytes_asleep"] = supply.cache.physical_bytes if supply else 0
    engine.wake_up()
    result["after_wake"] = greedy(engine, prompts)
    engine.sleep(level=1)
    engine.wake_up(tags=["weights"])
    result["cache_bytes_weights_awake"] = supply.cache.physical_bytes if supply else 0
    engine.wake_up(tags=["kv_cache"])
    result["after_tagged_wake"] = greedy(engine, prompts)
    engine.sleep(level=2)
    result["cache_bytes_level_2"] = supply.cache.physical_bytes if supply else 0
    engine.wake_up(tags=["weights"])
    worker_of(engine).reload_weights()
    engine.wake_up(tags=["kv_cache"])
    result["after_level_2"] = greedy(engine, prompts)
    result["one_chunk_each"] = (
        all(supply.cache.segments_backed_by_one_chunk()) if supply else None
    )
    return result


def serve_rounds(conversation: Conversation, **options: Any) -> dict[str, Any]:
    """Decode 64 requests at a time whenever the parent says so; tokens a second."""
    from vllm import SamplingParams

    engine, _ = build_engine(**options)
    prompts = [{"prompt_token_ids": p[:64]} for p in token_prompts(64, seed=3)]
    parameters = SamplingParams(temperature=0, max_tokens=256, ignore_eos=True)
    engine.generate(prompts, parameters, use_tqdm=False)
    conversation.send("ready")
    while conversation.recv() == "round":
        started = time.perf_counter()
        engine.generate(prompts, parameters, use_tqdm=False)
        conversation.send(64 * 256 / (time.perf_counter() - started))
    return memory_facts(engine)


def transfer_peer(
    conversation: Conversation,
    side_channel_port: int,
    max_tokens: int = 48,
    **options: Any,
) -> dict[str, Any]:
    """One side of a NIXL pair; the parent passes requests and parameters between.

    Understands ("prefill", prompts) -> list of kv_transfer_params, ("decode",
    (prompts, parameters)) -> answers, ("sleep", None), ("facts", None), ("stop",).
    """
    from vllm import SamplingParams

    registered = record_registrations()
    transfers = record_transfers()
    engine, _ = build_engine(
        kv_transfer_config={
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "fail",
        },
        **options,
    )
    conversation.send("ready")
    while True:
        command, value = conversation.recv()
        if command == "stop":
            return memory_facts(engine)
        if command == "prefill":
            outputs = engine.generate(
                [{"prompt_token_ids": prompt} for prompt in value],
                SamplingParams(
                    temperature=0,
                    max_tokens=1,
                    extra_args={"kv_transfer_params": {"do_remote_decode": True}},
                ),
                use_tqdm=False,
            )
            conversation.send([output.kv_transfer_params for output in outputs])
        elif command == "decode":
            prompts, parameters = value
            outputs = engine.generate(
                [{"prompt_token_ids": prompt} for prompt in prompts],
                [
                    SamplingParams(
                        temperature=0,
                        max_tokens=max_tokens,
                        ignore_eos=True,
                        extra_args={"kv_transfer_params": each},
                    )
                    for each in parameters
                ],
                use_tqdm=False,
            )
            conversation.send([list(o.outputs[0].token_ids) for o in outputs])
        elif command == "sleep":
            # An in-process engine hears that the decoder has read its blocks only
            # while it steps, and vLLM refuses to sleep on blocks that are held.
            greedy(engine, token_prompts(1), 2)
            engine.sleep(level=1)
            asleep = used_device_bytes()
            engine.wake_up()
            conversation.send({"asleep": asleep, "awake": used_device_bytes()})
        elif command == "facts":
            conversation.send(
                {
                    "regions": [check_region(*region) for region in registered],
                    "transfers": dict(transfers),
                    **memory_facts(engine),
                }
            )


def record_registrations() -> list[tuple[int, int]]:
    """Note (address, bytes) of every range a NIXL agent of this process registers."""
    from nixl._api import nixl_agent

    registered: list[tuple[int, int]] = []
    register_memory = nixl_agent.register_memory

    def recording(self: Any, descriptors: Any, *args: Any, **kwargs: Any) -> Any:
        handle = register_memory(self, descriptors, *args, **kwargs)
        for index in range(handle.descCount()):
            address, size, *_ = handle[index]
            registered.append((address, size))
        return handle

    nixl_agent.register_memory = recording
    return registered


def check_region(address: int, size: int) -> dict[str, Any]:
    """Ask the driver what backs the first, middle and last byte of a region."""
    from cuda.bindings import driver

    answers = []
    for byte in (address, address + size // 2, address + size - 1):
        error, base, length = driver.cuMemGetAddressRange(byte)
        assert error == driver.CUresult.CUDA_SUCCESS, error
        answers.append((int(base), int(length)))
    base, length = answers[0]
    return {
        "address": address,
        "size": size,
        "one_chunk": len(set(answers)) == 1
        and base <= address
        and address + size <= base + length,
    }


def record_transfers() -> dict[str, Any]:
    """Count this process's NIXL transfers; vLLM empties its own counts each step.

    ``seconds`` is what NIXL says that the transfers took, added up.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import (
        NixlKVConnectorStats,
    )

    counts: dict[str, Any] = {
        "transfers": 0,
        "bytes": 0,
        "descriptors": 0,
        "seconds": 0.0,
        "failed": 0,
    }
    record_transfer = NixlKVConnectorStats.record_transfer
    record_failed_transfer = NixlKVConnectorStats.record_failed_transfer

    def counting_transfer(self: Any, result: Any) -> None:
        counts["transfers"] += 1
        counts["bytes"] += result.totalBytes
        counts["descriptors"] += result.descCount
        counts["seconds"] += result.xferDuration / 1e6
        record_transfer(self, result)

    def counting_failure(self: Any) -> None:
        counts["failed"] += 1
        record_failed_transfer(self)

    NixlKVConnectorStats.record_transfer = counting_transfer
    NixlKVConnectorStats.record_failed_transfer = counting_failure
    return counts


def commit_times(conversation: Conversation, gib: int, layers: int) -> dict[str, float]:
    """Seconds of a zeroed defragmenting commit and of its driver calls, once."""
    import torch

    from vllm_kvpad.kv_cache import ExtensibleKVCache
    from vllm_kvpad.placement import pad_kv_cache_segments
    from vllm_kvpad.vmm import get_driver

    device = torch.device("cuda:0")
    torch.zeros(1, device=device)
    driver = get_driver(device)
    config, layout = equal_layers(gib, layers)
    padded = pad_kv_cache_segments(config, layout, driver.granularity)
    cache = ExtensibleKVCache(padded, layout, device, driver)
    cache.commit(1)
    driver.synchronize()
    calls = time_driver_calls(driver)
    started = time.perf_counter()
    cache.commit(config.num_blocks, defragment=True)
    seconds = {"commit": time.perf_counter() - started, **calls()}
    assert all(cache.segments_backed_by_one_chunk())
    started = time.perf_counter()
    cache.free()
    seconds["free"] = time.perf_counter() - started
    return seconds


def zeros_times(conversation: Conversation, gib: int, layers: int) -> dict[str, float]:
    """Seconds of ``torch.zeros`` for the bytes of :func:`commit_times`, once."""
    import torch

    torch.zeros(1, device="cuda:0")
    config, _ = equal_layers(gib, layers)
    torch.cuda.synchronize()
    started = time.perf_counter()
    buffer = torch.zeros(
        config.kv_cache_tensors[0].size, dtype=torch.int8, device="cuda:0"
    )
    torch.cuda.synchronize()
    seconds = {"torch.zeros": time.perf_counter() - started}
    started = time.perf_counter()
    del buffer
    torch.cuda.empty_cache()
    seconds["torch.zeros, freed"] = time.perf_counter() - started
    return seconds


def equal_layers(gib: int, layers: int) -> tuple[Any, Any]:
    """A configuration of ``layers`` equal layers that takes about ``gib`` GiB."""
    import torch
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheTensor,
    )
    from vllm.v1.kv_cache_layout import KVCacheLayout

    spec = FullAttentionSpec(
        block_size=16, num_kv_heads=8, head_size=128, dtype=torch.bfloat16
    )
    page = spec.page_size_bytes
    blocks = (gib << 30) // (page * layers)
    names = [f"model.layers.{i}.self_attn.attn" for i in range(layers)]
    tensor = KVCacheTensor(
        size=page * layers * blocks,
        layers=names,
        layer_stride=page * blocks,
        block_stride=page,
    )
    config = KVCacheConfig(blocks, [tensor], [KVCacheGroupSpec(names, spec)])
    return config, KVCacheLayout.LBNHC


def start_while_memory_is_taken(
    conversation: Conversation, **options: Any
) -> str | None:
    """Start; pause between measuring and committing. The error, if it fails."""
    from vllm_kvpad.hosts.supplied_cache import SuppliedKVCache

    adopt = SuppliedKVCache._adopt

    def pause_then_adopt(*args: Any) -> None:
        conversation.send("measured")
        conversation.recv()
        adopt(*args)

    SuppliedKVCache._adopt = pause_then_adopt  # type: ignore[method-assign]
    try:
        build_engine(**options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def take_all_but(conversation: Conversation, num_bytes: int) -> None:
    """Hold all free device memory but ``num_bytes`` until told to let go."""
    import torch

    free, _ = torch.cuda.mem_get_info()
    hoard = torch.empty(free - num_bytes, dtype=torch.int8, device="cuda:0")
    conversation.send(hoard.numel())
    conversation.recv()


def time_driver_calls(driver: Any) -> Callable[[], dict[str, float]]:
    """Time each kind of driver call until the function returned is called."""
    names = ("create", "map", "set_access", "unmap", "release", "zero", "synchronize")
    totals = dict.fromkeys(names, 0.0)

    def timing(name: str, stock: Any) -> Any:
        def call(*args: Any) -> Any:
            started = time.perf_counter()
            try:
                return stock(*args)
            finally:
                totals[name] += time.perf_counter() - started

        return call

    for name in names:
        setattr(driver, name, timing(name, getattr(driver, name)))

    def stop() -> dict[str, float]:
        for name in names:
            delattr(driver, name)
        return {f"of which {name}": total for name, total in totals.items()}

    return stop
