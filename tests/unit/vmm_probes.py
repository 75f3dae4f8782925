"""The kernel's account of kvpad's memory, for tests.

The kernel is asked directly (``/proc/self``), not through the code under test.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os
import re
from pathlib import Path
from typing import NamedTuple

from faults import FaultyDriver

from vllm_kvpad.vmm import HostVmmDriver

GRANULE = 64 << 10
_CHUNK = "memfd:kvpad"


class Mapping(NamedTuple):
    """One line of /proc/self/maps."""

    start: int
    end: int
    access: str
    inode: int
    path: str

    @classmethod
    def parse(cls, line: str) -> Mapping:
        span, access, _, _, inode, *path = line.split(maxsplit=5)
        low, high = (int(part, 16) for part in span.split("-"))
        return cls(low, high, access, int(inode), "".join(path))

    @property
    def is_chunk(self) -> bool:
        return _CHUNK in self.path


def mappings(start: int, size: int) -> list[Mapping]:
    """Mappings of this process that share an address with the range, in order."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    found = []
    # In order of address: the last that starts at or before the range, and on.
    for line in lines[max(0, bisect.bisect_right(lines, start, key=_start) - 1) :]:
        mapping = Mapping.parse(line)
        if mapping.start >= start + size:
            break
        if mapping.end > start:
            found.append(mapping)
    return found


def _start(line: str) -> int:
    return int(line[: line.index("-")], 16)


def chunk_mappings() -> list[Mapping]:
    """Mappings of kvpad's memory anywhere in this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [Mapping.parse(line) for line in lines if _CHUNK in line]


def memfds() -> list[str]:
    """Descriptors of this process that are kvpad's memory."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the descriptor that listed the folder
            continue
        if _CHUNK in target:
            found.append(name)
    return found


def memfd_bytes() -> int:
    """Bytes of physical memory in kvpad's memfds."""
    return sum(os.fstat(int(name)).st_blocks * 512 for name in memfds())


def address_space() -> int:
    """Bytes of address space this process uses."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


def resident() -> int:
    """Bytes of memory that this process has in RAM: VmRSS."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return int(found.group(1)) << 10


def num_descriptors() -> int:
    """Open descriptors of this process, whatever they are."""
    return len(os.listdir("/proc/self/fd"))


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


class RoomyHostDriver(HostVmmDriver):
    """The host driver, without asking before each chunk whether there is room.

    That reads some twenty files of the kernel's, which takes longer than the chunk.
    """

    def free_memory(self) -> int:
        return 1 << 40


class FaultyHostDriver(FaultyDriver):
    """A :class:`FaultyDriver` of host memory, whose books the kernel confirms.

    Args:
        inner: The driver that does the work; by default one with small granules.
        fresh_memory_is_zero: As for :class:`FaultyDriver`.
    """

    def __init__(
        self,
        inner: HostVmmDriver | None = None,
        *,
        fresh_memory_is_zero: bool = True,
    ) -> None:
        super().__init__(
            RoomyHostDriver(GRANULE) if inner is None else inner,
            fresh_memory_is_zero=fresh_memory_is_zero,
        )

    def assert_kernel_agrees(self) -> None:
        """What is mapped and accessible, and which descriptors are open."""
        found = chunk_mappings()
        sizes = {mapping.start: mapping.end - mapping.start for mapping in found}
        assert sizes == dict(self.mapped_sizes())
        usable = {mapping.start for mapping in found if mapping.access[:2] == "rw"}
        assert usable == set(self.accessible)
        assert {int(name) for name in memfds()} == set(self.handles)
        assert memfd_bytes() == self.held_bytes

    def assert_nothing_left(self) -> None:
        """Every range and handle is gone, by the books and by the kernel."""
        super().assert_nothing_left()
        assert memfds() == []
        assert chunk_mappings() == []
