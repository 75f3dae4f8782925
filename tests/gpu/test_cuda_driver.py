"""The CUDA driver and the cache over it, checked against the CUDA driver itself.

Each test runs in a forked child: the other GPU tests fork too, which they can only
as long as this process has not touched the GPU.
"""

from __future__ import annotations

import functools
import gc
import multiprocessing
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import pytest
import torch
from faults import SCENARIOS, FaultyDriver, inject_everywhere

from vllm_kvpad import placement
from vllm_kvpad.kv_cache import ExtensibleKVCache
from vllm_kvpad.vmm import VmmDriver, VmmError, VmmOutOfMemoryError, get_driver

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from vllm_kvpad.vmm import CudaVmmDriver

DEVICE = "cuda:0"
MIB = 1 << 20
LAYERS = 8
CAPACITY = 310
PAGE = 20 << 10
"""Bytes of a layer's block; 102.4 of them make a granule of 2 MiB."""


def in_a_process(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in a forked child and raise what it raised."""

    def body(theirs: Connection, *args: Any, **kwargs: Any) -> None:
        outcome: tuple[str, str] = ("passed", "")
        try:
            test(*args, **kwargs)
        except pytest.skip.Exception as skipped:
            outcome = ("skipped", str(skipped))
        except BaseException:
            outcome = ("failed", traceback.format_exc())
        theirs.send(outcome)

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=body, args=(theirs, *args), kwargs=kwargs)
        child.start()
        theirs.close()
        try:
            outcome, why = ours.recv()
        except EOFError:
            outcome, why = "failed", "the child died without a word"
        child.join()
        if outcome == "skipped":
            pytest.skip(why)
        if outcome == "failed":
            pytest.fail(why, pytrace=False)
        assert child.exitcode == 0

    return run


def make_driver() -> CudaVmmDriver:
    driver: Any = get_driver(DEVICE)
    # What torch loads for the first use of a kernel stays on the device.
    for dtype in (torch.int8, torch.bfloat16):
        tensor = torch.zeros(1000, dtype=dtype, device=DEVICE)
        tensor.fill_(1).add_(1)
        assert tensor.any()
        assert (tensor == 2).all()
        assert tensor.sum(dtype=torch.int64) == 2000
    return driver


def free_memory(driver: CudaVmmDriver) -> int:
    """Bytes free on the device once torch keeps none in reserve."""
    gc.collect()
    driver.synchronize()
    torch.cuda.empty_cache()
    return driver.free_memory()


def planned(num_blocks: int, layout: KVCacheLayout | None = None) -> KVCacheConfig:
    """A model of equal layers as the engine core places it."""
    pytest.importorskip("vllm")
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheTensor,
        compute_layout_strides,
    )
    from vllm.v1.kv_cache_layout import KVCacheLayout

    layout = layout or KVCacheLayout.LBHNC
    spec = FullAttentionSpec(
        block_size=16, num_kv_heads=5, head_size=64, dtype=torch.bfloat16
    )
    assert spec.page_size_bytes == PAGE
    block_stride = LAYERS * PAGE if layout.is_block_outermost else None
    layer_stride, block_stride, *_ = compute_layout_strides(
        spec, num_blocks, LAYERS, layout, None, (None, block_stride, None, None, None)
    )
    names = [f"layers.{index}" for index in range(LAYERS)]
    tensor = KVCacheTensor(
        size=LAYERS * PAGE * num_blocks,
        layers=names,
        layer_stride=layer_stride,
        block_stride=block_stride,
    )
    return KVCacheConfig(num_blocks, [tensor], [KVCacheGroupSpec(names, spec)])


def layouts() -> type[KVCacheLayout]:
    from vllm.v1.kv_cache_layout import KVCacheLayout

    return KVCacheLayout


def make_cache(driver: VmmDriver, *, padded: bool = True) -> ExtensibleKVCache:
    config, layout = planned(CAPACITY), layouts().LBHNC
    if padded:
        config = placement.pad_kv_cache_segments(config, layout, driver.granularity)
    return ExtensibleKVCache(config, layout, DEVICE, driver)


def committed_views(cache: ExtensibleKVCache) -> dict[str, torch.Tensor]:
    return cache.committed_views(planned(cache.num_committed_blocks), layouts().LBHNC)


def chunks_of_each_segment(cache: ExtensibleKVCache) -> list[set[tuple[int, int]]]:
    """What cuMemGetAddressRange says of a segment's first, middle and last byte."""
    from cuda.bindings import driver as cuda

    found = []
    for segment in cache.segments:
        start = cache.address + segment.offset
        size = segment.committed_bytes(cache.num_committed_blocks)
        chunks = set()
        for address in (start, start + size // 2, start + size - 1):
            status, base, length = cuda.cuMemGetAddressRange(address)
            assert status == cuda.CUresult.CUDA_SUCCESS
            chunks.add((int(base), int(length)))
        found.append(chunks)
    return found


def assert_one_chunk_covers_each_segment(cache: ExtensibleKVCache) -> None:
    for segment, chunks in zip(
        cache.segments, chunks_of_each_segment(cache), strict=True
    ):
        ((base, length),) = chunks
        start = cache.address + segment.offset
        assert base <= start
        size = segment.committed_bytes(cache.num_committed_blocks)
        assert start + size <= base + length
    assert cache.segments_backed_by_one_chunk() == [True] * LAYERS


def assert_memory_is_back(driver: CudaVmmDriver, free_before: int) -> None:
    assert free_before - free_memory(driver) < LAYERS * driver.granularity


# --- The driver --------------------------------------------------------------------


@in_a_process
def test_the_driver_says_what_its_memory_can_do() -> None:
    driver = make_driver()
    assert driver.granularity % (64 << 10) == 0
    assert torch.cuda.get_device_name(0) in driver.description
    assert "GPUDirect RDMA" in driver.description
    assert not driver.fresh_memory_is_zero
    assert get_driver("cuda").description == driver.description


@in_a_process
def test_addresses_cost_no_memory() -> None:
    driver = make_driver()
    size = 1 << 40
    free = free_memory(driver)
    address = driver.reserve(size)
    assert address % driver.granularity == 0
    assert free - free_memory(driver) < driver.granularity
    driver.free_address(address, size)


@in_a_process
def test_a_chunk_is_memory_for_torch_and_goes_back() -> None:
    driver = make_driver()
    size = 16 * driver.granularity
    free = free_memory(driver)
    base = driver.reserve(2 * size)
    address = base + driver.granularity
    handle = driver.create(size)
    assert free - free_memory(driver) >= size
    driver.map(address, size, handle)
    driver.set_access(address, size)
    driver.zero(address, size)
    driver.synchronize()
    tensor = driver.tensor(address, size)
    assert tensor.dtype == torch.int8
    assert tensor.device == torch.device(DEVICE)
    assert tensor.data_ptr() == tensor.untyped_storage().data_ptr() == address
    assert tensor.untyped_storage().nbytes() == size
    assert not tensor.any()
    tensor[5:9] = 3
    assert tensor.sum(dtype=torch.int64) == 12
    assert driver.backing_range(address + size - 1) == (address, size)
    # Views may reach beyond what is mapped, as long as nobody touches it.
    assert driver.tensor(address, size + 12345).numel() == size + 12345
    del tensor
    driver.synchronize()
    driver.unmap(address, size)
    driver.release(handle)
    driver.free_address(base, 2 * size)
    assert free - free_memory(driver) < driver.granularity


@in_a_process
def test_zeroing_is_exact_to_the_byte() -> None:
    driver = make_driver()
    size = driver.granularity
    address = driver.reserve(size)
    handle = driver.create(size)
    driver.map(address, size, handle)
    driver.set_access(address, size)
    tensor = driver.tensor(address, size)
    tensor.fill_(7)
    driver.zero(address + 3, 1001)
    driver.synchronize()
    assert not tensor[3:1004].any()
    assert (tensor[:3] == 7).all()
    assert (tensor[1004:] == 7).all()


@in_a_process
def test_chunks_can_be_exported_as_far_as_the_description_says() -> None:
    from cuda.bindings import driver as cuda

    driver = make_driver()
    kinds = cuda.CUmemAllocationHandleType
    kind = next(
        kind
        for kind in (
            kinds.CU_MEM_HANDLE_TYPE_FABRIC,
            kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            kinds.CU_MEM_HANDLE_TYPE_NONE,
        )
        if driver.description.endswith(kind.name.removeprefix("CU_MEM_HANDLE_TYPE_"))
    )
    if kind == kinds.CU_MEM_HANDLE_TYPE_NONE:
        pytest.skip("this device exports no handles")
    handle = driver.create(driver.granularity)
    status, _ = cuda.cuMemExportToShareableHandle(
        cuda.CUmemGenericAllocationHandle(handle), kind, 0
    )
    assert status == cuda.CUresult.CUDA_SUCCESS
    driver.release(handle)


@in_a_process
def test_out_of_memory_names_call_size_and_free_memory() -> None:
    driver = make_driver()
    free = free_memory(driver)
    size = (free // driver.granularity + 1024) * driver.granularity
    with pytest.raises(VmmOutOfMemoryError) as caught:
        driver.create(size)
    message = str(caught.value)
    assert f"cuMemCreate of {size} bytes" in message
    assert "CUDA_ERROR_OUT_OF_MEMORY" in message
    assert "of memory free" in message
    assert free - free_memory(driver) < driver.granularity


@in_a_process
def test_other_errors_are_not_taken_for_lack_of_memory() -> None:
    driver = make_driver()
    address = driver.reserve(2 * driver.granularity)
    handle = driver.create(driver.granularity)
    with pytest.raises(VmmError, match="cuMemMap") as caught:
        driver.map(address, 2 * driver.granularity, handle)  # more than there is
    assert not isinstance(caught.value, VmmOutOfMemoryError)
    with pytest.raises(VmmError, match="cuMemGetAddressRange"):
        driver.backing_range(1 << 20)
    driver.release(handle)
    driver.free_address(address, 2 * driver.granularity)


@in_a_process
def test_a_thread_without_a_context_can_free() -> None:
    driver = make_driver()
    free = free_memory(driver)
    cache = make_cache(driver)
    cache.commit(CAPACITY)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            cache.free()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failures == []
    assert_memory_is_back(driver, free)


@in_a_process
def test_torchs_current_device_stays_what_it_was() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    torch.cuda.set_device(1)
    cache = make_cache(make_driver())
    cache.commit(3)
    assert torch.cuda.current_device() == 1
    assert committed_views(cache)["layers.0"].device == torch.device(DEVICE)


# --- The cache ---------------------------------------------------------------------


@in_a_process
def test_a_defragmented_segment_is_one_chunk_at_its_first_middle_and_last_byte() -> (
    None
):
    driver = make_driver()
    cache = make_cache(driver)
    for count in (1, 102, 103, 205, 307, CAPACITY):
        cache.commit(0, shrink=True)
        cache.commit(max(1, count // 2))
        cache.commit(count)
        cache.commit(count, defragment=True)
        assert cache.num_committed_blocks == count
        assert cache.num_chunks <= LAYERS
        assert cache.physical_bytes == cache.physical_bytes_for(count)
        assert_one_chunk_covers_each_segment(cache)
    cache.free()


@in_a_process
def test_fragmented_and_straddling_segments_are_reported() -> None:
    driver = make_driver()
    cache = make_cache(driver)
    cache.commit(50)
    cache.commit(250)
    assert all(len(chunks) > 1 for chunks in chunks_of_each_segment(cache))
    assert not any(cache.segments_backed_by_one_chunk())
    cache.free()
    unpadded = make_cache(driver, padded=False)
    unpadded.commit(CAPACITY, defragment=True)
    by_driver = [len(chunks) == 1 for chunks in chunks_of_each_segment(unpadded)]
    assert unpadded.segments_backed_by_one_chunk() == by_driver
    assert not all(by_driver)
    unpadded.free()


@in_a_process
def test_views_stay_valid_as_the_cache_grows_and_new_blocks_read_zero() -> None:
    driver = make_driver()
    # Memory that was somebody's: fresh chunks must not show it.
    rubbish = make_cache(driver)
    rubbish.commit(CAPACITY)
    for view in committed_views(rubbish).values():
        view.fill_(9)
    rubbish.free()

    cache = make_cache(driver)
    cache.commit(50)
    early = committed_views(cache)
    # Granules are mapped whole: written to beyond the committed blocks, too.
    for view in cache.full_views(planned(CAPACITY), layouts().LBHNC).values():
        assert not view[:50].any()
        view[:100] = 5
    cache.commit(280)
    late = committed_views(cache)
    for name, view in early.items():
        assert late[name].data_ptr() == view.data_ptr()
        assert (view == 5).all()
        assert (late[name][:50] == 5).all()
        assert not late[name][50:].any()
        view.fill_(6)
        assert (late[name][:50] == 6).all()
        assert late[name].untyped_storage().nbytes() == 280 * PAGE
    cache.commit(280, defragment=True)
    assert all(not view.any() for view in late.values())
    cache.free()


@in_a_process
def test_a_graph_captured_at_capacity_is_right_after_growth_and_sleep() -> None:
    driver = make_driver()
    cache = make_cache(driver)
    cache.commit(8)
    views = cache.full_views(planned(CAPACITY), layouts().LBHNC)
    block = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    one = torch.ones(1, 5, 16, 128, dtype=torch.bfloat16, device=DEVICE)

    def step() -> None:
        for view in views.values():
            view.index_add_(0, block, one)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay_at(index: int) -> None:
        block.fill_(index)
        graph.replay()
        torch.cuda.synchronize()
        for view in committed_views(cache).values():
            assert (view[index] == 1).all()

    replay_at(7)
    cache.commit(CAPACITY - 1)
    replay_at(CAPACITY - 2)
    cache.commit(CAPACITY, defragment=True)
    replay_at(CAPACITY - 1)
    cache.release_physical()
    cache.recommit()
    replay_at(200)
    assert_one_chunk_covers_each_segment(cache)
    cache.free()


@in_a_process
def test_remapping_waits_for_kernels_of_every_stream() -> None:
    driver = make_driver()
    cache = make_cache(driver)
    cache.commit(CAPACITY - 1)
    view = committed_views(cache)["layers.7"]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        view.fill_(4)
    cache.commit(CAPACITY, defragment=True)
    # An access to unmapped memory would have ended the context; a late one would
    # show in memory that has to read zero.
    torch.cuda.synchronize()
    assert not committed_views(cache)["layers.7"].any()
    cache.free()


@in_a_process
def test_blocks_outermost_is_one_segment_in_one_chunk() -> None:
    driver = make_driver()
    layout = layouts().BLHNC
    cache = ExtensibleKVCache(planned(CAPACITY, layout), layout, DEVICE, driver)
    cache.commit(77, defragment=True)
    assert cache.num_chunks == 1
    assert [len(chunks) for chunks in chunks_of_each_segment(cache)] == [1]
    views = cache.committed_views(planned(77, layout), layout)
    assert len({view.untyped_storage().data_ptr() for view in views.values()}) == 1
    for view in views.values():
        view.fill_(1)
    torch.cuda.synchronize()
    cache.free()


@in_a_process
def test_sleep_returns_the_memory_to_the_driver() -> None:
    driver = make_driver()
    free = free_memory(driver)
    cache = make_cache(driver)
    cache.commit(CAPACITY, defragment=True)
    held = cache.physical_bytes
    assert free - free_memory(driver) >= held
    for view in committed_views(cache).values():
        view.fill_(3)
    cache.release_physical()
    assert_memory_is_back(driver, free)
    cache.recommit()
    assert cache.physical_bytes == held
    assert_one_chunk_covers_each_segment(cache)
    assert all(not view.any() for view in committed_views(cache).values())
    cache.free()
    assert_memory_is_back(driver, free)


@in_a_process
def test_many_cycles_leave_no_memory_behind() -> None:
    driver = make_driver()
    free = free_memory(driver)
    for _ in range(50):
        cache = make_cache(driver)
        cache.allocate(cache.size)
        cache.commit(100)
        cache.commit(CAPACITY, defragment=True)
        cache.commit(30, shrink=True)
        cache.release_physical()
        cache.recommit()
        cache.free()
    assert_memory_is_back(driver, free)


@in_a_process
def test_a_dropped_cache_goes_with_its_last_view() -> None:
    driver = make_driver()
    free = free_memory(driver)
    cache = make_cache(driver)
    cache.commit(CAPACITY)
    views = committed_views(cache)
    del cache
    gc.collect()
    assert free - free_memory(driver) >= CAPACITY * LAYERS * PAGE
    assert views["layers.3"].fill_(1).sum(dtype=torch.int64) == CAPACITY * PAGE // 2
    views.clear()
    gc.collect()
    assert_memory_is_back(driver, free)


@in_a_process
def test_a_commit_beyond_free_memory_changes_nothing() -> None:
    driver = make_driver()
    free = free_memory(driver)
    cache = make_cache(driver)
    cache.commit(100)
    for view in committed_views(cache).values():
        view.fill_(5)
    # Growing needs 24 granules; somebody else takes all but 8.
    granules = free_memory(driver) // driver.granularity
    hoard = driver.create((granules - 8) * driver.granularity)
    with pytest.raises(VmmOutOfMemoryError):
        cache.commit(CAPACITY)
    assert cache.num_committed_blocks == 100
    driver.release(hoard)
    assert all((view == 5).all() for view in committed_views(cache).values())
    cache.commit(CAPACITY)
    assert cache.num_committed_blocks == CAPACITY
    cache.free()
    assert_memory_is_back(driver, free)


@dataclass(frozen=True)
class CudaWorld:
    """A cache on the GPU, with the GPU's free memory as witness."""

    driver: CudaVmmDriver
    free_before: int

    def make_driver(self) -> FaultyDriver:
        return FaultyDriver(self.driver, fresh_memory_is_zero=False, defer_zeros=False)

    def make_cache(self, driver: FaultyDriver) -> ExtensibleKVCache:
        return make_cache(driver)

    def check(self, cache: ExtensibleKVCache, driver: FaultyDriver) -> None:
        assert cache.physical_bytes == driver.held_bytes
        if cache.num_committed_blocks:
            for view in committed_views(cache).values():
                view.add_(0)
        # Access to what is not mapped would end the context here.
        torch.cuda.synchronize()

    def check_nothing_left(self, driver: FaultyDriver) -> None:
        assert_memory_is_back(self.driver, self.free_before)


@pytest.mark.parametrize("name", SCENARIOS)
@in_a_process
def test_a_fault_at_any_driver_call_loses_and_leaks_nothing(name: str) -> None:
    driver = make_driver()
    world = CudaWorld(driver, free_memory(driver))
    modes = ("this call", "this and all that follow")
    failures = inject_everywhere(SCENARIOS[name], world, modes, ["repeat", "free"])
    assert failures >= 2 * len(modes)


@in_a_process
def test_the_interpreter_exits_cleanly_with_views_alive() -> None:
    program = (
        "import torch\n"
        "from vllm_kvpad.reservation import Reservation\n"
        "from vllm_kvpad.vmm import get_driver\n"
        f"driver = get_driver({DEVICE!r})\n"
        "reservation = Reservation(driver, 1 << 30)\n"
        "reservation.grow([(0, 1 << 26)])\n"
        "view = driver.tensor(reservation.address, 1 << 26, keepalive=reservation)\n"
        "view.fill_(1)\n"
        "torch.cuda.synchronize()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr
