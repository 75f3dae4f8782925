"""What Acme tells kvpad about connectors that it does not want to edit."""

from __future__ import annotations

from typing import Any

from vllm_kvpad.hookspecs import hookimpl


@hookimpl
def kvpad_registers_device_memory(
    connector_class: type, kv_transfer_config: Any
) -> bool | None:
    if not connector_class.__name__.startswith("Acme"):
        return None
    return bool(kv_transfer_config.kv_connector_extra_config.get("acme_rdma", False))


@hookimpl
def kvpad_exports_cuda_ipc(connector_class: type) -> bool | None:
    return True if connector_class.__name__ == "AcmeSharing" else None
