"""kvpad's segments registered with Mooncake's transfer engine and sent over TCP.

Two processes on this machine each have a padded KV cache of 8 layers and 331 blocks,
over the memory driver that kvpad uses on CPUs. Each commits it with one chunk for each
segment and registers every segment; one fills its cache and writes it into the other's
over 127.0.0.1. Needs no model and no GPU:

    python examples/mooncake_segments.py

Exit status: 0 if every segment arrived as it was sent and lies in one chunk, 1 if not,
2 if a process failed.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_kvpad.kv_cache import ExtensibleKVCache

LAYERS = 8
CAPACITY_BLOCKS = 400
BLOCKS = 331  # committed; rounding to whole granules would leave none of them
TIMEOUT_SECONDS = 120


@dataclass(frozen=True)
class SegmentFacts:
    """One committed segment of a process.

    Attributes:
        address: Where it starts there.
        num_bytes: Its committed bytes, which are what was registered.
        one_chunk: Whether the driver says that one chunk backs all of them.
        digest: SHA-256 of them.
    """

    address: int
    num_bytes: int
    one_chunk: bool
    digest: str


@contextlib.contextmanager
def committed_cache() -> Iterator[ExtensibleKVCache]:
    """A padded cache of which :data:`BLOCKS` blocks are committed, one chunk each."""
    import torch
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheTensor,
    )
    from vllm.v1.kv_cache_layout import KVCacheLayout

    from vllm_kvpad.kv_cache import ExtensibleKVCache
    from vllm_kvpad.placement import pad_kv_cache_segments
    from vllm_kvpad.vmm import HostVmmDriver

    # 20 KiB a block and layer, as SmolLM2-360M has: 331 blocks end inside a granule.
    spec = FullAttentionSpec(
        block_size=16, num_kv_heads=5, head_size=64, dtype=torch.bfloat16
    )
    page = spec.page_size_bytes
    names = [f"model.layers.{i}.self_attn.attn" for i in range(LAYERS)]
    planned = KVCacheConfig(
        num_blocks=CAPACITY_BLOCKS,
        kv_cache_tensors=[
            KVCacheTensor(
                size=LAYERS * CAPACITY_BLOCKS * page,
                layers=names,
                layer_stride=CAPACITY_BLOCKS * page,
                block_stride=page,
            )
        ],
        kv_cache_groups=[KVCacheGroupSpec(names, spec)],
    )
    driver = HostVmmDriver()
    padded = pad_kv_cache_segments(planned, KVCacheLayout.LBNHC, driver.granularity)
    cache = ExtensibleKVCache(padded, KVCacheLayout.LBNHC, "cpu", driver)
    try:
        cache.commit(BLOCKS, defragment=True)
        yield cache
    finally:
        cache.free()


def committed_bytes(cache: ExtensibleKVCache) -> list[Any]:
    """The committed bytes of each segment as an int8 tensor over its memory."""
    return [
        cache.driver.tensor(
            cache.address + segment.offset,
            segment.committed_bytes(cache.num_committed_blocks),
        )
        for segment in cache.segments
    ]


def facts_of(cache: ExtensibleKVCache) -> list[SegmentFacts]:
    """What is in each segment now."""
    return [
        SegmentFacts(
            address=tensor.data_ptr(),
            num_bytes=tensor.numel(),
            one_chunk=one_chunk,
            digest=hashlib.sha256(tensor.numpy()).hexdigest(),
        )
        for tensor, one_chunk in zip(
            committed_bytes(cache), cache.segments_backed_by_one_chunk(), strict=True
        )
    ]


def registered_engine(cache: ExtensibleKVCache) -> Any:
    """A Mooncake transfer engine on loopback that knows every segment.

    Raises:
        RuntimeError: Mooncake did not start, or refused a segment.
    """
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    if status := engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
        raise RuntimeError(f"Mooncake's transfer engine did not start: {status}")
    for tensor in committed_bytes(cache):
        if status := engine.register_memory(tensor.data_ptr(), tensor.numel()):
            raise RuntimeError(f"Mooncake did not register a segment: {status}")
    return engine


def receive(conversation: Connection) -> None:
    """Process one: say where the segments are; say later what arrived in them."""
    with committed_cache() as cache:
        engine = registered_engine(cache)
        session = f"127.0.0.1:{engine.get_rpc_port()}"
        conversation.send((session, facts_of(cache)))
        conversation.recv()  # sent
        conversation.send(facts_of(cache))
        conversation.recv()  # the other side is done with this memory


def send(conversation: Connection) -> None:
    """Process two: fill the cache and write it, segment by segment."""
    import torch

    with committed_cache() as cache:
        random = torch.Generator().manual_seed(0)
        for tensor in committed_bytes(cache):
            tensor.random_(-128, 128, generator=random)
        engine = registered_engine(cache)
        session, theirs = conversation.recv()
        for own, their in zip(facts_of(cache), theirs, strict=True):
            if status := engine.transfer_sync_write(
                session, own.address, their.address, own.num_bytes
            ):
                raise RuntimeError(f"Mooncake did not transfer a segment: {status}")
        conversation.send(facts_of(cache))


def main() -> int:
    """Run both processes; return the exit status."""
    # New processes, since the loader reads its search path when a program starts.
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        os.environ.update(mooncake_environment(Path(folder)))
        receiver, sender = (
            stack.enter_context(peer(context, run)) for run in (receive, send)
        )
        try:
            session, before = answer(receiver)
            sender.send((session, before))
            sent = answer(sender)
            receiver.send("sent")
            arrived = answer(receiver)
            receiver.send("done")
        except (EOFError, OSError, TimeoutError) as error:
            print(f"a process failed: {error!r}", file=sys.stderr)
            return 2
    return report(before, sent, arrived)


def report(
    before: list[SegmentFacts], sent: list[SegmentFacts], arrived: list[SegmentFacts]
) -> int:
    """Print a line for each segment and the sum; return the exit status.

    Args:
        before: The receiving cache when it was committed.
        sent: The sending cache.
        arrived: The receiving cache afterwards.
    """
    good = []
    for old, ours, theirs in zip(before, sent, arrived, strict=True):
        same = ours.digest == theirs.digest != old.digest
        single = ours.one_chunk and theirs.one_chunk
        good.append(same and single)
        print(
            f"{ours.num_bytes:,} bytes from {ours.address:#x} to {theirs.address:#x}: "
            f"{'the same' if same else 'DIFFERENT'}, "
            f"{'one chunk' if single else 'SEVERAL CHUNKS'} on each side"
        )
    print(
        f"{sum(good)} of {LAYERS} segments registered, sent and verified: {BLOCKS} "
        f"blocks, {sum(each.num_bytes for each in sent):,} bytes over TCP"
    )
    return 0 if len(good) == LAYERS and all(good) else 1


@contextlib.contextmanager
def peer(context: Any, run: Any) -> Iterator[Connection]:
    """A process that runs ``run(conversation)``; none is left behind."""
    conversation, theirs = context.Pipe()
    process = context.Process(target=run, args=(theirs,), name=run.__name__)
    process.start()
    theirs.close()
    try:
        yield conversation
        process.join(TIMEOUT_SECONDS)
    finally:
        conversation.close()
        process.kill()
        process.join()


def answer(conversation: Connection) -> Any:
    """The next object from a process.

    Raises:
        EOFError: It died.
        TimeoutError: It said nothing for :data:`TIMEOUT_SECONDS`.
    """
    if not conversation.poll(TIMEOUT_SECONDS):
        raise TimeoutError(f"nothing for {TIMEOUT_SECONDS} s")
    return conversation.recv()


def mooncake_environment(folder: Path) -> dict[str, str]:
    """Variables with which Mooncake's wheel loads here, and stays on loopback.

    It wants the system's libibverbs, for TCP as well. Where there is none, NIXL's
    wheel brings one, under another name.

    Args:
        folder: An empty folder that outlives the processes.

    Raises:
        ModuleNotFoundError: Mooncake is not installed.
    """
    if importlib.util.find_spec("mooncake") is None:
        raise ModuleNotFoundError(
            "not installed: run `pip install mooncake-transfer-engine-non-cuda`"
        )
    paths = []
    nixl = importlib.util.find_spec("nixl_cu12")
    if nixl is not None and nixl.origin is not None:
        bundled = Path(nixl.origin).parent.with_name("nixl_cu12.libs")
        for verbs in bundled.glob("libibverbs-*.so.*"):
            (folder / "libibverbs.so.1").symlink_to(verbs)
            paths = [str(folder), str(bundled)]
    if inherited := os.environ.get("LD_LIBRARY_PATH"):
        paths.insert(0, inherited)  # the system's own comes first
    return {
        "LD_LIBRARY_PATH": ":".join(paths),
        "MC_TCP_BIND_ADDRESS": "127.0.0.1",
        "MC_LOG_LEVEL": "WARNING",  # what goes well need not be told
    }


if __name__ == "__main__":
    sys.exit(main())
