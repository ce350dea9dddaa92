"""What `--mine` says: whose file is used, of each module that is loaded."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from minicache_cli.labs import use_labs
from minicache_course import finder
from minicache_course.finder import Lab
from minicache_course.table import load_course

LABS = [
    Lab("minicache.cache.dense", Path.cwd() / "labs" / "one" / "dense.py", "", True),
    Lab(
        "minicache.scheduler.base",
        Path.cwd() / "labs" / "two" / "base.py",
        "edited since it passed: minicache grade 2",
        True,
    ),
    Lab("minicache.engine.llm", Path.cwd() / "labs" / "two" / "llm.py", "not passed yet: task 2.3", True),
    Lab("minicache.engine.loop", Path.cwd() / "labs" / "two" / "loop.py", "not passed yet: task 2.4", False),
]


@pytest.mark.parametrize(
    ("labs", "loaded", "says"),
    [
        (LABS[:3], [], ""),
        (
            LABS,
            LABS,
            "reference: all files that you have not started\n"
            "yours: labs/one/dense.py\n"
            "reference, not labs/two/base.py: edited since it passed: minicache grade 2\n"
            "reference, not labs/two/llm.py: not passed yet: task 2.3\n",
        ),
        (LABS[1:], [], "None of your files is finished; `minicache status` lists what is left\n"),
    ],
    ids=["nothing loaded", "all loaded", "nothing finished"],
)
def test_whose_files(monkeypatch: pytest.MonkeyPatch, labs: list[Lab], loaded: list[Lab], says: str) -> None:
    announce: Callable[[Lab], None]

    def install(loading: Callable[[Lab], None]) -> list[Lab]:
        nonlocal announce
        announce = loading
        return labs

    monkeypatch.setattr(finder, "install_finished_labs", install)
    console = Console(width=200)
    with console.capture() as captured:
        use_labs(console)
        for lab in loaded:
            announce(lab)
    assert captured.get() == says


@pytest.mark.parametrize("group", ["commands", "learn"])
def test_a_command_line_that_is_loaded_leaves_each_module_to_the_learner(group: str) -> None:
    code = f"import sys, minicache_cli.{group}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    course = load_course(Path(__file__).parents[2] / "labs" / "course.toml")
    assert {task.module for phase in course for task in phase.tasks} & set(done.stdout.split()) == set()
