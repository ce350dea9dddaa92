"""The scan notes what a lab has no business with, and nothing in a right solution."""

from __future__ import annotations

from pathlib import Path

import pytest

from minicache_course.starters import starter
from minicache_course.table import Phase
from minicache_course.workspace import open_workspace, reference_file
from minicache_course.wrong import load_wrong
from minicache_teach.scan import scan

WORKSPACE = open_workspace(Path(__file__).parents[2])
PHASES = [phase for phase in WORKSPACE.course if phase.tasks]


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.folder)
def test_nothing_is_unusual_in_what_a_learner_may_write(phase: Phase) -> None:
    """The reference, and every wrong solution in earnest."""
    for module in phase.files:
        reference = reference_file(module).read_bytes()
        assert scan(reference, reference) == []
    for wrong in load_wrong(WORKSPACE, phase):
        if "__import__" in wrong.replace:  # a replacement has no other place for an import
            continue
        assert scan(wrong.source().encode(), reference_file(wrong.module).read_bytes()) == [], wrong.story


def test_nothing_is_unusual_in_a_starter() -> None:
    phase = WORKSPACE.course.phase(7)  # the one whose starters have bugs to mend, instead of nothing
    for module in phase.files:
        assert scan(starter(phase, module).encode(), reference_file(module).read_bytes()) == []


ORDINARY = '''
from __future__ import annotations
import math
import itertools as it
from collections import defaultdict, deque
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from typing import TYPE_CHECKING, NamedTuple
import torch
from torch import Tensor, nn
import torch.nn.functional as F
from .dense import KVCache
from minicache.memory.blocks import BlockPool

TABLE = {"float16": 2, "float32": 4}

@dataclass
class Thing:
    """A thing, of __class__ and exec in words."""
    size: int = 0

    def __post_init__(self):
        object.__setattr__(self, "size", self.size + 1)

    def __repr__(self):
        return f"{self.__class__.__name__}({self.size})"

    def grow(self, *args, **kwargs):
        print("growing", *args)
        for name in ("size", "other"):
            setattr(self, name, getattr(self, name, 0) + 1)
        compiled = torch.no_grad()
        with compiled:
            self.cache.k[0] = torch.zeros(3)
        return max(range(10), key=lambda i: -i)

def closure():
    n = 0
    def inner():
        nonlocal n
        n += 1
        return n
    return inner
'''


def test_nothing_is_unusual_in_ordinary_code() -> None:
    assert scan(ORDINARY.encode()) == []
    assert scan(ORDINARY.replace("\n", "\r\n").encode()) == []


@pytest.mark.parametrize(
    ("line", "note"),
    [
        ("import os", "imports os (line 2)"),
        ("import os.path as p, sys", "imports os.path (line 2)"),
        ("from subprocess import run", "imports subprocess (line 2)"),
        ("import _pytest.runner", "imports _pytest.runner (line 2)"),
        ("import minicache_course.checks", "imports minicache_course.checks (line 2)"),
        ("from minicache_course import checks", "imports minicache_course (line 2)"),
        ("from minicache_course.checks import that", "imports minicache_course.checks (line 2)"),
        ("from ..checks import that", "imports ..checks (line 2)"),
        ("from types import CodeType", "imports types.CodeType (line 2)"),
        ("if True:\n    def f():\n        import ctypes", "imports ctypes (line 4)"),
        ("exec('x')", "calls exec (line 2)"),
        ("run = eval", "calls eval (line 2)"),
        ("open('/etc/passwd')", "calls open (line 2)"),
        ("__import__('o' + 's')", "__import__ with a computed name (line 2)"),
        ("getattr(torch, 'eq' + 'ual')", "getattr with a computed name (line 2)"),
        ("getattr(torch, ''.join(['e', 'q']))", "getattr with a computed name (line 2)"),
        ("globals()['x'] = 1", "calls globals (line 2)"),
        ("().__class__.__base__.__subclasses__()", "uses __subclasses__ (line 2)"),
        ("torch.equal.__globals__", "uses __globals__ (line 2)"),
        ("torch.equal = None", "sets torch.equal (line 2)"),
        ("torch.Tensor.double = None", "sets torch.Tensor.double (line 2)"),
        ("setattr(torch, 'equal', None)", "sets attributes of torch (line 2)"),
        ("class A:\n    def __eq__(self, other): return True", "defines __eq__ (line 3)"),
        ("class A:\n    __class__ = int", "defines __class__ (line 3)"),
        ("x = '__globals__'", "has the string '__globals__' (line 2)"),
        (f"x = {list(range(200))}", "has a table of 200 constants (line 2)"),
        ("exec(1)\n" * 5, "calls exec (lines 2, 3, 4 …)"),
    ],
)
def test_what_is_noted(line: str, note: str) -> None:
    assert note in scan(f"import torch\n{line}\n".encode())


def test_what_another_file_does_is_not_noted() -> None:
    assert scan(b"import os\nimport sys\n", b"import sys\n") == ["imports os (line 1)"]


@pytest.mark.timeout(20)
def test_a_file_that_python_would_take_minutes_for_is_not_read() -> None:
    notes = scan(b"import os\nf'" + b"{x}" * 300_000 + b"'")
    assert notes == ["has 900,013 bytes, too many to look for unusual imports and calls"]


@pytest.mark.parametrize("source", [b"def f(:", b"a\0b", b"\xff\xfe", b"-" * 100_000 + b"1", b"a" + b"()" * 50_000])
def test_a_file_that_is_no_python_has_no_notes(source: bytes) -> None:
    assert scan(source) == []
