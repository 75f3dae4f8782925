"""The extensible KV cache: address space at capacity, memory for what is committed.

An :class:`ExtensibleKVCache` places a ``KVCacheConfig`` at capacity in reserved
addresses and backs the first n blocks of every segment. Addresses never change, so
views, captured graphs and registrations made at one count are right at the next.
A *defragmenting* commit maps each segment's committed bytes as one chunk, which is
what a NIC needs to register them.

vLLM is imported by the methods that make its views and configurations only.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm_kvpad import placement
from vllm_kvpad.log import get_logger
from vllm_kvpad.reservation import ByteRange, Reservation, is_inside_one
from vllm_kvpad.vmm import VmmDriver, get_driver
from vllm_kvpad.vmm.base import VmmError, format_bytes

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from vllm_kvpad.placement import Segment

    # (storage, number of blocks, placement) -> view of each layer; None if it has none
    _CreateViews = Callable[
        [torch.Tensor, int, KVCacheTensor], dict[str, torch.Tensor] | None
    ]

logger = get_logger(__name__)


class ExtensibleKVCache:
    """One worker's KV cache over a reservation.

    Args:
        kv_cache_config: The placement, padded or not, whose ``num_blocks`` is the
            capacity. It is not changed, and later changes to it are not seen.
        layout: The layout that the placement is for.
        device: Where the cache lives; ``cpu`` or ``cuda[:N]``.
        driver: Where memory comes from; by default ``get_driver(device)``.

    Raises:
        ValueError: The configuration has no KV cache tensors, or as
            :func:`vllm_kvpad.placement.kv_cache_segments`.
        VmmError: The device has no virtual memory management, or no address space.

    Tensors over the cache hold its memory: an instance that is dropped without
    :meth:`free` gives everything back when the last of them goes. :meth:`free`
    does so at once, and touching such a tensor afterwards is an access violation.
    An instance is not safe to use from several threads at once.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        layout: KVCacheLayout,
        device: torch.device | str,
        driver: VmmDriver | None = None,
    ) -> None:
        self._segments = tuple(placement.kv_cache_segments(kv_cache_config, layout))
        if not self._segments:
            raise ValueError(
                "the configuration has no KV cache tensors, so there is no KV cache "
                "to reserve"
            )
        self._layout = layout
        self._capacity_blocks: int = kv_cache_config.num_blocks
        self._tensors = tuple(
            dataclasses.replace(tensor, layers=list(tensor.layers))
            for tensor in kv_cache_config.kv_cache_tensors
        )
        self._tensor_of_layer = {
            layer: tensor for tensor in self._tensors for layer in tensor.layers
        }
        self._size = placement.allocation_bytes(kv_cache_config)
        self._driver = get_driver(device) if driver is None else driver
        self._reservation = Reservation(self._driver, self._size)
        self._committed_blocks = 0
        self._one_chunk_each = False
        self._released_blocks: int | None = None
        self._freed = False
        self._num_commits = 0
        self._commit_seconds = 0.0

    # --- What is there ---------------------------------------------------------------

    @property
    def segments(self) -> list[Segment]:
        """Segments of the capacity placement, in address order."""
        return list(self._segments)

    @property
    def size(self) -> int:
        """Bytes of the whole placement at capacity: the ``size`` of its tensors."""
        return self._size

    @property
    def address(self) -> int:
        """Where the placement starts; a multiple of the granule."""
        return self._reservation.address

    @property
    def driver(self) -> VmmDriver:
        """Where the memory comes from."""
        return self._driver

    @property
    def capacity_blocks(self) -> int:
        """Blocks that there are addresses for."""
        return self._capacity_blocks

    @property
    def num_committed_blocks(self) -> int:
        """Blocks that are backed; 0 while :meth:`release_physical` is in effect."""
        return self._committed_blocks

    @property
    def is_released(self) -> bool:
        """Whether :meth:`release_physical` is in effect."""
        return self._released_blocks is not None

    @property
    def num_chunks(self) -> int:
        """Chunks that back the cache."""
        return self._reservation.num_chunks

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """Address and bytes of every chunk that backs the cache, in address order."""
        return [
            (self.address + start, end - start)
            for start, end in self._reservation.mapped_ranges
        ]

    @property
    def num_commits(self) -> int:
        """How many calls have mapped memory, :meth:`recommit` included."""
        return self._num_commits

    @property
    def commit_seconds(self) -> float:
        """Wall-clock seconds that those calls took in all."""
        return self._commit_seconds

    @property
    def bytes_per_block(self) -> int:
        """Bytes that a block takes in all segments together, without rounding."""
        return placement.bytes_per_block(self._segments)

    @property
    def physical_bytes(self) -> int:
        """Bytes of physical memory that the cache holds now."""
        return self._reservation.physical_bytes

    def physical_bytes_for(self, num_blocks: int) -> int:
        """Bytes of physical memory that ``num_blocks`` committed blocks take.

        Raises:
            ValueError: ``num_blocks`` is negative or above capacity.
        """
        return placement.physical_bytes(
            self._segments, num_blocks, self._driver.granularity
        )

    def blocks_within(self, num_bytes: int) -> int:
        """Most blocks, up to capacity, whose physical memory fits ``num_bytes``."""
        return placement.blocks_within(
            self._segments, num_bytes, self._driver.granularity
        )

    def segments_backed_by_one_chunk(self) -> list[bool]:
        """Whether one chunk covers the committed bytes of each segment.

        In address order, and by what the driver says is mapped at the first and
        the last byte, not by this object's own books. With nothing committed no
        segment is backed.
        """
        return [
            self._is_backed_by_one_chunk(start, end)
            for start, end in self._ranges(self._committed_blocks)
        ]

    def _is_backed_by_one_chunk(self, start: int, end: int) -> bool:
        if start == end:
            return False
        first, last = self.address + start, self.address + end - 1
        try:
            chunk = self._driver.backing_range(first)
            return chunk == self._driver.backing_range(last) and (
                chunk[0] <= first and last < chunk[0] + chunk[1]
            )
        except VmmError as error:
            logger.warning(
                "The driver does not know what backs a KV cache segment: %s", str(error)
            )
            return False

    # --- Committing ------------------------------------------------------------------

    def allocate(self, size: int) -> torch.Tensor:
        """Return the whole placement as one int8 tensor of ``size`` bytes.

        Block 0 at least is committed then: vLLM writes to this null block without
        having been given it, and a CUDA tensor cannot start at an unbacked address.
        Only committed blocks of it may be touched.

        Raises:
            ValueError: ``size`` is not the size of the configuration in bytes.
            RuntimeError: The cache has been freed or its memory released.
            VmmError: Block 0 cannot be committed.
        """
        if size != self._size:
            raise ValueError(
                f"the KV cache was configured with {format_bytes(self._size)}, "
                f"not {format_bytes(size)}"
            )
        self.commit(1)
        return self._whole()

    def commit(
        self, num_blocks: int, defragment: bool = False, shrink: bool = False
    ) -> None:
        """Back the first ``num_blocks`` blocks of every segment.

        Growing keeps what committed blocks hold; new bytes read as zero. A count
        below the committed one changes nothing unless ``shrink``.

        Args:
            num_blocks: Blocks to back; 0 to :attr:`capacity_blocks`.
            defragment: Have one chunk for each segment. If that is not so already
                at this count, everything is remapped: contents are discarded and
                all committed bytes read as zero.
            shrink: Remap fewer blocks if fewer are wanted; contents are discarded.

        Raises:
            ValueError: ``num_blocks`` is negative or above capacity.
            RuntimeError: The cache has been freed or its memory released.
            VmmError: Growing: nothing has changed. Remapping: no block is committed
                any more, or nothing has changed (:attr:`num_committed_blocks` tells).
                Either way the call can be repeated.
        """
        self._check_usable("commit")
        if not 0 <= num_blocks <= self._capacity_blocks:
            raise ValueError(
                f"cannot commit {num_blocks} blocks: the KV cache has room for 0 to "
                f"{self._capacity_blocks}"
            )
        self._reservation.drop_leftovers()
        if not shrink:
            num_blocks = max(num_blocks, self._committed_blocks)
        if defragment:
            if num_blocks == self._committed_blocks and self._is_defragmented():
                self._one_chunk_each = True
            else:
                self._remap(num_blocks, one_chunk_each=True)
        elif num_blocks > self._committed_blocks:
            self._grow(num_blocks)
        elif num_blocks < self._committed_blocks:
            self._remap(num_blocks, one_chunk_each=False)

    def release_physical(self) -> None:
        """Give every physical byte back; keep addresses, views and the count.

        Nothing may touch the cache until :meth:`recommit`. Does nothing if already
        released.

        Raises:
            RuntimeError: The cache has been freed.
            VmmError: Some memory is still held. Calling again resumes; if
                :attr:`is_released` already, :meth:`recommit` works too.
        """
        self._check_open("release_physical")
        released = self._released_blocks
        num_blocks = self._committed_blocks if released is None else released
        try:
            with self._discarding_contents():
                self._reservation.clear()
        finally:
            if not self._committed_blocks:
                self._released_blocks = num_blocks

    def recommit(self) -> None:
        """Back what :meth:`release_physical` released, zeroed, at the same addresses.

        Chunks are laid out as before: one for each segment if that was so.

        Raises:
            RuntimeError: The cache has been freed, or nothing was released.
            VmmError: The cache is still released; the call can be repeated.
        """
        self._check_open("recommit")
        if self._released_blocks is None:
            raise RuntimeError(
                "recommit() undoes release_physical(), which is not in effect; use "
                "commit() to back more blocks"
            )
        self._remap(self._released_blocks, one_chunk_each=self._one_chunk_each)
        self._released_blocks = None

    def free(self) -> None:
        """Give back memory and addresses. Freeing again does nothing.

        Raises:
            VmmError: The cache counts as freed, but something is still held;
                calling again resumes.
        """
        self._freed = True
        self._committed_blocks = 0
        self._reservation.free()

    def _grow(self, num_blocks: int) -> None:
        committed = self._ranges(self._committed_blocks)
        wanted = self._ranges(num_blocks)
        chunks_before = self._reservation.mapped_ranges
        with self._counting_a_commit():
            # A block's bytes may lie in granules that are mapped for its predecessor,
            # or for a neighbour, and nobody promised not to write beyond the
            # committed.
            self._reservation.zero_mapped(
                (old_end, new_end)
                for (_, old_end), (_, new_end) in zip(committed, wanted, strict=True)
            )
            self._reservation.grow(wanted)
        if self._reservation.mapped_ranges != chunks_before:
            self._one_chunk_each = False
        self._committed_blocks = num_blocks

    def _remap(self, num_blocks: int, *, one_chunk_each: bool) -> None:
        with self._counting_a_commit(), self._discarding_contents():
            self._reservation.remap(
                self._ranges(num_blocks), one_chunk_each=one_chunk_each
            )
        self._committed_blocks = num_blocks
        self._one_chunk_each = one_chunk_each

    @contextmanager
    def _counting_a_commit(self) -> Iterator[None]:
        """Count what is done inside as one commit, if it succeeds."""
        began = time.perf_counter()
        yield
        self._commit_seconds += time.perf_counter() - began
        self._num_commits += 1

    @contextmanager
    def _discarding_contents(self) -> Iterator[None]:
        """Count no block as committed after this, unless it failed at once.

        Before anything is unmapped the device is waited for; should that fail,
        every block is still what it was.
        """
        chunks_before = self._reservation.mapped_ranges
        try:
            yield
        except BaseException:
            if self._reservation.mapped_ranges != chunks_before:
                self._committed_blocks = 0
            raise
        self._committed_blocks = 0

    def _is_defragmented(self) -> bool:
        """Whether remapping could not bring any segment into fewer chunks."""
        ranges = [r for r in self._ranges(self._committed_blocks) if r[0] < r[1]]
        chunks = self._reservation.mapped_ranges
        return chunks == self._reservation.plan_one_chunk_each(ranges) or all(
            is_inside_one(start, end, chunks) for start, end in ranges
        )

    def _ranges(self, num_blocks: int) -> list[ByteRange]:
        """Bytes of the first ``num_blocks`` blocks of each segment."""
        return [
            (segment.offset, segment.offset + segment.committed_bytes(num_blocks))
            for segment in self._segments
        ]

    def _check_open(self, call: str) -> None:
        if self._freed:
            raise RuntimeError(
                f"{call}() on a KV cache that has been freed; make a new one"
            )

    def _check_usable(self, call: str) -> None:
        self._check_open(call)
        if self._released_blocks is not None:
            raise RuntimeError(
                f"{call}() while the KV cache's memory is released; call recommit() "
                "first"
            )

    # --- Views -----------------------------------------------------------------------

    def full_views(
        self,
        kv_cache_config: KVCacheConfig,
        layout: KVCacheLayout,
        kernel_block_sizes: Sequence[int] | None = None,
    ) -> dict[str, torch.Tensor]:
        """View each layer at capacity, all over one storage of :attr:`size` bytes.

        For warm-up and graph capture: a captured kernel may keep the number of
        blocks (in a TMA descriptor), which must not be below the final count. The
        addresses are those of :meth:`committed_views`; only committed blocks may be
        touched.

        Args:
            kv_cache_config: Its groups and layers count; the placement and the
                number of blocks are this cache's own.
            layout: The layout of this cache.
            kernel_block_sizes: Tokens in a kernel block for each KV cache group, or
                None for whole blocks; as vLLM's ``allocate_kv_cache`` takes them.

        Returns:
            Layer name to ``[blocks, heads, states, content]`` view, or to the whole
            storage where the layer's spec has no view, as ``allocate_kv_cache``.

        Raises:
            ValueError: The layers or the layout are not those of this cache.
            RuntimeError: Nothing is committed, or the cache has been freed or its
                memory released.
        """
        self._check_viewable("full_views", kv_cache_config, layout)
        return self._views_over(
            self._whole(), self._capacity_blocks, kv_cache_config, kernel_block_sizes
        )

    def committed_views(
        self,
        kv_cache_config: KVCacheConfig,
        layout: KVCacheLayout,
        kernel_block_sizes: Sequence[int] | None = None,
    ) -> dict[str, torch.Tensor]:
        """View each layer's committed blocks; no storage reaches an unbacked byte.

        Connectors register the storages that they find under the views, so:

        * layers outermost (LBHNC, LBNHC): each layer has a storage of its own that
          spans the committed bytes of its segment; aliased layers share one;
        * blocks outermost: all layers share one, of the committed blocks;
        * LHBNC, only with all of the capacity committed (vLLM derives the distance
          of the heads from the number of blocks): all layers share one, of
          :attr:`size` bytes.

        Args:
            kv_cache_config: Its groups and layers count, and its ``num_blocks``
                must be the committed count; the placement is this cache's own.
            layout: The layout of this cache.
            kernel_block_sizes: As for :meth:`full_views`.

        Returns:
            As :meth:`full_views`, with the committed number of blocks.

        Raises:
            ValueError: The layers, the layout or the number of blocks are not those
                of this cache; LHBNC below capacity; or a layer without views in a
                layout that has no common storage to give it.
            RuntimeError: Nothing is committed, or the cache has been freed or its
                memory released.
        """
        self._check_viewable("committed_views", kv_cache_config, layout)
        self._check_committed_count(kv_cache_config)
        num_blocks = self._committed_blocks
        if not self._has_storage_per_segment:
            return self._views_over(
                self._common_storage(), num_blocks, kv_cache_config, kernel_block_sizes
            )

        raw_of_segment = {
            segment.offset: self._driver.tensor(
                self.address + segment.offset,
                segment.committed_bytes(num_blocks),
                keepalive=self._reservation,
            )
            for segment in self._segments
        }
        create_views = _view_maker(kv_cache_config, layout, kernel_block_sizes)
        views = {}
        for tensor in self._tensors:
            for index, layer in enumerate(tensor.layers):
                raw = raw_of_segment[tensor.offset + index * tensor.layer_stride]
                own = self._own_storage_tensor(tensor, layer)
                layer_views = create_views(raw, num_blocks, own)
                if layer_views is None:
                    raise ValueError(
                        f"layer {layer!r} lays out the whole KV cache by itself, but "
                        f"with {layout.name} each layer has a storage of its own; use "
                        "a block-outermost layout"
                    )
                views.update(layer_views)
        return views

    def connector_config(
        self, kv_cache_config: KVCacheConfig, layout: KVCacheLayout
    ) -> KVCacheConfig:
        """Describe :meth:`committed_views` to a connector that goes by storages.

        Such a connector (vLLM's SimpleCPUOffload is one) cuts ``tensor.offset`` and
        ``layer_stride`` out of the storage under a view. Where layers have storages
        of their own, each is a tensor of its own here, at offset 0.

        Args:
            kv_cache_config: What the connector was to be given; its ``num_blocks``
                must be the committed count. It is not changed.
            layout: The layout of this cache.

        Returns:
            A copy that differs in ``kv_cache_tensors`` only. ``size // num_blocks``
            is the bytes of a block in all layers, padding apart.

        Raises:
            ValueError, RuntimeError: As :meth:`committed_views`.
        """
        self._check_viewable("connector_config", kv_cache_config, layout)
        self._check_committed_count(kv_cache_config)
        if self._has_storage_per_segment:
            tensors = [
                self._own_storage_tensor(tensor, layer)
                for tensor in self._tensors
                for layer in tensor.layers
            ]
        else:
            size = self._common_storage_bytes()
            tensors = [
                dataclasses.replace(tensor, size=size, layers=list(tensor.layers))
                for tensor in self._tensors
            ]
        return dataclasses.replace(kv_cache_config, kv_cache_tensors=tensors)

    @property
    def _has_storage_per_segment(self) -> bool:
        return self._layout.is_block_compact and not self._layout.is_block_outermost

    def _own_storage_tensor(self, tensor: KVCacheTensor, layer: str) -> KVCacheTensor:
        """Place the committed blocks of ``layer`` in a storage of its own."""
        num_blocks = self._committed_blocks
        return dataclasses.replace(
            tensor,
            size=num_blocks * self.bytes_per_block,
            layers=[layer],
            layer_stride=num_blocks * tensor.block_stride,
            offset=0,
        )

    def _common_storage_bytes(self) -> int:
        if self._layout.is_block_outermost:
            (segment,) = self._segments
            return segment.committed_bytes(self._committed_blocks)
        if self._committed_blocks < self._capacity_blocks:
            raise ValueError(
                f"{self._layout.name} can be viewed at its capacity only, "
                f"{self._capacity_blocks} blocks; {self._committed_blocks} are "
                "committed. Use a layout that keeps the heads of a block together, "
                "such as LBHNC"
            )
        return self._size

    def _common_storage(self) -> torch.Tensor:
        return self._driver.tensor(
            self.address, self._common_storage_bytes(), keepalive=self._reservation
        )

    def _whole(self) -> torch.Tensor:
        return self._driver.tensor(
            self.address, self._size, keepalive=self._reservation
        )

    def _views_over(
        self,
        raw: torch.Tensor,
        num_blocks: int,
        kv_cache_config: KVCacheConfig,
        kernel_block_sizes: Sequence[int] | None,
    ) -> dict[str, torch.Tensor]:
        """View all layers of the placement in the one storage of ``raw``."""
        create_views = _view_maker(kv_cache_config, self._layout, kernel_block_sizes)
        views: dict[str, torch.Tensor] = {}
        for tensor in self._tensors:
            layer_views = create_views(raw, num_blocks, tensor)
            views.update(
                dict.fromkeys(tensor.layers, raw)
                if layer_views is None
                else layer_views
            )
        return views

    def _check_viewable(
        self, call: str, kv_cache_config: KVCacheConfig, layout: KVCacheLayout
    ) -> None:
        self._check_usable(call)
        if layout is not self._layout:
            raise ValueError(
                f"the KV cache was placed for layout {self._layout.name}, not "
                f"{layout.name}"
            )
        strides = {
            layer: tensor.block_stride
            for tensor in kv_cache_config.kv_cache_tensors
            for layer in tensor.layers
        }
        own = {
            layer: tensor.block_stride
            for layer, tensor in self._tensor_of_layer.items()
        }
        if strides != own:
            layer = min(
                layer
                for layer in strides.keys() | own.keys()
                if strides.get(layer) != own.get(layer)
            )
            raise ValueError(
                "the configuration is not of this KV cache's layers: the block stride "
                f"of {layer!r} is {strides.get(layer, 'not given')} there, "
                f"{own.get(layer, 'not given')} here (bytes)"
            )
        if not self._committed_blocks:
            raise RuntimeError(f"{call}() with nothing committed; call commit() first")

    def _check_committed_count(self, kv_cache_config: KVCacheConfig) -> None:
        if kv_cache_config.num_blocks != self._committed_blocks:
            raise ValueError(
                f"the configuration has {kv_cache_config.num_blocks} blocks, but "
                f"{self._committed_blocks} are committed"
            )


def _view_maker(
    kv_cache_config: KVCacheConfig,
    layout: KVCacheLayout,
    kernel_block_sizes: Sequence[int] | None,
) -> Callable[[torch.Tensor, int, KVCacheTensor], dict[str, torch.Tensor] | None]:
    """Return what turns a storage, a block count and a placement into layer views.

    It gives None for layers whose spec has no views. Which spec and which kernel
    block size a layer has is decided as by ``allocate_kv_cache``
    (v1/worker/utils.py), of which this is the part after the allocation.
    """
    from vllm.v1.kv_cache_interface import (
        UniformTypeKVCacheSpecs,
        create_kv_cache_views,
    )

    group_of_layer: dict[str, tuple[int, Any]] = {}
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        for layer in group.layer_names:
            group_of_layer.setdefault(layer, (group_id, group))

    def create_views(
        raw: torch.Tensor, num_blocks: int, tensor: KVCacheTensor
    ) -> dict[str, torch.Tensor] | None:
        first_layer = tensor.layers[0]
        try:
            group_id, group = group_of_layer[first_layer]
        except KeyError:
            raise ValueError(
                f"layer {first_layer!r} is in no KV cache group of the configuration"
            ) from None
        spec = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            spec = spec.kv_cache_specs[first_layer]
        if not spec.has_layer_views:
            return None
        kernel_block_size = None
        if kernel_block_sizes is not None and group_id < len(kernel_block_sizes):
            kernel_block_size = kernel_block_sizes[group_id]
        views = create_kv_cache_views(
            raw,
            spec,
            num_blocks,
            layout,
            tensor,
            kernel_block_size=kernel_block_size,
        )
        return dict(zip(tensor.layers, views, strict=True))

    return create_views
