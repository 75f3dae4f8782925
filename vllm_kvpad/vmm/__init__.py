"""Drivers that reserve address space and put physical memory behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_kvpad.vmm.base import (
    VmmDriver,
    VmmError,
    VmmOutOfMemoryError,
    VmmUnsupportedError,
)
from vllm_kvpad.vmm.host import HostVmmDriver

if TYPE_CHECKING:
    import torch

    from vllm_kvpad.vmm.cuda import CudaVmmDriver

__all__ = [
    "CudaVmmDriver",
    "HostVmmDriver",
    "VmmDriver",
    "VmmError",
    "VmmOutOfMemoryError",
    "VmmUnsupportedError",
    "get_driver",
]


def __getattr__(name: str) -> object:
    if name == "CudaVmmDriver":
        from vllm_kvpad.vmm.cuda import CudaVmmDriver

        return CudaVmmDriver
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def get_driver(device: torch.device | str) -> VmmDriver:
    """Return a driver for the memory of ``device``.

    Args:
        device: ``cpu``, ``cuda`` (the current CUDA device) or ``cuda:N``.

    Raises:
        VmmUnsupportedError: kvpad has no driver for this kind of device, or the
            device's own driver cannot map memory virtually; the message says
            which.
    """
    import torch

    device = torch.device(device)
    if device.type == "cpu":
        return HostVmmDriver()
    if device.type == "cuda":
        if torch.version.hip is not None:
            raise VmmUnsupportedError(
                f"device {device} is a ROCm device, for which kvpad has no driver"
            )
        if device.index is None and not torch.cuda.is_available():
            raise VmmUnsupportedError("there is no CUDA device that torch can use")
        from vllm_kvpad.vmm.cuda import CudaVmmDriver

        index = torch.cuda.current_device() if device.index is None else device.index
        return CudaVmmDriver(index)
    raise VmmUnsupportedError(
        f"kvpad has no driver for {device.type!r} devices; it has them for 'cpu' "
        f"and 'cuda'"
    )
