"""Connectors that move nothing, each with something to say about the KV cache.

Engines of the tests find this module on ``PYTHONPATH`` and load a class with
``kv_connector_module_path``.
"""

from __future__ import annotations

import contextlib
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)


class Nothing(KVConnectorMetadata):
    """What a step copies: nothing."""


class QuietConnector(KVConnectorBase_V1):
    """Declares nothing; the package ``kvpad-hooked`` beside it answers for it."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> Nothing:
        return Nothing()


class ExportingConnector(QuietConnector):
    """Would hand the cache to another process through legacy CUDA IPC handles."""

    REGISTERS_DEVICE_MEMORY = False
    EXPORTS_CUDA_IPC = True


class PoolConnector(QuietConnector):
    """Brings its own memory for the cache."""

    REGISTERS_DEVICE_MEMORY = True

    def get_mem_pool_context(self) -> Any:
        return contextlib.nullcontext()
