"""The budget arithmetic, with figures as an H200 would give them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvpad.sizing import MeasuredMemory, capacity_blocks, warm_up_blocks

GIB = 1 << 30
MIB = 1 << 20

H200_AT_5_PERCENT = MeasuredMemory(
    budget_bytes=7 * GIB,
    initial_free_bytes=139 * GIB,
    free_bytes=132 * GIB,
    committed_bytes=5 * GIB,
    transient_peak_bytes=256 * MIB,
    margin_bytes=150 * MIB,
)


def test_resident_is_what_is_gone_besides_the_cache() -> None:
    assert H200_AT_5_PERCENT.resident_bytes == 2 * GIB


def test_cache_gets_the_budget_less_resident_and_peak() -> None:
    assert H200_AT_5_PERCENT.kv_cache_bytes == 5 * GIB - 256 * MIB


def test_margin_does_not_reduce_a_budget_that_leaves_that_much_free() -> None:
    without = replace(H200_AT_5_PERCENT, margin_bytes=0)
    assert H200_AT_5_PERCENT.kv_cache_bytes == without.kv_cache_bytes


def test_margin_stays_free_when_the_budget_is_the_whole_device() -> None:
    whole = replace(H200_AT_5_PERCENT, budget_bytes=139 * GIB)
    assert whole.kv_cache_bytes == 137 * GIB - 150 * MIB - 256 * MIB


def test_memory_taken_by_others_since_start_is_not_given_out() -> None:
    crowded = replace(H200_AT_5_PERCENT, budget_bytes=139 * GIB, free_bytes=32 * GIB)
    assert crowded.kv_cache_bytes <= 32 * GIB + 5 * GIB


def test_memory_that_others_free_during_warm_up_is_not_taken() -> None:
    freed = replace(
        H200_AT_5_PERCENT, free_bytes=138 * GIB, least_resident_bytes=2 * GIB
    )
    assert freed.resident_bytes == 2 * GIB
    assert freed.kv_cache_bytes == H200_AT_5_PERCENT.kv_cache_bytes


def test_share_of_other_processes_is_set_aside() -> None:
    shared = replace(H200_AT_5_PERCENT, reserved_bytes=GIB)
    assert shared.kv_cache_bytes == H200_AT_5_PERCENT.kv_cache_bytes - GIB


def test_overdrawn_budget_is_negative() -> None:
    overdrawn = replace(H200_AT_5_PERCENT, budget_bytes=GIB)
    assert overdrawn.kv_cache_bytes < 0


amounts = st.integers(min_value=0, max_value=200 * GIB)


@given(amounts, amounts, amounts, amounts, amounts, amounts)
def test_never_more_than_budget_or_device_hold(
    budget: int, initial: int, free: int, committed: int, peak: int, margin: int
) -> None:
    memory = MeasuredMemory(
        budget_bytes=budget,
        initial_free_bytes=initial,
        free_bytes=free,
        committed_bytes=committed,
        transient_peak_bytes=peak,
        margin_bytes=margin,
    )
    left = memory.kv_cache_bytes
    assert memory.resident_bytes >= 0
    assert memory.resident_bytes + left + peak <= budget
    assert left + peak + margin <= free + committed


@pytest.mark.parametrize("affordable", [0, 1, 2, 5, 102, 100_000])
def test_warm_up_never_takes_more_than_is_affordable(affordable: int) -> None:
    blocks = warm_up_blocks(
        affordable_blocks=affordable,
        max_num_batched_tokens=8192,
        max_num_seqs=256,
        min_block_size=16,
        num_groups=1,
    )
    assert blocks <= affordable
    assert (blocks >= 1) == (affordable >= 1)


def test_warm_up_takes_what_its_steps_address() -> None:
    blocks = warm_up_blocks(
        affordable_blocks=10**9,
        max_num_batched_tokens=8192,
        max_num_seqs=256,
        min_block_size=16,
        num_groups=2,
    )
    # One full batch and a few blocks for each request, in either group.
    assert 2 * (512 + 256) < blocks < 2 * (512 + 256 * 10)


@pytest.mark.parametrize(
    ("num_bytes", "alignment", "expected"),
    [
        (1000 * 4096, 512, 1024),  # rounded up: addresses only
        (1000 * 4096, 2048, 1000),  # would more than double the address space
        (1024 * 4096, 512, 1024),
        (5 * 4096, 1, 5),
        (100, 512, 1),  # less than a block still needs the null block
    ],
)
def test_capacity_is_rounded_up_where_that_is_cheap(
    num_bytes: int, alignment: int, expected: int
) -> None:
    assert capacity_blocks(num_bytes, 4096, alignment) == expected
