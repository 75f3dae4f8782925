"""The benchmarks' own code, on small inputs: what they compute, write and print."""

from __future__ import annotations

import csv
import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import bench_host
import blocks
import host
import processes
import pytest
import registration
import run
import scale
import tables
from models import MODELS, Model
from results import Recorder, Series, Spread, in_turn, lines, load, with_unit

from vllm_kvpad import placement

GIB = 1 << 30
MODEL = Model("SmolLM2-360M", block_sizes=(16,))


# --- Results -------------------------------------------------------------------------


def a_series(**changes: object) -> Series:
    fields: dict[str, object] = {
        "name": "start",
        "unit": "s",
        "reference": "stock",
        "samples": {"stock": [2.0, 4.0, 2.0], "kvpad": [1.0, 1.0, 4.0]},
    }
    return Series(**{**fields, **changes})  # type: ignore[arg-type]


def test_ratios_are_formed_round_by_round() -> None:
    series = a_series()
    # 0.5, 0.25 and 2: not the ratio of the medians, which is 0.5 as well by chance.
    assert series.ratio("kvpad") == Spread(0.5, 0.25, 2.0)
    assert series.spread("stock") == Spread(2.0, 2.0, 4.0)
    printed = "\n".join(lines(series))
    assert "1 s (1 to 4)  0.500 (0.250 to 2.000) of stock" in printed


@pytest.mark.parametrize(
    "samples",
    [
        {"kvpad": [1.0]},
        {"stock": [], "kvpad": []},
        {"stock": [1.0, 2.0], "kvpad": [1.0]},
    ],
)
def test_a_series_has_its_reference_and_one_sample_a_round(
    samples: dict[str, list[float]],
) -> None:
    with pytest.raises(ValueError, match="start: "):
        a_series(samples=samples)


def test_variants_are_measured_in_turn() -> None:
    order: list[str] = []

    def measure(name: str) -> float:
        order.append(name)
        return float(len(order))

    variants = {name: functools.partial(measure, name) for name in ("a", "b")}
    samples = in_turn(2, variants)
    assert order == ["a", "b", "a", "b"]
    assert samples == {"a": [1.0, 3.0], "b": [2.0, 4.0]}


def test_what_is_recorded_is_read_back(tmp_path: Path) -> None:
    recorder = Recorder("demo", tmp_path)
    recorder.add(a_series(facts={"blocks": 3}))
    # Complete after every series: a run that is cut short has measured something.
    assert load(recorder.path).series == [a_series(facts={"blocks": 3})]
    recorder.note(fit=[1, 2])
    found = load(recorder.path)
    assert found.facts == {"fit": [1, 2]}
    assert found.environment["python"]
    assert [path.name for path in tmp_path.iterdir()] == ["demo.json"]
    content = json.loads(recorder.path.read_text())
    recorder.path.write_text(json.dumps({**content, "schema": 0}))
    with pytest.raises(ValueError, match="schema 0, expected 1"):
        load(recorder.path)


@pytest.mark.parametrize(
    ("spread", "unit", "expected"),
    [
        (Spread(0.0123, 0.01, 0.02), "s", "12.3 ms (10 to 20)"),
        (Spread(3 << 20, 3 << 20, 3 << 20), "B", "3 MiB"),
        (Spread(2e9, 1e9, 3e9), "B/s", "2 GB/s (1 to 3)"),
        (Spread(0.0, 0.0, 0.0), "s", "0 us"),
        (Spread(17621, 17621, 17621), "blocks", "17,621 blocks"),
    ],
)
def test_values_have_units(spread: Spread, unit: str, expected: str) -> None:
    assert with_unit(spread, unit) == expected


# --- Blocks --------------------------------------------------------------------------


@pytest.mark.e2e
def test_every_model_is_planned_at_every_block_size() -> None:
    found = blocks.summary(MODELS, points=5)
    assert len(found) == sum(len(model.block_sizes) for model in MODELS)
    for row in found:
        assert row["padding_bytes_mean"] <= row["rounding_bytes_mean"]


@pytest.mark.e2e
def test_rows_say_what_a_budget_holds(tmp_path: Path) -> None:
    table = blocks.rows([MODEL])
    assert len(table) == 2 * 9  # layouts, budgets
    path = tmp_path / "blocks.csv"
    blocks.write_csv(path, table)
    with path.open() as file:
        written = list(csv.DictReader(file))
    assert [row["budget"] for row in written] == [row.budget for row in table]
    assert written[0].keys() == dataclasses.asdict(table[0]).keys()
    (row,) = (r for r in table if r.layout == "LBNHC" and r.budget == "1000 blocks")
    # 20 KiB pages fill granules every 512 blocks.
    assert (row.blocks, row.blocks_rounded, row.alignment_blocks) == (1000, 512, 512)
    assert row.blocks_lost_by_rounding == 488
    assert row.blocks_lost_by_padding == 1000 - row.blocks_padded
    # 9.77 granules of each layer become 9 whole ones.
    assert row.blocks_padded == 9 * (2 << 20) // (20 << 10)


@pytest.mark.e2e
def test_losses_are_those_of_the_footprint() -> None:
    """The figure and the summary use one placement at capacity; the table does not."""
    from vllm_kvpad.cli.geometry import footprint

    segments = blocks.capacity_segments(MODEL, 16)
    budgets = [GIB, 3 * GIB + 12345, 41 * GIB]
    rounding, padding = blocks.lost_bytes(segments, budgets)
    geometry = MODEL.geometry(16)
    found = [footprint(geometry, budget, blocks.GRANULE) for budget in budgets]
    assert rounding == [each.rounding_lost_bytes for each in found]
    assert padding == [each.padding_lost_bytes for each in found]


@pytest.mark.e2e
def test_the_figure_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "blocks.png"
    blocks.draw(path, [MODEL], points=5)
    assert path.read_bytes().startswith(b"\x89PNG")


# --- Host, processes, registration ---------------------------------------------------


@pytest.mark.e2e
def test_both_shapes_place_the_same_segments() -> None:
    one, many = (bench_host.placed(7, shape) for shape in (False, True))
    assert len(one.config.kv_cache_tensors) == 1
    assert len(many.config.kv_cache_tensors) == 7
    segments = placement.kv_cache_segments(one.config, one.layout)
    assert len(segments) == 7
    assert placement.kv_cache_segments(many.config, many.layout) == segments


def test_growth_is_sorted_by_benchmark_and_layers() -> None:
    benchmarks = [
        {
            "name": f"test_pad[{layers}]",
            "params": {"layers": layers, "tensor_per_layer": shape},
            "stats": {"data": [0.2, 0.1, 0.4]},
            "extra_info": {"layers": layers},
        }
        for shape in (False, True)
        for layers in (10, 100)
    ]
    growth = host.growth_by_layers(benchmarks)
    assert [each["name"] for each in growth] == ["pad", "pad, a tensor for each layer"]
    assert growth[0]["seconds"] == {"10": [0.2, 0.1, 0.4], "100": [0.2, 0.1, 0.4]}
    assert host.lines(growth)[0].startswith("pad: 10 layers 20000.00 us a layer")


def test_importing_is_timed_in_a_process_of_its_own() -> None:
    assert 0 < processes.import_seconds("vllm_kvpad") < 60
    with pytest.raises(RuntimeError, match="No module named 'no_such_module'"):
        processes.import_seconds("no_such_module")


@pytest.mark.e2e
def test_regions_are_registered_with_a_real_agent() -> None:
    found = registration.fresh(registration.costs, 3, 4096, 30)
    assert found["descriptors"] == 30
    assert found["metadata"] > 0
    assert all(found[name] > 0 for name in ("register", "introduce", "prepare"))


# --- Scale ---------------------------------------------------------------------------


def test_the_fleet_follows_the_formula() -> None:
    costs = scale.UnitCosts(
        register_fixed=1.0,
        register_region=0.5,
        meet_fixed=2.0,
        meet_region=0.25,
        metadata_fixed=100.0,
        metadata_region=10.0,
        descriptor=0.125,
    )
    assert scale.fleet(costs, gpus=8, peers=4, layers=5, regions=6, blocks=16) == {
        "register_seconds": 1 + 0.5 * 6,
        "meet_seconds": 4 * (2 + 0.25 * 6),
        "prepare_seconds": 4 * 0.125 * 5 * 16,
        "descriptors": 4 * 5 * 16,
        "metadata_bytes": 8 * 4 * (100 + 10 * 6),
    }


def test_fit_finds_fixed_and_marginal_cost() -> None:
    found = registration.fit({1: 5.5, 10: 9.0, 101: 55.5})
    assert found == pytest.approx({"fixed": 5.0, "each": 0.5})


def test_fit_refuses_a_cost_that_falls_with_regions() -> None:
    with pytest.raises(ValueError, match="10 regions took less than 1 "):
        registration.fit({1: 5.0, 5: 9.0, 10: 4.0})


# --- Tables and running --------------------------------------------------------------


def test_tables_go_between_the_marks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = Recorder("gpu_startup", tmp_path)
    recorder.add(a_series())
    readme = tmp_path / "README.md"
    readme.write_text(f"above\n{tables.BEGIN}\nold\n{tables.END}\nbelow\n")
    call = [str(tmp_path), "--readme", str(readme)]
    assert tables.main([*call, "--check"]) == 1
    assert tables.main(call) == 0
    text = readme.read_text()
    assert (
        "| start | 2 s (2 to 4) | 1 s (1 to 4); ratio 0.500 (0.250 to 2.000) |" in text
    )
    assert text.startswith("above\n")
    assert text.endswith("below\n")
    assert "old" not in text
    assert tables.main([*call, "--check"]) == 0
    readme.write_text("no marks")
    with pytest.raises(ValueError, match="expected one line"):
        tables.main(call)


def test_the_kept_results_make_tables() -> None:
    made = tables.tables()
    for name in run.GROUPS["cpu"]:
        title, _ = tables.TABLES[name]
        assert f"**{title}**" in made


def test_the_readme_has_the_tables_of_the_kept_results(project_root: Path) -> None:
    assert tables.main(["--readme", str(project_root / "README.md"), "--check"]) == 0


def test_groups_name_every_benchmark_once() -> None:
    names = [name for group in run.GROUPS.values() for name in group]
    assert sorted(names) == sorted(run.BENCHMARKS)
    assert run.selected(["host", "cpu"])[0] == "host"
    assert run.selected(["host", "cpu"]).count("host") == 1


def test_one_that_fails_is_reported_and_keeps_none_from_running(
    project_root: Path, tmp_path: Path
) -> None:
    program = project_root / "tests" / "benchmarks" / "run.py"
    done = subprocess.run(
        # No registration.json to compute from.
        [sys.executable, program, "scale", "--results", tmp_path],
        env={**os.environ, "PYTHONPATH": str(project_root)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "registration.json" in done.stderr
    assert done.stderr.splitlines()[-1] == "failed: scale"


def test_gpu_benchmarks_import_without_a_gpu(project_root: Path) -> None:
    paths = [
        project_root / folder
        for folder in ("examples", "tests/gpu", "tests/benchmarks")
    ]
    subprocess.run(
        [sys.executable, "-c", "import gpu, gpu_jobs, serving, transfer"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        check=True,
    )
