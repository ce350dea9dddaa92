"""The similarity report: copies are found under other names, the starter does not count, the page is safe."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from minicache_cli.commands import app
from minicache_course.starters import starter
from minicache_course.workspace import open_workspace, reference_file

WORKSPACE = open_workspace(Path(__file__).parents[2])
PHASE = WORKSPACE.course.phase(1)
ATTENTION = "minicache.cache.attention"

OTHER = """
import torch

def causal_attention(q, k, v, window=None):
    out = torch.zeros_like(q)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            kh = h // (q.shape[1] // k.shape[1])
            for t in range(q.shape[2]):
                end = k.shape[2] - q.shape[2] + t + 1
                start = 0 if window is None else max(0, end - window)
                logits = (k[b, kh, start:end] * q[b, h, t]).sum(-1) / q.shape[3] ** 0.5
                out[b, h, t] = (logits.softmax(0)[:, None] * v[b, kh, start:end]).sum(0)
    return out
"""


def renamed(source: str) -> str:
    """The same code with other names, other comments, and its lines ended as on Windows."""
    for name, other in (("scores", "points"), ("weights", "w"), ("group", "g"), ("num_tokens", "length")):
        source = re.sub(rf"\b{name}\b", other, source)
    return source.replace("\n", "  # all my own work\r\n", 3)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINICACHE_ROOT", str(WORKSPACE.root))
    monkeypatch.chdir(tmp_path)
    source = reference_file(ATTENTION).read_text(encoding="utf-8")
    texts = {
        "ada": source,
        "bob <b>": renamed(source) + "\nx = '</pre><script>alert(1)</script>'\n",
        "cy": OTHER,
        "dee": starter(PHASE, ATTENTION),
        "eve": starter(PHASE, ATTENTION),
        "=flo": "",
    }
    for student, text in texts.items():
        file = tmp_path / "class" / student / "attention.py"
        file.parent.mkdir(parents=True)
        file.write_text(text, encoding="utf-8", newline="")
    (tmp_path / "class" / "eve" / "dense.py").write_bytes(b"\xe9")
    return tmp_path / "class"


def test_copies_are_found_and_the_starter_is_left_out(folder: Path) -> None:
    pytest.importorskip("copydetect")
    done = CliRunner().invoke(app, ["similarity", "class", "--phase", "1", "--html", "s.html", "--csv", "s.csv"])
    assert done.exit_code == 0, done.output
    assert "eve: dense.py is omitted" in done.output
    assert "15 pairs in s.html, s.csv" in done.output
    with Path("s.csv").open(encoding="utf-8-sig", newline="") as stream:
        rows = list(csv.DictReader(stream))
    first = rows[0]
    assert (first["student_a"], first["student_b"]) == ("ada", "bob <b>")
    assert int(first["percent_a"]) > 90
    alike = {
        frozenset((row["student_a"], row["student_b"])): max(int(row["percent_a"]), int(row["percent_b"]))
        for row in rows
    }
    assert alike[frozenset(("dee", "eve"))] == 0
    assert alike[frozenset(("ada", "cy"))] < 50
    assert {name.startswith("'=") for pair in alike for name in pair if "flo" in name} == {True}
    page = Path("s.html").read_text(encoding="utf-8")
    assert "<mark>" in page
    assert "<script>" not in page
    assert "bob &lt;b&gt;" in page
    assert "Content-Security-Policy" in page


@pytest.mark.slow
def test_the_report_is_the_same_in_every_process(folder: Path) -> None:
    """The fingerprints are Python's hashes of texts, which each process has others of."""
    pytest.importorskip("copydetect")
    written = []
    for seed in ("1", "2"):
        command = [sys.executable, "-c", "from minicache_cli import main; main()", "similarity", "class"]
        environment = os.environ | {"PYTHONHASHSEED": seed}
        subprocess.run([*command, "--phase", "1", "--csv", "s.csv"], env=environment, check=True, capture_output=True)
        written.append(Path("s.csv").read_text(encoding="utf-8-sig"))
    assert written[0] == written[1]


def test_without_copydetect_it_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "copydetect", None)
    done = CliRunner().invoke(app, ["similarity", "class", "--phase", "1"])
    assert done.exit_code == 1
    assert "pip install 'minicache-course[teach]'" in str(done.exception)
