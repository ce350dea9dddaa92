"""Points for a class's policies: a curve, a sandbox, a CSV."""

from __future__ import annotations

import csv

import pytest
from typer.testing import CliRunner

from minicache_cli import app
from minicache_course.errors import CourseError
from minicache_teach.arena import mark, points, read_curve

CURVE = read_curve("40:0,70:6,85:10")


@pytest.mark.parametrize(("score", "wanted"), [(0, 0), (40, 0), (55, 3), (70, 6), (77.5, 8), (85, 10), (100, 10)])
def test_points_lie_on_the_curve(score, wanted):
    assert points(score, CURVE) == pytest.approx(wanted)


@pytest.mark.parametrize("text", ["", "40", "40:0,30:6", "40:6,70:0", "a:b"])
def test_another_text_is_no_curve(text):
    with pytest.raises(CourseError, match="curve"):
        read_curve(text)


def test_refused_and_endless_policies_get_no_points_and_a_note(tmp_path):
    (tmp_path / "ada.py").write_text("import os\n")
    (tmp_path / "bob.py").write_text("while True:\n    pass\n")
    command = ["arena", "grade", str(tmp_path), "--curve", "40:0,80:10", "--csv", str(tmp_path / "points.csv")]
    done = CliRunner().invoke(app, [*command, "--timeout", "15"])
    assert done.exit_code == 0, done.output
    with (tmp_path / "points.csv").open() as stream:
        ada, bob = csv.DictReader(stream)
    assert (ada["student"], ada["points"], ada["score"]) == ("ada", "0", "")
    assert "line 1: os is not allowed" in ada["note"]
    assert bob["note"] == "not finished after 15 seconds"


@pytest.mark.slow
def test_a_policy_gets_the_points_of_its_score(tmp_path):
    file = tmp_path / "ada.py"
    file.write_text(
        "from minicache.fleet import Autoscaler, RoundRobinRouter\n"
        "def create(arena):\n    return RoundRobinRouter(), Autoscaler(target_unfinished=24)\n"
    )
    found = mark(file, CURVE, league="fleet", seed=3, timeout=300)
    assert found.score is not None
    assert found.points == round(points(found.score, CURVE), 1)
