"""The extensible cache over real vLLM configurations, checked against the kernel."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from small_caches import (
    CAPACITY,
    CPU,
    LBHNC,
    PAGE,
    hybrid,
    make_cache,
    mixed,
    planned,
)
from strategies import attention_spec, layer_names, plan_uniform
from vllm.v1.kv_cache_interface import (
    HiSparseResidentSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.simple_kv_offload import worker as offload
from vllm.v1.worker.utils import allocate_kv_cache
from vmm_probes import (
    GRANULE,
    FaultyHostDriver,
    Mapping,
    RoomyHostDriver,
    address_space,
    chunk_mappings,
    is_accessible,
    mappings,
    memfd_bytes,
    memfds,
    num_descriptors,
    read,
    resident,
    write,
)

from vllm_kvpad import placement
from vllm_kvpad.kv_cache import ExtensibleKVCache
from vllm_kvpad.vmm import HostVmmDriver, VmmError, VmmUnsupportedError

LHBNC, BLHNC = KVCacheLayout.LHBNC, KVCacheLayout.BLHNC


@pytest.fixture
def driver() -> Iterator[FaultyHostDriver]:
    driver = FaultyHostDriver()
    yield driver
    gc.collect()
    driver.assert_nothing_left()


def mapped_ranges(cache: ExtensibleKVCache) -> list[Mapping]:
    return [m for m in mappings(cache.address, cache.size) if m.is_chunk]


def chunk_of_each_segment(cache: ExtensibleKVCache) -> list[Mapping | None]:
    """By the kernel: the one mapping that holds a segment's committed bytes, if any."""
    found: list[Mapping | None] = []
    for segment in cache.segments:
        start = cache.address + segment.offset
        end = start + segment.committed_bytes(cache.num_committed_blocks)
        lines = [m for m in mappings(start, end - start) if m.is_chunk]
        covers = len(lines) == 1 and lines[0].start <= start and end <= lines[0].end
        found.append(lines[0] if covers else None)
    return found


def assert_count_is_backed(cache: ExtensibleKVCache) -> None:
    for segment in cache.segments:
        start = cache.address + segment.offset
        end = start + segment.committed_bytes(cache.num_committed_blocks)
        assert is_accessible(start, end)
    assert cache.physical_bytes == memfd_bytes()


def fill(cache: ExtensibleKVCache, value: int) -> None:
    """Write every committed byte."""
    for segment in cache.segments:
        size = segment.committed_bytes(cache.num_committed_blocks)
        write(cache.address + segment.offset, size, value)


def contents(cache: ExtensibleKVCache, first: int, last: int) -> set[int]:
    """Byte values that blocks first to last (exclusive) hold, over all segments."""
    values: set[int] = set()
    for segment in cache.segments:
        start = cache.address + segment.offset + first * segment.block_stride
        values.update(read(start, (last - first) * segment.block_stride))
    return values


# --- What is there -----------------------------------------------------------------


def test_a_new_cache_has_addresses_at_capacity_and_no_memory(
    driver: FaultyHostDriver,
) -> None:
    config = planned()
    cache = make_cache(driver, config)
    padded = placement.pad_kv_cache_segments(config, LBHNC, GRANULE)
    assert cache.size == padded.kv_cache_tensors[0].size
    assert cache.address % GRANULE == 0
    assert cache.capacity_blocks == CAPACITY
    assert cache.bytes_per_block == 3 * PAGE
    assert cache.segments == placement.kv_cache_segments(padded, LBHNC)
    assert cache.num_committed_blocks == cache.num_chunks == cache.physical_bytes == 0
    assert mapped_ranges(cache) == []
    assert cache.segments_backed_by_one_chunk() == [False] * 3


def test_the_caller_may_change_its_configuration_afterwards(
    driver: FaultyHostDriver,
) -> None:
    config = planned()
    original = copy.deepcopy(config)
    cache = make_cache(driver, config, padded=False)
    assert config == original
    # The worker sets the count of what is now its configuration.
    config.num_blocks = 5
    config.kv_cache_tensors[0].layers.clear()
    cache.commit(5)
    assert cache.capacity_blocks == CAPACITY
    assert len(cache.committed_views(planned(5), LBHNC)) == 3


def test_the_device_chooses_the_driver() -> None:
    cache = ExtensibleKVCache(planned(), LBHNC, "cpu")
    assert isinstance(cache.driver, HostVmmDriver)
    assert cache.address % (2 << 20) == 0
    cache.free()
    with pytest.raises(VmmUnsupportedError, match="'meta' devices"):
        ExtensibleKVCache(planned(), LBHNC, "meta")


def test_a_model_without_a_kv_cache_is_refused(driver: FaultyHostDriver) -> None:
    with pytest.raises(ValueError, match="no KV cache tensors"):
        ExtensibleKVCache(KVCacheConfig(1, [], []), LBHNC, CPU, driver)


def test_tensors_of_several_allocations_are_refused(driver: FaultyHostDriver) -> None:
    config = mixed(CAPACITY)
    config.kv_cache_tensors[0].size += 1
    with pytest.raises(ValueError, match="share one allocation"):
        ExtensibleKVCache(config, LBHNC, CPU, driver)


def test_allocate_gives_the_whole_range_with_the_null_block_backed(
    driver: FaultyHostDriver,
) -> None:
    cache = make_cache(driver, planned())
    tensor = cache.allocate(cache.size)
    assert tensor.dtype == torch.int8
    assert tensor.shape == (cache.size,)
    assert tensor.untyped_storage().nbytes() == cache.size
    assert tensor.data_ptr() == cache.address
    assert cache.num_committed_blocks == 1
    assert contents(cache, 0, 1) == {0}


def test_allocate_keeps_what_is_committed(driver: FaultyHostDriver) -> None:
    cache = make_cache(driver, planned())
    cache.commit(7)
    fill(cache, 3)
    tensor = cache.allocate(cache.size)
    assert cache.num_committed_blocks == 7
    assert tensor[7 * PAGE - 1] == 3


def test_allocate_of_another_size_is_refused(driver: FaultyHostDriver) -> None:
    cache = make_cache(driver, planned())
    with pytest.raises(ValueError, match=f"configured with {cache.size} bytes"):
        cache.allocate(cache.size - 1)
    assert cache.num_committed_blocks == 0


@pytest.mark.parametrize("num_blocks", [-1, CAPACITY + 1])
@pytest.mark.parametrize("defragment", [False, True])
def test_a_count_outside_the_capacity_is_refused_and_changes_nothing(
    driver: FaultyHostDriver, num_blocks: int, defragment: bool
) -> None:
    cache = make_cache(driver, planned())
    cache.commit(3)
    with pytest.raises(ValueError, match=f"room for 0 to {CAPACITY}"):
        cache.commit(num_blocks, defragment=defragment, shrink=True)
    assert cache.num_committed_blocks == 3
    assert_count_is_backed(cache)


# --- Committing --------------------------------------------------------------------


@pytest.mark.parametrize("make", [planned, hybrid, mixed])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("layout", [LBHNC, BLHNC])
def test_exactly_the_footprint_is_held_at_every_count(
    driver: FaultyHostDriver,
    make: Callable[[int, KVCacheLayout], KVCacheConfig],
    padded: bool,
    layout: KVCacheLayout,
) -> None:
    cache = make_cache(driver, make(CAPACITY, layout), layout, padded=padded)
    for count in range(CAPACITY + 1):
        cache.commit(count)
        assert cache.num_committed_blocks == count
        assert cache.physical_bytes == cache.physical_bytes_for(count)
        assert_count_is_backed(cache)
        assert cache.blocks_within(cache.physical_bytes) >= count
        nominal = count * cache.bytes_per_block
        # A granule a segment at most, and half of one at either end if unpadded.
        assert (
            0
            <= cache.physical_bytes - nominal
            < GRANULE * (len(cache.segments) * (1 if padded else 2))
        )


def test_growth_keeps_old_bytes_and_new_ones_read_zero(
    driver: FaultyHostDriver,
) -> None:
    cache = make_cache(driver, planned())
    cache.commit(3)
    fill(cache, 5)
    cache.commit(17)
    assert contents(cache, 0, 3) == {5}
    assert contents(cache, 3, 17) == {0}


@pytest.mark.parametrize("padded", [False, True])
def test_new_blocks_read_zero_even_where_someone_wrote_before_they_were_committed(
    driver: FaultyHostDriver, padded: bool
) -> None:
    cache = make_cache(driver, planned(), padded=padded)
    cache.commit(1)
    # Granules are mapped whole, so these writes beyond block 0 are possible.
    for mapping in mapped_ranges(cache):
        write(mapping.start, mapping.end - mapping.start, 9)
    fill(cache, 5)
    cache.commit(2)
    assert contents(cache, 0, 1) == {5}
    assert contents(cache, 1, 2) == {0}


def test_new_blocks_read_zero_on_a_device_whose_fresh_memory_does_not() -> None:
    driver = FaultyHostDriver(fresh_memory_is_zero=False)
    cache = make_cache(driver, planned())
    cache.commit(3)
    assert contents(cache, 0, 3) == {0}
    fill(cache, 5)
    cache.commit(4)
    assert contents(cache, 3, 4) == {0}
    cache.commit(9, defragment=True)
    assert contents(cache, 0, 9) == {0}
    cache.free()
    driver.assert_nothing_left()


def test_a_smaller_count_changes_nothing_unless_shrinking(
    driver: FaultyHostDriver,
) -> None:
    cache = make_cache(driver, planned())
    cache.commit(9)
    fill(cache, 5)
    driver.log.clear()
    cache.commit(4)
    cache.commit(0)
    assert driver.log == []
    assert cache.num_committed_blocks == 9
    cache.commit(4, shrink=True)
    assert cache.num_committed_blocks == 4
    assert cache.physical_bytes == cache.physical_bytes_for(4) == memfd_bytes()
    assert contents(cache, 0, 4) == {0}
    cache.commit(0, shrink=True)
    assert cache.num_committed_blocks == memfd_bytes() == 0


def test_shrinking_to_the_same_count_keeps_contents(driver: FaultyHostDriver) -> None:
    cache = make_cache(driver, planned())
    cache.commit(9)
    fill(cache, 5)
    cache.commit(9, shrink=True)
    assert contents(cache, 0, 9) == {5}


@pytest.mark.parametrize("make", [planned, hybrid, mixed])
@pytest.mark.parametrize("layout", [LBHNC, BLHNC])
def test_a_defragmenting_commit_of_any_count_backs_each_segment_by_one_chunk(
    driver: FaultyHostDriver,
    make: Callable[[int, KVCacheLayout], KVCacheConfig],
    layout: KVCacheLayout,
) -> None:
    cache = make_cache(driver, make(CAPACITY, layout), layout)
    for count in range(1, CAPACITY + 1):
        # Fragmented first, as by warm-up.
        cache.commit(0, shrink=True)
        for step in range(1, count + 1, 3):
            cache.commit(step)
        fill(cache, 5)
        cache.commit(count, defragment=True)
        assert cache.num_committed_blocks == count
        held = chunk_of_each_segment(cache)
        assert None not in held
        assert cache.segments_backed_by_one_chunk() == [True] * len(cache.segments)
        assert cache.physical_bytes == cache.physical_bytes_for(count)
        assert_count_is_backed(cache)


def test_a_defragmenting_commit_that_moves_memory_reads_zero(
    driver: FaultyHostDriver,
) -> None:
    cache = make_cache(driver, planned())
    cache.commit(2)
    cache.commit(9)
    fill(cache, 5)
    cache.commit(9, defragment=True)
    assert contents(cache, 0, 9) == {0}


def test_defragmenting_what_is_not_fragmented_touches_nothing(
    driver: FaultyHostDriver,
) -> None:
    cache = make_cache(driver, planned())
    cache.commit(9, defragment=True)
    fill(cache, 5)
    driver.log.clear()
    cache.commit(9, defragment=True)
    cache.commit(2, defragment=True)
    assert driver.log == []
    assert contents(cache, 0, 9) == {5}


def test_defragmenting_at_another_count_remaps(driver: FaultyHostDriver) -> None:
    cache = make_cache(driver, planned())
    cache.commit(9, defragment=True)
    fill(cache, 5)
    cache.commit(13, defragment=True)
    assert cache.num_chunks == 3
    assert contents(cache, 0, 13) == {0}
    cache.commit(4, defragment=True, shrink=True)
    assert cache.num_committed_blocks == 4
    assert cache.num_chunks == 3
    assert memfd_bytes() == cache.physical_bytes_for(4)


def test_growth_after_defragmenting_is_reported_as_fragmented(
    driver: FaultyHostDriver,
) -> None:
    cache = make_cache(driver, planned())
    cache.commit(4, defragment=True)
    cache.commit(9)
    assert cache.segments_backed_by_one_chunk() == [False] * 3
    assert chunk_of_each_segment(cache) == [None] * 3


def test_straddling_segments_of_an_unpadded_placement_are_reported(
    driver: FaultyHostDriver,
) -> None:
    # 24 blocks of 20 KiB are 7.5 granules: the second segment starts in the middle
    # of one, which then belongs to the first segment's chunk.
    cache = make_cache(driver, planned(), padded=False)
    cache.commit(CAPACITY, defragment=True)
    assert [chunk is not None for chunk in chunk_of_each_segment(cache)] == [
        True,
        False,
        True,
    ]
    assert cache.segments_backed_by_one_chunk() == [True, False, True]
    # Doing it again could not help, so it discards nothing.
    fill(cache, 5)
    cache.commit(CAPACITY, defragment=True)
    assert contents(cache, 0, CAPACITY) == {5}


def test_the_check_asks_the_driver_and_not_the_books(driver: FaultyHostDriver) -> None:
    cache = make_cache(driver, planned())
    cache.commit(9, defragment=True)
    segment = cache.segments[1]
    last = cache.address + segment.offset + segment.committed_bytes(9) - 1
    granule = last // GRANULE * GRANULE
    handle = driver.inner.create(GRANULE)
    # Behind the cache's back, one granule is remapped (and one unmapped).
    driver.inner.map(granule, GRANULE, handle)
    driver.inner.set_access(granule, GRANULE)
    assert cache.segments_backed_by_one_chunk() == [True, False, True]
    driver.inner.unmap(granule, GRANULE)
    driver.inner.release(handle)
    assert cache.segments_backed_by_one_chunk() == [True, False, True]
    del driver.log[:]
    driver.inner.unmap(cache.address, cache.size)
    assert cache.segments_backed_by_one_chunk() == [False] * 3
    _forget_mappings(driver, cache)


def _forget_mappings(driver: FaultyHostDriver, cache: ExtensibleKVCache) -> None:
    """Put chunks back so that giving them back finds what it expects."""
    for chunk in cache._reservation._memory.chunks:
        driver.inner.map(cache.address + chunk.start, chunk.size, chunk.handle)
    cache.free()


def test_102_blocks_stay_102(driver: FaultyHostDriver) -> None:
    """The reported case: 20 KiB pages, 32 layers, 2 MiB granules; rounding gives 0."""
    driver = FaultyHostDriver(HostVmmDriver())
    cache = make_cache(driver, planned(140, num_layers=32))
    cache.commit(102, defragment=True)
    assert cache.num_committed_blocks == 102
    assert cache.num_chunks == 32
    assert cache.segments_backed_by_one_chunk() == [True] * 32
    assert placement.rounded_blocks(cache.segments, 102, 2 << 20) == 0
    cache.free()
    driver.assert_nothing_left()


def test_commits_that_map_memory_are_counted_and_timed(
    driver: FaultyHostDriver,
) -> None:
    cache = make_cache(driver, planned())
    assert (cache.num_commits, cache.commit_seconds) == (0, 0)
    for call, counted in (
        (lambda: cache.commit(3), True),
        (lambda: cache.commit(3), False),  # nothing to do
        (lambda: cache.commit(11, defragment=True), True),
        (cache.release_physical, False),
        (cache.recommit, True),
        (lambda: cache.commit(5, shrink=True), True),
    ):
        commits, seconds = cache.num_commits, cache.commit_seconds
        call()
        assert cache.num_commits == commits + counted
        assert (cache.commit_seconds > seconds) == counted
    assert cache.num_commits == 4
    driver.fail(1)
    with pytest.raises(VmmError):
        cache.commit(20)
    assert cache.num_commits == 4
    cache.free()


def test_chunks_are_what_the_kernel_has_mapped(driver: FaultyHostDriver) -> None:
    cache = make_cache(driver, planned())
    assert cache.chunks == []
    cache.commit(11, defragment=True)
    assert cache.chunks == [(m.start, m.end - m.start) for m in mapped_ranges(cache)]
    assert len(cache.chunks) == cache.num_chunks == len(cache.segments)
    cache.free()


# --- Sleeping ----------------------------------------------------------------------


@pytest.mark.parametrize("defragment", [False, True])
def test_sleep_returns_every_byte_and_wake_up_maps_zeros_as_before(
    driver: FaultyHostDriver, defragment: bool
) -> None:
    cache = make_cache(driver, planned())
    cache.commit(11, defragment=defragment)
    views = cache.committed_views(planned(11), LBHNC)
    layout_before = [m[:2] for m in mapped_ranges(cache)]
    addresses = {name: view.data_ptr() for name, view in views.items()}
    fill(cache, 5)

    cache.release_physical()
    assert cache.is_released
    assert cache.num_committed_blocks == cache.physical_bytes == 0
    assert memfds() == []
    assert mapped_ranges(cache) == []
    # The addresses are still taken, so nothing else can appear under the views.
    assert all(m.access == "---p" for m in mappings(cache.address, cache.size))

    cache.recommit()
    assert not cache.is_released
    assert cache.num_committed_blocks == 11
    assert [m[:2] for m in mapped_ranges(cache)] == layout_before
    assert all(not view.any() for view in views.values())
    after = cache.committed_views(planned(11), LBHNC)
    assert {name: view.data_ptr() for name, view in after.items()} == addresses
    assert cache.segments_backed_by_one_chunk() == [True] * 3


def test_a_cache_defragmented_by_doing_nothing_wakes_up_defragmented(
    driver: FaultyHostDriver,
) -> None:
    # At capacity one chunk covers all segments at once, which is defragmented too.
    cache = make_cache(driver, planned())
    cache.commit(CAPACITY)
    cache.commit(CAPACITY, defragment=True)
    cache.release_physical()
    cache.recommit()
    assert cache.segments_backed_by_one_chunk() == [True] * 3


def test_sleeping_twice_is_sleeping_and_waking_without_sleep_an_error(
    driver: FaultyHostDriver,
) -> None:
    cache = make_cache(driver, planned())
    cache.commit(4)
    with pytest.raises(RuntimeError, match="use commit\\(\\)"):
        cache.recommit()
    cache.release_physical()
    cache.release_physical()
    cache.recommit()
    assert cache.num_committed_blocks == 4


def test_a_sleeping_cache_says_what_to_do(driver: FaultyHostDriver) -> None:
    cache = make_cache(driver, planned())
    cache.commit(4, defragment=True)
    cache.release_physical()
    for act in (
        lambda: cache.commit(5),
        lambda: cache.allocate(cache.size),
        lambda: cache.committed_views(planned(4), LBHNC),
        lambda: cache.full_views(planned(4), LBHNC),
        lambda: cache.connector_config(planned(4), LBHNC),
    ):
        with pytest.raises(RuntimeError, match="call recommit\\(\\) first"):
            act()
    assert cache.segments_backed_by_one_chunk() == [False] * 3
    cache.free()


def test_a_freed_cache_is_gone_and_says_so(driver: FaultyHostDriver) -> None:
    cache = make_cache(driver, planned())
    cache.commit(4)
    cache.free()
    driver.assert_nothing_left()
    cache.free()
    assert cache.num_committed_blocks == cache.physical_bytes == 0
    for act in (
        lambda: cache.commit(1),
        lambda: cache.allocate(cache.size),
        lambda: cache.committed_views(planned(4), LBHNC),
        cache.release_physical,
        cache.recommit,
    ):
        with pytest.raises(RuntimeError, match="has been freed; make a new one"):
            act()


def test_a_dropped_cache_goes_with_the_last_view(driver: FaultyHostDriver) -> None:
    cache = make_cache(driver, planned())
    cache.commit(4, defragment=True)
    views = cache.committed_views(planned(4), LBHNC)
    address, size = cache.address, cache.size
    del cache
    gc.collect()
    views.popitem()
    last = views.popitem()[1]
    views.clear()
    gc.collect()
    assert last.fill_(1).sum() == last.numel()
    assert [m for m in mappings(address, size) if m.is_chunk]
    del last
    gc.collect()
    driver.assert_nothing_left()


def test_two_caches_live_side_by_side(driver: FaultyHostDriver) -> None:
    first, second = make_cache(driver, planned()), make_cache(driver, planned())
    first.commit(3)
    second.commit(5, defragment=True)
    fill(first, 1)
    fill(second, 2)
    first.free()
    assert contents(second, 0, 5) == {2}
    second.free()


@dataclass(frozen=True)
class Holdings:
    """What this process holds, by the kernel."""

    resident: int
    address_space: int
    mappings: int
    descriptors: int

    @classmethod
    def now(cls) -> Holdings:
        gc.collect()
        return cls(
            resident(), address_space(), len(mappings(0, 1 << 64)), num_descriptors()
        )

    def assert_flat_since(self, before: Holdings) -> None:
        assert self.resident - before.resident < 8 << 20
        assert self.address_space - before.address_space < 8 << 20
        assert self.mappings - before.mappings < 10
        assert self.descriptors == before.descriptors


def test_a_thousand_lives_leave_nothing_behind() -> None:
    config, final = planned(), planned(9)

    def live() -> None:
        cache = make_cache(RoomyHostDriver(GRANULE), config)
        cache.allocate(cache.size)
        cache.commit(5)
        cache.commit(9, defragment=True)
        for view in cache.committed_views(final, LBHNC).values():
            view.fill_(1)
        cache.free()

    for _ in range(50):
        live()
    before = Holdings.now()
    for _ in range(1000):
        live()
    Holdings.now().assert_flat_since(before)
    assert memfds() == []
    assert chunk_mappings() == []


@pytest.mark.parametrize("defragment", [False, True])
def test_a_hundred_nights_leave_nothing_behind(defragment: bool) -> None:
    cache = make_cache(RoomyHostDriver(GRANULE), planned())
    cache.commit(3)
    cache.commit(11, defragment=defragment)
    views = cache.committed_views(planned(11), LBHNC)

    def sleep_and_wake() -> None:
        for view in views.values():
            view.fill_(1)
        cache.release_physical()
        assert memfds() == []
        cache.recommit()
        assert not any(view.any() for view in views.values())

    for _ in range(5):
        sleep_and_wake()
    before = Holdings.now()
    for _ in range(100):
        sleep_and_wake()
    Holdings.now().assert_flat_since(before)
    assert cache.physical_bytes == memfd_bytes() == cache.physical_bytes_for(11)
    cache.free()
    assert chunk_mappings() == []


def test_a_second_cache_lives_where_the_first_has_been(
    driver: FaultyHostDriver,
) -> None:
    for value in (1, 2):
        cache = make_cache(driver, planned())
        cache.commit(9, defragment=True)
        assert contents(cache, 0, 9) == {0}
        fill(cache, value)
        cache.free()
        driver.assert_nothing_left()


# --- Views -------------------------------------------------------------------------

KERNEL_BLOCKS = [None, [8]]


@pytest.mark.parametrize("layout", list(KVCacheLayout))
@pytest.mark.parametrize("make", [planned, hybrid])
def test_views_have_the_form_that_stock_gives_them(
    driver: FaultyHostDriver,
    layout: KVCacheLayout,
    make: Callable[[int, KVCacheLayout], KVCacheConfig],
) -> None:
    config = make(CAPACITY, layout)
    cache = make_cache(driver, config, layout, padded=False)
    cache.commit(CAPACITY)
    stock = allocate_kv_cache(config, CPU, layout)
    for views in (
        cache.committed_views(config, layout),
        cache.full_views(config, layout),
    ):
        assert list(views) == list(stock)
        for name, view in views.items():
            assert view.shape == stock[name].shape
            assert view.stride() == stock[name].stride()
            assert view.dtype == stock[name].dtype
            # Unpadded at capacity, the layers also lie where stock puts them.
            offset = stock[name].data_ptr() - stock[name].untyped_storage().data_ptr()
            assert view.data_ptr() - cache.address == offset


@pytest.mark.parametrize("layout", [LBHNC, KVCacheLayout.LBNHC])
@pytest.mark.parametrize("make", [planned, mixed])
def test_each_layer_of_a_layer_outermost_cache_has_a_storage_of_its_committed_bytes(
    driver: FaultyHostDriver,
    layout: KVCacheLayout,
    make: Callable[[int, KVCacheLayout], KVCacheConfig],
) -> None:
    cache = make_cache(driver, make(CAPACITY, layout), layout)
    cache.commit(7, defragment=True)
    views = cache.committed_views(make(7, layout), layout)
    stock = allocate_kv_cache(make(7, layout), CPU, layout)
    storages = {
        view.untyped_storage().data_ptr(): view.untyped_storage().nbytes()
        for view in views.values()
    }
    assert storages == {
        cache.address + segment.offset: segment.committed_bytes(7)
        for segment in cache.segments
    }
    for name, view in views.items():
        assert view.storage_offset() == 0
        assert view.shape == stock[name].shape
        assert view.stride() == stock[name].stride()
        view.fill_(1)
        assert view.sum() == view.numel()


def test_layers_that_alias_share_one_storage(driver: FaultyHostDriver) -> None:
    cache = make_cache(driver, hybrid(CAPACITY))
    cache.commit(7, defragment=True)
    views = cache.committed_views(hybrid(7), LBHNC)
    full, sliding = layer_names("full", 3), layer_names("sliding", 2)
    assert len(views) == 5
    for one, other in zip(full, sliding, strict=False):
        assert (
            views[one].untyped_storage()._cdata == views[other].untyped_storage()._cdata
        )
        views[one].fill_(4)
        assert (views[other] == 4).all()
    assert len({view.untyped_storage().data_ptr() for view in views.values()}) == 3


@pytest.mark.parametrize("layout", [BLHNC, KVCacheLayout.BLNHC, KVCacheLayout.BHLNC])
def test_block_outermost_layers_share_one_storage_of_the_committed_blocks(
    driver: FaultyHostDriver, layout: KVCacheLayout
) -> None:
    cache = make_cache(driver, planned(layout=layout), layout)
    cache.commit(7, defragment=True)
    views = cache.committed_views(planned(7, layout), layout)
    stock = allocate_kv_cache(planned(7, layout), CPU, layout)
    assert len({view.untyped_storage()._cdata for view in views.values()}) == 1
    for name, view in views.items():
        assert view.untyped_storage().nbytes() == 7 * 3 * PAGE
        assert view.untyped_storage().data_ptr() == cache.address
        assert view.shape == stock[name].shape
        assert view.stride() == stock[name].stride()
        assert view.storage_offset() == stock[name].storage_offset()


def test_views_at_capacity_share_one_storage_at_the_addresses_of_the_committed_ones(
    driver: FaultyHostDriver,
) -> None:
    cache = make_cache(driver, planned())
    cache.commit(2)
    # Captured graphs hold these; they must be right at every later count.
    captured = cache.full_views(planned(), LBHNC)
    assert len({view.untyped_storage()._cdata for view in captured.values()}) == 1
    assert all(len(view) == CAPACITY for view in captured.values())
    for view in captured.values():
        assert view.untyped_storage().nbytes() == cache.size
        view[:2] = 3
    cache.commit(9)
    views = cache.committed_views(planned(9), LBHNC)
    for name, view in views.items():
        assert view.data_ptr() == captured[name].data_ptr()
        assert (view[:2] == 3).all()
        assert not view[2:].any()
        view[8] = 1
        assert (captured[name][8] == 1).all()
    cache.commit(9, defragment=True)
    for name, view in captured.items():
        assert not view[:9].any()
        view[:9] = 2
        assert (views[name] == 2).all()


def test_lhbnc_can_be_viewed_when_all_of_it_is_committed(
    driver: FaultyHostDriver,
) -> None:
    config = planned(layout=LHBNC)
    cache = make_cache(driver, config, LHBNC, padded=False)
    cache.commit(CAPACITY - 1)
    with pytest.raises(ValueError, match=f"at its capacity only, {CAPACITY} blocks"):
        cache.committed_views(planned(CAPACITY - 1, LHBNC), LHBNC)
    with pytest.raises(ValueError, match="at its capacity only"):
        cache.connector_config(planned(CAPACITY - 1, LHBNC), LHBNC)
    cache.commit(CAPACITY)
    views = cache.committed_views(config, LHBNC)
    assert {view.untyped_storage().nbytes() for view in views.values()} == {cache.size}
    for view in views.values():
        view.fill_(1)


@pytest.mark.parametrize("layout", [LBHNC, BLHNC])
def test_kernel_blocks_divide_the_views_as_stock_divides_them(
    driver: FaultyHostDriver, layout: KVCacheLayout
) -> None:
    spec = attention_spec(block_size=32)
    config = plan_uniform(1, CAPACITY, layout, spec)
    cache = make_cache(driver, config, layout)
    cache.commit(7)
    final = plan_uniform(1, 7, layout, spec)
    stock = allocate_kv_cache(final, CPU, layout, [16])
    views = cache.committed_views(final, layout, [16])
    ((name, view),) = views.items()
    assert view.shape == stock[name].shape
    assert len(view) == 14
    assert view.stride() == stock[name].stride()
    # Encoder-only groups at the end have no entry in the list.
    (plain,) = cache.committed_views(final, layout, []).values()
    assert len(plain) == 7


def test_each_page_size_of_a_mixed_group_has_its_own_spec(
    driver: FaultyHostDriver,
) -> None:
    cache = make_cache(driver, mixed(CAPACITY))
    cache.commit(3)
    views = cache.committed_views(mixed(3), LBHNC)
    names = layer_names("mixed", 4)
    assert [views[name].shape[-1] for name in names] == [128, 160, 192, 128]


def raw_buffer_config(num_blocks: int, layout: KVCacheLayout) -> KVCacheConfig:
    """An attention layer and one that lays the buffer out by itself."""
    spec = attention_spec()
    block = 2 * PAGE
    block_outermost = layout.is_block_outermost
    tensors = [
        KVCacheTensor(
            size=num_blocks * block,
            layers=[name],
            layer_stride=PAGE if block_outermost else num_blocks * PAGE,
            block_stride=block if block_outermost else PAGE,
            offset=index * (PAGE if block_outermost else num_blocks * PAGE),
        )
        for index, name in enumerate(["attention", "raw"])
    ]
    groups = [
        KVCacheGroupSpec(["attention"], spec),
        KVCacheGroupSpec(["raw"], HiSparseResidentSpec(block_size=16, page_size=PAGE)),
    ]
    return KVCacheConfig(num_blocks, tensors, groups)


def test_a_layer_without_views_gets_the_whole_committed_storage(
    driver: FaultyHostDriver,
) -> None:
    cache = make_cache(driver, raw_buffer_config(CAPACITY, BLHNC), BLHNC)
    cache.commit(5)
    final = raw_buffer_config(5, BLHNC)
    views = cache.committed_views(final, BLHNC)
    stock = allocate_kv_cache(final, CPU, BLHNC)
    assert views["raw"].shape == stock["raw"].shape == (5 * 2 * PAGE,)
    assert (
        views["raw"].untyped_storage()._cdata
        == views["attention"].untyped_storage()._cdata
    )
    assert cache.full_views(final, BLHNC)["raw"].shape == (cache.size,)


def test_a_layer_without_views_needs_a_common_storage(driver: FaultyHostDriver) -> None:
    cache = make_cache(driver, raw_buffer_config(CAPACITY, LBHNC))
    cache.commit(5)
    with pytest.raises(ValueError, match="'raw' lays out the whole KV cache by itself"):
        cache.committed_views(raw_buffer_config(5, LBHNC), LBHNC)
    assert len(cache.full_views(raw_buffer_config(5, LBHNC), LBHNC)["raw"]) == (
        cache.size
    )


def test_views_of_something_else_are_refused(driver: FaultyHostDriver) -> None:
    cache = make_cache(driver, planned())
    with pytest.raises(RuntimeError, match="nothing committed"):
        cache.committed_views(planned(1), LBHNC)
    cache.commit(5)
    with pytest.raises(ValueError, match="has 6 blocks, but 5 are committed"):
        cache.committed_views(planned(6), LBHNC)
    with pytest.raises(ValueError, match="has 6 blocks, but 5 are committed"):
        cache.connector_config(planned(6), LBHNC)
    with pytest.raises(ValueError, match="layout LBHNC, not BLHNC"):
        cache.committed_views(planned(5, BLHNC), BLHNC)
    with pytest.raises(ValueError, match=r"'model\.layers\.3\.attn' is 20480 there"):
        cache.committed_views(planned(5, num_layers=4), LBHNC)
    other = plan_uniform(3, 5, LBHNC, attention_spec(head_size=128))
    with pytest.raises(ValueError, match="is 40960 there, 20480 here"):
        cache.full_views(other, LBHNC)
    ungrouped = planned(5)
    ungrouped.kv_cache_groups.clear()
    with pytest.raises(ValueError, match="in no KV cache group"):
        cache.committed_views(ungrouped, LBHNC)


# --- What connectors are told --------------------------------------------------------


def regions_of_cpu_offload(
    config: KVCacheConfig,
    views: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, torch.Tensor]:
    """What vLLM's SimpleCPUOffload worker would copy blocks from and to."""
    found: dict[str, torch.Tensor] = {}
    worker = offload.SimpleCPUOffloadWorker(
        None,  # type: ignore[arg-type]  # unused before transfers
        config,
        cpu_capacity_bytes=1 << 20,
    )
    monkeypatch.setattr(worker, "_init_cpu_mode", lambda gpu, *_: found.update(gpu))

    class NoStream:
        """There is no GPU for the copies that would follow."""

        def __init__(self, priority: int) -> None: ...

        @staticmethod
        def priority_range() -> tuple[int, int]:
            return 0, -1

    monkeypatch.setattr(torch.cuda, "Stream", NoStream)
    worker.register_kv_caches(views)
    return found


@pytest.mark.parametrize("make", [planned, hybrid, mixed])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("layout", [LBHNC, KVCacheLayout.LBNHC, BLHNC])
def test_a_connector_that_cuts_storages_finds_every_block_of_every_layer(
    driver: FaultyHostDriver,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[int, KVCacheLayout], KVCacheConfig],
    padded: bool,
    layout: KVCacheLayout,
) -> None:
    cache = make_cache(driver, make(CAPACITY, layout), layout, padded=padded)
    cache.commit(7, defragment=True)
    final = make(7, layout)
    original = copy.deepcopy(final)
    config = cache.connector_config(final, layout)
    assert final == original
    views = cache.committed_views(final, layout)
    regions = regions_of_cpu_offload(config, views, monkeypatch)
    # One region per segment, each of exactly the committed blocks.
    assert {region.data_ptr(): tuple(region.shape) for region in regions.values()} == {
        cache.address + segment.offset: (7, segment.block_stride)
        for segment in cache.segments
    }
    for block in range(7):
        for region in regions.values():
            region[block] = block + 1
    for view in views.values():
        for block in range(7):
            data = view[block].contiguous().view(torch.int8)
            assert (data == block + 1).all()


@pytest.mark.parametrize("make", [planned, hybrid, mixed])
@pytest.mark.parametrize("layout", [LBHNC, BLHNC])
def test_a_connector_reads_the_bytes_of_a_block_off_its_configuration(
    driver: FaultyHostDriver,
    make: Callable[[int, KVCacheLayout], KVCacheConfig],
    layout: KVCacheLayout,
) -> None:
    cache = make_cache(driver, make(CAPACITY, layout), layout)
    cache.commit(7)
    final = make(7, layout)
    config = cache.connector_config(final, layout)
    sizes = {tensor.size // config.num_blocks for tensor in config.kv_cache_tensors}
    assert sizes == {final.kv_cache_tensors[0].size // 7} == {cache.bytes_per_block}
    assert config.num_blocks == 7
    assert config.kv_cache_groups == final.kv_cache_groups
    assert [name for t in config.kv_cache_tensors for name in t.layers] == [
        name for t in final.kv_cache_tensors for name in t.layers
    ]


def test_lhbnc_at_capacity_describes_its_common_storage(
    driver: FaultyHostDriver,
) -> None:
    config = planned(layout=LHBNC)
    cache = make_cache(driver, config, LHBNC, padded=False)
    cache.commit(CAPACITY)
    told = cache.connector_config(config, LHBNC)
    assert told == config
    assert told.kv_cache_tensors[0].layers is not config.kv_cache_tensors[0].layers
