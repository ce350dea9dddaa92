"""Wrong solutions: how `wrong.toml` is read and how much of a task one of them runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.toys import Toys

from minicache_course.errors import CourseError
from minicache_course.server import PytestServer
from minicache_course.wrong import grade_wrong, load_wrong

WRONG = """
[[wrong]]
in = "minicache.palette:color"
find = "def color("
replace = "def colour("
caught_by = 1
story = "spells it as at home"
"""


@pytest.fixture(scope="module")
def server() -> Iterator[PytestServer]:
    with PytestServer([]) as started:
        yield started


def test_one_failure_is_enough_unless_it_matters_which(toys: Toys, server: PytestServer) -> None:
    (toys.tests / "wrong.toml").write_text(WRONG + WRONG + 'shows = ["colo", "prompt"]\n', encoding="utf-8")
    first, second = load_wrong(toys.workspace, toys.phase)
    assert (first.shows, second.shows) == ((), ("colo", "prompt"))
    num_tests = [len(grade_wrong(toys.workspace, wrong, server).tasks[0].tests) for wrong in (first, second)]
    assert num_tests == [1, 2]


@pytest.mark.parametrize("line", ['shows = [""]', 'shows = "stop"', 'tells = ["stop"]'])
def test_an_entry_that_is_not_understood_is_refused(toys: Toys, line: str) -> None:
    (toys.tests / "wrong.toml").write_text(f"{WRONG}{line}\n", encoding="utf-8")
    with pytest.raises(CourseError, match=line.split()[0]):
        load_wrong(toys.workspace, toys.phase)


@pytest.mark.parametrize(
    ("place", "find", "said"),
    [
        ("minicache.palette:colour", "def", r"'spells it as at home': in minicache\.palette, there is no colour"),
        ("minicache.palette:color", "def shade(", "`find` matches 0 times, not once"),  # it is elsewhere in the module
        ("minicache.palette", "def ", r"`find` matches \d+ times, not once"),
    ],
)
def test_a_mistake_that_is_not_in_its_place_is_refused(toys: Toys, place: str, find: str, said: str) -> None:
    entry = WRONG.replace("minicache.palette:color", place).replace("def color(", find)
    (toys.tests / "wrong.toml").write_text(entry, encoding="utf-8")
    (wrong,) = load_wrong(toys.workspace, toys.phase)
    with pytest.raises(CourseError, match=said):
        wrong.source()
