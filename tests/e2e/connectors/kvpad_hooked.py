"""A third party's word about a connector that it does not edit."""

from __future__ import annotations

from vllm_kvpad.hookspecs import hookimpl


@hookimpl
def kvpad_registers_device_memory(connector_class: type) -> bool | None:
    return True if connector_class.__name__ == "QuietConnector" else None
