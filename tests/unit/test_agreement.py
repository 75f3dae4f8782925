"""Ranks that find out different things start up the same way: real process groups."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

RANK = """
import json, sys, time
import torch.distributed as dist
from vllm_kvpad.hosts import agreement

rank, size, store, words = json.loads(sys.argv[1])
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
said = words[rank]
if said != "absent":
    agreement.announce(said or None)
    print(json.dumps([*agreement.verdict(patience=1.0), agreement.global_rank()]))
dist.barrier()
dist.destroy_process_group()
"""


def verdicts(folder: Path, words: list[str]) -> dict[int, list[object]]:
    """Objections and speaker as each rank that is not absent got them."""
    store = f"file://{folder / 'store'}"
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                RANK,
                json.dumps([rank, len(words), store, words]),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(len(words))
    ]
    found: dict[int, list[object]] = {}
    for process in ranks:
        out, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        for line in out.splitlines():
            *verdict, rank = json.loads(line)
            found[rank] = verdict
    return found


@pytest.mark.parametrize(
    ("words", "objections", "speaker"),
    [
        (["", ""], [], 0),
        (
            ["absent", "", "no driver"],
            ["rank 0: kvpad is not loaded, or switched off", "rank 2: no driver"],
            1,
        ),
    ],
)
def test_every_rank_gets_the_same_verdict(
    tmp_path: Path, words: list[str], objections: list[str], speaker: int
) -> None:
    found = verdicts(tmp_path, words)
    present = [rank for rank, word in enumerate(words) if word != "absent"]
    assert found == {rank: [objections, speaker] for rank in present}


def test_a_rank_that_speaks_up_late_finds_what_was_decided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch.distributed as dist

    from vllm_kvpad.hosts import agreement

    store = dist.HashStore()
    monkeypatch.setattr(agreement, "_is_alone", lambda: False)
    monkeypatch.setattr(agreement, "_store", lambda: store)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)

    def as_rank(rank: int) -> None:
        monkeypatch.setattr(dist, "get_rank", lambda: rank)

    as_rank(0)
    agreement.announce(None)
    early = agreement.verdict(patience=0.1)
    assert early.objections == ["rank 1: kvpad is not loaded, or switched off"]
    as_rank(1)
    agreement.announce(None)
    assert agreement.verdict(patience=0.1) == early


def test_one_rank_alone_asks_nobody() -> None:
    from vllm_kvpad.hosts import agreement

    agreement.announce("whatever")
    assert agreement.verdict() == ([], 0)
    assert agreement.global_rank() == 0
