"""`minicache verify`: a table of what was explored, and the story of a scheduler that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from minicache.errors import UnsupportedSchedulerError
from minicache_cli.commands import app
from minicache_course.arena import baselines
from minicache_course.arena.loop import PolicyRefusedError

FORGETFUL = """
from minicache.scheduler import PagedScheduler


class Forgetful(PagedScheduler):
    def preempt(self, request, output):
        super().preempt(request, output)
        self.waiting.remove(request)


def create(arena):
    return Forgetful(**arena.options)
"""


def test_the_reference_breaks_no_rule() -> None:
    result = CliRunner().invoke(app, ["verify", "--scheduler", "static", "--requests", "2", "--blocks", "3"])
    assert result.exit_code == 0, result.output
    assert "No rule is broken" in result.output


def test_a_wrong_scheduler_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "forgetful.py"
    file.write_text(FORGETFUL, encoding="utf-8")
    result = CliRunner().invoke(app, ["verify", "--requests", "2", "--blocks", "3", str(file)])
    assert result.exit_code == 1
    assert "A server with 3 blocks of 2 tokens, 2 batch slots, at most 6 tokens a step." in result.output
    assert "5. Step 1 is scheduled" in result.output
    assert "→ nothing_is_lost: request 1" in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--scheduler", "magic"], "no scheduler 'magic'"),
    ],
)
def test_what_cannot_be_explored(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty.py").write_text("", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["verify", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert said in result.output


@pytest.mark.parametrize(
    ("arguments", "error"), [(["--scheduler", "async"], UnsupportedSchedulerError), (["empty.py"], PolicyRefusedError)]
)
def test_what_is_refused(
    arguments: list[str], error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty.py").write_text("", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert isinstance(CliRunner().invoke(app, ["verify", *arguments]).exception, error)


@pytest.mark.parametrize(("name", "said"), [("multilevel", "No rule is broken"), ("least_slack", "A rule is broken")])
def test_a_policy_of_the_arena(name: str, said: str) -> None:
    """One sets options itself; one has an order of its own, which no compatibility class limits."""
    file = Path(baselines.__file__).with_name(f"{name}.py")
    result = CliRunner().invoke(app, ["verify", "--requests", "2", "--blocks", "3", str(file)])
    assert said in result.output, result.exception
