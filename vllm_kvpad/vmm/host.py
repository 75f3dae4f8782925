"""Host memory with the placement rules of a GPU: memfd chunks in one range.

A chunk is a memfd mapped ``MAP_SHARED`` at a fixed place in a ``PROT_NONE``
reservation. The granule is configurable and 2 MiB by default, so that a machine
without a GPU meets exactly the problem that a GPU has.

After ``fork`` a child shares these pages: they stay allocated until it exits or
executes another program, and what it writes the parent sees. ``MADV_DONTFORK``
would avoid that but take the mappings from a child that was forked to serve
them. vLLM starts its workers before they have a cache, and the descriptors are
close-on-exec, so nothing is done about it here beyond not freeing on behalf of
another process (see :mod:`vllm_kvpad.reservation`).
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import functools
import mmap
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from vllm_kvpad.vmm.base import (
    VmmDriver,
    VmmError,
    VmmOutOfMemoryError,
    VmmUnsupportedError,
    format_bytes,
)

if TYPE_CHECKING:
    import torch

DEFAULT_GRANULARITY = 2 << 20

_MEMFD_NAME = "kvpad"
_MEMFD = f"memfd:{_MEMFD_NAME}"

# Constants of <sys/mman.h> on Linux that the mmap module lacks in Python 3.11.
_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value

_RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE

_OUT_OF_MEMORY = {errno.ENOMEM, errno.ENOSPC}
_TOO_MANY_FILES = {errno.EMFILE, errno.ENFILE}
_MORE_FILES = "each chunk takes a file descriptor: raise the limit (ulimit -n)"


class _Mapping(NamedTuple):
    """A line of /proc/self/maps."""

    start: int
    end: int
    file_offset: int
    file_id: tuple[str, str]
    path: str

    @classmethod
    def parse(cls, line: str) -> _Mapping:
        span, _, file_offset, device, inode, *path = line.split(maxsplit=5)
        start, end = (int(part, 16) for part in span.split("-"))
        file_id = device, inode
        return cls(start, end, int(file_offset, 16), file_id, "".join(path))

    def continues_in(self, above: _Mapping) -> bool:
        """Whether both are parts of one mapping of a file."""
        return (
            self.file_id == above.file_id
            and self.end == above.start
            and self.file_offset + self.end - self.start == above.file_offset
        )


def _start_address(line: str) -> int:
    return int(line[: line.index("-")], 16)


class HostVmmDriver(VmmDriver):
    """The :class:`VmmDriver` of main memory on Linux.

    Args:
        granularity: Bytes in a granule; a power of two and a multiple of the
            page size of the system.

    Raises:
        ValueError: ``granularity`` is neither.
        VmmUnsupportedError: The system has no memfd.
    """

    def __init__(self, granularity: int = DEFAULT_GRANULARITY) -> None:
        if granularity <= 0 or granularity & (granularity - 1):
            raise ValueError(
                f"a granule must be a power of two, got {granularity} bytes"
            )
        if granularity % mmap.PAGESIZE:
            raise ValueError(
                f"a granule must be a multiple of the {mmap.PAGESIZE}-byte page, "
                f"got {granularity} bytes"
            )
        if not hasattr(os, "memfd_create"):
            raise VmmUnsupportedError(
                "the host driver needs Linux's memfd_create, which this system lacks"
            )
        self._granularity = granularity

    @property
    def granularity(self) -> int:
        return self._granularity

    @property
    def description(self) -> str:
        return f"host memory (memfd), granule {format_bytes(self._granularity)}"

    @property
    def fresh_memory_is_zero(self) -> bool:
        return True

    def reserve(self, size: int) -> int:
        # mmap aligns to a page only: take a granule more and give back both ends.
        spare = self._granularity
        start = self._mmap("reserve", None, size + spare, _PROT_NONE, _RESERVED)
        base = -(-start // spare) * spare
        try:
            if base > start:
                self._munmap("reserve", start, base - start)
            self._munmap("reserve", base + size, start + spare - base)
        except VmmError:
            _libc().munmap(start, size + spare)
            raise
        return base

    def free_address(self, address: int, size: int) -> None:
        self._munmap("free_address", address, size)

    def check_available(self, num_bytes: int) -> None:
        # Linux answers a request that it cannot serve by killing a process; refuse
        # before it comes to that.
        if num_bytes > self.free_memory():
            self._fail("create", num_bytes, errno.ENOMEM)

    def create(self, size: int) -> int:
        self.check_available(size)
        fd = -1
        try:
            fd = os.memfd_create(_MEMFD_NAME, os.MFD_CLOEXEC)
            # Without it memory is found missing by SIGBUS, at the first touch.
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            self._fail("create", size, error.errno or 0)
        return fd

    def map(self, address: int, size: int, handle: int) -> None:
        flags = mmap.MAP_SHARED | _MAP_FIXED
        self._mmap("map", address, size, _PROT_NONE, flags, handle)

    def set_access(self, address: int, size: int) -> None:
        access = mmap.PROT_READ | mmap.PROT_WRITE
        if _libc().mprotect(address, size, access):
            self._fail("set_access", size, ctypes.get_errno())

    def unmap(self, address: int, size: int) -> None:
        self._mmap("unmap", address, size, _PROT_NONE, _RESERVED | _MAP_FIXED)

    def release(self, handle: int) -> None:
        try:
            os.close(handle)
        except OSError as error:
            self._fail("release", None, error.errno or 0)

    def zero(self, address: int, num_bytes: int) -> None:
        ctypes.memset(address, 0, num_bytes)

    def synchronize(self) -> None:
        """Return at once: the host runs nothing behind the caller's back."""

    def backing_range(self, address: int) -> tuple[int, int]:
        lines = Path("/proc/self/maps").read_text().splitlines()
        index = bisect.bisect_right(lines, address, key=_start_address) - 1
        found = _Mapping.parse(lines[max(0, index)])
        if not found.start <= address < found.end or _MEMFD not in found.path:
            raise VmmError(f"no chunk is mapped at address {address:#x}")
        # The kernel shows one mapping on several lines after, say, a madvise of a
        # part of it; it is still the one allocation.
        first = last = found
        for line in reversed(lines[:index]):
            below = _Mapping.parse(line)
            if not below.continues_in(first):
                break
            first = below
        for line in lines[index + 1 :]:
            above = _Mapping.parse(line)
            if not last.continues_in(above):
                break
            last = above
        return first.start, last.end - first.start

    def tensor(
        self, address: int, num_bytes: int, keepalive: object = None
    ) -> torch.Tensor:
        import torch

        buffer = (ctypes.c_int8 * num_bytes).from_address(address)
        # The storage holds the buffer, so the buffer can hold what must outlive it.
        buffer.keepalive = keepalive  # type: ignore[attr-defined]
        return torch.frombuffer(buffer, dtype=torch.int8)

    def free_memory(self) -> int:
        """Bytes available, by the system or by this process's control group."""
        return min(_available_to_system(), *_available_to_cgroups())

    def _mmap(
        self,
        call: str,
        address: int | None,
        size: int,
        access: int,
        flags: int,
        fd: int = -1,
    ) -> int:
        result: int | None = _libc().mmap(address, size, access, flags, fd, 0)
        if result is None or result == _MAP_FAILED:
            self._fail(call, size, ctypes.get_errno())
        return result

    def _munmap(self, call: str, address: int, size: int) -> None:
        if _libc().munmap(address, size):
            self._fail(call, size, ctypes.get_errno())

    def _fail(self, call: str, size: int | None, code: int) -> NoReturn:
        kind = VmmOutOfMemoryError if code in _OUT_OF_MEMORY else VmmError
        what = (
            f"host {call}" if size is None else f"host {call} of {format_bytes(size)}"
        )
        if code in _TOO_MANY_FILES:
            raise VmmError(f"{what} failed: {os.strerror(code)}; {_MORE_FILES}")
        raise kind(
            f"{what} failed: {os.strerror(code)}; "
            f"{format_bytes(self.free_memory())} of memory available"
        )


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    address, length, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = address
    libc.mmap.argtypes = [address, length, integer, integer, integer, ctypes.c_long]
    libc.munmap.argtypes = [address, length]
    libc.mprotect.argtypes = [address, length, integer]
    return libc


def _available_to_system() -> int:
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _read("/proc/meminfo"), re.M)
    if found is None:
        raise VmmUnsupportedError("/proc/meminfo does not state MemAvailable")
    return int(found.group(1)) << 10


def _available_to_cgroups() -> list[int]:
    """Bytes left under the memory limit of each control group above this process.

    Page cache that is not in use counts as left, as it does in MemAvailable.
    """
    available = []
    for level in _cgroup_levels(_read("/proc/self/cgroup")):
        bound, used = _read(level.limit).strip(), _read(level.usage).strip()
        # Absent at the root and in a container's view of its own; "max": none.
        if bound.isdigit() and used.isdigit():
            cached = re.search(level.cache, _read(level.stat), re.M)
            reclaimable = int(cached.group(1)) if cached else 0
            available.append(max(0, int(bound) - int(used) + reclaimable))
    return available


class _CgroupLevel(NamedTuple):
    """Files that tell a control group's limit, and what of it is in use."""

    limit: str
    usage: str
    stat: str
    cache: str
    """Matches the line of ``stat`` with the page cache that is not in use."""


# Every chunk asks, and working out where to look takes longer than looking.
@functools.lru_cache(maxsize=4)
def _cgroup_levels(membership: str) -> tuple[_CgroupLevel, ...]:
    """The groups above a process, by the contents of its ``/proc/self/cgroup``."""
    levels = []
    for line in membership.splitlines():
        hierarchy, controllers, group = line.split(":", 2)
        if hierarchy == "0":
            root, limit, usage = "/sys/fs/cgroup", "memory.max", "memory.current"
            cache = r"^inactive_file (\d+)"
        elif "memory" in controllers.split(","):
            root = "/sys/fs/cgroup/memory"
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = r"^total_inactive_file (\d+)"
        else:
            continue
        folder = Path(root, group.lstrip("/"))
        levels += [
            _CgroupLevel(
                f"{level}/{limit}", f"{level}/{usage}", f"{level}/memory.stat", cache
            )
            for level in (folder, *folder.parents)
            if level.is_relative_to(root)
        ]
    return tuple(levels)


def _read(path: str) -> str:
    """Return the text at ``path``; nothing where this system has no such file.

    Raises:
        VmmError: This process has too many files open to look.
    """
    try:
        with open(path) as file:
            return file.read()
    except OSError as error:
        if error.errno in _TOO_MANY_FILES:
            raise VmmError(
                f"reading {path} failed: {error.strerror}; {_MORE_FILES}"
            ) from error
        return ""
