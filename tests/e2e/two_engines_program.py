"""Run engines one after the other in one process; put the last one to sleep often.

vLLM's CPU worker ignores sleep, so its sleep backend, which is then kvpad's, is called
as ``Worker.sleep`` and ``Worker.wake_up`` call it on a GPU. Prints one JSON line.

    python two_engines_program.py MODEL CYCLES
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

from mappings import kvpad_memory, mappings

PROMPTS = ["The capital of France is", "Water boils at"]
ENGINES = 3


class NothingElse:
    """What else a worker's sleep backend would free: nothing on a CPU."""

    def suspend(self, level: int = 1) -> None: ...

    def resume(self, tags: list[str] | None = None) -> None: ...


def state() -> dict[str, int]:
    gc.collect()
    # Freed memory that malloc keeps for later is no leak, and varies by machine.
    ctypes.CDLL(None).malloc_trim(0)
    pid = os.getpid()
    resident = Path("/proc/self/statm").read_text().split()[1]
    memory = kvpad_memory(pid)
    return {
        "resident": int(resident) * os.sysconf("SC_PAGE_SIZE"),
        "mappings": len(mappings(pid)),
        "files": len(os.listdir("/proc/self/fd")),
        "cache_mappings": len(memory),
        "cache_bytes": sum(m.end - m.start for m in memory),
    }


def answers(engine: Any) -> list[str]:
    from vllm import SamplingParams

    outputs = engine.generate(
        PROMPTS, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False
    )
    return [output.outputs[0].text for output in outputs]


def sleep_and_wake(engine: Any, cycles: int) -> list[dict[str, Any]]:
    worker = engine.llm_engine.model_executor.driver_worker.worker
    worker._sleep_mode_backend = NothingElse()
    backend = worker.sleep_mode_backend
    assert type(backend).__name__ == "CacheAwareSleepModeBackend"
    seen = []
    for _ in range(cycles):
        backend.suspend(1)
        asleep = state()
        backend.resume(None)
        seen.append({"asleep": asleep, "answers": answers(engine), "awake": state()})
    return seen


def run_engine(model: str, cycles: int) -> dict[str, Any]:
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    engine = LLM(
        model=model,
        max_model_len=1024,
        max_num_seqs=4,
        block_size=32,
        enforce_eager=True,
        enable_prefix_caching=False,
    )

    first = answers(engine)
    facts: dict[str, Any] = {"answers": first, "awake": state()}
    facts["cycles"] = sleep_and_wake(engine, cycles) if cycles else []
    engine.llm_engine.engine_core.shutdown()
    del engine
    cleanup_dist_env_and_memory()
    facts["after"] = state()
    return facts


def main() -> None:
    model, cycles = sys.argv[1:]
    found = [
        run_engine(model, int(cycles) if number == ENGINES - 1 else 0)
        for number in range(ENGINES)
    ]
    print("FACTS" + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
