"""The built-in table against the vLLM that is installed.

Fails when vLLM registers a connector that the table does not know, when a class has
moved from where the table looks for it, and when a fact that a row rests on has left
the source it was read in.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vllm_kvpad.capabilities import ConnectorCapabilities, resolve
from vllm_kvpad.connector_table import (
    BASE_CLASS,
    ROWS,
    Row,
    qualified_name,
    row_of_class,
    row_of_name,
)

pytest.importorskip("vllm")
pytestmark = pytest.mark.contract

V1 = "vllm.distributed.kv_transfer.kv_connector.v1"

REGISTERS = {
    "NixlConnector",
    "NixlPullConnector",
    "NixlPushConnector",
    "MooncakeConnector",
    "MooncakeStoreConnector",
    "MoRIIOConnector",
}
COPIES = {
    "OffloadingConnector",
    "SimpleCPUOffloadConnector",
    "ExampleConnector",
    "ExampleHiddenStatesConnector",
    "DecodeBenchConnector",
    "HF3FSKVConnector",
    "HiSparseConnector",
    "LMCacheConnectorV1",
}
EXPORTS = {"LMCacheMPConnector", "FlexKVConnectorV1"}


def registry() -> dict[str, tuple[str, str]]:
    """Registered name → (module, class), without importing the connectors."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    found = {}
    for name, loader in KVConnectorFactory._registry.items():
        where = inspect.getclosurevars(loader).nonlocals
        if where["module_path"].startswith("vllm."):
            found[name] = (where["module_path"], where["class_name"])
    return found


REGISTERED = sorted(registry())


def source_file(module: str) -> Path:
    """A module of vLLM's, found without importing it: its library may be missing."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent.joinpath(*module.split(".")[1:])
    return path.with_suffix(".py") if not path.is_dir() else path / "__init__.py"


def config(name: str, **arguments: Any) -> Any:
    from vllm.config import KVTransferConfig

    return KVTransferConfig(**{"kv_connector": name, "kv_role": "kv_both", **arguments})


def answer(name: str, **arguments: Any) -> ConnectorCapabilities:
    return resolve(config(name, **arguments))


def known_row(name: str) -> Row:
    row = row_of_name(name)
    assert row is not None
    return row


def test_vllm_registers_connectors() -> None:
    assert len(REGISTERED) >= 17


@pytest.mark.parametrize("name", REGISTERED)
def test_the_table_knows_every_connector_that_vllm_registers(name: str) -> None:
    assert row_of_name(name) is not None, (
        f"vLLM registers {name} ({'.'.join(registry()[name])}); read what it does with "
        "the tensors of register_kv_caches() and add a row to connector_table.py"
    )


@pytest.mark.parametrize("name", REGISTERED)
def test_a_registered_class_is_where_the_table_looks_for_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, class_name = registry()[name]
    row = known_row(name)
    if importlib.util.find_spec("msgpack") is None:
        # MoRIIO's module imports it, without using it before a transfer.
        monkeypatch.setitem(sys.modules, "msgpack", ModuleType("msgpack"))
    try:
        cls = getattr(importlib.import_module(module), class_name)
    except ModuleNotFoundError as missing:
        if str(missing.name).split(".")[0] == "vllm":
            raise
        # The connector's own library is not here; the spelling is still checked.
        assert f"{module}.{class_name}" in row.classes
    else:
        assert row_of_class(cls) is row
        assert any(qualified_name(base) == BASE_CLASS for base in cls.__mro__)


def test_every_row_of_a_vllm_class_is_registered_or_known_not_to_be() -> None:
    unregistered = {
        row.name
        for row in ROWS
        if row.classes[0].startswith("vllm.")
        and not {row.name, *row.registered_names} & set(REGISTERED)
    }
    # UMBPStore is loaded through kv_connector_module_path, where vLLM has it at all.
    assert unregistered == {"UMBPStoreConnector"}


def test_no_class_is_in_two_rows() -> None:
    classes = [name for row in ROWS for name in row.classes]
    names = [name for row in ROWS for name in (row.name, *row.registered_names)]
    assert len(set(classes)) == len(classes)
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", REGISTERED)
def test_the_answers_are_those_read_in_the_sources(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in (
        "MC_INTRANODE_NVLINK",
        "MC_FORCE_MNNVL",
        "LMCACHE_MP_TRANSFER_MODE",
    ):
        monkeypatch.delenv(variable, raising=False)
    if name == "MultiConnector":
        pytest.skip("its children answer")
    found = answer(name)
    assert found.declared
    assert found.source.startswith("built-in table, ")
    assert found.registers_device_memory is (name in REGISTERS)
    assert found.exports_cuda_ipc is (name in EXPORTS)
    assert name in REGISTERS | COPIES | EXPORTS
    assert bool(found.unsupported) is (name == "HiSparseConnector")
    assert found.off_on_rocm is (name == "MoRIIOConnector")
    assert found.brings_memory_pool is None


# NIXL: the device decides what kv_buffer_device="cpu" means.


@pytest.mark.parametrize("name", ["NixlConnector", "NixlPushConnector"])
@pytest.mark.parametrize(
    ("device", "buffer", "registers"),
    [
        ("cuda", "cuda", True),
        ("cuda", "cpu", False),
        ("xpu", "xpu", True),
        ("xpu", "cpu", False),
        ("tpu", "cpu", False),
        ("cpu", "cpu", True),
    ],
)
def test_nixl_registers_unless_it_stages_through_the_host(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    device: str,
    buffer: str,
    registers: bool,
) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "device_type", device)
    found = answer(name, kv_buffer_device=buffer)
    assert found.registers_device_memory is registers


def test_nixl_by_default_registers_on_this_machines_platform() -> None:
    assert answer("NixlConnector").registers_device_memory


# Mooncake.


@pytest.mark.parametrize(
    ("role", "extra", "registers"),
    [
        ("kv_consumer", {}, True),
        ("kv_consumer", {"enable_lookup": False}, False),
        ("kv_consumer", {"enable_lookup": False, "save_decode_cache": True}, True),
        ("kv_both", {"enable_lookup": False}, True),
        ("kv_producer", {"enable_lookup": False}, True),
    ],
)
def test_mooncake_store_registers_unless_it_only_lends_capacity(
    role: str, extra: dict[str, Any], registers: bool
) -> None:
    found = answer(
        "MooncakeStoreConnector", kv_role=role, kv_connector_extra_config=extra
    )
    assert found.registers_device_memory is registers


@pytest.mark.parametrize(
    ("pool", "brings"),
    [(None, False), ("", False), ("nvlink", True), ("BAREX", True)],
)
def test_mooncake_store_brings_a_pool_when_one_is_configured(
    pool: str | None, brings: bool
) -> None:
    found = answer(
        "MooncakeStoreConnector", kv_connector_extra_config={"custom_mem_pool": pool}
    )
    assert bool(found.brings_memory_pool) is brings


@pytest.mark.parametrize("name", ["MooncakeConnector", "MooncakeStoreConnector"])
@pytest.mark.parametrize(
    ("variables", "exports"),
    [
        ([], False),
        (["MC_INTRANODE_NVLINK"], True),
        (["MC_FORCE_MNNVL"], False),
        (["MC_USE_NVLINK_IPC"], False),
        (["MC_FORCE_MNNVL", "MC_USE_NVLINK_IPC"], True),
    ],
)
def test_mooncakes_nvlink_transports_export_ipc_handles_by_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, variables: list[str], exports: bool
) -> None:
    for variable in ("MC_INTRANODE_NVLINK", "MC_FORCE_MNNVL", "MC_USE_NVLINK_IPC"):
        monkeypatch.delenv(variable, raising=False)
    for variable in variables:
        monkeypatch.setenv(variable, "0")  # Mooncake asks only whether it is set.
    assert answer(name).exports_cuda_ipc is exports


# LMCache's multi-process mode. An installed LMCache is a package folder; which files
# are in it is all that the table looks at.

MP = "lmcache.integration.vllm.lmcache_mp_connector"
VMM = "v1/platform/ipc_policy.py"
OLDER_VMM = "v1/platform/vmm_ipc.py"
MODES = "v1/multiprocess/transfer_mode.py"


@pytest.fixture
def lmcache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Installs an LMCache with its own connector class and the given files."""
    monkeypatch.delenv("LMCACHE_MP_TRANSFER_MODE", raising=False)

    def install(*files: str) -> None:
        package = tmp_path / "lmcache"
        for file in files:
            (package / file).parent.mkdir(parents=True, exist_ok=True)
            (package / file).write_text("")
        connector = package / "integration/vllm/lmcache_mp_connector.py"
        connector.parent.mkdir(parents=True, exist_ok=True)
        connector.write_text(
            f"from {V1}.base import KVConnectorBase_V1\n"
            "class LMCacheMPConnector(KVConnectorBase_V1): ...\n"
        )
        for folder in [package, *(p for p in package.rglob("*") if p.is_dir())]:
            (folder / "__init__.py").write_text("")
        metadata = tmp_path / "lmcache-9.9.9.dist-info/METADATA"
        metadata.parent.mkdir()
        metadata.write_text("Metadata-Version: 2.1\nName: lmcache\nVersion: 9.9.9\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        importlib.invalidate_caches()

    yield install
    for module in [m for m in sys.modules if m.split(".")[0] == "lmcache"]:
        del sys.modules[module]


def lmcache_mp(own: bool, **extra: Any) -> ConnectorCapabilities:
    return answer(
        "LMCacheMPConnector",
        kv_connector_module_path=MP if own else None,
        kv_connector_extra_config={f"lmcache.mp.{k}": v for k, v in extra.items()},
    )


@pytest.mark.parametrize("vmm", [VMM, OLDER_VMM])
@pytest.mark.parametrize("on", [True, "true", "1", "Yes"])
def test_lmcache_told_to_use_vmm_needs_one_allocation_a_layer_and_no_ipc_handles(
    lmcache: Any, vmm: str, on: object
) -> None:
    lmcache(vmm)
    found = lmcache_mp(own=True, use_vmm_api=on)
    assert not found.exports_cuda_ipc
    assert found.registers_device_memory
    assert "lmcache 9.9.9" in found.exports_source


@pytest.mark.parametrize("off", [False, "false", "0", ""])
def test_lmcache_that_could_but_is_not_told_to_exports_ipc_handles(
    lmcache: Any, off: object
) -> None:
    lmcache(VMM)
    found = lmcache_mp(own=True, use_vmm_api=off)
    assert found.exports_cuda_ipc
    assert not found.registers_device_memory


def test_lmcache_too_old_to_export_vmm_memory_exports_ipc_handles(lmcache: Any) -> None:
    lmcache()
    found = lmcache_mp(own=True, use_vmm_api=True)
    assert found.exports_cuda_ipc
    assert "lmcache 9.9.9" in found.exports_source


def test_vllms_own_lmcache_class_does_not_pass_the_switch_on(lmcache: Any) -> None:
    lmcache(VMM)
    assert lmcache_mp(own=False, use_vmm_api=True).exports_cuda_ipc


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("files", [[MODES], []])
def test_lmcache_that_copies_in_the_worker_exports_nothing(
    lmcache: Any, monkeypatch: pytest.MonkeyPatch, own: bool, files: list[str]
) -> None:
    lmcache(*files)
    monkeypatch.setenv("LMCACHE_MP_TRANSFER_MODE", "ENGINE_DRIVEN")
    found = lmcache_mp(own=own)
    assert found.exports_cuda_ipc is not bool(files)
    assert not found.registers_device_memory


def test_lmcaches_configuration_beats_its_environment(
    lmcache: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lmcache(MODES)
    monkeypatch.setenv("LMCACHE_MP_TRANSFER_MODE", "engine_driven")
    assert lmcache_mp(own=True, mp_transfer_mode="lmcache_driven").exports_cuda_ipc
    monkeypatch.delenv("LMCACHE_MP_TRANSFER_MODE")
    found = lmcache_mp(own=True, mp_transfer_mode="engine_driven")
    assert not found.exports_cuda_ipc


# The facts the rows rest on, in the installed sources.


@pytest.mark.parametrize(
    ("module", "fact"),
    [
        (
            f"{V1}.nixl.base_worker",
            'self.use_host_buffer = self.kv_buffer_device == "cpu"',
        ),
        (f"{V1}.nixl.base_worker", "xfer_buffers = kv_caches"),
        (f"{V1}.mooncake.mooncake_connector", "batch_register_memory"),
        (f"{V1}.mooncake.store.worker", 'extra_config.get("custom_mem_pool")'),
        (f"{V1}.mooncake.store.worker", "self.store.register_buffer("),
        (f"{V1}.mooncake.store.worker", 'extra_config.get("enable_lookup", True)'),
        (f"{V1}.moriio.moriio_connector", "register_local_tensor("),
        (
            "vllm.v1.simple_kv_offload.worker",
            "num_layers * kv_cache_tensor.layer_stride",
        ),
        (f"{V1}.lmcache_integration.multi_process_adapter", "CudaIPCWrapper(tensor)"),
        (f"{V1}.flexkv_connector", "flexkv.integration.vllm"),
    ],
)
def test_what_a_row_rests_on_is_still_in_the_source(module: str, fact: str) -> None:
    assert fact in " ".join(source_file(module).read_text().split())


@pytest.mark.parametrize("name", sorted(COPIES))
def test_a_connector_said_to_copy_has_no_word_of_registration(name: str) -> None:
    file = source_file(registry()[name][0])
    # A connector in a folder of its own is judged with its neighbours there.
    alone = file.parent.name == "v1"
    for judged in [file] if alone else sorted(file.parent.rglob("*.py")):
        source = judged.read_text()
        for word in ("register_memory(", "register_buffer(", "register_torch_tensor("):
            assert word not in source, f"{judged.name}: {word}"


def test_lmcaches_extra_configuration_is_not_passed_on_by_vllms_class() -> None:
    # When this fails, the row of vLLM's class takes the rule of LMCache's own.
    assert "extra_config=" not in source_file(f"{V1}.lmcache_mp_connector").read_text()
