"""The pytest plugin: `pytest --mine` grades a learner's files instead of the reference.

pytest loads this module in every run on a machine where minicache is installed, other projects' runs too. So it
imports nothing but pytest, and does nothing outside a course. What it does inside one is in `session.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("minicache", "minicache, the course")
    group.addoption("--mine", action="store_true", help="grade your files in labs/ instead of the reference")
    group.addoption("--labs", type=Path, metavar="DIR", help="with --mine: use the files in DIR instead of labs/")
    group.addoption("--task", type=int, metavar="K", help="run only the tests of task K in each phase")
    group.addoption("--course-seed", type=int, metavar="N", help="seed for other random test cases")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Put the learner's files in place, before a conftest.py can import what they stand in for."""
    options = early_config.known_args_namespace
    root = early_config.rootpath
    if not (root / "labs" / "course.toml").is_file():
        if options.mine:
            raise pytest.UsageError(f"--mine: {root} has no labs/course.toml, so there is nothing to grade")
        return
    from minicache_course.journal import Journal
    from minicache_course.session import GradingSession

    plugins = early_config.pluginmanager.get_plugins()
    journal = next((each for each in plugins if isinstance(each, Journal)), None)
    paths = options.file_or_dir or early_config.getini("testpaths") or ["."]
    session = GradingSession(root, options, [Path(path.split("::")[0]).absolute() for path in paths], journal)
    early_config.pluginmanager.register(session, "minicache-grading")
