"""Where the commands' answer cannot be written."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("typer")

from cli_programs import CONFIGS

PLAN = f"plan {CONFIGS / 'SmolLM2-360M.json'} --memory 1GiB"


@pytest.mark.parametrize("command", ["doctor", PLAN, f"{PLAN} --json"])
@pytest.mark.parametrize(
    ("where", "words"), [(">&-", "stdout is closed"), (">/dev/full", "No space left")]
)
def test_stdout_that_cannot_be_written_is_one_line(
    command: str, where: str, words: str
) -> None:
    done = subprocess.run(
        f"{sys.executable} -m vllm_kvpad.cli {command} {where}",
        shell=True,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2, done
    (line,) = done.stderr.splitlines()
    assert words in line
