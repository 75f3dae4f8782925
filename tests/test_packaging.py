"""What ``pip install`` gives: the wheel, its entry point, and cheap imports."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import tomllib
import zipfile
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def wheel(project_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the checkout, without a network."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.cfg", "README.md", "LICENSE"):
        shutil.copy(project_root / name, source)
    for name in ("vllm_kvpad", "tests", "examples"):
        shutil.copytree(
            project_root / name,
            source / name,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    target = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    subprocess.run(
        [*pip, "--no-build-isolation", "--no-index", "--wheel-dir", target, source],
        check=True,
    )
    (built,) = target.glob("*.whl")
    return built


def test_the_wheel_holds_the_package_and_nothing_else(
    wheel: Path, project_root: Path
) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {
        str(path.relative_to(project_root))
        for path in (project_root / "vllm_kvpad").rglob("*.py")
    }
    assert modules <= names
    assert "vllm_kvpad/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"vllm_kvpad"}


def test_the_wheel_installs_and_vllm_finds_the_plugin(
    wheel: Path, project_root: Path, tmp_path: Path
) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--no-index", "--target", tmp_path, wheel], check=True)
    version = tomllib.loads((project_root / "pyproject.toml").read_text())["project"][
        "version"
    ]
    program = f"""
        import importlib.metadata as metadata
        import vllm_kvpad
        assert vllm_kvpad.__file__.startswith({str(tmp_path)!r}), vllm_kvpad.__file__
        assert vllm_kvpad.__version__ == metadata.version("vllm-kvpad") == {version!r}
        (plugin,) = [
            entry for entry in metadata.distribution("vllm-kvpad").entry_points
            if entry.group == "vllm.general_plugins" and entry.name == "kvpad"
        ]
        assert callable(plugin.load())
        (command,) = [
            entry for entry in metadata.distribution("vllm-kvpad").entry_points
            if entry.group == "console_scripts"
        ]
        assert command.name == "vllm-kvpad"
        assert callable(command.load())
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        check=True,
    )


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("vllm_kvpad", ["vllm", "torch", "typer", "rich"]),
        ("vllm_kvpad.placement", ["vllm", "torch"]),
        ("vllm_kvpad.capabilities", ["vllm", "torch"]),
        ("vllm_kvpad.config", ["vllm", "torch"]),
        ("vllm_kvpad.patching", ["vllm", "torch"]),
        ("vllm_kvpad.plugin", ["vllm", "torch", "typer", "rich"]),
        ("vllm_kvpad.cli", ["vllm", "torch", "matplotlib"]),
        ("vllm_kvpad.vmm", ["vllm"]),
        ("vllm_kvpad.reservation", ["vllm"]),
        ("vllm_kvpad.kv_cache", ["vllm"]),
    ],
)
def test_importing_stays_cheap_and_works_beside_a_broken_vllm(
    module: str, forbidden: list[str]
) -> None:
    program = f"""
        import sys
        # An import of any of these would raise.
        sys.modules.update(dict.fromkeys({forbidden!r}))
        import {module}
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)
