"""What GPU benchmarks do in processes of their own, beside ``tests/gpu/jobs.py``."""

from __future__ import annotations

import time
from typing import Any

from engine_process import Conversation

MIB = 1 << 20
GIB = 1 << 30


def chunked_times(
    conversation: Conversation, gib: int, chunk_mib: int
) -> dict[str, float]:
    """Seconds to map ``gib`` GiB, zeroed, in chunks of ``chunk_mib`` MiB, and to free.

    By the same code that commits a cache, so that only the chunks' size differs.
    """
    import torch

    from vllm_kvpad.reservation import Reservation
    from vllm_kvpad.vmm import get_driver

    torch.zeros(1, device="cuda:0")
    driver = get_driver("cuda:0")
    size, chunk = gib * GIB, chunk_mib * MIB
    reservation = Reservation(driver, size)
    ranges = [(start, start + chunk) for start in range(0, size, chunk)]
    driver.synchronize()
    started = time.perf_counter()
    reservation.remap(ranges, one_chunk_each=True)
    seconds = {"commit": time.perf_counter() - started}
    assert reservation.num_chunks == len(ranges)
    started = time.perf_counter()
    reservation.clear()
    driver.synchronize()
    seconds["free"] = time.perf_counter() - started
    reservation.free()
    return seconds


def zeroing_limit(conversation: Conversation, gib: int, rounds: int) -> dict[str, Any]:
    """Seconds to write zeros to ``gib`` GiB that are mapped already, once a round.

    What no commit of zeroed memory can beat. ``bandwidth`` is what the device's memory
    clock and bus width allow, in bytes a second.
    """
    import torch
    from cuda.bindings import driver as cuda

    buffer = torch.empty(gib * GIB, dtype=torch.int8, device="cuda:0")
    buffer.zero_()
    seconds = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        started = time.perf_counter()
        buffer.zero_()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)

    def attribute(name: str) -> int:
        error, value = cuda.cuDeviceGetAttribute(
            getattr(cuda.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), 0
        )
        assert error == cuda.CUresult.CUDA_SUCCESS, error
        return int(value)

    # Clock in kHz; two transfers a cycle on every line of the bus.
    bandwidth = (
        2
        * attribute("MEMORY_CLOCK_RATE")
        * 1000
        * (attribute("GLOBAL_MEMORY_BUS_WIDTH") // 8)
    )
    return {"seconds": seconds, "bandwidth": bandwidth}
