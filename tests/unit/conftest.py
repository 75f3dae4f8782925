"""How the unit tests run, whatever they test."""

from __future__ import annotations

import importlib.util


def pytest_configure() -> None:
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    # Their tensors are small: waking a second thread takes longer than the work, and
    # on a busy machine a hundred times as long.
    torch.set_num_threads(1)
