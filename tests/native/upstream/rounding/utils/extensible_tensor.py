"""Stands for ``vllm.utils.extensible_tensor`` where block counts are rounded."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vllm.utils.extensible_tensor import ExtensibleTensor

__all__ = ["ExtensibleTensor", "granule_aligned_blocks", "granule_block_alignment"]


def granule_block_alignment(strides: Sequence[int], granule: int) -> int:
    return math.lcm(*(granule // math.gcd(granule, stride) for stride in strides))


def granule_aligned_blocks(
    num_blocks: int, strides: Sequence[int], granule: int
) -> int:
    return num_blocks - num_blocks % granule_block_alignment(strides, granule)
