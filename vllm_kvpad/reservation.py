"""A range of addresses, and the chunks of physical memory mapped into it.

A :class:`Reservation` owns every mapping in its range and knows two ways to back
byte ranges with memory: :meth:`Reservation.grow` adds what is missing and keeps
what is there, :meth:`Reservation.remap` gives each range one chunk and discards
what was there. Both happen as a whole or not at all: what a failing call has
created it gives back before the error leaves it.

Ranges are half-open pairs of byte offsets from the start of the reservation. They
may start and end inside a granule; whole granules are mapped.
"""

from __future__ import annotations

import bisect
import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from vllm_kvpad.log import get_logger
from vllm_kvpad.vmm.base import VmmDriver, VmmError, format_bytes

logger = get_logger(__name__)

ByteRange = tuple[int, int]


@dataclass(eq=False)
class _Chunk:
    """One physical allocation; says how far it got, so that undoing can resume."""

    start: int
    end: int
    handle: int
    mapped: bool = False
    accessible: bool = False
    being_written: bool = False

    @property
    def size(self) -> int:
        return self.end - self.start


class Reservation:
    """Address space of ``size`` bytes on ``driver``'s device.

    Tensors made by :meth:`VmmDriver.tensor` with this object as ``keepalive`` hold
    it; once nothing does, chunks and address range are given back, as with any
    tensor's memory. :meth:`free` does so at once and leaves such tensors dangling.

    Args:
        driver: Where the memory comes from.
        size: Bytes; rounded up to whole granules.

    Raises:
        ValueError: ``size`` is not positive.
        VmmError: The range cannot be reserved.
    """

    def __init__(self, driver: VmmDriver, size: int) -> None:
        if size <= 0:
            raise ValueError(f"cannot reserve {size} bytes of address space")
        self.size = _round_up(size, driver.granularity)
        self._driver = driver
        self._memory = _Memory(driver, driver.reserve(self.size), self.size)
        # At interpreter exit the system takes everything back; running then, after
        # the device's own shutdown, could only fail.
        self._finalizer = weakref.finalize(self, _Memory.abandon, self._memory)
        self._finalizer.atexit = False

    @property
    def address(self) -> int:
        """Where the range starts; a multiple of the granule."""
        return self._memory.address

    @property
    def num_chunks(self) -> int:
        """Chunks that are mapped and usable."""
        return len(self.mapped_ranges)

    @property
    def physical_bytes(self) -> int:
        """Bytes of physical memory that are held."""
        return sum(chunk.size for chunk in self._memory.chunks)

    @property
    def mapped_ranges(self) -> list[ByteRange]:
        """Range of each usable chunk, in address order."""
        return self._memory.usable_ranges()

    def grow(self, ranges: Iterable[ByteRange]) -> None:
        """Back ``ranges``, keeping the chunks and contents that are there.

        Granules that are missing are mapped and read as zero; those next to each
        other become one chunk, also across ranges.

        Raises:
            ValueError: A range is not inside the reservation.
            RuntimeError: The reservation has been freed.
            VmmError: Nothing has changed.
        """
        wanted = merge(self._to_granules(ranges))
        self._memory.check_open()
        self._memory.drop_unusable()
        self._add(subtract(wanted, self.mapped_ranges))

    def remap(self, ranges: Iterable[ByteRange], *, one_chunk_each: bool) -> None:
        """Back ``ranges`` and nothing else, by new memory that reads as zero.

        Waits for the device before it unmaps anything.

        Args:
            ranges: What to back, in any order.
            one_chunk_each: Map each range by one chunk of its own, as
                :meth:`plan_one_chunk_each` lays them out; otherwise ranges that
                touch share one.

        Raises:
            ValueError: A range is not inside the reservation.
            RuntimeError: The reservation has been freed.
            VmmError: No range is backed, unless waiting for the device failed, in
                which case nothing has changed. Calling again can succeed.
        """
        self._memory.check_open()
        ranges = list(ranges)
        plan = (
            self.plan_one_chunk_each(ranges)
            if one_chunk_each
            else merge(self._to_granules(ranges))
        )
        self.clear()
        self._add(plan)

    def plan_one_chunk_each(self, ranges: Iterable[ByteRange]) -> list[ByteRange]:
        """Granule-rounded range of the chunk that each of ``ranges`` can have.

        Where two ranges share a granule (only unpadded placements do that) it goes
        to the lower one, and the upper one straddles both chunks.
        """
        plan = []
        taken = 0
        for start, end in self._to_granules(ranges):
            start = max(start, taken)
            if end > start:
                plan.append((start, end))
                taken = end
        return plan

    def clear(self) -> None:
        """Give all physical memory back, keep the addresses.

        Waits for the device first.

        Raises:
            VmmError: What could be given back has been; calling again resumes.
        """
        self._memory.clear()

    def drop_leftovers(self) -> None:
        """Give back what an earlier failing call had to leave, if anything.

        Raises:
            VmmError: Something is left still; calling again resumes.
        """
        self._memory.drop_unusable()

    def zero_mapped(self, ranges: Iterable[ByteRange]) -> None:
        """Write zeros where ``ranges``, exact to the byte, are backed already.

        Complete after the next :meth:`VmmDriver.synchronize`.
        """
        for start, end in intersect(sorted(ranges), self.mapped_ranges):
            self._driver.zero(self.address + start, end - start)

    def free(self) -> None:
        """Give back memory and addresses. Freeing again does nothing.

        Raises:
            VmmError: What could be given back has been; calling again resumes.
        """
        self._memory.free()
        self._finalizer.detach()

    def _add(self, plan: Sequence[ByteRange]) -> None:
        """Map one zeroed chunk for each granule-aligned range, or none at all."""
        self._driver.check_available(sum(end - start for start, end in plan))
        with ExitStack() as undo:
            for start, end in plan:
                self._memory.add_chunk(start, end, undo)
            self._memory.wait()
            undo.pop_all()

    def _to_granules(self, ranges: Iterable[ByteRange]) -> list[ByteRange]:
        granule = self._driver.granularity
        rounded = []
        for start, end in sorted(ranges):
            if not 0 <= start <= end <= self.size:
                raise ValueError(
                    f"bytes {start} to {end} are not inside a reservation of "
                    f"{format_bytes(self.size)}"
                )
            if end > start:
                rounded.append((start // granule * granule, _round_up(end, granule)))
        return rounded


class _Memory:
    """What a reservation holds; outlives it by as long as giving it back takes."""

    def __init__(self, driver: VmmDriver, address: int, size: int) -> None:
        self.driver = driver
        self.address = address
        self.size = size
        # A set: taking a chunk out of thousands must not look at all of them.
        self.chunks: set[_Chunk] = set()
        self.freed = False
        self._owner = os.getpid()

    def check_open(self) -> None:
        if self.freed:
            raise RuntimeError("the reservation has been freed; make a new one")

    def usable_ranges(self) -> list[ByteRange]:
        return sorted((c.start, c.end) for c in self.chunks if c.accessible)

    def add_chunk(self, start: int, end: int, undo: ExitStack) -> None:
        chunk = _Chunk(start, end, self.driver.create(end - start))
        self.chunks.add(chunk)
        undo.callback(self._drop_or_keep, chunk)
        self.driver.map(self.address + start, chunk.size, chunk.handle)
        chunk.mapped = True
        self.driver.set_access(self.address + start, chunk.size)
        chunk.accessible = True
        if not self.driver.fresh_memory_is_zero:
            # The device zeroes while the next chunk is mapped.
            chunk.being_written = True
            self.driver.zero(self.address + start, chunk.size)

    def wait(self) -> None:
        """Wait until the device writes to no chunk any more."""
        self.driver.synchronize()
        for chunk in self.chunks:
            chunk.being_written = False

    def drop_unusable(self) -> None:
        """Finish what undoing an earlier failure left, before mapping there again."""
        self._drop_all([chunk for chunk in self.chunks if not chunk.accessible])

    def clear(self) -> None:
        if self.chunks:
            self.wait()
            self._drop_all(self.chunks)

    def free(self) -> None:
        if self.freed:
            return
        self.clear()
        self.driver.free_address(self.address, self.size)
        self.freed = True

    def abandon(self) -> None:
        """Free on behalf of an owner that is gone, so with nobody to raise to."""
        # In a forked child the handles and mappings are the parent's.
        if os.getpid() != self._owner:
            return
        try:
            self.free()
        except VmmError:
            logger.exception(
                "Could not give back all of a KV cache reservation at %#x (%s)",
                self.address,
                format_bytes(self.size),
            )

    def _drop_all(self, chunks: Iterable[_Chunk]) -> None:
        # The stack calls every one of them, whatever the others raise.
        with ExitStack() as stack:
            for chunk in sorted(chunks, key=lambda c: c.start, reverse=True):
                stack.callback(self._drop, chunk)

    def _drop(self, chunk: _Chunk) -> None:
        # Whether or not it goes now: its contents are nobody's any more.
        chunk.accessible = False
        # Nothing may be unmapped under a device that writes to it: a chunk that could
        # not be waited for is kept.
        if chunk.being_written:
            self.wait()
        if chunk.mapped:
            self.driver.unmap(self.address + chunk.start, chunk.size)
            chunk.mapped = False
        self.driver.release(chunk.handle)
        self.chunks.remove(chunk)

    def _drop_or_keep(self, chunk: _Chunk) -> None:
        """Undo a chunk; where the system refuses even that, keep it on the books."""
        try:
            self._drop(chunk)
        except VmmError as error:
            # Not the error itself: its traceback would keep the memory for as long
            # as some handler keeps the record.
            logger.warning(
                "A failed commit could not be undone at once: %s", str(error)
            )


# --- Sets of byte ranges -----------------------------------------------------------


def merge(ranges: Iterable[ByteRange]) -> list[ByteRange]:
    """Union of ``ranges`` as disjoint ranges in order, those that touch joined."""
    merged: list[ByteRange] = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def subtract(
    ranges: Iterable[ByteRange], removed: Sequence[ByteRange]
) -> list[ByteRange]:
    """Parts of the disjoint ``ranges`` outside the sorted, disjoint ``removed``."""
    left = []
    for start, end in ranges:
        for low, high in _touching(start, end, removed):
            if low > start:
                left.append((start, low))
            start = high
        if start < end:
            left.append((start, end))
    return left


def intersect(
    ranges: Iterable[ByteRange], others: Sequence[ByteRange]
) -> list[ByteRange]:
    """Parts of ``ranges`` inside the sorted, disjoint ``others``."""
    return [
        (max(start, low), min(end, high))
        for start, end in ranges
        for low, high in _touching(start, end, others)
    ]


def is_inside_one(start: int, end: int, others: Sequence[ByteRange]) -> bool:
    """Whether one of the sorted, disjoint ``others`` covers ``start`` to ``end``."""
    return any(
        low <= start and end <= high for low, high in _touching(start, end, others)
    )


def _touching(start: int, end: int, others: Sequence[ByteRange]) -> Iterator[ByteRange]:
    """Those of the sorted, disjoint ``others`` that share a byte with a range.

    Found by bisection: there are as many chunks as layers, or thousands.
    """
    if start >= end:
        return
    first = bisect.bisect_right(others, start, key=lambda other: other[1])
    for index in range(first, len(others)):
        low, high = others[index]
        if low >= end:
            return
        if low < high:
            yield low, high


def _round_up(num_bytes: int, granule: int) -> int:
    return -(-num_bytes // granule) * granule
