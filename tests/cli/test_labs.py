"""What `--mine` says: whose file is used, phase by phase."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from minicache.cli.labs import use_labs
from minicache.course import finder
from minicache.course.finder import Lab


@pytest.mark.parametrize(
    ("mine", "says"),
    [
        ([], "The reference: 3 modules; `minicache status` says what is left\n"),
        (
            ["cache.dense", "scheduler.base"],
            "Yours: labs/one: cache/dense.py\n"
            "Yours: labs/two: scheduler/base.py\n"
            "The reference: 1 module; `minicache status` says what is left\n",
        ),
        (
            ["cache.dense", "scheduler.base", "engine.llm"],
            "Yours: labs/one: cache/dense.py\nYours: labs/two: scheduler/base.py, engine/llm.py\n",
        ),
    ],
    ids=len,
)
def test_whose_files(monkeypatch: pytest.MonkeyPatch, mine: list[str], says: str) -> None:
    files = {
        "cache.dense": "one/cache/dense.py",
        "scheduler.base": "two/scheduler/base.py",
        "engine.llm": "two/engine/llm.py",
    }
    labs = [Lab(f"minicache.{name}", Path.cwd() / "labs" / file, name in mine, "") for name, file in files.items()]
    monkeypatch.setattr(finder, "install_finished_labs", lambda: labs)
    console = Console(width=200)
    with console.capture() as captured:
        use_labs(console)
    assert captured.get() == says
