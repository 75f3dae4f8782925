"""``vllm-kvpad plan``: what a model's KV cache takes, rounded and padded."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pydantic
import typer

from vllm_kvpad.cli import output
from vllm_kvpad.cli.geometry import (
    LAYOUTS,
    MOST,
    MOST_LAYERS,
    Footprint,
    Geometry,
    GeometryError,
    Layer,
    footprint,
    load_config,
    place_padded,
    positive,
    read_layers,
    uniform_layers,
)
from vllm_kvpad.config import nearest
from vllm_kvpad.placement import (
    Segment,
    block_alignment,
    kv_cache_segments,
    physical_bytes,
    rounded_blocks,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIZE: pydantic.TypeAdapter[pydantic.ByteSize] = pydantic.TypeAdapter(pydantic.ByteSize)
# pydantic's own pattern has no end: to it, 80GiB*0.9 is 80GiB and 1,5GiB one byte.
_NUMBER_AND_UNIT = re.compile(r"\d*\.?\d+\s*[a-z]*", re.ASCII | re.IGNORECASE)


def _size(text: str) -> int:
    try:
        if not _NUMBER_AND_UNIT.fullmatch(text.strip()):
            raise ValueError
        size = int(_SIZE.validate_python(text.strip()))
    except ValueError:
        raise typer.BadParameter(
            f"{text!r:.60} is not a size such as 40GiB or 512KiB."
        ) from None
    if not 0 < size < 1 << 63:
        raise typer.BadParameter("a size is positive and less than 8 EiB.")
    return size


def _granule(text: str) -> int:
    size = _size(text)
    if size & (size - 1):
        raise typer.BadParameter(f"{size} bytes are not a power of two.")
    return size


def _layout(text: str) -> str:
    name = text.strip().upper()
    if name not in LAYOUTS:
        match = nearest(name, LAYOUTS)
        hint = f"did you mean {match}? " if match else ""
        raise typer.BadParameter(f"{text!r}; {hint}known: {', '.join(LAYOUTS)}.")
    return name


def _counts(text: str) -> list[int]:
    try:
        return [positive("--kv-heads", int(part)) for part in text.split(",")]
    except ValueError:
        raise GeometryError(
            f"--kv-heads {text:.60}: expected a positive number, or one for each "
            "layer as 8,8,4"
        ) from None


def plan(
    memory: Annotated[
        int,
        typer.Option(
            parser=_size, metavar="SIZE", help="What the KV cache may take, as 40GiB."
        ),
    ],
    model: Annotated[
        Path | None,
        typer.Argument(help="A model's config.json, or the folder that holds it."),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_LAYERS,
            help="Without a config.json: full-attention layers.",
        ),
    ] = None,
    kv_heads: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N...]",
            help="Without a config.json: KV heads before tensor parallelism, one "
            "number for all layers or one for each.",
        ),
    ] = None,
    head_dim: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST, help="Without a config.json: elements of one head."
        ),
    ] = None,
    block_size: Annotated[
        int, typer.Option(min=1, max=MOST, help="Tokens in a block.")
    ] = 16,
    layout: Annotated[
        str, typer.Option(parser=_layout, metavar="LAYOUT", help=", ".join(LAYOUTS))
    ] = "LBNHC",
    tp: Annotated[
        int, typer.Option(min=1, max=MOST, help="Tensor parallel ranks.")
    ] = 1,
    kv_cache_dtype: Annotated[
        str, typer.Option(help="As vLLM's: auto, bfloat16, float16, fp8, ...")
    ] = "auto",
    dtype: Annotated[
        str | None, typer.Option(help="The model's, if its config.json has none.")
    ] = None,
    granule: Annotated[
        int, typer.Option(parser=_granule, metavar="SIZE", help="The driver's granule.")
    ] = "2MiB",  # type: ignore[assignment]  # typer parses defaults too
    disable_hybrid_kv_cache_manager: Annotated[
        bool,
        typer.Option(
            "--disable-hybrid-kv-cache-manager",
            help="As vLLM's: layers with a sliding window keep all tokens. vLLM does "
            "this by itself for connectors that need it.",
        ),
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(help="Draw placement and losses into this file (.png, .svg)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on stdout.")] = False,
) -> None:
    """What a model's KV cache takes on one rank: block counts rounded, and padded.

    The model alone on one pipeline stage, without speculative decoding.
    """
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        output.fail("--plot needs matplotlib: pip install 'vllm-kvpad[plot]'")
    try:
        found, name = _layers(
            model, layers, kv_heads, head_dim, tp, kv_cache_dtype, dtype
        )
        geometry = Geometry(
            layers=found,
            block_size=block_size,
            layout=layout,
            hybrid=not disable_hybrid_kv_cache_manager,
        )
        with output.stdout_kept_clean():
            numbers = footprint(geometry, memory, granule)
    except GeometryError as error:
        output.fail(str(error))
    if plot is not None:
        try:
            _draw(plot, name, geometry, numbers)
        except (OSError, ValueError) as error:
            output.fail(f"--plot {plot}: {error}")
    if as_json:
        output.print_json(_as_json(name, geometry, tp, numbers))
    else:
        _print(name, geometry, tp, numbers)


def _layers(
    model: Path | None,
    layers: int | None,
    kv_heads: str | None,
    head_dim: int | None,
    tp: int,
    kv_cache_dtype: str,
    dtype: str | None,
) -> tuple[list[Layer], str]:
    """The layers and what to call the model.

    Raises:
        GeometryError: Neither a configuration nor all of the numbers, or both.
    """
    numbers = (layers, kv_heads, head_dim)
    if model is not None:
        if any(number is not None for number in numbers):
            raise GeometryError(
                "give a config.json, or --layers, --kv-heads and --head-dim, not both"
            )
        config = load_config(model)
        found = read_layers(
            config, tensor_parallel=tp, kv_cache_dtype=kv_cache_dtype, dtype=dtype
        )
        path = model.resolve()
        known = path.parent.name if path.name == "config.json" else path.stem
        return found, f"{known} ({config['architectures'][0]})"
    if layers is None or kv_heads is None or head_dim is None:
        raise GeometryError(
            "give a model's config.json, or all of --layers, --kv-heads and --head-dim"
        )
    found = uniform_layers(
        layers,
        _counts(kv_heads),
        head_dim,
        tensor_parallel=tp,
        kv_cache_dtype=kv_cache_dtype,
        dtype=dtype or "bfloat16",
    )
    return found, f"{layers} layers of full attention"


def _placed_by() -> str:
    if importlib.util.find_spec("vllm") is None:
        return "kvpad (vLLM is not installed)"
    import vllm

    return f"vLLM {vllm.__version__}"


def _as_json(
    name: str, geometry: Geometry, tp: int, numbers: Footprint
) -> dict[str, Any]:
    return {
        "schema": 1,
        "model": name,
        "placed_by": _placed_by(),
        "tensor_parallel": tp,
        "block_size": geometry.block_size,
        "layout": geometry.layout,
        "hybrid_kv_cache_manager": geometry.hybrid,
        "layers": len(geometry.layers),
        "layers_with_window": sum(bool(layer.window) for layer in geometry.layers),
        **dataclasses.asdict(numbers),
    }


def _print(name: str, geometry: Geometry, tp: int, numbers: Footprint) -> None:
    out = output.console()
    windows = sum(bool(layer.window) for layer in geometry.layers)
    kinds = f"{len(geometry.layers)} caches"
    if windows:
        kinds += f" ({windows} with a sliding window)"
    out.print(f"{name}: {kinds}", style="bold")
    out.print(
        f"layout {geometry.layout}, blocks of {geometry.block_size} tokens, one of "
        f"{tp} rank{'s' * (tp > 1)}, placed by {_placed_by()}"
    )
    out.print()
    common = output.table("", "", numbers=True)
    common.show_header = False
    for label, value in (
        ("memory for the KV cache", _bytes(numbers.memory_bytes)),
        ("granule", _bytes(numbers.granule_bytes)),
        ("a block, all layers", f"{numbers.bytes_per_block:,} bytes"),
        ("segments", f"{numbers.num_segments:,}"),
        ("whole granules in all segments every", _blocks(numbers.alignment_blocks)),
        ("blocks, if memory had no granules", f"{numbers.blocks:,}"),
    ):
        common.add_row(label, value)
    out.print(common)
    out.print()
    compared = output.table("", "counts rounded", "padded (kvpad)", numbers=True)
    rounded_bytes = numbers.rounded_blocks * numbers.bytes_per_block
    for label, *values in (
        ("blocks", f"{numbers.rounded_blocks:,}", f"{numbers.padded_blocks:,}"),
        (
            "memory that holds no block",
            _bytes(numbers.rounding_lost_bytes),
            _bytes(numbers.padding_lost_bytes),
        ),
        ("physical memory", _bytes(rounded_bytes), _bytes(numbers.physical_bytes)),
        (
            "address space",
            _bytes(numbers.address_space_bytes - numbers.address_padding_bytes),
            _bytes(numbers.address_space_bytes),
        ),
        ("of which padding", "0", _bytes(numbers.address_padding_bytes)),
        ("chunks, after the final commit", "", f"{numbers.num_segments:,}"),
    ):
        compared.add_row(label, *values)
    out.print(compared)
    out.print()
    out.print(
        "Where the size is given (--kv-cache-memory-bytes), kvpad keeps all "
        f"{_blocks(numbers.blocks)}, in {_bytes(numbers.given_physical_bytes)}."
    )


def _blocks(count: int) -> str:
    return f"{count:,} block{'s' * (count != 1)}"


def _bytes(num_bytes: int) -> str:
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if num_bytes >= 1 << shift:
            return f"{num_bytes / (1 << shift):,.2f} {unit}"
    return f"{num_bytes}"


# --- The drawing ---------------------------------------------------------------------


def _draw(path: Path, name: str, geometry: Geometry, numbers: Footprint) -> None:
    """The address space, the last granule of each segment, and what is lost.

    Padding is less than a granule a segment, invisible beside segments of a gibibyte;
    so the middle panel shows only where each segment ends.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with output.stdout_kept_clean():
        padded, plain = place_padded(
            geometry, numbers.memory_bytes, numbers.granule_bytes
        )
    segments = kv_cache_segments(padded.config, padded.layout)
    before = kv_cache_segments(plain.config, plain.layout)
    height = min(max(5.0, 3.0 + 0.11 * len(segments)), 12)
    figure = Figure(figsize=(15, height), layout="constrained")
    FigureCanvasAgg(figure)
    whole, ends, lost = figure.subplots(1, 3)
    _draw_address_space(whole, segments, numbers)
    _draw_ends(ends, segments, before, numbers)
    _draw_losses(lost, segments, numbers)
    for axes in (whole, ends):
        axes.yaxis.get_major_locator().set_params(integer=True)
    _legend(figure)
    figure.suptitle(
        f"{name}: {numbers.padded_blocks:,} blocks of {numbers.bytes_per_block:,} "
        f"bytes in {_bytes(numbers.memory_bytes)}, layout {geometry.layout}, granule "
        f"{_bytes(numbers.granule_bytes)}"
    )
    # Given no format, matplotlib appends an extension to a name that has none.
    if not path.suffix:
        raise ValueError("expected a file name that ends in .png or .svg")
    figure.savefig(path, format=path.suffix[1:], dpi=110)


def _legend(figure: Figure) -> None:
    """One for all panels, below them."""
    known = {
        label: handle
        for axes in figure.axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(known.values(), known, loc="outside lower center", ncols=len(known))


_USED, _UNUSED, _EDGE = "#4c72b0", "#dd8452", "#222222"


def _draw_address_space(
    axes: Axes, segments: list[Segment], numbers: Footprint
) -> None:
    gib = 1 << 30
    rows = range(len(segments))
    axes.barh(
        rows,
        [numbers.padded_blocks * s.block_stride / gib for s in segments],
        left=[s.offset / gib for s in segments],
        height=0.8,
        color=_USED,
        label="blocks",
    )
    edges = [s.offset / gib for s in segments]
    edges.append(numbers.address_space_bytes / gib)
    axes.vlines(
        edges,
        -0.6,
        len(segments) - 0.4,
        colors=_EDGE,
        linewidth=0.4,
        label="chunk starts, on a granule",
    )
    axes.set(
        title="address space: one chunk a segment",
        xlabel="GiB from the start of the reservation",
        ylabel="segment",
        ylim=(len(segments) - 0.4, -0.6),
    )


def _draw_ends(
    axes: Axes, segments: list[Segment], before: list[Segment], numbers: Footprint
) -> None:
    granule = numbers.granule_bytes
    unit, scale = ("MiB", 1 << 20) if granule >= 1 << 20 else ("KiB", 1 << 10)
    used = []
    for segment in segments:
        rest = numbers.padded_blocks * segment.block_stride % granule
        used.append((rest or granule) / scale)
    whole = granule / scale
    rows = range(len(segments))
    axes.barh(rows, used, height=0.8, color=_USED, label="blocks")
    axes.barh(
        rows,
        [whole - part for part in used],
        left=used,
        height=0.8,
        color=_UNUSED,
        label="mapped, holds no block",
    )
    axes.plot(
        [segment.offset % granule / scale for segment in before],
        rows,
        linestyle="none",
        marker="|",
        markersize=7,
        color=_EDGE,
        label="where it would start unpadded",
    )
    axes.set(
        title="last granule of each segment",
        xlabel=f"{unit} of a granule",
        xlim=(-whole * 0.03, whole * 1.03),
        ylim=(len(segments) - 0.4, -0.6),
    )


def _draw_losses(axes: Axes, segments: list[Segment], numbers: Footprint) -> None:
    counts, rounding, padding = losses(segments, numbers.blocks, numbers.granule_bytes)
    mib = 1 << 20
    axes.plot(
        counts,
        [lost / mib for lost in rounding],
        color=_UNUSED,
        label="block counts rounded",
        drawstyle="steps-post",
    )
    axes.plot(
        counts, [lost / mib for lost in padding], color=_USED, label="padded (kvpad)"
    )
    axes.set(
        title="memory that holds no block",
        xlabel="blocks that were measured",
        ylabel="MiB",
    )
    axes.set_ylim(bottom=0)


def losses(
    segments: list[Segment], most: int, granule: int, points: int = 1500
) -> tuple[list[int], list[int], list[int]]:
    """What is lost at block counts up to ``most``: over four periods of rounding.

    Args:
        segments: Of a padded placement of at least ``most`` blocks.
        most: Blocks, at least 1.
        granule: Bytes.
        points: How many counts to look at, about.

    Returns:
        Block counts; bytes of the blocks that rounding takes away; bytes that
        padding maps beyond its blocks. With padding no block is taken away.
    """
    period = block_alignment(segments, granule)
    least = max(1, most - 4 * period)
    step = max(1, (most - least) // points)
    counts = sorted({*range(least, most + 1, step), most})
    per_block = sum(segment.block_stride for segment in segments)
    rounding = [
        (count - rounded_blocks(segments, count, granule)) * per_block
        for count in counts
    ]
    padding = [
        physical_bytes(segments, count, granule) - count * per_block for count in counts
    ]
    return counts, rounding, padding
