"""Scale on paper: registration and padding of a fleet, from measured unit costs.

A fleet of ``gpus`` ranks, each with a KV cache of L layers, R regions and n blocks,
talks to ``peers`` other ranks each:

    registering, a rank        r0 + r R
    meeting its peers, a rank  peers (m0 + m R + d L n)
    metadata sent, all ranks   gpus peers (b0 + b R)       bytes
    memory padding takes       gpus R granule / 2          bytes, on average; twice
                                                           that at most

Meeting a peer is to load its metadata and to prepare a descriptor for each of its
blocks in each layer, which vLLM's NIXL connector does in either layout: 27 blocks of
30 layers were moved as 810 descriptors with blocks outermost too.

R is L with padding, and as many without it wherever layers are outermost; it is 1 with
blocks outermost. r0, r, m0, m, b0, b and d are measured by
``registration.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from blocks import GRANULE, capacity_segments
from models import Model
from results import Recorder, Results, load, results_folder

from vllm_kvpad.placement import block_alignment, bytes_per_block

GPUS = 1_000
BUDGET = 100 << 30


@dataclasses.dataclass(frozen=True)
class UnitCosts:
    """Seconds and bytes, from ``registration.json``."""

    register_fixed: float
    register_region: float
    meet_fixed: float
    meet_region: float
    metadata_fixed: float
    metadata_region: float
    descriptor: float

    @classmethod
    def of(cls, registration: Results) -> UnitCosts:
        fits = registration.facts["fits_through_smallest"]
        return cls(
            register_fixed=fits["register"]["fixed"],
            register_region=fits["register"]["each"],
            meet_fixed=fits["introduce"]["fixed"],
            meet_region=fits["introduce"]["each"],
            metadata_fixed=fits["metadata"]["fixed"],
            metadata_region=fits["metadata"]["each"],
            descriptor=registration.facts["prepare_seconds_each_descriptor"],
        )


def fleet(
    costs: UnitCosts, *, gpus: int, peers: int, layers: int, regions: int, blocks: int
) -> dict[str, float]:
    """The formulas above. Times are one rank's in seconds, bytes are the fleet's."""
    return {
        "register_seconds": costs.register_fixed + costs.register_region * regions,
        "meet_seconds": peers * (costs.meet_fixed + costs.meet_region * regions),
        "prepare_seconds": peers * costs.descriptor * layers * blocks,
        "descriptors": peers * layers * blocks,
        "metadata_bytes": gpus
        * peers
        * (costs.metadata_fixed + costs.metadata_region * regions),
    }


def on_paper(model: Model, block_size: int, costs: UnitCosts) -> dict[str, Any]:
    """Half of ``GPUS`` prefill, half decode; each meets its peers of the other half.

    Those are one rank of each engine where both sides have as many ranks.
    """
    segments = capacity_segments(model, block_size)
    per_block = bytes_per_block(segments)
    blocks = BUDGET // per_block
    peers = GPUS // 2 // model.tensor_parallel
    rows: Mapping[str, int] = {"padded": len(segments), "blocks outermost": 1}
    return {
        "model": model.name,
        "block_size": block_size,
        "blocks": blocks,
        "regions": len(segments),
        "peers": peers,
        "gpus": GPUS,
        "cache_bytes": GPUS * BUDGET,
        "padding_bytes_mean": GPUS * len(segments) * GRANULE // 2,
        "rounding_bytes_mean": GPUS
        * (block_alignment(segments, GRANULE) - 1)
        * per_block
        // 2,
        "fleet": {
            name: fleet(
                costs,
                gpus=GPUS,
                peers=peers,
                layers=len(segments),
                regions=regions,
                blocks=blocks,
            )
            for name, regions in rows.items()
        },
    }


CASES = (
    (Model("Llama-3.1-70B", tensor_parallel=8), 16),
    (Model("DeepSeek-V3"), 64),
    (Model("Qwen3-30B-A3B"), 16),
)


def main(rounds: int = 1) -> None:
    """Needs ``registration.json`` in the results folder, from the same machine."""
    costs = UnitCosts.of(load(results_folder() / "registration.json"))
    cases = [on_paper(model, block_size, costs) for model, block_size in CASES]
    Recorder("scale").note(unit_costs=dataclasses.asdict(costs), cases=cases)
    for case in cases:
        for kind, found in case["fleet"].items():
            print(f"{case['model']}, {kind}: {found}")
