"""vLLM's Mooncake connectors on a machine without an accelerator.

They move bytes between any memory, but ask torch for the accelerator's number and for
CUDA events, of which torch for CPUs has none. Here they get answers that mean "this
CPU"; what they register and copy, and how, is all theirs.

Each range that is registered is noted as :mod:`kvpad_probe` notes NIXL's.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (
    MooncakeConnector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.connector import (
    MooncakeStoreConnector,
)


class CpuMooncakeConnector(MooncakeConnector):
    """Declares nothing: what is known of its base answers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with cpu_for_accelerator():
            super().__init__(*args, **kwargs)
        if self.connector_worker is not None:
            self.connector_worker.engine = Noting(self.connector_worker.engine)


class CpuMooncakeStoreConnector(MooncakeStoreConnector):
    """Declares nothing: what is known of its base answers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with cpu_for_accelerator():
            super().__init__(*args, **kwargs)
        if self.connector_worker is not None:
            self.connector_worker.store = Noting(self.connector_worker.store)

    def wait_for_save(self) -> None:
        with cpu_for_accelerator():
            super().wait_for_save()


class Event:
    """A CUDA event of a device whose work is done when its call returns."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


@contextlib.contextmanager
def cpu_for_accelerator() -> Iterator[None]:
    with (
        mock.patch.object(torch.accelerator, "current_device_index", return_value=0),
        mock.patch.object(torch.cuda, "Event", Event),
    ):
        yield


class Noting:
    """Mooncake's engine or store, with a note of each registered range."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def batch_register_memory(self, addresses: list[int], lengths: list[int]) -> Any:
        note(list(zip(addresses, lengths, strict=True)))
        return self._inner.batch_register_memory(addresses, lengths)

    def register_buffer(self, address: int, length: int) -> Any:
        note([(address, length)])
        return self._inner.register_buffer(address, length)


def note(ranges: list[tuple[int, int]]) -> None:
    folder = Path(os.environ["KVPAD_PROBE_DIR"])
    with (folder / f"registered-{os.getpid()}").open("a") as file:
        print(json.dumps(ranges), file=file)
