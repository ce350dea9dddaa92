"""What the command line tells of the same files."""

from __future__ import annotations

import json
import shutil
from contextlib import chdir
from dataclasses import asdict
from pathlib import Path
from typing import Any

from minicache_course.account import account
from minicache_course.grading import grade
from minicache_course.server import PytestServer
from minicache_course.workspace import open_workspace

ROOT = Path(__file__).resolve().parents[2]


def on_the_command_line(folder: Path, server: PytestServer, phase: int, task: int, files: dict[str, str]) -> Any:
    """The account of `minicache grade` as JSON has it, of files in an empty folder that gets the same course."""
    shutil.copytree(ROOT / "labs", folder / "labs")
    (folder / "tests").symlink_to(ROOT / "tests")
    for path, content in files.items():
        (folder / path).write_text(content, encoding="utf-8")
    workspace = open_workspace(folder)
    with chdir(folder):  # paths are relative to it
        told = account(grade(workspace, workspace.course.phase(phase), task=task, server=server))
    return json.loads(json.dumps(asdict(told)))
