"""A starter keeps what a learner needs and nothing of the solution."""

from __future__ import annotations

import pytest
from tests.toys import COLOR, Toys

from minicache_course.errors import CourseError
from minicache_course.starters import drifted, restore, starter, strip, write_all
from minicache_course.table import Task
from minicache_course.workspace import is_edited

REFERENCE = '''"""A module."""

import math
import os

_SECRET = 42
"""Used by a task's body only."""
_KEPT = 7
PUBLIC = _KEPT


class Thing(Base):
    """A thing."""

    def __init__(self, size: int) -> None:
        self.size = size * _SECRET

    @property
    def area(self) -> int:
        """Its area."""
        return self._square(self.size)

    def given(self) -> int:
        """Stays."""
        return _deep(self.size)

    # Not for learners.
    def _square(self, x: int) -> int:
        return x * x


def first(x: int) -> int:
    """Double x."""
    # A comment.
    return _helper(x)


def second(x: int) -> int:
    """Halve x."""
    yield x // 2


def _helper(x: int) -> int:
    return 2 * x


def _deep(x: int) -> int:
    return _deeper(x)


def _deeper(x: int) -> int:
    return x
'''


def task(number: int, *targets: str) -> Task:
    return Task(3, number, f"Title {number}", "minicache.x", targets, 1, "docs/en/page.md", ())


def test_bodies_go_and_signatures_and_docstrings_stay() -> None:
    text = strip(REFERENCE, [task(1, "first"), task(2, "second"), task(3, "Thing.__init__", "Thing.area")])
    assert text.startswith('"""A module."""')
    assert 'def first(x: int) -> int:\n    """Double x."""\n    raise NotImplementedError(\n' in text
    assert '"phase 3, task 1: Title 1; read docs/en/page.md"' in text
    assert "    @property\n    def area(self) -> int:\n" in text
    assert "def __init__(self, size: int) -> None:\n        raise NotImplementedError(" in text
    assert "import math" in text
    compile(text, "starter", "exec")


def test_private_names_go_unless_what_stays_uses_them() -> None:
    text = strip(REFERENCE, [task(1, "first"), task(2, "second"), task(3, "Thing.__init__", "Thing.area")])
    for gone in ("_SECRET", "Used by a task", "_square", "Not for learners", "_helper", "A comment", "yield"):
        assert gone not in text
    for kept in ("_KEPT = 7", "PUBLIC = _KEPT", "def _deep(", "def _deeper("):
        assert kept in text


def test_the_body_of_a_solved_task_stays_with_its_helpers() -> None:
    text = strip(REFERENCE, [task(2, "second")])
    assert "return _helper(x)" in text
    assert "def _helper" in text
    assert "_SECRET = 42" in text
    assert "yield" not in text


def test_strip_without_tasks_changes_nothing() -> None:
    assert strip(REFERENCE, []) == REFERENCE


def test_a_target_that_is_not_there_or_not_documented_is_refused() -> None:
    with pytest.raises(CourseError, match=r"does not define Thing\.nothing, third"):
        strip(REFERENCE, [task(1, "third", "Thing.nothing")])
    with pytest.raises(CourseError, match="_helper has no docstring"):
        strip(REFERENCE, [task(1, "_helper")])


def test_a_target_may_start_from_a_bug() -> None:
    """The body of another function, under the reference's signature and docstring, with the imports that it needs."""
    where = "minicache_course.incidents.broken:LivelockScheduler.schedule_waiting"
    mend = Task(3, 1, "Mend", "minicache.x", ("first",), 1, "docs/en/page.md", (), (("first", where),))
    text = strip(REFERENCE, [mend])
    assert 'def first(x: int) -> int:\n    """Double x."""\n    # phase 3, task 1: Mend; read docs/en/page.md.' in text
    assert "    while queue and len(self.running) < self.max_num_seqs" in text
    assert "import os\nfrom collections import deque\nfrom minicache.errors import LivelockError\n" in text
    assert "from minicache_course.incidents.broken import SPIN_LIMIT\n" in text
    assert "import ForkingScheduler" not in text
    assert "_helper" not in text
    compile(text, "starter", "exec")


@pytest.mark.parametrize("where", ["minicache.palette:nothing", "minicache.nothing:color", "minicache.palette:Role"])
def test_a_bug_that_is_not_there_is_refused(where: str) -> None:
    mend = Task(3, 1, "Mend", "minicache.x", ("first",), 1, "docs/en/page.md", (), (("first", where),))
    with pytest.raises(CourseError, match=f"{where}: there is no such function"):
        strip(REFERENCE, [mend])


def test_starters_are_made_from_the_real_reference(toys: Toys) -> None:
    text = starter(toys.phase, "minicache.palette")
    assert "Phase 0, toys" in text.splitlines()[0]
    assert 'raise NotImplementedError(\n        "phase 0, task 1: Colours; read docs/en/toys.md"' in text
    assert "PALETTE: dict[str, Role]" in text


def test_drift_is_noticed(toys: Toys) -> None:
    write_all(toys.workspace)
    assert drifted(toys.workspace) == []
    toys.color.write_text(COLOR, encoding="utf-8")
    assert [line.split(":")[0] for line in drifted(toys.workspace)] == [f"{toys.color} was edited"]
    record = toys.workspace.labs / "starters.sha256"
    record.write_text(record.read_text().replace("phase-00-toys/arithmetic/arithmetic.py", "phase-00-toys/other.py"))
    assert any("minicache.arithmetic.arithmetic has changed" in line for line in drifted(toys.workspace))


def test_restoring_keeps_a_copy_of_what_was_edited(toys: Toys) -> None:
    written = restore(toys.workspace, toys.phase)
    copy = written[toys.color]
    assert copy is not None
    assert copy.read_text(encoding="utf-8") == COLOR
    assert copy.is_relative_to(toys.workspace.state / "backups" / "toys")
    assert toys.color.read_text(encoding="utf-8") == starter(toys.phase, "minicache.palette")
    assert restore(toys.workspace, toys.phase) == {}


def test_restoring_twice_in_a_row_keeps_both_copies(toys: Toys) -> None:
    first = restore(toys.workspace, toys.phase)[toys.color]
    toys.write(color="# second try\n")
    second = restore(toys.workspace, toys.phase)[toys.color]
    assert first is not None
    assert second is not None
    assert (first.read_text(), second.read_text()) == (COLOR, "# second try\n")


def test_one_file_can_be_restored_alone(toys: Toys) -> None:
    before = toys.nbytes.read_text()
    assert list(restore(toys.workspace, toys.phase, ["minicache.palette"])) == [toys.color]
    assert toys.nbytes.read_text() == before


def test_without_a_copy_nothing_is_overwritten(toys: Toys) -> None:
    toys.workspace.state.write_text("a file where the folder should be")
    with pytest.raises(CourseError, match="nothing was reset"):
        restore(toys.workspace, toys.phase)
    assert toys.color.read_text(encoding="utf-8") == COLOR


def test_an_untouched_starter_is_not_edited(toys: Toys) -> None:
    write_all(toys.workspace)
    assert not is_edited(toys.workspace, toys.phase, "minicache.palette")
    toys.write(color=COLOR)
    assert is_edited(toys.workspace, toys.phase, "minicache.palette")
