"""What tests of kvpad's memory share: the kernel's account of it, and faults.

The kernel is asked directly (``/proc/self``), not through the code under test.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vllm_kvpad.vmm import HostVmmDriver, VmmDriver, VmmError

GRANULE = 64 << 10


class Mapping(NamedTuple):
    """One line of /proc/self/maps."""

    start: int
    end: int
    access: str
    inode: int
    path: str

    @property
    def is_chunk(self) -> bool:
        return "memfd:kvpad" in self.path


def mappings(start: int, size: int) -> list[Mapping]:
    """Mappings of this process that share an address with the range, in order."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    found = []
    # In order of address: the last that starts at or before the range, and on.
    for line in lines[max(0, bisect.bisect_right(lines, start, key=_start) - 1) :]:
        span, access, _, _, inode, *path = line.split(maxsplit=5)
        low, high = (int(part, 16) for part in span.split("-"))
        if low >= start + size:
            break
        if high > start:
            found.append(Mapping(low, high, access, int(inode), "".join(path)))
    return found


def _start(line: str) -> int:
    return int(line[: line.index("-")], 16)


def chunk_mappings() -> list[Mapping]:
    """Mappings of kvpad's memory anywhere in this process."""
    return [mapping for mapping in mappings(0, 1 << 64) if mapping.is_chunk]


def memfds() -> list[str]:
    """Descriptors of this process that are kvpad's memory."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the descriptor that listed the folder
            continue
        if "memfd:kvpad" in target:
            found.append(name)
    return found


def memfd_bytes() -> int:
    """Bytes of physical memory in kvpad's memfds."""
    return sum(os.fstat(int(name)).st_blocks * 512 for name in memfds())


def address_space() -> int:
    """Bytes of address space this process uses."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


def resident_private() -> int:
    """Bytes of anonymous memory this process keeps in RAM."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    assert found is not None
    return int(found.group(1)) << 10


def is_accessible(start: int, end: int) -> bool:
    """Whether the process can read and write every byte from start to end."""
    position = start
    for mapping in mappings(start, end - start) if end > start else ():
        if mapping.start > position or mapping.access[:2] != "rw":
            return False
        position = mapping.end
    return position >= end


def read(address: int, num_bytes: int) -> bytes:
    return ctypes.string_at(address, num_bytes)


def write(address: int, num_bytes: int, value: int) -> None:
    ctypes.memset(address, value, num_bytes)


class FaultyDriver(VmmDriver):
    """A real driver that fails calls on request, before they reach the system.

    Args:
        inner: The driver that does the work.
        fresh_memory_is_zero: What to claim of fresh memory. Claiming that it is not
            zero makes it so: it is filled with rubbish.
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
        self, inner: VmmDriver | None = None, *, fresh_memory_is_zero: bool = True
    ) -> None:
        self.inner = HostVmmDriver(GRANULE) if inner is None else inner
        self.log: list[str] = []
        self.ranges: dict[int, int] = {}
        self.handles: set[int] = set()
        self._fresh_memory_is_zero = fresh_memory_is_zero
        self._calls_until_fault = 0
        self._faults_left = 0
        self.faults = 0

    def fail(self, nth: int, times: int = 1) -> None:
        """Fail the ``nth`` call from now (1: the next), and ``times - 1`` after it."""
        self._calls_until_fault = nth
        self._faults_left = times
        self.faults = 0

    def heal(self) -> None:
        """Fail no more."""
        self._faults_left = 0

    def _call(self, name: str, work: Callable[..., Any], *args: Any) -> Any:
        assert name in self.CALLS
        self._calls_until_fault -= 1
        if self._calls_until_fault <= 0 and self._faults_left > 0:
            self._faults_left -= 1
            self.faults += 1
            raise VmmError(f"injected: {name} of {args}")
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

    def reserve(self, size: int) -> int:
        address: int = self._call("reserve", self.inner.reserve, size)
        self.ranges[address] = size
        return address

    def free_address(self, address: int, size: int) -> None:
        self._call("free_address", self.inner.free_address, address, size)
        assert self.ranges.pop(address) == size

    def create(self, size: int) -> int:
        handle: int = self._call("create", self.inner.create, size)
        self.handles.add(handle)
        return handle

    def map(self, address: int, size: int, handle: int) -> None:
        # CUDA refuses to map over a mapping; the host would silently replace it.
        assert not any(m.is_chunk for m in mappings(address, size))
        self._call("map", self.inner.map, address, size, handle)

    def set_access(self, address: int, size: int) -> None:
        self._call("set_access", self.inner.set_access, address, size)
        if not self._fresh_memory_is_zero:
            write(address, size, 0xAA)

    def unmap(self, address: int, size: int) -> None:
        # CUDA unmaps exactly what one call mapped, and never waits for kernels.
        assert [m[:2] for m in mappings(address, size)] == [(address, address + size)]
        self._call("unmap", self.inner.unmap, address, size)

    def release(self, handle: int) -> None:
        self._call("release", self.inner.release, handle)
        self.handles.remove(handle)

    def zero(self, address: int, num_bytes: int) -> None:
        assert is_accessible(address, address + num_bytes)
        self._call("zero", self.inner.zero, address, num_bytes)

    def synchronize(self) -> None:
        self._call("synchronize", self.inner.synchronize)

    def backing_range(self, address: int) -> tuple[int, int]:
        return self.inner.backing_range(address)

    def tensor(
        self, address: int, num_bytes: int, keepalive: object = None
    ) -> torch.Tensor:
        return self.inner.tensor(address, num_bytes, keepalive)

    def free_memory(self) -> int:
        return self.inner.free_memory()

    def assert_nothing_left(self) -> None:
        """Every range and handle is gone, by the books and by the kernel."""
        assert self.ranges == {}
        assert self.handles == set()
        assert memfds() == []
        assert chunk_mappings() == []
