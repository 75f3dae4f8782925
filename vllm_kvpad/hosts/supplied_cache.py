"""One worker's KV cache, from start-up to shutdown, on a vLLM that has none like it.

Stock vLLM profiles, estimates what CUDA graphs will take, sizes, allocates, then
warms up. Here the worker warms up for real before it answers the engine core:

1. ``determine_available_memory``: stock's profile run without the graph estimate; the
   cache is reserved at capacity, the blocks that warm-up addresses are committed,
   stock's own ``initialize_from_config`` and ``compile_or_warm_up_model`` run over
   them, and what is left is measured. The engine core plans with that number.
2. ``initialize_from_config``: where the plan has the groups and strides that were
   warmed up with, the cache is committed at the final count, views are bound again
   at the same addresses, and the connector is created and registers. Otherwise the
   early state is dropped and stock's path runs, over a reservation of the final size.
3. ``compile_or_warm_up_model``: done already; the recorded times are returned.

Where the size is given (CPU engines, ``kv_cache_memory_bytes``,
``num_gpu_blocks_override``) nothing is measured and only the last part of 2 applies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from vllm_kvpad.hosts import StepAside, agreement, layout_of, model_runners
from vllm_kvpad.kv_cache import ExtensibleKVCache
from vllm_kvpad.log import get_logger
from vllm_kvpad.metrics import CacheFigures, EngineReport, Mode, publish
from vllm_kvpad.placement import (
    block_alignment,
    kv_cache_segments,
    pad_kv_cache_segments,
    padding_bytes,
    rounded_blocks,
)
from vllm_kvpad.sizing import MeasuredMemory, capacity_blocks, warm_up_blocks
from vllm_kvpad.vmm import (
    HostVmmDriver,
    VmmError,
    VmmOutOfMemoryError,
    VmmUnsupportedError,
    get_driver,
)
from vllm_kvpad.vmm.base import format_bytes

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from vllm_kvpad.capabilities import ConnectorCapabilities
    from vllm_kvpad.config import KvpadConfig
    from vllm_kvpad.vmm import VmmDriver

logger = get_logger(__name__)

current_supply: ContextVar[SuppliedKVCache | None] = ContextVar(
    "current_supply", default=None
)
"""Whose memory ``allocate_kv_cache`` hands out. Unset during stock's own profiling,
whose nested allocations are not the real cache."""

graphs_are_captured_before_sizing: ContextVar[bool] = ContextVar(
    "graphs_are_captured_before_sizing", default=False
)
"""Whether stock's estimate of CUDA-graph memory would be for nothing."""


@dataclasses.dataclass(frozen=True)
class _Plan:
    """A cache at capacity: as the engine core would plan it, and as it is placed."""

    planned: KVCacheConfig
    placed: KVCacheConfig  # padded if the connector registers


@dataclasses.dataclass(frozen=True)
class _WarmStart:
    """What the worker was warmed up with before the engine core made its plan."""

    plan: _Plan
    max_model_len: int
    compilation_times: Any


class SuppliedKVCache:
    """Supplies one worker's KV cache. Methods take the worker and stock's method.

    Args:
        config: The operator's settings.
        capabilities: What the configured connector does with the cache.
        lost_patches: Says what of vLLM somebody else has replaced since kvpad did,
            a line each.
    """

    def __init__(
        self,
        config: KvpadConfig,
        capabilities: ConnectorCapabilities,
        lost_patches: Callable[[], list[str]] = list,
    ) -> None:
        self.config = config
        self.capabilities = capabilities
        self._lost_patches = lost_patches
        self.cache: ExtensibleKVCache | None = None
        self.stepped_aside = False
        self._ranks_have_agreed = False
        self._warm_start: _WarmStart | None = None
        self._size_from = "what was given"
        self._measured: dict[str, int] | None = None
        self._padding_bytes = 0
        self._adopted = False
        self._is_warming_up = False
        self.is_adopting = False

    # --- the worker's start-up, in order

    def determine_available_memory(self, worker: Any, stock: Callable[[], int]) -> int:
        """Bytes the KV cache may take on this worker, measured after warm-up."""
        self._agree(worker)
        if self.stepped_aside:
            return stock()
        plan: _Plan | None = None
        objection: str | None = None
        try:
            if not _size_is_given(worker):
                plan = self._reserve_capacity(worker)
        except (StepAside, VmmError) as error:
            objection = str(error)
        except _NotMeasured as reason:
            self._size_from = f"vLLM's own estimate: {reason}"
            logger.debug("kvpad: the size is %s", self._size_from)
        # Warm-up is full of collectives: every rank measures, or none does. All must
        # know the reason too, for with ``strict`` it ends them all.
        if objections := _from_every_rank(objection):
            self.close()
            self._step_aside(worker, "; ".join(objections), speaks=worker.rank == 0)
            return stock()
        if not _on_every_rank(plan is not None):
            if plan is not None:
                self._size_from = "vLLM's own estimate: another rank cannot measure"
            self.close()
            return stock()
        assert plan is not None
        token = graphs_are_captured_before_sizing.set(True)
        try:
            without_graphs = stock()
        finally:
            graphs_are_captured_before_sizing.reset(token)
        # VLLM_ENABLE_STARTUP_PLAN may have given some ranks a size meanwhile. The
        # engine core takes the least of all, and a plan's size knows about graphs.
        if not _on_every_rank(not _size_is_given(worker)):
            self._size_from = "vLLM's start-up plan"
            self.close()
            return without_graphs
        return self._measure(worker, plan, without_graphs)

    def initialize_from_config(
        self,
        worker: Any,
        stock: Callable[[KVCacheConfig], None],
        kv_cache_config: KVCacheConfig,
    ) -> None:
        """Commit the cache at its final size and register it with the connector."""
        self._agree(worker)
        leave_to_stock = self.stepped_aside or self._is_warming_up
        if leave_to_stock or not kv_cache_config.kv_cache_tensors:
            return stock(kv_cache_config)
        if self._warm_start is not None:
            if self._can_adopt(worker, self._warm_start, kv_cache_config):
                self._adopt(worker, stock, self._warm_start, kv_cache_config)
                return None
            self._drop_warm_start(worker)
        try:
            driver = self._driver(worker)
            layout = self._layout(worker, kv_cache_config)
        except StepAside as reason:
            self._step_aside(worker, str(reason), speaks=worker.rank == 0)
            return stock(kv_cache_config)
        self._initialize_given(worker, stock, kv_cache_config, driver, layout)
        return None

    def compile_or_warm_up_model(self, worker: Any, stock: Callable[[], Any]) -> Any:
        """Return the times of the warm-up that already ran, or run stock's."""
        if not self._adopted:
            return stock()
        # Once: whoever asks again has a reason to warm up again.
        self._adopted = False
        assert self._warm_start is not None
        from vllm.utils.torch_utils import set_random_seed

        # Stock leaves the seed fresh here, and creating a connector may have drawn.
        set_random_seed(
            worker.model_config.seed, worker.parallel_config.data_parallel_index
        )
        return self._warm_start.compilation_times

    # --- what the patched functions of vLLM ask during start-up

    def create_connector(
        self,
        stock: Callable[[Any, KVCacheConfig], None],
        vllm_config: Any,
        kv_cache_config: KVCacheConfig,
    ) -> None:
        """Create the connector once the cache is final, never during warm-up."""
        if self._is_warming_up:
            return
        assert self.cache is not None
        stock(
            vllm_config,
            self.cache.connector_config(
                kv_cache_config, vllm_config.cache_config.get_resolved_kv_cache_layout()
            ),
        )

    def views(
        self,
        kv_cache_config: KVCacheConfig,
        layout: KVCacheLayout,
        kernel_block_sizes: list[int] | None,
    ) -> dict[str, torch.Tensor]:
        """Per-layer views, as vLLM's ``allocate_kv_cache`` returns them.

        During warm-up they have the capacity's shape: kernels captured into CUDA
        graphs may bake the number of blocks into TMA descriptors, which read
        blocks beyond it as zeros without an error.
        """
        assert self.cache is not None
        if self._is_warming_up:
            return self.cache.full_views(kv_cache_config, layout, kernel_block_sizes)
        return self.cache.committed_views(kv_cache_config, layout, kernel_block_sizes)

    def rebind(self, runner: Any, kv_cache_config: KVCacheConfig) -> None:
        """Give ``runner``, initialised at capacity, the cache at its final size."""
        model_runners.rebind_kv_cache(runner, kv_cache_config)

    # --- sleep and the end

    def sleep_mode_backend(self, worker: Any, backend: Any) -> Any:
        """Return ``backend`` extended to the supplied cache."""
        assert self.cache is not None
        from vllm_kvpad.hosts.sleep import CacheAwareSleepModeBackend

        return CacheAwareSleepModeBackend(
            backend, self.cache, on_change=functools.partial(self._publish, worker)
        )

    def close(self) -> None:
        """Give every byte back to the driver."""
        if self.cache is not None:
            self.cache.free()
            self.cache = None

    # --- details

    def _driver(self, worker: Any) -> VmmDriver:
        """Return where the memory will come from, unless there is a reason not to.

        Raises:
            StepAside: The message says which.
        """
        if lost := self._lost_patches():
            raise StepAside("; ".join(lost))
        if worker.device.type == "cpu" and self.config.host_granule_bytes is not None:
            return HostVmmDriver(self.config.host_granule_bytes)
        try:
            return get_driver(worker.device)
        except VmmUnsupportedError as error:
            raise StepAside(str(error)) from error

    def _layout(
        self, worker: Any, kv_cache_config: KVCacheConfig | None = None
    ) -> KVCacheLayout:
        layout = layout_of(kv_cache_config, worker.cache_config)
        if self.capabilities.name is not None and not layout.is_block_compact:
            raise StepAside(
                f"layout {layout.name} is not block-compact, which kvpad does not "
                f"support together with {self.capabilities.name}"
            )
        return layout

    def _agree(self, worker: Any) -> None:
        """Leave this worker to stock unless kvpad supplies every rank's cache."""
        if self._ranks_have_agreed:
            return
        self._ranks_have_agreed = True
        objections, speaker = agreement.verdict()
        if objections:
            self._step_aside(
                worker, "; ".join(objections), speaks=agreement.global_rank() == speaker
            )

    def _step_aside(self, worker: Any, reason: str, *, speaks: bool) -> None:
        from vllm_kvpad.plugin import step_aside

        self.stepped_aside = True
        step_aside(worker, self.config, reason, self.capabilities, speaks=speaks)

    def _placed(
        self, config: KVCacheConfig, layout: KVCacheLayout, driver: VmmDriver
    ) -> KVCacheConfig:
        if not self.capabilities.registers_device_memory:
            return config
        return pad_kv_cache_segments(config, layout, driver.granularity)

    @contextlib.contextmanager
    def _supplying(self) -> Iterator[None]:
        token = current_supply.set(self)
        try:
            yield
        finally:
            current_supply.reset(token)

    def _initialize_given(
        self,
        worker: Any,
        stock: Callable[[KVCacheConfig], None],
        kv_cache_config: KVCacheConfig,
        driver: VmmDriver,
        layout: KVCacheLayout,
    ) -> None:
        """The size is given: reserve, commit all of it, and run stock's path."""
        try:
            placed = self._placed(kv_cache_config, layout, driver)
            self.cache = ExtensibleKVCache(placed, layout, worker.device, driver)
        except (ValueError, VmmError) as error:
            # A placement is every rank's, but addresses may be refused to one alone.
            speaks = worker.rank == 0 or isinstance(error, VmmError)
            reason = f"the KV cache cannot be placed: {error}"
            self._step_aside(worker, reason, speaks=speaks)
            return stock(kv_cache_config)
        self._commit(
            placed.num_blocks, defragment=self.capabilities.registers_device_memory
        )
        with self._supplying():
            stock(placed)
        self._tell_what_was_supplied(worker, layout, kv_cache_config, placed)
        return None

    def _reserve_capacity(self, worker: Any) -> _Plan:
        """Reserve addresses for all that this worker could ever hold.

        Raises:
            StepAside: kvpad cannot supply this worker's cache.
            _NotMeasured: It can, but only at a size that is known beforehand.
        """
        from vllm.config import set_current_vllm_config
        from vllm.platforms import current_platform

        runner = worker.model_runner
        if current_platform.is_integrated_gpu(worker.device.index):
            raise StepAside("the GPU shares its memory with the host")
        driver = self._driver(worker)
        layout = self._layout(worker)
        _refuse_to_measure(worker, layout)
        try:
            # Planning consults the registry of spec types, which third parties fill
            # by vLLM's current configuration.
            with set_current_vllm_config(worker.vllm_config):
                plan = model_runners.kv_cache_planner(runner)
                one_block = plan(1)
                alignment = block_alignment(
                    kv_cache_segments(one_block, layout), driver.granularity
                )
                planned = plan(
                    capacity_blocks(
                        worker.requested_memory - runner.model_memory_usage,
                        one_block.kv_cache_tensors[0].size,
                        alignment,
                    )
                )
            placed = self._placed(planned, layout, driver)
            self.cache = ExtensibleKVCache(placed, layout, worker.device, driver)
        except ValueError as error:
            raise StepAside(f"the KV cache cannot be placed: {error}") from error
        return _Plan(planned, placed)

    def _measure(self, worker: Any, plan: _Plan, without_graphs: int) -> int:
        """Warm up over the reservation; return the bytes that are left."""
        from vllm.config import set_current_vllm_config
        from vllm.v1.worker.startup_plan import maybe_save_startup_plan

        cache = self.cache
        assert cache is not None
        runner, driver, planned = worker.model_runner, cache.driver, plan.planned
        bytes_per_block = planned.kv_cache_tensors[0].size // planned.num_blocks
        # Multimodal front ends: stock subtracts their share from what it returns.
        reserved = int(worker.available_kv_cache_memory_bytes) - without_graphs
        resident_after_profile = worker.init_snapshot.free_memory - driver.free_memory()
        warm_blocks = _min_across_ranks(
            warm_up_blocks(
                affordable_blocks=max(without_graphs // bytes_per_block, 0),
                max_num_batched_tokens=worker.scheduler_config.max_num_batched_tokens,
                max_num_seqs=worker.scheduler_config.max_num_seqs,
                min_block_size=min(
                    group.kv_cache_spec.block_size for group in planned.kv_cache_groups
                ),
                num_groups=len(planned.kv_cache_groups),
            )
        )
        if warm_blocks < 1:
            # Not even one block fits beside weights and activations on some rank:
            # the engine core says so, with its advice, from this number.
            self.close()
            return without_graphs

        failure: VmmError | None = None
        try:
            self._commit(warm_blocks, defragment=False)
        except VmmError as error:
            failure = error
        # A rank that raised alone would leave the others waiting in warm-up. And all
        # say why: at the first error vLLM ends the other workers, whatever they were
        # about to log.
        if reasons := _from_every_rank(str(failure) if failure else None):
            raise failure or VmmError("; ".join(reasons))
        free_before_warm_up = driver.free_memory()
        self._is_warming_up = True
        # Stock closes its warm-up with advice on --kv-cache-memory, computed from
        # the size it would have chosen; without this attribute it stays silent.
        peak = worker.__dict__.pop("peak_activation_memory")
        try:
            with self._supplying(), set_current_vllm_config(worker.vllm_config):
                worker.initialize_from_config(plan.placed)
            # The views span the capacity, the memory behind them does not: warm-up
            # takes the blocks it addresses from here. cache_config.num_gpu_blocks
            # stays at capacity, for FlexAttention sizes its masks and its persistent
            # buffers by it, which must fit the views now and the final count later.
            runner.kv_cache_config.num_blocks = warm_blocks
            times = worker.compile_or_warm_up_model()
        finally:
            self._is_warming_up = False
            worker.peak_activation_memory = peak

        driver.synchronize()
        gc.collect()
        model_runners.release_cached_memory()
        memory = MeasuredMemory(
            budget_bytes=int(worker.requested_memory),
            initial_free_bytes=worker.init_snapshot.free_memory,
            free_bytes=driver.free_memory(),
            least_resident_bytes=resident_after_profile,
            committed_bytes=cache.physical_bytes,
            transient_peak_bytes=peak,
            reserved_bytes=reserved,
            margin_bytes=self.config.margin_bytes,
        )
        blocks = cache.blocks_within(memory.kv_cache_bytes)
        worker.available_kv_cache_memory_bytes = blocks * bytes_per_block
        if blocks:
            # Stock subtracts the front ends' share again where a plan is applied.
            maybe_save_startup_plan(worker, blocks * bytes_per_block + reserved)
        self._warm_start = _WarmStart(
            plan=plan,
            max_model_len=worker.model_config.max_model_len,
            compilation_times=times,
        )
        self._size_from = "measurement after warm-up"
        self._measured = {
            "budget_bytes": memory.budget_bytes,
            "resident_bytes": memory.resident_bytes,
            "warm_up_bytes": free_before_warm_up - memory.free_bytes,
            "activation_peak_bytes": memory.transient_peak_bytes,
            "left_bytes": memory.kv_cache_bytes,
        }
        logger.log(
            # The engine core ends the start then, and no other line has the sum.
            logging.INFO if blocks == 0 and worker.rank == 0 else logging.DEBUG,
            "kvpad: measured after warm-up: budget %s, resident %s (of which warm-up "
            "and CUDA graphs %s), activation peak %s, left for the KV cache %s: "
            "%d blocks of %d bytes",
            *map(_gib, self._measured.values()),
            blocks,
            bytes_per_block,
        )
        return blocks * bytes_per_block

    def _can_adopt(self, worker: Any, warm: _WarmStart, final: KVCacheConfig) -> bool:
        """Whether every rank was warmed up with what the engine core planned.

        One answer for all ranks: a rank that warms up again alone would wait in a
        collective for the others.
        """
        planned = warm.plan.planned
        same = (
            final.num_blocks <= planned.num_blocks
            and final.kv_cache_groups == planned.kv_cache_groups
            and [(t.layers, t.block_stride) for t in final.kv_cache_tensors]
            == [(t.layers, t.block_stride) for t in planned.kv_cache_tensors]
            and final.kv_cache_layout
            in (None, worker.cache_config.get_resolved_kv_cache_layout().name)
            and worker.model_config.max_model_len == warm.max_model_len
        )
        if final.has_mamba_layers:
            # Each sequence holds a state block; stock refuses to capture graphs for
            # more sequences than blocks, and the fall-back lets it say so.
            same = same and worker.scheduler_config.max_num_seqs <= final.num_blocks
        return _on_every_rank(same)

    def _adopt(
        self,
        worker: Any,
        stock: Callable[[KVCacheConfig], None],
        warm: _WarmStart,
        final: KVCacheConfig,
    ) -> None:
        self._commit(
            final.num_blocks, defragment=self.capabilities.registers_device_memory
        )
        placed = dataclasses.replace(
            final, kv_cache_tensors=warm.plan.placed.kv_cache_tensors
        )
        self.is_adopting = True
        try:
            with self._supplying():
                stock(placed)
        finally:
            self.is_adopting = False
        self._adopted = True
        self._tell_what_was_supplied(
            worker, self._layout(worker, final), warm.plan.planned, warm.plan.placed
        )

    def _commit(self, num_blocks: int, *, defragment: bool) -> None:
        """Back exactly ``num_blocks`` blocks, as the engine core has planned.

        Raises:
            VmmOutOfMemoryError: The message says what was wanted, what is free and
                what to change. The count cannot be lowered here: the scheduler
                already hands out these blocks.
        """
        cache = self.cache
        assert cache is not None
        try:
            cache.commit(num_blocks, defragment=defragment, shrink=True)
        except VmmOutOfMemoryError as error:
            wanted = format_bytes(cache.physical_bytes_for(num_blocks))
            free = format_bytes(cache.driver.free_memory())
            raise VmmOutOfMemoryError(
                f"the KV cache's {num_blocks} blocks take {wanted}, but {free} are "
                "free. If another process has taken memory since this one measured "
                "it, stop that process or start this one again; to leave more for "
                "others, lower gpu_memory_utilization (or kv_cache_memory_bytes, "
                f"num_gpu_blocks_override if the size is given). Cause: {error}"
            ) from error

    def _drop_warm_start(self, worker: Any) -> None:
        self._size_from = (
            "measurement after warm-up, which runs again: the engine's plan differs "
            "from what was warmed up with"
        )
        logger.debug("kvpad: the size is %s", self._size_from)
        model_runners.drop_kv_cache(worker.model_runner)
        self.close()
        self._warm_start = None

    def _tell_what_was_supplied(
        self,
        worker: Any,
        layout: KVCacheLayout,
        planned: KVCacheConfig,
        placed: KVCacheConfig,
    ) -> None:
        """Log and publish what this worker has now; rank 0 speaks for the engine."""
        cache = self.cache
        assert cache is not None
        self._padding_bytes = padding_bytes(planned, placed)
        facts = {
            "host": "supply",
            "connector": self.capabilities.name,
            "registers_device_memory": self.capabilities.registers_device_memory,
            "source": self.capabilities.source,
            "layout": layout.name,
            "segments": len(cache.segments),
            "granule_bytes": cache.driver.granularity,
            "chunks": cache.num_chunks,
            "blocks": cache.num_committed_blocks,
            "capacity_blocks": cache.capacity_blocks,
            "bytes_per_block": cache.bytes_per_block,
            "committed_bytes": cache.num_committed_blocks * cache.bytes_per_block,
            "physical_bytes": cache.physical_bytes,
            "address_space_bytes": cache.size,
            "padding_bytes": self._padding_bytes,
            "rounded_blocks": rounded_blocks(
                cache.segments, cache.num_committed_blocks, cache.driver.granularity
            ),
            "size_from": self._size_from,
        }
        if self._measured is not None:
            facts["measured"] = self._measured
        logger.log(
            logging.INFO if worker.rank == 0 else logging.DEBUG,
            "kvpad: KV cache supplied: %s",
            json.dumps(facts),
        )
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "kvpad: KV cache segments: %s", json.dumps(_segments_and_chunks(cache))
            )
        self._publish(worker)

    def _publish(self, worker: Any) -> None:
        """Show the cache as it is now in the engine's metrics, if rank 0's."""
        cache = self.cache
        if cache is None or worker.rank != 0:
            return
        publish(
            lambda: EngineReport.of_worker(
                worker,
                Mode.SUPPLIED,
                self.capabilities,
                cache=CacheFigures.of(cache, self._padding_bytes),
            )
        )


def _segments_and_chunks(cache: ExtensibleKVCache) -> list[dict[str, Any]]:
    """Address, committed bytes and chunks of each segment, to compare with what a
    transport registered. Addresses are hexadecimal; a chunk is (address, bytes)."""
    return [
        {
            "address": hex(start := cache.address + segment.offset),
            "bytes": (size := segment.committed_bytes(cache.num_committed_blocks)),
            "chunks": [
                (hex(address), length)
                for address, length in cache.chunks
                if address < start + size and start < address + length
            ],
        }
        for segment in cache.segments
    ]


class _NotMeasured(Exception):
    """The cache is kvpad's, but its size must be known before warm-up."""


def _refuse_to_measure(worker: Any, layout: KVCacheLayout) -> None:
    """Refuse where a warm-up before the final size would not be right.

    Raises:
        _NotMeasured: The message says why.
    """
    from vllm.v1.kv_cache_interface import SinkFullAttentionSpec

    specs = worker.model_runner.get_kv_cache_spec()
    if not specs:
        raise _NotMeasured("this worker has no layers with a KV cache")
    if layout.name == "LHBNC":
        raise _NotMeasured(
            "in layout LHBNC the distance of the heads depends on the block count"
        )
    if worker.parallel_config.pipeline_parallel_size > 1:
        raise _NotMeasured(
            "pipeline stages plan from the layers of the whole model, which one "
            "worker does not know before the engine does"
        )
    if worker.model_config.original_max_model_len == -1:
        raise _NotMeasured("an automatic max_model_len follows from the size")
    if worker.cache_config.use_replayssm:
        raise _NotMeasured("ReplaySSM sizes its state when the cache is bound")
    if any(isinstance(spec, SinkFullAttentionSpec) for spec in specs.values()):
        # v1 StaticSinkAttention writes its sinks into the cache at the first forward
        # pass and never again; a commit that remaps would discard them.
        raise _NotMeasured("attention sinks are written into the cache in warm-up")


def _size_is_given(worker: Any) -> bool:
    cache_config = worker.cache_config
    return bool(
        cache_config.kv_cache_memory_bytes or cache_config.num_gpu_blocks_override
    )


def _from_every_rank(objection: str | None) -> list[str]:
    """The objections of all workers of this engine, each with its rank."""
    import torch
    from vllm.distributed.parallel_state import get_world_group

    group = get_world_group()
    if group.world_size == 1:
        return [objection] if objection else []
    said: list[str | None] = [None] * group.world_size
    torch.distributed.all_gather_object(said, objection, group=group.cpu_group)
    return [f"rank {rank}: {text}" for rank, text in enumerate(said) if text]


def _on_every_rank(holds: bool) -> bool:
    return bool(_min_across_ranks(int(holds)))


def _min_across_ranks(value: int) -> int:
    """The least ``value`` of all workers of this engine."""
    import torch
    from vllm.distributed.parallel_state import get_world_group

    group = get_world_group()
    if group.world_size == 1:
        return value
    agreed = torch.tensor([value], dtype=torch.int64)
    torch.distributed.all_reduce(
        agreed, op=torch.distributed.ReduceOp.MIN, group=group.cpu_group
    )
    return int(agreed.item())


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
