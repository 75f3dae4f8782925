"""Start real vLLM engines, send text through them, and leave none behind.

The demo (``prefill_decode.py``) and the end-to-end tests share this module:

- :class:`Engine` is one OpenAI-compatible server in a process group of its own, on
  loopback, with ports that were free when it started and a log file.
- :class:`PrefillDecodePair` is two of them that hand the KV cache over by NIXL.

They run on this machine's CPU, or on the GPUs that an :class:`EngineSpec` names.

Every server runs under a small supervisor (this file, run as a program) that
watches a pipe from its parent: whatever ends the parent, SIGKILL included, also
ends the server's whole group.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK_SIZE = 32  # tokens; the CPU attention kernels of vLLM want this
MAX_MODEL_LEN = 1024  # tokens

_STARTUP_SECONDS = 400.0
_REQUEST_SECONDS = 120.0
_STOP_SECONDS = 15.0  # between SIGINT and SIGKILL
_SIDE_CHANNEL_PORTS = 8  # consecutive; NIXL adds a rank to the first

_SUPPLIED = re.compile(r"kvpad: KV cache supplied: (\{.*\})")
_TP_RANK = re.compile(r"Worker_TP(\d+)")


class EngineError(RuntimeError):
    """An engine died, did not become healthy, or refused a request."""


@dataclass(frozen=True)
class EngineSpec:
    """What to start; everything a test varies between engines.

    Attributes:
        model: Folder of the checkpoint.
        plugins: Names for ``VLLM_PLUGINS``; empty is stock vLLM, None leaves the
            variable unset.
        kv_transfer: ``--kv-transfer-config``, or None for no connector.
        additional: ``--additional-config``, or None.
        tensor_parallel: Worker processes.
        gpus: CUDA devices, as ``CUDA_VISIBLE_DEVICES`` names them; none for vLLM's
            CPU build. An engine has all of them to itself, a pair's engines one each,
            or share a single one.
        gpu_memory_utilization: Share of a GPU's memory that an engine may use.
        args: Further command-line arguments.
        env: Further environment variables.
    """

    model: Path
    plugins: tuple[str, ...] | None = ()
    kv_transfer: Mapping[str, Any] | None = None
    additional: Mapping[str, Any] | None = None
    tensor_parallel: int = 1
    gpus: tuple[str, ...] = ()
    gpu_memory_utilization: float = 0.3
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    def command(self, port: int) -> list[str]:
        """The server's command line on ``port``."""
        # `python -m`, since the `vllm` script of the CPU wheel looks for the
        # metadata of a distribution named vllm and fails.
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(self.model)),
            *("--served-model-name", "model"),
            *("--host", "127.0.0.1"),
            *("--port", str(port)),
            *("--block-size", str(BLOCK_SIZE)),
            *("--max-model-len", str(MAX_MODEL_LEN)),
            *("--max-num-seqs", "8"),
            *("--tensor-parallel-size", str(self.tensor_parallel)),
            "--enforce-eager",
            # Every prompt then moves all of its blocks, also when sent again.
            "--no-enable-prefix-caching",
            "--disable-uvicorn-access-log",
        ]
        if self.gpus:
            command += ["--gpu-memory-utilization", str(self.gpu_memory_utilization)]
        if self.kv_transfer is not None:
            command += ["--kv-transfer-config", json.dumps(self.kv_transfer)]
        if self.additional is not None:
            command += ["--additional-config", json.dumps(self.additional)]
        return [*command, *self.args]

    def environment(self, side_channel_port: int) -> dict[str, str]:
        """The server's environment: the caller's, and what the spec says."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            # What a developer has set for an engine of their own.
            if not name.startswith(("VLLM_", "COV_"))
        }
        if self.plugins is not None:
            inherited["VLLM_PLUGINS"] = ",".join(self.plugins)
        if self.gpus:
            device = {
                "CUDA_VISIBLE_DEVICES": ",".join(self.gpus),
                # Greedy decoding needs none, and it would be compiled first.
                "VLLM_USE_FLASHINFER_SAMPLER": "0",
            }
        else:
            device = {
                "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            }
        return {
            **inherited,
            **device,
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel_port),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "UCX_RCACHE_MAX_UNRELEASED": "1024",  # as vLLM sets it, but earlier
            "PYTHONUNBUFFERED": "1",
            "NO_COLOR": "1",
            **self.env,
        }


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt.

    Attributes:
        text: What the model wrote.
        prompt_tokens: Length of the prompt.
        kv_transfer_params: What the connector wants passed on, or None.
    """

    text: str
    prompt_tokens: int
    kv_transfer_params: dict[str, Any] | None


class Engine:
    """One vLLM server. A context manager; stopped on exit, whatever happens."""

    def __init__(self, name: str, spec: EngineSpec, log_dir: Path) -> None:
        """Start the server; it is not ready before :meth:`wait_healthy`.

        Args:
            name: For messages and the log's file name.
            spec: What to start.
            log_dir: Folder for the log, made if missing.
        """
        self.name = name
        self.spec = spec
        self.port = free_ports(1)
        self._side_channel_port = free_ports(_SIDE_CHANNEL_PORTS)
        log_dir.mkdir(parents=True, exist_ok=True)
        self.log_path = log_dir / f"{name}.log"
        command = spec.command(self.port)
        with self.log_path.open("w") as log:
            log.write(f"$ {' '.join(command)}\n")
            log.flush()
            self._supervisor = subprocess.Popen(
                [sys.executable, "-I", __file__, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=spec.environment(self._side_channel_port),
                cwd=log_dir,
                process_group=0,
            )
        self._began = time.monotonic()
        assert self._supervisor.stdout is not None
        self.pid = int(self._supervisor.stdout.readline())

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def wait_healthy(
        self,
        progress: Callable[[str], None] = lambda line: None,
        timeout: float = _STARTUP_SECONDS,
    ) -> float:
        """Wait until the server answers; return the seconds since its start.

        Args:
            progress: Told about once a second how long it has been.
            timeout: Seconds since the start after which waiting is given up.

        Raises:
            EngineError: The server died or was not healthy in time. The message
                ends with the log's last lines.
        """
        while (waited := time.monotonic() - self._began) < timeout:
            if (status := self._supervisor.poll()) is not None:
                raise EngineError(
                    f"engine {self.name} died with status {status} after "
                    f"{waited:.0f} s; {self.log_path} ends:\n{self.log_tail()}"
                )
            with contextlib.suppress(OSError, http.client.HTTPException):
                self._http("/health", timeout=2.0)
                make_polling_threads_yield(self.pids())
                return waited
            progress(f"{self.name}: starting, {waited:.0f} s")
            time.sleep(0.5)
        raise EngineError(
            f"engine {self.name} not healthy after {timeout:.0f} s; "
            f"{self.log_path} ends:\n{self.log_tail()}"
        )

    def wait_exit(self, timeout: float = _STARTUP_SECONDS) -> int:
        """Wait for a server that should end by itself; return its exit status.

        Raises:
            EngineError: It became healthy, or did neither ``timeout`` seconds after
                its start.
        """
        while time.monotonic() - self._began < timeout:
            if (status := self._supervisor.poll()) is not None:
                return status
            with contextlib.suppress(OSError, http.client.HTTPException):
                self._http("/health", timeout=2.0)
                raise EngineError(f"engine {self.name} started; it should not have")
            time.sleep(0.2)
        raise EngineError(f"engine {self.name} neither started nor ended")

    def wait_dead(self, timeout: float) -> int:
        """Wait for a server that is about to end; return its exit status.

        Raises:
            EngineError: It still runs ``timeout`` seconds from now.
        """
        try:
            return self._supervisor.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise EngineError(
                f"engine {self.name} still runs after {timeout:.0f} s; "
                f"{self.log_path} ends:\n{self.log_tail()}"
            ) from error

    def stop(self) -> None:
        """End the server and all its processes. Harmless when repeated."""
        assert self._supervisor.stdin is not None
        assert self._supervisor.stdout is not None
        # The supervisor takes the closed pipe for our death, and acts.
        with contextlib.suppress(OSError):
            self._supervisor.stdin.close()
        self._supervisor.wait(timeout=_STOP_SECONDS + 15)
        self._supervisor.stdout.close()
        # Nothing is left, unless somebody killed the supervisor too. While its group
        # has a process, no other group can have got the number.
        if process_group(self.pid):
            self._signal_group(signal.SIGKILL)

    def kill(self) -> None:
        """End every process of the server at once, as if their machine had failed.

        None gets to clean up. Returns when all are gone; :meth:`stop` is still due.
        """
        self._signal_group(signal.SIGKILL)
        self._supervisor.wait(timeout=_STOP_SECONDS)

    def freeze(self) -> None:
        """Stop every process of the server until :meth:`thaw`, or :meth:`kill`."""
        self._signal_group(signal.SIGSTOP)

    def thaw(self) -> None:
        """Undo :meth:`freeze`."""
        self._signal_group(signal.SIGCONT)

    def _signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def complete(
        self,
        prompt: str,
        max_tokens: int,
        kv_transfer_params: Mapping[str, Any] | None = None,
        request_id: str | None = None,
    ) -> Completion:
        """Continue ``prompt`` greedily by at most ``max_tokens`` tokens.

        Args:
            prompt: The text.
            max_tokens: Tokens after which the model is stopped.
            kv_transfer_params: For the connector.
            request_id: The request's name, for connectors that match requests of two
                engines by it; the server's choice if None.

        Raises:
            EngineError: The server refused or died.
        """
        body: dict[str, Any] = {
            "model": "model",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        if kv_transfer_params is not None:
            body["kv_transfer_params"] = dict(kv_transfer_params)
        if request_id is not None:
            body["request_id"] = request_id
        try:
            answer = json.loads(self._http("/v1/completions", body))
        except urllib.error.HTTPError as error:
            detail = error.read().decode(errors="replace")
            raise EngineError(f"engine {self.name}: {error}: {detail}") from error
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(
                f"engine {self.name}: {error}; {self.log_path} ends:\n{self.log_tail()}"
            ) from error
        return Completion(
            text=answer["choices"][0]["text"],
            prompt_tokens=answer["usage"]["prompt_tokens"],
            kv_transfer_params=answer.get("kv_transfer_params"),
        )

    def reset_prefix_cache(self, external: bool = False) -> None:
        """Forget all cached prefixes.

        The spec's ``env`` must have ``VLLM_SERVER_DEV_MODE=1``.

        Args:
            external: Also those that the connector keeps.

        Raises:
            EngineError: The server did not; a request may still hold blocks.
        """
        path = f"/reset_prefix_cache?reset_external={str(external).lower()}"
        if not json.loads(self._http(path, {}))["success"]:
            raise EngineError(f"engine {self.name}: the prefix cache was not reset")

    def metrics(self) -> str:
        """All of ``/metrics``, in Prometheus' text format."""
        return self._http("/metrics")

    def metric(self, name: str) -> float:
        """The sum of Prometheus samples called ``name`` over their labels.

        Raises:
            KeyError: The server exports no such metric.
        """
        pattern = re.compile(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", re.MULTILINE)
        values = pattern.findall(self.metrics())
        if not values:
            raise KeyError(f"engine {self.name} exports no metric {name}")
        return sum(map(float, values))

    def num_blocks(self) -> int:
        """Blocks of KV cache that the engine's scheduler deals out."""
        match = re.search(
            r'^vllm:cache_config_info\{.*num_gpu_blocks="(\d+)"',
            self.metrics(),
            re.MULTILINE,
        )
        if match is None:
            raise KeyError(f"engine {self.name} exports no vllm:cache_config_info")
        return int(match[1])

    def log_text(self) -> str:
        """The log so far."""
        return self.log_path.read_text(errors="replace")

    def log_tail(self, lines: int = 40) -> str:
        """The log's last ``lines`` lines."""
        return "\n".join(self.log_text().splitlines()[-lines:])

    def supplied(self) -> list[dict[str, Any]]:
        """What kvpad logged about each worker's KV cache, in rank order.

        Empty when the engine is stock, or kvpad stepped aside. Ranks other than 0
        are only there if the engine logs at level DEBUG.
        """
        found = [
            (int(rank[1]) if (rank := _TP_RANK.search(line)) else 0, match[1])
            for line in self.log_text().splitlines()
            if (match := _SUPPLIED.search(line))
        ]
        return [json.loads(facts) for _, facts in sorted(found)]

    def pids(self) -> list[int]:
        """All processes of the server: those in its process group."""
        return process_group(self.pid)

    def process(self, title: str) -> int:
        """The pid of the server's process that vLLM calls ``title``.

        Args:
            title: ``EngineCore``, or ``Worker``, ``Worker_TP1``, ...

        Raises:
            KeyError: There is none.
        """
        for pid in self.pids():
            with contextlib.suppress(OSError):
                command_line = Path(f"/proc/{pid}/cmdline").read_bytes()
                if command_line.rstrip(b"\0 ").decode() == f"VLLM::{title}":
                    return pid
        raise KeyError(f"engine {self.name} has no process VLLM::{title}")

    def _http(
        self, path: str, body: object = None, timeout: float = _REQUEST_SECONDS
    ) -> str:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        # No proxy: the server is on this machine whatever the environment says.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=timeout) as response:
            return str(response.read().decode())


@dataclass(frozen=True)
class Handover:
    """One prompt that was prefilled in one engine and decoded in another.

    Attributes:
        prompt: The prompt.
        text: What the decode engine wrote.
        prompt_tokens: Length of the prompt.
        blocks: Blocks that the prefill engine offered.
        bytes_transferred: What NIXL says the decode engine read, all ranks.
    """

    prompt: str
    text: str
    prompt_tokens: int
    blocks: int
    bytes_transferred: int


def nixl(role: str, device: str = "cpu") -> dict[str, Any]:
    """``--kv-transfer-config`` of a NIXL engine.

    Args:
        role: As vLLM calls it.
        device: Where the engine's KV cache is, ``cpu`` or ``cuda``; NIXL moves it
            from there, not by way of a buffer.
    """
    return {
        "kv_connector": "NixlConnector",
        "kv_role": role,
        "kv_buffer_device": device,
    }


class PrefillDecodePair:
    """A prefill and a decode engine that share KV caches over NIXL."""

    def __init__(
        self,
        name: str,
        spec: EngineSpec,
        log_dir: Path,
        progress: Callable[[str], None] = lambda line: None,
        decode_spec: EngineSpec | None = None,
    ) -> None:
        """Start both and wait until they are healthy.

        They start at the same time, except on one GPU: two engines that measure
        its memory must not see each other grow.

        Args:
            name: Prefix of the engines' names.
            spec: What both run; its ``kv_transfer`` is replaced. Of two ``gpus`` the
                first is for prefill and the second for decode.
            log_dir: Folder for the logs.
            progress: Told how starting goes.
            decode_spec: What the decode engine runs, if not the same.

        Raises:
            EngineError: One of them did not start; neither is left running.
            ValueError: ``spec`` names more than two GPUs.
        """
        if len(spec.gpus) > 2:
            raise ValueError(f"a pair runs on one or two GPUs, not on {spec.gpus}")
        self.name = name
        self._log_dir = log_dir
        self._starts = 1
        device = "cuda" if spec.gpus else "cpu"
        with contextlib.ExitStack() as stack:

            def start(
                part: str, role: str, own: EngineSpec, gpus: tuple[str, ...]
            ) -> Engine:
                own = dataclasses.replace(
                    own, kv_transfer=nixl(role, device), gpus=gpus
                )
                return stack.enter_context(Engine(f"{name}-{part}", own, log_dir))

            self.prefill = start("prefill", "kv_producer", spec, spec.gpus[:1])
            if len(spec.gpus) == 1:
                self.prefill.wait_healthy(progress)
            self.decode = start(
                "decode", "kv_consumer", decode_spec or spec, spec.gpus[-1:]
            )
            self.prefill.wait_healthy(progress)
            self.decode.wait_healthy(progress)
            self._stack = stack.pop_all()

    def replace_prefill(self) -> None:
        """Start another prefill engine in the place of one that has died.

        Raises:
            EngineError: It did not start.
        """
        self.prefill = self._replacement(self.prefill, "prefill")

    def replace_decode(self) -> None:
        """Start another decode engine in the place of one that has died.

        Raises:
            EngineError: It did not start.
        """
        self.decode = self._replacement(self.decode, "decode")

    def _replacement(self, dead: Engine, part: str) -> Engine:
        dead.stop()
        self._starts += 1
        engine = Engine(f"{self.name}-{part}-{self._starts}", dead.spec, self._log_dir)
        self._stack.enter_context(engine)
        engine.wait_healthy()
        return engine

    def __enter__(self) -> PrefillDecodePair:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End both engines. Harmless when repeated."""
        self._stack.close()

    def run(self, prompt: str, max_tokens: int) -> Handover:
        """Prefill ``prompt`` in one engine, continue it in the other.

        Raises:
            EngineError: A server refused, or no transfer was reported.
        """
        offered = self.prefill.complete(
            prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True}
        )
        params = offered.kv_transfer_params
        if not params or not params.get("remote_block_ids"):
            raise EngineError(
                f"engine {self.prefill.name} offered no blocks: {params!r}"
            )
        before = self._transferred()
        answer = self.decode.complete(prompt, max_tokens, kv_transfer_params=params)
        after = self._transferred()
        # The worker's numbers reach /metrics with a later step's output.
        deadline = time.monotonic() + 5
        expected = before[0] + self.decode.spec.tensor_parallel
        while after[0] < expected and time.monotonic() < deadline:
            time.sleep(0.05)
            after = self._transferred()
        return Handover(
            prompt=prompt,
            text=answer.text,
            prompt_tokens=answer.prompt_tokens,
            blocks=sum(len(group) for group in params["remote_block_ids"]),
            bytes_transferred=after[1] - before[1],
        )

    def failed_transfers(self) -> int:
        """Failed NIXL transfers, handshakes and notifications on both sides."""
        return sum(
            int(engine.metric("vllm:nixl_num_failed_transfers_total"))
            for engine in (self.prefill, self.decode)
        )

    def _transferred(self) -> tuple[int, int]:
        """Transfers and bytes that the decode engine has read so far."""
        return (
            int(self.decode.metric("vllm:nixl_bytes_transferred_count")),
            int(self.decode.metric("vllm:nixl_bytes_transferred_sum")),
        )


_reserved: set[int] = set()


def free_ports(count: int) -> int:
    """Find ``count`` consecutive TCP ports that are free; return the first.

    They lie below the range the kernel gives to outgoing connections, so that none
    of those takes one between this call and the server's bind.

    Raises:
        OSError: None were found.
    """
    for _ in range(200):
        first = random.randrange(20000, 32000 - count)
        ports = range(first, first + count)
        if not _reserved.isdisjoint(ports):
            continue
        with contextlib.ExitStack() as stack:
            try:
                for port in ports:
                    bound = stack.enter_context(socket.socket())
                    bound.bind(("127.0.0.1", port))
            except OSError:
                continue
        _reserved.update(ports)
        return first
    raise OSError(f"no {count} consecutive free TCP ports between 20000 and 32000")


def make_polling_threads_yield(pids: Sequence[int]) -> None:
    """Give threads that poll without a pause the lowest priority.

    NIXL's progress thread does: its Python API asks for a delay of zero, which no
    option changes. Two engines on two cores would compute half of the time. To be
    called when ``pids`` have nothing to do.
    """
    before = dict(_thread_times(pids))
    time.sleep(1.0)
    for thread, (user, system) in _thread_times(pids):
        user, system = (
            now - then
            for now, then in zip(
                (user, system), before.get(thread, (0, 0)), strict=True
            )
        )
        # Ticks of 10 ms. Polling is made of system calls; computing is not.
        if system >= 4 and system > user:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, thread, 19)


def _thread_times(pids: Sequence[int]) -> Iterator[tuple[int, tuple[int, int]]]:
    """Thread id, and its user and system time in ticks, of every thread."""
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/task").iterdir():
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                yield int(entry.name), (int(fields[11]), int(fields[12]))


def process_group(group: int) -> list[int]:
    """The pids of a process group, zombies left out."""
    return sorted(
        pid
        for pid, state, found in _processes()
        if found == group and (state != "Z" or _has_threads(pid))
    )


def _has_threads(zombie: int) -> bool:
    """Whether other threads of a process whose first one has ended still run.

    They hold its memory and its files until they too are gone.
    """
    with contextlib.suppress(OSError):
        return len(list(Path(f"/proc/{zombie}/task").iterdir())) > 1
    return False


def _processes() -> Iterator[tuple[int, str, int]]:
    """Pid, state and process group of every process."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # The name, in parentheses, may hold spaces and parentheses.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                yield int(entry.name), fields[0], int(fields[2])


def _supervise(command: Sequence[str]) -> int:
    """Run ``command`` in a group of its own until it ends or stdin closes.

    Prints the group's id on stdout, then ends the whole group in either case.
    Returns the command's exit status, shell style (128 + signal).
    """
    # A shell starts its background jobs deaf to SIGINT, which the server would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        # The caller's stderr is the log; stdout only carries the id below.
        stdout=sys.stderr.fileno(),
        process_group=0,
    )
    print(server.pid, flush=True)

    def stop_when_orphaned() -> None:
        while os.read(0, 4096):
            pass
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGINT)
        time.sleep(_STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)

    threading.Thread(target=stop_when_orphaned, daemon=True).start()
    # Seen, but not reaped: until it is, no other group can get the number.
    os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
    deadline = time.monotonic() + _STOP_SECONDS / 3
    while (left := process_group(server.pid)) and time.monotonic() < deadline:
        select.select([], [], [], 0.1)
    if left:
        print(f"ended {left}, which outlived their server", file=sys.stderr)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    status = server.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(_supervise(sys.argv[1:]))
