"""Where a command writes: looked at before the work, not after it."""

from __future__ import annotations

from pathlib import Path

import typer


def make_folder(folder: Path) -> None:
    """Make the folder of `--out`, if it is not there.

    Raises:
        BadParameter: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"{folder} is no folder and cannot be created: {error.strerror}") from error
