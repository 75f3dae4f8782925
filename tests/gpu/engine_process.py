"""Run a function beside an in-process vLLM engine, in a process of its own.

Every engine of the GPU tests is forked from a server process that has imported vLLM
and done nothing else. The twenty seconds that importing takes are spent once. (Forking
from the test process itself hangs: once it has computed anything with PyTorch, its
OpenMP threads are missing in the child.)
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_PRELOADED = (
    "vllm",
    "vllm.engine.arg_utils",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.model_executor.models.llama",
    "transformers",
)

_BASE_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


class EngineProcessError(AssertionError):
    """The child failed; the message carries its traceback and the end of its log."""


class EngineProcess:
    """A forked child that runs ``function(conversation, **arguments)``.

    Args:
        function: Called in the child. It may talk to the parent by
            ``conversation.send`` and ``conversation.recv``; what it returns is the
            result.
        plugin: Whether kvpad is switched on.
        log: File that takes the child's output.
        environment: Further variables for the child.
        arguments: For ``function``.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        plugin: bool,
        log: Path,
        environment: dict[str, str] | None = None,
        **arguments: Any,
    ) -> None:
        _CONTEXT.set_forkserver_preload([*_PRELOADED, "jobs"])
        self._log = log
        self._name = function.__name__
        self.conversation, theirs = _CONTEXT.Pipe()
        variables = {
            **_BASE_ENVIRONMENT,
            "VLLM_PLUGINS": "kvpad" if plugin else "",
            **(environment or {}),
        }
        self._process = _CONTEXT.Process(
            target=_child, args=(theirs, log, variables, function, arguments)
        )
        self._process.start()
        theirs.close()

    def receive(self, timeout: float = 240) -> Any:
        """Return the next object the child sends.

        Raises:
            EngineProcessError: The child raised, died or was silent for ``timeout``
                seconds; it is gone then.
        """
        try:
            if not self.conversation.poll(timeout):
                raise EngineProcessError(
                    f"{self._name}: nothing for {timeout} s\n{self._log_tail()}"
                )
            kind, value = self.conversation.recv()
        except EOFError:
            self.stop()
            raise EngineProcessError(
                f"{self._name}: died, exit code {self._process.exitcode}\n"
                + self._log_tail()
            ) from None
        except EngineProcessError:
            self.stop()
            raise
        if kind == "error":
            self.stop()
            raise EngineProcessError(f"{self._name}: {value}\n{self._log_tail()}")
        return value

    def send(self, value: Any) -> None:
        self.conversation.send(value)

    def result(self, timeout: float = 240) -> Any:
        """Return what the function returned, once the child is gone."""
        value = self.receive(timeout)
        self._process.join(60)
        self.stop()
        return value

    def stop(self) -> None:
        """End the child if it still runs; never leaves one behind."""
        if self._process.is_alive() and self._process.pid is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.join()

    def _log_tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-60:])


def run(function: Callable[..., Any], *, timeout: float = 240, **options: Any) -> Any:
    """Run ``function`` in an :class:`EngineProcess` and return its result."""
    return EngineProcess(function, **options).result(timeout)


class Conversation:
    """The child's end of the pipe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, value: Any) -> None:
        self._connection.send(("value", value))

    def recv(self) -> Any:
        return self._connection.recv()


def _child(
    connection: Connection,
    log: Path,
    variables: dict[str, str],
    function: Callable[..., Any],
    arguments: dict[str, Any],
) -> None:
    os.setpgid(0, 0)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(variables)
    started = time.perf_counter()
    try:
        value = function(Conversation(connection), **arguments)
        connection.send(("value", value))
    except BaseException:
        connection.send(("error", traceback.format_exc()))
    sys.stdout.flush()
    print(f"{function.__name__}: {time.perf_counter() - started:.1f} s", flush=True)
    # No interpreter shutdown: destructors of an engine that lives until then are
    # not what these tests are about, and some of vLLM's wait for other threads.
    os._exit(0)
