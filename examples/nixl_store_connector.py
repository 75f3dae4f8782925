"""A KV connector outside vLLM's tree, to start your own from.

It keeps the KV cache of whole blocks in host memory and brings them back when the
engine's prefix cache no longer has them. All bytes move over NIXL, out of and into
the KV cache, which its agent has registered. That it registers is stated by one
attribute, ``REGISTERS_DEVICE_MEMORY``: kvpad then gives each registered region one
physical allocation.

    PYTHONPATH=examples VLLM_PLUGINS=kvpad vllm serve MODEL --kv-transfer-config '{
        "kv_connector": "NixlStoreConnector",
        "kv_connector_module_path": "nixl_store_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"store_blocks": 512}}'

``kv_store.py`` is that as a demo. vLLM creates the class once in the scheduler, which
decides what is copied, and once in each worker, which copies. What it leaves out:
copies are synchronous, blocks are not shared with other engines, models must have one
kind of full attention, and it is tested with one worker.
"""

from __future__ import annotations

import json
import os
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from nixl._api import nixl_agent, nixl_agent_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import FullAttentionSpec

# vLLM configures the loggers below its own name only.
logger = init_logger(f"vllm.{__name__}")

DEFAULT_STORE_BLOCKS = 256


@dataclass
class Copies(KVConnectorMetadata):
    """What a step copies, scheduler to worker: block of the cache by slot."""

    loads: list[tuple[int, int]] = field(default_factory=list)  # (block, slot)
    saves: dict[int, int] = field(default_factory=dict)  # slot -> block


class NixlStoreConnector(KVConnectorBase_V1):
    """Keeps finished prefixes in host memory, block by block."""

    REGISTERS_DEVICE_MEMORY = True

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        groups = kv_cache_config.kv_cache_groups
        if len(groups) != 1 or not isinstance(
            groups[0].kv_cache_spec, FullAttentionSpec
        ):
            raise ValueError("NixlStoreConnector: needs one group of full attention")
        slots = int(
            self._kv_transfer_config.get_from_extra_config(
                "store_blocks", DEFAULT_STORE_BLOCKS
            )
        )
        if role == KVConnectorRole.SCHEDULER:
            self._planner = Planner(StoreIndex(slots), groups[0].kv_cache_spec)
        else:
            self._store = HostStore(slots, kv_cache_config.num_blocks)
            self._kv_caches: dict[str, torch.Tensor] = {}

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a block that was not saved is computed again."""
        return False

    # --- scheduler

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        return self._planner.match(request, num_computed_tokens), False

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        self._planner.admit(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Copies:
        return self._planner.plan(scheduler_output)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._planner.forget(request)
        return False, None  # saved already: the blocks are free now

    def reset_cache(self) -> bool:
        self._planner.index.clear()
        return True

    # --- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._kv_caches = kv_caches
        self._store.register(kv_caches)

    def unregister_kv_caches(self) -> None:
        """Before sleep (vLLM 0.33): the memory behind the cache goes away."""
        self._store.unregister()

    def restore_kv_caches(self) -> None:
        """After sleep: other memory at the same addresses."""
        self._store.unregister()
        self._store.register(self._kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        copies: Any = self._get_connector_metadata()
        self._store.copy("READ", copies.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: everything was loaded before the forward pass."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: whole blocks are saved after the forward pass."""

    def wait_for_save(self) -> None:
        copies: Any = self._get_connector_metadata()
        self._store.copy("WRITE", [(b, s) for s, b in copies.saves.items()])

    def shutdown(self) -> None:
        if self.role == KVConnectorRole.WORKER:
            self._store.unregister()


class StoreIndex:
    """Which block contents lie in which slot of the store. Evicts the least recent.

    Keys are vLLM's block hashes: each covers its block and all before it.
    """

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise ValueError(f"store_blocks: expected at least 1, found {slots}")
        self._slots = slots
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._slot_of

    def __getitem__(self, key: bytes) -> int:
        return self._slot_of[key]

    def leading(self, keys: Sequence[bytes]) -> int:
        """How many of ``keys`` are stored before the first that is not."""
        return next((i for i, k in enumerate(keys) if k not in self), len(keys))

    @property
    def next_to_go(self) -> bytes | None:
        """The key that the next :meth:`add` evicts, or None while slots are free."""
        full = len(self._slot_of) == self._slots
        return next(iter(self._slot_of)) if full else None

    def add(self, key: bytes) -> int:
        """The slot to write ``key`` to."""
        victim = self.next_to_go
        slot = len(self._slot_of) if victim is None else self._slot_of.pop(victim)
        self._slot_of[key] = slot
        return slot

    def touch(self, keys: Sequence[bytes]) -> None:
        """Note a use of a prefix. Its end goes first: without it the rest is good."""
        for key in reversed(keys):
            if key in self._slot_of:
                self._slot_of.move_to_end(key)

    def clear(self) -> None:
        self._slot_of.clear()


class Planner:
    """The scheduler's side: what to load before a step, and to save after it.

    A worker runs steps in order, loads before the forward pass and saves after it, so
    a slot may be taken over in the step that still reads it.
    """

    def __init__(self, index: StoreIndex, spec: Any) -> None:
        self.index = index
        self._block_size: int = spec.block_size
        self._requests: dict[str, Any] = {}
        self._blocks: dict[str, list[int]] = {}
        self._local: dict[str, int] = {}  # blocks found in the prefix cache
        self._considered: dict[str, int] = {}  # blocks saved, or stored before
        self._loads: list[tuple[int, int]] = []

    def match(self, request: Any, num_computed_tokens: int) -> int:
        """Tokens in the store beyond those in the prefix cache; whole blocks."""
        local = num_computed_tokens // self._block_size
        self._local[request.request_id] = local
        # The last token is always computed: its logits are wanted.
        usable = (request.num_tokens - 1) // self._block_size
        return self.index.leading(request.block_hashes[local:usable]) * self._block_size

    def admit(self, request: Any, block_ids: list[int], num_tokens: int) -> None:
        """Plan to load ``num_tokens`` behind what the prefix cache has."""
        self._requests[request.request_id] = request
        self._considered[request.request_id] = 0
        first = self._local.get(request.request_id, 0)
        for i in range(first, first + num_tokens // self._block_size):
            slot = self.index[request.block_hashes[i]]
            self._loads.append((block_ids[i], slot))

    def plan(self, scheduled: Any) -> Copies:
        """The copies of one step. Saves each block in the step that completes it."""
        copies = Copies(loads=self._loads)
        self._loads = []
        for new in scheduled.scheduled_new_reqs:
            self._blocks[new.req_id] = list(new.block_ids[0])
            self._save(copies, new.req_id, new.num_computed_tokens, scheduled)
        running = scheduled.scheduled_cached_reqs
        for req_id, more, computed in zip(
            running.req_ids,
            running.new_block_ids,
            running.num_computed_tokens,
            strict=True,
        ):
            if req_id in running.resumed_req_ids:
                self._blocks[req_id] = []  # preempted since, and given other blocks
            self._blocks[req_id] += more[0] if more else []
            self._save(copies, req_id, computed, scheduled)
        return copies

    def _save(self, copies: Copies, req_id: str, computed: int, scheduled: Any) -> None:
        keys = self._requests[req_id].block_hashes
        tokens = computed + scheduled.num_scheduled_tokens[req_id]
        # Blocks with tokens that are only guessed yet have no hash.
        complete = min(len(keys), tokens // self._block_size)
        if complete <= self._considered[req_id]:
            return
        own = set(keys[:complete])
        for i in range(self._considered[req_id], complete):
            if keys[i] in self.index:
                continue
            if self.index.next_to_go in own:
                break  # the head of a prefix is worth more than its end
            # By slot: if requests of one step compete for it, the last one has it.
            copies.saves[self.index.add(keys[i])] = self._blocks[req_id][i]
        self._considered[req_id] = complete

    def forget(self, request: Any) -> None:
        """A request has ended: remember its prefix, drop the rest."""
        self.index.touch(request.block_hashes)
        for state in (self._requests, self._blocks, self._local, self._considered):
            state.pop(request.request_id, None)


class HostStore:
    """The worker's side: a buffer of slots, and the agent that copies.

    Args:
        slots: Blocks the buffer holds.
        num_blocks: Blocks of the KV cache.
    """

    def __init__(self, slots: int, num_blocks: int) -> None:
        self._slots = slots
        self._num_blocks = num_blocks
        self._name = f"nixl-store-{uuid.uuid4()}"
        # No progress thread: it would poll without a pause, and copies are waited
        # for anyway.
        self._agent = nixl_agent(
            self._name, nixl_agent_config(enable_prog_thread=False)
        )
        self._buffer: torch.Tensor | None = None
        self._buffer_registration: Any = None
        self._cache_registration: Any = None
        self._sides: tuple[Any, ...] = ()  # prepared descriptors: cache, store
        self._totals = dict.fromkeys(("read", "written"), 0)
        self._totals |= dict.fromkeys(("bytes_read", "bytes_written"), 0)

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Register the cache and, the first time, the buffer.

        Args:
            kv_caches: A view per layer; layers that share a cache share its address.
                The first dimension is blocks, or equal parts of blocks.
        """
        views = list({view.data_ptr(): view for view in kv_caches.values()}.values())
        device = views[0].device
        memory, index = ("DRAM", 0) if device.type == "cpu" else ("VRAM", device.index)
        self._is_async = device.type != "cpu"
        regions = sorted(
            {
                (view.untyped_storage().data_ptr(), view.untyped_storage().nbytes())
                for view in views
            }
        )
        self._cache_registration = self._agent.register_memory(
            [(address, size, index, "") for address, size in regions], memory
        )
        shapes = [block_bytes(view, self._num_blocks) for view in views]
        self._slot_bytes = sum(size for size, _ in shapes)
        if self._buffer is None:
            self._buffer = torch.empty(
                self._slots * self._slot_bytes,
                dtype=torch.uint8,
                pin_memory=device.type == "cuda",
            )
            self._buffer_registration = self._agent.register_memory(
                [(self._buffer.data_ptr(), self._buffer.nbytes, 0, "")], "DRAM"
            )
        # Descriptors layer by layer, so that a block's are num_blocks apart.
        self._layers = len(views)
        cache, store = [], []
        address = self._buffer.data_ptr()
        for view, (size, stride) in zip(views, shapes, strict=True):
            base = view.data_ptr()
            cache += [(base + b * stride, size, index) for b in range(self._num_blocks)]
            store += [
                (address + s * self._slot_bytes, size, 0) for s in range(self._slots)
            ]
            address += size
        # The peer is the agent itself: NIXL copies between its own registrations.
        self._sides = (
            self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", cache, memory),
            self._agent.prep_xfer_dlist(self._name, store, "DRAM"),
        )
        facts = {"pid": os.getpid(), "regions": regions}
        logger.info("NIXL store registered: %s", json.dumps(facts))

    def unregister(self) -> None:
        """Let go of the cache; the buffer stays. Harmless when repeated."""
        if self._cache_registration is None:
            return
        for side in self._sides:
            self._agent.release_dlist_handle(side)
        self._sides = ()
        self._agent.deregister_memory(self._cache_registration)
        self._cache_registration = None

    def copy(self, operation: str, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks, and wait for it.

        Args:
            operation: ``WRITE`` into the store, ``READ`` out of it.
            pairs: Block and slot of each copy.

        Raises:
            RuntimeError: NIXL failed. The step fails too: its blocks are not there.
        """
        if not pairs:
            return
        if self._is_async:
            # Kernels that were launched earlier may still use the blocks.
            torch.accelerator.synchronize()
        cache, store = self._sides
        layers = range(self._layers)
        handle = self._agent.make_prepped_xfer(
            operation,
            cache,
            [n * self._num_blocks + block for n in layers for block, _ in pairs],
            store,
            [n * self._slots + slot for n in layers for _, slot in pairs],
        )
        try:
            state = self._agent.transfer(handle)
            while state == "PROC":
                state = self._agent.check_xfer_state(handle)
            if state != "DONE":
                raise RuntimeError(f"NIXL {operation} of {len(pairs)} blocks: {state}")
        finally:
            self._agent.release_xfer_handle(handle)
        done = {"READ": "read", "WRITE": "written"}[operation]
        self._totals[done] += len(pairs)
        self._totals[f"bytes_{done}"] += len(pairs) * self._slot_bytes
        logger.info("NIXL store totals: %s", json.dumps(self._totals))


def block_bytes(view: torch.Tensor, num_blocks: int) -> tuple[int, int]:
    """Bytes of one block in a layer's view, and bytes from a block to the next.

    Raises:
        NotImplementedError: A block's bytes are not contiguous in this layout.
    """
    parts = view.shape[0] // num_blocks  # kernels may want smaller blocks
    inside = zip(view.shape[1:], view.stride()[1:], strict=True)
    part = (sum((n - 1) * step for n, step in inside) + 1) * view.element_size()
    stride = view.stride(0) * view.element_size()
    size = (parts - 1) * stride + part
    dense = parts * view[0].numel() * view.element_size()
    if size != dense:
        raise NotImplementedError(
            f"a block of {dense} bytes spans {size}: shape {tuple(view.shape)}, "
            f"strides {view.stride()}"
        )
    return size, parts * stride
