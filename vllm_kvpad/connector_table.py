"""What the connectors that ship with vLLM do with the tensors they are handed.

One :class:`Row` per class, decided by reading that class's source in vLLM 0.32.0 and
0.33.0 (and, where it only forwards, the package it forwards to), with the reason and
the file beside it. Rows are found by qualified class name, so that subclasses match
along their MRO, or by the name the factory registers, so that a connector whose
module cannot be imported here (its library is not installed) still has an answer.

``tests/contract/test_connector_table.py`` fails when the installed vLLM registers a
connector that this table does not know, or moves a class from where it says.

No vLLM import, not even for typing at run time: answers that depend on the platform
ask for it when called.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"

BASE_CLASS = f"{_V1}.base.KVConnectorBase_V1"
"""Qualified name of the class all connectors derive from; it does nothing itself."""


class Verdict(NamedTuple):
    """A yes or no and the fact it rests on."""

    value: bool
    why: str


Rule = Callable[["KVTransferConfig"], Verdict]


def _always(value: bool, why: str) -> Rule:
    verdict = Verdict(value, why)
    return lambda config: verdict


_NO_EXPORT = _always(False, "passes no IPC handle of the cache on")


def _no_pool(config: KVTransferConfig) -> str | None:
    return None


@dataclass(frozen=True)
class Row:
    """One connector class.

    Attributes:
        name: The name the factory registers, or the class's name if it registers
            none.
        classes: Qualified names of the class and of what it may be found under.
        registers: Whether it registers the device KV cache with a transport.
        exports: Whether it exports the cache through legacy CUDA IPC handles.
        memory_pool: The reason why ``get_mem_pool_context`` returns a pool, or None.
        off_on_rocm: The extensible cache is off on ROCm for it.
        unsupported: Why kvpad cannot serve it at all.
        wraps_children: Its answers are those of the connectors it wraps.
        registered_names: Further names the factory registers for the same class.
    """

    name: str
    classes: tuple[str, ...]
    registers: Rule
    exports: Rule = _NO_EXPORT
    memory_pool: Callable[[KVTransferConfig], str | None] = _no_pool
    off_on_rocm: bool = False
    unsupported: str | None = None
    wraps_children: bool = False
    registered_names: tuple[str, ...] = ()


def qualified_name(cls: type) -> str:
    """``module.Class`` as :attr:`Row.classes` spells it."""
    return f"{cls.__module__}.{cls.__qualname__}"


def row_of_class(cls: type) -> Row | None:
    """The row for exactly this class; bases are the caller's business."""
    return _BY_CLASS.get(qualified_name(cls))


def row_of_name(name: str) -> Row | None:
    """The row for a name of vLLM's ``KVConnectorFactory``."""
    return _BY_NAME.get(name)


def _extra(config: KVTransferConfig, key: str, default: Any = None) -> Any:
    return (config.kv_connector_extra_config or {}).get(key, default)


def _device_type() -> str | None:
    """vLLM's ``current_platform.device_type``, or None if vLLM cannot say."""
    try:
        from vllm.platforms import current_platform
    except ImportError:
        return None
    device_type: str = current_platform.device_type
    return device_type


# NIXL.  nixl/base_worker.py: register_kv_caches() builds its descriptors from
# kv_caches, or from host_xfer_buffers if use_host_buffer.  use_host_buffer is
# kv_buffer_device == "cpu", except where the device itself is the CPU: there the
# cache *is* host memory and is registered directly (and kv_buffer_device is "cpu" by
# default, so the name of the buffer device alone would give the wrong answer).
def _nixl(config: KVTransferConfig) -> Verdict:
    if config.kv_buffer_device != "cpu":
        return Verdict(True, "registers the KV cache with its NIXL agent")
    device = _device_type()
    if device == "cpu":
        return Verdict(True, "on CPU the KV cache itself is what NIXL registers")
    if device is None:
        return Verdict(True, 'kv_buffer_device="cpu", but the platform is unknown')
    return Verdict(False, 'kv_buffer_device="cpu": stages through host buffers')


# mooncake/store/worker.py: register_kv_caches() passes each distinct storage to
# store.register_buffer(), but returns at once in capacity-only mode: a consumer that
# neither looks up nor saves only lends memory of its host to the store.
def _mooncake_store(config: KVTransferConfig) -> Verdict:
    capacity_only = (
        config.kv_role == "kv_consumer"
        and not _extra(config, "enable_lookup", True)
        and not _extra(config, "save_decode_cache", False)
    )
    if capacity_only:
        return Verdict(False, "capacity only: a consumer without lookup and save")
    return Verdict(True, "registers each KV cache storage with the Mooncake store")


# mooncake/store/worker.py: _create_mem_pool() returns None unless custom_mem_pool is
# set to something; what is set but unsupported is an error of its own.
def _mooncake_store_pool(config: KVTransferConfig) -> str | None:
    pool = str(_extra(config, "custom_mem_pool") or "")
    return f"custom_mem_pool={pool!r}" if pool else None


# Mooncake's own source decides the transport, not mooncake_protocol
# (mooncake-transfer-engine/src/transfer_engine_impl.cpp): in a build with NVLink
# transports, MC_INTRANODE_NVLINK installs the intra-node one, which takes a
# cudaIpcGetMemHandle of what it registers, and MC_FORCE_MNNVL the other, which does so
# if MC_USE_NVLINK_IPC is set and uses VMM handles otherwise.  Mooncake looks only at
# whether the variables exist, whatever their value.
def _mooncake_exports(config: KVTransferConfig) -> Verdict:
    if "MC_INTRANODE_NVLINK" in os.environ:
        return Verdict(True, "MC_INTRANODE_NVLINK: shares CUDA IPC handles")
    if "MC_FORCE_MNNVL" in os.environ and "MC_USE_NVLINK_IPC" in os.environ:
        return Verdict(True, "MC_USE_NVLINK_IPC: shares CUDA IPC handles")
    return _NO_EXPORT(config)


# LMCache's multi-process mode, read in lmcache 0.5.6: the worker's transfer context
# (lmcache/v1/multiprocess/transfer_context/worker_transfer.py) either copies itself
# ("engine_driven") or wraps each layer for the server ("lmcache_driven", the default
# on CUDA).  The wrapper (lmcache/v1/platform/devices/cuda) is a legacy IPC handle
# unless the connector's lmcache.mp.use_vmm_api is on, which exports the one physical
# allocation that a layer must then lie in (LMCache pull request 4805).
def _lmcache_mp_vmm(config: KVTransferConfig) -> bool:
    wanted = str(_extra(config, "lmcache.mp.use_vmm_api", False)).strip().lower()
    return wanted in ("1", "true", "yes", "on") and _lmcache_has(
        "v1/platform/ipc_policy.py", "v1/platform/vmm_ipc.py"
    )


def _lmcache_mp_copies(mode: object) -> bool:
    return str(mode).strip().lower() == "engine_driven" and _lmcache_has(
        "v1/multiprocess/transfer_mode.py"
    )


def _lmcache_mp_exports(config: KVTransferConfig) -> Verdict:
    mode = _extra(config, "lmcache.mp.mp_transfer_mode") or os.environ.get(
        "LMCACHE_MP_TRANSFER_MODE"
    )
    if _lmcache_mp_copies(mode):
        return Verdict(False, "engine_driven: LMCache copies in the worker")
    if _lmcache_mp_vmm(config):
        return Verdict(False, f"{_lmcache()} exports VMM memory (use_vmm_api)")
    return Verdict(
        True,
        f"sends CUDA IPC handles to the LMCache server; {_lmcache()}, "
        "lmcache.mp.use_vmm_api off or not supported",
    )


def _lmcache_mp_registers(config: KVTransferConfig) -> Verdict:
    if _lmcache_mp_vmm(config):
        return Verdict(True, "use_vmm_api: exports each layer's physical allocation")
    return Verdict(False, "the LMCache server or worker copies blocks")


# vLLM's own class of 0.32.0 and 0.33.0 passes LMCache none of its extra configuration
# (lmcache_mp_connector.py, create_worker_adapter), so only the environment counts.
def _vllm_lmcache_mp_exports(config: KVTransferConfig) -> Verdict:
    if _lmcache_mp_copies(os.environ.get("LMCACHE_MP_TRANSFER_MODE")):
        return Verdict(False, "engine_driven: LMCache copies in the worker")
    return Verdict(True, f"sends CUDA IPC handles to the LMCache server; {_lmcache()}")


def _lmcache_has(*files: str) -> bool:
    """Whether the installed LMCache has one of ``files``, without importing it."""
    spec = importlib.util.find_spec("lmcache")
    folders = (spec.submodule_search_locations or ()) if spec else ()
    return any((Path(folder) / file).is_file() for folder in folders for file in files)


def _lmcache() -> str:
    try:
        return f"lmcache {importlib.metadata.version('lmcache')}"
    except importlib.metadata.PackageNotFoundError:
        return "lmcache is not installed"


_LMCACHE = "lmcache.integration.vllm"
NIXL_BASE = f"{_V1}.nixl.connector.NixlBaseConnector"
MULTI_CONNECTOR = "MultiConnector"

ROWS: tuple[Row, ...] = (
    # NixlConnector is an alias of NixlPullConnector in both versions; the base class
    # has a row so that an out-of-tree transfer mode on top of it is known too.
    Row(
        name="NixlPullConnector",
        classes=(f"{_V1}.nixl.connector.NixlPullConnector", NIXL_BASE),
        registered_names=("NixlConnector",),
        registers=_nixl,
    ),
    Row(
        name="NixlPushConnector",
        classes=(f"{_V1}.nixl.connector.NixlPushConnector",),
        registers=_nixl,
    ),
    # multi_connector.py: hands the same tensors to each child.
    Row(
        name=MULTI_CONNECTOR,
        classes=(f"{_V1}.multi_connector.MultiConnector",),
        registers=_always(False, "has no children"),
        exports=_always(False, "has no children"),
        wraps_children=True,
    ),
    # mooncake/mooncake_connector.py: register_kv_caches() ends in
    # engine.batch_register_memory() of the caches, whatever mooncake_protocol is.
    Row(
        name="MooncakeConnector",
        classes=(f"{_V1}.mooncake.mooncake_connector.MooncakeConnector",),
        registers=_always(
            True, "registers the KV cache with the Mooncake transfer engine"
        ),
        exports=_mooncake_exports,
    ),
    Row(
        name="MooncakeStoreConnector",
        classes=(f"{_V1}.mooncake.store.connector.MooncakeStoreConnector",),
        registers=_mooncake_store,
        exports=_mooncake_exports,
        memory_pool=_mooncake_store_pool,
    ),
    # moriio/moriio_connector.py: register_kv_caches() registers a tensor per layer,
    # or one that spans all, with the MoRI-IO engine (moriio_engine.py,
    # register_local_tensor).
    Row(
        name="MoRIIOConnector",
        classes=(f"{_V1}.moriio.moriio_connector.MoRIIOConnector",),
        registers=_always(True, "registers the KV cache with the MoRI-IO engine"),
        off_on_rocm=True,
    ),
    # umbp/worker.py: register_kv_caches() calls runtime.register_buffers(), whose
    # contract (umbp/runtime/base.py) is to register each KV allocation.  Not in the
    # factory of either version: reached by kv_connector_module_path.
    Row(
        name="UMBPStoreConnector",
        classes=(f"{_V1}.umbp.connector.UMBPStoreConnector",),
        registers=_always(True, "registers each KV allocation with the UMBP runtime"),
        off_on_rocm=True,
    ),
    # offloading/worker.py: wraps the caches in strided views for copy kernels and
    # cudaMemcpyAsync; what its tiers register (v1/kv_offload/tiering: NIXL object
    # and peer-to-peer tiers) is the host region, as "DRAM".
    Row(
        name="OffloadingConnector",
        classes=(f"{_V1}.offloading_connector.OffloadingConnector",),
        registers=_always(False, "copies blocks to host memory"),
    ),
    # simple_cpu_offload_connector.py, v1/simple_kv_offload/worker.py: cuMemcpy
    # batches between the caches and pinned host memory.  register_kv_caches() cuts
    # the storage under a view into blocks by the config's offsets and layer strides;
    # ExtensibleKVCache.connector_config gives it ones that describe that storage.
    Row(
        name="SimpleCPUOffloadConnector",
        classes=(f"{_V1}.simple_cpu_offload_connector.SimpleCPUOffloadConnector",),
        registers=_always(False, "copies blocks to pinned host memory"),
    ),
    # example_connector.py: indexes the layers with torch and writes safetensors.
    Row(
        name="ExampleConnector",
        classes=(f"{_V1}.example_connector.ExampleConnector",),
        registers=_always(False, "copies slots to files"),
    ),
    # example_hidden_states_connector.py: keeps a reference to one layer and gathers
    # from it.
    Row(
        name="ExampleHiddenStatesConnector",
        classes=(
            f"{_V1}.example_hidden_states_connector.ExampleHiddenStatesConnector",
        ),
        registers=_always(False, "copies hidden states to files"),
    ),
    # decode_bench_connector.py: fills the caches in place.
    Row(
        name="DecodeBenchConnector",
        classes=(f"{_V1}.decode_bench_connector.DecodeBenchConnector",),
        registers=_always(False, "fills the KV cache in place"),
    ),
    # hf3fs/hf3fs_connector.py: keeps data pointers for a Triton gather/scatter;
    # hf3fs_client.py does its I/O from pinned host buffers.
    Row(
        name="HF3FSKVConnector",
        classes=(f"{_V1}.hf3fs.hf3fs_connector.HF3FSKVConnector",),
        registers=_always(False, "gathers blocks into pinned host buffers"),
    ),
    # hisparse/worker.py: works on hot and host pools of its own, whose sizes and
    # residence the runner decides together with the cache's.
    Row(
        name="HiSparseConnector",
        classes=(f"{_V1}.hisparse.connector.HiSparseConnector",),
        registers=_always(False, "moves blocks between its hot and host pools"),
        unsupported="part of the KV cache is host-resident, sized with the device's",
    ),
    # lmcache_connector.py, and LMCache's own classes: LMCache in the worker process.
    # register_kv_caches() gives the tensors to LMCache's GPU connectors, which copy
    # with kernels into LMCache's own buffers; those are what its NIXL and GDS
    # backends register.
    Row(
        name="LMCacheConnectorV1",
        classes=(
            f"{_V1}.lmcache_connector.LMCacheConnectorV1",
            f"{_LMCACHE}.lmcache_connector_v1.LMCacheConnectorV1Dynamic",
            f"{_LMCACHE}.lmcache_connector_v1_085.LMCacheConnectorV1Dynamic",
        ),
        registers=_always(False, "copies blocks into LMCache's own buffers"),
    ),
    Row(
        name="LMCacheMPConnector",
        classes=(f"{_V1}.lmcache_mp_connector.LMCacheMPConnector",),
        registers=_always(False, "the LMCache server or worker copies blocks"),
        exports=_vllm_lmcache_mp_exports,
    ),
    # LMCache's documentation has people load its own class of the same name through
    # kv_connector_module_path; that one passes its extra configuration on.
    Row(
        name=f"{_LMCACHE}.LMCacheMPConnector",
        classes=(
            f"{_LMCACHE}.lmcache_mp_connector.LMCacheMPConnector",
            f"{_LMCACHE}.lmcache_mp_connector_0180.LMCacheMPConnector",
            f"{_LMCACHE}.lmcache_mp_connector_0201.LMCacheMPConnector",
        ),
        registers=_lmcache_mp_registers,
        exports=_lmcache_mp_exports,
    ),
    # flexkv_connector.py forwards to FlexKV's adapter, which wraps each layer in a
    # TensorSharedHandle (flexkv/common/memory_handle.py): torch's reduce_tensor, then
    # cudaIpcGetMemHandle, both legacy IPC.
    Row(
        name="FlexKVConnectorV1",
        classes=(f"{_V1}.flexkv_connector.FlexKVConnectorV1",),
        registers=_always(False, "the FlexKV server copies blocks"),
        exports=_always(True, "sends CUDA IPC handles to the FlexKV server"),
    ),
)

_BY_CLASS = {name: row for row in ROWS for name in row.classes}
_BY_NAME = {name: row for row in ROWS for name in (row.name, *row.registered_names)}
