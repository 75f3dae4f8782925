"""Device memory of NVIDIA GPUs through the CUDA driver's virtual memory calls.

Chunks ask for what a transport may need of them: GPUDirect RDMA where the device
supports it for such memory, and handles that can be exported, FABRIC where the
driver permits it (UCX needs it for NVLink between nodes), else POSIX file
descriptors, else none.

``cuda-bindings`` is imported when a driver is made, not with this module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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

    It works in the device's primary context, as torch does, and leaves the calling
    thread's current context as it found it. Access is set for this device only.

    Args:
        device_index: Ordinal among the visible devices, as torch counts them.

    Raises:
        VmmUnsupportedError: ``cuda-bindings`` or the CUDA driver is missing, there
            is no such device, or it cannot map memory virtually.
    """

    def __init__(self, device_index: int) -> None:
        self._device = _open_device(device_index)
        self._cuda = self._device.bindings

    @property
    def granularity(self) -> int:
        return self._device.granularity

    @property
    def description(self) -> str:
        return self._device.description

    @property
    def is_rdma_capable(self) -> bool:
        """Whether chunks can be registered with a NIC (GPUDirect RDMA)."""
        return bool(self._device.properties.allocFlags.gpuDirectRDMACapable)

    @property
    def handle_type(self) -> str:
        """How chunks can be exported: FABRIC, POSIX_FILE_DESCRIPTOR or NONE."""
        return self._device.handle_type

    @property
    def fresh_memory_is_zero(self) -> bool:
        # CUDA documents no contents for cuMemCreate.
        return False

    def reserve(self, size: int) -> int:
        alignment = self.granularity
        (address,) = self._device.call(
            self._cuda.cuMemAddressReserve, size, alignment, 0, 0, size=size
        )
        return int(address)

    def free_address(self, address: int, size: int) -> None:
        pointer = self._cuda.CUdeviceptr(address)
        self._device.call(self._cuda.cuMemAddressFree, pointer, size, size=size)

    def create(self, size: int) -> int:
        return self._device.create(size, self._device.properties)

    def map(self, address: int, size: int, handle: int) -> None:
        pointer = self._cuda.CUdeviceptr(address)
        memory = self._cuda.CUmemGenericAllocationHandle(handle)
        self._device.call(self._cuda.cuMemMap, pointer, size, 0, memory, 0, size=size)

    def set_access(self, address: int, size: int) -> None:
        pointer = self._cuda.CUdeviceptr(address)
        access = self._cuda.CUmemAccessDesc()
        access.location = self._device.properties.location
        access.flags = self._cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._device.call(
            self._cuda.cuMemSetAccess, pointer, size, [access], 1, size=size
        )

    def unmap(self, address: int, size: int) -> None:
        pointer = self._cuda.CUdeviceptr(address)
        self._device.call(self._cuda.cuMemUnmap, pointer, size, size=size)

    def release(self, handle: int) -> None:
        self._device.release(handle)

    def zero(self, address: int, num_bytes: int) -> None:
        """Write zeros in the order of torch's current stream of this device.

        There, what the caller has queued already comes first and what it queues next
        comes after, and no other stream is made to wait as the default stream
        would make it. Others see the zeros after :meth:`synchronize`.
        """
        import torch

        stream = torch.cuda.current_stream(self._device.index).cuda_stream
        self._device.call(
            self._cuda.cuMemsetD8Async,
            self._cuda.CUdeviceptr(address),
            0,
            num_bytes,
            self._cuda.CUstream(stream),
            size=num_bytes,
        )

    def synchronize(self) -> None:
        """Wait for all streams of the context, other libraries' among them."""
        self._device.call(self._cuda.cuCtxSynchronize)

    def backing_range(self, address: int) -> tuple[int, int]:
        base, size = self._device.call(
            self._cuda.cuMemGetAddressRange, self._cuda.CUdeviceptr(address)
        )
        return int(base), int(size)

    def tensor(
        self, address: int, num_bytes: int, keepalive: object = None
    ) -> torch.Tensor:
        import torch

        device = torch.device("cuda", self._device.index)
        tensor = torch.as_tensor(
            _DeviceBytes(address, num_bytes, keepalive), device=device
        )
        storage = tensor.untyped_storage()
        if (storage.data_ptr(), storage.nbytes()) != (address, num_bytes):
            raise VmmError(
                f"torch made a copy instead of a view of {format_bytes(num_bytes)} at "
                f"{address:#x} on {device}; is that address on another device?"
            )
        return tensor

    def free_memory(self) -> int:
        free, _total = self._device.call(self._cuda.cuMemGetInfo)
        return int(free)


@dataclass(eq=False)
class _DeviceBytes:
    """Bytes for torch to view; the tensor's storage holds this object."""

    address: int
    num_bytes: int
    keepalive: object

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.num_bytes,),
            "typestr": "|i1",
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }


@dataclass
class _Device:
    """What is found out about a device once, and how calls for it are made."""

    bindings: Any
    index: int
    name: str
    context: Any
    properties: Any
    """``CUmemAllocationProp`` of every chunk."""
    granularity: int = 0

    @property
    def handle_type(self) -> str:
        kind: str = self.properties.requestedHandleTypes.name
        return kind.removeprefix("CU_MEM_HANDLE_TYPE_")

    @property
    def description(self) -> str:
        rdma = "with" if self.properties.allocFlags.gpuDirectRDMACapable else "without"
        return (
            f"CUDA device {self.index} ({self.name}), granule "
            f"{format_bytes(self.granularity)}, {rdma} GPUDirect RDMA, "
            f"exportable handles: {self.handle_type}"
        )

    def create(self, size: int, properties: Any) -> int:
        (handle,) = self.call(self.bindings.cuMemCreate, size, properties, 0, size=size)
        return int(handle)

    def release(self, handle: int) -> None:
        memory = self.bindings.CUmemGenericAllocationHandle(handle)
        self.call(self.bindings.cuMemRelease, memory)

    def call(
        self, function: Callable[..., Any], *args: Any, size: int | None = None
    ) -> tuple[Any, ...]:
        """Call ``function`` of the bindings; return what follows its status.

        Raises:
            VmmError: The status is not success; :class:`VmmOutOfMemoryError` if it
                says so.
        """
        with self._current_context():
            status, *values = function(*args)
            if status != self.bindings.CUresult.CUDA_SUCCESS:
                self._fail(function.__name__, status, size)
        return tuple(values)

    def _fail(self, call: str, status: Any, size: int | None) -> NoReturn:
        out_of_memory = status == self.bindings.CUresult.CUDA_ERROR_OUT_OF_MEMORY
        kind = VmmOutOfMemoryError if out_of_memory else VmmError
        amount = "" if size is None else f" of {format_bytes(size)}"
        known, *found = self.bindings.cuMemGetInfo()
        memory = (
            f"{format_bytes(int(found[0]))} of memory free"
            if known == self.bindings.CUresult.CUDA_SUCCESS
            else "free memory unknown"
        )
        raise kind(
            f"{call}{amount} failed on CUDA device {self.index}: "
            f"{_describe(self.bindings, status)}; {memory}"
        )

    @contextmanager
    def _current_context(self) -> Iterator[None]:
        # Pushed and popped, not set: torch reads its current device off the thread's
        # context. A finalizer may run in a thread that never had one.
        (status,) = self.bindings.cuCtxPushCurrent(self.context)
        if status != self.bindings.CUresult.CUDA_SUCCESS:
            raise VmmError(
                f"cuCtxPushCurrent failed on CUDA device {self.index}: "
                f"{_describe(self.bindings, status)}"
            )
        try:
            yield
        finally:
            self.bindings.cuCtxPopCurrent()


@functools.cache
def _open_device(index: int) -> _Device:
    """Retain the primary context of a device and find out what its memory can do.

    Once a process, like the context itself, which torch keeps for as long.
    """
    try:
        from cuda.bindings import driver as cuda
    except ImportError as error:
        raise VmmUnsupportedError(
            f"CUDA device {index} needs the package cuda-bindings, which vLLM's CUDA "
            f"wheels bring along: {error}"
        ) from error

    def ask(function: Callable[..., Any], *args: Any) -> Any:
        status, *values = function(*args)
        if status != cuda.CUresult.CUDA_SUCCESS:
            raise VmmUnsupportedError(
                f"{function.__name__} failed for CUDA device {index}: "
                f"{_describe(cuda, status)}"
            )
        return values[0] if values else None

    try:
        ask(cuda.cuInit, 0)
    except VmmUnsupportedError:
        raise
    except RuntimeError as error:  # the bindings' own, where libcuda is not found
        raise VmmUnsupportedError(f"there is no CUDA driver: {error}") from error

    handle = ask(cuda.cuDeviceGet, index)
    name = ask(cuda.cuDeviceGetName, 256, handle).split(b"\0")[0].decode()

    def supports(what: str) -> bool:
        attribute = getattr(
            cuda.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{what}_SUPPORTED"
        )
        return bool(ask(cuda.cuDeviceGetAttribute, attribute, handle))

    if not supports("VIRTUAL_MEMORY_MANAGEMENT"):
        raise VmmUnsupportedError(
            f"CUDA device {index} ({name}) does not support virtual memory management "
            "(some virtual GPUs do not)"
        )

    properties = cuda.CUmemAllocationProp()
    properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = index
    rdma = supports("GPU_DIRECT_RDMA_WITH_CUDA_VMM")
    properties.allocFlags.gpuDirectRDMACapable = int(rdma)

    device = _Device(
        bindings=cuda,
        index=index,
        name=name,
        context=ask(cuda.cuDevicePrimaryCtxRetain, handle),
        properties=properties,
    )
    _choose_handle_type(device, supports)
    logger.debug("KV cache memory comes from %s", device.description)
    return device


def _choose_handle_type(device: _Device, supports: Callable[[str], bool]) -> None:
    """Set the best handle type that a granule can really be created with."""
    kinds = device.bindings.CUmemAllocationHandleType
    for kind, attribute in (
        (kinds.CU_MEM_HANDLE_TYPE_FABRIC, "HANDLE_TYPE_FABRIC"),
        (
            kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR",
        ),
        (kinds.CU_MEM_HANDLE_TYPE_NONE, None),
    ):
        if attribute is not None and not supports(attribute):
            continue
        properties = device.properties
        properties.requestedHandleTypes = kind
        try:
            # The granule may depend on the properties, so it is asked for with them.
            (granularity,) = device.call(
                device.bindings.cuMemGetAllocationGranularity,
                properties,
                device.bindings.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM,
            )
            device.release(device.create(int(granularity), properties))
        except VmmOutOfMemoryError:
            raise  # says nothing about the handle type
        except VmmError as error:
            # FABRIC is supported by devices whose users are not permitted to use it.
            if attribute is None:
                raise VmmUnsupportedError(
                    f"CUDA device {device.index} ({device.name}) refuses to create "
                    f"memory: {error}"
                ) from error
            logger.debug("No %s handles for KV cache memory: %s", kind.name, error)
        else:
            device.granularity = int(granularity)
            return


def _describe(cuda: Any, status: Any) -> str:
    """Name and text of a ``CUresult``."""
    _, name = cuda.cuGetErrorName(status)
    _, text = cuda.cuGetErrorString(status)
    return f"{(name or b'?').decode()} ({(text or b'?').decode()})"
