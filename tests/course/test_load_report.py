"""`minicache check-report`: a load test of a learner's server, held to limits and to the learner's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.toys import Toys
from typer.testing import CliRunner

from minicache.errors import MinicacheError
from minicache_cli import app
from minicache_course.workspace import fingerprint


def report(toys: Toys, **changes: Any) -> Path:
    numbers = {"num_ok": 32, "num_requests": 32, "ttft": {"p99": 1.5}, "tpot": {"p99": 0.09}}
    files = {"minicache.palette": fingerprint(toys.color)}
    settings = {"server": {"version": "1", "lab_files": changes.pop("files", files)}}
    file = toys.workspace.root / "report.json"
    file.write_text(json.dumps({"settings": settings, "report": numbers | changes}))
    return file


def check(*arguments: str | Path, status: int = 0) -> str:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["check-report", *map(str, arguments)])
    if isinstance(result.exception, MinicacheError):
        raise result.exception
    assert result.exit_code == status, result.output
    return result.output


def test_a_report_within_its_limits(toys: Toys) -> None:
    said = check(report(toys))
    assert said == ("32 of 32 answered, TTFT 1.5 s, TPOT 0.09 s (99th percentiles), 1 of the learner's files\n")
    check(report(toys), "--labs", toys.workspace.labs, "--tpot", "0.09")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_ok": 30}, "2 of 32 requests were not answered"),
        ({"ttft": {"p99": 11}}, "of TTFT is 11 s, more than 10 s"),
        ({"tpot": {"p99": float("nan")}}, "of TPOT is nan s, more than 0.5 s"),
        ({"files": {}}, "start it with --mine"),
        ({"files": {"minicache.palette": "ab"}}, "another file than the one in labs/ was minicache.palette"),
        ({"files": {"minicache.cache.dense": "ab"}}, "another file than the one in labs/ was minicache.cache.dense"),
    ],
)
def test_what_falls_short_is_named(toys: Toys, changes: dict[str, Any], says: str) -> None:
    assert says in check(report(toys, **changes), status=1)


@pytest.mark.parametrize("text", ["{}", "no", '{"report": {"num_ok": 1}}'])
def test_another_file_is_refused(toys: Toys, text: str) -> None:
    file = toys.workspace.root / "report.json"
    file.write_text(text)
    with pytest.raises(MinicacheError, match=r"is no report\.json"):
        check(file)
