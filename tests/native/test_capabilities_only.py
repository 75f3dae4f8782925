"""kvpad over the vLLM whose own cache pads, for the connectors on a list of names."""

from __future__ import annotations

import importlib
import logging
from typing import Any

import generations
import native_engine as engines
import pytest
from native_engine import Start, foreign, make_config, transfer_config
from scenario import COUNTS, check_registrable, check_start

from vllm_kvpad.hosts import select_host

pytestmark = pytest.mark.usefixtures("padding")

USERS = ("vllm.v1.worker.extensible_kv_cache", "vllm.v1.worker.gpu_worker")


def multi(*names: str) -> Any:
    children = [
        {
            "kv_connector": name,
            "kv_role": "kv_both",
            "kv_connector_module_path": "foreign_connectors",
        }
        for name in names
    ]
    return transfer_config(
        "MultiConnector", kv_connector_extra_config={"connectors": children}
    )


REGISTERING = [
    transfer_config("NixlConnector"),
    foreign("RegisteringConnector"),
    multi("CopyingConnector", "RegisteringConnector"),
]
# By its name vLLM would pad for the second one.
COPYING = [foreign("CopyingConnector"), multi("CopyingConnector")]


def name_of(config: Any) -> str:
    return str(config.kv_connector)


def answers(vllm_config: Any) -> set[bool]:
    """What every module that has the function by name is told."""
    return {
        importlib.import_module(name).registers_kv_cache_memory(vllm_config)
        for name in USERS
    }


def test_this_vllm_is_recognised() -> None:
    assert select_host().name == "capabilities_only"


def test_it_is_recognised_where_functions_that_round_are_still_around(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.utils import extensible_tensor
    from vllm.v1.core import kv_cache_utils

    from vllm_kvpad.hosts.pad_native import PadNativeHost

    def left_over(*args: Any) -> None: ...

    align = "align_extensible_kv_cache_capacity"
    monkeypatch.setattr(kv_cache_utils, align, left_over, raising=False)
    aligned = "granule_aligned_blocks"
    monkeypatch.setattr(extensible_tensor, aligned, left_over, raising=False)
    assert PadNativeHost().missing() == []
    assert select_host().name == "capabilities_only"


@pytest.mark.parametrize("blocks", COUNTS)
@pytest.mark.parametrize("connector", REGISTERING, ids=name_of)
def test_registering_connectors_are_padded_for_on_the_list_or_not(
    connector: Any, blocks: int, start: Start
) -> None:
    config = make_config(connector, blocks=blocks)
    check_registrable(engines.facts_of(start(config)), blocks)
    assert answers(config) == {True}


@pytest.mark.parametrize("connector", COPYING, ids=name_of)
def test_connectors_that_copy_are_not(connector: Any, start: Start) -> None:
    config = make_config(connector, blocks=1331)
    engine = start(config)
    check_start(engines.facts_of(engine), 1331)
    assert answers(config) == {False}
    (worker,) = engines.workers(engine)
    cache = worker.model_runner.extensible_kv_cache
    assert cache.buffer.num_releases == 0
    assert cache.size == cache.capacity_blocks * cache.bytes_per_block


def test_operators_word_reaches_vllm(start: Start) -> None:
    config = make_config(
        REGISTERING[0],
        blocks=102,
        kvpad={"registers_device_memory": {"NixlConnector": False}},
    )
    start(config)
    assert answers(config) == {False}


def test_without_kvpad_the_list_decides(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_KVPAD_DISABLE", "1")
    config = make_config(foreign("RegisteringConnector"), blocks=1331)
    engine = start(config)
    assert answers(config) == {False}
    assert not all(engines.facts_of(engine).in_one_chunk)


def test_engines_that_kvpad_has_no_charge_of_are_answered_by_the_list(
    start: Start,
) -> None:
    start(make_config(REGISTERING[1], blocks=102))
    other = make_config(foreign("CopyingConnector"), blocks=102)
    assert answers(other) == {False}
    assert answers(make_config(transfer_config("NixlConnector"), blocks=102)) == {True}
    assert answers(make_config(None, blocks=102)) == {False}


def test_nothing_else_is_patched(start: Start) -> None:
    names = generations.modules_of("padding")
    modules = [importlib.import_module(name) for name in names]
    before = {module.__name__: snapshot(module) for module in modules}
    start(make_config(REGISTERING[1], blocks=102))
    after = {module.__name__: snapshot(module) for module in modules}
    changed = {
        (module, name)
        for module, names in after.items()
        for name, value in names.items()
        if before[module].get(name) is not value
    }
    assert changed == {
        *((module, "registers_kv_cache_memory") for module in USERS),
        ("vllm.v1.executor.abstract", "Executor.__init__"),
    }


def snapshot(module: Any) -> dict[str, Any]:
    """Globals of a module, and the attributes of its classes."""
    found = dict(vars(module))
    for name, value in vars(module).items():
        if isinstance(value, type) and value.__module__ == module.__name__:
            found |= {f"{name}.{key}": each for key, each in vars(value).items()}
    return found


def test_users_choice_wins(start: Start, kvpad_log: pytest.LogCaptureFixture) -> None:
    config = make_config(REGISTERING[1], blocks=102, enable=False)
    engine = start(config)
    assert engine.kv_cache_config.num_blocks == engines.CAPACITY_BLOCKS
    assert answers(config) == {False}  # as the list has it
    (record,) = kvpad_log.records
    assert record.levelno == logging.INFO
    assert "enable_extensible_kv_cache" in record.getMessage()


def test_one_line_at_info_and_no_more(
    start: Start, kvpad_log: pytest.LogCaptureFixture
) -> None:
    start(make_config(REGISTERING[1], blocks=102))
    (record,) = kvpad_log.records
    assert record.levelno == logging.INFO
    assert "tells vLLM" in record.getMessage()
    assert "RegisteringConnector registers device memory" in record.getMessage()


def test_the_argument_may_be_the_kv_transfer_config(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows yet which of the two it will be."""

    home = importlib.import_module(USERS[0])
    # In the module itself: what is another package's would not be touched.
    monkeypatch.setattr(home, "registers_kv_cache_memory", None)
    exec(
        "def registers_kv_cache_memory(kv_transfer_config):\n    return False\n",
        vars(home),
    )
    # Its users in this double pass the other; no engine is started to the end.
    from vllm.v1.worker.gpu_worker import Worker

    from vllm_kvpad import plugin

    plugin.register()
    config = make_config(REGISTERING[1], blocks=102)
    Worker(config, 0, 0, "", True)
    assert home.registers_kv_cache_memory(config.kv_transfer_config) is True
    assert home.registers_kv_cache_memory(None) is False
