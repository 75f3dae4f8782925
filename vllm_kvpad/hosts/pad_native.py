"""vLLM with an extensible KV cache whose engine rounds block counts: kvpad pads it.

vLLM PR 56492 makes each segment of a cache end on a granule by rounding the number
of blocks, when a connector is configured. kvpad has the segments of a registering
connector *start* on granules instead and rounds nothing, for any connector.

Recognised by what rounds: ``align_extensible_kv_cache_capacity``,
``granule_aligned_blocks`` and ``ExtensibleKVCache.blocks_within(aligned=...)``.

What is patched, in the process of the engine core:

* ``EngineCore._initialize_kv_caches`` asks all workers whether kvpad has charge of
  them. Only if all say so, and only while it runs, the next two are without effect;
* ``align_extensible_kv_cache_capacity``: the capacity stays as planned;
* ``granule_aligned_blocks``: the count measured after warm-up stays as measured.

And in the process of a worker:

* ``Worker.initialize_from_config``: if the connector registers, the worker's own copy
  of the configuration is padded;
* ``ExtensibleKVCache``, replaced by a subclass of itself. It takes a padded placement
  (gaps between segments); it defragments for registering connectors only (vLLM does
  for all); and ``blocks_within`` ignores ``aligned``.

Left alone: when the cache is used at all and what turns it off, capacity, margins,
warm-up, measuring, views, sleep, and when the connector is created.

All points are checked in every process, those of the other process too, and one that
is not as expected has kvpad patch nothing in any. Should a worker still not be in
charge where the others are, vLLM rounds as it does without kvpad, and padding changes
nothing then: segments of a rounded capacity start on granules as it is.

Read: ``ExtensibleKVCache`` whole, and its tests; ``ExtensibleTensor``'s calls;
``VmmDriver``; how worker, runner, executor and engine core call one another; the call
``align_extensible_kv_cache_capacity(vllm_config, kv_cache_configs,
scheduler_kv_cache_config, granule)``, which changes its arguments. Assumed, because
their text was not to be had: that the latter returns nothing, that the two rounding
functions are called from within ``_initialize_kv_caches``, and that rounding after
warm-up goes through ``granule_aligned_blocks`` or ``blocks_within``. Parameters that
were seen in calls only may have any name.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from vllm_kvpad.hosts import (
    layout_of,
    native_cache,
    refuse_connector,
    refuse_worker_class,
)
from vllm_kvpad.log import get_logger
from vllm_kvpad.metrics import Mode
from vllm_kvpad.patching import (
    ANY,
    Patch,
    PatchPoint,
    PatchSet,
    absent,
    check_together,
)
from vllm_kvpad.placement import kv_cache_segments, pad_kv_cache_segments

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from vllm_kvpad.capabilities import ConnectorCapabilities
    from vllm_kvpad.config import KvpadConfig

logger = get_logger(__name__)

_TENSOR = "vllm.utils.extensible_tensor"
_DRIVER = "vllm.utils.vmm_driver"
_PLANNING = "vllm.v1.core.kv_cache_utils"
_ENGINE = "vllm.v1.engine.core"
_WORKER = "vllm.v1.worker.gpu_worker"
_CACHE = native_cache.MODULE


@dataclasses.dataclass(eq=False)
class _Charge:
    """That kvpad has charge of a worker, and for what kind of connector."""

    config: KvpadConfig
    capabilities: ConnectorCapabilities


@dataclasses.dataclass(frozen=True)
class _Placing:
    """The cache that a worker is about to make, as planned and as placed."""

    planned: KVCacheConfig
    placed: KVCacheConfig  # the same object, unless padded
    layout: KVCacheLayout
    registers: bool


@dataclasses.dataclass
class _Engine:
    """An engine core whose workers are all in kvpad's charge, while it starts."""

    registers: bool
    rounds: bool = False  # it found a placement that cannot be padded


_charges: weakref.WeakKeyDictionary[Any, _Charge] = weakref.WeakKeyDictionary()
_placing: ContextVar[_Placing | None] = ContextVar("placing", default=None)
_starting_engine: ContextVar[_Engine | None] = ContextVar(
    "starting_engine", default=None
)


class PadNativeHost:
    """vLLM's own extensible cache, padded."""

    name = "pad_native"
    mode = Mode.PADDED
    promise = "pads vLLM's own extensible KV cache and rounds no block count"

    def missing(self) -> list[str]:
        return absent(_MARKERS)

    def patch_sets(self) -> Sequence[PatchSet]:
        return ENGINE_PATCHES, WORKER_PATCHES

    def install(
        self, worker: Any, config: KvpadConfig, capabilities: ConnectorCapabilities
    ) -> None:
        """Patch the worker classes of this process and take charge of ``worker``.

        Raises:
            StepAside: vLLM's cache cannot serve this connector, padded or not.
            PatchError: A patch point is not as expected; nothing was changed.
        """
        refuse_connector(capabilities)
        refuse_worker_class(worker)
        self._apply(WORKER_PATCHES)
        _charges[worker] = _Charge(config, capabilities)

    def install_in_engine(
        self, vllm_config: Any, config: KvpadConfig, capabilities: ConnectorCapabilities
    ) -> None:
        """Have the engine core of this process ask its workers before it rounds.

        Raises:
            StepAside: As :meth:`install`.
            PatchError: A patch point is not as expected; nothing was changed.
        """
        refuse_connector(capabilities)
        self._apply(ENGINE_PATCHES)

    def _apply(self, patches: PatchSet) -> None:
        check_together(self.patch_sets())
        patches.apply()


def padding_of(worker: Any) -> bool | None:
    """Whether kvpad pads the cache of ``worker``; None if it has no charge of it.

    Sent to all workers by the engine core, which gets each one wrapped.
    """
    charge = _charges.get(getattr(worker, "worker", worker))
    return None if charge is None else charge.capabilities.registers_device_memory


# --- the worker's process


def _initialize_from_config(original: Any) -> Any:
    @functools.wraps(original)
    def initialize_from_config(
        self: Any, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any
    ) -> Any:
        placing = _place(self, kv_cache_config)
        if placing is None:
            return original(self, kv_cache_config, *args, **kwargs)
        token = _placing.set(placing)
        try:
            return original(self, placing.placed, *args, **kwargs)
        finally:
            _placing.reset(token)

    return initialize_from_config


def _place(worker: Any, planned: KVCacheConfig) -> _Placing | None:
    """Decide where ``worker``'s cache goes; None leaves it to vLLM."""
    charge = _charges.get(worker)
    if (
        charge is None
        or not native_cache.is_in_use(worker.vllm_config)
        or not planned.kv_cache_tensors
    ):
        return None
    layout = layout_of(planned, worker.cache_config)
    if not charge.capabilities.registers_device_memory:
        return _Placing(planned, planned, layout, registers=False)
    from vllm.utils.vmm_driver import get_vmm_driver

    try:
        granule = get_vmm_driver().granularity(worker.device.index or 0)
        padded = pad_kv_cache_segments(planned, layout, granule)
    except ValueError as error:
        from vllm_kvpad.plugin import step_aside

        # The engine core found the same, and rounds.
        del _charges[worker]
        reason = f"the KV cache cannot be padded: {error}"
        step_aside(
            worker,
            charge.config,
            reason,
            charge.capabilities,
            speaks=worker.rank == 0,
        )
        return None
    return _Placing(planned, padded, layout, registers=True)


def _accept_gaps(original: Any) -> Any:
    class ExtensibleKVCache(original):
        """vLLM's cache; over a padded placement, and unrounded, for kvpad's workers."""

        _kvpad_placing: _Placing | None
        buffer: Any

        def __init__(self, kv_cache_config: KVCacheConfig, device: Any) -> None:
            placing = self._kvpad_placing = _placing.get()
            if placing is None:
                super().__init__(kv_cache_config, device)
                return
            # What vLLM derives from a configuration (bytes of a block, strides) holds
            # for pages without gaps, so it gets the planned one; gaps come after.
            super().__init__(placing.planned, device)
            if kv_cache_config.kv_cache_tensors != placing.planned.kv_cache_tensors:
                self._leave_gaps(kv_cache_config, placing.layout, device)

        def _leave_gaps(
            self, placed: KVCacheConfig, layout: KVCacheLayout, device: Any
        ) -> None:
            segments = kv_cache_segments(placed, layout)
            strides = [segment.block_stride for segment in segments]
            if strides != list(self.segment_strides):
                raise RuntimeError(
                    "kvpad and vLLM divide the KV cache differently: block strides "
                    f"{strides} against {list(self.segment_strides)} (bytes). Set "
                    "VLLM_KVPAD_DISABLE=1 and report it"
                )
            size = placed.kv_cache_tensors[0].size
            offsets = [segment.offset for segment in segments]
            # Nothing is committed yet: only addresses are given back.
            without_gaps = self.buffer
            without_gaps.free()
            self.buffer = type(without_gaps)(
                size,
                device=device,
                segment_capacities=[
                    end - start
                    for start, end in zip(offsets, [*offsets[1:], size], strict=True)
                ],
            )
            self.segment_offsets = offsets
            self.size = size

        def commit(
            self, num_blocks: int, defragment: bool = False, shrink: bool = False
        ) -> None:
            if self._kvpad_placing is not None:
                defragment = defragment and self._kvpad_placing.registers
            super().commit(num_blocks, defragment=defragment, shrink=shrink)

        def blocks_within(self, num_bytes: int, aligned: bool = False) -> int:
            if self._kvpad_placing is not None:
                aligned = False
            blocks: int = super().blocks_within(num_bytes, aligned=aligned)
            return blocks

    ExtensibleKVCache.__module__ = original.__module__
    ExtensibleKVCache.__qualname__ = original.__qualname__
    return ExtensibleKVCache


# --- the engine core's process


def _initialize_kv_caches(original: Any) -> Any:
    @functools.wraps(original)
    def _initialize_kv_caches(self: Any, vllm_config: Any) -> Any:
        engine = None
        if native_cache.is_in_use(vllm_config):
            engine = _engine_in_charge(self.model_executor, vllm_config)
        with _starting(engine):
            return original(self, vllm_config)

    return _initialize_kv_caches


@contextmanager
def _starting(engine: _Engine | None) -> Iterator[None]:
    token = _starting_engine.set(engine)
    try:
        yield
    finally:
        _starting_engine.reset(token)


def _engine_in_charge(executor: Any, vllm_config: Any) -> _Engine | None:
    """Ask the workers; None unless every one of them is in kvpad's charge."""
    try:
        answers = executor.collective_rpc(padding_of)
    except Exception:
        from vllm_kvpad.config import KvpadConfig

        if KvpadConfig.from_additional_config(vllm_config.additional_config).strict:
            raise
        logger.warning(
            "kvpad: the workers could not be asked whether they pad their KV cache, "
            "so vLLM rounds the number of blocks",
            exc_info=True,
        )
        return None
    if not answers or None in answers:
        return None
    return _Engine(registers=any(answers))


def _align_extensible_kv_cache_capacity(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def align_extensible_kv_cache_capacity(*args: Any, **kwargs: Any) -> Any:
        engine = _starting_engine.get()
        if engine is None:
            return original(*args, **kwargs)
        vllm_config, configs, _, granule = signature.bind(
            *args, **kwargs
        ).arguments.values()
        if engine.registers and not _can_pad(vllm_config, configs, granule):
            engine.rounds = True
            return original(*args, **kwargs)
        return None

    return align_extensible_kv_cache_capacity


def _can_pad(vllm_config: Any, configs: Sequence[KVCacheConfig], granule: int) -> bool:
    """Whether the workers, who are to do it, will be able to."""
    try:
        for config in configs:
            layout = layout_of(config, vllm_config.cache_config)
            pad_kv_cache_segments(config, layout, granule)
    except ValueError as error:
        logger.debug("block counts are rounded: %s", error)
        return False
    return True


def _granule_aligned_blocks(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def granule_aligned_blocks(*args: Any, **kwargs: Any) -> int:
        engine = _starting_engine.get()
        if engine is None or engine.rounds:
            return int(original(*args, **kwargs))
        num_blocks, _, _ = signature.bind(*args, **kwargs).arguments.values()
        return int(num_blocks)

    return granule_aligned_blocks


# --- the points, as data

_ALIGN = PatchPoint(
    f"{_PLANNING}:align_extensible_kv_cache_capacity", (ANY, ANY, ANY, ANY)
)
_ALIGNED_BLOCKS = PatchPoint(f"{_TENSOR}:granule_aligned_blocks", (ANY, ANY, ANY))
_BLOCKS_WITHIN = PatchPoint(
    f"{_CACHE}:ExtensibleKVCache.blocks_within", ("self", "num_bytes", "aligned")
)
_MARKERS = (_ALIGN, _ALIGNED_BLOCKS, _BLOCKS_WITHIN)

ENGINE_PATCHES = PatchSet(
    [
        Patch(
            PatchPoint(
                f"{_ENGINE}:EngineCore._initialize_kv_caches",
                ("self", "vllm_config"),
                mentions=("model_executor", "initialize_from_config"),
            ),
            _initialize_kv_caches,
        ),
        Patch(_ALIGN, _align_extensible_kv_cache_capacity, everywhere=True),
        Patch(_ALIGNED_BLOCKS, _granule_aligned_blocks, everywhere=True),
    ],
)

WORKER_PATCHES = PatchSet(
    [
        Patch(
            PatchPoint(
                f"{_WORKER}:Worker.initialize_from_config",
                ("self", "kv_cache_config"),
                mentions=("enable_extensible_kv_cache", "initialize_kv_cache"),
            ),
            _initialize_from_config,
        ),
        Patch(
            PatchPoint(
                f"{_CACHE}:ExtensibleKVCache",
                ("kv_cache_config", "device"),
                mentions=(
                    "buffer",
                    "segment_capacities",
                    "segment_offsets",
                    "segment_strides",
                    "size",
                ),
            ),
            _accept_gaps,
            everywhere=True,
        ),
    ],
    required=[
        _BLOCKS_WITHIN,
        PatchPoint(
            f"{_CACHE}:ExtensibleKVCache.commit",
            ("self", "num_blocks", "defragment", "shrink"),
            mentions=("segments_backed_by_one_chunk", "resize_segments_"),
        ),
        PatchPoint(
            f"{_CACHE}:extend_kv_cache",
            ("runner", "num_blocks"),
            mentions=("commit", "defragment"),
        ),
        PatchPoint(
            f"{_TENSOR}:ExtensibleTensor",
            (ANY, "device"),
            and_more=True,
            mentions=("segment_capacities",),
        ),
        PatchPoint(f"{_TENSOR}:ExtensibleTensor.free", ("self",)),
        PatchPoint(f"{_DRIVER}:get_vmm_driver", ()),
        PatchPoint(f"{_DRIVER}:VmmDriver.granularity", ("self", "device_index")),
    ],
)
