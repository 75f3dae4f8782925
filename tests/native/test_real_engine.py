"""The doubles' scenario on a real engine: what they are checked for holds there too."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import run_program
from scenario import COUNTS, Facts, check_registrable

from engines import EngineSpec

pytestmark = pytest.mark.e2e

PROGRAM = Path(__file__).with_name("real_engine_program.py")


@pytest.mark.parametrize("blocks", COUNTS)
def test_real_engine_gets_every_measured_block_in_one_chunk_each(
    blocks: int, tmp_path: Path
) -> None:
    reported, _ = run_program(
        PROGRAM,
        str(tmp_path),
        str(blocks),
        spec=EngineSpec(tmp_path, plugins=("kvpad",)),
        folder=tmp_path,
    )
    facts = Facts(**reported)
    check_registrable(facts, blocks)
