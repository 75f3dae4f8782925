"""No engine outlives its test: the supervisor, with small programs for servers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

import engines
from engines import (
    Engine,
    EngineError,
    EngineSpec,
    PrefillDecodePair,
    free_ports,
    process_group,
)

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@dataclass(frozen=True)
class Program(EngineSpec):
    """Stands in for a server: a Python program instead of vLLM."""

    code: str = ""

    def command(self, port: int) -> list[str]:
        return [sys.executable, "-c", textwrap.dedent(self.code), str(port)]


SERVER = """
    import http.server, subprocess, sys
    # As vLLM does: a child in the same group, and deaf to SIGINT at that.
    subprocess.Popen([sys.executable, "-c",
        "import signal, time; signal.signal(2, signal.SIG_IGN); time.sleep(600)"])
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def start(tmp_path: Path, code: str) -> Engine:
    return Engine("program", Program(model=tmp_path, code=code), tmp_path)


def wait_until_gone(group: int, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while process_group(group):
        assert time.monotonic() < deadline, f"group {group} still has processes"
        time.sleep(0.05)


def test_a_healthy_server_is_found_and_stopped_with_its_children(
    tmp_path: Path,
) -> None:
    with start(tmp_path, SERVER) as engine:
        engine.wait_healthy(timeout=30)
        assert len(engine.pids()) == 2
    wait_until_gone(engine.pid, seconds=0)
    engine.stop()  # again, harmless


def test_a_server_that_dies_is_reported_with_its_log(tmp_path: Path) -> None:
    code = "print('so it goes'); raise SystemExit(3)"
    with (
        start(tmp_path, code) as engine,
        pytest.raises(EngineError, match=r"(?s)status 3 .*so it goes"),
    ):
        engine.wait_healthy(timeout=30)


def test_children_of_a_server_that_dies_are_ended(tmp_path: Path) -> None:
    code = """
        import subprocess
        subprocess.Popen(["sleep", "600"])
    """
    with start(tmp_path, code) as engine:
        assert engine.wait_exit(timeout=30) == 0
        wait_until_gone(engine.pid, seconds=0)
        assert "outlived their server" in engine.log_text()


def test_a_kill_ends_all_processes_at_once(tmp_path: Path) -> None:
    with start(tmp_path, SERVER) as engine:
        engine.wait_healthy(timeout=30)
        engine.kill()
        wait_until_gone(engine.pid, seconds=0)
        assert engine.wait_dead(timeout=1) == 128 + signal.SIGKILL
        assert "outlived their server" not in engine.log_text()


def test_a_frozen_server_answers_nobody_and_can_still_be_stopped(
    tmp_path: Path,
) -> None:
    with start(tmp_path, SERVER) as engine:
        engine.wait_healthy(timeout=30)
        engine.freeze()
        with pytest.raises(EngineError, match="still runs after 1 s"):
            engine.wait_dead(timeout=1)
        with pytest.raises(EngineError, match="not healthy"):
            engine.wait_healthy(timeout=4)
        engine.thaw()
        engine.wait_healthy(timeout=60)
        engine.freeze()
        engine.kill()
    wait_until_gone(engine.pid, seconds=0)


def test_a_killed_supervisor_does_not_leave_its_server_behind(tmp_path: Path) -> None:
    with start(tmp_path, SERVER) as engine:
        engine.wait_healthy(timeout=30)
        os.kill(parent_of(engine.pid), signal.SIGKILL)
        engine.wait_dead(timeout=10)
    wait_until_gone(engine.pid)


def parent_of(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[1])


def test_a_process_is_found_by_the_name_that_vllm_gives_it(tmp_path: Path) -> None:
    code = """
        import subprocess
        subprocess.Popen(
            ["bash", "-c", "exec -a VLLM::Worker_TP1 cat"], stdin=subprocess.PIPE
        ).wait()
    """
    with start(tmp_path, code) as engine:
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(KeyError):
                assert engine.process("Worker_TP1") in engine.pids()
                break
            assert time.monotonic() < deadline
            time.sleep(0.05)
        with pytest.raises(KeyError, match="VLLM::EngineCore"):
            engine.process("EngineCore")


def test_a_server_that_never_answers_is_given_up(tmp_path: Path) -> None:
    with (
        start(tmp_path, "import time; time.sleep(600)") as engine,
        pytest.raises(EngineError, match="not healthy after 1 s"),
    ):
        engine.wait_healthy(timeout=1)
    wait_until_gone(engine.pid, seconds=0)


def test_a_killed_parent_takes_its_server_along(tmp_path: Path) -> None:
    program = f"""
        import sys, time
        from pathlib import Path
        sys.path[:0] = [{str(EXAMPLES)!r}, {str(Path(__file__).parent)!r}]
        from test_engine_harness import SERVER, start
        engine = start(Path(sys.argv[1]), SERVER)
        engine.wait_healthy(timeout=30)
        print(engine.pid, flush=True)
        time.sleep(600)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)],
        stdout=subprocess.PIPE,
    )
    try:
        assert parent.stdout is not None
        group = int(parent.stdout.readline())
        assert process_group(group)
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.communicate()
    wait_until_gone(group)


def test_ports_are_free_consecutive_and_never_given_twice() -> None:
    first, second = free_ports(8), free_ports(8)
    assert set(range(first, first + 8)).isdisjoint(range(second, second + 8))


def test_an_engine_on_gpus_sees_those_and_is_told_its_share() -> None:
    spec = EngineSpec(Path("model"), gpus=("2", "3"), gpu_memory_utilization=0.25)
    environment, command = spec.environment(1), spec.command(1)
    assert environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert command[command.index("--gpu-memory-utilization") + 1] == "0.25"
    assert "VLLM_CPU_KVCACHE_SPACE" not in environment


def test_an_engine_on_the_cpu_is_told_its_caches_size() -> None:
    spec = EngineSpec(Path("model"))
    assert spec.environment(1)["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert "--gpu-memory-utilization" not in spec.command(1)


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        ((), ["start prefill", "start decode", "wait prefill", "wait decode"]),
        # The second measures what the first has left.
        (("0",), ["start prefill on 0", "wait prefill", "start decode on 0"]),
        (("0", "1"), ["start prefill on 0", "start decode on 1", "wait prefill"]),
    ],
)
def test_a_pair_starts_side_by_side_except_on_one_gpu(
    gpus: tuple[str, ...],
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    done: list[str] = []

    class Noting(Engine):
        def __init__(self, name: str, spec: EngineSpec, log_dir: Path) -> None:
            self.name = name.removeprefix("pair-")
            done.append(" on ".join([f"start {self.name}", *spec.gpus]))
            assert spec.kv_transfer is not None
            device = "cuda" if spec.gpus else "cpu"
            assert spec.kv_transfer["kv_buffer_device"] == device

        def wait_healthy(self, *_: object) -> float:
            done.append(f"wait {self.name}")
            return 0.0

        def stop(self) -> None: ...

    monkeypatch.setattr(engines, "Engine", Noting)
    with PrefillDecodePair("pair", EngineSpec(tmp_path, gpus=gpus), tmp_path):
        assert done[: len(expected)] == expected


def test_a_pair_on_three_gpus_is_refused(tmp_path: Path) -> None:
    spec = EngineSpec(tmp_path, gpus=("0", "1", "2"))
    with pytest.raises(ValueError, match="one or two GPUs"):
        PrefillDecodePair("pair", spec, tmp_path)
