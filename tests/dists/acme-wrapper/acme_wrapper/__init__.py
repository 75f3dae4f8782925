"""A vLLM plugin that notes calls of worker methods, by wrappers as they should be."""

from __future__ import annotations

import functools
import os
from typing import Any

METHODS = (
    "determine_available_memory",
    "initialize_from_config",
    "compile_or_warm_up_model",
    "shutdown",
)

notes: list[str] = []


def register() -> None:
    """Entry point; vLLM calls it once a process, other plugins may call it again."""
    from vllm.v1.worker.gpu_worker import Worker
    from vllm.v1.worker.worker_base import WorkerBase

    wrap(WorkerBase, "__init__")
    for name in METHODS:
        wrap(Worker, name)


def wrap(owner: type, name: str) -> None:
    original = getattr(owner, name)
    note(f"wrap {name} of {original.__globals__['__name__']}")

    @functools.wraps(original)
    def noting(*args: Any, **kwargs: Any) -> Any:
        note(name)
        return original(*args, **kwargs)

    setattr(owner, name, noting)


def note(line: str) -> None:
    """Remember ``line``, and write it to the file ``$ACME_CALLS`` if there is one."""
    notes.append(line)
    if path := os.environ.get("ACME_CALLS"):
        with open(path, "a") as file:
            print(line, file=file)
