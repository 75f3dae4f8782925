"""How the commands speak: tables for people, JSON for programs, one line of error."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
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
    # Square brackets in what others wrote are text, not markup.
    plain = functools.partial(_Stdout, highlight=False, markup=False, emoji=False)
    out = plain()
    return out if out.is_terminal else plain(width=WIDTH, color_system=None)


@contextlib.contextmanager
def _stdout_written() -> Iterator[None]:
    """End as :func:`fail` where stdout cannot be written; a closed pipe is no error."""
    if sys.stdout is None:  # closed before the start, and file descriptor 1 with it
        fail("stdout is closed")
    try:
        yield
    except BrokenPipeError:
        raise
    except (OSError, UnicodeEncodeError) as error:
        # What is left in the buffer would fail again when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        fail(f"stdout cannot be written: {error}")


class _Stdout(Console):
    def print(self, *objects: Any, **how: Any) -> None:
        with _stdout_written():
            super().print(*objects, **how)


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
    with _stdout_written():
        typer.echo(json.dumps(value, indent=2))


def fail(message: str) -> NoReturn:
    """End with status 2 and one line on stderr."""
    typer.echo(f"vllm-kvpad: {' '.join(message.split())}", err=True)
    raise typer.Exit(2)


def keep_logs_out_of_the_way() -> None:
    """Show kvpad's own warnings, each on one line of stderr, and no other log.

    vLLM logs to stdout, which belongs to the answer, and what goes wrong in it is
    reported by the commands. ``VLLM_CONFIGURE_LOGGING=1`` brings its log back.
    """
    # With a file it insists on configuring logging, and would not import.
    if "VLLM_LOGGING_CONFIG_PATH" not in os.environ:
        os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    root = logging.getLogger()
    if not any(isinstance(handler, _OneLineOfStderr) for handler in root.handlers):
        # Any handler also keeps imported modules from configuring the root logger
        # (vLLM's hf3fs connector does).
        root.addHandler(_OneLineOfStderr(logging.WARNING))


class _OneLineOfStderr(logging.Handler):
    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.addFilter(logging.Filter("vllm.kvpad"))

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f": {describe(record.exc_info[1])}"
        typer.echo(f"vllm-kvpad: {' '.join(text.split())}", err=True)


def describe(error: BaseException) -> str:
    """An exception in one line: its type and its text."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextlib.contextmanager
def stdout_kept_clean() -> Iterator[None]:
    """Send what libraries print meanwhile, from C as well, to stderr.

    Transports announce themselves on stdout when they are imported, which would end
    up in the middle of ``--json``.
    """
    with _stdout_written():
        sys.stdout.flush()
    saved = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
