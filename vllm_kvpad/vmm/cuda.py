"""Memory of an NVIDIA GPU through the CUDA driver's virtual memory management.

Chunks are ``cuMemCreate`` allocations. They ask for what a transport may need later
and costs nothing: to be registered with a NIC (``gpuDirectRDMACapable``) where the
device supports that, and to be exportable, by fabric handle where the driver permits
it (UCX needs that for NVLink between nodes), else by POSIX file descriptor. What the
device grants is found out once, when the driver object is made.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from vllm_kvpad.log import get_logger
from vllm_kvpad.vmm.base import (
    VmmDriver,
    VmmError,
    VmmOutOfMemoryError,
    VmmUnsupportedError,
    format_bytes,
)

if TYPE_CHECKING:
    import torch

logger = get_logger(__name__)


class CudaVmmDriver(VmmDriver):
    """The :class:`VmmDriver` of one CUDA device.

    Works in the device's primary context, which is the one PyTorch uses.

    Args:
        device_index: CUDA's number for the device, as in ``cuda:N``.

    Raises:
        VmmUnsupportedError: ``cuda-bindings`` is missing, or the device or its
            driver lacks virtual memory management.
        VmmError: The driver refuses a call it should not.
    """

    def __init__(self, device_index: int) -> None:
        self._index = device_index
        self._cuda = _bindings()
        cuda = self._cuda
        self._call("cuInit", 0)
        self._device = self._call("cuDeviceGet", device_index)
        attribute = cuda.CUdevice_attribute
        if not self._attribute(
            attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        ):
            raise VmmUnsupportedError(
                f"the driver of cuda:{device_index} does not support virtual memory "
                "management (as on WSL 2 and some virtual GPUs)"
            )
        # Retained once for as long as the process lives: it is PyTorch's as well.
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
        self._rdma = bool(
            self._attribute(
                attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
            )
        )
        self._properties = self._allocation_properties()
        self._granularity = int(self._granularity_of(self._properties))
        self._handle_type = self._choose_handle_type()
        logger.debug("%s", self.description)

    @property
    def granularity(self) -> int:
        return self._granularity

    @property
    def description(self) -> str:
        rdma = "with" if self._rdma else "without"
        return (
            f"memory of cuda:{self._index}, granule {format_bytes(self._granularity)}, "
            f"{rdma} GPUDirect RDMA, exportable by {self._handle_type}"
        )

    @property
    def fresh_memory_is_zero(self) -> bool:
        """False: the CUDA driver does not say what new memory holds."""
        return False

    def reserve(self, size: int) -> int:
        return int(self._call("cuMemAddressReserve", size, 0, 0, 0, size=size))

    def free_address(self, address: int, size: int) -> None:
        self._call("cuMemAddressFree", address, size, size=size)

    def create(self, size: int) -> int:
        return int(self._call("cuMemCreate", size, self._properties, 0, size=size))

    def map(self, address: int, size: int, handle: int) -> None:
        self._call("cuMemMap", address, size, 0, handle, 0, size=size)

    def set_access(self, address: int, size: int) -> None:
        access = self._cuda.CUmemAccessDesc()
        access.location = self._properties.location
        access.flags = self._cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._call("cuMemSetAccess", address, size, [access], 1, size=size)

    def unmap(self, address: int, size: int) -> None:
        self._call("cuMemUnmap", address, size, size=size)

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", handle)

    def zero(self, address: int, num_bytes: int) -> None:
        # The legacy default stream: it waits for PyTorch's blocking streams, and
        # synchronize() waits for it.
        self._call("cuMemsetD8Async", address, 0, num_bytes, 0, size=num_bytes)

    def synchronize(self) -> None:
        self._call("cuCtxSynchronize")

    def backing_range(self, address: int) -> tuple[int, int]:
        base, size = self._call("cuMemGetAddressRange", address)
        return int(base), int(size)

    def tensor(
        self, address: int, num_bytes: int, keepalive: object = None
    ) -> torch.Tensor:
        import torch

        view = torch.as_tensor(
            _DeviceBytes(address, num_bytes, keepalive), device=f"cuda:{self._index}"
        )
        if view.data_ptr() != address:
            raise VmmError(
                f"PyTorch copied {format_bytes(num_bytes)} at {address:#x} instead of "
                "viewing them"
            )
        return view

    def free_memory(self) -> int:
        free, _ = self._call("cuMemGetInfo")
        return int(free)

    # --- What this device grants ------------------------------------------------------

    def _allocation_properties(self) -> Any:
        cuda = self._cuda
        properties = cuda.CUmemAllocationProp()
        properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self._index
        properties.allocFlags.gpuDirectRDMACapable = int(self._rdma)
        return properties

    def _granularity_of(self, properties: Any) -> Any:
        return self._call(
            "cuMemGetAllocationGranularity",
            properties,
            self._cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM,
        )

    def _choose_handle_type(self) -> str:
        """Set the best export handle type that an allocation is really given with.

        The attribute for fabric handles says what the hardware could do; only an
        allocation tells whether this process may (it needs an IMEX channel).
        """
        kinds = self._cuda.CUmemAllocationHandleType
        for kind, name in (
            (kinds.CU_MEM_HANDLE_TYPE_FABRIC, "fabric handle"),
            (kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, "file descriptor"),
        ):
            self._properties.requestedHandleTypes = kind
            try:
                self.release(self.create(self._granularity))
            except VmmOutOfMemoryError:
                raise
            except VmmError as error:
                logger.debug("No allocation exportable by %s: %s", name, error)
            else:
                return name
        self._properties.requestedHandleTypes = kinds.CU_MEM_HANDLE_TYPE_NONE
        return "nothing"

    def _attribute(self, attribute: Any) -> int:
        return int(self._call("cuDeviceGetAttribute", attribute, self._device))

    # --- The one place where driver calls are made and their errors raised -------------

    def _call(self, name: str, *arguments: Any, size: int | None = None) -> Any:
        """Call ``cuda.bindings.driver.<name>``; return its one result or its tuple."""
        if name.startswith(("cuMem", "cuCtx")):
            with self._current_context():
                code, *results = getattr(self._cuda, name)(*arguments)
        else:
            code, *results = getattr(self._cuda, name)(*arguments)
        if code != self._cuda.CUresult.CUDA_SUCCESS:
            self._fail(name, code, size)
        return results[0] if len(results) == 1 else tuple(results)

    @contextlib.contextmanager
    def _current_context(self) -> Iterator[None]:
        """Have the device's context current, and leave the thread's as it was.

        PyTorch takes the current context for its current device.
        """
        cuda = self._cuda
        code, current = cuda.cuCtxGetCurrent()
        if code == cuda.CUresult.CUDA_SUCCESS and int(current) == int(self._context):
            yield
            return
        (code,) = cuda.cuCtxPushCurrent(self._context)
        if code != cuda.CUresult.CUDA_SUCCESS:
            self._fail("cuCtxPushCurrent", code, None)
        try:
            yield
        finally:
            cuda.cuCtxPopCurrent()

    def _fail(self, name: str, code: Any, size: int | None) -> NoReturn:
        cuda = self._cuda
        _, text = cuda.cuGetErrorString(code)
        reason = text.decode() if isinstance(text, bytes) else str(code)
        what = name if size is None else f"{name} of {format_bytes(size)}"
        asked, free, _ = cuda.cuMemGetInfo()
        left = (
            f"; {format_bytes(int(free))} of device memory free"
            if asked == cuda.CUresult.CUDA_SUCCESS
            else ""
        )
        kind = (
            VmmOutOfMemoryError
            if code == cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY
            else VmmError
        )
        raise kind(f"{what} on cuda:{self._index} failed: {reason}{left}")


class _DeviceBytes:
    """Bytes at a device address, for ``torch.as_tensor`` to view without a copy."""

    def __init__(self, address: int, num_bytes: int, keepalive: object) -> None:
        self._keepalive = keepalive
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|i1",
            "data": (address, False),
            "version": 3,
        }


@functools.cache
def _bindings() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise VmmUnsupportedError(
            "the package cuda-bindings, which vLLM's CUDA wheels bring, cannot be "
            f"imported: {error}"
        ) from error
    return driver
