"""Hooks by which another package answers for connectors it does not edit.

A distribution exposes a module or object with hook implementations under the
entry-point group ``vllm_kvpad``::

    # pyproject.toml
    [project.entry-points.vllm_kvpad]
    acme = "acme_kv.kvpad"

    # acme_kv/kvpad.py
    from vllm_kvpad.hookspecs import hookimpl

    @hookimpl
    def kvpad_registers_device_memory(connector_class):
        if connector_class.__name__ == "AcmeConnector":
            return True
        return None

An implementation may leave out arguments it does not need. None means "not mine":
the next plugin, then kvpad's built-in table, answers. What a connector class
declares itself is nearer than any hook (see :mod:`vllm_kvpad.capabilities`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

PROJECT_NAME = "vllm_kvpad"
"""pluggy's project name, and the entry-point group."""

hookspec = pluggy.HookspecMarker(PROJECT_NAME)
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)


@hookspec(firstresult=True)
def kvpad_registers_device_memory(
    connector_class: type, kv_transfer_config: KVTransferConfig
) -> bool | None:
    """Whether the connector registers the device KV cache with a transport.

    Args:
        connector_class: The class vLLM will instantiate.
        kv_transfer_config: Its configuration; for a child of ``MultiConnector``,
            the child's own.
    """


@hookspec(firstresult=True)
def kvpad_exports_cuda_ipc(
    connector_class: type, kv_transfer_config: KVTransferConfig
) -> bool | None:
    """Whether the connector hands the KV cache out through legacy CUDA IPC handles.

    Arguments as for :func:`kvpad_registers_device_memory`.
    """
