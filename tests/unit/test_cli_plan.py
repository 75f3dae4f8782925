"""``vllm-kvpad plan``: what it prints, draws and refuses."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("typer")

from cli_programs import CONFIGS, assert_fits_a_screen, assert_one_line_of_error, run
from typer.testing import CliRunner

from vllm_kvpad.cli import app
from vllm_kvpad.cli.geometry import Geometry, footprint, load_config, read_layers
from vllm_kvpad.cli.plan import losses
from vllm_kvpad.placement import Segment

GIB, MIB = 1 << 30, 1 << 20
SMOL = CONFIGS / "SmolLM2-360M.json"


def plan(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def plan_json(*arguments: str | Path) -> dict[str, Any]:
    done = plan(*arguments, "--json")
    assert done.exit_code == 0, done.output
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_json_is_the_footprint_of_the_model() -> None:
    answer = plan_json(SMOL, "--memory", "10GiB", "--layout", "lbhnc", "--tp", "5")
    layers = read_layers(load_config(SMOL), tensor_parallel=5)
    expected = footprint(Geometry(layers=layers, layout="LBHNC"), 10 * GIB, 2 * MIB)
    assert dataclasses.asdict(expected).items() <= answer.items()
    assert answer["schema"] == 1
    assert answer["tensor_parallel"] == 5
    assert answer["layout"] == "LBHNC"
    assert answer["layers"] == 32
    assert answer["placed_by"].startswith("vLLM ")


def test_the_screen_has_the_numbers_and_fits() -> None:
    done = plan(SMOL, "--memory", "10.4GiB")
    assert done.exit_code == 0
    assert_fits_a_screen(done.stdout)
    answer = plan_json(SMOL, "--memory", "10.4GiB")
    for name in ("blocks", "rounded_blocks", "padded_blocks", "bytes_per_block"):
        assert f"{answer[name]:,}" in done.stdout


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MiB", 512 * MIB),
        ("1.5GiB", 1536 * MIB),
        ("2GB", 2 * 10**9),
        (" .5 gib ", 512 * MIB),
        ("1073741824", GIB),
        ("7EiB", 7 << 60),
    ],
)
def test_sizes_have_units(text: str, size: int) -> None:
    assert plan_json(SMOL, "--memory", text)["memory_bytes"] == size


@pytest.mark.parametrize(
    "text",
    [
        *("80GiB*0.9", "80GiB-8GiB", "1 TiB/8", "4GiB.5", "4 GiB per gpu", "4GiB;"),
        *("1,5GiB", "1,000GiB", "1_000", "1.GiB", "90% of 80GiB", "+1GiB", "1e9"),
        *("GiB", "", "4Gb s", "٤GiB", "4GiB\n5"),
    ],
)
def test_a_size_is_all_of_the_text(text: str) -> None:
    done = plan(SMOL, "--memory", text)
    assert done.exit_code == 2
    assert "is not a size such as 40GiB" in done.stderr


@pytest.mark.parametrize("option", ["--memory", "--granule"])
@pytest.mark.parametrize("text", ["0", "8EiB", "9000000000EiB", "9" * 400])
def test_a_size_is_positive_and_can_be_addressed(option: str, text: str) -> None:
    done = plan(SMOL, *("--memory", "1GiB"), *(option, text))
    assert done.exit_code == 2
    assert "less than 8 EiB" in done.stderr


def test_the_granule_is_the_callers() -> None:
    answer = plan_json(SMOL, "--memory", "1GiB", "--granule", "64KiB")
    assert answer["granule_bytes"] == 64 << 10
    # 20 KiB and 64 KiB share 4 KiB
    assert answer["alignment_blocks"] == 16


def test_numbers_do_instead_of_a_configuration() -> None:
    given = plan_json(
        *("--layers", "32", "--kv-heads", "5", "--head-dim", "64", "--memory", "1GiB")
    )
    read = plan_json(SMOL, "--memory", "1GiB")
    assert {**given, "model": ""} == {**read, "model": ""}


def test_a_folder_stands_for_its_config_json(tmp_path: Path) -> None:
    folder = tmp_path / "SmolLM2-360M"
    folder.mkdir()
    (folder / "config.json").write_bytes(SMOL.read_bytes())
    assert plan_json(folder, "--memory", "1GiB") == plan_json(SMOL, "--memory", "1GiB")


# --- without vLLM, or with one that does not import


def test_without_vllm_and_torch_the_numbers_are_the_same() -> None:
    done = run(
        *("plan", SMOL, "--memory", "10GiB", "--json"), without=["vllm", "torch"]
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["placed_by"] == "kvpad (vLLM is not installed)"
    with_vllm = plan_json(SMOL, "--memory", "10GiB")
    assert {**answer, "placed_by": ""} == {**with_vllm, "placed_by": ""}


def test_without_vllm_a_hybrid_model_is_refused() -> None:
    model = CONFIGS / "gemma-3-27b-it.json"
    done = run("plan", model, "--memory", "10GiB", without=["vllm"])
    assert_one_line_of_error(done, "not all alike", "where vLLM is installed")


def test_a_broken_vllm_is_named(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("raise RuntimeError('torn\\napart')\n")
    done = run("plan", SMOL, "--memory", "10GiB", path=tmp_path)
    assert_one_line_of_error(done, "RuntimeError: torn apart", "doctor")


# --- mistakes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan"], ["--memory"]),
        (["plan", "--memory", "much"], ["'much'", "40GiB"]),
        (["plan", "--memory", "-1GiB"], ["-1GiB"]),
        (["plan", "--memory", "1GiB"], ["config.json", "--layers"]),
        (["plan", "nowhere", "--memory", "1GiB"], ["nowhere", "No such file"]),
        (["plan", SMOL, "--memory", "1GiB", "--layers", "3"], ["not both"]),
        (["plan", SMOL, "--memory", "1GiB", "--layout", "LBNH"], ["LBNHC"]),
        (["plan", SMOL, "--memory", "1GiB", "--granule", "3MiB"], ["power of two"]),
        (["plan", SMOL, "--memory", "1GiB", "--tp", "2"], ["5 KV heads", "--tp"]),
        (["plan", SMOL, "--memory", "1GiB", "--tp", "0"], ["--tp"]),
        (["plan", SMOL, "--memory", "1KiB"], ["not even one block"]),
        (["plan", CONFIGS / "Zamba2-1.2B.json", "--memory", "1GiB"], ["recurrent"]),
        (["plam"], ["plam"]),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_do(
    arguments: list[str | Path], words: list[str]
) -> None:
    done = run(*arguments, without=["vllm"])
    assert_one_line_of_error(done, *words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *(
            ({"--kv-heads": heads}, f"--kv-heads {heads:.60}: expected")
            for heads in (
                "8,x",
                "\u00b2",
                "0",
                "8,-8",
                "8,,8",
                "9" * 5000,
                str(1 << 31),
            )
        ),
        ({"--layers": "10001"}, "--layers"),
        ({"--head-dim": str(1 << 31)}, "--head-dim"),
        ({"--block-size": "9" * 400}, "--block-size"),
        ({"--tp": "9" * 400}, "--tp"),
    ],
)
def test_a_bad_number_is_named(change: dict[str, str], words: str) -> None:
    numbers = {"--layers": "2", "--kv-heads": "8", "--head-dim": "64", **change}
    options = [text for option in numbers.items() for text in option]
    done = plan("--memory", "1GiB", *options)
    assert done.exit_code == 2
    assert words in done.stderr
    assert done.stdout == ""


def test_a_path_that_is_too_long_is_one_line() -> None:
    done = run("plan", "x" * 5000, "--memory", "1GiB", without=["vllm"])
    assert_one_line_of_error(done, "File name too long")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[" * 200_000, "is not JSON"),
        ("[1]", "expected a JSON object"),
        ("{}", "architecture"),
    ],
)
def test_a_bad_configuration_is_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "config.json").write_text(text)
    done = plan(tmp_path, "--memory", "1GiB")
    assert done.exit_code == 2
    assert words in done.stderr
    assert done.stdout == ""


# --- the drawing


@pytest.mark.parametrize("model", ["SmolLM2-360M", "Llama-3.1-70B"])
def test_a_plot_is_drawn(tmp_path: Path, model: str) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / "out.png"
    done = plan(CONFIGS / f"{model}.json", "--memory", "10.4GiB", "--plot", target)
    assert done.exit_code == 0, done.output
    assert target.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    import matplotlib.image

    image = matplotlib.image.imread(target)
    height, width, _ = image.shape
    assert width >= 1200
    assert height >= 400
    # blocks are drawn, and so is what holds none
    for color in (0x4C72B0, 0xDD8452):
        wanted = [color >> shift & 255 for shift in (16, 8, 0)]
        distance = abs(image[:, :, :3] * 255 - wanted).max(axis=2)
        assert (distance < 2).sum() > 100


def test_a_plot_needs_matplotlib(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = plan(SMOL, "--memory", "1GiB", "--plot", tmp_path / "out.png")
    assert done.exit_code == 2
    assert "pip install 'vllm-kvpad[plot]'" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "name", ["no/such/folder.png", "out.docx", "out", "out.", ".png", "folder", "f.png"]
)
def test_a_plot_that_cannot_be_written_is_one_line(tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    folders = [tmp_path / "folder", tmp_path / "f.png"]
    for folder in folders:
        folder.mkdir()
    done = plan(SMOL, "--memory", "1GiB", "--plot", tmp_path / name)
    assert done.exit_code == 2
    assert len(done.stderr.splitlines()) == 1
    assert name in done.stderr
    assert sorted(tmp_path.rglob("*")) == sorted(folders)


def test_losses_over_four_periods() -> None:
    # two segments of 20 KiB pages: counts end on granules of 64 KiB every 16 blocks
    page, granule = 20 << 10, 64 << 10
    segments = [
        Segment(offset, page, 100)
        for offset in (0, -(-100 * page // granule) * granule)
    ]
    counts, rounding, padding = losses(segments, 100, granule)
    assert counts == list(range(100 - 64, 101))
    assert rounding == [2 * page * (count % 16) for count in counts]
    assert padding == [2 * (-count * page % granule) for count in counts]
