"""From measured device memory to the bytes the KV cache may take.

Stock vLLM estimates what CUDA graphs will need before they exist. Here they exist
already, and so does everything else the engine keeps: what is left is counted, not
guessed. All figures are bytes on one device, as the driver reports them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MeasuredMemory:
    """What one worker measured after warm-up and graph capture.

    Attributes:
        budget_bytes: What ``gpu_memory_utilization`` allows this engine: vLLM's
            ``requested_memory``.
        initial_free_bytes: Free memory when the worker started.
        free_bytes: Free memory now, with the allocator's unused blocks returned.
        committed_bytes: Physical bytes of the KV cache that are mapped now.
        transient_peak_bytes: Most memory a step of the profile run held beyond what
            it left behind; kept free for the steps to come.
        reserved_bytes: Set aside by vLLM for other processes (multimodal frontends).
        least_resident_bytes: What was resident before warm-up. Warm-up does not give
            weights back: if less seems resident after it, another process has freed
            memory meanwhile, which is not this engine's to take.
        margin_bytes: Physical memory to leave free on the device. It guards against
            running out, not against the budget: a budget that already leaves this
            much free is not reduced.
    """

    budget_bytes: int
    initial_free_bytes: int
    free_bytes: int
    committed_bytes: int
    transient_peak_bytes: int
    reserved_bytes: int = 0
    least_resident_bytes: int = 0
    margin_bytes: int = 0

    @property
    def resident_bytes(self) -> int:
        """Bytes the engine keeps besides the KV cache: weights, graphs, buffers."""
        measured = self.initial_free_bytes - self.free_bytes - self.committed_bytes
        return max(measured, self.least_resident_bytes)

    @property
    def kv_cache_bytes(self) -> int:
        """Physical bytes the KV cache may take; negative when nothing is left."""
        within_budget = self.budget_bytes - self.resident_bytes
        within_device = self.free_bytes + self.committed_bytes - self.margin_bytes
        available = min(within_budget, within_device)
        return available - self.transient_peak_bytes - self.reserved_bytes


def capacity_blocks(num_bytes: int, bytes_per_block: int, alignment: int) -> int:
    """Blocks to reserve addresses for: as many as could ever be committed.

    Rounded up to ``alignment`` where that at most doubles the address space. Then
    every segment starts on a granule also where nothing is padded, and a commit
    loses less than one granule a segment instead of up to two. Addresses are
    free; the number of blocks that are committed is not rounded.

    Args:
        num_bytes: What the cache would take if nothing but weights were resident.
        bytes_per_block: Bytes of a block in all layers.
        alignment: Blocks; :func:`vllm_kvpad.placement.block_alignment`.

    Returns:
        Blocks, at least 1.
    """
    blocks = max(num_bytes // bytes_per_block, 1)
    aligned = -(-blocks // alignment) * alignment
    return aligned if aligned <= 2 * blocks else blocks


def warm_up_blocks(
    *,
    affordable_blocks: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    min_block_size: int,
    num_groups: int,
) -> int:
    """Blocks to commit before warm-up: what its steps address, no more.

    vLLM's warm-up steps size themselves by the number of blocks: one batch of
    ``max_num_batched_tokens`` tokens, and short requests (a few blocks in every cache
    group) for each of ``max_num_seqs``. At most four fifths of what is affordable
    are taken, because graph capture needs memory of its own before it is measured.

    Args:
        affordable_blocks: Blocks the budget would hold if graphs took nothing.
        max_num_batched_tokens: Tokens in the largest step.
        max_num_seqs: Requests in the largest step.
        min_block_size: Tokens in the smallest block of any cache group.
        num_groups: Number of KV cache groups.

    Returns:
        Blocks, at least 1 if any is affordable.
    """
    per_group = -(-max_num_batched_tokens // min_block_size) + 8 * max_num_seqs
    wanted = 2 + num_groups * per_group
    return min(wanted, max(affordable_blocks * 4 // 5, min(affordable_blocks, 1)))
