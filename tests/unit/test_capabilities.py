"""Who answers for a connector, and what a wrong answer does.

The connectors are real classes on vLLM's base, loaded by vLLM's factory through
``kv_connector_module_path``; the third party is a real distribution, installed by pip.
"""

from __future__ import annotations

import importlib.util
import itertools
import logging
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vllm_kvpad import capabilities
from vllm_kvpad.capabilities import plugin_manager, resolve
from vllm_kvpad.config import KvpadConfigError

pytest.importorskip("vllm")

V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
BASE = f"from {V1}.base import KVConnectorBase_V1\n"
NIXL = f"from {V1}.nixl import NixlConnector\n"

# Abstract methods stay abstract: kvpad never instantiates a connector.
REGISTERING = {
    "NixlConnector": f"{V1}.nixl",
    "NixlPullConnector": f"{V1}.nixl",
    "NixlPushConnector": f"{V1}.nixl",
    "NixlBaseConnector": f"{V1}.nixl.connector",
    "MooncakeConnector": f"{V1}.mooncake.mooncake_connector",
    "MooncakeStoreConnector": f"{V1}.mooncake.store.connector",
    "MoRIIOConnector": f"{V1}.moriio.moriio_connector",
    "UMBPStoreConnector": f"{V1}.umbp.connector",
}

Configure = Callable[..., Any]


def transfer_config(name: str, **arguments: Any) -> Any:
    from vllm.config import KVTransferConfig

    return KVTransferConfig(**{"kv_connector": name, "kv_role": "kv_both", **arguments})


def multi(*children: dict[str, Any], **arguments: Any) -> Any:
    return transfer_config(
        "MultiConnector",
        kv_connector_extra_config={"connectors": list(children)},
        **arguments,
    )


def child(name: str, **arguments: Any) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": "kv_both", **arguments}


@pytest.fixture
def out_of_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Configure]:
    """Writes an author's module and configures one class of it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    serial = itertools.count()
    written: list[str] = []

    def configure(source: str, name: str = "Mine", **arguments: Any) -> Any:
        module = f"author_{tmp_path.name}_{next(serial)}".replace("-", "_")
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        written.append(module)
        return transfer_config(name, kv_connector_module_path=module, **arguments)

    yield configure
    for module in written:
        sys.modules.pop(module, None)


@pytest.fixture
def third_party(
    site_packages: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., None]]:
    """Makes installed distributions visible, as in a new process."""

    def activate(*names: str) -> None:
        for name in names:
            monkeypatch.syspath_prepend(str(site_packages(name)))
        importlib.invalidate_caches()
        plugin_manager.cache_clear()

    yield activate
    plugin_manager.cache_clear()
    for module in [name for name in sys.modules if name.startswith("acme_")]:
        del sys.modules[module]


@pytest.fixture(autouse=True)
def no_plugins_of_the_machine() -> Iterator[None]:
    plugin_manager.cache_clear()
    yield
    plugin_manager.cache_clear()


@pytest.fixture
def log() -> Iterator[list[logging.LogRecord]]:
    """What kvpad logs. (vLLM's logger decides whether records get to pytest's.)"""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.kvpad")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield records
    logger.setLevel(level)
    logger.removeHandler(handler)


def test_the_module_imports_neither_vllm_nor_torch() -> None:
    code = (
        "import sys, vllm_kvpad.capabilities, vllm_kvpad.config\n"
        "assert not {'vllm', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# No connector.


@pytest.mark.parametrize("config", [None, SimpleNamespace(kv_connector=None)])
def test_without_a_connector_nothing_registers(config: Any) -> None:
    answer = resolve(config)
    assert answer.name is None
    assert not answer.registers_device_memory
    assert not answer.exports_cuda_ipc
    assert answer.reasons_to_step_aside(rocm=True) == ()
    assert answer.describe() == "no KV connector"


def test_an_override_without_a_connector_is_an_error() -> None:
    with pytest.raises(KvpadConfigError, match=r"'NixlConnector'.*no KV connector"):
        resolve(None, overrides={"NixlConnector": True})


# Precedence, one test per pair of neighbours and the rule between them.


@pytest.mark.parametrize("value", [True, False])
def test_override_beats_the_class_attribute(
    out_of_tree: Configure, value: bool
) -> None:
    config = out_of_tree(
        BASE
        + f"""
class Mine(KVConnectorBase_V1):
    REGISTERS_DEVICE_MEMORY = {not value}
"""
    )
    answer = resolve(config, overrides={"Mine": value})
    assert answer.registers_device_memory is value
    assert "additional_config.kvpad.registers_device_memory" in answer.source


def test_override_beats_the_hook(
    out_of_tree: Configure, third_party: Callable[..., None]
) -> None:
    third_party("acme-kv")
    config = out_of_tree(BASE + "class AcmeStore(KVConnectorBase_V1): ...", "AcmeStore")
    assert not resolve(config).registers_device_memory
    assert resolve(config, overrides={"AcmeStore": True}).registers_device_memory


def test_override_beats_the_table() -> None:
    config = transfer_config("OffloadingConnector")
    assert not resolve(config).registers_device_memory
    answer = resolve(config, overrides={"OffloadingConnector": True})
    assert answer.registers_device_memory


def test_override_of_an_undeclared_connector_counts_as_declared(
    out_of_tree: Configure, log: list[logging.LogRecord]
) -> None:
    config = out_of_tree(BASE + "class Mine(KVConnectorBase_V1): ...")
    answer = resolve(config, overrides={"Mine": False})
    assert answer.declared
    assert not answer.registers_device_memory
    assert not log


@pytest.mark.parametrize("rdma", [True, False])
def test_the_class_attribute_beats_the_hook(
    out_of_tree: Configure, third_party: Callable[..., None], rdma: bool
) -> None:
    third_party("acme-kv")
    config = out_of_tree(
        BASE
        + f"""
class AcmeStore(KVConnectorBase_V1):
    REGISTERS_DEVICE_MEMORY = {not rdma}
""",
        "AcmeStore",
        kv_connector_extra_config={"acme_rdma": rdma},
    )
    answer = resolve(config)
    assert answer.registers_device_memory is not rdma
    assert answer.source == f"AcmeStore.REGISTERS_DEVICE_MEMORY = {not rdma}"


def test_an_inherited_attribute_beats_the_hook(
    out_of_tree: Configure, third_party: Callable[..., None]
) -> None:
    third_party("acme-kv")
    config = out_of_tree(
        BASE
        + """
class Root(KVConnectorBase_V1):
    REGISTERS_DEVICE_MEMORY = True
class AcmeStore(Root): ...
""",
        "AcmeStore",
    )
    answer = resolve(config)
    assert answer.registers_device_memory
    assert "inherited from" in answer.source
    assert answer.source.endswith(".Root")


def test_the_class_attribute_beats_the_table(out_of_tree: Configure) -> None:
    config = out_of_tree(
        NIXL
        + """
class Mine(NixlConnector):
    REGISTERS_DEVICE_MEMORY = False
"""
    )
    assert not resolve(config).registers_device_memory


def test_an_attribute_inherited_from_a_base_nearer_than_the_tables_class_wins(
    out_of_tree: Configure,
) -> None:
    config = out_of_tree(
        NIXL
        + """
class Staged(NixlConnector):
    REGISTERS_DEVICE_MEMORY = False
class Mine(Staged): ...
"""
    )
    answer = resolve(config)
    assert not answer.registers_device_memory
    assert "Staged" in answer.source


def test_the_tables_class_beats_an_attribute_of_a_farther_base(
    out_of_tree: Configure,
) -> None:
    config = out_of_tree(
        NIXL
        + """
class Copies:
    REGISTERS_DEVICE_MEMORY = False
class Mine(NixlConnector, Copies): ...
"""
    )
    answer = resolve(config)
    assert answer.registers_device_memory
    assert "built-in table" in answer.source


def test_a_declaration_on_a_class_of_the_table_beats_its_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What vLLM's own class says one day must not need a new kvpad.
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
        OffloadingConnector,
    )

    monkeypatch.setattr(
        OffloadingConnector, "REGISTERS_DEVICE_MEMORY", True, raising=False
    )
    assert resolve(transfer_config("OffloadingConnector")).registers_device_memory


def test_a_default_on_vllms_root_class_does_not_beat_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    monkeypatch.setattr(
        KVConnectorBase_V1, "REGISTERS_DEVICE_MEMORY", False, raising=False
    )
    assert resolve(transfer_config("NixlConnector")).registers_device_memory


def test_the_hook_beats_the_table(
    out_of_tree: Configure, third_party: Callable[..., None]
) -> None:
    third_party("acme-kv")
    config = out_of_tree(NIXL + "class AcmeNixl(NixlConnector): ...", "AcmeNixl")
    answer = resolve(config)
    assert not answer.registers_device_memory
    assert answer.source == "plugin acme (acme-kv 1.2.3)"


def test_the_hook_beats_undeclared(
    out_of_tree: Configure,
    third_party: Callable[..., None],
    log: list[logging.LogRecord],
) -> None:
    third_party("acme-kv")
    config = out_of_tree(BASE + "class AcmeStore(KVConnectorBase_V1): ...", "AcmeStore")
    answer = resolve(config)
    assert answer.declared
    assert not answer.registers_device_memory
    assert not log


def test_a_hook_that_answers_none_leaves_it_to_the_table(
    third_party: Callable[..., None],
) -> None:
    third_party("acme-kv")
    assert "built-in table" in resolve(transfer_config("NixlConnector")).source


def test_the_table_beats_undeclared(
    out_of_tree: Configure, log: list[logging.LogRecord]
) -> None:
    config = out_of_tree(
        f"from {V1}.offloading_connector import OffloadingConnector\n"
        "class Mine(OffloadingConnector): ...\n"
    )
    answer = resolve(config)
    assert answer.declared
    assert not answer.registers_device_memory
    assert not log


# The method resolution order.

DIAMOND = """
class Root(KVConnectorBase_V1):
    REGISTERS_DEVICE_MEMORY = True
class Left(Root): {left}
class Right(Root): {right}
class Mine(Left, Right): ...
"""


@pytest.mark.parametrize(
    ("left", "right", "registers", "who"),
    [
        ("...", "...", True, "Root"),
        ("...", "REGISTERS_DEVICE_MEMORY = False", False, "Right"),
        ("REGISTERS_DEVICE_MEMORY = False", "...", False, "Left"),
        (
            "REGISTERS_DEVICE_MEMORY = True",
            "REGISTERS_DEVICE_MEMORY = False",
            True,
            "Left",
        ),
    ],
)
def test_in_a_diamond_the_first_class_of_the_mro_answers(
    out_of_tree: Configure, left: str, right: str, registers: bool, who: str
) -> None:
    answer = resolve(out_of_tree(BASE + DIAMOND.format(left=left, right=right)))
    assert answer.registers_device_memory is registers
    assert answer.source.endswith(f".{who}")


@pytest.mark.parametrize(
    ("bases", "registers"),
    [("NixlConnector, OffloadingConnector", True), ("Copying, NixlConnector", False)],
)
def test_of_two_classes_of_the_table_the_first_in_the_mro_answers(
    out_of_tree: Configure, bases: str, registers: bool
) -> None:
    config = out_of_tree(
        NIXL
        + f"""
from {V1}.offloading_connector import OffloadingConnector
class Copying(OffloadingConnector): ...
class Mine({bases}): ...
"""
    )
    assert resolve(config).registers_device_memory is registers


# Declarations.


@pytest.mark.parametrize("rdma", [True, False])
def test_a_classmethod_declares_by_configuration(
    out_of_tree: Configure, rdma: bool
) -> None:
    config = out_of_tree(
        BASE
        + """
class Mine(KVConnectorBase_V1):
    @classmethod
    def REGISTERS_DEVICE_MEMORY(cls, kv_transfer_config):
        return kv_transfer_config.get_from_extra_config("rdma", False)
    @classmethod
    def EXPORTS_CUDA_IPC(cls, kv_transfer_config):
        return not kv_transfer_config.get_from_extra_config("rdma", False)
""",
        kv_connector_extra_config={"rdma": rdma},
    )
    answer = resolve(config)
    assert answer.registers_device_memory is rdma
    assert answer.exports_cuda_ipc is not rdma
    assert answer.source == "Mine.REGISTERS_DEVICE_MEMORY(...)"


def test_an_inherited_classmethod_is_bound_to_the_configured_class(
    out_of_tree: Configure,
) -> None:
    config = out_of_tree(
        BASE
        + """
class Root(KVConnectorBase_V1):
    transport = "copy"
    @classmethod
    def REGISTERS_DEVICE_MEMORY(cls, kv_transfer_config):
        return cls.transport == "rdma"
class Mine(Root):
    transport = "rdma"
"""
    )
    assert resolve(config).registers_device_memory


def test_the_two_attributes_are_answered_independently(out_of_tree: Configure) -> None:
    config = out_of_tree(
        f"""
from {V1}.flexkv_connector import FlexKVConnectorV1
class Mine(FlexKVConnectorV1):
    REGISTERS_DEVICE_MEMORY = True
"""
    )
    answer = resolve(config)
    assert answer.registers_device_memory
    assert answer.exports_cuda_ipc
    assert answer.source.startswith("Mine.")
    assert answer.exports_source.startswith("built-in table")


def test_a_bare_annotation_declares_nothing(out_of_tree: Configure) -> None:
    config = out_of_tree(
        NIXL
        + """
class Mine(NixlConnector):
    REGISTERS_DEVICE_MEMORY: bool
"""
    )
    assert resolve(config).source.startswith("built-in table")


@pytest.mark.parametrize("attribute", ["REGISTERS_DEVICE_MEMORY", "EXPORTS_CUDA_IPC"])
@pytest.mark.parametrize(
    ("body", "found"),
    [
        ('{} = "yes"', "'yes' (str)"),
        ("{} = 1", "1 (int)"),
        ("{} = None", "None (NoneType)"),
        ("def {}(self, kv_transfer_config): return True", "(function)"),
        ("{} = property(lambda self: True)", "(property)"),
        ("{} = staticmethod(lambda config: True)", "(staticmethod)"),
        ("@classmethod\n    def {}(cls): return True", "cannot be called with one"),
        (
            "@classmethod\n    def {}(cls, config, role): return True",
            "cannot be called with one",
        ),
        ("{} = classmethod(True)", "cannot be called with one"),
        ("@classmethod\n    def {}(cls, config): return 'yes'", "'yes' (str)"),
        ("@classmethod\n    def {}(cls, config): pass", "None (NoneType)"),
    ],
)
def test_a_malformed_declaration_is_a_type_error_naming_class_and_attribute(
    out_of_tree: Configure, attribute: str, body: str, found: str
) -> None:
    config = out_of_tree(
        BASE + "class Mine(KVConnectorBase_V1):\n    " + body.format(attribute)
    )
    with pytest.raises(TypeError, match=rf"author_\w+\.Mine\.{attribute}: ") as error:
        resolve(config)
    assert found in str(error.value)


def test_a_malformed_inherited_declaration_names_the_class_that_has_it(
    out_of_tree: Configure,
) -> None:
    config = out_of_tree(
        BASE
        + """
class Root(KVConnectorBase_V1):
    REGISTERS_DEVICE_MEMORY = "yes"
class Mine(Root): ...
"""
    )
    with pytest.raises(TypeError, match=r"\.Root\.REGISTERS_DEVICE_MEMORY"):
        resolve(config)


@pytest.mark.parametrize("attribute", ["REGISTERS_DEVICE_MEMORY", "EXPORTS_CUDA_IPC"])
@pytest.mark.parametrize("error", ["KeyError('port')", "TypeError('inside')"])
def test_an_exception_in_a_declaration_is_chained_and_names_class_and_attribute(
    out_of_tree: Configure, attribute: str, error: str
) -> None:
    config = out_of_tree(
        BASE
        + f"""
class Mine(KVConnectorBase_V1):
    @classmethod
    def {attribute}(cls, kv_transfer_config):
        raise {error}
"""
    )
    with pytest.raises(RuntimeError, match=rf"\.Mine\.{attribute} raised") as raised:
        resolve(config)
    assert repr(raised.value.__cause__) == error


# Undeclared.


def test_an_undeclared_connector_registers_and_one_line_says_how_to_declare(
    out_of_tree: Configure, log: list[logging.LogRecord]
) -> None:
    config = out_of_tree(BASE + "class Mine(KVConnectorBase_V1): ...")
    for _ in range(3):
        answer = resolve(config)
    assert answer.registers_device_memory
    assert not answer.exports_cuda_ipc
    assert not answer.declared
    (record,) = log
    assert record.levelno == logging.INFO
    assert "class Mine(...):\n    REGISTERS_DEVICE_MEMORY = True" in record.getMessage()


# Third parties, really installed.


def test_a_hook_gets_the_class_and_its_own_configuration(
    out_of_tree: Configure, third_party: Callable[..., None]
) -> None:
    third_party("acme-kv")
    source = BASE + "class AcmeSharing(KVConnectorBase_V1): ..."
    extra = {"acme_rdma": True}
    answer = resolve(
        out_of_tree(source, "AcmeSharing", kv_connector_extra_config=extra)
    )
    assert answer.registers_device_memory
    assert answer.exports_cuda_ipc
    assert answer.exports_source == "plugin acme (acme-kv 1.2.3)"


BROKEN = (
    "missing-import",
    "missing-attribute",
    "exits",
    "panics",
    "hangs",
    "typo",
    "extra-argument",
)


@pytest.fixture
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capabilities, "TIME_LIMIT_SECONDS", 0.5)


@pytest.mark.usefixtures("short_limit")
def test_each_plugin_that_does_not_load_is_logged_with_its_traceback_and_left_out(
    third_party: Callable[..., None], log: list[logging.LogRecord]
) -> None:
    third_party("acme-broken")
    answer = resolve(transfer_config("NixlConnector"))
    assert answer.registers_device_memory
    # A plugin is left out whole: its other, well-formed hook would have said True.
    assert not answer.exports_cuda_ipc
    for name in BROKEN:
        (record,) = [
            r for r in log if f"plugin {name} (acme-broken 1.2.3)" in r.getMessage()
        ]
        assert record.levelno == logging.ERROR
        assert record.exc_info is not None
        if name == "hangs":
            assert isinstance(record.exc_info[1], TimeoutError)
            assert "entry point hangs" in str(record.exc_info[1])


@pytest.mark.usefixtures("short_limit")
def test_a_hook_that_fails_is_logged_and_the_next_plugin_answers(
    out_of_tree: Configure,
    third_party: Callable[..., None],
    log: list[logging.LogRecord],
) -> None:
    third_party("acme-broken", "acme-kv")
    source = BASE + "class AcmeSharing(KVConnectorBase_V1): ..."
    answer = resolve(out_of_tree(source, "AcmeSharing"))
    assert answer.source == "plugin acme (acme-kv 1.2.3)"
    assert answer.exports_source == "plugin acme (acme-kv 1.2.3)"


@pytest.mark.usefixtures("short_limit")
def test_when_every_hook_fails_the_table_answers_and_each_failure_is_logged(
    third_party: Callable[..., None], log: list[logging.LogRecord]
) -> None:
    third_party("acme-broken")
    answer = resolve(transfer_config("NixlConnector"))
    assert answer.source.startswith("built-in table")
    for name, error in (("raises", OSError), ("not-a-bool", TypeError)):
        for hook in ("kvpad_registers_device_memory", "kvpad_exports_cuda_ipc"):
            (record,) = [
                r
                for r in log
                if f"plugin {name} (" in r.getMessage() and hook in r.getMessage()
            ]
            assert record.exc_info is not None
            assert record.exc_info[0] is error
    for name, kind in (
        ("exits-when-asked", SystemExit),
        ("hangs-when-asked", TimeoutError),
    ):
        (record,) = [r for r in log if f"plugin {name} (" in r.getMessage()]
        assert record.exc_info is not None
        assert record.exc_info[0] is kind


# Connectors whose module or class misbehaves.


@pytest.mark.usefixtures("short_limit")
def test_a_connector_that_hangs_at_import_is_named_when_the_time_is_up(
    out_of_tree: Configure,
) -> None:
    config = out_of_tree("import time; time.sleep(600)")
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"KV connector Mine of module author_\w+"):
        resolve(config)
    assert time.monotonic() - began < 60
    # It was interrupted, not left half imported.
    assert config.kv_connector_module_path not in sys.modules


@pytest.mark.usefixtures("short_limit")
def test_a_declaration_that_hangs_is_named_when_the_time_is_up(
    out_of_tree: Configure,
) -> None:
    config = out_of_tree(
        BASE
        + """
class Mine(KVConnectorBase_V1):
    @classmethod
    def REGISTERS_DEVICE_MEMORY(cls, kv_transfer_config):
        import time
        time.sleep(600)
"""
    )
    with pytest.raises(TimeoutError, match=r"\.Mine\.REGISTERS_DEVICE_MEMORY did not"):
        resolve(config)


@pytest.mark.usefixtures("short_limit")
def test_vllms_own_connector_that_hangs_at_import_is_answered_by_name_and_named(
    monkeypatch: pytest.MonkeyPatch, log: list[logging.LogRecord]
) -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    monkeypatch.setitem(
        KVConnectorFactory._registry, "MooncakeConnector", lambda: time.sleep(600)
    )
    assert resolve(transfer_config("MooncakeConnector")).registers_device_memory
    for record in log:
        assert record.levelno == logging.WARNING
        assert "importing KV connector MooncakeConnector" in record.getMessage()
    assert log


def test_a_connector_whose_import_ends_the_process_is_an_error_that_names_it(
    out_of_tree: Configure,
) -> None:
    config = out_of_tree("raise SystemExit('no licence')")
    with pytest.raises(RuntimeError, match=r"Mine of module author.*no licence"):
        resolve(config)


def test_a_connector_that_is_no_class_is_an_error_that_names_it(
    out_of_tree: Configure,
) -> None:
    config = out_of_tree("def Mine(config, role, kv_cache_config=None): ...")
    with pytest.raises(TypeError, match=r"Mine of module author\w+: expected a class"):
        resolve(config)


def test_an_interrupt_by_the_operator_is_not_taken_for_a_broken_connector(
    out_of_tree: Configure,
) -> None:
    with pytest.raises(KeyboardInterrupt):
        resolve(out_of_tree("raise KeyboardInterrupt"))


def test_a_declaration_that_ends_the_process_is_chained_and_named(
    out_of_tree: Configure,
) -> None:
    config = out_of_tree(
        BASE
        + """
class Mine(KVConnectorBase_V1):
    @classmethod
    def EXPORTS_CUDA_IPC(cls, kv_transfer_config):
        raise SystemExit(3)
"""
    )
    with pytest.raises(RuntimeError, match=r"Mine\.EXPORTS_CUDA_IPC raised SystemExit"):
        resolve(config)


# The operator's override.


@pytest.mark.parametrize(
    ("override", "nearest"),
    [("nixlconnector", "NixlConnector"), ("OfloadingConnector", "OffloadingConnector")],
)
def test_overriding_a_connector_that_is_not_configured_names_the_nearest(
    override: str, nearest: str
) -> None:
    config = multi(child("NixlConnector"), child("OffloadingConnector"))
    with pytest.raises(KvpadConfigError, match=f"did you mean '{nearest}'"):
        resolve(config, overrides={override: False})


def test_an_override_reaches_a_nested_child_only() -> None:
    nested = child(
        "MultiConnector",
        kv_connector_extra_config={"connectors": [child("NixlConnector")]},
    )
    config = multi(nested, child("OffloadingConnector"))
    assert resolve(config).registers_device_memory
    answer = resolve(config, overrides={"NixlConnector": False})
    assert not answer.registers_device_memory
    assert "operator" in answer.children[0].children[0].source


# MultiConnector.


@pytest.mark.parametrize(
    ("names", "registers"),
    [
        (["OffloadingConnector"], False),
        (["OffloadingConnector", "ExampleConnector"], False),
        (["OffloadingConnector", "NixlConnector"], True),
        (["NixlConnector", "OffloadingConnector"], True),
    ],
)
def test_a_multi_connector_registers_if_any_child_does(
    names: list[str], registers: bool
) -> None:
    answer = resolve(multi(*map(child, names)))
    assert answer.registers_device_memory is registers
    assert [c.name for c in answer.children] == names
    deciding = ["NixlConnector"] if registers else names
    assert all(f"{name}: built-in table" in answer.source for name in deciding)


def test_children_are_found_at_any_depth() -> None:
    config = multi(child("NixlConnector"))
    for _ in range(3):
        inner = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": config.kv_connector_extra_config,
        }
        config = multi(child("ExampleConnector"), inner)
    assert resolve(config).registers_device_memory


def test_one_exporting_child_is_a_reason_to_step_aside() -> None:
    answer = resolve(multi(child("NixlConnector"), child("FlexKVConnectorV1")))
    assert answer.exports_cuda_ipc
    (reason,) = answer.reasons_to_step_aside(rocm=False)
    assert "FlexKVConnectorV1" in reason
    assert "CUDA IPC" in reason


def test_a_child_with_its_own_pool_is_a_reason_to_step_aside() -> None:
    store = child(
        "MooncakeStoreConnector",
        kv_connector_extra_config={"custom_mem_pool": "NVLINK"},
    )
    (reason,) = resolve(multi(child("NixlConnector"), store)).reasons_to_step_aside(
        rocm=False
    )
    assert "MooncakeStoreConnector: custom_mem_pool='NVLINK'" in reason


def test_an_undeclared_child_makes_the_whole_undeclared(out_of_tree: Configure) -> None:
    config = out_of_tree(BASE + "class Mine(KVConnectorBase_V1): ...")
    mine = child("Mine", kv_connector_module_path=config.kv_connector_module_path)
    answer = resolve(multi(mine, child("OffloadingConnector")))
    assert answer.registers_device_memory
    assert not answer.declared


def test_a_childs_classmethod_sees_the_childs_configuration_and_the_parents_engine(
    out_of_tree: Configure,
) -> None:
    config = out_of_tree(
        BASE
        + """
class Mine(KVConnectorBase_V1):
    @classmethod
    def REGISTERS_DEVICE_MEMORY(cls, kv_transfer_config):
        assert kv_transfer_config.kv_connector == "Mine"
        return kv_transfer_config.engine_id in ("parent", "own")
"""
    )
    module = config.kv_connector_module_path
    mine = child("Mine", kv_connector_module_path=module)
    for arguments in ({}, {"engine_id": "own"}):
        answer = resolve(multi({**mine, **arguments}, engine_id="parent"))
        assert answer.registers_device_memory


def test_a_subclass_of_multi_connector_asks_its_children_unless_it_declares(
    out_of_tree: Configure,
) -> None:
    source = f"from {V1}.multi_connector import MultiConnector\n"
    extra = {"connectors": [child("NixlConnector")]}
    silent = out_of_tree(
        source + "class Mine(MultiConnector): ...", kv_connector_extra_config=extra
    )
    assert resolve(silent).registers_device_memory
    declares = out_of_tree(
        source + "class Mine(MultiConnector):\n    REGISTERS_DEVICE_MEMORY = False",
        kv_connector_extra_config=extra,
    )
    assert not resolve(declares).registers_device_memory


@pytest.mark.parametrize("children", ["NixlConnector", {"a": 1}, ["NixlConnector"]])
def test_malformed_children_are_a_configuration_error(children: object) -> None:
    config = transfer_config(
        "MultiConnector", kv_connector_extra_config={"connectors": children}
    )
    with pytest.raises(KvpadConfigError, match=r"MultiConnector: .*'connectors'"):
        resolve(config)


# Out-of-tree subclasses of vLLM's registering connectors.


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """MoRIIO's module imports msgpack, without using it before a transfer."""
    if importlib.util.find_spec("msgpack") is None:
        monkeypatch.setitem(sys.modules, "msgpack", ModuleType("msgpack"))


@pytest.mark.usefixtures("importable")
@pytest.mark.parametrize(("name", "module"), REGISTERING.items())
def test_a_silent_subclass_of_a_registering_connector_registers(
    out_of_tree: Configure, name: str, module: str, log: list[logging.LogRecord]
) -> None:
    if name == "UMBPStoreConnector" and not importlib.util.find_spec(f"{V1}.umbp"):
        pytest.skip("this vLLM has no UMBP connector")
    config = out_of_tree(
        f"""
from {module} import {name}
class Middle({name}): ...
class Mine(Middle): ...
"""
    )
    answer = resolve(config)
    assert answer.registers_device_memory
    assert answer.declared
    assert answer.source.startswith("built-in table")
    assert not log
    rocm = name in ("MoRIIOConnector", "UMBPStoreConnector")
    assert answer.off_on_rocm is rocm
    assert bool(answer.reasons_to_step_aside(rocm=True)) is rocm
    assert answer.reasons_to_step_aside(rocm=False) == ()


# What cannot be imported here.


def test_vllms_own_connector_is_answered_by_name_when_its_library_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    def missing() -> type:
        raise ImportError("no library of that name")

    monkeypatch.setitem(KVConnectorFactory._registry, "MooncakeConnector", missing)
    assert resolve(transfer_config("MooncakeConnector")).registers_device_memory


@pytest.mark.parametrize(
    ("name", "module", "error"),
    [
        ("NobodysConnector", None, ValueError),
        ("NixlConnector", "no_such_module_anywhere", ModuleNotFoundError),
        ("NoSuchClass", "json", AttributeError),
    ],
)
def test_a_connector_that_vllm_cannot_load_raises_as_in_vllm(
    name: str, module: str | None, error: type[Exception]
) -> None:
    with pytest.raises(error):
        resolve(transfer_config(name, kv_connector_module_path=module))


def test_a_foreign_class_with_a_name_of_the_table_is_not_the_tables(
    out_of_tree: Configure,
) -> None:
    source = BASE + "class OffloadingConnector(KVConnectorBase_V1): ..."
    answer = resolve(out_of_tree(source, "OffloadingConnector"))
    assert answer.registers_device_memory
    assert not answer.declared


def test_a_broken_vllm_does_not_break_the_answer_for_its_own_connectors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = transfer_config("NixlConnector", kv_buffer_device="cpu")
    monkeypatch.setitem(
        sys.modules, "vllm.distributed.kv_transfer.kv_connector.factory", None
    )
    monkeypatch.setitem(sys.modules, "vllm.platforms", None)
    answer = resolve(config)
    assert answer.registers_device_memory
    assert "platform is unknown" in answer.source


# Memory pools.

POOL = """
    def get_mem_pool_context(self):
        return None
"""


def test_an_override_of_the_pool_hook_is_a_reason_to_step_aside(
    out_of_tree: Configure,
) -> None:
    config = out_of_tree(NIXL + "class Mine(NixlConnector):" + POOL)
    (reason,) = resolve(config).reasons_to_step_aside(rocm=False)
    assert "own memory pool" in reason
    assert "Mine overrides get_mem_pool_context" in reason


def test_vllms_own_pool_hooks_are_judged_by_their_configuration(
    out_of_tree: Configure,
) -> None:
    source = f"""
from {V1}.mooncake.store.connector import MooncakeStoreConnector
class Mine(MooncakeStoreConnector): ...
"""
    assert resolve(out_of_tree(source)).brings_memory_pool is None
    extra = {"custom_mem_pool": "BAREX"}
    answer = resolve(out_of_tree(source, kv_connector_extra_config=extra))
    assert answer.brings_memory_pool == "custom_mem_pool='BAREX'"
    plain = BASE + "class Mine(KVConnectorBase_V1): ..."
    assert resolve(out_of_tree(plain)).brings_memory_pool is None


# What is said.


def test_the_start_up_line_names_the_connector_the_answer_and_its_source() -> None:
    line = resolve(transfer_config("OffloadingConnector")).describe()
    assert line == (
        "KV connector OffloadingConnector does not register device memory: built-in "
        "table, OffloadingConnector: copies blocks to host memory"
    )


def test_answers_cannot_be_changed() -> None:
    answer = resolve(None)
    with pytest.raises(AttributeError):
        answer.registers_device_memory = True  # type: ignore[misc]
