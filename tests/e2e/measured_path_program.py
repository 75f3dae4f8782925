"""Run one real CPU engine the way a GPU worker starts: warm up, measure, adopt.

The CPU worker of vLLM is given its size and has no reason to measure. Here it gets
what the GPU worker has (a memory budget, a profile, a warm-up that writes to the
cache), and then goes through the very code that runs on a GPU. Prints one JSON line.

    python measured_path_program.py '{"model": ..., "plugin": true, ...}'
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

MIB = 1 << 20
PEAK_BYTES = 64 * MIB
DEVICE_BYTES = 8 << 30

PROMPTS = [
    "The capital of France is",
    "Once upon a time there was a lighthouse keeper who " + "counted waves and " * 60,
    "Water boils at",
]


def give_cpu_worker_a_gpu_workers_start(
    budget_mib: int, resident_mib: int, facts: dict[str, Any]
) -> None:
    """Let ``CPUWorker`` measure; note in ``facts`` what happened on the way.

    What is free is told, not asked: a device of ``DEVICE_BYTES`` on which warm-up
    leaves ``resident_mib`` behind, whatever else runs on this machine.
    """
    from vllm.v1.worker.cpu_worker import CPUWorker

    from vllm_kvpad.hosts import model_runners
    from vllm_kvpad.hosts.supply import supply_of
    from vllm_kvpad.vmm import HostVmmDriver

    stock_warm_up = CPUWorker.compile_or_warm_up_model

    def determine_available_memory(self: Any) -> int:
        # Set by the CPU platform; with it the size would be given.
        self.cache_config.kv_cache_memory_bytes = None
        self.requested_memory = budget_mib * MIB
        self.model_runner.model_memory_usage = 0
        self.init_snapshot = SimpleNamespace(free_memory=DEVICE_BYTES)

        def profile() -> int:
            # A collective with several ranks, as stock's is.
            self.model_runner._dummy_run(64)
            return int(self.available_kv_cache_memory_bytes)

        supply = supply_of(self)
        self.peak_activation_memory = PEAK_BYTES
        self.available_kv_cache_memory_bytes = budget_mib * MIB - PEAK_BYTES
        if supply is None:
            return profile()

        def free_memory(driver: Any) -> int:
            committed = supply.cache.physical_bytes if supply.cache else 0
            resident = resident_mib * MIB if facts.get("warm_ups") else 0
            return DEVICE_BYTES - committed - resident

        HostVmmDriver.free_memory = free_memory
        facts["measured_bytes"] = supply.determine_available_memory(self, profile)
        facts["warm_up_addresses"] = addresses(self.model_runner)
        return int(facts["measured_bytes"])

    def compile_or_warm_up_model(self: Any) -> Any:
        def warm_up() -> Any:
            facts["warm_ups"] = facts.get("warm_ups", 0) + 1
            facts["warm_up_blocks"] = self.model_runner.kv_cache_config.num_blocks
            self.model_runner._dummy_run(64)
            # What a warm-up leaves in the blocks must not survive into serving.
            for view in self.model_runner.kv_caches:
                view[: self.model_runner.kv_cache_config.num_blocks].fill_(7)
            return stock_warm_up(self)

        supply = supply_of(self)
        if supply is None or supply.stepped_aside:
            return warm_up()
        return supply.compile_or_warm_up_model(self, warm_up)

    CPUWorker.determine_available_memory = determine_available_memory
    CPUWorker.compile_or_warm_up_model = compile_or_warm_up_model
    # There is no caching allocator of a device to empty.
    model_runners.release_cached_memory = lambda: None


def addresses(runner: Any) -> list[int]:
    return [view.data_ptr() for view in runner.kv_caches]


def plan_differently_than_the_engine() -> None:
    """Make the worker's early plan one that the engine core does not share."""
    from vllm_kvpad.hosts import model_runners

    planner = model_runners.kv_cache_planner

    def other(runner: Any) -> Any:
        def plan(num_blocks: int) -> Any:
            config = planner(runner)(num_blocks)
            config.kv_cache_groups[0].is_eagle_group = True
            return config

        return plan

    model_runners.kv_cache_planner = other
    # Dropping the early state stops at what only a GPU runner has.
    model_runners.drop_kv_cache = lambda runner: runner._cleanup_profiling_kv_cache()


def main() -> None:
    options = json.loads(sys.argv[1])
    facts: dict[str, Any] = {}
    if options["plugin"]:
        give_cpu_worker_a_gpu_workers_start(
            options["budget_mib"], options.get("resident_mib", 40), facts
        )
        if options.get("plan_differently"):
            plan_differently_than_the_engine()

    from prometheus_client import REGISTRY
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=options["model"],
        max_model_len=1024,
        max_num_batched_tokens=1024,
        max_num_seqs=options.get("max_num_seqs", 4),
        block_size=32,
        enforce_eager=True,
        disable_log_stats=False,
        kv_transfer_config=options.get("kv_transfer_config"),
        additional_config={"kvpad": {"margin_bytes": 0}} if options["plugin"] else {},
        **options.get("engine", {}),
    )
    lora = None
    if "lora" in options:
        from vllm.lora.request import LoRARequest

        lora = LoRARequest("adapter", 1, options["lora"])
    prompts = [
        {"prompt_token_ids": prompt} for prompt in options.get("token_prompts", [])
    ]
    outputs = engine.generate(
        prompts or PROMPTS,
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=bool(prompts)),
        use_tqdm=False,
        lora_request=lora,
    )
    worker = engine.llm_engine.model_executor.driver_worker.worker
    facts["metrics"] = {
        sample.name: sample.labels if sample.name.endswith("_info") else sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == "vllm:cache_config_info" or "kvpad" in sample.name
    }
    facts["answers"] = [
        list(output.outputs[0].token_ids) if prompts else output.outputs[0].text
        for output in outputs
    ]
    facts["blocks"] = worker.cache_config.num_gpu_blocks
    facts["final_addresses"] = addresses(worker.model_runner)
    facts["view_blocks"] = {view.shape[0] for view in worker.model_runner.kv_caches}
    facts["view_blocks"] = sorted(facts["view_blocks"])
    if options["plugin"]:
        from vllm_kvpad.hosts.supply import supply_of

        supply = supply_of(worker)
        assert supply is not None
        cache = supply.cache
        assert cache is not None
        facts |= {
            "capacity": cache.capacity_blocks,
            "address_space": cache.size,
            "committed": cache.num_committed_blocks,
            "bytes_per_block": cache.bytes_per_block,
            "physical_bytes": cache.physical_bytes,
            "segments": len(cache.segments),
            "granule": cache.driver.granularity,
            "one_chunk_each": cache.segments_backed_by_one_chunk(),
            "aligned": [
                segment.offset % cache.driver.granularity == 0
                for segment in cache.segments
            ],
        }
        # Nothing of warm-up is left: blocks that no request has used are zero.
        last = worker.model_runner.kv_caches[0][cache.num_committed_blocks - 1]
        facts["untouched_block_is_zero"] = not bool(last.any())
    print("FACTS" + json.dumps(facts), flush=True)


if __name__ == "__main__":
    main()
