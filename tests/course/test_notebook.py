"""What notebooks share: whose files run, and what `check` says of an answer."""

import subprocess
import sys

import pytest

pytest.importorskip("matplotlib")

from minicache_course import notebook as nb
from minicache_course.errors import CourseError


def test_a_notebook_runs_the_learners_files_when_asked() -> None:
    code = """
from minicache_course import notebook as nb
nb.begin(0, mine=True)
import minicache.arithmetic.arithmetic as module
print(module.__file__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    *listed, loaded = done.stdout.splitlines()
    assert "labs/phase-00-decode-arithmetic/arithmetic/arithmetic.py" in [line.strip() for line in listed]
    assert loaded.endswith("labs/phase-00-decode-arithmetic/arithmetic/arithmetic.py")


def test_a_module_that_is_imported_already_is_refused_with_the_remedy() -> None:
    import minicache.arithmetic.arithmetic  # noqa: F401

    with pytest.raises(CourseError, match="restart the kernel"):
        nb.begin(0, mine=True)


@pytest.mark.parametrize(
    ("answer", "right", "within", "said"),
    [
        (None, 3, 0, "No answer yet"),
        (3, 3, 0, "Right"),
        (4, 3, 0, "too high"),
        (2, 3, 0, "too low"),
        (1.01, 1.0, 0.02, "Right"),
        (0.97, 1.0, 0.02, "too low"),
        ("fewer", "more", 0, "fewer is not right"),
        ([1], [1, 2], 0, "not right"),
    ],
)
def test_an_answer_is_checked(capsys: pytest.CaptureFixture[str], answer, right, within, said) -> None:
    nb.check(answer, right, within=within)
    assert said in capsys.readouterr().out


def test_a_model_that_is_not_here_is_none_and_a_line(capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert nb.real_model() is None
    assert "minicache pull smollm2" in capsys.readouterr().out


def test_contestants_take_turns_and_the_quickest_run_counts() -> None:
    order: list[str] = []
    found = nb.fastest({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, repeats=3)
    assert order == ["a", "b"] * 3
    assert set(found) == {"a", "b"}
    assert all(0 <= milliseconds < 1000 for milliseconds in found.values())
