"""Blocks and bytes lost by rounding and by padding: real geometries, no engine.

Every row asks :func:`vllm_kvpad.cli.geometry.footprint` what a budget holds. Writes
``blocks.csv``, ``blocks.json`` and ``blocks.png``.
"""

from __future__ import annotations

import csv
import dataclasses
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models import MODELS, Model
from results import Recorder, results_folder

from vllm_kvpad.cli.geometry import footprint, place_padded
from vllm_kvpad.placement import (
    Segment,
    block_alignment,
    blocks_within,
    bytes_per_block,
    kv_cache_segments,
    rounded_blocks,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GIB = 1 << 30
GRANULE = 2 << 20
BLOCK_BUDGETS = (100, 1000)  # blocks
BYTE_BUDGETS = tuple(gib * GIB for gib in (1, 2, 5, 10, 20, 50, 100))
LAYOUTS = ("LBNHC", "BLHNC")
"""Layers outermost, one segment a layer; blocks outermost, one segment for all."""


@dataclasses.dataclass(frozen=True)
class Row:
    """What one budget holds. Bytes and blocks are those of one rank."""

    model: str
    tensor_parallel: int
    block_size: int
    layout: str
    segments: int
    bytes_per_block: int
    alignment_blocks: int
    budget: str
    budget_bytes: int
    blocks: int
    blocks_rounded: int
    blocks_padded: int
    blocks_lost_by_rounding: int
    blocks_lost_by_padding: int
    bytes_lost_by_rounding: int
    bytes_lost_by_padding: int
    share_lost_by_rounding: float
    share_lost_by_padding: float
    padding_address_bytes: int
    given_count_extra_bytes: int
    """Beyond the budget, where the number of blocks is given and kept."""


def rows(models: Iterable[Model] = MODELS) -> list[Row]:
    """One row for each model, block size, layout and budget that holds a block."""
    return [
        row
        for model in models
        for block_size in model.block_sizes
        for layout in LAYOUTS
        for row in _rows(model, block_size, layout)
    ]


def _rows(model: Model, block_size: int, layout: str) -> Iterable[Row]:
    geometry = model.geometry(block_size, layout)
    one = geometry.place(1)
    per_block = bytes_per_block(kv_cache_segments(one.config, one.layout))
    budgets = [(f"{count} blocks", count * per_block) for count in BLOCK_BUDGETS]
    budgets += [(f"{size // GIB} GiB", size) for size in BYTE_BUDGETS]
    for name, budget in budgets:
        found = footprint(geometry, budget, GRANULE)
        yield Row(
            model=model.config,
            tensor_parallel=model.tensor_parallel,
            block_size=block_size,
            layout=layout,
            segments=found.num_segments,
            bytes_per_block=found.bytes_per_block,
            alignment_blocks=found.alignment_blocks,
            budget=name,
            budget_bytes=budget,
            blocks=found.blocks,
            blocks_rounded=found.rounded_blocks,
            blocks_padded=found.padded_blocks,
            blocks_lost_by_rounding=found.blocks - found.rounded_blocks,
            blocks_lost_by_padding=found.blocks - found.padded_blocks,
            bytes_lost_by_rounding=found.rounding_lost_bytes,
            bytes_lost_by_padding=found.padding_lost_bytes,
            share_lost_by_rounding=round(found.rounding_lost_bytes / budget, 6),
            share_lost_by_padding=round(found.padding_lost_bytes / budget, 6),
            padding_address_bytes=found.address_padding_bytes,
            given_count_extra_bytes=max(0, found.given_physical_bytes - budget),
        )


def write_csv(path: Path, table: Sequence[Row]) -> None:
    with path.open("w", newline="") as file:
        names = [field.name for field in dataclasses.fields(Row)]
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(dataclasses.asdict(row) for row in table)


def summary(
    models: Iterable[Model] = MODELS, points: int = 200
) -> list[dict[str, Any]]:
    """For each model and block size what a budget loses at worst and on average.

    Over budgets from 1 to 100 GiB, evenly spaced on a logarithmic scale: what rounding
    loses at one budget depends on where the count happens to lie in its period.
    """
    return [
        {
            "model": model.name,
            "block_size": block_size,
            **_losses_summary(model, block_size, points),
        }
        for model in models
        for block_size in model.block_sizes
    ]


def _losses_summary(model: Model, block_size: int, points: int) -> dict[str, Any]:
    segments = capacity_segments(model, block_size)
    per_block = bytes_per_block(segments)
    budgets = spaced(GIB, 100 * GIB, points)
    rounding, padding = lost_bytes(segments, budgets)
    count = len(budgets)
    ten = budgets.index(min(budgets, key=lambda budget: abs(budget - 10 * GIB)))
    return {
        "segments": len(segments),
        "bytes_per_block": per_block,
        "rounding_bytes_mean": sum(rounding) // count,
        "rounding_bytes_worst": max(rounding),
        "padding_bytes_mean": sum(padding) // count,
        "padding_bytes_worst": max(padding),
        "bytes_near_10_gib": [budgets[ten], rounding[ten], padding[ten]],
        "alignment_blocks": block_alignment(segments, GRANULE),
    }


def capacity_segments(model: Model, block_size: int) -> list[Segment]:
    """Segments of the padded placement of 100 GiB, layers outermost.

    What fewer blocks take of it does not depend on its capacity: no segment shares a
    granule with another.
    """
    padded, _ = place_padded(model.geometry(block_size), 100 * GIB, GRANULE)
    return kv_cache_segments(padded.config, padded.layout)


def lost_bytes(
    segments: Sequence[Segment], budgets: Iterable[int]
) -> tuple[list[int], list[int]]:
    """Bytes of each budget that hold no block: counts rounded, and padded."""
    per_block = bytes_per_block(segments)
    rounding, padding = [], []
    for budget in budgets:
        left = rounded_blocks(segments, budget // per_block, GRANULE)
        rounding.append(budget - left * per_block)
        fit = blocks_within(segments, budget, GRANULE)
        padding.append(budget - fit * per_block)
    return rounding, padding


def spaced(low: int, high: int, count: int) -> list[int]:
    """``count`` whole numbers from ``low`` to ``high``, evenly on a log scale."""
    growth = high / low
    return [round(low * growth ** (index / (count - 1))) for index in range(count)]


# --- The figure ----------------------------------------------------------------------


def draw(path: Path, models: Sequence[Model] = MODELS, points: int = 300) -> None:
    """One panel a model: share of the budget that holds no block, by budget.

    Of the smallest block size; what larger blocks lose differs by less than a block.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    columns = min(4, len(models))
    lines = -(-len(models) // columns)
    figure = Figure(figsize=(3.4 * columns, 2.3 * lines + 0.8), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(lines, columns, sharey=True, squeeze=False)
    panels: list[Axes] = grid.flatten().tolist()
    for axes, model in zip(panels, models, strict=False):
        _draw_model(axes, model, points)
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=2))
    for axes in panels[len(models) :]:
        axes.set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    figure.suptitle(
        "KV cache memory that holds no block: one rank, granule 2 MiB, layers outermost"
    )
    figure.savefig(path, dpi=80)


def _draw_model(axes: Axes, model: Model, points: int) -> None:
    block_size = model.block_sizes[0]
    segments = capacity_segments(model, block_size)
    per_block = bytes_per_block(segments)
    budgets = spaced(100 * per_block, 100 * GIB, points)
    rounding, padding = lost_bytes(segments, budgets)
    for lost, colour, width, name in (
        (rounding, "#dd8452", 2.6, "block counts rounded"),
        (padding, "#4c72b0", 0.9, "padded (kvpad)"),
    ):
        axes.plot(
            [budget / GIB for budget in budgets],
            [each / budget for each, budget in zip(lost, budgets, strict=True)],
            linewidth=width,
            color=colour,
            label=name,
        )
    axes.set(title=f"{model.name}, blocks of {block_size}", xlabel="budget, GiB")
    # From a ten-thousandth to all of it: both ends happen.
    axes.set(xscale="log", yscale="log", ylim=(1e-4, 1.5))
    axes.grid(alpha=0.3)


def main(rounds: int = 1) -> None:
    """Write the three files. Nothing is timed, so there are no rounds."""
    # vLLM remarks on every hybrid model each time it is placed.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    folder = results_folder()
    folder.mkdir(parents=True, exist_ok=True)
    table = rows()
    write_csv(folder / "blocks.csv", table)
    recorder = Recorder("blocks", folder)
    recorder.note(granule_bytes=GRANULE, summary=summary())
    draw(folder / "blocks.png")
    print(f"{len(table)} rows; blocks.csv, blocks.json and blocks.png in {folder}")
