"""An engine core over the doubles: configuration, in-process workers, connector."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import Context
from types import SimpleNamespace
from typing import Any

import torch
from scenario import COUNTS, MIB, Facts, Region, observe, registered_regions
from vllm.config import KVTransferConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_kvpad import plugin
from vllm_kvpad.hosts import capabilities_only, pad_native

Start = Callable[[Any], Any]
"""Starts an engine core for a configuration; the fixture ``start``."""

LAYERS = 4
PAGE = 20 * 1024
GRANULE = 2 * MIB
CAPACITY_BLOCKS = 2000
WARM_UP_BLOCKS = 4  # as the doubles' committable_blocks()


class RecordingConnector:
    """Registers as NIXL's does, and keeps what it was given."""

    def __init__(self, kv_cache_config: Any) -> None:
        self.kv_cache_config = kv_cache_config
        self.regions: dict[str, Region] = {}

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        assert not self.regions, "registered twice"
        self.regions = registered_regions(kv_caches)

    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None: ...


def transfer_config(name: str, **arguments: Any) -> KVTransferConfig:
    return KVTransferConfig(kv_connector=name, kv_role="kv_both", **arguments)


def foreign(name: str) -> KVTransferConfig:
    return transfer_config(name, kv_connector_module_path="foreign_connectors")


def make_config(
    kv_transfer_config: KVTransferConfig | None,
    *,
    blocks: int,
    layout: KVCacheLayout = KVCacheLayout.LBHNC,
    enable: bool | None = True,
    unsupported: str | None = None,
    workers: int = 1,
    one_context: bool = False,
    kvpad: dict[str, Any] | None = None,
) -> Any:
    """What vLLM's configuration says, with room for ``blocks`` after warm-up."""
    spec = FullAttentionSpec(
        block_size=16, num_kv_heads=5, head_size=64, dtype=torch.bfloat16
    )
    assert spec.page_size_bytes == PAGE
    capacity = CAPACITY_BLOCKS * LAYERS * PAGE
    total = 4 * capacity
    cache_config = SimpleNamespace(
        enable_extensible_kv_cache=enable,
        kv_cache_layout=None,
        num_gpu_blocks=None,
        num_gpu_blocks_override=None,
        prefix_cache_retention_interval=None,
        get_resolved_kv_cache_layout=lambda: layout,
    )
    nothing = SimpleNamespace()
    return SimpleNamespace(
        model={f"model.layers.{index}.attn": spec for index in range(LAYERS)},
        layout=layout,
        device=SimpleNamespace(
            total=total,
            capacity=capacity,
            resident=total - LAYERS * GRANULE * COUNTS[blocks],
            unsupported=unsupported,
        ),
        workers=workers,
        one_context=one_context,
        make_connector=RecordingConnector,
        additional_config={} if kvpad is None else {"kvpad": kvpad},
        kv_transfer_config=kv_transfer_config,
        cache_config=cache_config,
        model_config=SimpleNamespace(served_model_name="double"),
        attention_config=SimpleNamespace(hisparse_config=None),
        lora_config=None,
        load_config=nothing,
        parallel_config=SimpleNamespace(rank=0, data_parallel_index=0),
        scheduler_config=nothing,
        device_config=nothing,
        speculative_config=None,
        observability_config=nothing,
        compilation_config=SimpleNamespace(ir_enable_torch_wrap=True),
        kernel_config=SimpleNamespace(
            ir_op_priority=SimpleNamespace(set_default=lambda: None)
        ),
        use_v2_model_runner=True,
    )


def executor_class() -> type:
    """Workers in this process, one after another, each wrapped as vLLM wraps them.

    Unless ``one_context`` is set they see no context variable of the engine core's, as
    in a process of their own.
    """
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.worker.gpu_worker import Worker

    class InProcessExecutor(Executor):
        def _init_executor(self) -> None:
            self.workers = []
            for rank in range(self.vllm_config.workers):
                worker = Worker(self.vllm_config, rank, rank, "", rank == 0)
                worker.init_device()
                self.workers.append(worker)

        def collective_rpc(
            self,
            method: str | Callable[[Any], Any],
            timeout: float | None = None,
            args: tuple[Any, ...] = (),
            kwargs: dict[str, Any] | None = None,
        ) -> list[Any]:
            results = []
            for rank, worker in enumerate(self.workers):
                if callable(method):
                    call = functools.partial(method, SimpleNamespace(worker=worker))
                else:
                    call = getattr(worker, method)
                own = args
                if method == "initialize_from_config":
                    own = (args[0][rank],)
                call = functools.partial(call, *own, **(kwargs or {}))
                apart = not self.vllm_config.one_context
                results.append(Context().run(call) if apart else call())
            return results

    return InProcessExecutor


def start(vllm_config: Any) -> Any:
    """Start an engine core; returns it. Plugins are loaded by the caller."""
    from vllm.v1.engine.core import EngineCore

    return EngineCore(vllm_config, executor_class(), log_stats=False)


def workers(engine: Any) -> list[Any]:
    found: list[Any] = engine.model_executor.workers
    return found


def regions_of(worker: Any) -> dict[str, Region]:
    connector = worker.model_runner.kv_connector
    if hasattr(connector, "kv_connector"):
        regions: dict[str, Region] = connector.kv_connector.regions
        return regions
    return registered_regions(views_of(worker))


def views_of(worker: Any) -> dict[str, torch.Tensor]:
    context = worker.model_runner.compilation_config.static_forward_context
    return {name: layer.kv_cache for name, layer in context.items()}


def facts_of(engine: Any, rank: int = 0) -> Facts:
    worker = workers(engine)[rank]
    return observe(
        views_of(worker),
        regions_of(worker),
        blocks=engine.kv_cache_config.num_blocks,
        capacity=worker.model_runner.extensible_kv_cache.capacity_blocks,
        granule=GRANULE,
        warm_up_blocks=WARM_UP_BLOCKS,
    )


def free(engine: Any) -> None:
    """Give the memory of an engine back."""
    for worker in workers(engine):
        cache = worker.model_runner.extensible_kv_cache
        for layer in worker.model_runner.compilation_config.static_forward_context:
            worker.model_runner.compilation_config.static_forward_context[
                layer
            ].kv_cache = None
        if cache is not None:
            cache.free()


def applied_sets() -> list[Any]:
    """Every set of kvpad's that has replaced something in this process."""
    known = [
        plugin.engine_creation_patches,
        plugin.worker_creation_patches,
        pad_native.ENGINE_PATCHES,
        pad_native.WORKER_PATCHES,
    ]
    home = capabilities_only._home_of("registers_kv_cache_memory")
    if home is not None and capabilities_only._patches_at.cache_info().currsize:
        known.append(capabilities_only._patches_at(home))
    return [each for each in known if each.is_applied]
