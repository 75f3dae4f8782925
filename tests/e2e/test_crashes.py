"""Engines killed in the middle of a transfer, and those that outlive them.

A transfer is made to last: the engine that is read from is frozen, and UCX may use
TCP only, where a read needs both sides. So each kill falls inside a transfer, which
the probe's notes confirm. The decode engine has two ranks, the prefill engine one.

``KVPAD_CRASH_KINDS=kvpad,stock`` does the same to engines without kvpad, to compare.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from fleet import Fleet
from mappings import holders, memory_files, shared_memory

from engines import Engine, EngineError, PrefillDecodePair, process_group
from prompts import prompts

pytestmark = [pytest.mark.e2e, pytest.mark.extended]

KINDS = os.environ.get("KVPAD_CRASH_KINDS", "kvpad").split(",")
PROMPT = prompts()[5]
OWN = prompts()[2]
TOKENS = 16
GONE_SECONDS = 60.0
UCX_ABORT = re.compile(r"ucp_request\.inl:\d+ +Fatal: unexpected error: ")
VLLM_SHARED_MEMORY = "psm_", "sem.mp-", "vllm_dist_"
"""Queues between vLLM's processes, and the collectives of its ranks on a CPU."""


@dataclass(frozen=True)
class Traces:
    """What the system knew of an engine while it lived."""

    memory: set[int]  # inodes of its KV cache's memory files
    shared: set[Path]
    ports: set[int]
    group: int


def traces(engine: Engine) -> Traces:
    pids = engine.pids()
    return Traces(
        memory_files(pids), shared_memory(pids), listening_ports(pids), engine.pid
    )


def listening_ports(pids: list[int]) -> set[int]:
    """TCP ports on which one of ``pids`` listens."""
    sockets = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                sockets.add(os.readlink(link))
    return {port for port, inode in listeners() if f"socket:[{inode}]" in sockets}


def listeners() -> Iterator[tuple[int, str]]:
    """Port and inode of every TCP socket of this machine that listens."""
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A":
                yield int(local.rpartition(":")[2], 16), rest[5]


class Scene:
    """A pair of engines, and what each answered before anything happened."""

    def __init__(self, pair: PrefillDecodePair, probe_dir: Path) -> None:
        self.pair = pair
        self.probe_dir = probe_dir
        self.handed_over = pair.run(PROMPT, TOKENS).text
        # Each its own: two ranks add up in another order than one.
        self.own = {
            engine.spec.tensor_parallel: engine.complete(OWN, TOKENS).text
            for engine in (pair.prefill, pair.decode)
        }

    def during_a_transfer(self, kill: Callable[[], None]) -> str:
        """Run ``kill`` while the decode engine reads; return what its client got."""
        pair, answers = self.pair, list[str]()
        before = self.transfers()
        params = pair.prefill.complete(
            PROMPT, max_tokens=1, kv_transfer_params={"do_remote_decode": True}
        ).kv_transfer_params

        def ask() -> None:
            try:
                answers.append(
                    pair.decode.complete(PROMPT, TOKENS, kv_transfer_params=params).text
                )
            except EngineError as error:
                answers.append(f"error: {error}".splitlines()[0])

        client = threading.Thread(target=ask)
        pair.prefill.freeze()
        try:
            client.start()
            begun, done = before
            deadline = time.monotonic() + 60
            while self.transfers()[0] < begun + pair.decode.spec.tensor_parallel:
                assert time.monotonic() < deadline, "no transfer began"
                time.sleep(0.02)
            kill()
            assert self.transfers()[1] == done  # it had not ended
        finally:
            pair.prefill.thaw()
        client.join(timeout=180)
        assert not client.is_alive(), "the client was never answered"
        (answer,) = answers
        # A worker may yet serve the read before it follows its core; half a read is
        # never taken for a whole one.
        assert answer == self.handed_over or answer.startswith("error: ")
        return answer

    def transfers(self) -> tuple[int, int]:
        """Reads that decode workers have begun, and those they found done."""
        notes = "".join(file.read_text() for file in self.probe_dir.glob("transfers-*"))
        return notes.count("begun"), notes.count("done")

    def assert_answers_as_before(self, engine: Engine) -> None:
        answer = engine.complete(OWN, TOKENS).text
        assert answer == self.own[engine.spec.tensor_parallel]

    def assert_transfers_as_before(self) -> None:
        failed = self.pair.failed_transfers()
        handover = self.pair.run(PROMPT, TOKENS)
        assert handover.text == self.handed_over
        assert handover.bytes_transferred > 0
        assert self.pair.failed_transfers() == failed


@pytest.fixture
def scene(whole_scene: Scene) -> Scene:
    """Both engines alive, whatever an earlier test did and did not get to."""
    pair = whole_scene.pair
    dead = [engine for engine in (pair.prefill, pair.decode) if not engine.pids()]
    if pair.prefill in dead:
        pair.replace_prefill()
    if pair.decode in dead:
        pair.replace_decode()
    if dead:
        pair.run(PROMPT, TOKENS)  # so that they know each other
    return whole_scene


@pytest.fixture(scope="module", params=KINDS)
def whole_scene(request: pytest.FixtureRequest, fleet: Fleet) -> Iterator[Scene]:
    kind = request.param
    decode = fleet.spec(f"{kind}-tp2")
    decode = dataclasses.replace(decode, env={**decode.env, "UCX_TLS": "tcp,self"})
    prefill = dataclasses.replace(decode, tensor_parallel=1)
    with fleet.own_pair(f"{kind}-crash", prefill, decode) as pair:
        yield Scene(pair, fleet.probe_dir(f"{kind}-tp2"))


def assert_nothing_is_left(dead: Traces) -> None:
    def left() -> dict[str, object]:
        """What the system still knows of it, nothing left out."""
        found = {
            "processes": process_group(dead.group),
            "memory held by": holders(dead.memory),
            "ports": dead.ports & {port for port, _ in listeners()},
        }
        return {what: value for what, value in found.items() if value}

    deadline = time.monotonic() + GONE_SECONDS
    while left() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left() == {}
    # vLLM's own has names, which a killed engine leaves; kvpad's memory has none.
    files = [path for path in dead.shared if path.exists()]
    for path in files:
        path.unlink()
    unknown = [path for path in files if not path.name.startswith(VLLM_SHARED_MEMORY)]
    assert unknown == []


def test_prefill_engine_killed_while_it_is_read(scene: Scene) -> None:
    dead = traces(scene.pair.prefill)
    assert bool(dead.memory) == ("kvpad" in scene.pair.prefill.spec.plugins)
    print("client:", scene.during_a_transfer(scene.pair.prefill.kill))
    assert_nothing_is_left(dead)
    scene.pair.replace_prefill()
    scene.assert_answers_as_before(scene.pair.decode)
    scene.assert_transfers_as_before()


def test_worker_of_the_decode_engine_killed_while_it_reads(scene: Scene) -> None:
    engine = scene.pair.decode
    dead = traces(engine)
    victim = engine.process("Worker_TP1")
    print("client:", scene.during_a_transfer(lambda: os.kill(victim, signal.SIGKILL)))
    engine.wait_dead(GONE_SECONDS)
    assert_nothing_is_left(dead)
    scene.assert_answers_as_before(scene.pair.prefill)
    scene.pair.replace_decode()
    scene.assert_transfers_as_before()


def test_decode_engine_killed_while_it_reads(scene: Scene) -> None:
    dead, reader_less = traces(scene.pair.decode), traces(scene.pair.prefill)
    print("client:", scene.during_a_transfer(scene.pair.decode.kill))
    assert_nothing_is_left(dead)
    scene.pair.replace_decode()
    if UCX_ABORT.search(scene.pair.prefill.log_text()):
        # Over TCP a read needs an answer, and UCX ends the process whose answer finds
        # the reader gone. It does so to stock vLLM, at the same moment.
        scene.pair.prefill.wait_dead(GONE_SECONDS)
        assert_nothing_is_left(reader_less)
        scene.pair.replace_prefill()
    scene.assert_answers_as_before(scene.pair.prefill)
    scene.assert_transfers_as_before()


def test_engine_core_of_the_prefill_engine_killed_while_it_is_read(
    scene: Scene,
) -> None:
    engine = scene.pair.prefill
    dead = traces(engine)
    victim = engine.process("EngineCore")
    print("client:", scene.during_a_transfer(lambda: os.kill(victim, signal.SIGKILL)))
    engine.wait_dead(GONE_SECONDS)
    assert_nothing_is_left(dead)
    scene.assert_answers_as_before(scene.pair.decode)
