"""The way through the course: its tasks in their order, where a learner is on it, and what comes next.

The site has the same, of what passed in the browser (`scripts/browser/here.js`).
"""

from __future__ import annotations

from collections.abc import Mapping

from minicache_course.table import Course, Task


def place(course: Course, passed: Mapping[str, str]) -> tuple[Task | None, Task | None]:
    """Where a learner is, and what is next.

    Args:
        course: has the tasks in their order.
        passed: id of each task that has passed → when, as text that sorts.

    Returns:
        The task that passed last, the later one of two at the same time; and the first after it that has not passed,
        or else the first of all. None where there is none.
    """
    tasks = [task for phase in course for task in phase.tasks]
    done = [number for number, task in enumerate(tasks) if task.id in passed]
    here = max(done, key=lambda number: (passed[tasks[number].id], number), default=-1)
    ahead = tasks[here + 1 :] + tasks[: max(here, 0)]
    following = next((task for task in ahead if task.id not in passed), None)
    return (tasks[here] if done else None), following
