"""The doubles' scenario on a real engine: what they are checked for holds there too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from scenario import COUNTS, Facts, check_registrable

from engines import EngineSpec, free_ports

pytestmark = pytest.mark.e2e

PROGRAM = Path(__file__).with_name("real_engine_program.py")


@pytest.mark.parametrize("blocks", COUNTS)
def test_real_engine_gets_every_measured_block_in_one_chunk_each(
    blocks: int, tmp_path: Path
) -> None:
    environment = EngineSpec(tmp_path, plugins=("kvpad",)).environment(free_ports(1))
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path), str(blocks)],
        env={**environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=480,
        cwd=tmp_path,
    )
    lines = done.stdout.splitlines()
    reported = [line for line in lines if line.startswith("FACTS")]
    assert reported, "\n".join(lines[-60:])
    facts = Facts(**json.loads(reported[0].removeprefix("FACTS")))
    check_registrable(facts, blocks)
