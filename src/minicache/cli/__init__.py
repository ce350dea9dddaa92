"""The `minicache` command."""

from __future__ import annotations

import sys

from minicache.errors import MinicacheError
from minicache.lazy import lazily

__getattr__, __dir__ = lazily(__name__, commands="app")


def main() -> None:
    """Run the command line. What the package refuses on purpose is one line on stderr and exit status 1."""
    try:
        from minicache.cli import learn

        if sys.argv[1:] and sys.argv[1] in learn.names():
            learn.app()  # typed dozens of times a day: none of them waits for the other commands to be imported
        else:
            from minicache.cli.commands import app

            app()
    except KeyboardInterrupt:  # before or after the command's own work
        sys.exit(130)
    except MinicacheError as error:
        from rich.console import Console
        from rich.markup import escape

        Console(stderr=True).print(f"[red]minicache:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
        sys.exit(1)
