"""Which vLLM is this, and what is done to it: one module per kind of host.

| vLLM | module |
|---|---|
| no extensible KV cache of its own (0.32, 0.33) | :mod:`.supply` |

The host is chosen by looking at what the installed vLLM has, not by its version.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from vllm_kvpad.capabilities import ConnectorCapabilities
    from vllm_kvpad.config import KvpadConfig


class StepAside(Exception):
    """kvpad leaves this engine to stock vLLM; the message says why."""


class Host(Protocol):
    """What kvpad does to one kind of vLLM."""

    name: str

    def install(
        self, worker: Any, config: KvpadConfig, capabilities: ConnectorCapabilities
    ) -> None:
        """Take charge of ``worker``'s KV cache.

        Raises:
            StepAside: This engine is better left alone; nothing was changed.
            PatchError: A patch point is not as expected; nothing was changed.
        """


def select_host() -> Host:
    """Return the host module for the installed vLLM.

    Raises:
        StepAside: No module fits.
    """
    if importlib.util.find_spec("vllm.v1.worker.extensible_kv_cache") is not None:
        import vllm

        raise StepAside(
            f"vLLM {vllm.__version__} brings its own extensible KV cache, which this "
            "version of kvpad does not know"
        )
    from vllm_kvpad.hosts.supply import SupplyHost

    return SupplyHost()
