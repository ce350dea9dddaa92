"""Help and refusals in the reader's language: Typer's words and ours are English, and looked up when they are shown."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from gettext import gettext as _
from typing import Any

from typer.core import TyperGroup


class Group(TyperGroup):
    """Commands that tell their help, and what is wrong with their arguments, in the reader's language."""

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

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the arguments name."""
        _translate(self, ctx)
        with _refusals():
            return super().invoke(ctx)


def _translate(command: Any, ctx: Any) -> None:
    for each in (command, *command.get_params(ctx)):
        for name in ("help", "rich_help_panel", "options_metavar", "subcommand_metavar"):
            if text := getattr(each, name, None):
                setattr(each, name, _(text))
    if "get_usage" not in vars(command):
        usage = command.get_usage
        command.get_usage = lambda ctx: usage(ctx).replace("Usage: ", _("Usage: "), 1)


@contextmanager
def _refusals() -> Iterator[None]:
    """Typer makes some of its messages without looking their words up."""
    try:
        yield
    except Exception as error:
        if hasattr(error, "format_message"):
            said = _refusal(error.format_message())
            error.format_message = lambda: said
        raise


def _refusal(message: str) -> str:
    for pattern, template in (
        (r"Missing (?:argument|option) '(.+)'\.", _("{} is missing.")),
        (r"No such option: (\S+) \(Possible options: (.+)\)", _("No such option: {}. Did you mean {}?")),
        (r"No such option: (\S+)", _("No such option: {}")),
        (r"Option '(.+)' requires an argument\.", _("{} needs a value.")),
        (r"Got unexpected extra argument\(s\) \((.+)\)", _("What does not belong here: {}")),
        (r"Invalid value for '(.+?)': (.*)", _("Invalid value for {}: {}")),
        (r"Invalid value: (.*)", _("Invalid value: {}")),
        (r"(.*)\. Did you mean (.+)\?", _("{}. Did you mean {}?")),
    ):
        if found := re.fullmatch(pattern, message, re.DOTALL):
            return template.format(*found.groups())
    return message
