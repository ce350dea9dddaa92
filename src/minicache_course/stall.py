"""A child that gives no sign of life: how long it has gone on, where it is, and which loop does not end.

Only time that the child computes or sleeps counts, so a correct solution is not ended because the machine is busy with
other things. Where it is, Python's fault handler writes into its log each time it is asked, even while a call into C
does not return. Comparing a few of these stacks tells the frame that loops from those that it calls.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path

from minicache_course.finder import Line, line_of
from minicache_course.language import labelled, said
from minicache_course.workspace import SOURCES

_COURSE = SOURCES / "minicache_course"
_OURS = {SOURCES / "minicache", _COURSE / "incidents", _COURSE / "kernels"}  # what calls a learner's code
_HEADER = re.compile(r"(?:[Tt]hread (0x\w+)|Stack) .*\(most recent call first\):$")  # pytest may have begun the line
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$')
_MAX_NBYTES = 2**20  # at the end of a log, that are read
_MAX_LENGTH = 1000  # of a line there
_MAX_FRAMES = 100  # of a stack; the fault handler writes no more
_MAX_LINES = 12  # of a stack that is shown; a longer one is a recursion, whose middle repeats

Frame = tuple[str, int, str]
"""File, line, and the function's name."""

Stack = list[Frame]
"""The innermost frame first."""


class Stopwatch:
    """How long a process has computed or slept since it was last restarted; waiting for a processor does not count.

    Where the system does not tell (it is not Linux), all time counts. Read it often: it looks at what is so right now.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.restart()

    def restart(self) -> None:
        """Start again at 0."""
        self._seconds = self._computing = 0.0
        self._now = time.monotonic()
        self._computed = _computed(self._pid)

    def read(self) -> float:
        """The seconds so far."""
        now, computed = time.monotonic(), _computed(self._pid)
        slept = 0.0 if _is_runnable(self._pid) else now - self._now
        self._seconds += max(slept, computed - self._computed)
        self._computing += computed - self._computed
        self._now, self._computed = now, computed
        return self._seconds

    @property
    def has_slept(self) -> bool:
        """Whether it has barely computed: it waits for something, perhaps polling."""
        return sys.platform == "linux" and self._computing < 0.1 * self._seconds


def held(pid: int) -> int:
    """Bytes of memory that a process holds; 0 if the system does not tell."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def _computed(pid: int) -> float:
    """Seconds that all threads of a process have computed; 0 if the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _is_runnable(pid: int) -> bool:
    """Whether a thread of the process computes, or would if it got a processor, or its data from the disk."""
    try:
        states = [file.read_text().rpartition(")")[2].split()[0] for file in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:  # a thread has ended just now
        return True
    return any(state in "RD" for state in states)


def stacks(log: Path) -> dict[str, list[Stack]]:
    """What the fault handler wrote into `log`: for each thread its stacks, one each time it was asked."""
    found: dict[str, list[Stack]] = {}
    stack: Stack = []
    for line in _end_of(log).splitlines():
        if len(line) > _MAX_LENGTH or "/.." in line:  # no fault handler's: what is graded writes there, too
            continue
        if header := _HEADER.search(line):
            stack = []
            found.setdefault(header[1], []).append(stack)
        elif (frame := _FRAME.match(line)) and len(stack) < _MAX_FRAMES:
            stack.append((frame[1], int(frame[2]), frame[3]))
    return found


def _end_of(log: Path) -> str:
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - _MAX_NBYTES))
        return stream.read(_MAX_NBYTES).decode("utf-8", errors="replace")


def where(
    stacks: Mapping[str, Sequence[Stack]], files: Collection[Path], tests: Path, *, waiting: bool = False
) -> list[str]:
    """Where in the learner's files a run was that crashed or had to be stopped.

    Args:
        stacks: thread → its stacks, one each time it was looked at.
        files: the learner's files.
        tests: the folder of the tests that called them.
        waiting: whether it slept rather than computed: then no loop is to blame, but what it waits for.

    Returns:
        Lines to tell: the loop that does not end, if there are several stacks to compare; the learner's frames, the
        innermost first, and the line of the test. Nothing if no thread was in the learner's files.
    """
    theirs = {str(file) for file in files}
    for samples in reversed(
        list(stacks.values())
    ):  # the main thread is written last; others may wait for it, as they should
        inside = [stack for stack in samples if any(file in theirs for file, _, _ in stack)]
        if not inside:  # now or when it was asked before: a loop of the test's may call them again and again
            continue
        now, loop = inside[-1], None
        if len(samples) > 1 and not waiting:
            loop = _endless(samples, theirs.__contains__) or _endless(samples, partial(_is_ours, tests))
        told = [labelled("loop", f"`{loop.code}` at {loop.place} does not end")] if loop else []
        outermost = max(place for place, frame in enumerate(now) if frame[0] in theirs)
        shown = [frame for frame in now if frame[0] in theirs]
        shown += [frame for frame in now[outermost:] if tests in Path(frame[0]).parents][:1]
        lines = [str(line_of(file, lineno)) for file, lineno, _ in shown]
        if (num_left_out := len(lines) - _MAX_LINES) > 0:
            half = _MAX_LINES // 2
            lines[half:-half] = [f"… {num_left_out} more frames"]
        return [*told, *(labelled(said("from") if i else said("at"), line) for i, line in enumerate(lines))]
    return []


def _is_ours(tests: Path, file: str) -> bool:
    """Whether a file is a test's or the package's, which calls what learners write until it has done its work."""
    return not {tests, *_OURS}.isdisjoint(Path(file).parents)


def _endless(samples: Sequence[Stack], is_asked: Callable[[str], bool]) -> Line | None:
    """The loop that does not end, in the files that are asked for.

    What differs between the stacks was called by a frame that they share, and that one loops; or one that called it,
    where it has no loop. A `for` ends, as a rule: it is named only if there is no `while`.
    """
    outermost_first = [stack[::-1] for stack in samples]
    together = list(zip(*outermost_first, strict=False))
    shared = list(takewhile(lambda frames: len(set(frames)) == 1, together))
    if len(shared) < len(together) and len({(file, name) for file, _, name in together[len(shared)]}) == 1:
        shared.append(together[len(shared)])  # the same function, at another line: it goes round
    found: list[tuple[str, ast.While | ast.For | ast.AsyncFor]] = []
    for frames in reversed(shared):
        file = frames[0][0]
        if is_asked(file):
            found += [(file, loop) for loop in _loops_around(Path(file), [lineno for _, lineno, _ in frames])]
    for file, loop in [each for each in found if isinstance(each[1], ast.While)] or found:
        return line_of(file, loop.lineno)
    return None


def _loops_around(file: Path, linenos: Sequence[int]) -> list[ast.While | ast.For | ast.AsyncFor]:
    """The loops around all of these lines of one function, the innermost first."""
    try:
        node: ast.AST = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    loops: list[ast.While | ast.For | ast.AsyncFor] = []
    while inner := [each for each in ast.iter_child_nodes(node) if _spans(each, linenos)]:
        node = inner[0]
        if isinstance(node, ast.While | ast.For | ast.AsyncFor):
            loops.insert(0, node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            loops = []
    return loops


def _spans(node: ast.AST, linenos: Sequence[int]) -> bool:
    """Whether all of these lines are the node's."""
    first, last = getattr(node, "lineno", None), getattr(node, "end_lineno", None)
    return first is not None and last is not None and first <= min(linenos) and max(linenos) <= last
