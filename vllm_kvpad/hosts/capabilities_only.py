"""vLLM whose own extensible KV cache pads: kvpad says for which connectors.

The pull request that kvpad's idea comes from pads vLLM's cache as kvpad would, for
connectors on a list of names: ``registers_kv_cache_memory()`` looks a name up. An
out-of-tree connector, or a subclass, is not on it.

Recognised by ``pad_kv_cache_segments`` and ``registers_kv_cache_memory``, wherever one
of vLLM's modules has them.

What is patched: ``registers_kv_cache_memory``, in its module and in every module that
imported it by name. It answers from kvpad's registry (:mod:`vllm_kvpad.capabilities`)
for the connectors of engines that kvpad has charge of, and as before for others.

Left alone: everything else. Placement, sizes, commits and registration are vLLM's.

The pull request's text was not to be had. That the function takes one argument, the
``VllmConfig`` or its ``KVTransferConfig``, and returns a bool, is an assumption; so is
the list of modules that may have it. A function that takes anything else is left
alone, with a warning that says what it takes.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm_kvpad.hosts import native_cache, refuse_connector
from vllm_kvpad.metrics import Mode
from vllm_kvpad.patching import Patch, PatchError, PatchPoint, PatchSet

if TYPE_CHECKING:
    from vllm_kvpad.capabilities import ConnectorCapabilities
    from vllm_kvpad.config import KvpadConfig

_ANSWER = "registers_kv_cache_memory"
_PAD = "pad_kv_cache_segments"

# Who may define them or import them by name; a function tells where it is at home.
_WHERE_TO_LOOK = (
    native_cache.MODULE,
    "vllm.v1.core.kv_cache_utils",
    "vllm.utils.extensible_tensor",
    "vllm.distributed.kv_transfer.kv_connector.utils",
    "vllm.distributed.kv_transfer.kv_connector.factory",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.engine.core",
)

_ARGUMENT_NAMES = ("vllm_config", "kv_transfer_config")


class CapabilitiesOnlyHost:
    """vLLM's own padding, for the connectors that register by kvpad's account."""

    name = "capabilities_only"
    mode = Mode.CAPABILITIES_ONLY
    promise = (
        "tells vLLM, which pads its own extensible KV cache, which connectors "
        "register memory"
    )

    def missing(self) -> list[str]:
        return [
            f"no {symbol} where vLLM may have it"
            for symbol in (_ANSWER, _PAD)
            if _home_of(symbol) is None
        ]

    def patch_sets(self) -> Sequence[PatchSet]:
        return (_patches_at(_home_of(_ANSWER)),)

    def install(
        self, worker: Any, config: KvpadConfig, capabilities: ConnectorCapabilities
    ) -> None:
        """Answer for the connector of ``worker``'s engine, in this process.

        Raises:
            StepAside: vLLM's cache cannot serve this connector, padded or not.
            PatchError: The function is not as expected; nothing was changed.
        """
        self._install(worker.vllm_config, capabilities)

    def install_in_engine(
        self, vllm_config: Any, config: KvpadConfig, capabilities: ConnectorCapabilities
    ) -> None:
        """Answer for the engine's connector in the process of its engine core.

        Raises:
            StepAside, PatchError: As :meth:`install`.
        """
        self._install(vllm_config, capabilities)

    def _install(self, vllm_config: Any, capabilities: ConnectorCapabilities) -> None:
        refuse_connector(capabilities)
        (patches,) = self.patch_sets()
        patches.apply()
        kv_transfer_config = vllm_config.kv_transfer_config
        if kv_transfer_config is not None:
            _answers.append((kv_transfer_config, capabilities))


# One for each worker and engine core of this process, which are few. A list, because
# vLLM's configurations cannot be hashed.
_answers: list[tuple[Any, ConnectorCapabilities]] = []


def _registers_kv_cache_memory(original: Any) -> Any:
    @functools.wraps(original)
    def registers_kv_cache_memory(*args: Any, **kwargs: Any) -> bool:
        (asked,) = (*args, *kwargs.values())
        # Either argument leads to the KVTransferConfig; see _ARGUMENT_NAMES.
        asked = getattr(asked, "kv_transfer_config", asked)
        if asked is not None:
            for kv_transfer_config, capabilities in reversed(_answers):
                if kv_transfer_config is asked or kv_transfer_config == asked:
                    return capabilities.registers_device_memory
        return bool(original(*args, **kwargs))

    return registers_kv_cache_memory


def _home_of(symbol: str) -> str | None:
    """The module that defines ``symbol``, found where vLLM may use it."""
    for name in _WHERE_TO_LOOK:
        try:
            module = importlib.import_module(name)
        except ImportError:
            # Not every generation of vLLM has every one of them.
            continue
        found = getattr(module, symbol, None)
        if callable(found):
            home: str = getattr(found, "__module__", name)
            return home
    return None


@functools.cache
def _patches_at(home: str | None) -> PatchSet:
    """The one patch, once its shape is known.

    Raises:
        PatchError: The function is missing or takes something else.
    """
    if home is None:
        raise PatchError(f"{_ANSWER}: not found in {', '.join(_WHERE_TO_LOOK)}")
    target = f"{home}:{_ANSWER}"
    problems = []
    for name in _ARGUMENT_NAMES:
        point = PatchPoint(target, (name,))
        try:
            point.resolve()
        except PatchError as error:
            problems.append(str(error))
        else:
            return PatchSet([Patch(point, _registers_kv_cache_memory, everywhere=True)])
    raise PatchError(" and ".join(problems))
