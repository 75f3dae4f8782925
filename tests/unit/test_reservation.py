"""Reservations against the kernel: what is mapped, after success and after faults."""

from __future__ import annotations

import gc
import itertools
import logging
import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vmm_probes import (
    GRANULE,
    FaultyHostDriver,
    address_space,
    chunk_mappings,
    is_accessible,
    mappings,
    memfd_bytes,
    memfds,
    read,
    write,
)

from vllm_kvpad.reservation import (
    Reservation,
    intersect,
    is_inside_one,
    merge,
    subtract,
)
from vllm_kvpad.vmm import HostVmmDriver, VmmError

SIZE = 16 * GRANULE


@pytest.fixture(params=[True, False], ids=["fresh is zero", "fresh is rubbish"])
def driver(request: pytest.FixtureRequest) -> Iterator[FaultyHostDriver]:
    driver = FaultyHostDriver(fresh_memory_is_zero=request.param)
    yield driver
    driver.assert_nothing_left()


@pytest.fixture
def reservation(driver: FaultyHostDriver) -> Iterator[Reservation]:
    reservation = Reservation(driver, SIZE)
    yield reservation
    driver.heal()
    reservation.free()


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


def in_granules(*ranges: tuple[float, float]) -> list[tuple[int, int]]:
    return [(int(start * GRANULE), int(end * GRANULE)) for start, end in ranges]


def test_a_new_reservation_holds_addresses_and_no_memory(
    reservation: Reservation,
) -> None:
    assert reservation.address % GRANULE == 0
    assert reservation.size == SIZE
    assert reservation.physical_bytes == reservation.num_chunks == 0
    assert chunks(reservation) == []


def test_the_range_is_whole_granules(driver: FaultyHostDriver) -> None:
    reservation = Reservation(driver, GRANULE + 1)
    assert reservation.size == 2 * GRANULE
    reservation.free()


@pytest.mark.parametrize("size", [0, -GRANULE])
def test_a_reservation_of_nothing_is_refused(
    driver: FaultyHostDriver, size: int
) -> None:
    with pytest.raises(ValueError, match="bytes of address space"):
        Reservation(driver, size)


def test_growing_maps_missing_granules_that_touch_as_one_chunk(
    reservation: Reservation,
) -> None:
    reservation.grow(in_granules((0, 1.5), (2, 2.1), (5, 5.5)))
    assert chunks(reservation) == [(0, 3), (5, 6)]
    reservation.grow(in_granules((0, 8)))
    assert chunks(reservation) == [(0, 3), (3, 5), (5, 6), (6, 8)]
    assert reservation.num_chunks == 4
    assert reservation.physical_bytes == memfd_bytes() == 8 * GRANULE


def test_growing_keeps_old_bytes_and_gives_zeros(reservation: Reservation) -> None:
    reservation.grow(in_granules((0, 2)))
    write(reservation.address, 2 * GRANULE, 5)
    reservation.grow(in_granules((0, 2), (3, 4.5)))
    assert read(reservation.address, 2 * GRANULE) == b"\5" * (2 * GRANULE)
    assert read(reservation.address + 3 * GRANULE, 2 * GRANULE) == bytes(2 * GRANULE)


def test_growing_into_what_is_mapped_creates_nothing(
    driver: FaultyHostDriver, reservation: Reservation
) -> None:
    reservation.grow(in_granules((0, 2)))
    driver.log.clear()
    reservation.grow(in_granules((0, 1.2), (1, 2)))
    assert not {"create", "map", "unmap", "release"} & set(driver.log)


def test_remapping_gives_each_range_a_chunk_of_its_own_that_reads_zero(
    reservation: Reservation,
) -> None:
    reservation.grow(in_granules((0, 9)))
    write(reservation.address, 9 * GRANULE, 5)
    reservation.remap(in_granules((4, 6), (0, 1.5), (2, 4)), one_chunk_each=True)
    assert chunks(reservation) == [(0, 2), (2, 4), (4, 6)]
    assert len({m.inode for m in chunk_mappings()}) == 3
    assert read(reservation.address, 6 * GRANULE) == bytes(6 * GRANULE)
    assert memfd_bytes() == 6 * GRANULE


def test_remapping_without_chunks_of_their_own_joins_ranges_that_touch(
    reservation: Reservation,
) -> None:
    reservation.remap(in_granules((0, 1.5), (2, 4), (5, 6)), one_chunk_each=False)
    assert chunks(reservation) == [(0, 4), (5, 6)]


def test_a_granule_shared_by_two_ranges_goes_to_the_lower_one(
    reservation: Reservation,
) -> None:
    ranges = in_granules((0, 1.5), (1.5, 1.7), (1.7, 4))
    reservation.remap(ranges, one_chunk_each=True)
    assert chunks(reservation) == [(0, 2), (2, 4)]
    assert is_accessible(reservation.address, reservation.address + 4 * GRANULE)


def test_zeroing_touches_mapped_bytes_of_the_ranges_only(
    driver: FaultyHostDriver, reservation: Reservation
) -> None:
    reservation.grow(in_granules((0, 1), (2, 3)))
    write(reservation.address, GRANULE, 5)
    write(reservation.address + 2 * GRANULE, GRANULE, 5)
    reservation.zero_mapped([(10, 2 * GRANULE + 20)])
    driver.synchronize()
    assert read(reservation.address, GRANULE) == b"\5" * 10 + bytes(GRANULE - 10)
    expected = bytes(20) + b"\5" * (GRANULE - 20)
    assert read(reservation.address + 2 * GRANULE, GRANULE) == expected


def test_the_device_is_waited_for_before_anything_is_unmapped(
    driver: FaultyHostDriver, reservation: Reservation
) -> None:
    reservation.grow(in_granules((0, 2)))
    driver.log.clear()
    reservation.remap(in_granules((0, 1)), one_chunk_each=True)
    assert driver.log[:2] == ["synchronize", "unmap"]
    # New memory is zeroed before the call returns, whoever uses it on what stream.
    assert driver.log[-1] == "synchronize"


@pytest.mark.parametrize(
    "range_", [(-1, GRANULE), (0, SIZE + 1), (2 * GRANULE, GRANULE)]
)
def test_a_range_outside_the_reservation_is_refused(
    reservation: Reservation, range_: tuple[int, int]
) -> None:
    reservation.grow(in_granules((0, 1)))
    with pytest.raises(ValueError, match="not inside a reservation of 1048576 bytes"):
        reservation.grow([range_])
    with pytest.raises(ValueError, match="not inside"):
        reservation.remap([range_], one_chunk_each=True)
    assert chunks(reservation) == [(0, 1)]


def test_a_freed_reservation_is_gone_and_says_so(driver: FaultyHostDriver) -> None:
    reservation = Reservation(driver, SIZE)
    reservation.grow(in_granules((0, 3), (4, 5)))
    reservation.free()
    driver.assert_nothing_left()
    reservation.free()
    with pytest.raises(RuntimeError, match="has been freed"):
        reservation.grow(in_granules((0, 1)))
    with pytest.raises(RuntimeError, match="has been freed"):
        reservation.remap(in_granules((0, 1)), one_chunk_each=True)


def test_a_dropped_reservation_gives_everything_back(driver: FaultyHostDriver) -> None:
    reservation = Reservation(driver, SIZE)
    reservation.grow(in_granules((0, 3), (4, 5)))
    del reservation
    gc.collect()
    driver.assert_nothing_left()


def test_a_tensor_keeps_a_dropped_reservation_until_it_goes(
    driver: FaultyHostDriver,
) -> None:
    reservation = Reservation(driver, SIZE)
    reservation.grow(in_granules((0, 1)))
    tensor = driver.tensor(reservation.address, 100, keepalive=reservation)
    view = tensor[3:9].view(2, 3)
    del reservation, tensor
    gc.collect()
    assert view.fill_(3).sum() == 18
    del view
    driver.assert_nothing_left()


def test_a_forked_child_frees_nothing_of_its_parent(driver: FaultyHostDriver) -> None:
    reservation = Reservation(driver, SIZE)
    reservation.grow(in_granules((0, 1)))
    write(reservation.address, 8, 5)
    address = reservation.address
    child = os.fork()
    if child == 0:  # pragma: no cover - another process
        del reservation
        gc.collect()
        # Still there for the child's other objects, and close-on-exec for the rest.
        os._exit(0 if memfds() and read(address, 8) == b"\5" * 8 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert read(address, 8) == b"\5" * 8
    reservation.free()


def test_what_a_dropped_reservation_cannot_give_back_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = FaultyHostDriver()
    reservation = Reservation(driver, SIZE)
    logging.getLogger("vllm").propagate = True
    driver.fail(1)
    with caplog.at_level(logging.ERROR):
        del reservation
        gc.collect()
    assert "Could not give back" in caplog.text
    assert "injected: free_address" in caplog.text
    (leftover,) = driver.ranges.items()
    driver.free_address(*leftover)
    driver.assert_nothing_left()


def test_many_cycles_leave_mappings_descriptors_and_address_space_flat() -> None:
    driver = HostVmmDriver(GRANULE)
    before = address_space(), len(mappings(0, 1 << 64))
    for _ in range(200):
        reservation = Reservation(driver, SIZE)
        reservation.grow(in_granules((0, 1), (3, 5)))
        reservation.remap(in_granules((0, 2), (3, 7)), one_chunk_each=True)
        reservation.clear()
        reservation.grow(in_granules((0, 4)))
        reservation.free()
    assert memfds() == []
    # A granule lost in each cycle would be 12.5 MiB; Python's heap grows by 1 MiB.
    assert address_space() - before[0] < 8 << 20
    assert len(mappings(0, 1 << 64)) - before[1] < 10


# --- Faults, beside those of test_faults.py ------------------------------------------

OLD = in_granules((0, 1.5), (4, 5))


def test_one_refused_unmapping_does_not_keep_the_other_chunks(
    driver: FaultyHostDriver, reservation: Reservation
) -> None:
    reservation.grow(OLD)
    driver.fail(2)
    with pytest.raises(VmmError, match="injected: unmap"):
        reservation.clear()
    assert chunks(reservation) == [(0, 2)]
    # What is left is not taken for memory with contents, and goes at the next call.
    assert reservation.num_chunks == 0
    assert reservation.physical_bytes == memfd_bytes() == 2 * GRANULE
    reservation.grow(in_granules((0, 3)))
    assert chunks(reservation) == [(0, 3)]


def test_a_reservation_whose_range_is_refused_leaves_nothing() -> None:
    driver = FaultyHostDriver()
    driver.fail(1)
    with pytest.raises(VmmError, match="injected: reserve"):
        Reservation(driver, SIZE)
    gc.collect()
    driver.assert_nothing_left()


# --- Sets of byte ranges -----------------------------------------------------------

ranges = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 10)).map(lambda r: (r[0], r[0] + r[1]))
)


def as_set(ranges: list[tuple[int, int]]) -> set[int]:
    return {byte for start, end in ranges for byte in range(start, end)}


@given(ranges, ranges)
def test_range_arithmetic_is_that_of_sets(
    left: list[tuple[int, int]], right: list[tuple[int, int]]
) -> None:
    a, b = merge(left), merge(right)
    assert as_set(a) == as_set(left)
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(a))
    assert as_set(subtract(a, b)) == as_set(left) - as_set(right)
    assert as_set(intersect(a, b)) == as_set(left) & as_set(right)
    assert as_set(intersect(left, b)) == as_set(left) & as_set(right)
    assert all(start < end for start, end in [*subtract(a, b), *intersect(left, b)])
    for start, end in left:
        if start < end:
            covered = as_set([(start, end)]) <= as_set(right)
            assert is_inside_one(start, end, b) == covered
