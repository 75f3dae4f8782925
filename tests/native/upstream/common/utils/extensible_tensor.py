"""Stands for ``vllm.utils.extensible_tensor``: a buffer of segments that grow."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from vllm.utils.vmm_driver import get_vmm_driver

from vllm_kvpad.reservation import Reservation


class ExtensibleTensor:
    """Segments one behind another; the first bytes of each are backed."""

    def __init__(
        self,
        max_num_bytes: int,
        device: torch.device | str | int | None = None,
        segment_capacities: Sequence[int] | None = None,
    ) -> None:
        capacities = list(segment_capacities or [max_num_bytes])
        if sum(capacities) != max_num_bytes:
            raise ValueError(f"{capacities} do not fill {max_num_bytes} bytes")
        self.device = device
        self.granularity = get_vmm_driver().granularity(0)
        self.num_releases = 0  # of this double only: remaps discard contents
        self._host = get_vmm_driver().host
        self._memory = Reservation(self._host, max_num_bytes)
        self._max_num_bytes = max_num_bytes
        self._capacities = capacities
        self._starts = [0, *accumulate(capacities)][:-1]
        self._sizes = [0] * len(capacities)

    @property
    def base_ptr(self) -> int:
        return self._memory.address

    @property
    def num_segments(self) -> int:
        return len(self._capacities)

    @property
    def num_physical_chunks(self) -> int:
        return self._memory.num_chunks

    @property
    def physical_bytes(self) -> int:
        return self._memory.physical_bytes

    def resize_segments_(self, sizes: Sequence[int], zero_new: bool = False) -> None:
        for size, old, capacity in zip(
            sizes, self._sizes, self._capacities, strict=True
        ):
            if not old <= size <= capacity:
                raise ValueError(f"cannot go from {old} to {size} of {capacity} bytes")
        for start, old, size in zip(self._starts, self._sizes, sizes, strict=True):
            # Segment by segment, as upstream maps: a chunk for each run that lacks one.
            self._memory.grow([(start, start + size)])
            if zero_new:
                self._host.zero(self.base_ptr + start + old, size - old)
        self._sizes = list(sizes)

    def segments_backed_by_one_chunk(self, sizes: Sequence[int]) -> list[bool]:
        chunks = self._memory.mapped_ranges
        return [
            any(low <= start and start + size <= high for low, high in chunks)
            for start, size in zip(self._starts, sizes, strict=True)
        ]

    def full_view(self) -> torch.Tensor:
        return self._view(0, self._max_num_bytes)

    def segment_view(self, segment: int) -> torch.Tensor:
        return self._view(self._starts[segment], self._sizes[segment])

    def _view(self, start: int, num_bytes: int) -> torch.Tensor:
        return self._host.tensor(
            self.base_ptr + start, num_bytes, keepalive=self._memory
        )

    def release_physical(self) -> None:
        self._memory.clear()
        self._sizes = [0] * len(self._sizes)
        self.num_releases += 1

    def free(self) -> None:
        self._memory.free()
