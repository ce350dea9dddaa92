"""`--help` of every command, in a terminal of 80 columns and in the 76 of the pages: nothing is cut, nothing broken."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from minicache_cli import app


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*path, name))


COMMANDS = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("width", [80, 76])
@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_is_legible(path: tuple[str, ...], width: int) -> None:
    terminal = {"COLUMNS": str(width), "NO_COLOR": "1", "TERM": "dumb"}
    result = CliRunner().invoke(app, [*path, "--help"], env=terminal)
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in result.output
    for option in COMMANDS[path].params:
        for name in (*option.opts, *option.secondary_opts):
            if name.startswith("--"):
                assert re.search(rf"{name}(?![\w-])", result.output), f"{name} is broken"
        assert option.metavar is None or re.search(rf" {re.escape(option.metavar)}(?!\w)", result.output)
    for line in lines:
        without_ranges = re.sub(r"\[[^][]*\]", "", line)
        assert "=" not in without_ranges, f"a range is broken: {line}"
        assert without_ranges.count("<") == without_ranges.count(">"), f"a type is broken: {line}"
