"""Whatever a learner's file does, it costs the tasks in that file and no others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
from tests.toys import COLOR, NBYTES, Toys

from minicache_course import grading
from minicache_course.errors import CourseError
from minicache_course.results import Outcome, PhaseResult
from minicache_course.server import PytestServer

Grade = Callable[..., PhaseResult]


@pytest.fixture(scope="module")
def server() -> Iterator[PytestServer]:
    with PytestServer() as started:
        yield started


@pytest.fixture
def grade(server: PytestServer) -> Grade:
    """`grade` with one server for all of these tests: what one run does to its process is nothing to the next."""
    return partial(grading.grade, server=server)


def test_a_grading_starts_a_server_of_its_own(toys: Toys) -> None:
    assert grading.grade(toys.workspace, toys.phase).passed


def outcomes(result: PhaseResult) -> list[Outcome]:
    return [task.outcome for task in result.tasks]


def test_a_right_solution_earns_all_points(toys: Toys, grade: Grade) -> None:
    result = grade(toys.workspace, toys.phase)
    assert outcomes(result) == [Outcome.PASSED, Outcome.PASSED]
    assert (result.earned, result.points, result.passed, result.problems) == (100, 100, True, {})


def test_a_wrong_solution_fails_its_task_and_says_how(toys: Toys, grade: Grade) -> None:
    toys.write(nbytes=NBYTES.replace("return 2", "print('hello'); return 4"))
    result = grade(toys.workspace, toys.phase)
    assert outcomes(result) == [Outcome.PASSED, Outcome.FAILED]
    assert result.earned == 30 + 35  # the points of a task are shared among its tests
    problem = result.tasks[1].first_problem
    assert problem is not None
    for text in ("checks    A float16 takes two bytes", "dtype_nbytes('float16')"):
        assert text in problem.message
    assert "got       4" in problem.message
    assert "expected  2" in problem.message
    assert problem.printed == "hello\n"


def test_the_learners_line_is_shown(toys: Toys, grade: Grade) -> None:
    toys.write(nbytes="def dtype_nbytes(dtype):\n    return {}[dtype]\n")
    problem = grade(toys.workspace, toys.phase, task=2).tasks[0].first_problem
    assert problem is not None
    assert "KeyError: 'float16'" in problem.message
    assert "labs/phase-00-toys/arithmetic/arithmetic.py:2: return {}[dtype]" in problem.message


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "def dtype_nbytes(dtype)\n    return 2\n",
            "SyntaxError: expected ':'\n"
            "at        labs/phase-00-toys/arithmetic/arithmetic.py:1\n"
            "          def dtype_nbytes(dtype)",
        ),
        ("import nothing_of_that_name\n", "nothing_of_that_name"),
        ("x = 1 / 0\n", "ZeroDivisionError"),
        ("import sys\nsys.exit(0)\n", "SystemExit"),
        ("def other():\n    pass\n", "does not define dtype_nbytes"),
    ],
    ids=["syntax", "import", "exception", "exit", "renamed"],
)
def test_a_file_that_cannot_be_imported(toys: Toys, grade: Grade, source: str, reason: str) -> None:
    toys.write(nbytes=source)
    result = grade(toys.workspace, toys.phase)
    assert outcomes(result) == [Outcome.PASSED, Outcome.FAILED]
    assert reason in result.problems["minicache.arithmetic.arithmetic"]
    assert all(reason in test.message for test in result.tasks[1].tests)


def test_a_missing_file(toys: Toys, grade: Grade) -> None:
    toys.nbytes.unlink()
    result = grade(toys.workspace, toys.phase)
    assert outcomes(result) == [Outcome.PASSED, Outcome.FAILED]
    assert result.problems["minicache.arithmetic.arithmetic"] == (
        "labs/phase-00-toys/arithmetic/arithmetic.py is not there: rename it back, or "
        "`minicache reset 0 --file arithmetic/arithmetic.py`"
    )


def test_a_broken_file_is_blamed_on_itself_not_on_who_imports_it(toys: Toys, grade: Grade) -> None:
    toys.write(color="from minicache.arithmetic.arithmetic import dtype_nbytes\n" + COLOR, nbytes="syntax error\n")
    result = grade(toys.workspace, toys.phase)
    assert outcomes(result) == [Outcome.PASSED, Outcome.FAILED]
    assert list(result.problems) == ["minicache.arithmetic.arithmetic"]


@pytest.mark.parametrize(
    ("body", "outcome", "reason"),
    [
        ("import time; time.sleep(60)", Outcome.STALLED, "endless wait? No answer within 1 s"),
        ("import os; os._exit(0)", Outcome.CRASHED, "exited (exit code 0)"),
        ("import ctypes; ctypes.string_at(0)", Outcome.CRASHED, "Segmentation fault"),
    ],
    ids=["loop", "exit", "segfault"],
)
def test_a_file_that_takes_the_process_down(toys: Toys, grade: Grade, body: str, outcome: Outcome, reason: str) -> None:
    toys.write(color=COLOR.replace("    return", f"    if role == 'prompt':\n        {body}\n    return"))
    result = grade(toys.workspace, toys.phase, timeout=1)
    assert outcomes(result) == [outcome, Outcome.PASSED]
    (lost,) = result.tasks[0].tests
    assert (lost.title, lost.outcome) == ("A prompt token is yellow.", outcome)
    assert reason in lost.message
    if "_exit" not in body:  # which leaves no time to say where
        assert f"labs/phase-00-toys/palette.py:3: {body}" in lost.message


DRAIN = """def color(role, scheme="light"):
    return drain([role])

def drain(queue):
    while queue:
        for role in queue:
            forget(role)

def forget(role):
    return [role for _ in range(1000)]
"""


def test_a_stall_names_the_loop_and_shows_the_whole_stack(toys: Toys, grade: Grade) -> None:
    toys.write(color=DRAIN)
    problem = grade(toys.workspace, toys.phase, task=1, timeout=0.5).tasks[0].first_problem
    assert problem is not None
    reason, loop, *stack = problem.message.splitlines()
    assert reason.startswith("endless loop?")
    assert loop == "loop      `while queue:` at labs/phase-00-toys/palette.py:5 does not end"
    frames = [line for line in stack if line.startswith(("at  ", "from"))]
    assert frames[-2:] == [
        "from      labs/phase-00-toys/palette.py:2: return drain([role])",
        'from      tests/phase-00-toys/test_task_1_colours.py:7: call(color, "prompt").gives("#F0C808")',
    ]
    assert frames[-3].split(": ")[0] in {f"{label:<10}labs/phase-00-toys/palette.py:{n}" for label, n in LINES}


LINES = [("at", 5), ("at", 6), ("at", 7), ("from", 7)]  # of `drain`, whatever it is about when it is stopped


def test_a_loop_of_the_test_that_a_learner_never_lets_end(toys: Toys, grade: Grade) -> None:
    test = "from minicache.palette import color\n\ndef test_it():\n    while color('end') != 'red':\n        pass\n"
    (toys.tests / "test_task_1_colours.py").write_text(test, encoding="utf-8")
    toys.write(color="def color(role, scheme='light'):\n    return [role for _ in range(1000)]\n")
    problem = grade(toys.workspace, toys.phase, task=1, timeout=0.5).tasks[0].first_problem
    assert problem is not None
    place = "tests/phase-00-toys/test_task_1_colours.py:4"
    assert f"loop      `while color('end') != 'red':` at {place} does not end" in problem.message


def test_a_deep_stack_is_shown_in_part(toys: Toys, grade: Grade) -> None:
    source = "def color(role, scheme='light', n=60):\n    while n == 0: pass\n    return color(role, scheme, n - 1)\n"
    toys.write(color=source)
    problem = grade(toys.workspace, toys.phase, task=1, timeout=0.5).tasks[0].first_problem
    assert problem is not None
    lines = problem.message.splitlines()
    assert lines[1] == "loop      `while n == 0: pass` at labs/phase-00-toys/palette.py:2 does not end"
    assert "from      … 50 more frames" in lines
    assert len(lines) < 20


@pytest.mark.parametrize(
    ("body", "reason"),
    [("import time; time.sleep(60)", "endless wait?"), ("import os; os._exit(0)", "exited (exit code 0)")],
    ids=["loop", "exit"],
)
def test_a_file_that_takes_the_process_down_at_import(toys: Toys, grade: Grade, body: str, reason: str) -> None:
    toys.write(color=f"{body}\n{COLOR}")
    result = grade(toys.workspace, toys.phase, timeout=1)
    assert outcomes(result) == [Outcome.FAILED, Outcome.PASSED]
    assert len(result.tasks[0].tests) == 2
    assert all(reason in test.message for test in result.tasks[0].tests)


def test_what_passed_before_a_crash_is_kept_and_the_rest_of_the_task_not_run(toys: Toys, grade: Grade) -> None:
    with (toys.tests / "test_task_1_colours.py").open("a") as file:
        file.write('\ndef test_more():\n    call(color, "end").gives("#FF7A33")\n')
    toys.write(color=COLOR.replace("    return", "    if scheme == 'dark': import os; os._exit(3)\n    return"))
    graded = grade(toys.workspace, toys.phase).tasks[0]
    tests = {test.title: test.outcome for test in graded.tests}
    assert tests == {"A prompt token is yellow.": Outcome.PASSED, "An ended sequence is red.": Outcome.CRASHED}
    assert (graded.num_passed, graded.num_tests, graded.earned) == (1, 3, 10)


def test_sys_exit_in_a_test_is_a_failure_like_any_other(toys: Toys, grade: Grade) -> None:
    toys.write(color="import sys\ndef color(role, scheme='light'):\n    sys.exit(0)\n")
    assert outcomes(grade(toys.workspace, toys.phase)) == [Outcome.FAILED, Outcome.PASSED]


def test_stopping_pytest_does_not_end_the_grading(toys: Toys, grade: Grade) -> None:
    toys.write(color="def color(role, scheme='light'):\n    raise KeyboardInterrupt\n")
    result = grade(toys.workspace, toys.phase)
    assert outcomes(result) == [Outcome.CRASHED, Outcome.PASSED]


def test_not_written_yet(toys: Toys, grade: Grade) -> None:
    starter = (
        'def dtype_nbytes(dtype):\n    raise NotImplementedError("phase 0, task 2: Bytes; read docs/en/toys.md")\n'
    )
    toys.write(nbytes=starter)
    result = grade(toys.workspace, toys.phase)
    assert outcomes(result) == [Outcome.PASSED, Outcome.NOT_WRITTEN]
    assert "dtype_nbytes is not written yet" in result.tasks[1].tests[0].message


def test_a_task_that_needs_another_says_so(toys: Toys, grade: Grade) -> None:
    starter = (
        'def dtype_nbytes(dtype):\n    raise NotImplementedError("phase 0, task 1: Colours; read docs/en/toys.md")\n'
    )
    toys.write(nbytes=starter)
    result = grade(toys.workspace, toys.phase)
    assert outcomes(result) == [Outcome.PASSED, Outcome.NOT_WRITTEN]
    assert [graded.needs for graded in result.tasks] == ["", "0.1"]
    assert "needs     task 0.1 first" in result.tasks[1].tests[0].message


def test_parameters_belong_to_the_title(toys: Toys, grade: Grade) -> None:
    (toys.tests / "test_task_2_bytes.py").write_text(
        "import pytest\n\n"
        '@pytest.mark.parametrize("n", [1, 2])\ndef test_it(n):\n    """It is so."""\n\n'
        '@pytest.mark.parametrize("n", [3])\ndef test_that(n):\n    pass\n'
    )
    tests = grade(toys.workspace, toys.phase, task=2).tasks[0].tests
    assert [test.title for test in tests] == ["It is so. [1]", "It is so. [2]", "test_that[3]"]


def test_hypothesis_tells_its_example_and_nothing_of_the_grader(toys: Toys, grade: Grade) -> None:
    (toys.tests / "test_task_2_bytes.py").write_text(
        "from hypothesis import given, settings\nfrom hypothesis import strategies as st\n"
        "from minicache.arithmetic.arithmetic import dtype_nbytes\nfrom minicache_course.checks import call\n\n"
        "@settings(database=None)\n@given(n=st.integers(0, 9), text=st.just('a # b'))\ndef test_it(n, text):\n"
        "    call(dtype_nbytes, 'float16').gives(2 if n < 4 else 3)\n"
    )
    problem = grade(toys.workspace, toys.phase, task=2).tasks[0].first_problem
    assert problem is not None
    assert problem.message.splitlines()[-1] == "example   n=4, text='a # b'"


def test_skipped_is_not_graded_and_earns_nothing(toys: Toys, grade: Grade) -> None:
    (toys.tests / "test_task_2_more.py").write_text(
        'import pytest\n\ndef test_more():\n    """Needs a GPU."""\n    pytest.skip("no GPU here")\n'
    )
    result = grade(toys.workspace, toys.phase)
    assert outcomes(result) == [Outcome.PASSED, Outcome.NOT_GRADED]
    assert result.earned == 30 + 70 * 2 // 3
    assert not result.passed
    assert "no GPU here" in result.tasks[1].tests[-1].message


def test_a_task_without_tests_has_failed(toys: Toys, grade: Grade) -> None:
    (toys.tests / "test_task_2_bytes.py").write_text("")
    result = grade(toys.workspace, toys.phase)
    assert outcomes(result) == [Outcome.PASSED, Outcome.FAILED]
    assert not result.passed


def test_a_test_file_that_cannot_be_imported_fails_its_task(toys: Toys, grade: Grade) -> None:
    (toys.tests / "test_task_2_bytes.py").write_text("from minicache.arithmetic.arithmetic import no_such_name\n")
    result = grade(toys.workspace, toys.phase)
    assert outcomes(result) == [Outcome.PASSED, Outcome.FAILED]
    assert "no_such_name" in result.tasks[1].tests[0].message


def test_one_task(toys: Toys, grade: Grade) -> None:
    toys.write(color="syntax error\n")
    result = grade(toys.workspace, toys.phase, task=2)
    assert [task.task.number for task in result.tasks] == [2]
    assert result.passed


def test_what_cannot_be_graded_is_refused(toys: Toys, grade: Grade) -> None:
    with pytest.raises(CourseError, match="planned"):
        grade(toys.workspace, toys.workspace.course.phase(1))
    with pytest.raises(CourseError, match="no task 7: there are 1, 2"):
        grade(toys.workspace, toys.phase, task=7)


def test_a_check_is_told_before_an_error_on_the_way_and_with_its_scenario(toys: Toys, grade: Grade) -> None:
    (toys.tests / "test_task_2_bytes.py").write_text(
        "from minicache.arithmetic.arithmetic import dtype_nbytes\n"
        "from minicache_course import scenario\n"
        "from minicache_course.checks import call\n\n"
        "def test_on_the_way():\n    scenario.given('lost')\n    {}[dtype_nbytes('float16')]\n\n"
        "def test_it():\n"
        "    scenario.given('a number')\n"
        "    scenario.done('asked once')\n"
        "    call(dtype_nbytes, 'float16').gives(3)\n"
    )
    problem = grade(toys.workspace, toys.phase, task=2).tasks[0].first_problem
    assert problem is not None
    assert problem.message.splitlines() == [
        "checks    test_it",
        "given     a number",
        "after     asked once",
        "called    dtype_nbytes('float16')",
        "got       2",
        "expected  3",
    ]


def test_a_broken_rule_is_told_before_a_larger_scenario(toys: Toys, grade: Grade) -> None:
    (toys.tests / "test_task_2_bytes.py").write_text(
        "from minicache.arithmetic.arithmetic import dtype_nbytes\n"
        "from minicache.errors import InvariantError\n"
        "from minicache_course.checks import call\n\n"
        "def test_small():\n    raise InvariantError('a block has two owners')\n\n"
        "def test_large():\n    call(dtype_nbytes, 'float16').gives(3)\n"
    )
    problem = grade(toys.workspace, toys.phase, task=2).tasks[0].first_problem
    assert problem is not None
    assert "a block has two owners" in problem.message
