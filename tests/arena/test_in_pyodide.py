"""The score in a browser's Python: the same, to the last bit."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from scripts.browser import build, course

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAM = """
import json
from minicache_course.arena import fleet
from minicache_course.arena.baselines import text_of
from minicache_course.arena.record import as_record
from minicache_course.arena.score import score
from minicache_course.arena.workloads import WORKLOADS
given = [(each.name, each.rates[1], each.sessions(1, 7)[:60]) for each in WORKLOADS]
for name in ("multilevel", "least_slack"):
    print(json.dumps(as_record(score(text_of(name), given=given), "1", name)))
sent = fleet.requests_of(2, 7)[:200]
print(fleet.checked_run(text_of("fleet_affinity"), sent)[1], fleet.bound(sent))
"""


def test_it_is_that_of_this_python(tmp_path):
    pyodide = build.CACHE / "npm" / "node_modules" / "pyodide"
    if not shutil.which("node") or not pyodide.is_dir():
        pytest.skip("no Pyodide: build the site once, `make docs`")
    archive, program = tmp_path / "minicache.zip", tmp_path / "program.py"
    archive.write_bytes(build.archive(course.package_files(course.PURE)))
    program.write_text(PROGRAM)
    script = Path(__file__).with_name("pyodide.mjs")
    command = ["node", script, pyodide, archive, program]
    theirs = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ours = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True).stdout
    assert theirs == ours
    assert theirs.count("\n") == 3
