"""Runs ``vllm-kvpad`` in a process of its own, with packages missing or broken."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

CONFIGS = Path(__file__).parent.parent / "configs"


def run(
    *arguments: str | Path,
    without: Iterable[str] = (),
    path: Path | None = None,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run the command as the console script does.

    Args:
        arguments: Of the command line.
        without: Modules that are as good as not installed there.
        path: A folder whose packages come before the installed ones.
        environment: Variables to set.
    """
    program = (
        "import sys\n"
        # What find_spec and import both take for a module that is not there.
        f"sys.modules.update(dict.fromkeys({list(without)!r}))\n"
        "from vllm_kvpad.cli import main\n"
        "main()\n"
    )
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("VLLM_", "UCX_", "PYTORCH_")) and name != "COLUMNS"
    }
    paths = [str(path)] if path is not None else []
    paths += [inherited["PYTHONPATH"]] if "PYTHONPATH" in inherited else []
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**inherited, "PYTHONPATH": os.pathsep.join(paths), **environment},
        check=False,
    )


def assert_one_line_of_error(
    done: subprocess.CompletedProcess[str], *words: str
) -> None:
    """Status 2, nothing on stdout, and one line on stderr that has ``words``."""
    assert done.returncode == 2, done
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    for word in words:
        assert word in line


def assert_fits_a_screen(text: str) -> None:
    """80 columns, and no terminal codes."""
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80
