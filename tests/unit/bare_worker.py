"""vLLM's own worker class, without a device, and vLLM as it was afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from vllm_kvpad import plugin
from vllm_kvpad.hosts import supply


def make_worker(
    transfer_config: Any = None, additional_config: Any = None, rank: int = 0
) -> Any:
    """A worker as ``WorkerBase.__init__`` leaves it, as far as it matters."""
    worker = Worker.__new__(Worker)
    worker.rank = rank
    worker.vllm_config = SimpleNamespace(
        kv_transfer_config=transfer_config,
        additional_config=additional_config or {},
        use_v2_model_runner=True,
        attention_config=SimpleNamespace(hisparse_config=None),
        parallel_config=SimpleNamespace(enable_elastic_ep=False, data_parallel_index=0),
        aux_output_config=SimpleNamespace(enabled=False),
        model_config=SimpleNamespace(enable_sleep_mode=False, served_model_name="m"),
    )
    return worker


def take_charge(worker: Any) -> bool:
    """Whether kvpad then supplies ``worker``'s cache."""
    plugin.take_charge_of(worker)
    return supply.supply_of(worker) is not None


@contextlib.contextmanager
def vllm_put_back() -> Iterator[None]:
    """Undo whatever is done to the points that kvpad patches or relies on."""
    sets = [
        plugin.front_end_patches,
        plugin.worker_creation_patches,
        supply.WORKER_PATCHES,
        supply.V1_RUNNER_PATCHES,
        supply.V2_RUNNER_PATCHES,
    ]
    stock = [point.resolve() for each in sets for point in each.points]
    yield
    for each in sets:
        each._applied.clear()
    for owner, name, value in stock:
        setattr(owner, name, value)
