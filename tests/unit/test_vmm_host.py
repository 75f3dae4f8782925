"""The host driver against the kernel's own account of mappings and descriptors."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from vmm_probes import GRANULE, address_space, memfds

from vllm_kvpad import vmm
from vllm_kvpad.reservation import Reservation
from vllm_kvpad.vmm import (
    HostVmmDriver,
    VmmDriver,
    VmmError,
    VmmOutOfMemoryError,
    VmmUnsupportedError,
    get_driver,
)
from vllm_kvpad.vmm import host as host_module

MADV_DONTFORK = 10


def lines_of_maps(start: int, size: int) -> list[str]:
    """Lines of /proc/self/maps that share an address with the range."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(part, 16) for part in line.split()[0].split("-"))
        if low < start + size and high > start:
            found.append(line)
    return found


@pytest.fixture
def driver() -> HostVmmDriver:
    return HostVmmDriver(GRANULE)


@pytest.fixture
def base(driver: HostVmmDriver) -> Iterator[int]:
    """A reservation of 16 granules."""
    address = driver.reserve(16 * GRANULE)
    yield address
    driver.free_address(address, 16 * GRANULE)


def map_chunk(driver: VmmDriver, address: int, size: int) -> int:
    handle = driver.create(size)
    driver.map(address, size, handle)
    driver.set_access(address, size)
    return handle


def drop_chunk(driver: VmmDriver, address: int, size: int, handle: int) -> None:
    driver.unmap(address, size)
    driver.release(handle)


@pytest.mark.parametrize("granularity", [0, -4096, 3 << 20, 4097])
def test_a_granule_that_is_no_power_of_two_is_refused(granularity: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        HostVmmDriver(granularity)


def test_a_granule_below_a_page_is_refused_naming_the_page_size() -> None:
    with pytest.raises(ValueError, match=f"{mmap.PAGESIZE}-byte page"):
        HostVmmDriver(mmap.PAGESIZE // 2)


def test_the_default_granule_is_that_of_a_gpu() -> None:
    assert HostVmmDriver().granularity == 2 << 20


@pytest.mark.parametrize("granularity", [4 << 10, 64 << 10, 2 << 20, 64 << 20])
def test_a_reservation_starts_on_a_granule_and_holds_no_memory(
    granularity: int,
) -> None:
    driver = HostVmmDriver(granularity)
    size = 5 * granularity
    address = driver.reserve(size)
    assert address % granularity == 0
    assert all(line.split()[1] == "---p" for line in lines_of_maps(address, size))
    covered = sum(
        min(high, address + size) - max(low, address)
        for low, high in (
            (int(part, 16) for part in line.split()[0].split("-"))
            for line in lines_of_maps(address, size)
        )
    )
    assert covered == size
    driver.free_address(address, size)
    assert lines_of_maps(address, size) == []


def test_a_reservation_may_exceed_the_memory_of_the_machine() -> None:
    driver = HostVmmDriver()
    size = 1 << 42
    address = driver.reserve(size)
    driver.free_address(address, size)


def test_reserving_leaves_no_address_space_beside_the_range() -> None:
    # The range is over-reserved to align it; the ends must be given back.
    driver = HostVmmDriver(64 << 20)
    before = address_space()
    ranges = [driver.reserve(64 << 20) for _ in range(20)]
    assert address_space() - before <= 20 * (64 << 20) + (8 << 20)
    for address in ranges:
        driver.free_address(address, 64 << 20)
    assert address_space() - before <= 8 << 20


def test_a_chunk_is_one_mapping_of_one_memfd_and_reads_zero(
    driver: HostVmmDriver, base: int
) -> None:
    address, size = base + 3 * GRANULE, 2 * GRANULE
    handle = map_chunk(driver, address, size)
    (line,) = lines_of_maps(address, size)
    assert line.startswith(f"{address:x}-{address + size:x} rw-s 00000000")
    assert line.endswith("/memfd:kvpad (deleted)")
    tensor = driver.tensor(address, size)
    assert not tensor.any()
    tensor.fill_(7)
    driver.zero(address + 10, 20)
    driver.synchronize()
    assert not tensor[10:30].any()
    assert (tensor[:10] == 7).all()
    assert (tensor[30:] == 7).all()
    drop_chunk(driver, address, size, handle)
    (line,) = lines_of_maps(address, size)
    assert line.split()[1] == "---p"


def test_mapped_memory_is_accessible_only_after_access_is_set(
    driver: HostVmmDriver, base: int
) -> None:
    handle = driver.create(GRANULE)
    driver.map(base, GRANULE, handle)
    (line,) = [m for m in lines_of_maps(base, GRANULE) if "memfd" in m]
    assert line.split()[1] == "---s"
    driver.set_access(base, GRANULE)
    (line,) = [m for m in lines_of_maps(base, GRANULE) if "memfd" in m]
    assert line.split()[1] == "rw-s"
    drop_chunk(driver, base, GRANULE, handle)


def test_an_unmapped_address_faults_instead_of_reading_stale_bytes(
    driver: HostVmmDriver, base: int
) -> None:
    drop_chunk(driver, base, GRANULE, map_chunk(driver, base, GRANULE))
    child = os.fork()
    if child == 0:  # pragma: no cover - dies in the next line
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        ctypes.string_at(base, 1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGSEGV


def test_memory_is_really_taken_by_create_and_given_back_by_release(
    driver: HostVmmDriver, base: int
) -> None:
    size = 16 * GRANULE
    handle = driver.create(size)
    assert os.fstat(handle).st_blocks * 512 == size
    driver.map(base, size, handle)
    driver.release(handle)
    # Mapped memory outlives its descriptor; the mapping goes with unmap.
    assert lines_of_maps(base, size)[0].endswith("/memfd:kvpad (deleted)")
    driver.unmap(base, size)
    assert memfds() == []


def test_create_is_refused_rather_than_the_machine_run_out_of_memory(
    driver: HostVmmDriver,
) -> None:
    with pytest.raises(VmmOutOfMemoryError) as caught:
        driver.create(1 << 50)
    message = str(caught.value)
    assert "create" in message
    assert f"{1 << 50} bytes" in message
    assert "available" in message
    assert memfds() == []


def test_chunks_that_do_not_fit_together_are_refused_before_the_first_is_taken(
    driver: HostVmmDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostVmmDriver, "free_memory", lambda self: 3 * GRANULE)
    created: list[int] = []
    monkeypatch.setattr(HostVmmDriver, "create", lambda self, size: created.append(1))
    reservation = Reservation(driver, 8 * GRANULE)
    ranges = [(2 * i * GRANULE, (2 * i + 1) * GRANULE) for i in range(4)]
    for back in (
        lambda: reservation.grow(ranges),
        lambda: reservation.remap(ranges, one_chunk_each=True),
    ):
        with pytest.raises(VmmOutOfMemoryError, match=f"create of {4 * GRANULE} bytes"):
            back()
    assert created == []
    reservation.free()


def test_running_out_of_descriptors_is_named_with_what_to_do(
    driver: HostVmmDriver,
) -> None:
    reservation = Reservation(driver, 64 * GRANULE)
    ranges = [(i * GRANULE, (i + 1) * GRANULE) for i in range(64)]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 8, limits[1]))
    try:
        with pytest.raises(VmmError, match=r"Too many open files; .*ulimit -n") as e:
            reservation.remap(ranges, one_chunk_each=True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert e.type is VmmError
    assert memfds() == []
    reservation.free()


def test_create_that_the_kernel_refuses_leaves_no_descriptor(
    driver: HostVmmDriver,
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (GRANULE, limits[1]))
    try:
        with pytest.raises(VmmError, match=r"host create of 131072 bytes .* too large"):
            driver.create(2 * GRANULE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert memfds() == []


def test_memory_that_other_processes_need_is_not_counted_as_free(
    driver: HostVmmDriver,
) -> None:
    meminfo = Path("/proc/meminfo").read_text()
    total = int(meminfo.split("MemTotal:")[1].split()[0]) << 10
    assert 0 < driver.free_memory() < total


@pytest.mark.parametrize(
    ("membership", "root", "files"),
    [
        (
            "0::/pod/engine\n",
            "/sys/fs/cgroup",
            ("memory.max", "memory.current", "inactive_file"),
        ),
        (
            "4:cpu,memory:/pod/engine\n1:pids:/\n",
            "/sys/fs/cgroup/memory",
            (
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            ),
        ),
    ],
    ids=["v2", "v1"],
)
def test_the_tightest_control_group_bounds_free_memory(
    driver: HostVmmDriver,
    monkeypatch: pytest.MonkeyPatch,
    membership: str,
    root: str,
    files: tuple[str, str, str],
) -> None:
    limit, usage, cache = files
    system = {
        "/proc/meminfo": "MemTotal: 99999999 kB\nMemAvailable: 88888888 kB\n",
        "/proc/self/cgroup": membership,
        f"{root}/pod/engine/{limit}": "max\n",
        f"{root}/pod/engine/{usage}": "5\n",
        f"{root}/pod/{limit}": "1000000\n",
        f"{root}/pod/{usage}": "700000\n",
        f"{root}/pod/memory.stat": f"anon 1\n{cache} 50000\n",
    }
    monkeypatch.setattr(host_module, "_read", lambda path: system.get(str(path), ""))
    assert driver.free_memory() == 350_000


def test_backing_range_is_the_chunk_around_an_address(
    driver: HostVmmDriver, base: int
) -> None:
    first = map_chunk(driver, base, 2 * GRANULE)
    second = map_chunk(driver, base + 2 * GRANULE, GRANULE)
    assert driver.backing_range(base) == (base, 2 * GRANULE)
    assert driver.backing_range(base + 2 * GRANULE - 1) == (base, 2 * GRANULE)
    assert driver.backing_range(base + 2 * GRANULE) == (base + 2 * GRANULE, GRANULE)
    with pytest.raises(VmmError, match="no chunk is mapped"):
        driver.backing_range(base + 3 * GRANULE)
    drop_chunk(driver, base, 2 * GRANULE, first)
    drop_chunk(driver, base + 2 * GRANULE, GRANULE, second)


def test_backing_range_sees_one_chunk_where_the_kernel_lists_it_in_pieces(
    driver: HostVmmDriver, base: int
) -> None:
    # RDMA libraries do this to what they register.
    handle = map_chunk(driver, base, 4 * GRANULE)
    libc = ctypes.CDLL(None, use_errno=True)
    middle = ctypes.c_void_p(base + GRANULE)
    assert libc.madvise(middle, ctypes.c_size_t(GRANULE), MADV_DONTFORK) == 0
    assert len(lines_of_maps(base, 4 * GRANULE)) == 3
    for granule in range(4):
        assert driver.backing_range(base + granule * GRANULE) == (base, 4 * GRANULE)
    drop_chunk(driver, base, 4 * GRANULE, handle)


def test_memory_of_others_is_not_taken_for_a_chunk(driver: HostVmmDriver) -> None:
    with mmap.mmap(-1, GRANULE) as other:
        address = ctypes.addressof(ctypes.c_char.from_buffer(other))
        with pytest.raises(VmmError, match="no chunk is mapped"):
            driver.backing_range(address)


def test_a_tensor_spans_its_bytes_in_place_and_holds_what_it_needs(
    driver: HostVmmDriver, base: int
) -> None:
    class Owner:
        def __del__(self) -> None:
            dropped.append(True)

    dropped: list[bool] = []
    handle = map_chunk(driver, base, GRANULE)
    # Far more than is mapped: only the first byte has to be.
    tensor = driver.tensor(base, 16 * GRANULE - 5, keepalive=Owner())
    assert tensor.data_ptr() == base
    assert tensor.dtype == torch.int8
    assert tensor.untyped_storage().nbytes() == 16 * GRANULE - 5
    view = tensor[3:10]
    del tensor
    assert not dropped
    view.fill_(1)
    assert ctypes.string_at(base + 2, 2) == b"\0\1"
    del view
    assert dropped
    drop_chunk(driver, base, GRANULE, handle)


def test_a_refused_mapping_is_a_vmm_error_naming_call_and_size(
    driver: HostVmmDriver, base: int
) -> None:
    with pytest.raises(VmmError, match=rf"host map of {GRANULE} bytes"):
        driver.map(base, GRANULE, 1 << 20)
    with pytest.raises(VmmError, match="host release"):
        driver.release(1 << 20)
    with pytest.raises(VmmError, match="host set_access"):
        driver.set_access(base + 1, GRANULE)
    with pytest.raises(VmmError, match="host free_address"):
        driver.free_address(base + 1, GRANULE)


def test_each_device_gets_its_driver_or_the_reason_why_not() -> None:
    assert isinstance(get_driver("cpu"), HostVmmDriver)
    assert isinstance(get_driver(torch.device("cpu")), HostVmmDriver)
    with pytest.raises(VmmUnsupportedError, match="'meta' devices"):
        get_driver("meta")


def test_a_cuda_device_without_its_bindings_says_which_package_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cuda", None)
    with pytest.raises(VmmUnsupportedError, match="needs the package cuda-bindings"):
        get_driver("cuda:0")
    with pytest.raises(VmmUnsupportedError, match="cuda-bindings"):
        vmm.CudaVmmDriver(0)


def test_the_current_cuda_device_is_asked_for_only_if_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(VmmUnsupportedError, match="no CUDA device"):
        get_driver("cuda")


def test_a_rocm_device_is_not_taken_for_a_cuda_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(VmmUnsupportedError, match="ROCm"):
        get_driver("cuda:0")


def test_an_unknown_name_in_the_package_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Hip"):
        vmm.HipVmmDriver  # noqa: B018
