"""Every driver call made to fail, in every way, and what must be true afterwards.

Shared by the tests of host memory (``tests/unit``) and of GPUs (``tests/gpu``):

* :class:`FaultyDriver` does what a real driver does, fails calls on request, and
  holds its caller to the rules of :class:`vllm_kvpad.vmm.VmmDriver`;
* :func:`every_fault` lets each driver call of an action fail in turn;
* :data:`SCENARIOS` are what a KV cache does in its life, and :func:`inject_everywhere`
  checks each of them after every such fault.

:data:`INJECTED` counts the faults of this process; ``tests/conftest.py`` prints it.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import pytest
import torch

from vllm_kvpad.kv_cache import ExtensibleKVCache
from vllm_kvpad.vmm import VmmDriver, VmmError

INJECTED: Counter[str] = Counter()
"""Faults injected by this process so far, by driver call."""

FOREVER = 1 << 30
RUBBISH = -86  # 0xAA

T = TypeVar("T")


class FaultyDriver(VmmDriver):
    """A real driver that fails calls on request, before they reach the system.

    It keeps books of its own, and asserts what neither kernel nor CUDA would forgive:
    mapping over a mapping, unmapping part of one or what is still being written,
    releasing what is mapped, zeroing what is not.

    Args:
        inner: The driver that does the work.
        fresh_memory_is_zero: What to claim of fresh memory. Claiming that it is not
            zero makes it so: it is filled with rubbish.
        defer_zeros: Write zeros when :meth:`synchronize` is called, not before, as a
            busy device may.
    """

    CALLS = (
        "reserve",
        "free_address",
        "create",
        "map",
        "set_access",
        "unmap",
        "release",
        "zero",
        "synchronize",
    )

    def __init__(
        self,
        inner: VmmDriver,
        *,
        fresh_memory_is_zero: bool = True,
        defer_zeros: bool = True,
    ) -> None:
        self.inner = inner
        self.log: list[str] = []
        self.ranges: dict[int, int] = {}
        self.handles: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, int]] = {}  # address -> size, handle
        self.accessible: dict[int, int] = {}
        self.failed: list[str] = []
        self._fresh_memory_is_zero = fresh_memory_is_zero
        self._defer_zeros = defer_zeros
        self._in_flight: list[tuple[int, int]] = []
        self._calls_until_fault = self._faults_left = 0
        self._faulty_call: str | None = None
        self._error: type[BaseException] = VmmError

    def fail(
        self,
        nth: int,
        times: int = 1,
        *,
        call: str | None = None,
        error: type[BaseException] = VmmError,
    ) -> None:
        """Fail the ``nth`` call from now (1: the next), and ``times - 1`` after it.

        With ``call``, only calls of that name count and fail.
        """
        self._calls_until_fault = nth
        self._faults_left = times
        self._faulty_call = call
        self._error = error
        self.failed = []

    def heal(self) -> None:
        """Fail no more."""
        self._faults_left = 0

    def _call(self, name: str, work: Callable[..., Any], *args: Any) -> Any:
        assert name in self.CALLS
        if self._faults_left and self._faulty_call in (None, name):
            self._calls_until_fault -= 1
            if self._calls_until_fault <= 0:
                self._faults_left -= 1
                self.failed.append(name)
                INJECTED[name] += 1
                raise self._error(f"injected: {name} of {args}")
        self.log.append(name)
        return work(*args)

    @property
    def granularity(self) -> int:
        return self.inner.granularity

    @property
    def description(self) -> str:
        return f"{self.inner.description}, with faults"

    @property
    def fresh_memory_is_zero(self) -> bool:
        return self._fresh_memory_is_zero

    @property
    def will_fail(self) -> bool:
        """Whether some later call will fail."""
        return self._faults_left > 0

    @property
    def faults(self) -> int:
        """Faults injected since :meth:`fail`."""
        return len(self.failed)

    @property
    def could_give_back(self) -> bool:
        """Whether no call has failed since :meth:`fail` that gives memory back."""
        return not {"unmap", "release"} & set(self.failed)

    @property
    def held_bytes(self) -> int:
        """Bytes of physical memory that have been created and not released."""
        return sum(self.handles.values())

    def reserve(self, size: int) -> int:
        address: int = self._call("reserve", self.inner.reserve, size)
        self.ranges[address] = size
        return address

    def free_address(self, address: int, size: int) -> None:
        assert self.ranges[address] == size
        assert not self._overlapping(self.mapped_sizes(), address, size)
        self._call("free_address", self.inner.free_address, address, size)
        del self.ranges[address]

    def create(self, size: int) -> int:
        handle: int = self._call("create", self.inner.create, size)
        self.handles[handle] = size
        return handle

    def map(self, address: int, size: int, handle: int) -> None:
        # CUDA refuses to map over a mapping; the host would silently replace it.
        assert not self._overlapping(self.mapped_sizes(), address, size)
        assert self.handles[handle] == size
        assert any(
            start <= address and address + size <= start + length
            for start, length in self.ranges.items()
        )
        self._call("map", self.inner.map, address, size, handle)
        self.mapped[address] = size, handle

    def set_access(self, address: int, size: int) -> None:
        assert self.mapped[address][0] == size
        self._call("set_access", self.inner.set_access, address, size)
        self.accessible[address] = size
        if not self._fresh_memory_is_zero:
            self.inner.tensor(address, size).fill_(RUBBISH)

    def unmap(self, address: int, size: int) -> None:
        # CUDA unmaps exactly what one call mapped, and never waits for kernels.
        assert self.mapped[address][0] == size
        assert not self._overlapping(self._in_flight, address, size), (
            "unmapped while it is still being written"
        )
        self._call("unmap", self.inner.unmap, address, size)
        del self.mapped[address]
        self.accessible.pop(address, None)

    def release(self, handle: int) -> None:
        assert handle not in {handle for _, handle in self.mapped.values()}
        self._call("release", self.inner.release, handle)
        del self.handles[handle]

    def zero(self, address: int, num_bytes: int) -> None:
        assert any(
            start <= address and address + num_bytes <= start + size
            for start, size in self.accessible.items()
        )
        work = _do_nothing if self._defer_zeros else self.inner.zero
        self._call("zero", work, address, num_bytes)
        self._in_flight.append((address, num_bytes))

    def synchronize(self) -> None:
        self._call("synchronize", self._finish)

    def _finish(self) -> None:
        if self._defer_zeros:
            for address, num_bytes in self._in_flight:
                self.inner.zero(address, num_bytes)
        self.inner.synchronize()
        self._in_flight.clear()

    def backing_range(self, address: int) -> tuple[int, int]:
        return self.inner.backing_range(address)

    def tensor(
        self, address: int, num_bytes: int, keepalive: object = None
    ) -> torch.Tensor:
        return self.inner.tensor(address, num_bytes, keepalive)

    def free_memory(self) -> int:
        return self.inner.free_memory()

    def mapped_sizes(self) -> list[tuple[int, int]]:
        """Address and size of every mapping."""
        return [(address, size) for address, (size, _) in self.mapped.items()]

    @staticmethod
    def _overlapping(
        ranges: Iterable[tuple[int, int]], address: int, size: int
    ) -> list[tuple[int, int]]:
        return [
            (start, length)
            for start, length in ranges
            if start < address + size and address < start + length
        ]

    def assert_nothing_left(self) -> None:
        """Every range, mapping and handle is gone."""
        assert self.ranges == {}
        assert self.mapped == {}
        assert self.handles == {}


def _do_nothing(*args: Any) -> None: ...


# --- Each call in turn ---------------------------------------------------------------

MODES: dict[str, dict[str, Any]] = {
    "this call": {"times": 1},
    "this call and the next": {"times": 2},
    "this and all like it": {"times": FOREVER, "alike": True},
    "this and all that follow": {"times": FOREVER},
    # Not an error of the driver: whoever starts the engine has lost patience.
    "interrupted in this call": {"times": 1, "error": KeyboardInterrupt},
}
"""What fails: the keywords of :meth:`FaultyDriver.fail`, ``alike`` for ``call``."""


@dataclass(frozen=True)
class Fault(Generic[T]):
    """An action that has failed, its driver healed again."""

    subject: T
    driver: FaultyDriver
    call: str
    """Which driver call failed first."""
    mode: str


def every_fault(
    make_driver: Callable[[], FaultyDriver],
    prepare: Callable[[FaultyDriver], T],
    act: Callable[[T], object],
    modes: Iterable[str] = tuple(MODES),
) -> Iterator[Fault[T]]:
    """Let each driver call of ``act`` fail, in each mode, on a subject of its own.

    Args:
        make_driver: Returns a new driver without faults.
        prepare: Makes what is acted on.
        act: What fails. Its driver calls are those of an undisturbed first run,
            which must make some.
        modes: Keys of :data:`MODES`.

    Yields:
        After each failure. An action that succeeds in spite of one fails the test,
        as does one that raises something else than was injected.
    """
    driver = make_driver()
    subject = prepare(driver)
    before = len(driver.log)
    act(subject)
    calls = driver.log[before:]
    assert calls, "nothing here can fail"
    del subject
    for mode in modes:
        for index, call in enumerate(calls):
            driver = make_driver()
            subject = prepare(driver)
            keywords = dict(MODES[mode])
            nth = index + 1
            if keywords.pop("alike", False):
                nth = calls[: index + 1].count(call)
                keywords["call"] = call
            driver.fail(nth, **keywords)
            with pytest.raises((VmmError, KeyboardInterrupt), match="injected: "):
                act(subject)
            assert driver.faults
            driver.heal()
            # Only who asked for it holds the subject then, and may drop it.
            handed_over = [subject]
            del subject
            yield Fault(handed_over.pop(), driver, call, mode)


# --- What a KV cache does in its life ------------------------------------------------

UNITS = 24
"""Blocks in the scenarios are this fraction of a cache's capacity."""

OLD = 5
"""What every committed byte holds before a scenario."""


@dataclass(frozen=True)
class Scenario:
    """Something a cache does, and what is promised of it.

    Attributes:
        act: Does it. Repeated after a failure, it completes.
        committed: Counts committed before, one after the other.
        blocks: The count afterwards. All counts are in :data:`UNITS` of capacity.
        defragmented: Whether what was committed before is one chunk a segment.
        asleep: Whether the memory is released before.
        grows: Whether it keeps what is there, also if it fails.
    """

    act: Callable[[ExtensibleKVCache], object]
    committed: tuple[int, ...]
    blocks: int
    defragmented: bool = False
    asleep: bool = False
    grows: bool = False


def blocks(cache: ExtensibleKVCache, units: int) -> int:
    """``units`` of :data:`UNITS` of the capacity, in blocks."""
    return cache.capacity_blocks * units // UNITS


def _commit(units: int, **options: bool) -> Callable[[ExtensibleKVCache], object]:
    return lambda cache: cache.commit(blocks(cache, units), **options)


WARM = (2, 8)
"""Committed in two steps, so in several chunks a segment."""

SCENARIOS: dict[str, Scenario] = {
    "commit": Scenario(_commit(3), (), 3, grows=True),
    "commit in one chunk each": Scenario(_commit(3, defragment=True), (), 3),
    "grow inside granules": Scenario(_commit(9), WARM, 9, grows=True),
    "grow": Scenario(_commit(20), WARM, 20, grows=True),
    "defragment": Scenario(_commit(8, defragment=True), WARM, 8),
    "defragment and grow": Scenario(_commit(20, defragment=True), WARM, 20),
    "defragment and shrink": Scenario(
        _commit(4, defragment=True, shrink=True), WARM, 4
    ),
    "shrink": Scenario(_commit(4, shrink=True), WARM, 4),
    "shrink to nothing": Scenario(_commit(0, shrink=True), WARM, 0),
    "sleep": Scenario(ExtensibleKVCache.release_physical, WARM, 0),
    "wake": Scenario(ExtensibleKVCache.recommit, WARM, 8, asleep=True),
    "wake defragmented": Scenario(
        ExtensibleKVCache.recommit, (8,), 8, defragmented=True, asleep=True
    ),
    "free": Scenario(ExtensibleKVCache.free, WARM, 0),
    "free while asleep": Scenario(ExtensibleKVCache.free, WARM, 0, asleep=True),
}


class World(Protocol):
    """Where scenarios are played: which memory, and who confirms what is there."""

    def make_driver(self) -> FaultyDriver:
        """A new driver without faults."""

    def make_cache(self, driver: FaultyDriver) -> ExtensibleKVCache:
        """A new cache with nothing committed."""

    def check(self, cache: ExtensibleKVCache, driver: FaultyDriver) -> None:
        """Compare the books of the cache and the driver with the system's account."""

    def check_nothing_left(self, driver: FaultyDriver) -> None:
        """Confirm that the system has everything back."""


def inject_everywhere(
    scenario: Scenario,
    world: World,
    modes: Iterable[str] = tuple(MODES),
    ways_to_go_on: Iterable[str] = ("repeat", "free", "drop"),
) -> int:
    """Play ``scenario`` once for each of its driver calls, mode and way to go on.

    After each fault the cache's count is true, what is mapped can be read and
    written, and what was promised to be kept is there. Then the cache repeats what
    failed, or is freed, or is dropped; and nothing is left.

    Returns:
        How often the scenario was made to fail.
    """

    def prepare(driver: FaultyDriver) -> ExtensibleKVCache:
        cache = world.make_cache(driver)
        for units in scenario.committed:
            cache.commit(blocks(cache, units), defragment=scenario.defragmented)
        # Granules are mapped whole, and nobody promised not to write beyond the
        # committed blocks.
        for address, size in driver.accessible.items():
            driver.tensor(address, size).fill_(OLD)
        if scenario.asleep:
            cache.release_physical()
        return cache

    failures = 0
    gc.freeze()  # collecting what is newer than this is quick
    for go_on in map(WAYS_TO_GO_ON.__getitem__, ways_to_go_on):
        for fault in every_fault(world.make_driver, prepare, scenario.act, modes):
            cache, driver = fault.subject, fault.driver
            failures += 1
            world.check(cache, driver)
            check_after_fault(scenario, cache)
            undone = fault.mode == "this call" and driver.could_give_back
            if undone and scenario.act is not ExtensibleKVCache.free:
                # Undoing was not disturbed: nothing is held beyond what is counted.
                count = cache.num_committed_blocks
                assert driver.held_bytes == cache.physical_bytes_for(count)
            read_and_write_all_that_is_mapped(driver)
            go_on(scenario, cache, driver)
            if go_on is not _drop:
                world.check(cache, driver)
                cache.free()
            del cache, fault
            if go_on is _drop:
                # The error's traceback may have left a cycle that holds the cache.
                gc.collect()
            world.check_nothing_left(driver)
            driver.assert_nothing_left()
    gc.unfreeze()
    return failures


def check_after_fault(scenario: Scenario, cache: ExtensibleKVCache) -> None:
    """The count is one of those promised, and old blocks hold what they held."""
    count = cache.num_committed_blocks
    before = blocks(cache, scenario.committed[-1]) if scenario.committed else 0
    if scenario.grows:
        assert count == before
    elif count:
        # The wait before anything was unmapped has failed.
        assert count == before
        assert not scenario.asleep
    assert not (count and cache.is_released)
    assert holds(cache, 0, count, OLD)


def check_after_success(scenario: Scenario, cache: ExtensibleKVCache) -> None:
    """Count, footprint and contents are those of an undisturbed run."""
    count = blocks(cache, scenario.blocks)
    assert cache.num_committed_blocks == count
    assert cache.physical_bytes == cache.physical_bytes_for(count)
    kept = 0
    if scenario.grows and scenario.committed:
        kept = blocks(cache, scenario.committed[-1])
    assert holds(cache, 0, kept, OLD)
    assert holds(cache, kept, count, 0)


def _repeat(scenario: Scenario, cache: ExtensibleKVCache, driver: FaultyDriver) -> None:
    scenario.act(cache)
    check_after_success(scenario, cache)
    assert driver.held_bytes == cache.physical_bytes


def _free(scenario: Scenario, cache: ExtensibleKVCache, driver: FaultyDriver) -> None:
    cache.free()
    driver.assert_nothing_left()


def _drop(scenario: Scenario, cache: ExtensibleKVCache, driver: FaultyDriver) -> None:
    """Leave it to the garbage collector, as an engine does that gives up."""


WAYS_TO_GO_ON: Mapping[
    str, Callable[[Scenario, ExtensibleKVCache, FaultyDriver], None]
] = {"repeat": _repeat, "free": _free, "drop": _drop}


def read_and_write_all_that_is_mapped(driver: FaultyDriver) -> None:
    """Touch every accessible byte and leave it as it was."""
    for address, size in driver.accessible.items():
        tensor = driver.tensor(address, size)
        before = tensor.clone()
        tensor.bitwise_not_()
        assert torch.equal(tensor, ~before)
        tensor.copy_(before)


def holds(cache: ExtensibleKVCache, first: int, last: int, value: int) -> bool:
    """Whether all bytes of blocks first to last (exclusive) are ``value``."""
    if last <= first:
        return True
    for segment in cache.segments:
        start = cache.address + segment.offset + first * segment.block_stride
        size = (last - first) * segment.block_stride
        if not (cache.driver.tensor(start, size) == value).all():
            return False
    return True
