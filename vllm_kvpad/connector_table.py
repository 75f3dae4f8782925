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

from collections.abc import Callable
from dataclasses import dataclass
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
    ),
    Row(
        name="MooncakeStoreConnector",
        classes=(f"{_V1}.mooncake.store.connector.MooncakeStoreConnector",),
        registers=_mooncake_store,
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
    # batches between the caches and pinned host memory.
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
    # lmcache_connector.py: LMCache in the worker process.  register_kv_caches() gives
    # the tensors to LMCache's GPU connectors, which copy with kernels into LMCache's
    # own buffers; those are what its NIXL and GDS backends register.
    Row(
        name="LMCacheConnectorV1",
        classes=(f"{_V1}.lmcache_connector.LMCacheConnectorV1",),
        registers=_always(False, "copies blocks into LMCache's own buffers"),
    ),
    # lmcache_mp_connector.py.
    Row(
        name="LMCacheMPConnector",
        classes=(f"{_V1}.lmcache_mp_connector.LMCacheMPConnector",),
        registers=_always(False, "the LMCache server copies blocks"),
        exports=_always(True, "sends CUDA IPC handles to the LMCache server"),
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
