"""Stands for ``vllm.v1.worker.gpu.model_runner``: what it does with the KV cache."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, create_kv_cache_views
from vllm.v1.worker.extensible_kv_cache import ExtensibleKVCache
from vllm.v1.worker.gpu.kv_connector import NO_OP_KV_CONNECTOR, get_kv_connector


class GPUModelRunner:
    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        self.vllm_config = vllm_config
        self.cache_config = vllm_config.cache_config
        self.compilation_config = SimpleNamespace(
            static_forward_context={
                name: SimpleNamespace(kv_cache=None) for name in vllm_config.model
            }
        )
        self.device = device
        self.kernel_block_sizes: list[int] | None = None
        self.kv_connector = NO_OP_KV_CONNECTOR
        self.extensible_kv_cache: ExtensibleKVCache | None = None

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        return dict(self.vllm_config.model)

    def initialize_kv_cache(
        self,
        kv_cache_config: KVCacheConfig,
        is_profiling: bool = False,
        kv_cache_allocation_context: AbstractContextManager[None] | None = None,
        extensible: bool = False,
    ) -> None:
        kv_cache_config = deepcopy(kv_cache_config)
        self.kv_cache_config = kv_cache_config
        self.extensible_kv_cache = None
        allocate = torch.zeros
        if extensible:
            self.extensible_kv_cache = ExtensibleKVCache(kv_cache_config, self.device)
            allocate = self.extensible_kv_cache.allocate
        with kv_cache_allocation_context or nullcontext():
            buffer = allocate(kv_cache_config.kv_cache_tensors[0].size)
        kv_caches = {}
        (spec,) = {group.kv_cache_spec for group in kv_cache_config.kv_cache_groups}
        for tensor in kv_cache_config.kv_cache_tensors:
            views = create_kv_cache_views(
                buffer.view(torch.int8),
                spec,
                kv_cache_config.num_blocks,
                self.cache_config.get_resolved_kv_cache_layout(),
                tensor,
            )
            kv_caches |= zip(tensor.layers, views, strict=True)
        for name, view in kv_caches.items():
            self.compilation_config.static_forward_context[name].kv_cache = view
        self.kv_caches = list(kv_caches.values())
        # While it is extensible no connector has been created: this is the no-op one.
        self.kv_connector = get_kv_connector(self.vllm_config, kv_caches)
