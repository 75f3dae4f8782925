"""Each symbol that kvpad relies on, missing or changed in turn: it says which, and
leaves vLLM as it is."""

from __future__ import annotations

import importlib
import inspect
import logging
from types import ModuleType
from typing import Any

import generations
import native_engine as engines
import pytest
from native_engine import Start, applied_sets, foreign, make_config

from vllm_kvpad import plugin
from vllm_kvpad.hosts import pad_native
from vllm_kvpad.patching import PatchPoint

ROUNDING_POINTS = [
    *plugin.engine_creation_patches.points,
    *pad_native.ENGINE_PATCHES.points,
    *pad_native.WORKER_PATCHES.points,
]
ANSWER = PatchPoint(
    "vllm.v1.worker.extensible_kv_cache:registers_kv_cache_memory", ("vllm_config",)
)
MODULES = generations.modules_of("rounding")
PAD = PatchPoint("vllm.v1.core.kv_cache_utils:pad_kv_cache_segments", ())


def target_of(point: PatchPoint) -> str:
    return point.target


def owner_of(point: PatchPoint) -> tuple[Any, str]:
    owner, name, _ = point.find()
    return owner, name


def remove(point: PatchPoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this vLLM had no such symbol, wherever it was imported."""
    owner, name, value = point.find()
    monkeypatch.delattr(owner, name)
    if isinstance(owner, ModuleType):
        for module_name in MODULES:
            module = importlib.import_module(module_name)
            if module is not owner and vars(module).get(name) is value:
                monkeypatch.delattr(module, name)


def change(point: PatchPoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it needed one more argument."""
    owner, name, value = point.find()

    class Changed:
        def __init__(self, *args: Any, another: int) -> None: ...

    def changed(self: Any, another: int) -> None: ...

    monkeypatch.setattr(owner, name, Changed if inspect.isclass(value) else changed)


def patched(snapshots: dict[str, dict[str, Any]]) -> list[str]:
    return [
        f"{module}:{name}"
        for module, names in snapshots.items()
        for name, value in snapshot(module).items()
        if name in names and names[name] is not value
    ]


def snapshot(module_name: str) -> dict[str, Any]:
    module = importlib.import_module(module_name)
    found = dict(vars(module))
    for name, value in vars(module).items():
        if inspect.isclass(value) and value.__module__ == module_name:
            found |= {f"{name}.{key}": each for key, each in vars(value).items()}
    return found


def check_steps_aside(
    point: PatchPoint, start: Start, log: pytest.LogCaptureFixture
) -> None:
    """Make a worker of an engine that kvpad would pad; look for the name of ``point``.

    No more of the engine is started: without the symbol upstream itself would fail.
    """
    from vllm.v1.worker.worker_base import WorkerBase

    before = {name: snapshot(name) for name in MODULES}
    config = make_config(foreign("RegisteringConnector"), blocks=102)
    plugin.register()
    if plugin.engine_creation_patches.is_applied:
        plugin.take_charge_of_engine(config)

    class AnyWorker(WorkerBase): ...

    worker_class = getattr(
        importlib.import_module("vllm.v1.worker.gpu_worker"), "Worker", AnyWorker
    )
    worker_class(config, 0, 0, "", True)
    creation = {id(plugin.worker_creation_patches), id(plugin.engine_creation_patches)}
    assert [each for each in applied_sets() if id(each) not in creation] == []
    assert set(patched(before)) <= {"vllm.v1.executor.abstract:Executor.__init__"}
    warnings = [r.getMessage() for r in log.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "kvpad steps aside" in warnings[0]
    symbol = point.target.partition(":")[2].rpartition(".")[2]
    assert symbol in warnings[0]


@pytest.mark.usefixtures("rounding")
class TestRounding:
    @pytest.mark.parametrize("point", ROUNDING_POINTS, ids=target_of)
    def test_missing(
        self,
        point: PatchPoint,
        start: Start,
        monkeypatch: pytest.MonkeyPatch,
        kvpad_log: pytest.LogCaptureFixture,
    ) -> None:
        with monkeypatch.context() as patch:
            remove(point, patch)
            check_steps_aside(point, start, kvpad_log)

    @pytest.mark.parametrize("point", ROUNDING_POINTS, ids=target_of)
    def test_changed(
        self,
        point: PatchPoint,
        start: Start,
        monkeypatch: pytest.MonkeyPatch,
        kvpad_log: pytest.LogCaptureFixture,
    ) -> None:
        with monkeypatch.context() as patch:
            change(point, patch)
            check_steps_aside(point, start, kvpad_log)

    def test_code_that_works_otherwise(
        self,
        start: Start,
        monkeypatch: pytest.MonkeyPatch,
        kvpad_log: pytest.LogCaptureFixture,
    ) -> None:
        """The same signature, another way: gaps would not be where kvpad puts them."""
        from vllm.v1.worker.extensible_kv_cache import ExtensibleKVCache

        def __init__(self: Any, kv_cache_config: Any, device: Any) -> None:
            self.pieces = [kv_cache_config, device]

        point = next(
            p
            for p in pad_native.WORKER_PATCHES.points
            if p.target.endswith("ExtensibleKVCache")
        )
        with monkeypatch.context() as patch:
            patch.setattr(ExtensibleKVCache, "__init__", __init__)
            check_steps_aside(point, start, kvpad_log)
        assert "does not use buffer, segment_capacities" in kvpad_log.text

    def test_without_any_change_it_does_pad(self, start: Start) -> None:
        """The tests above can fail."""
        engine = start(make_config(foreign("RegisteringConnector"), blocks=102))
        assert all(engines.facts_of(engine).in_one_chunk)
        assert len(applied_sets()) == 4


@pytest.mark.usefixtures("padding")
class TestPadding:
    @pytest.mark.parametrize("point", [ANSWER, PAD], ids=target_of)
    def test_missing(
        self,
        point: PatchPoint,
        start: Start,
        monkeypatch: pytest.MonkeyPatch,
        kvpad_log: pytest.LogCaptureFixture,
    ) -> None:
        with monkeypatch.context() as patch:
            remove(point, patch)
            check_steps_aside(point, start, kvpad_log)

    def test_changed(
        self,
        start: Start,
        monkeypatch: pytest.MonkeyPatch,
        kvpad_log: pytest.LogCaptureFixture,
    ) -> None:
        def registers_kv_cache_memory(connector: str, strict: bool) -> bool:
            return True

        owner, name = owner_of(ANSWER)
        registers_kv_cache_memory.__module__ = owner.__name__
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, registers_kv_cache_memory)
            check_steps_aside(ANSWER, start, kvpad_log)
        assert "takes (connector, strict)" in kvpad_log.text


@pytest.mark.usefixtures("rounding")
def test_strict_makes_it_an_error_of_the_start(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.worker import extensible_kv_cache

    def extend_kv_cache(runner: Any, num_blocks: int, how: str) -> None: ...

    config = make_config(
        foreign("RegisteringConnector"), blocks=102, kvpad={"strict": True}
    )
    with monkeypatch.context() as patch:
        patch.setattr(extensible_kv_cache, "extend_kv_cache", extend_kv_cache)
        with pytest.raises(RuntimeError, match="extend_kv_cache"):
            start(config)
