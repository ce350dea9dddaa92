"""Every command of `minicache`, with what its own `--help` prints in the language of LANGUAGE, as Markdown.

LANGUAGE=es python -m scripts.commands
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from minicache_course import language

WIDTH = 76
"""Columns of a text block on a page."""


def main() -> None:
    """Print a section for each command."""
    language.bind()  # before Typer is imported, which looks its own words up at once
    import typer
    from typer.testing import CliRunner

    from minicache_cli.commands import app

    terminal = {"COLUMNS": str(WIDTH), "NO_COLOR": "1", "TERM": "dumb"}
    for path in commands(typer.main.get_command(app), ("minicache",)):
        answer = CliRunner().invoke(app, [*path[1:], "--help"], env=terminal, prog_name=path[0])
        if answer.exit_code != 0:
            raise SystemExit(f"{' '.join(path)} --help failed: {answer.output}")
        text = "\n".join(line.rstrip() for line in answer.output.strip().splitlines())
        print(f"## {' '.join(path)} {{ #{'-'.join(path)} }}\n\n```text\n{text}\n```\n")


def commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """What one types to call each command, in the order in which the help lists them."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield path
        return
    for name, below in inner.items():
        if not below.hidden:
            yield from commands(below, (*path, name))


if __name__ == "__main__":
    main()
