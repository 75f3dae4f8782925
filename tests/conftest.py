"""What all tests share: which machine they need, and a clean environment."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

DISTS = Path(__file__).parent / "dists"
REQUIRE_ENGINES = "KVPAD_REQUIRE_ENGINES"
"""Set to 1 where vLLM and NIXL must be there: a missing one is then an error."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--extended",
        action="store_true",
        help="also run the tests marked extended: more engines, in rarer conditions",
    )


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    # What takes minutes comes after what takes seconds.
    items.sort(key=lambda item: item.get_closest_marker("e2e") is not None)
    if not config.getoption("extended"):
        skip_extended = pytest.mark.skip(reason="extended; needs --extended")
        for item in items:
            if item.get_closest_marker("extended"):
                item.add_marker(skip_extended)
    missing = [
        package
        for package in ("vllm", "nixl", "torch")
        if importlib.util.find_spec(package) is None
    ]
    if not missing or os.environ.get(REQUIRE_ENGINES) == "1":
        return
    skip = pytest.mark.skip(reason=f"not installed: {', '.join(missing)}")
    for item in items:
        if item.get_closest_marker("e2e"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def project_root() -> Path:
    """The checkout."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def site_packages(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Installs a distribution of ``tests/dists`` with pip, once, offline."""
    installed: dict[str, Path] = {}

    def install(name: str) -> Path:
        if name not in installed:
            # pip builds in the source folder; that is not ours to litter.
            source = tmp_path_factory.mktemp("source") / name
            for path in (DISTS / name).rglob("*"):
                if path.suffix in (".py", ".toml"):
                    copy = source / path.relative_to(DISTS / name)
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    copy.write_bytes(path.read_bytes())
            target = tmp_path_factory.mktemp("site-packages")
            subprocess.run(
                [
                    *(sys.executable, "-m", "pip", "install", "--quiet"),
                    *("--no-index", "--no-deps", "--no-build-isolation"),
                    *("--disable-pip-version-check", "--target", target, source),
                ],
                check=True,
                timeout=300,
            )
            installed[name] = target
        return installed[name]

    return install


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many faults were really injected, if any were."""
    faults = sys.modules.get("faults")
    if faults is None or not faults.INJECTED:
        return
    kinds = ", ".join(f"{name} {n}" for name, n in sorted(faults.INJECTED.items()))
    terminalreporter.section("driver faults")
    terminalreporter.write_line(f"{faults.INJECTED.total()} injected: {kinds}")
