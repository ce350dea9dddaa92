"""What a learner predicts before writing: questions in the starter, answered there in a comment, checked by `grade`.

They cost no points. Each has a line of its own to be answered on, behind its name and "=":

    # How many blocks does the request hold after step 2?
    # 12.1b =
"""

from __future__ import annotations

import re
import textwrap

from minicache_course.table import Task

WIDTH = 120


def questions(task: Task) -> str:
    """The comment lines that ask them, at the head of a starter; "" for a task without any."""
    if not task.predictions:
        return ""
    lines = [f"Predict, before you write task {task.id}. `minicache grade` checks it, without points."]
    for name, (question, _) in _named(task).items():
        lines += [*textwrap.wrap(question, WIDTH - 2), f"{name} = "]
    return "#\n" + "".join(f"# {line}".rstrip() + "\n" for line in lines)


def check(task: Task, source: str) -> dict[str, bool | None]:
    """Name of a question → whether its answer in a learner's file is right; None: there is none yet."""
    checked: dict[str, bool | None] = {}
    for name, (_, answer) in _named(task).items():
        found = re.search(rf"^# {re.escape(name)} =(.*)$", source, re.MULTILINE)
        given = _plain(found[1]) if found else ""
        checked[name] = given == _plain(answer) if given else None
    return checked


def _named(task: Task) -> dict[str, tuple[str, str]]:
    return {f"{task.id}{letter}": each for letter, each in zip("abcdefgh", task.predictions, strict=False)}


def _plain(answer: str) -> str:
    """An answer as it is compared: 1,000 is 1000, and Yes is yes."""
    return re.sub(r"[\s,_.]", "", answer).lower()
