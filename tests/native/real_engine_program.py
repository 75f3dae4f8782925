"""The scenario on a real CPU engine of the installed vLLM, whose cache kvpad supplies.

The worker starts as a GPU worker does (``tests/e2e/measured_path_program.py``) with a
real NIXL connector. Prints the observed facts as one JSON line.

    python real_engine_program.py FOLDER_OF_A_MODEL BLOCKS
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

from measured_path_program import (
    MIB,
    PEAK_BYTES,
    give_cpu_worker_a_gpu_workers_start,
)
from scenario import COUNTS, Region, as_json, observe, registered_regions

LAYERS = 4
GRANULE = 4 * MIB
RESIDENT_MIB = 40


def write_model(folder: Path) -> None:
    """A model of 5 heads of 64: the CPU's blocks of 32 tokens take 40 KiB a layer."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 320,
        "head_dim": 64,
        "intermediate_size": 640,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "num_hidden_layers": LAYERS,
        "max_position_embeddings": 2048,
        "vocab_size": 512,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))


def record_registrations(regions: dict[str, Region]) -> None:
    """Note what NIXL is handed, and let it register it."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlPullConnector

    stock = NixlPullConnector.register_kv_caches

    def register_kv_caches(self: Any, kv_caches: Mapping[str, Any]) -> None:
        regions.update(registered_regions(kv_caches))
        stock(self, kv_caches)

    NixlPullConnector.register_kv_caches = register_kv_caches


def main() -> None:
    folder, blocks = Path(sys.argv[1]), int(sys.argv[2])
    write_model(folder)
    notes: dict[str, Any] = {}
    regions: dict[str, Region] = {}
    cache_mib = LAYERS * COUNTS[blocks] * GRANULE // MIB
    give_cpu_worker_a_gpu_workers_start(
        cache_mib + RESIDENT_MIB + PEAK_BYTES // MIB, RESIDENT_MIB, notes
    )
    record_registrations(regions)

    from vllm import LLM

    engine = LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_batched_tokens=1024,
        max_num_seqs=2,
        block_size=32,
        enforce_eager=True,
        kv_transfer_config={
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "kv_buffer_device": "cpu",
        },
        additional_config={"kvpad": {"margin_bytes": 0, "host_granule_bytes": GRANULE}},
    )
    worker = engine.llm_engine.model_executor.driver_worker.worker
    from vllm_kvpad.hosts.supply import supply_of

    supply = supply_of(worker)
    assert supply is not None
    assert supply.cache is not None
    views = dict(zip(regions, worker.model_runner.kv_caches, strict=True))
    facts = observe(
        views,
        regions,
        blocks=worker.cache_config.num_gpu_blocks,
        capacity=supply.cache.capacity_blocks,
        granule=GRANULE,
        warm_up_blocks=notes["warm_up_blocks"],
    )
    print("FACTS" + json.dumps(as_json(facts)), flush=True)


if __name__ == "__main__":
    main()
