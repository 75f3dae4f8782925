"""Run a program that starts an engine in its own process and prints what it saw."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from engines import EngineSpec, free_ports

_MARK = "FACTS"


def run_program(
    program: Path, *arguments: str, spec: EngineSpec, folder: Path
) -> tuple[Any, str]:
    """Return what ``program`` printed as one line of JSON after ``FACTS``, and its log.

    Args:
        program: Starts an engine without further processes.
        arguments: For the program.
        spec: Whose environment it gets.
        folder: Where it runs.
    """
    done = subprocess.run(
        [sys.executable, str(program), *arguments],
        env={
            **spec.environment(free_ports(1)),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=480,
        cwd=folder,
    )
    lines = done.stdout.splitlines()
    facts = [line for line in lines if line.startswith(_MARK)]
    assert facts, "\n".join(lines[-60:])
    return json.loads(facts[0].removeprefix(_MARK)), done.stdout
