"""A vLLM plugin that puts a method of its own, with its own arguments, in a worker."""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Entry point."""
    from vllm.v1.worker.gpu_worker import Worker

    original = Worker.determine_available_memory

    def determine_available_memory(self: Any, fraction: float = 1.0) -> int:
        return int(original(self) * fraction)

    Worker.determine_available_memory = determine_available_memory
