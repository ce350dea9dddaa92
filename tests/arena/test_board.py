"""The board: a page of score files, in their order, with their policies."""

from __future__ import annotations

import json

import pytest
from bs4 import BeautifulSoup
from typer.testing import CliRunner

from minicache_cli import app
from minicache_cli.board import entries
from minicache_course.arena.baselines import text_of
from minicache_course.arena.record import as_record
from minicache_course.arena.score import Cell, Score, digest
from minicache_course.errors import CourseError


def put(folder, name, text, num_good, seed=0):
    cells = [Cell(load, rate, 30, num_good, 30, 1.0, 0.05, "ab") for load in ("chats", "code") for rate in (1.0, 2.0)]
    record = as_record(Score(digest(text), seed, tuple(cells)), "1", f"{name} <b>")
    (folder / f"{name}.json").write_text(json.dumps(record))
    (folder / f"{name}.py").write_text(text)


def test_a_page_has_the_best_first_and_links_to_policies(tmp_path):
    put(tmp_path, "ada", text_of("chunked"), 20)
    put(tmp_path, "bob", text_of("paged"), 25)
    (tmp_path / "ada.py").write_text("another policy")
    made = CliRunner().invoke(
        app, ["arena", "board", str(tmp_path), "--out", str(tmp_path / "site"), "--title", "A & B"]
    )
    assert made.exit_code == 0, made.output
    page = BeautifulSoup((tmp_path / "site" / "index.html").read_text(), "html.parser")
    assert page.h1.text == "A & B"
    rows = [[cell.text for cell in row.find_all("td")] for row in page.find_all("tr")[1:]]
    assert [(row[0], row[1].rsplit(" ", 1)[0], row[2]) for row in rows] == [
        ("1", "bob <b>", "83.33 %"),
        ("2", "ada <b>", "66.67 %"),
    ]
    assert [link["href"] for link in page.find_all("a")] == ["policies/bob.py"]  # ada's file is not what was scored
    assert (tmp_path / "site" / "policies" / "bob.py").read_text() == text_of("paged")
    assert page.find("svg")
    assert not page.find_all("script")


def test_scores_of_two_seeds_are_not_one_board(tmp_path):
    put(tmp_path, "ada", text_of("chunked"), 20)
    put(tmp_path, "bob", text_of("paged"), 25, seed=1)
    with pytest.raises(CourseError, match="seeds"):
        entries(tmp_path)


def test_a_folder_without_scores(tmp_path):
    with pytest.raises(CourseError, match="no score files"):
        entries(tmp_path)
