"""What `.github/workflows` runs is there: targets, scripts, and every Python that the package says it supports."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def steps(workflow: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"].values()
    return [step for job in jobs for step in job["steps"]]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda each: each.stem)
def test_what_a_workflow_runs_is_there(workflow: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    commands = [step["run"].split() for step in steps(workflow) if "run" in step]
    for command in commands:
        assert command[1] in targets if command[0] == "make" else (ROOT / command[0]).is_file(), command
    assert commands


def jobs(workflow: str) -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / ".github/workflows" / workflow).read_text(encoding="utf-8"))["jobs"])


def test_the_oldest_python_is_tested() -> None:
    tested = jobs("tests.yml")["tests"]["strategy"]["matrix"]["python"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["requires-python"] == f">={tested[0]}"
    assert tested == sorted(tested, key=lambda each: int(each.split(".")[1]))


def test_only_what_was_rehearsed_is_published() -> None:
    release = jobs("release.yml")
    assert [release[name].get("needs") for name in ("build", "test", "publish", "attach")] == [
        None, "build", "test", "publish",
    ]  # fmt: skip
    assert [step["run"] for step in release["test"]["steps"] if "run" in step] == ["scripts/rehearse.sh"]
    assert release["test"]["strategy"]["matrix"]["python"] == jobs("tests.yml")["tests"]["strategy"]["matrix"]["python"]
    assert [name for name, job in release.items() if "id-token" in job.get("permissions", {})] == ["publish"]
