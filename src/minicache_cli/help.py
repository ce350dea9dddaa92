"""Help texts in the reader's language: docstrings and options are English, and looked up when they are shown."""

from __future__ import annotations

from gettext import gettext as _
from typing import Any

from typer.core import TyperGroup


class Group(TyperGroup):
    """Commands that tell their help in the reader's language."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name, to be run or listed."""
        found = super().get_command(ctx, cmd_name)
        if found:
            _translate(found, ctx)
        return found

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help of the group itself."""
        _translate(self, ctx)
        super().format_help(ctx, formatter)


def _translate(command: Any, ctx: Any) -> None:
    for each in (command, *command.get_params(ctx)):
        for name in ("help", "rich_help_panel"):
            if text := getattr(each, name, None):
                setattr(each, name, _(text))
