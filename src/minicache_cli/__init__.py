"""The `minicache` command."""

from __future__ import annotations

import os
import sys
from gettext import gettext as _

from minicache.errors import MinicacheError
from minicache.lazy import lazily
from minicache_course import language
from minicache_course.errors import LanguageError

__getattr__, __dir__ = lazily(__name__, commands="app")


def main() -> None:
    """Run the command line. What the package refuses on purpose is one line on stderr and exit status 1."""
    for name in ("stdout", "stderr"):  # closed: a socket would get the number of the file
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  as long as the process
    language.bind()
    try:
        sys.argv[1:] = _in_its_language(sys.argv[1:])
        from minicache_cli import learn  # which looks up what it tells

        if sys.argv[1:] and sys.argv[1] in learn.names():
            learn.app()  # typed dozens of times a day: none of them waits for the other commands to be imported
        else:
            from minicache_cli.commands import app

            app()
    except KeyboardInterrupt:  # before or after the command's own work
        sys.exit(130)
    except MinicacheError as error:
        from rich.console import Console
        from rich.markup import escape

        Console(stderr=True).print(
            f"[red]minicache:[/] {escape(language.translated(str(error)))}", soft_wrap=True, highlight=False
        )
        sys.exit(1)


def _in_its_language(arguments: list[str]) -> list[str]:
    """Speak the language that the arguments begin with, `--lang es`; the others."""
    option, given, value = arguments[0].partition("=") if arguments else ("", "", "")
    if option != "--lang":
        return arguments
    if not given:
        value = arguments[1] if len(arguments) > 1 else ""
    if not value:
        there = ", ".join(language.languages())
        raise LanguageError(_("--lang needs a language: {there}").format(there=there))
    language.use(value)
    return arguments[1 if given else 2 :]
