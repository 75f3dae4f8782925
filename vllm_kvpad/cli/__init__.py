"""``vllm-kvpad``: what kvpad would do on this machine, before a server is started.

``doctor`` looks at the installation, ``connectors`` at what each KV connector does
with the cache, ``plan`` at what a model's cache takes. None of them starts an engine,
needs a GPU, or changes anything. Each prints for people, or with ``--json`` for
programs.

Exit status: 0; 1 where ``doctor`` or ``connectors`` found a problem; 2 where the
command could not answer, with one line on stderr that says what to do.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from vllm_kvpad import __version__
from vllm_kvpad.cli import connectors, doctor, output, plan

app = typer.Typer(
    help="What vllm-kvpad would do on this machine, before a server is started.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(doctor.doctor)
app.command()(connectors.connectors)
app.command()(plan.plan)

# Whether typer brings click along or takes the installed one depends on its version;
# this base of a public name is the usage error of either.
_UsageError = typer.BadParameter.__mro__[1]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"vllm-kvpad {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,  # without a command
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    output.keep_logs_out_of_the_way()


app.callback()(_root)


def main() -> None:
    """The console script: as :data:`app`, with usage errors on one line."""
    try:
        sys.exit(app(prog_name="vllm-kvpad", standalone_mode=False))
    except _UsageError as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "vllm-kvpad"
        message = " ".join(error.format_message().split())
        typer.echo(f"{command}: {message} See `{command} --help`.", err=True)
        sys.exit(2)
    except typer.Abort:
        sys.exit(130)
