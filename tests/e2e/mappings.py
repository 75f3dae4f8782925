"""A process's memory mappings, and which of them a range of addresses lies in."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mapping:
    """One line of ``/proc/<pid>/maps``.

    Attributes:
        start: First address.
        end: Address after the last.
        inode: Identifies the file; every memfd has its own.
        path: ``/memfd:<name> (deleted)`` for a memfd, "" for anonymous memory.
    """

    start: int
    end: int
    inode: int
    path: str

    @property
    def is_memfd(self) -> bool:
        return self.path.startswith("/memfd:")


def mappings(pid: int) -> list[Mapping]:
    """The mappings of process ``pid``, by address."""
    found = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        addresses, _, _, _, inode, *path = line.split(maxsplit=5)
        start, end = (int(part, 16) for part in addresses.split("-"))
        found.append(Mapping(start, end, int(inode), path[0] if path else ""))
    return found


def covering(found: list[Mapping], address: int, length: int) -> list[Mapping]:
    """The mappings that share a byte with ``length`` bytes from ``address`` on."""
    return [m for m in found if m.start < address + length and address < m.end]


def straddling(found: list[Mapping], regions: list[tuple[int, int]]) -> list[str]:
    """Describe each region that is not inside one mapping of one memfd."""
    complaints = []
    for address, length in regions:
        over = covering(found, address, length)
        inside = (
            len(over) == 1
            and over[0].is_memfd
            and over[0].start <= address
            and address + length <= over[0].end
        )
        if not inside:
            complaints.append(
                f"{length} bytes at {address:#x} lie in {len(over)} mappings: "
                + ", ".join(f"{m.start:#x}-{m.end:#x} {m.path}" for m in over)
            )
    return complaints


def kvpad_memory(pid: int) -> list[Mapping]:
    """The mappings in process ``pid`` of what kvpad's host driver allocated."""
    return [m for m in mappings(pid) if m.path.startswith("/memfd:kvpad")]


def memory_files(pids: Iterable[int]) -> set[int]:
    """Inodes of what kvpad's host driver allocated in the processes ``pids``."""
    return {mapping.inode for pid in pids for mapping in kvpad_memory(pid)}


def holders(inodes: set[int]) -> set[int]:
    """The processes that map one of these memory files, or have one open."""
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        # Processes end while they are looked at, and others' are not for us to see.
        with contextlib.suppress(OSError):
            pid = int(entry.name)
            held = memory_files([pid])
            for link in (entry / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(link).startswith("/memfd:kvpad"):
                        held.add(link.stat().st_ino)
            if held & inodes:
                found.add(pid)
    return found


def shared_memory(pids: Iterable[int]) -> set[Path]:
    """The files in ``/dev/shm`` that the processes ``pids`` map."""
    return {
        Path(mapping.path)
        for pid in pids
        for mapping in mappings(pid)
        if mapping.path.startswith("/dev/shm/")
    }
