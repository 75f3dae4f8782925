"""vLLM without an extensible KV cache of its own (0.32, 0.33): kvpad supplies one.

Recognised by the absence of ``vllm.v1.worker.extensible_kv_cache``. This module says
what is patched, what is only called, and where kvpad steps aside. How a worker then
starts up is told in :mod:`vllm_kvpad.hosts.supplied_cache`.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm_kvpad.hosts import (
    StepAside,
    native_cache,
    refuse_connector,
    refuse_worker_class,
)
from vllm_kvpad.hosts.supplied_cache import (
    SuppliedKVCache,
    current_supply,
    graphs_are_captured_before_sizing,
)
from vllm_kvpad.metrics import Mode
from vllm_kvpad.patching import Patch, PatchPoint, PatchSet, apply_together

if TYPE_CHECKING:
    from vllm_kvpad.capabilities import ConnectorCapabilities
    from vllm_kvpad.config import KvpadConfig

_WORKER = "vllm.v1.worker.gpu_worker"
_RUNNER_V1 = "vllm.v1.worker.gpu_model_runner"
_RUNNER_V2 = "vllm.v1.worker.gpu.model_runner"
_ATTENTION_V2 = "vllm.v1.worker.gpu.attn_utils"

_supplies: weakref.WeakKeyDictionary[Any, SuppliedKVCache] = weakref.WeakKeyDictionary()


def supply_of(worker: Any) -> SuppliedKVCache | None:
    """Return what supplies ``worker``'s KV cache, None where kvpad has no charge."""
    return _supplies.get(worker)


class SupplyHost:
    """The whole cache, from reservation to sleep, is kvpad's."""

    name = "supply"
    mode = Mode.SUPPLIED
    promise = "supplies the KV cache"

    def missing(self) -> list[str]:
        if native_cache.is_installed():
            return [f"{native_cache.MODULE} is there"]
        return []

    def patch_sets(self) -> Sequence[PatchSet]:
        return WORKER_PATCHES, V1_RUNNER_PATCHES, V2_RUNNER_PATCHES

    def install_in_engine(
        self, vllm_config: Any, config: KvpadConfig, capabilities: ConnectorCapabilities
    ) -> None:
        """Nothing: the engine core plans with what the workers tell it."""

    def install(
        self, worker: Any, config: KvpadConfig, capabilities: ConnectorCapabilities
    ) -> None:
        """Patch the worker classes of this process and take charge of ``worker``.

        Raises:
            StepAside: This engine uses something the supplied cache cannot serve.
            PatchError: A patch point is not as expected; nothing was changed.
        """
        step_aside_where_unsupported(worker, capabilities)
        patch_sets = patch_sets_for(v2_runner=worker.vllm_config.use_v2_model_runner)
        apply_together(patch_sets)
        _supplies[worker] = SuppliedKVCache(
            config,
            capabilities,
            lost_patches=lambda: [line for each in patch_sets for line in each.lost()],
        )


def step_aside_where_unsupported(
    worker: Any, capabilities: ConnectorCapabilities
) -> None:
    """Refuse what is known before a device exists.

    Raises:
        StepAside: The message names the feature.
    """
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu_worker import Worker

    vllm_config = worker.vllm_config
    if not (current_platform.is_cuda() or current_platform.is_cpu()):
        raise StepAside(f"platform {current_platform.device_name} is not supported")
    refuse_worker_class(worker)
    refuse_connector(capabilities)
    if vllm_config.attention_config.hisparse_config is not None:
        raise StepAside("HiSparse places parts of the cache in host memory")
    if vllm_config.parallel_config.enable_elastic_ep:
        raise StepAside(
            "elastic expert parallelism sizes and warms up in its own order"
        )
    if vllm_config.aux_output_config.enabled:
        raise StepAside(
            "the auxiliary output connector is set up before the final size"
        )
    if (
        capabilities.registers_device_memory
        and vllm_config.model_config.enable_sleep_mode
        and not _unregisters_before_sleep(Worker)
    ):
        raise StepAside(
            f"this vLLM does not let {capabilities.name} unregister its memory "
            "before sleep"
        )


def _unregisters_before_sleep(worker_class: Any) -> bool:
    # 0.32.0 puts the cache to sleep while it is registered (vLLM issue 41237);
    # since 0.33.0 Worker.sleep calls the connector's unregister_kv_caches first.
    sleep = inspect.unwrap(worker_class.sleep)
    return "unregister_kv_caches" in sleep.__code__.co_names


def patch_sets_for(*, v2_runner: bool) -> tuple[PatchSet, PatchSet]:
    """Return the patches of the worker and of the model runner in use."""
    return WORKER_PATCHES, V2_RUNNER_PATCHES if v2_runner else V1_RUNNER_PATCHES


# --- replacements: each hands over to the worker's SuppliedKVCache, or to stock


def _method_of_supply(name: str) -> Callable[[Any], Any]:
    """Hand a worker method to ``SuppliedKVCache.<name>(worker, stock, ...)``."""

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            supply = supply_of(self)
            if supply is None or supply.stepped_aside:
                return original(self, *args, **kwargs)
            stock = functools.partial(original, self)
            return getattr(supply, name)(self, stock, *args, **kwargs)

        return method

    return make


def _sleep_mode_backend(original: property) -> property:
    assert original.fget is not None
    stock = original.fget

    @functools.wraps(stock)
    def sleep_mode_backend(self: Any) -> Any:
        backend = stock(self)
        supply = supply_of(self)
        if supply is None or supply.cache is None:
            return backend
        return supply.sleep_mode_backend(self, backend)

    return property(sleep_mode_backend)


def _shutdown(original: Any) -> Any:
    @functools.wraps(original)
    def shutdown(self: Any) -> None:
        original(self)
        if (supply := _supplies.pop(self, None)) is not None:
            supply.close()

    return shutdown


def _ensure_kv_transfer_initialized(original: Any) -> Any:
    @functools.wraps(original)
    def ensure_kv_transfer_initialized(vllm_config: Any, kv_cache_config: Any) -> None:
        supply = current_supply.get()
        if supply is None:
            original(vllm_config, kv_cache_config)
        else:
            supply.create_connector(original, vllm_config, kv_cache_config)

    return ensure_kv_transfer_initialized


def _allocate_kv_cache(original: Any) -> Any:
    @functools.wraps(original)
    def allocate_kv_cache(
        kv_cache_config: Any,
        device: Any,
        layout: Any,
        kernel_block_sizes: list[int] | None = None,
    ) -> Any:
        supply = current_supply.get()
        if supply is None:
            return original(kv_cache_config, device, layout, kernel_block_sizes)
        return supply.views(kv_cache_config, layout, kernel_block_sizes)

    return allocate_kv_cache


def _initialize_kv_cache(original: Any) -> Any:
    @functools.wraps(original)
    def initialize_kv_cache(
        self: Any, kv_cache_config: Any, *args: Any, **kwargs: Any
    ) -> None:
        supply = current_supply.get()
        if supply is None or not supply.is_adopting:
            original(self, kv_cache_config, *args, **kwargs)
        else:
            supply.rebind(self, kv_cache_config)

    return initialize_kv_cache


def _profile_cudagraph_memory(original: Any) -> Any:
    @functools.wraps(original)
    def profile_cudagraph_memory(self: Any) -> int:
        if graphs_are_captured_before_sizing.get():
            return 0
        return int(original(self))

    return profile_cudagraph_memory


_ALLOCATE = ("kv_cache_config", "device", "layout", "kernel_block_sizes")
_INITIALIZE = (
    "self",
    "kv_cache_config",
    "is_profiling",
    "kv_cache_allocation_context",
)

WORKER_PATCHES = PatchSet(
    [
        Patch(
            PatchPoint(f"{_WORKER}:Worker.determine_available_memory", ("self",)),
            _method_of_supply("determine_available_memory"),
        ),
        Patch(
            PatchPoint(
                f"{_WORKER}:Worker.initialize_from_config", ("self", "kv_cache_config")
            ),
            _method_of_supply("initialize_from_config"),
        ),
        Patch(
            PatchPoint(f"{_WORKER}:Worker.compile_or_warm_up_model", ("self",)),
            _method_of_supply("compile_or_warm_up_model"),
        ),
        Patch(
            PatchPoint(f"{_WORKER}:Worker.sleep_mode_backend", ("self",)),
            _sleep_mode_backend,
        ),
        Patch(PatchPoint(f"{_WORKER}:Worker.shutdown", ("self",)), _shutdown),
        Patch(
            PatchPoint(
                f"{_WORKER}:ensure_kv_transfer_initialized",
                ("vllm_config", "kv_cache_config"),
            ),
            _ensure_kv_transfer_initialized,
        ),
    ],
)

V1_RUNNER_PATCHES = PatchSet(
    [
        Patch(
            PatchPoint(f"{_RUNNER_V1}:allocate_kv_cache", _ALLOCATE), _allocate_kv_cache
        ),
        Patch(
            PatchPoint(f"{_RUNNER_V1}:GPUModelRunner.initialize_kv_cache", _INITIALIZE),
            _initialize_kv_cache,
        ),
        Patch(
            PatchPoint(
                f"{_RUNNER_V1}:GPUModelRunner.profile_cudagraph_memory", ("self",)
            ),
            _profile_cudagraph_memory,
        ),
    ],
    required=[
        PatchPoint(
            f"{_RUNNER_V1}:GPUModelRunner.initialize_kv_cache_tensors",
            (
                "self",
                "kv_cache_config",
                "kernel_block_sizes",
                "kv_cache_allocation_context",
            ),
        ),
        PatchPoint(
            f"{_RUNNER_V1}:GPUModelRunner._cleanup_profiling_kv_cache", ("self",)
        ),
    ],
)

V2_RUNNER_PATCHES = PatchSet(
    [
        Patch(
            PatchPoint(f"{_ATTENTION_V2}:allocate_kv_cache", _ALLOCATE),
            _allocate_kv_cache,
        ),
        Patch(
            PatchPoint(f"{_RUNNER_V2}:GPUModelRunner.initialize_kv_cache", _INITIALIZE),
            _initialize_kv_cache,
        ),
        Patch(
            PatchPoint(
                f"{_RUNNER_V2}:GPUModelRunner.profile_cudagraph_memory", ("self",)
            ),
            _profile_cudagraph_memory,
        ),
    ],
    required=[
        PatchPoint(
            f"{_ATTENTION_V2}:init_kv_cache",
            (
                "forward_context",
                "kv_cache_config",
                "device",
                "kernel_block_sizes",
                "vllm_config",
                "kv_cache_allocation_context",
                "block_tables",
                "attn_groups",
            ),
        ),
        PatchPoint(
            "vllm.v1.worker.gpu.kv_connector:get_kv_connector",
            ("vllm_config", "kv_caches_dict"),
        ),
        PatchPoint(
            "vllm.v1.worker.gpu.cudagraph_utils:_teardown_profiling_state", ("runner",)
        ),
    ],
)
