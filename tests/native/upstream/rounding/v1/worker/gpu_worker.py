"""Stands for ``vllm.v1.worker.gpu_worker``: a worker's start, in upstream's order.

The device is told, not asked: ``vllm_config.device`` says how much memory there is and
how much of it is resident after warm-up beside the KV cache.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.utils.vmm_driver import vmm_unavailable_reason
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
from vllm.v1.worker.extensible_kv_cache import (
    ensure_kv_cache_blocks,
    extend_kv_cache,
    measure_kv_cache_bytes,
    num_committable_kv_blocks,
)
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.worker_base import WorkerBase

WARM_UP_GARBAGE = 7


class CompilationTimes(NamedTuple):
    language_model: float
    encoder: float
    num_kv_blocks: int | None


def ensure_kv_transfer_initialized(vllm_config: Any, kv_cache_config: Any) -> None:
    # In upstream one worker has a process, and the connector's module state, to itself.
    kv_transfer_state._KV_CONNECTOR_AGENT = None
    if vllm_config.kv_transfer_config is not None:
        kv_transfer_state._KV_CONNECTOR_AGENT = vllm_config.make_connector(
            kv_cache_config
        )


class Worker(WorkerBase):
    def init_device(self) -> None:
        self.device = torch.device("cpu")
        self.requested_memory = self.vllm_config.device.total
        self.model_runner = GPUModelRunner(self.vllm_config, self.device)
        kv_transfer_state._KV_CONNECTOR_AGENT = None

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return self.model_runner.get_kv_cache_spec()

    def set_kv_cache_layout(self, layout_name: str) -> None:
        self.cache_config.kv_cache_layout = layout_name

    def extensible_kv_cache_unsupported_reason(self) -> str | None:
        return self.vllm_config.device.unsupported or vmm_unavailable_reason()

    def disable_extensible_kv_cache(self) -> None:
        self.cache_config.enable_extensible_kv_cache = False

    def determine_available_memory(self) -> int:
        return int(self.vllm_config.device.capacity)

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        self.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
        if self.cache_config.enable_extensible_kv_cache:
            self._kv_cache_config = kv_cache_config
            self.model_runner.initialize_kv_cache(
                kv_cache_config,
                kv_cache_allocation_context=nullcontext(),
                extensible=True,
            )
            self.model_runner.extensible_kv_cache.reserved_headroom_bytes = 0
        else:
            ensure_kv_transfer_initialized(self.vllm_config, kv_cache_config)
            self.model_runner.initialize_kv_cache(kv_cache_config)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        num_kv_blocks = None
        if self.cache_config.enable_extensible_kv_cache:
            # One step after another, each of which may commit more.
            for num_blocks in range(
                2, num_committable_kv_blocks(self.model_runner) + 1
            ):
                ensure_kv_cache_blocks(self.model_runner, num_blocks)
                for view in self.model_runner.kv_caches:
                    view[:num_blocks].view(torch.int8).fill_(WARM_UP_GARBAGE)
            num_kv_blocks = self._measure_kv_cache_blocks()
        return CompilationTimes(0.0, 0.0, num_kv_blocks)

    def _measure_kv_cache_blocks(self) -> int:
        kv_cache = self.model_runner.extensible_kv_cache
        device = self.vllm_config.device
        num_bytes = measure_kv_cache_bytes(
            init_free_memory=device.total,
            free_memory=device.total - device.resident - kv_cache.physical_bytes,
            committed_bytes=kv_cache.physical_bytes,
            requested_memory=self.requested_memory,
            margin_floor_bytes=0,
        )
        # Assumed: the keyword's only use.
        aligned = self.vllm_config.kv_transfer_config is not None
        return int(kv_cache.blocks_within(num_bytes, aligned=aligned))

    def extend_kv_cache(self, num_blocks: int) -> None:
        kv_cache = self.model_runner.extensible_kv_cache
        kv_cache_config = copy.copy(self._kv_cache_config)
        kv_cache_config.num_blocks = num_blocks
        kv_cache_config.kv_cache_tensors = kv_cache.committed_kv_cache_tensors(
            kv_cache_config,
            self.cache_config.get_resolved_kv_cache_layout(),
            num_blocks,
        )
        ensure_kv_transfer_initialized(self.vllm_config, kv_cache_config)
        extend_kv_cache(self.model_runner, num_blocks)
        self.cache_config.num_gpu_blocks = num_blocks

    def sleep(self, level: int = 1) -> None:
        self.model_runner.extensible_kv_cache.release_physical()

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.model_runner.extensible_kv_cache.recommit()
