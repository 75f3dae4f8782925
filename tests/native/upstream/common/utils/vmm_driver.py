"""Stands for ``vllm.utils.vmm_driver``: the driver, here of main memory."""

from __future__ import annotations

from functools import cache

from vllm_kvpad.vmm import HostVmmDriver


class VmmDriver:
    """One granule for every device; the calls go to kvpad's host driver."""

    def __init__(self) -> None:
        self.host = HostVmmDriver()

    def granularity(self, device_index: int) -> int:
        return self.host.granularity


@cache
def get_vmm_driver() -> VmmDriver:
    return VmmDriver()


@cache
def vmm_unavailable_reason() -> str | None:
    return None
