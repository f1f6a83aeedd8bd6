"""The command line: one file per command, on the public API like anybody's program.

Results go to stdout, and what is said about them (progress, warnings, errors) to stderr. rich is imported when something is
printed and torch when tensors are made, so that `--help` and `--version` are quick.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import headrace
from headrace.cli._arguments import PATH_MEANS
from headrace.cli._bench import bench
from headrace.cli._doctor import doctor
from headrace.cli._exits import EXIT_CODES, endings, exit_on_interrupt, speak_plainly
from headrace.cli._inspect import inspect
from headrace.cli._load import load
from headrace.cli._plan import plan
from headrace.cli._pull import pull
from headrace.cli._verify import verify
from headrace.cli._words import flags_of


class _Command(TyperCommand):
    """A command whose errors become one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        with endings(debug=ctx.find_root().params["debug"], flags=flags_of(self.params)):
            return super().invoke(ctx)


class _Commands(TyperGroup):
    """The commands."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # --debug is global, but it is thought of last, when a command has just failed.
        ours = args[: args.index("--")] if "--" in args else args
        if "--debug" in ours:
            args = ["--debug", *(each for each in ours if each != "--debug"), *args[len(ours) :]]
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed


app = typer.Typer(
    cls=_Commands,
    name="headrace",
    help="Look into safetensors checkpoints, see how they would be loaded and why, and load them.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help: the same in a pipe, and rich need not be imported for it
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command in (inspect, plan, load, bench):
    app.command(cls=_Command, epilog=PATH_MEANS)(_command)
app.command(cls=_Command)(pull)
app.command(cls=_Command)(verify)
app.command(cls=_Command)(doctor)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"headrace {headrace.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; what `headrace` starts."""
    speak_plainly()
    with exit_on_interrupt():
        app()
