"""The score: the same every time, written into a file, and recomputed from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from tests.arena.small import few
from typer.testing import CliRunner

from minicache_cli import app
from minicache_course.arena import score as scoring
from minicache_course.arena.baselines import text_of
from minicache_course.arena.record import as_record, differences, read
from minicache_course.arena.score import Cell, Score, score
from minicache_course.errors import CourseError

LOADS = [("few", 1.0, few()), ("fewer", 0.5, few()[:4])]

RUN = """
import json
from tests.arena.small import few
from minicache_course.arena.baselines import text_of
from minicache_course.arena.record import as_record
from minicache_course.arena.score import score
from minicache_course.arena.workloads import WORKLOADS
given = [("few", 1.0, few()), ("code", 4.0, WORKLOADS[2].sessions(0, 0)[:40])]
print(json.dumps(as_record(score(text_of("least_slack"), given=given), "1", "x")))
"""


@pytest.fixture
def few_loads(monkeypatch):
    monkeypatch.setattr(scoring, "loads", lambda seed: LOADS)


def test_three_processes_have_the_same_score_to_the_last_bit():
    told = set()
    for seed in ("0", "1", "random"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": "."}
        told.add(subprocess.run([sys.executable, "-c", RUN], env=environment, capture_output=True, check=True).stdout)
    [record] = told
    assert len(json.loads(record)["cells"]) == 2


def test_a_score_is_the_mean_share_of_the_bounds():
    cells = [Cell("w", 1.0, 10, good, most, 0.0, 0.0, "") for good, most in ((5, 10), (3, 4), (0, 0))]
    assert Score("", 0, tuple(cells)).percent == pytest.approx(100 * (0.5 + 0.75 + 1) / 3)
    assert cells[0].goodput == 5 / 30


def test_a_file_is_verified_and_what_differs_is_told(few_loads, tmp_path):
    file, policy = tmp_path / "score.json", tmp_path / "policy.py"
    policy.write_text(text_of("chunked"))
    made = CliRunner().invoke(app, ["arena", "run", str(policy), "--out", str(file), "--author", "ada"])
    assert made.exit_code == 0, made.output
    assert read(file)["author"] == "ada"
    verified = CliRunner().invoke(app, ["arena", "verify", str(file), str(policy)])
    assert verified.exit_code == 0, verified.output
    record = json.loads(file.read_text())
    record["cells"][1]["num_good"] += 1
    file.write_text(json.dumps(record))
    refuted = CliRunner().invoke(app, ["arena", "verify", str(file), str(policy)])
    assert refuted.exit_code == 1
    assert "fewer 0.5 num_good" in refuted.output


def test_another_policy_does_not_have_the_score(few_loads):
    claimed = as_record(score(text_of("chunked")), "1", "ada")
    told = differences(claimed, score(text_of("paged")), "1")
    assert any(line.startswith("policy: ") for line in told)
    assert any("schedule" in line for line in told)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "minicache arena 1"}'])
def test_another_file_is_no_score_file(text, tmp_path):
    (tmp_path / "score.json").write_text(text)
    with pytest.raises(CourseError):
        read(tmp_path / "score.json")


def test_a_refused_policy_is_one_line(few_loads, tmp_path):
    (tmp_path / "policy.py").write_text("import time\n")
    refused = CliRunner().invoke(app, ["arena", "run", str(tmp_path / "policy.py")])
    assert f"{tmp_path / 'policy.py'}: refused (import): line 1: time" in str(refused.exception)


def test_no_python_is_named_with_its_line_before_anything_is_served(monkeypatch, tmp_path):
    monkeypatch.setattr(scoring, "loads", lambda seed: pytest.fail("a load was made"))
    (tmp_path / "policy.py").write_text("x = 1\ndef create(arena)\n")
    refused = CliRunner().invoke(app, ["arena", "run", str(tmp_path / "policy.py")])
    assert str(refused.exception) == f"{tmp_path / 'policy.py'}: refused (syntax): line 2: expected ':'"


def test_verifying_another_policy_is_one_line(few_loads, tmp_path):
    (tmp_path / "score.json").write_text(json.dumps(as_record(score(text_of("chunked")), "1", "ada")))
    (tmp_path / "other.py").write_text(text_of("paged"))
    refuted = CliRunner().invoke(app, ["arena", "verify", str(tmp_path / "score.json"), str(tmp_path / "other.py")])
    assert refuted.exit_code == 1
    assert [line for line in refuted.output.splitlines() if line] == [
        f"{tmp_path / 'other.py'} is not the policy that {tmp_path / 'score.json'} is about"
    ]


def test_a_baseline_of_the_other_league_is_refused():
    refused = CliRunner().invoke(
        app, ["arena", "run", "--league", "fleet", "--baseline", "chunked"], env={"COLUMNS": "200"}
    )
    assert refused.exit_code == 2
    assert "fleet_round_robin, fleet_affinity" in refused.output


ENDLESS = """
from minicache.scheduler import ChunkedPrefillScheduler

class Endless(ChunkedPrefillScheduler):
    def head(self):
        while True:
            try:
                pass
            except Exception:
                pass

def create(arena):
    return Endless(**arena.options)
"""


def test_a_call_that_does_not_return_is_stopped(few_loads, monkeypatch, tmp_path):
    monkeypatch.setattr("minicache_cli.arena.LOAD_SECONDS", 0.2)
    (tmp_path / "policy.py").write_text(ENDLESS)
    refused = CliRunner().invoke(app, ["arena", "run", str(tmp_path / "policy.py")])
    assert "refused (endless): few at 1.0 sessions/s: line " in str(refused.exception)
    assert "a call has not returned after 0.2 s of computing" in str(refused.exception)
