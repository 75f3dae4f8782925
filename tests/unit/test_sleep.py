"""A vLLM sleep backend, extended to a cache that its allocator does not know."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from strategies import plan_uniform  # noqa: E402

from vllm_kvpad.hosts.sleep import CacheAwareSleepModeBackend  # noqa: E402
from vllm_kvpad.kv_cache import ExtensibleKVCache  # noqa: E402
from vllm_kvpad.vmm import HostVmmDriver  # noqa: E402


class RecordingBackend:
    """Stands for vLLM's CuMem backend; what it frees is not the cache's."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def suspend(self, level: int = 1) -> None:
        self.calls.append(("suspend", level))

    def resume(self, tags: list[str] | None = None) -> None:
        self.calls.append(("resume", tags))

    def discard(self, tags: tuple[str, ...]) -> None:
        self.calls.append(("discard", tags))

    def state(self) -> str:
        return "RUNNING"


@pytest.fixture
def cache() -> Any:
    from vllm.v1.kv_cache_layout import KVCacheLayout

    layout = KVCacheLayout.LBNHC
    made = ExtensibleKVCache(
        plan_uniform(3, 64, layout), layout, "cpu", HostVmmDriver(4096)
    )
    made.commit(64)
    yield made
    made.free()


def test_double_has_the_methods_of_vllms_backend() -> None:
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackend

    for name in ("suspend", "resume", "discard", "state"):
        assert callable(getattr(SleepModeBackend, name))


def test_suspend_frees_the_cache_and_resume_brings_it_back_zeroed(cache: Any) -> None:
    inner = RecordingBackend()
    backend = CacheAwareSleepModeBackend(inner, cache)
    view = cache.allocate(cache.size)
    view[0] = 7
    backend.suspend(2)
    assert cache.physical_bytes == 0
    backend.resume()
    assert cache.num_committed_blocks == 64
    assert int(view[0]) == 0
    assert inner.calls == [("suspend", 2), ("resume", None)]
    assert backend.state() == "RUNNING"


def test_waking_the_weights_leaves_the_cache_asleep(cache: Any) -> None:
    backend = CacheAwareSleepModeBackend(RecordingBackend(), cache)
    backend.suspend()
    backend.resume(["weights"])
    assert cache.physical_bytes == 0
    backend.resume(["kv_cache"])
    assert cache.num_committed_blocks == 64


def test_waking_everything_after_the_cache_finds_it_awake(cache: Any) -> None:
    backend = CacheAwareSleepModeBackend(RecordingBackend(), cache)
    backend.suspend()
    backend.resume(["kv_cache"])
    backend.resume()
    assert cache.num_committed_blocks == 64


def test_discard_drops_the_cache_only_where_it_is_named(cache: Any) -> None:
    backend = CacheAwareSleepModeBackend(RecordingBackend(), cache)
    backend.discard(("weights",))
    assert cache.num_committed_blocks == 64
    backend.discard(("kv_cache",))
    assert cache.physical_bytes == 0
    backend.resume(["kv_cache"])
    assert cache.num_committed_blocks == 64


def test_whoever_asked_is_told_when_the_cache_has_gone_or_come_back(
    cache: Any,
) -> None:
    told: list[int] = []
    backend = CacheAwareSleepModeBackend(
        RecordingBackend(),
        cache,
        on_change=lambda: told.append(cache.num_committed_blocks),
    )
    backend.suspend()
    backend.resume(["weights"])  # changes nothing
    backend.resume()
    backend.discard(("weights",))  # nor does this
    backend.discard(("kv_cache",))
    assert told == [0, 64, 0]
