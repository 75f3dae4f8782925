"""Any driver call may fail, at any time: nothing is lost and nothing is leaked.

The scenarios and what is checked after each fault are in ``tests/faults.py``, which
the GPU tests share. Here the kernel confirms what is left.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import faults
import pytest
from faults import (
    INJECTED,
    MODES,
    OLD,
    SCENARIOS,
    FaultyDriver,
    every_fault,
    inject_everywhere,
)
from small_caches import LBHNC, hybrid, make_cache, mixed, planned
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_cache_layout import KVCacheLayout
from vmm_probes import (
    GRANULE,
    FaultyHostDriver,
    is_accessible,
    mappings,
    memfd_bytes,
    memfds,
    read,
    write,
)

from vllm_kvpad.kv_cache import ExtensibleKVCache
from vllm_kvpad.reservation import Reservation
from vllm_kvpad.vmm import HostVmmDriver, VmmError, VmmOutOfMemoryError
from vllm_kvpad.vmm import host as host_module

BLHNC = KVCacheLayout.BLHNC


@dataclass(frozen=True)
class HostWorld:
    """A small cache in host memory, with the kernel as witness."""

    config: KVCacheConfig
    layout: KVCacheLayout = LBHNC
    padded: bool = True
    fresh_memory_is_zero: bool = False

    def make_driver(self) -> FaultyHostDriver:
        return FaultyHostDriver(fresh_memory_is_zero=self.fresh_memory_is_zero)

    def make_cache(self, driver: FaultyDriver) -> ExtensibleKVCache:
        return make_cache(driver, self.config, self.layout, padded=self.padded)

    def check(self, cache: ExtensibleKVCache, driver: FaultyDriver) -> None:
        assert isinstance(driver, FaultyHostDriver)
        driver.assert_kernel_agrees()
        assert cache.physical_bytes == driver.held_bytes
        for segment in cache.segments:
            start = cache.address + segment.offset
            end = start + segment.committed_bytes(cache.num_committed_blocks)
            assert is_covered(driver, start, end)

    def check_nothing_left(self, driver: FaultyDriver) -> None:
        assert isinstance(driver, FaultyHostDriver)
        driver.assert_nothing_left()


def is_covered(driver: FaultyDriver, start: int, end: int) -> bool:
    """Whether accessible mappings cover every byte from start to end."""
    for address, size in sorted(driver.accessible.items()):
        if address <= start < address + size:
            start = address + size
    return start >= end


ON_A_GPU = HostWorld(planned())
"""Padded, and fresh memory is anything: what a connector on a GPU gets."""

OTHER_WORLDS: dict[str, HostWorld] = {
    "unpadded, as on the host": HostWorld(
        planned(), padded=False, fresh_memory_is_zero=True
    ),
    "mixed strides, straddling": HostWorld(mixed(24), padded=False),
    "aliases, blocks outermost": HostWorld(hybrid(24, BLHNC), BLHNC),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_fault_at_any_driver_call_loses_and_leaks_nothing(name: str) -> None:
    before = INJECTED.total()
    failures = inject_everywhere(SCENARIOS[name], ON_A_GPU)
    # Every way to fail, every way to go on, and at least one call.
    assert failures >= len(MODES) * len(faults.WAYS_TO_GO_ON)
    assert INJECTED.total() - before >= failures


@pytest.mark.parametrize("world", OTHER_WORLDS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_nor_does_it_in_any_other_placement(name: str, world: str) -> None:
    modes = ("this call", "this and all that follow")
    assert inject_everywhere(
        SCENARIOS[name], OTHER_WORLDS[world], modes, ["repeat"]
    ) >= len(modes)


def test_every_kind_of_driver_call_is_made_to_fail() -> None:
    """The scenarios together reach all that a driver can do."""
    reached: Counter[str] = Counter()
    for scenario in SCENARIOS.values():
        driver = FaultyHostDriver(fresh_memory_is_zero=False)
        cache = make_cache(driver, planned())
        for units in scenario.committed:
            cache.commit(faults.blocks(cache, units))
        if scenario.asleep:
            cache.release_physical()
        driver.log.clear()
        scenario.act(cache)
        reached.update(driver.log)
        cache.free()
    # A cache reserves when it is made: the test below.
    assert set(reached) == set(FaultyDriver.CALLS) - {"reserve"}


def test_a_cache_whose_addresses_are_refused_leaves_nothing_and_can_be_made_again() -> (
    None
):
    driver = FaultyHostDriver()
    driver.fail(1)
    with pytest.raises(VmmError, match="injected: reserve"):
        make_cache(driver, planned())
    driver.assert_nothing_left()
    cache = make_cache(driver, planned())
    cache.commit(3)
    cache.free()
    driver.assert_nothing_left()


def test_an_injected_fault_that_nobody_reports_is_noticed() -> None:
    """The checks above can fail: a cache that swallows errors does not pass."""

    def swallow(cache: ExtensibleKVCache) -> None:
        try:
            cache.commit(3)
        except VmmError:
            pass
        finally:
            cache.driver.heal()  # type: ignore[attr-defined]

    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        inject_everywhere(faults.Scenario(swallow, (), 3, grows=True), ON_A_GPU)


def test_memory_that_is_still_being_written_is_never_unmapped() -> None:
    """Also not while undoing a commit, after the device could not be waited for."""
    driver = FaultyHostDriver(fresh_memory_is_zero=False)
    cache = make_cache(driver, planned())
    cache.commit(2)
    driver.fail(1, faults.FOREVER, call="synchronize")
    with pytest.raises(VmmError, match="injected: synchronize"):
        cache.commit(20)
    driver.heal()
    # The new chunks had to be left for later: they are held, and not counted.
    assert cache.num_committed_blocks == 2
    assert cache.physical_bytes > cache.physical_bytes_for(2)
    cache.commit(20)
    assert cache.physical_bytes == cache.physical_bytes_for(20)
    assert faults.holds(cache, 2, 20, 0)
    cache.free()
    driver.assert_nothing_left()


# --- Reservations ------------------------------------------------------------------

SIZE = 16 * GRANULE


def in_granules(*ranges: tuple[float, float]) -> list[tuple[int, int]]:
    return [(int(start * GRANULE), int(end * GRANULE)) for start, end in ranges]


BEFORE = in_granules((0, 1.5), (4, 5))
AFTER = in_granules((0, 3), (4, 8), (10, 11))


def reservation(driver: FaultyDriver) -> Reservation:
    made = Reservation(driver, SIZE)
    made.grow(BEFORE)
    for start, end in BEFORE:
        write(made.address + start, end - start, OLD)
    return made


def chunks(reservation: Reservation) -> list[tuple[int, int]]:
    """What the kernel has mapped, in granules from the start."""
    return [
        (
            (m.start - reservation.address) // GRANULE,
            (m.end - reservation.address) // GRANULE,
        )
        for m in mappings(reservation.address, reservation.size)
        if m.is_chunk
    ]


@pytest.fixture(params=[True, False], ids=["fresh is zero", "fresh is rubbish"])
def make_driver(request: pytest.FixtureRequest) -> Callable[[], FaultyHostDriver]:
    return lambda: FaultyHostDriver(fresh_memory_is_zero=request.param)


def test_a_failed_growth_changes_nothing_and_can_be_retried(
    make_driver: Callable[[], FaultyHostDriver],
) -> None:
    for fault in every_fault(make_driver, reservation, lambda r: r.grow(AFTER)):
        subject = fault.subject
        for start, end in BEFORE:
            content = read(subject.address + start, end - start)
            assert content == bytes([OLD]) * (end - start)
        if fault.mode == "this call":  # where undoing fails, chunks stay for later
            assert chunks(subject) == [(0, 2), (4, 5)]
            assert memfd_bytes() == 3 * GRANULE
        assert subject.physical_bytes == memfd_bytes()
        subject.grow(AFTER)
        for start, end in AFTER:
            assert is_accessible(subject.address + start, subject.address + end)
        assert read(subject.address + 10 * GRANULE, GRANULE) == bytes(GRANULE)
        assert memfd_bytes() == 8 * GRANULE
        subject.free()
        fault.driver.assert_nothing_left()


@pytest.mark.parametrize("one_chunk_each", [True, False])
def test_a_failed_remapping_can_be_retried(
    make_driver: Callable[[], FaultyHostDriver], one_chunk_each: bool
) -> None:
    def remap(reservation: Reservation) -> None:
        reservation.remap(AFTER, one_chunk_each=one_chunk_each)

    for fault in every_fault(make_driver, reservation, remap):
        subject = fault.subject
        assert subject.physical_bytes == memfd_bytes()
        remap(subject)
        assert chunks(subject) == [(0, 3), (4, 8), (10, 11)]
        for start, end in AFTER:
            content = read(subject.address + start, end - start)
            assert content == bytes(end - start)
        assert memfd_bytes() == 8 * GRANULE
        subject.free()
        fault.driver.assert_nothing_left()


@pytest.mark.parametrize("act", [Reservation.clear, Reservation.free])
def test_a_failed_giving_back_resumes(
    make_driver: Callable[[], FaultyHostDriver], act: Callable[[Reservation], None]
) -> None:
    for fault in every_fault(make_driver, reservation, act):
        assert fault.subject.physical_bytes == memfd_bytes()
        act(fault.subject)
        assert fault.subject.physical_bytes == memfd_bytes() == 0
        fault.subject.free()
        fault.driver.assert_nothing_left()


# --- The host driver's own calls of the system --------------------------------------


class FaultySystem:
    """libc and the os functions that the host driver calls; the nth of them fails."""

    CALLS = ("mmap", "munmap", "mprotect", "memfd_create", "posix_fallocate", "close")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._libc = host_module._libc()
        self.log: list[str] = []
        self.fail_at = 0
        monkeypatch.setattr(host_module, "_libc", lambda: self)
        for name in ("memfd_create", "posix_fallocate", "close"):
            monkeypatch.setattr(os, name, self._failing(name, getattr(os, name)))

    def __getattr__(self, name: str) -> Any:
        return self._failing(name, getattr(self._libc, name))

    def _failing(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if self.fail_at and len(self.log) + 1 == self.fail_at:
                self.fail_at = 0
                if name in ("mmap", "munmap", "mprotect"):
                    ctypes.set_errno(errno.ENOMEM)
                    return host_module._MAP_FAILED if name == "mmap" else -1
                raise OSError(errno.ENOSPC, "injected")
            self.log.append(name)
            return function(*args)

        return call


def live_once() -> None:
    """A cache from construction to its end."""
    cache = make_cache(HostVmmDriver(GRANULE), planned())
    cache.commit(8)
    cache.commit(20, defragment=True)
    cache.release_physical()
    cache.recommit()
    cache.free()


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultySystem]:
    with monkeypatch.context() as patch:
        yield FaultySystem(patch)


def test_a_refusal_of_the_kernel_at_any_system_call_is_a_vmm_error_and_leaks_nothing(
    system: FaultySystem,
) -> None:
    live_once()
    calls = list(system.log)
    assert set(calls) == set(FaultySystem.CALLS)
    before = {m.start for m in mappings(0, 1 << 64)}
    gc.freeze()  # collecting what is newer than this is quick
    for nth, call in enumerate(calls, start=1):
        system.log.clear()
        system.fail_at = nth
        with pytest.raises(VmmError, match="host ") as caught:
            live_once()
        # What the kernel has too little of says so.
        assert isinstance(caught.value, VmmOutOfMemoryError), call
        del caught  # and with it what failed half-way
        gc.collect()
        assert memfds() == [], call
        assert not [m for m in mappings(0, 1 << 64) if m.is_chunk], call
    gc.unfreeze()
    # A range that is reserved and mapped nowhere: none is left over either.
    new = [m for m in mappings(0, 1 << 64) if m.start not in before]
    assert not [m for m in new if m.access == "---p" and m.end - m.start >= SIZE]
