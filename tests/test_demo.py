"""The demo's verdict. That it works is seen by running it: ``tox run -e demo``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines import EngineError, EngineSpec, Handover

prefill_decode = pytest.importorskip("prefill_decode")  # needs rich

FACTS = {
    "layout": "LBHNC",
    "segments": 30,
    "granule_bytes": 2 << 20,
    "chunks": 30,
    "blocks": 1456,
    "committed_bytes": 1_073_479_680,
    "address_space_bytes": 1_132_462_080,
    "physical_bytes": 1_132_462_080,
    "padding_bytes": 58_982_400,
    "rounded_blocks": 1280,
}
GOOD = Handover("a [bold] prompt", " [red]text", 40, 2, 1_474_560)


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What each pair will have done; a test changes it before it runs the demo."""
    outcome: dict[str, Any] = {
        "stock": ([GOOD], 0, []),
        "kvpad": ([GOOD], 0, [FACTS]),
    }

    def run_pair(console: Any, name: str, spec: EngineSpec, logs: Path) -> Any:
        assert spec.plugins == (("kvpad",) if name == "kvpad" else ())
        if isinstance(outcome[name], Exception):
            raise outcome[name]
        return outcome[name]

    monkeypatch.setattr(prefill_decode, "run_pair", run_pair)
    monkeypatch.setattr(
        prefill_decode, "ensure_checkpoint", lambda progress: Path("model")
    )
    # main() makes SIGTERM an exception; not in the process that runs the tests.
    monkeypatch.setattr(prefill_decode.signal, "signal", lambda *_: None)
    return outcome


def test_equal_texts_and_no_failure_succeed(
    pairs: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prefill_decode.main(["--logs", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    # The model's brackets are text, not colours.
    assert "[bold]" in printed
    assert "[red]" in printed
    for shown in ("1,474,560", "same", "58,982,400", "1,456", "1,280"):
        assert shown in printed


@pytest.mark.parametrize(
    "kvpad",
    [
        pytest.param(([replace(GOOD, text=" other")], 0, [FACTS]), id="text"),
        pytest.param(([GOOD], 1, [FACTS]), id="failed transfer"),
        pytest.param(([GOOD], 0, []), id="kvpad stepped aside"),
    ],
)
def test_anything_else_fails(pairs: dict[str, Any], tmp_path: Path, kvpad: Any) -> None:
    pairs["kvpad"] = kvpad
    assert prefill_decode.main(["--logs", str(tmp_path)]) == 1


def test_both_pairs_run_on_the_gpus_that_are_named(
    pairs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []

    def run_pair(console: Any, name: str, spec: EngineSpec, logs: Path) -> Any:
        ran.append((name, spec.gpus, spec.gpu_memory_utilization))
        return pairs[name]

    monkeypatch.setattr(prefill_decode, "run_pair", run_pair)
    arguments = ["--gpus", "0,1", "--gpu-memory-utilization", "0.2"]
    assert prefill_decode.main([*arguments, "--logs", str(tmp_path)]) == 0
    assert ran == [("stock", ("0", "1"), 0.2), ("kvpad", ("0", "1"), 0.2)]


def test_three_gpus_are_a_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        prefill_decode.main(["--gpus", "0,1,2", "--logs", str(tmp_path)])
    assert "more than two" in capsys.readouterr().err


def test_an_engine_that_does_not_start_is_another_status(
    pairs: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs["stock"] = EngineError("engine stock-prefill died")
    assert prefill_decode.main(["--logs", str(tmp_path)]) == 2
    assert "engine stock-prefill died" in capsys.readouterr().out
