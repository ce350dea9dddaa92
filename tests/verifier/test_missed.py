"""Why mistakes are not found: of each at most one reason, and of no mistake that is not there."""

from __future__ import annotations

import tomllib

from benchmarks.verifier import MISSED, PHASES, STAGES

from minicache_course.workspace import find_workspace
from minicache_course.wrong import load_wrong


def test_each_reason_is_of_mistakes_that_there_are() -> None:
    workspace = find_workspace()
    wrong = [
        each.story
        for phase in workspace.course
        if phase.number in PHASES
        for each in load_wrong(workspace, phase)
        if each.module in STAGES
    ]
    told = [story for each in tomllib.loads(MISSED.read_text(encoding="utf-8")).values() for story in each["stories"]]
    assert len(told) == len(set(told))
    assert all(wrong.count(story) == 1 for story in told)
