"""Traces: files with the columns of Azure's and Mooncake's."""

from __future__ import annotations

import json

import pytest

from minicache_course.arena.baselines import text_of
from minicache_course.arena.score import score
from minicache_course.arena.traces import read_trace
from minicache_course.errors import CourseError

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,110,27
2023-11-16 18:17:04.7799600,110,200
2023-11-16 18:19:00.0000000,110,27
"""

MOONCAKE = [
    {"timestamp": 27482, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 2353]},
    {"timestamp": 30535, "input_length": 1472, "output_length": 126, "hash_ids": [46, 47, 2366]},
]


def test_azure(tmp_path):
    file = tmp_path / "code.csv"
    file.write_text(AZURE)
    name, rate, sessions = read_trace(file)
    assert (name, rate) == ("code", 3 / 30)
    assert [each.start for each in sessions] == [0.0, 0.052, 0.8]  # the fourth comes after the window
    assert [len(each.turns[0].prompt) for each in sessions] == [4808, 110, 110]
    assert [each.turns[0].length for each in sessions] == [10, 27, 200]
    assert sessions[1].turns[0].prompt != sessions[2].turns[0].prompt


def test_mooncake(tmp_path):
    file = tmp_path / "toolagent.jsonl"
    file.write_text("\n".join(map(json.dumps, MOONCAKE)) + "\n")
    _, _, (one, two) = read_trace(file)
    assert (one.start, two.start) == (0.0, 3.053)
    assert (len(one.turns[0].prompt), len(two.turns[0].prompt)) == (1100, 1472)
    assert one.turns[0].prompt[:1024] == two.turns[0].prompt[:1024]
    assert one.turns[0].prompt[1024:] != two.turns[0].prompt[1024:1100]


def test_a_policy_is_scored_on_one(tmp_path):
    file = tmp_path / "code.csv"
    file.write_text(AZURE)
    [cell] = score(text_of("chunked"), given=[read_trace(file)]).cells
    assert (cell.workload, cell.num_requests, cell.bound) == ("code", 3, 3)


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", '{"timestamp": 3}\n', "{\n", AZURE.replace("4808", "many")])
def test_another_file_is_none(text, tmp_path):
    (tmp_path / "trace").write_text(text)
    with pytest.raises(CourseError, match="trace"):
        read_trace(tmp_path / "trace")
