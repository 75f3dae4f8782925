"""Whatever is done to a KV cache, in whatever order: it does what a few lines say.

:class:`Life` does things to a cache at random, driver faults among them, and keeps a
model of it: for each region and block the byte that it holds, in plain Python. After
every step the cache, the model, the driver's books and the kernel must agree.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from faults import FaultyDriver
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from small_caches import CAPACITY, CPU, gapped, hybrid, mixed, planned
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_cache_layout import KVCacheLayout
from vmm_probes import GRANULE, FaultyHostDriver, chunk_mappings, read, write

from vllm_kvpad.kv_cache import ExtensibleKVCache
from vllm_kvpad.placement import pad_kv_cache_segments
from vllm_kvpad.vmm import VmmError

# A run of hypothesis; there are as many as it takes, since lives differ in length.
ROUND = settings(
    max_examples=50,
    stateful_step_count=100,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)

LBHNC, LBNHC = KVCacheLayout.LBHNC, KVCacheLayout.LBNHC
FORMS: list[tuple[Callable[..., KVCacheConfig], KVCacheLayout]] = [
    (planned, LBHNC),
    (planned, KVCacheLayout.BLHNC),
    (hybrid, LBHNC),
    (hybrid, KVCacheLayout.BLNHC),
    (mixed, LBNHC),
    (mixed, KVCacheLayout.BLHNC),
    (gapped, LBHNC),
]


@dataclass(frozen=True)
class Region:
    """Where one layer's blocks lie; layers that alias share it."""

    offset: int
    stride: int
    page: int


def regions(config: KVCacheConfig) -> dict[str, Region]:
    """Where each layer's blocks lie, by what vLLM's data classes say."""
    pages = {}
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        for name in group.layer_names:
            of_layer = getattr(spec, "kv_cache_specs", {}).get(name, spec)
            pages[name] = of_layer.page_size_bytes
    return {
        name: Region(
            tensor.offset + index * tensor.layer_stride,
            tensor.block_stride,
            pages[name],
        )
        for tensor in config.kv_cache_tensors
        for index, name in enumerate(tensor.layers)
    }


counts = st.integers(0, CAPACITY)
calls = st.one_of(st.none(), st.sampled_from(FaultyDriver.CALLS))


class Life(RuleBasedStateMachine):
    """The life of a cache, and what it must be like."""

    steps: ClassVar[int] = 0
    faults: ClassVar[int] = 0
    commits: ClassVar[int] = 0

    cache: ExtensibleKVCache | None = None

    @initialize(
        form=st.sampled_from(FORMS), padded=st.booleans(), fresh_is_zero=st.booleans()
    )
    def choose(self, form: Any, padded: bool, fresh_is_zero: bool) -> None:
        self.make, self.layout = form
        self.padded = padded
        self.driver = FaultyHostDriver(fresh_memory_is_zero=fresh_is_zero)
        planned = self.make(CAPACITY, self.layout)
        self.config = planned
        if padded:
            self.config = pad_kv_cache_segments(planned, self.layout, GRANULE)
        self.regions = regions(self.config)
        self.distinct = sorted(set(self.regions.values()), key=lambda r: r.offset)
        # Aliases stay aliases, and nothing else becomes one.
        before = regions(planned)
        for one in before:
            for other in before:
                same = before[one] == before[other]
                assert (self.regions[one] == self.regions[other]) == same
        # Each segment on a granule of its own.
        if padded and not self.layout.is_block_outermost:
            assert all(region.offset % GRANULE == 0 for region in self.distinct)
        self.build()

    @precondition(lambda self: self.cache is None)
    @rule()
    def build(self) -> None:
        """A new cache, on the driver that the last one has left."""
        self.count = 0
        self.asleep: int | None = None
        self.dying = False
        self.whole = False  # whether each segment must be in one chunk
        self.clean = True  # whether nothing was left behind by a failure
        self.held: dict[tuple[Region, int], int] = {}
        self.views: list[tuple[int, dict[str, torch.Tensor]]] = []
        try:
            self.cache = ExtensibleKVCache(self.config, self.layout, CPU, self.driver)
        except VmmError:
            assert self.driver.faults
            self.driver.assert_nothing_left()
            return
        self.address = self.cache.address

    # --- what is done

    @precondition(lambda self: self.is_awake and self.count < CAPACITY)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        """What a cache does most; a few blocks more are as likely as many."""
        more = data.draw(st.one_of(st.integers(1, 3), st.integers(1, CAPACITY)))
        self.commit_to(min(self.count + more, CAPACITY), False, False)

    @precondition(lambda self: self.is_awake)
    @rule(count=counts, shrink=st.booleans())
    def defragment(self, count: int, shrink: bool) -> None:
        self.commit_to(count, True, shrink)

    @precondition(lambda self: self.is_awake)
    @rule(count=counts, defragment=st.booleans(), shrink=st.booleans())
    def commit(self, count: int, defragment: bool, shrink: bool) -> None:
        self.commit_to(count, defragment, shrink)

    def commit_to(self, count: int, defragment: bool, shrink: bool) -> None:
        assert self.cache is not None
        before, chunks = self.count, self.chunks(self.count)
        target = count if shrink else max(count, before)
        grows = target > before and not defragment
        was_whole = self.is_whole()
        done = self.attempt(
            partial(self.cache.commit, count, defragment=defragment, shrink=shrink)
        )
        if not done:
            self.count = self.cache.num_committed_blocks
            assert self.count == before or (self.count == 0 and not grows)
            if not self.count:
                self.held.clear()
                self.whole = False
            return
        Life.commits += 1
        moved = self.chunks(target) != chunks
        if grows:
            assert chunks <= self.chunks(target)
        elif target != before:
            assert moved
        elif not defragment or was_whole:
            assert not moved, "contents were discarded for nothing"
        if moved and not grows:
            self.held.clear()
        for region in self.distinct:
            for block in range(CAPACITY):
                if block >= target:
                    self.held.pop((region, block), None)
                else:
                    self.held.setdefault((region, block), 0)
        self.count = target
        self.whole = bool(defragment or (self.whole and not moved)) and target > 0

    @precondition(lambda self: self.cache is not None and not self.dying)
    @rule()
    def release(self) -> None:
        assert self.cache is not None
        before = self.count if self.asleep is None else self.asleep
        done = self.attempt(self.cache.release_physical)
        if done or self.cache.is_released:
            self.asleep = before
            self.count = 0
            self.held.clear()
        if done:
            assert self.cache.physical_bytes == 0

    @precondition(lambda self: self.cache is not None and self.asleep is not None)
    @precondition(lambda self: not self.dying)
    @rule()
    def recommit(self) -> None:
        assert self.cache is not None
        assert self.asleep is not None
        if not self.attempt(self.cache.recommit):
            return
        self.count, self.asleep = self.asleep, None
        self.held = {
            (region, block): 0
            for region in self.distinct
            for block in range(self.count)
        }

    @precondition(lambda self: self.cache is not None)
    @rule()
    def free(self) -> None:
        """Views dangle after this, whether or not all could be given back."""
        assert self.cache is not None
        self.views.clear()
        self.count, self.asleep, self.dying, self.whole = 0, None, True, False
        self.held.clear()
        if self.attempt(self.cache.free):
            self.cache = None
            self.driver.assert_nothing_left()
            self.build()
        else:
            self.clean = False  # it holds something, and counts nothing

    @precondition(lambda self: self.is_awake and self.count > 0)
    @rule()
    def drop(self) -> None:
        """Forget the cache; its views keep the memory until they go, too."""
        self.driver.heal()
        self.view(full=False)
        (_, views) = self.views[-1]
        del self.cache
        assert self.cache is None
        self.read_through(self.count, views)
        views.clear()
        del views
        self.views.clear()
        self.count, self.asleep, self.whole = 0, None, False
        self.held.clear()
        # An earlier error's traceback may have left a cycle that holds the cache.
        gc.collect()
        self.driver.assert_nothing_left()
        self.build()

    @precondition(lambda self: self.is_awake and self.count > 0)
    @rule(full=st.booleans())
    def view(self, full: bool) -> None:
        assert self.cache is not None
        if full:
            views = self.cache.full_views(self.config, self.layout)
        else:
            final = self.make(self.count, self.layout)
            views = self.cache.committed_views(final, self.layout)
        self.views.append((CAPACITY if full else self.count, views))

    @precondition(lambda self: self.count > 0 and self.views)
    @rule(data=st.data())
    def look(self, data: st.DataObject) -> None:
        """Read through views of any age: what is committed of them."""
        blocks, views = self.views[data.draw(st.integers(0, len(self.views) - 1))]
        self.read_through(min(blocks, self.count), views)

    @precondition(lambda self: self.count > 0)
    @rule(data=st.data(), value=st.integers(1, 127))
    def write(self, data: st.DataObject, value: int) -> None:
        """Write some blocks of a layer, by address or through a view of any age."""
        name = data.draw(st.sampled_from(sorted(self.regions)))
        # (Drawing views themselves would print them, unbacked bytes included.)
        by_address: list[tuple[int, dict[str, torch.Tensor]]] = [(self.count, {})]
        ways = by_address + self.views
        blocks, views = ways[data.draw(st.integers(0, len(ways) - 1))]
        first = data.draw(st.integers(0, min(blocks, self.count) - 1))
        last = data.draw(st.integers(first + 1, min(blocks, self.count)))
        region = self.regions[name]
        for block in range(first, last):
            if views:
                views[name][block] = torch.full((2,), value, dtype=torch.int8).view(
                    views[name].dtype
                )
            else:
                write(self.where(region, block), region.page, value)
            self.held[region, block] = value

    @precondition(lambda self: self.cache is not None)
    @rule()
    def scribble(self) -> None:
        """Write to all that is mapped and not committed; granules are mapped whole."""
        kept = {
            (self.where(region, block), region.page): value
            for (region, block), value in self.held.items()
        }
        for address, size in self.driver.accessible.items():
            write(address, size, 0xEE)
        for (address, size), value in kept.items():
            write(address, size, value)

    @precondition(lambda self: self.views)
    @rule(data=st.data())
    def forget_views(self, data: st.DataObject) -> None:
        self.views.pop(data.draw(st.integers(0, len(self.views) - 1)))

    @precondition(lambda self: not self.driver.will_fail)
    @rule(call=calls, nth=st.integers(1, 8), times=st.sampled_from([1, 1, 2, 100]))
    def break_driver(self, call: str | None, nth: int, times: int) -> None:
        """From some later call on, driver calls fail."""
        Life.faults += self.driver.faults
        self.driver.fail(nth if call is None else 1 + nth // 4, times, call=call)

    @precondition(lambda self: self.driver.will_fail)
    @rule()
    def mend_driver(self) -> None:
        self.driver.heal()

    @precondition(lambda self: self.cache is not None)
    @rule(count=st.sampled_from([-1, CAPACITY + 1]))
    def misuse(self, count: int) -> None:
        """What is refused changes nothing."""
        assert self.cache is not None
        if self.is_awake:
            with pytest.raises(ValueError, match="room for"):
                self.cache.commit(count, shrink=True)
            with pytest.raises(RuntimeError, match="not in effect"):
                self.cache.recommit()
        else:
            with pytest.raises(RuntimeError):
                self.cache.commit(1)

    # --- what must be true, whatever was done

    @invariant()
    def all_agree(self) -> None:
        Life.steps += 1
        if not hasattr(self, "driver"):
            return
        self.driver.assert_kernel_agrees()
        if self.cache is None:
            self.driver.assert_nothing_left()
            return
        cache = self.cache
        assert cache.address == self.address
        assert cache.num_committed_blocks == self.count
        assert cache.is_released == (self.asleep is not None) or self.dying
        assert cache.physical_bytes == self.driver.held_bytes
        footprint = len(self.granules(self.count)) * GRANULE
        assert cache.physical_bytes_for(self.count) == footprint
        if self.clean:
            assert cache.physical_bytes == footprint
        self.every_committed_byte_is_there()
        if self.whole and self.padded and self.asleep is None:
            assert self.is_whole()

    def every_committed_byte_is_there(self) -> None:
        """Mapped, usable, and what the model says."""
        usable: set[int] = set()
        for address, size in self.driver.accessible.items():
            first = (address - self.address) // GRANULE
            usable.update(range(first, first + size // GRANULE))
        assert self.granules(self.count) <= usable
        for (region, block), value in self.held.items():
            found = read(self.where(region, block), region.page)
            assert found == bytes([value]) * region.page

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        Life.faults += self.driver.faults
        self.driver.heal()
        self.views.clear()
        if self.cache is not None:
            self.cache.free()
        self.driver.assert_nothing_left()

    # --- details

    @property
    def is_awake(self) -> bool:
        return self.cache is not None and self.asleep is None and not self.dying

    def attempt(self, act: Callable[[], object]) -> bool:
        """Whether ``act`` was done; if not, a fault that was injected stopped it."""
        faults = self.driver.faults
        try:
            act()
        except VmmError:
            if self.driver.faults == faults:
                raise
            # If undoing was not disturbed, nothing was left behind.
            alone = self.driver.faults == faults + 1
            self.clean = self.clean and alone and self.driver.could_give_back
            return False
        self.clean = True
        return True

    def where(self, region: Region, block: int) -> int:
        return self.address + region.offset + block * region.stride

    def granules(self, blocks: int) -> set[int]:
        """The granules that so many blocks touch, one by one."""
        return {
            granule
            for region in self.distinct
            for block in range(blocks)
            for granule in range(
                (region.offset + block * region.stride) // GRANULE,
                (region.offset + block * region.stride + region.page - 1) // GRANULE
                + 1,
            )
        }

    def chunks(self, blocks: int) -> set[tuple[int, int, int]]:
        """By the kernel: start, end and inode of what backs so many blocks.

        What a failed commit had to leave backs none, and is not among them.
        """
        granules = self.granules(blocks)
        return {
            (m.start, m.end, m.inode)
            for m in chunk_mappings()
            for first in [(m.start - self.address) // GRANULE]
            if not granules.isdisjoint(
                range(first, first + (m.end - m.start) // GRANULE)
            )
        }

    def is_whole(self) -> bool:
        """By the kernel: one mapping holds all committed bytes of each segment."""
        if not self.count:
            return False
        ends = {}
        for region in self.distinct:
            start = self.where(region, 0)
            ends[start] = self.where(region, self.count - 1) + region.page
        if self.layout.is_block_outermost:
            ends = {min(ends): max(ends.values())}
        mapped = [(low, high) for low, high, _ in self.chunks(self.count)]
        return all(
            any(low <= start and end <= high for low, high in mapped)
            for start, end in ends.items()
        )

    def read_through(self, blocks: int, views: dict[str, torch.Tensor]) -> None:
        for name, view in views.items():
            region = self.regions[name]
            assert view.data_ptr() == self.where(region, 0)
            for block in range(blocks):
                value = self.held[region, block]
                data = view[block].contiguous().view(torch.int8)
                assert (data == value).all()


def test_any_sequence_of_calls_and_faults_does_what_the_model_says() -> None:
    """At least 10,000 steps, about a minute.

    ``KVPAD_FUZZ_STEPS`` in the environment asks for more (about two hours a million).
    A failure found once is tried first by any later run, which looks into
    ``.hypothesis`` for it.
    """
    wanted = int(os.environ.get("KVPAD_FUZZ_STEPS", 10_000))
    Life.steps = Life.faults = Life.commits = 0
    gc.freeze()  # collecting what is newer than this is quick
    while Life.steps < wanted:
        before = Life.steps
        run_state_machine_as_test(Life, settings=ROUND)
        assert Life.steps > before
    gc.unfreeze()
    print(
        f"{Life.steps} steps, {Life.commits} commits done, {Life.faults} driver faults"
    )
    assert Life.commits >= Life.steps // 10
    assert Life.faults >= Life.steps // 50
