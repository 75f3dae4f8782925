"""Run benchmarks and write their JSON into ``$KVPAD_RESULTS``.

    python tests/benchmarks/run.py cpu              # what needs no GPU
    python tests/benchmarks/run.py gpu              # on a GPU host
    python tests/benchmarks/run.py startup commit --rounds 3

Each prints stock and kvpad from the same run: median, smallest and largest, and
their ratio round by round. ``tables.py`` makes the README's tables of the files.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from pathlib import Path

from results import RESULTS, results_folder

HERE = Path(__file__).resolve().parent

BENCHMARKS = {
    # name: module, function
    "blocks": ("blocks", "main"),
    "host": ("host", "main"),
    "processes": ("processes", "main"),
    "registration": ("registration", "main"),
    "scale": ("scale", "main"),
    "transfer": ("transfer", "main"),
    "startup": ("gpu", "startup"),
    "commit": ("gpu", "commit"),
    "serving": ("gpu", "serving"),
    "gpu-transfer": ("gpu", "transfer"),
}
GROUPS = {
    "cpu": ("blocks", "host", "processes", "registration", "scale", "transfer"),
    "gpu": ("commit", "startup", "gpu-transfer", "serving"),
}


def main(argv: list[str] | None = None) -> int:
    """Run what the arguments name; return the exit status.

    A benchmark that fails does not keep the others from running.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", choices=[*GROUPS, *BENCHMARKS])
    parser.add_argument("--rounds", type=int, help="instead of each one's own")
    parser.add_argument("--results", type=Path, help=f"instead of ${RESULTS}")
    arguments = parser.parse_args(argv)
    if arguments.results:
        os.environ[RESULTS] = str(arguments.results.absolute())
    os.environ[RESULTS] = str(results_folder())
    sys.path[:0] = [
        str(HERE.parent.parent / "examples"),
        str(HERE.parent / "gpu"),
    ]
    failed = []
    for name in selected(arguments.names):
        module, function = BENCHMARKS[name]
        print(f"--- {name}", flush=True)
        options = {} if arguments.rounds is None else {"rounds": arguments.rounds}
        try:
            getattr(importlib.import_module(module), function)(**options)
        except Exception:
            failed.append(name)
            traceback.print_exc()
    print(f"results: {results_folder()}", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def selected(names: list[str]) -> list[str]:
    """Names with groups written out, each once, in order."""
    return list(
        dict.fromkeys(each for name in names for each in GROUPS.get(name, (name,)))
    )


if __name__ == "__main__":
    sys.exit(main())
