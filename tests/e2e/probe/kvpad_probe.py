"""A vLLM plugin for the tests: see what a worker's NIXL agent does, break things.

vLLM finds it by this folder on ``PYTHONPATH`` and ``kvpad_probe`` in
``VLLM_PLUGINS``. It runs before kvpad, in every process of the engine.

- ``KVPAD_PROBE_DIR``: each process that registers memory with NIXL appends a JSON
  list of ``[address, length]`` a call to ``registered-<pid>`` in that folder. Nothing
  is watched if it is unset.
- A file ``corrupt`` in that folder: after the next transfer that this process reads,
  the sign bits of one transferred block are flipped in every layer, and the file is
  renamed to ``corrupted``.
- Each transfer that this process begins to read, and each that it finds done, is a
  line ``begun`` or ``done`` in ``transfers-<pid>``.
- ``KVPAD_PROBE_CHANGES``: a comma-separated list of names of ``change_*`` below, each
  alone or, for one rank, as ``rank1:name``.
"""

from __future__ import annotations

import ctypes
import functools
import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any


def register() -> None:
    """Entry point; called once a process by vLLM."""
    # The front end and the engine core hold no cache.
    process = multiprocessing.current_process()  # named VllmWorker-<rank>
    if "Worker" not in process.name:
        return
    if folder := os.environ.get("KVPAD_PROBE_DIR"):
        watch_nixl_agent(Path(folder))
    for change in filter(None, os.environ.get("KVPAD_PROBE_CHANGES", "").split(",")):
        rank, _, name = change.rpartition(":")
        if not rank or process.name.endswith(rank.replace("rank", "-")):
            globals()[f"change_{name}"]()


def watch_nixl_agent(folder: Path) -> None:
    from nixl._api import nixl_agent

    sides: dict[int, list[tuple[int, int]]] = {}  # handle -> ranges
    reads: dict[int, list[tuple[int, int]]] = {}

    def ranges(descs: Any) -> list[tuple[int, int]]:
        if isinstance(descs, list):  # NIXL takes plain tuples as well
            return [tuple(desc)[:2] for desc in descs]
        return [tuple(descs[i])[:2] for i in range(descs.descCount())]

    def after(name: str, note: Any) -> None:
        original = getattr(nixl_agent, name)

        @functools.wraps(original)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            note(result, *args)
            return result

        setattr(nixl_agent, name, method)

    def registered(result: Any, *_: Any) -> None:
        with (folder / f"registered-{os.getpid()}").open("a") as file:
            print(json.dumps(ranges(result)), file=file)

    def prepared(result: Any, agent: str, descs: Any, *_: Any) -> None:
        if agent == "NIXL_INIT_AGENT":
            sides[id(result)] = ranges(descs)

    def made(result: Any, operation: str, local: Any, indices: Any, *_: Any) -> None:
        if operation == "READ":
            reads[id(result)] = [sides[id(local)][int(i)] for i in indices]

    def note(event: str) -> None:
        with (folder / f"transfers-{os.getpid()}").open("a") as file:
            print(event, file=file)

    def began(_: Any, handle: Any, *__: Any) -> None:
        if id(handle) in reads:
            note("begun")

    def checked(state: str, handle: Any) -> None:
        if state != "DONE" or (transferred := reads.pop(id(handle), None)) is None:
            return
        note("done")
        try:
            (folder / "corrupt").rename(folder / "corrupted")
        except FileNotFoundError:
            return
        flip_signs_of_one_block(transferred)

    after("register_memory", registered)
    after("prep_xfer_dlist", prepared)
    after("make_prepped_xfer", made)
    after("transfer", began)
    after("check_xfer_state", checked)


def flip_signs_of_one_block(transferred: list[tuple[int, int]]) -> None:
    """Flip every bfloat16 sign in the first block of each layer's run of blocks.

    ``transferred`` is layer by layer; the layers have equally many blocks.
    """
    length = transferred[0][1]
    layers = 30
    for address, _ in transferred[:: max(len(transferred) // layers, 1)]:
        data = (ctypes.c_uint8 * length).from_address(address)
        for i in range(1, length, 2):
            data[i] ^= 0x80


def change_unpadded() -> None:
    """Let kvpad place the cache as the engine planned it, whatever the connector."""
    import vllm_kvpad.hosts.supplied_cache as supplied_cache

    assert hasattr(supplied_cache, "pad_kv_cache_segments")
    supplied_cache.pad_kv_cache_segments = lambda config, layout, granule: config


def change_missing_patch_point() -> None:
    """Take away a property that kvpad patches and start-up does without."""
    from vllm.v1.worker.gpu_worker import Worker

    del Worker.sleep_mode_backend


def change_block_outermost_layout() -> None:
    """Let the CPU kernels be used with BLHNC.

    They address blocks by their stride and read each block as LBHNC has it, which
    BLHNC has too; vLLM only does not list it.
    """
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.kv_cache_layout import KVCacheLayout

    CPUAttentionBackend.supported_kv_cache_layouts = classmethod(
        lambda cls: (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)
    )


def change_eager_warm_up() -> None:
    """Let the CPU worker run the model once before its size is asked for.

    vLLM 0.32.0 does so only where it compiles; a second pipeline stage has no buffers
    for what the first one sends until then, and fails at the first request.
    """
    from vllm.v1.worker.cpu_worker import CPUWorker

    stock = CPUWorker.determine_available_memory

    @functools.wraps(stock)
    def determine_available_memory(self: Any) -> int:
        self.model_runner.profile_run()
        return int(stock(self))

    CPUWorker.determine_available_memory = determine_available_memory


def change_measured_path() -> None:
    """Let this worker start as a GPU worker does: warm up, measure, adopt."""
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from measured_path_program import give_cpu_worker_a_gpu_workers_start

    give_cpu_worker_a_gpu_workers_start(budget_mib=1200, resident_mib=40, facts={})


def change_memory_is_taken() -> None:
    """Let something else take the memory after ``KVPAD_PROBE_CHUNKS`` chunks.

    What the driver then does about it is its own.
    """
    from vllm_kvpad.vmm import HostVmmDriver

    chunks = int(os.environ["KVPAD_PROBE_CHUNKS"])
    original = HostVmmDriver.create
    created = 0

    @functools.wraps(original)
    def create(self: Any, size: int) -> int:
        nonlocal created
        if created == chunks:
            self.free_memory = lambda: 1 << 20
        handle = original(self, size)
        created += 1
        return handle

    HostVmmDriver.create = create
