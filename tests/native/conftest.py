"""Fixtures: a generation of upstream in vLLM's place, kvpad on, engines freed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import generations
import pytest

pytest.importorskip("vllm")

import native_engine as engines

from vllm_kvpad import metrics, plugin
from vllm_kvpad.hosts import capabilities_only, pad_native


@pytest.fixture(autouse=True)
def clean_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """kvpad switched on, and nothing of it left in vLLM afterwards."""
    from vllm.distributed.kv_transfer import kv_transfer_state

    monkeypatch.delenv("VLLM_KVPAD_DISABLE", raising=False)
    monkeypatch.setenv("VLLM_PLUGINS", "kvpad")
    # How this process would serve metrics is not the subject here.
    monkeypatch.setattr(metrics, "serve", lambda: None)
    yield
    kv_transfer_state._KV_CONNECTOR_AGENT = None
    for patches in engines.applied_sets():
        patches.revert()
    pad_native._charges.clear()
    capabilities_only._answers.clear()
    capabilities_only._patches_at.cache_clear()


@pytest.fixture
def rounding(monkeypatch: pytest.MonkeyPatch, clean_process: None) -> None:
    generations.install("rounding", monkeypatch)


@pytest.fixture
def padding(monkeypatch: pytest.MonkeyPatch, clean_process: None) -> None:
    generations.install("padding", monkeypatch)


@pytest.fixture
def start() -> Iterator[engines.Start]:
    """Start engine cores, with kvpad registered as vLLM's plugin loader would."""
    started = []

    def start_engine(vllm_config: Any) -> Any:
        plugin.register()
        engine = engines.start(vllm_config)
        started.append(engine)
        return engine

    yield start_engine
    for engine in started:
        engines.free(engine)


@pytest.fixture
def kvpad_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """kvpad's log, once, from INFO on."""
    logger = logging.getLogger("vllm.kvpad")
    logger.addHandler(caplog.handler)
    logger.propagate = False
    level = logger.level
    logger.setLevel(logging.INFO)
    yield caplog
    logger.setLevel(level)
    logger.propagate = True
    logger.removeHandler(caplog.handler)
