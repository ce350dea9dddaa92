"""Grade a learner's files in a page: one run of pytest inside the page's Python, told to the page as it goes.

The page ends a worker whose run is lost (an endless loop) and starts another, which gets what the runs before it
said: as `minicache grade` does with processes (`minicache_course.grading`), and with the same record and account.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from types import CodeType
from typing import Any

from minicache_course.account import account
from minicache_course.journal import Event, Job, Journal
from minicache_course.language import joined, remember
from minicache_course.record import Record
from minicache_course.results import Outcome
from minicache_course.stall import Stack, where
from minicache_course.workspace import open_workspace

Post = Callable[[object], None]

_PLUGINS = ("minicache_course.plugin", "_hypothesis_pytestplugin")
_NUM_STACKS = 5  # of a run that gives no sign of life
_BETWEEN = 0.01  # seconds between two of them
_NUM_JUMPS = 256  # between two looks at the clock


def prepare() -> None:
    """Import what a run needs, before it is asked for: it takes as long as Python takes to start."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    for name in ("pytest", "hypothesis", *_PLUGINS, "minicache_course.session"):
        import_module(name)


def grade(asked: Mapping[str, Any], post: Post, root: Path = Path("/course")) -> None:
    """Grade files of a phase. Once only: what is imported stays, so the next grading needs another Python.

    Args:
        asked: `phase`, its number; `task`, a task's number, or None for all; `files`, path → content, the path as it is
            in a clone; `told`, what the runs before this one have told: the events that were posted, in their order.
        post: is given `{"patience": seconds}` when the run begins, `{"event": …}` for each event, and at the end either
            `{"account": …, "passed": [task id]}`, or `{"event": …}` of kind "lost": then another Python has to go on.
        root: the course.
    """
    for path, content in asked["files"].items():
        (root / path).write_text(content, encoding="utf-8")
    os.chdir(root)
    workspace = open_workspace(root)
    record = Record(workspace, workspace.course.phase(asked["phase"]), asked["task"])
    for told in asked["told"]:
        event = Event(**told)
        remember(event.shown)
        if event.kind == "lost":
            record.lose(Outcome(event.outcome), event.message)
        else:
            record.hear(event)

    def lost(outcome: Outcome, reason: str) -> None:
        post({"event": asdict(record.lose(outcome, reason))})

    def stalled(stacks: list[Stack]) -> None:
        places = where({"": stacks}, record.files.values(), record.tests)
        lost(Outcome.STALLED, joined("\n", [record.no_answer(), *places]))

    watch = Watch(root, record.patience, stalled)

    def tell(event: Event) -> None:
        record.hear(event)
        post({"event": asdict(event)})
        watch.restart()

    post({"patience": record.patience})
    job = record.begin(Job(record.arguments(), str(root), events="page"))
    import pytest

    plugins = [sys.modules[name] for name in _PLUGINS]
    with watch:
        code = pytest.main(job.arguments, [*plugins, Journal(job, tell)])
    if record.is_complete:
        result = record.result()
        passed = [graded.task.id for graded in result.tasks if graded.outcome is Outcome.PASSED]
        post({"account": asdict(account(result)), "passed": passed})
    elif record.culprit:
        lost(Outcome.CRASHED, "pytest was stopped")
    else:
        raise RuntimeError(f"pytest could not grade: exit code {code}")


class Watch:
    """Sees, from inside, that a run gives no sign of life: by the jumps of its loops. A context manager.

    A page cannot ask a worker that computes where it is. A call into C that does not return makes no jumps: then the
    page ends the worker, without knowing where.

    Args:
        root: the course; loops elsewhere do not count.
        patience: seconds without a sign of life that a run has.
        stalled: is given a few stacks then, once.
    """

    def __init__(self, root: Path, patience: float, stalled: Callable[[list[Stack]], None]) -> None:
        self._folders = tuple(f"{root}/{folder}/" for folder in ("labs", "tests", "src"))
        self._patience = patience
        self._stalled = stalled
        self._stacks: list[Stack] = []
        self._num_jumps = 0
        self.restart()

    def restart(self) -> None:
        """There was a sign of life."""
        self._stacks.clear()
        self._look_at = time.monotonic() + self._patience

    def __enter__(self) -> None:
        if sys.version_info >= (3, 12):
            sys.monitoring.use_tool_id(sys.monitoring.DEBUGGER_ID, "minicache")
            sys.monitoring.register_callback(sys.monitoring.DEBUGGER_ID, sys.monitoring.events.JUMP, self._jumped)
            self._settrace = sys.settrace
            sys.settrace = self._trace
            self._listen(True)

    def __exit__(self, *error: object) -> None:
        if sys.version_info >= (3, 12):
            self._listen(False)
            sys.settrace = self._settrace
            sys.monitoring.free_tool_id(sys.monitoring.DEBUGGER_ID)

    if sys.version_info >= (3, 12):

        def _listen(self, on: bool) -> None:
            sys.monitoring.set_events(sys.monitoring.DEBUGGER_ID, sys.monitoring.events.JUMP if on else 0)

        def _trace(self, function: Any) -> None:
            """`sys.settrace`, without listening while something is traced: tests count the instructions of a call."""
            if function:
                self._listen(False)
            self._settrace(function)
            if not function:
                self._listen(True)

        def _jumped(self, code: CodeType, offset: int, destination: int) -> object:
            if not code.co_filename.startswith(self._folders):
                return sys.monitoring.DISABLE
            self._num_jumps += 1
            if self._num_jumps % _NUM_JUMPS == 0 and time.monotonic() > self._look_at:
                self._take_stack()
            return None

    def _take_stack(self) -> None:
        stack: Stack = []
        frame = sys._getframe(2)  # the one that has jumped
        while frame:
            stack.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back  # type: ignore[assignment]
        self._stacks.append(stack)
        self._look_at = time.monotonic() + _BETWEEN
        if len(self._stacks) == _NUM_STACKS:
            self._look_at = float("inf")
            self._stalled(self._stacks)
