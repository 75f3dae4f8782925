"""The GPU reproducer's arithmetic and verdict. The GPU itself: ``tests/gpu``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

offload_tiny = pytest.importorskip("offload_tiny")  # needs rich

from engines import EngineError, EngineSpec  # noqa: E402
from offload_tiny import Outcome, last_error, utilisation_for, verdict  # noqa: E402

MIB = 1 << 20
TOTAL = 80 << 30
FACTS: dict[str, Any] = {
    "segments": 30,
    "granule_bytes": 2 * MIB,
    "bytes_per_block": 737_280,
    "blocks": 102,
    "rounded_blocks": 0,
    "size_from": "measurement after warm-up",
    "measured": {
        "budget_bytes": TOTAL // 10,
        "resident_bytes": 600 * MIB,
        "activation_peak_bytes": 200 * MIB,
    },
}
GOOD = Outcome(None, 102, [" Paris"], FACTS)
DEAD = Outcome("ValueError: No available memory for the cache blocks", 0, [], {})


def test_the_utilisation_leaves_the_blocks_and_half_a_granule_for_each_segment() -> (
    None
):
    budget = utilisation_for(102, FACTS, 0.1) * TOTAL
    assert budget == pytest.approx(800 * MIB + 102 * 737_280 + 30 * MIB)


def test_without_a_measurement_there_is_no_utilisation() -> None:
    facts = {"size_from": "what was given"}
    with pytest.raises(ValueError, match="what was given"):
        utilisation_for(102, facts, 0.1)


@pytest.mark.parametrize(
    ("stock", "kvpad", "status"),
    [
        pytest.param(GOOD, GOOD, 0, id="both start"),
        pytest.param(DEAD, GOOD, 0, id="stock does not"),
        pytest.param(GOOD, DEAD, 1, id="kvpad does not"),
        pytest.param(replace(GOOD, texts=[" Rome"]), GOOD, 1, id="texts"),
        pytest.param(GOOD, replace(GOOD, blocks=101), 1, id="scheduler's count"),
        pytest.param(
            GOOD,
            replace(
                GOOD,
                blocks=256,
                facts={**FACTS, "blocks": 256, "rounded_blocks": 256},
            ),
            1,
            id="rounding would have left all",
        ),
    ],
)
def test_verdict(stock: Outcome, kvpad: Outcome, status: int) -> None:
    assert verdict(stock, kvpad) == status


def test_the_last_error_of_a_log_is_the_reason() -> None:
    log = """
(EngineCore pid=1) ERROR 11-30 [core.py:1] ValueError: No memory for the cache blocks.
(EngineCore pid=1) INFO 11-30 [core.py:2] bye
"""
    assert last_error(log) == "ValueError: No memory for the cache blocks."
    assert last_error("nothing") == "no error in its log"


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Outcome]:
    """What each engine will do; a test changes it before it runs the reproducer."""
    made = {"wide": GOOD, "stock": DEAD, "kvpad": GOOD}

    def start(name: str, spec: EngineSpec, logs: Path, show: Any) -> Outcome:
        assert spec.gpus == ("3",)
        assert spec.plugins == (() if name == "stock" else ("kvpad",))
        assert "--kv-offloading-size" in spec.command(1)
        tiny = utilisation_for(102, FACTS, 0.1)
        wide = offload_tiny.WIDE_UTILISATION
        assert spec.gpu_memory_utilization == (wide if name == "wide" else tiny)
        return made[name]

    monkeypatch.setattr(offload_tiny, "start", start)
    monkeypatch.setattr(
        offload_tiny, "ensure_checkpoint", lambda progress: Path("model")
    )
    monkeypatch.setattr(offload_tiny.signal, "signal", lambda *_: None)
    return made


@pytest.mark.usefixtures("outcomes")
def test_both_outcomes_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert offload_tiny.main(["--gpu", "3"]) == 0
    printed = capsys.readouterr().out
    for shown in ("102", "No available memory", "rounding would leave"):
        assert shown in " ".join(printed.split())


def test_a_first_engine_that_does_not_start_is_another_status(
    outcomes: dict[str, Outcome], capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes["wide"] = replace(DEAD, error="EngineError: no CUDA device")
    assert offload_tiny.main(["--gpu", "3"]) == 2
    assert str(EngineError("no CUDA device")) in capsys.readouterr().out
