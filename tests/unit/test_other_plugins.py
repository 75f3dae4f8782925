"""Other people's code in the same worker: connectors and plugins that patch vLLM too.

On vLLM's own worker classes, without an engine. ``test_beside_other_plugins.py`` of
``tests/e2e`` starts engines with the same two distributions.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from bare_worker import make_worker, take_charge, vllm_put_back
from vllm.config import KVTransferConfig
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import WorkerBase

from vllm_kvpad import capabilities, metrics, plugin
from vllm_kvpad.config import KvpadConfigError
from vllm_kvpad.hosts import supply

DISTS = Path(__file__).parent.parent / "dists"
REGISTERING = """
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
class Mine(KVConnectorBase_V1):
    REGISTERS_DEVICE_MEMORY = True
"""


@pytest.fixture(autouse=True)
def stock_vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever a test does to vLLM, it is undone."""
    monkeypatch.delenv("VLLM_KVPAD_DISABLE", raising=False)
    monkeypatch.setenv("VLLM_PLUGINS", "kvpad,acme-wrapper,acme-replacer")
    # How this process would serve metrics is not the subject here.
    monkeypatch.setattr(metrics, "serve", lambda: None)
    monkeypatch.delenv(metrics.DIRECTORY_VARIABLE, raising=False)
    with vllm_put_back():
        yield


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """What kvpad warns of."""
    messages: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, listener = logging.getLogger("vllm.kvpad"), Listener(logging.WARNING)
    logger.addHandler(listener)
    yield messages
    logger.removeHandler(listener)


@pytest.fixture
def acme(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a plugin of ``tests/dists`` anew."""

    def load(name: str) -> ModuleType:
        monkeypatch.syspath_prepend(str(DISTS / f"acme-{name}"))
        return importlib.import_module(f"acme_{name}")

    yield load
    for name in [name for name in sys.modules if name.startswith("acme_")]:
        del sys.modules[name]


@pytest.fixture
def connector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], Any]]:
    """Configures class ``Mine`` of a module with the given source."""
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"author_{tmp_path.name}".replace("-", "_")

    def configure(source: str) -> Any:
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        return KVTransferConfig(
            kv_connector="Mine", kv_role="kv_both", kv_connector_module_path=name
        )

    yield configure
    sys.modules.pop(name, None)


def test_an_undisturbed_worker_is_supplied(warnings: list[str]) -> None:
    """The tests below would otherwise prove nothing."""
    assert take_charge(make_worker())
    assert warnings == []


# --- Connectors and configuration


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise OSError('no daemon')", "OSError: no daemon"),
        ("raise SystemExit('no licence')", "no licence"),
        ("import acme_library_that_nobody_has", "acme_library_that_nobody_has"),
        ("import time; time.sleep(600)", "did not come back within"),
        (
            "def Mine(config, role, kv_cache_config=None): ...",
            "expected a class, found",
        ),
        ("class Other: ...", "Class Mine not found in author_"),
        (REGISTERING.replace("True", '"yes"'), "Mine.REGISTERS_DEVICE_MEMORY"),
        (
            REGISTERING.replace(
                "REGISTERS_DEVICE_MEMORY = True",
                "@classmethod\n    def EXPORTS_CUDA_IPC(cls, config): raise SystemExit",
            ),
            "Mine.EXPORTS_CUDA_IPC raised SystemExit",
        ),
        (
            REGISTERING + "from vllm.v1.worker.gpu_worker import Worker\n"
            "Worker.initialize_from_config = lambda self, config, again: None\n",
            "Worker.initialize_from_config: takes (self, config, again)",
        ),
    ],
    ids=[
        "raises",
        "exits",
        "misses a library",
        "hangs",
        "no class",
        "no such name",
        "declares nonsense",
        "exits when asked",
        "patches vLLM",
    ],
)
def test_a_connector_that_misbehaves_is_named_in_one_warning_and_vllm_is_stock(
    source: str,
    said: str,
    connector: Callable[[str], Any],
    warnings: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(capabilities, "TIME_LIMIT_SECONDS", 0.5)
    config = connector(source)
    stock = Worker.determine_available_memory
    assert not take_charge(make_worker(config))
    assert Worker.determine_available_memory is stock
    (message,) = warnings
    assert message.startswith("kvpad steps aside, vLLM runs as stock: ")
    assert said in message
    assert config.kv_connector_module_path in message or "Mine" in message
    # Other ranks need not repeat it, and strict stops each of them.
    sys.modules.pop(config.kv_connector_module_path, None)
    assert not take_charge(make_worker(config, rank=1))
    assert len(warnings) == 1
    sys.modules.pop(config.kv_connector_module_path, None)
    with pytest.raises(RuntimeError, match="strict is set"):
        plugin.take_charge_of(make_worker(config, {"kvpad": {"strict": True}}))


def test_a_connector_that_wraps_vllm_is_composed_with(
    connector: Callable[[str], Any], warnings: list[str]
) -> None:
    config = connector(
        REGISTERING
        + """
import functools
from vllm.v1.worker.gpu_worker import Worker
original = Worker.initialize_from_config
@functools.wraps(original)
def wrapper(self, *args):
    return original(self, *args)
Worker.initialize_from_config = wrapper
"""
    )
    assert take_charge(make_worker(config))
    assert warnings == []


def test_a_configuration_object_with_code_that_fails_is_named(
    warnings: list[str],
) -> None:
    class PlatformConfig:
        @property
        def kvpad(self) -> Any:
            raise OSError("no such file")

    assert not take_charge(make_worker(additional_config=PlatformConfig()))
    (message,) = warnings
    assert "PlatformConfig) cannot be read: OSError: no such file" in message


@pytest.mark.parametrize("rank", [0, 1])
def test_a_key_that_was_meant_to_be_kvpad_is_named_once(
    rank: int, warnings: list[str]
) -> None:
    worker = make_worker(additional_config={"kvapd": {"strict": True}}, rank=rank)
    assert take_charge(worker)
    said = [line for line in warnings if "'kvapd'" in line and "'kvpad'?" in line]
    assert len(said) == len(warnings) == (1 if rank == 0 else 0)


def test_a_mistake_of_the_operator_stays_an_error() -> None:
    worker = make_worker(additional_config={"kvpad": {"stirct": True}})
    with pytest.raises(KvpadConfigError, match="stirct"):
        plugin.take_charge_of(worker)
    worker = make_worker(
        additional_config={"kvpad": {"registers_device_memory": {"Nixl": True}}}
    )
    with pytest.raises(KvpadConfigError, match="no KV connector"):
        plugin.take_charge_of(worker)


# --- Plugins that patch the same methods


@pytest.mark.parametrize("order", ["first", "last"])
def test_a_transparent_wrapper_composes_in_either_order(
    order: str, acme: Callable[[str], ModuleType], warnings: list[str]
) -> None:
    theirs = acme("wrapper")
    stock = WorkerBase.__init__
    register = [theirs.register, plugin.register]
    for each in register if order == "first" else reversed(register):
        each()
    # Both are there, and registering kvpad again adds nothing.
    wrapped = WorkerBase.__init__
    plugin.register()
    assert WorkerBase.__init__ is wrapped
    assert plugin.worker_creation_patches.lost() == []
    assert inspect.unwrap(WorkerBase.__init__) is stock
    # Theirs may be registered twice, too.
    theirs.register()
    plugin.register()
    assert plugin.worker_creation_patches.lost() == []

    worker = make_worker()
    assert take_charge(worker)
    assert warnings == []
    # A worker is made after all plugins were registered: kvpad hands what is theirs
    # over as stock.
    supplied: Any = supply.supply_of(worker)
    supplied.determine_available_memory = lambda worker, stock: stock
    stock_method = worker.determine_available_memory()
    assert stock_method.func.__globals__ is vars(theirs)


def test_a_wrapper_put_on_a_supplied_worker_composes(
    acme: Callable[[str], ModuleType], warnings: list[str]
) -> None:
    worker = make_worker()
    assert take_charge(worker)
    theirs = acme("wrapper")
    theirs.register()
    supplied: Any = supply.supply_of(worker)
    assert supplied._lost_patches() == []
    supplied.determine_available_memory = lambda worker, stock: 7
    assert worker.determine_available_memory() == 7
    assert theirs.notes[-1] == "determine_available_memory"
    # And the next worker of this process is supplied, too.
    assert take_charge(make_worker())


@pytest.mark.parametrize("order", ["first", "last"])
def test_a_replacement_with_other_arguments_is_named_and_vllm_is_left_alone(
    order: str, acme: Callable[[str], ModuleType], warnings: list[str]
) -> None:
    register = [acme("replacer").register, plugin.register]
    for each in register if order == "first" else reversed(register):
        each()
    theirs = Worker.determine_available_memory
    untouched = Worker.initialize_from_config
    assert not take_charge(make_worker())
    assert Worker.determine_available_memory is theirs
    assert Worker.initialize_from_config is untouched
    (message,) = warnings
    assert "Worker.determine_available_memory: takes (self, fraction)" in message
    assert "acme_replacer" in message


def test_a_replacement_after_kvpad_took_charge_makes_it_step_aside(
    acme: Callable[[str], ModuleType], warnings: list[str]
) -> None:
    worker = make_worker()
    assert take_charge(worker)
    acme("replacer").register()
    supplied: Any = supply.supply_of(worker)
    worker.device = SimpleNamespace(type="cpu")
    worker.cache_config = SimpleNamespace()
    config = SimpleNamespace(kv_cache_tensors=[object()], kv_cache_layout="LBHNC")
    stock_ran: list[Any] = []
    supplied.initialize_from_config(worker, stock_ran.append, config)
    assert stock_ran == [config]
    assert supplied.stepped_aside
    (message,) = warnings
    assert "Worker.determine_available_memory (by acme_replacer)" in message
    # A second worker of this process is not taken charge of at all.
    assert not take_charge(make_worker())


def test_a_replaced_entrance_is_noticed_when_kvpad_is_registered_again(
    warnings: list[str],
) -> None:
    plugin.register()

    def __init__(self: Any, *args: Any) -> None: ...

    WorkerBase.__init__ = __init__
    plugin.register()
    (message,) = warnings
    assert f"WorkerBase.__init__ (by {__name__}): replaced after" in message
