"""The Mooncake example, run as a reader would, and what it would not accept."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from mooncake_segments import LAYERS, SegmentFacts, report

pytestmark = pytest.mark.e2e

EXAMPLE = Path(__file__).parents[2] / "examples" / "mooncake_segments.py"


@pytest.mark.usefixtures("mooncake_installed")
def test_every_segment_is_registered_sent_and_verified(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        capture_output=True,
        text=True,
        timeout=400,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *segments, total = done.stdout.splitlines()
    assert len(segments) == LAYERS
    # 331 blocks of 20 KiB in each of 8 layers.
    assert all(line.startswith("6,778,880 bytes from 0x") for line in segments)
    assert total.endswith("54,231,040 bytes over TCP")


EMPTY = [SegmentFacts(0x200000 * i, 4096, True, "zeros") for i in range(LAYERS)]
SENT = [dataclasses.replace(each, digest="sent") for each in EMPTY]


def test_segments_that_arrived_in_one_chunk_are_good() -> None:
    assert report(EMPTY, SENT, SENT) == 0


@pytest.mark.parametrize("change", [{"digest": "other"}, {"one_chunk": False}])
def test_one_segment_that_differs_or_spans_chunks_fails(
    change: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    arrived = [*SENT[:-1], dataclasses.replace(SENT[-1], **change)]
    assert report(EMPTY, SENT, arrived) == 1
    assert f"7 of {LAYERS} segments" in capsys.readouterr().out


def test_sending_what_was_there_already_proves_nothing() -> None:
    assert report(EMPTY, EMPTY, EMPTY) == 1
