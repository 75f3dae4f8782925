"""Which vLLM is this, and what is done to it: one module per kind of host.

| vLLM | host | module |
|---|---|---|
| no extensible KV cache of its own (0.32, 0.33) | ``supply`` | :mod:`.supply` |
| has one, whose engine rounds block counts (PR 56492) | ``pad_native`` |
  :mod:`.pad_native` |
| has one that pads, for connectors on a list of names | ``capabilities_only`` |
  :mod:`.capabilities_only` |

The host is chosen by looking at what the installed vLLM has, not by its version.
``python -m vllm_kvpad.hosts`` shows what was found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from vllm_kvpad.hosts import native_cache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from vllm_kvpad.capabilities import ConnectorCapabilities
    from vllm_kvpad.config import KvpadConfig
    from vllm_kvpad.metrics import Mode
    from vllm_kvpad.patching import PatchSet


class StepAside(Exception):
    """kvpad leaves this engine to stock vLLM; the message says why."""


class NothingToDo(Exception):
    """The user or the platform decided already; not a reason to warn or to fail."""


class Host(Protocol):
    """What kvpad does to one kind of vLLM."""

    name: str
    """As the README's table and the logs call it."""
    mode: Mode
    """As the metrics call it."""
    promise: str
    """What kvpad does, for the log: "kvpad <promise>; ..."."""

    def missing(self) -> list[str]:
        """One line for each thing that this kind of vLLM has and the installed lacks.

        Empty: this is the host. Imports what it looks at.
        """

    def patch_sets(self) -> Sequence[PatchSet]:
        """Every point of vLLM that the host relies on, patched or only called.

        Raises:
            PatchError: They cannot even be named, because a symbol is missing.
        """

    def install(
        self, worker: Any, config: KvpadConfig, capabilities: ConnectorCapabilities
    ) -> None:
        """Take charge of ``worker``'s KV cache.

        Raises:
            StepAside: This engine is better left alone; nothing was changed.
            PatchError: A patch point is not as expected; nothing was changed.
        """

    def install_in_engine(
        self, vllm_config: Any, config: KvpadConfig, capabilities: ConnectorCapabilities
    ) -> None:
        """Patch the process of an engine core, before its executor makes workers.

        Raises:
            StepAside: This engine is better left alone; nothing was changed.
            PatchError: A patch point is not as expected; nothing was changed.
        """


def hosts() -> tuple[Host, ...]:
    """Every host there is, in the order in which they are tried."""
    from vllm_kvpad.hosts.capabilities_only import CapabilitiesOnlyHost
    from vllm_kvpad.hosts.pad_native import PadNativeHost
    from vllm_kvpad.hosts.supply import SupplyHost

    return SupplyHost(), CapabilitiesOnlyHost(), PadNativeHost()


def select_host() -> Host:
    """Return the host module for the installed vLLM.

    Raises:
        StepAside: No module fits; the message has what each one misses.
    """
    why_not = []
    for host in hosts():
        missing = host.missing()
        if not missing:
            return host
        why_not.append(f"not {host.name} ({', '.join(missing)})")
    import vllm

    raise StepAside(
        f"vLLM {vllm.__version__} is none that this version of kvpad knows: "
        + "; ".join(why_not)
    )


def check_in_use(vllm_config: Any) -> None:
    """Tell whether there is anything to do for an engine.

    Raises:
        NothingToDo: vLLM has an extensible KV cache that this engine does not use.
    """
    if native_cache.is_installed() and not native_cache.is_in_use(vllm_config):
        raise NothingToDo(
            "vLLM's own extensible KV cache is off for this engine "
            "(enable_extensible_kv_cache), so its KV cache is as stock"
        )


# --- What the hosts share


def refuse_connector(capabilities: ConnectorCapabilities) -> None:
    """Refuse a connector that no VMM memory can serve, whoever maps it.

    Raises:
        StepAside: The message says what it does.
    """
    from vllm.platforms import current_platform

    if reasons := capabilities.reasons_to_step_aside(rocm=current_platform.is_rocm()):
        raise StepAside("; ".join(reasons))


def refuse_worker_class(worker: Any) -> None:
    """Refuse a worker that is not vLLM's ``gpu_worker.Worker`` or made from it.

    Raises:
        StepAside: The message names the class.
    """
    from vllm.v1.worker.gpu_worker import Worker

    if not isinstance(worker, Worker):
        raise StepAside(f"worker class {type(worker).__qualname__} is not vLLM's own")


def layout_of(
    kv_cache_config: KVCacheConfig | None, cache_config: Any
) -> KVCacheLayout:
    """The layout of a plan; where it names none, what vLLM has resolved."""
    from vllm.v1.kv_cache_layout import KVCacheLayout

    if kv_cache_config is not None and kv_cache_config.kv_cache_layout is not None:
        return KVCacheLayout[kv_cache_config.kv_cache_layout]
    resolved: KVCacheLayout = cache_config.get_resolved_kv_cache_layout()
    return resolved
