"""Switching on, registering again, and leaving an unknown vLLM alone."""

from __future__ import annotations

import ast
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.worker.worker_base import WorkerBase

from vllm_kvpad import metrics, plugin
from vllm_kvpad.config import KvpadConfigError
from vllm_kvpad.hosts import native_cache


@pytest.fixture(autouse=True)
def unpatched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.delenv("VLLM_KVPAD_DISABLE", raising=False)
    monkeypatch.setenv("VLLM_PLUGINS", "kvpad")
    # How this process would serve metrics is not the subject here.
    monkeypatch.setattr(metrics, "serve", lambda: None)
    monkeypatch.setenv(metrics.DIRECTORY_VARIABLE, str(tmp_path))
    stock = WorkerBase.__init__
    yield
    plugin.engine_creation_patches.revert()
    plugin.worker_creation_patches.revert()
    plugin.front_end_patches.revert()
    assert WorkerBase.__init__ is stock


@pytest.fixture
def kvpad_log(
    caplog: pytest.LogCaptureFixture,
) -> Iterator[pytest.LogCaptureFixture]:
    """kvpad's log, once."""
    logger = logging.getLogger("vllm.kvpad")
    logger.addHandler(caplog.handler)
    logger.propagate = False  # whether vLLM's logger passes it on is its business
    yield caplog
    logger.propagate = True
    logger.removeHandler(caplog.handler)


def patched() -> bool:
    return hasattr(WorkerBase.__init__, "__wrapped__")


@pytest.mark.parametrize("plugins", ["kvpad", "other,kvpad", " kvpad , other"])
def test_naming_kvpad_turns_it_on(
    plugins: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", plugins)
    plugin.register()
    assert patched()


@pytest.mark.parametrize("plugins", ["", "other", "kvpadding"])
def test_any_other_list_leaves_it_off(
    plugins: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", plugins)
    plugin.register()
    assert not patched()


def test_without_a_list_it_stays_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PLUGINS")
    plugin.register()
    assert not patched()


def test_the_environment_can_turn_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KVPAD_DISABLE", "1")
    plugin.register()
    assert not patched()


def test_a_misspelt_switch_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KVPAD_DISABLE", "ture")
    with pytest.raises(KvpadConfigError, match="ture"):
        plugin.register()
    assert not patched()


def test_registering_again_changes_nothing() -> None:
    plugin.register()
    once = WorkerBase.__init__
    plugin.register()
    assert WorkerBase.__init__ is once


def test_engine_cores_are_watched_only_where_vllm_has_a_cache_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.v1.executor.abstract import Executor

    stock = Executor.__init__
    plugin.register()
    assert Executor.__init__ is stock
    plugin.worker_creation_patches.revert()
    monkeypatch.setattr(native_cache, "is_installed", lambda: True)
    plugin.register()
    assert Executor.__init__.__wrapped__ is stock
    plugin.engine_creation_patches.revert()
    assert Executor.__init__ is stock


def test_workers_are_not_watched_where_engine_cores_cannot_be(
    monkeypatch: pytest.MonkeyPatch, kvpad_log: pytest.LogCaptureFixture
) -> None:
    from vllm.v1.executor.abstract import Executor

    def __init__(self: Any, everything: Any) -> None: ...

    monkeypatch.setattr(native_cache, "is_installed", lambda: True)
    with monkeypatch.context() as patch:
        patch.setattr(Executor, "__init__", __init__)
        plugin.register()
        assert not patched()
    assert "vllm.v1.executor.abstract:Executor.__init__" in kvpad_log.text


def test_registering_imports_no_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a front end that never makes a worker there is nothing to import."""
    program = (
        "import sys; from vllm_kvpad import plugin; import vllm.v1.worker.worker_base;"
        "before = set(sys.modules); plugin.register();"
        "print('NEW', sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    (line,) = [x for x in done.stdout.splitlines() if x.startswith("NEW")]
    new = ["vllm_kvpad.config", "vllm_kvpad.metrics"]
    assert ast.literal_eval(line.removeprefix("NEW ")) == new


def test_an_unknown_vllm_is_left_alone_after_one_warning(
    monkeypatch: pytest.MonkeyPatch,
    kvpad_log: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    def __init__(self: Any, everything: Any) -> None: ...

    with monkeypatch.context() as patch:
        patch.setattr(WorkerBase, "__init__", __init__)
        plugin.register()
        assert WorkerBase.__init__ is __init__
    messages = [
        record.getMessage()
        for record in kvpad_log.records
        if record.levelno >= logging.WARNING
    ]
    assert len(messages) == 1
    assert "vllm.v1.worker.worker_base:WorkerBase.__init__" in messages[0]
    assert "takes (self, everything)" in messages[0]
    # And in the metrics, of whichever engine: none is known in this process.
    (report,) = tmp_path.glob("engine-*.json")
    said = metrics.EngineReport.model_validate_json(report.read_bytes())
    assert said.mode is metrics.Mode.STEPPED_ASIDE
    assert said.reason in messages[0]


def test_wrong_settings_are_found_where_arguments_are_read(tmp_path: Path) -> None:
    """Before the model's folder is even looked at: there is none."""
    from vllm.engine.arg_utils import EngineArgs

    plugin.register()
    engine_args = EngineArgs(
        model=str(tmp_path / "none"), additional_config={"kvpad": {"stirct": True}}
    )
    with pytest.raises(KvpadConfigError, match="did you mean 'strict'"):
        engine_args.create_engine_config()
