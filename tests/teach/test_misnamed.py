"""Files handed in under another name, or in another encoding: what a teacher and a student read then."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest

from minicache_course.encoding import encoding_fault
from minicache_teach.misnamed import meant_for

WANTED = PurePosixPath("cache/attention.py")


@pytest.mark.parametrize(
    "other",
    [
        "Attention.py",
        "Attention (1).py",
        "attention.py.txt",
        "attention.PY",
        "attention - Copy.py",
        "my_attention.py",
        "attention_final_v2.py",
        "atention.py",
        "attention",
        "homework/attention (2).py",
    ],
)
def test_a_like_name_is_told_with_the_right_one(other: str) -> None:
    found = meant_for(WANTED, ["README.md", "decoding.py", "dense.py", other, "report.pdf"])
    assert found == f"{other} may be the file: rename it to attention.py"


def test_a_notebook_is_told_to_be_one() -> None:
    assert meant_for(WANTED, ["Attention.ipynb"]) == (
        "Attention.ipynb is a notebook: its code must be in a file named attention.py"
    )


@pytest.mark.parametrize("others", [[], ["README.md", "dense.py", "decoding.py", "reservation.py", "kernels/plain.py"]])
def test_another_name_is_not_taken_for_it(others: list[str]) -> None:
    assert meant_for(WANTED, others) == ""


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("x = 1\n# café\n".encode("latin-1"), "is not UTF-8: byte 0xE9 in line 2; save it as UTF-8"),
        ("x = 1\ny = 2\nz = 'é'\n".encode("latin-1"), "is not UTF-8: byte 0xE9 in line 3; save it as UTF-8"),
        ("x = 1\n".encode("utf-16"), "is UTF-16: save it as UTF-8"),
        ("x = 1\n".encode("utf-32"), "is UTF-32: save it as UTF-8"),
        ("x = 1\ny\n".encode("utf-16-le"), "has a null byte in line 1, like UTF-16 or binary files"),
        (b"# coding: klingon\n", "declares an unknown encoding"),
        (b"# coding: ascii\n\n\xc3\xa9\n", "is not ASCII: byte 0xC3 in line 3"),
        ("# café\n".encode(), ""),
        ("# coding: latin-1\n# café\n".encode("latin-1"), ""),
        ("# café\r\n\tx = 1\r\n".encode("utf-8-sig"), ""),
        (b"", ""),
    ],
)
def test_an_encoding_is_told_with_line_and_byte(tmp_path: Path, content: bytes, fault: str) -> None:
    file = tmp_path / "attention.py"
    file.write_bytes(content)
    told = encoding_fault(file)
    assert told.partition("attention.py ")[2].startswith(fault)
    assert bool(told) == bool(fault)
