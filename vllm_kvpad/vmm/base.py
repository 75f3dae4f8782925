"""What kvpad asks of virtual memory management, whatever the device.

A driver reserves address space, creates physical memory in whole granules and
maps one into the other. It keeps no books: who owns which chunk is decided in
:mod:`vllm_kvpad.reservation`. All sizes and addresses are in bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class VmmError(RuntimeError):
    """A virtual-memory call failed; the message names call, size and free memory."""


class VmmOutOfMemoryError(VmmError):
    """The device or the host has too little memory, or address space, for the call."""


class VmmUnsupportedError(VmmError):
    """The device or its driver cannot map memory virtually, or a package is missing."""


def format_bytes(num_bytes: int) -> str:
    """Return ``num_bytes`` with its unit, exact and for reading."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if num_bytes >= 1 << shift:
            return f"{num_bytes} bytes ({num_bytes / (1 << shift):.2f} {unit})"
    return f"{num_bytes} bytes"


class VmmDriver(ABC):
    """Reserve, create, map, give access; and each of them undone.

    Addresses and sizes handed to :meth:`reserve`, :meth:`create`, :meth:`map`,
    :meth:`set_access` and :meth:`unmap` are multiples of :attr:`granularity`.
    Every method raises :class:`VmmError` (out of memory:
    :class:`VmmOutOfMemoryError`) when the system refuses, and has then changed
    nothing.
    """

    @property
    @abstractmethod
    def granularity(self) -> int:
        """Bytes in a granule: the unit of every physical mapping."""

    @property
    @abstractmethod
    def description(self) -> str:
        """One phrase for logs: which memory this is and what it can do."""

    @property
    @abstractmethod
    def fresh_memory_is_zero(self) -> bool:
        """Whether memory from :meth:`create` is documented to read as zero."""

    @abstractmethod
    def reserve(self, size: int) -> int:
        """Reserve ``size`` bytes of address space; return its granule-aligned start."""

    @abstractmethod
    def free_address(self, address: int, size: int) -> None:
        """Return a whole range from :meth:`reserve`; nothing may be mapped in it."""

    def check_available(self, num_bytes: int) -> None:
        """Refuse early what calls of :meth:`create` could not serve together.

        For systems on which running out of memory harms others; the rest find out
        at the call that fails, which is undone.

        Raises:
            VmmOutOfMemoryError: There are not ``num_bytes`` of memory available.
        """
        return None

    @abstractmethod
    def create(self, size: int) -> int:
        """Allocate ``size`` bytes of physical memory; return its handle."""

    @abstractmethod
    def map(self, address: int, size: int, handle: int) -> None:
        """Map all ``size`` bytes of ``handle`` at ``address``, without access yet."""

    @abstractmethod
    def set_access(self, address: int, size: int) -> None:
        """Let the device read and write a range that is mapped throughout."""

    @abstractmethod
    def unmap(self, address: int, size: int) -> None:
        """Undo one :meth:`map`; the addresses stay reserved."""

    @abstractmethod
    def release(self, handle: int) -> None:
        """Give the memory of ``handle`` back once it is mapped nowhere."""

    @abstractmethod
    def zero(self, address: int, num_bytes: int) -> None:
        """Write zeros; complete only after :meth:`synchronize`."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until nothing submitted to the device is running any more."""

    @abstractmethod
    def backing_range(self, address: int) -> tuple[int, int]:
        """Ask the system which one physical allocation is mapped at ``address``.

        Returns:
            Start address and size in bytes of that allocation's mapping.

        Raises:
            VmmError: Nothing is mapped there.
        """

    @abstractmethod
    def tensor(
        self, address: int, num_bytes: int, keepalive: object = None
    ) -> torch.Tensor:
        """View ``num_bytes`` at ``address`` as an int8 tensor, without a copy.

        Its storage spans exactly these bytes. Only the first byte need be
        mapped; nothing is read or written. The storage holds ``keepalive``.
        """

    @abstractmethod
    def free_memory(self) -> int:
        """Bytes of physical memory that :meth:`create` could still get, about."""
