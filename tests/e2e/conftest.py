"""Fixture and report for the tests that start engines."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fleet import Fleet


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """All engines of a module; none is left running after it.

    Idle workers of a tensor-parallel engine take whole processors.
    """
    configured = os.environ.get("KVPAD_LOG_DIR")
    log_dir = (
        Path(configured).absolute()
        if configured
        else tmp_path_factory.mktemp("engines")
    )
    fleet = Fleet(log_dir)
    yield fleet
    fleet.stop()


@pytest.fixture(scope="session")
def mooncake_installed() -> None:
    """Mooncake's transfer engine is installed; where CI says so, it must be."""
    if importlib.util.find_spec("mooncake") is None:
        missing = "not installed: mooncake-transfer-engine-non-cuda"
        if os.environ.get("KVPAD_REQUIRE_ENGINES") == "1":
            pytest.fail(missing)
        pytest.skip(missing)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    fleet = getattr(item, "funcargs", {}).get("fleet")
    if fleet is not None:
        if report.failed:
            for engine, path in fleet.used.items():
                if path.exists():
                    tail = path.read_text(errors="replace").splitlines()[-60:]
                    report.sections.append(
                        (f"end of {engine}'s log {path}", "\n".join(tail))
                    )
        if report.when == "teardown":
            fleet.used.clear()
    return report
