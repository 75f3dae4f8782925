"""Engines with another plugin that patches the same worker methods.

vLLM loads plugins in the order in which their distributions are found on ``sys.path``,
so each of the two is put first in turn.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from fleet import MAX_TOKENS, Fleet

from engines import Engine
from prompts import prompts

pytestmark = [pytest.mark.e2e, pytest.mark.extended]

BATCHES = [
    ["stock", "wrapper-first", "wrapper-last"],
    ["replacer-first", "replacer-last"],
]


@dataclass(frozen=True)
class Run:
    """What an engine did with some prompts, and what there was to see of it."""

    texts: list[str]
    num_blocks: int
    supplied: int
    warnings: list[str]
    notes: list[str]


@pytest.fixture(scope="module")
def kvpad_first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which kvpad's distribution is found, its modules elsewhere."""
    distribution = importlib.metadata.distribution("vllm-kvpad")
    folder = tmp_path_factory.mktemp("kvpad-first")
    info = folder / f"vllm_kvpad-{distribution.version}.dist-info"
    info.mkdir()
    for name in ("METADATA", "entry_points.txt"):
        text = distribution.read_text(name)
        if text is None:  # an editable checkout calls it otherwise
            text = distribution.read_text("PKG-INFO")
        assert text is not None
        (info / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def runs(
    fleet: Fleet,
    site_packages: Callable[[str], Path],
    kvpad_first: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Run]:
    notes = tmp_path_factory.mktemp("notes")
    stock = fleet.spec("stock")
    specs = {"stock": stock}
    for plugin in ("wrapper", "replacer"):
        for place in ("first", "last"):
            folders = [str(site_packages(f"acme-{plugin}"))]
            if place == "last":
                folders.insert(0, str(kvpad_first))
            name = f"{plugin}-{place}"
            specs[name] = dataclasses.replace(
                stock,
                plugins=(f"acme-{plugin}", "kvpad"),
                env={
                    "PYTHONPATH": os.pathsep.join(
                        [*folders, os.environ.get("PYTHONPATH", "")]
                    ),
                    "ACME_CALLS": str(notes / name),
                },
            )
    done = {}
    for batch in BATCHES:
        with fleet.engines({name: specs[name] for name in batch}) as engines:
            for name, engine in engines.items():
                engine.wait_healthy()
                done[name] = use(engine, notes / name)
    return done


def use(engine: Engine, notes: Path) -> Run:
    texts = [engine.complete(prompt, MAX_TOKENS).text for prompt in prompts()[:4]]
    return Run(
        texts=texts,
        num_blocks=engine.num_blocks(),
        supplied=len(engine.supplied()),
        warnings=[
            line
            for line in engine.log_text().splitlines()
            if "WARNING" in line and "kvpad steps aside" in line
        ],
        notes=notes.read_text().splitlines() if notes.exists() else [],
    )


@pytest.mark.parametrize("name", [name for batch in BATCHES for name in batch[-2:]])
def test_the_words_are_those_of_stock(runs: dict[str, Run], name: str) -> None:
    assert runs[name].texts == runs["stock"].texts
    assert runs[name].num_blocks == runs["stock"].num_blocks


@pytest.mark.parametrize("place", ["first", "last"])
def test_a_transparent_wrapper_and_kvpad_work_together(
    runs: dict[str, Run], place: str
) -> None:
    run = runs[f"wrapper-{place}"]
    assert run.supplied == 1
    assert run.warnings == []
    # It really came first, or last, and its wrappers really were called.
    kvpad_was_there = "wrap __init__ of vllm_kvpad.plugin" in run.notes
    assert kvpad_was_there == (place == "last")
    # (The CPU worker has a determine_available_memory of its own.)
    assert {"__init__", "initialize_from_config"} <= set(run.notes)


@pytest.mark.parametrize("place", ["first", "last"])
def test_kvpad_steps_aside_for_a_replacement_and_names_it(
    runs: dict[str, Run], place: str
) -> None:
    run = runs[f"replacer-{place}"]
    assert run.supplied == 0
    (line,) = run.warnings
    assert "Worker.determine_available_memory: takes (self, fraction)" in line
    assert "it was replaced by acme_replacer" in line
