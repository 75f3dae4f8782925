"""How the commands speak: tables for people, JSON for programs, one line of error."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

WIDTH = 80


def console() -> Console:
    """stdout; 80 columns and no colour where it is not a terminal."""
    out = Console(highlight=False)
    if not out.is_terminal:
        out = Console(highlight=False, width=WIDTH, color_system=None)
    return out


def table(*columns: str, numbers: bool = False) -> Table:
    """A table without a frame; ``numbers``: all but the first column align right."""
    made = Table(
        box=None, pad_edge=False, show_header=any(columns), header_style="bold"
    )
    for index, column in enumerate(columns):
        made.add_column(
            column, justify="right" if numbers and index else "left", overflow="fold"
        )
    return made


def print_json(value: Any) -> None:
    """``value`` as JSON on stdout, and nothing else."""
    typer.echo(json.dumps(value, indent=2))


def fail(message: str) -> NoReturn:
    """End with status 2 and one line on stderr."""
    typer.echo(f"vllm-kvpad: {' '.join(message.split())}", err=True)
    raise typer.Exit(2)


@contextlib.contextmanager
def stdout_kept_clean() -> Iterator[None]:
    """Send what libraries print meanwhile, from C as well, to stderr.

    Transports announce themselves on stdout when they are imported, which would end
    up in the middle of ``--json``.
    """
    sys.stdout.flush()
    saved = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
