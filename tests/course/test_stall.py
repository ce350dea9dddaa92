"""Telling a stall: which time counts, and which loop does not end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minicache_course.stall import Stopwatch, stacks, where

CODE = """async def serve(queue):
    for item in queue:
        while item:
            item = (
                item
            )

    while True:
        def inner():
            pass
        inner()

def grow(queue):
    for item in queue:
        queue.append(item)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="what a process does is read from /proc")
def test_a_sleeping_process_uses_its_time_and_a_waiting_one_does_not() -> None:
    with subprocess.Popen(["sleep", "60"]) as sleeping:
        its, mine = Stopwatch(sleeping.pid), Stopwatch(os.getpid())
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            its.read()
            time.sleep(0.01)
        sleeping.kill()
    # This process is asked about only while it runs: of the 0.3 s it has computed for a part.
    assert its.read() > 0.2 > mine.read()
    assert its.has_slept
    assert not mine.has_slept
    its.restart()
    assert its.read() < 0.2


def log_of(folder: Path, *samples: list[tuple[str, int, str]]) -> Path:
    log = folder / "log"
    blocks = []
    for number, frames in enumerate(samples):
        head = "Current thread" if number % 2 else "......Thread"
        lines = [f'  File "{folder / file}", line {lineno} in {name}' for file, lineno, name in frames]
        blocks += [f"{head} 0x01 (most recent call first):", *lines, "", "Thread 0x02 (most recent call first):"]
    log.write_text("\n".join(blocks), encoding="utf-8")
    return log


@pytest.mark.parametrize(
    ("linenos", "loop"),
    [
        ([5, 6], "`while item:` at {}:3"),
        ([3, 3], "`while item:` at {}:3"),
        ([11, 9], "`while True:` at {}:8"),
        ([10, 10], None),  # in another function
        ([2, 5], "`for item in queue:` at {}:2"),
        ([5, 11], None),
        ([15, 14], "`for item in queue:` at {}:14"),
        ([99, 99], None),
    ],
)
def test_the_loop_around_all_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linenos: list[int], loop: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(CODE, encoding="utf-8")
    log = log_of(tmp_path, *[[("mine.py", lineno, "f"), ("test.py", 1, "test")] for lineno in linenos])
    told = where(stacks(log), [tmp_path / "mine.py"], tmp_path / "tests")
    named = [line for line in told if line.startswith("loop")]
    assert named == ([] if loop is None else [f"loop      {loop.format('mine.py')} does not end"])


def test_what_a_loop_calls_is_not_blamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(CODE, encoding="utf-8")
    called = [("mine.py", 3, "called"), ("mine.py", 11, "serve")]
    log = log_of(tmp_path, called, called, [("mine.py", 11, "serve")])
    assert where(stacks(log), [tmp_path / "mine.py"], tmp_path / "tests")[0].startswith(
        "loop      `while True:` at mine.py:8"
    )


def test_one_stack_of_a_crash_names_no_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(CODE, encoding="utf-8")
    told = where(stacks(log_of(tmp_path, [("mine.py", 15, "grow")])), [tmp_path / "mine.py"], tmp_path / "tests")
    assert told == ["at        mine.py:15: queue.append(item)"]


def test_a_thread_that_waits_for_the_main_one_is_not_blamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file, log = tmp_path / "mine.py", tmp_path / "log"
    file.write_text(CODE, encoding="utf-8")
    threads = [
        f'Thread {thread} (most recent call first):\n  File "{file}", line {lineno} in {name}\n'
        for thread, lineno, name in (("0x01", 3, "serve"), ("0x02", 15, "grow"))
    ]
    log.write_text("\n".join(2 * threads), encoding="utf-8")
    assert (
        where(stacks(log), [file], tmp_path / "tests")[0] == "loop      `for item in queue:` at mine.py:14 does not end"
    )
