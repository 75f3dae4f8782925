"""A cache and the processes around it: forked, spawned, and ended with views alive."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from small_caches import make_cache, planned
from vmm_probes import (
    FaultyHostDriver,
    chunk_mappings,
    memfds,
    read,
)

from vllm_kvpad.kv_cache import ExtensibleKVCache

TESTS = Path(__file__).parent.parent

EXITS = """
import itertools, os, sys
import torch
torch.set_num_threads(1)
from small_caches import LBHNC, make_cache, planned
from vllm_kvpad.vmm import HostVmmDriver

class Toucher:
    "Uses a view as late as an object can."
    def __init__(self, view):
        self.view = view
    def __del__(self):
        self.view.fill_(3)

orders = list(itertools.permutations(["driver", "cache", "view", "views", "toucher"]))
for order in orders[::20]:
    if (child := os.fork()) == 0:
        made = {"driver": HostVmmDriver(64 << 10)}
        made["cache"] = make_cache(made["driver"], planned())
        made["cache"].commit(9, defragment=True)
        made["views"] = made["cache"].committed_views(planned(9), LBHNC)
        made["view"] = made["cache"].allocate(made["cache"].size)
        made["toucher"] = Toucher(next(iter(made["views"].values())))
        # The interpreter drops globals in the order in which they were made.
        for name in order:
            globals()[name] = made.pop(name)
        del made
        break
    _, status = os.waitpid(child, 0)
    print("exited", status, *order, flush=True)
"""


def test_the_interpreter_exits_with_views_alive_in_any_order_of_destruction() -> None:
    done = run_python(EXITS)
    assert done.returncode == 0, done.stderr
    lines = [x for x in done.stdout.splitlines() if x.startswith("exited")]
    assert len(lines) == 6
    assert [line for line in lines if not line.startswith("exited 0 ")] == []
    for complaint in ("Traceback", "Exception ignored", "Could not give back"):
        assert complaint not in done.stderr


SPAWNED = """
import os
from vllm_kvpad.reservation import Reservation
from vllm_kvpad.vmm import HostVmmDriver

def inherited():
    for name in os.listdir("/proc/self/fd"):
        try:
            yield os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            pass

assert not [path for path in inherited() if "memfd:kvpad" in path]
reservation = Reservation(HostVmmDriver(64 << 10), 1 << 20)
reservation.grow([(0, 1 << 20)])
print("exited with memory of its own")
"""


def test_a_spawned_child_has_nothing_of_its_parent_and_can_have_its_own(
    cache: ExtensibleKVCache,
) -> None:
    # close_fds=False: what is not closed on exec would be inherited.
    done = run_python(SPAWNED, close_fds=False)
    assert done.returncode == 0, done.stderr
    assert "memory of its own" in done.stdout
    assert_parent_is_unharmed(cache)


def run_python(
    program: str, close_fds: bool = True
) -> subprocess.CompletedProcess[str]:
    path = [str(TESTS / "unit"), str(TESTS), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        timeout=300,
        close_fds=close_fds,
    )


# --- Forked children ---------------------------------------------------------------


@pytest.fixture
def driver() -> Iterator[FaultyHostDriver]:
    driver = FaultyHostDriver()
    yield driver
    driver.assert_nothing_left()


@pytest.fixture
def cache(driver: FaultyHostDriver) -> Iterator[ExtensibleKVCache]:
    """Nine committed blocks, all bytes 5."""
    cache = make_cache(driver, planned())
    cache.commit(2)
    cache.commit(9)
    whole = cache.allocate(cache.size)
    for segment in cache.segments:
        whole[segment.offset : segment.offset + segment.committed_bytes(9)] = 5
    yield cache
    cache.free()


def assert_parent_is_unharmed(cache: ExtensibleKVCache) -> None:
    """Its bytes are there, and it can be used as before."""
    for segment in cache.segments:
        size = segment.committed_bytes(9)
        assert read(cache.address + segment.offset, size) == b"\5" * size
    assert len(memfds()) == cache.num_chunks
    cache.commit(14, defragment=True)
    assert cache.segments_backed_by_one_chunk() == [True] * 3
    cache.release_physical()
    cache.recommit()
    assert cache.num_committed_blocks == 14


def in_a_forked_child(act: Callable[[], None]) -> None:
    """Run ``act`` in a fork of this process; fail if it does, or dies."""
    child = os.fork()
    if child == 0:  # pragma: no cover - another process
        try:
            act()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_forked_child_that_drops_the_cache_gives_nothing_back(
    driver: FaultyHostDriver,
) -> None:
    cache = make_cache(driver, planned())
    cache.commit(9)
    address = cache.address

    def drop() -> None:
        nonlocal cache
        del cache
        gc.collect()
        # Still there for whatever else the child holds.
        assert memfds()
        assert chunk_mappings()
        assert read(address, 8) == bytes(8)

    in_a_forked_child(drop)
    cache.commit(14)
    cache.free()


def test_what_a_forked_child_frees_is_its_own_share(cache: ExtensibleKVCache) -> None:
    def free() -> None:
        cache.free()
        assert memfds() == []
        assert chunk_mappings() == []

    in_a_forked_child(free)
    assert_parent_is_unharmed(cache)


def test_a_forked_child_can_use_a_cache_of_its_own(cache: ExtensibleKVCache) -> None:
    def live() -> None:
        driver = FaultyHostDriver()
        own = make_cache(driver, planned())
        own.commit(9, defragment=True)
        assert own.segments_backed_by_one_chunk() == [True] * 3
        own.release_physical()
        own.recommit()
        address = own.address
        del own
        gc.collect()
        assert not [m for m in chunk_mappings() if m.start == address]

    in_a_forked_child(live)
    assert_parent_is_unharmed(cache)


def test_what_a_forked_child_commits_is_not_the_parents(
    cache: ExtensibleKVCache,
) -> None:
    def grow() -> None:
        cache.commit(20)
        last = cache.address + cache.segments[-1].offset + 19 * 20480
        assert read(last, 20480) == bytes(20480)

    in_a_forked_child(grow)
    assert cache.num_committed_blocks == 9
    assert_parent_is_unharmed(cache)
