"""Write docs/reference/command-line.md: what each command says of itself. tests/test_docs.py compares the two."""

from __future__ import annotations

from pathlib import Path

from typer.main import get_command
from typer.testing import CliRunner

from headrace.cli import app

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "command-line.md"
_COLUMNS = "80"
_START = """\
# Command line

What each command says with `--help`. Results go to stdout, progress and messages to stderr; `--json` is there for programs.
[What is slow here?](../bench.md) has more about `bench`, [Verified bytes](../integrity.md) about `verify`,
[Stores](../stores.md#copying-to-a-local-folder) about `pull`.
"""


def page() -> str:
    """The page as it should be."""
    commands: list[str] = list(get_command(app).commands)  # type: ignore[attr-defined] # typer's group
    parts = [_START, _section("headrace")]
    parts += [_section(f"headrace {name}", name) for name in commands]
    return "\n".join(parts)


def _section(title: str, *arguments: str) -> str:
    # Plain text: no colours, and the same number of columns everywhere.
    variables = {"COLUMNS": _COLUMNS, "NO_COLOR": "1", "TERM": "dumb"}
    result = CliRunner(env=variables).invoke(app, [*arguments, "--help"], prog_name="headrace")
    if result.exit_code != 0:
        raise SystemExit(f"{title} --help: {result.output}")
    return f"## {title}\n\n```text\n{result.output.strip()}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(page())
