"""What the README's table promises for a vLLM is what is done to it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

import vllm

from vllm_kvpad.hosts import hosts, select_host

pytestmark = pytest.mark.contract


def promised_hosts(project_root: Path) -> dict[str, str]:
    """First cell of each row of the table "Which vLLM" -> the host's name."""
    section = (project_root / "README.md").read_text().split("## Which vLLM\n")[1]
    table = section.strip().split("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table]
    header, _, *body = rows
    assert header[:2] == ["vLLM", "host"]
    return {row[0]: row[1].strip("`") for row in body}


def test_installed_vllm_gets_the_host_of_its_row(project_root: Path) -> None:
    promised = [
        host
        for versions, host in promised_hosts(project_root).items()
        if vllm.__version__.partition("+")[0] in versions.split(", ")
    ]
    assert promised == [select_host().name]


def test_each_host_has_one_row(project_root: Path) -> None:
    rows = list(promised_hosts(project_root).values())
    assert sorted(rows) == sorted([*(host.name for host in hosts()), "none"])
