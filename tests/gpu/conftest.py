"""Fixtures of the GPU tests, and the figures they print when they are done.

One command on a machine with a GPU, vLLM 0.33 for CUDA and this package installed:

    pytest -m gpu tests/gpu

Figures go to the terminal, and as lines of JSON to ``$KVPAD_RESULTS/figures.jsonl``
where that is set.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

_figures: dict[str, dict[str, Any]] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    reason = _why_no_gpu()
    for item in items:
        if here not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_no_gpu() -> str | None:
    """Looks without initialising CUDA: the tests fork."""
    if not Path("/dev/nvidiactl").exists():
        return "no NVIDIA GPU on this machine"
    return None


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not _figures:
        return
    terminalreporter.section("figures")
    for test, figures in _figures.items():
        terminalreporter.write_line(test)
        for name, value in figures.items():
            terminalreporter.write_line(f"    {name}: {value}")


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Note named figures of a test for the table printed at the end."""

    def note(**figures: Any) -> None:
        _figures.setdefault(request.node.name, {}).update(figures)
        if folder := os.environ.get("KVPAD_RESULTS"):
            # As it comes: what was measured survives a run that is cut short.
            with Path(folder, "figures.jsonl").open("a") as lines:
                line = {"test": request.node.name, **figures}
                lines.write(json.dumps(line, default=str) + "\n")

    return note


@pytest.fixture
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Path]:
    """Path for the log of a named engine; kept under ``$KVPAD_RESULTS`` if set."""
    folder = Path(os.environ.get("KVPAD_LOGS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)

    def path(name: str) -> Path:
        return folder / f"{request.node.name.replace('/', '_')}-{name}.log"

    return path


@pytest.fixture(scope="session")
def model_135m() -> str:
    """SmolLM2-135M-Instruct with its real weights."""
    from checkpoint import ensure_checkpoint

    return str(ensure_checkpoint())


@pytest.fixture(scope="session")
def model_360m(tmp_path_factory: pytest.TempPathFactory) -> str:
    """SmolLM2-360M's geometry, without weights."""
    from jobs import write_geometry

    return str(write_geometry(tmp_path_factory.mktemp("geometry-360m")))
