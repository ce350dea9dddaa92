"""Where a learner is on the way through the course, and what is next."""

from pathlib import Path

import pytest

from minicache_course.route import place
from minicache_course.table import load_course

COURSE = load_course(Path(__file__).resolve().parents[2] / "labs" / "course.toml")
ALL = [task.id for phase in COURSE for task in phase.tasks]


@pytest.mark.parametrize(
    ("passed", "here", "following"),
    [
        ({}, None, "0.1"),
        ({"0.1": "09:00"}, "0.1", "0.2"),
        ({"0.1": "09:00", "0.2": "09:00"}, "0.2", "0.3"),  # graded together
        ({"5.1": "09:00", "0.1": "10:00"}, "0.1", "0.2"),  # the one that passed last, wherever it stands
        ({"5.1": "10:00", "5.2": "09:00"}, "5.1", "5.3"),
        ({ALL[-1]: "09:00"}, ALL[-1], "0.1"),
        (dict.fromkeys(ALL, "09:00"), ALL[-1], None),
        ({"99.1": "09:00"}, None, "0.1"),  # a task of another version of the course
    ],
)
def test_the_task_that_passed_last_and_the_next(passed: dict[str, str], here: str, following: str) -> None:
    found = place(COURSE, passed)
    assert [task and task.id for task in found] == [here, following]
