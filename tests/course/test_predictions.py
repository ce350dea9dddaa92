"""What a learner predicts before writing, and the comparison after."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.toys import TABLE, Toys

from minicache_course import compare, predictions
from minicache_course.account import account
from minicache_course.errors import CourseError
from minicache_course.grading import grade
from minicache_course.starters import starter
from minicache_course.workspace import open_workspace

ASKED = """
[[phase.task.prediction]]
question = "How many bytes does a float16 take?"
answer = "2"

[[phase.task.prediction]]
question = "And 500 of them?"
answer = "1,000"
"""


@pytest.fixture
def asked(toys: Toys) -> Toys:
    """The toys, with two questions before task 2."""
    first, second = TABLE.rsplit("\n[[phase]]", 1)
    (toys.workspace.root / "labs" / "course.toml").write_text(f"{first}{ASKED}\n[[phase]]{second}")
    workspace = open_workspace(toys.workspace.root)
    return replace(toys, workspace=workspace, phase=workspace.course.phase(0))


def test_a_starter_asks_and_grade_answers(asked: Toys) -> None:
    task, other = asked.phase.task(2), asked.phase.task(1)
    text = starter(asked.phase, task.module)
    assert "# How many bytes does a float16 take?\n# 0.2a =\n# And 500 of them?\n# 0.2b =\n" in text
    assert "Predict" not in starter(asked.phase, other.module)
    assert predictions.check(task, text) == {"0.2a": None, "0.2b": None}
    answered = text.replace("# 0.2a =", "# 0.2a = 4").replace("# 0.2b =", "# 0.2b =  1_000 ")
    assert predictions.check(task, answered) == {"0.2a": False, "0.2b": True}


def test_what_was_predicted_is_told_and_costs_nothing(asked: Toys) -> None:
    file = asked.workspace.lab_files(asked.phase)[asked.phase.task(2).module]
    told = [line.text for line in account(grade(asked.workspace, asked.phase, task=2)).end]
    assert not any("redict" in line for line in told)
    file.write_text(f"# 0.2a = 4\n# 0.2b = 1000\n{file.read_text()}")
    result = grade(asked.workspace, asked.phase, task=2)
    told = [line.text for line in account(result).end]
    assert result.earned == result.points
    assert "Predicted: 1 of 2 right" in told
    assert "Not right: 0.2a. Think again, or unfold the answers on the page." in told


def test_two_sides_without_docstrings(toys: Toys) -> None:
    module = toys.phase.task(2).module
    file = toys.workspace.lab_files(toys.phase)[module]
    file.write_text('def dtype_nbytes(dtype):\n    """Bytes of a <number>."""\n    return 2 if dtype < "g" else 4\n')
    [pair] = compare.pairs(toys.workspace, toys.phase, [toys.phase.task(2)])
    assert pair.yours == 'def dtype_nbytes(dtype):\n    return 2 if dtype < "g" else 4'
    assert pair.ours.startswith("def dtype_nbytes(")
    assert '"""' not in pair.ours
    reasoned = replace(pair, task=replace(pair.task, why="A <table> is as quick."))
    page = compare.page([reasoned], "yours", "reference")
    assert "A &lt;table&gt; is as quick." in page
    assert "dtype&nbsp;&lt;" in page
    assert "number" not in page
    file.write_text(
        "def dtype_nbytes(dtype):\n    return _size(dtype)\n\n"
        'def _size(dtype):\n    """Bytes."""\n    return _size("float16") if dtype else len(_NAMES)\n'
    )
    [pair] = compare.pairs(toys.workspace, toys.phase, [toys.phase.task(2)])
    helper = 'def _size(dtype):\n    return _size("float16") if dtype else len(_NAMES)'
    assert pair.yours == f"def dtype_nbytes(dtype):\n    return _size(dtype)\n\n{helper}"
    file.write_text("def other():\n    pass\n")
    with pytest.raises(CourseError, match="cannot be compared: there is no dtype_nbytes"):
        compare.pairs(toys.workspace, toys.phase, [toys.phase.task(2)])
