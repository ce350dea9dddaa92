"""A grading run's input and output: its job, and a pipe of events, one JSON object per line.

Each action is reported before it begins. If the run dies or hangs, the last event shows what it was doing; the parent
records that as lost and starts another run, whose job lists what is done.

The pipe is open to the learner's code too. So each line is signed with a key of this run, and numbered.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from hmac import compare_digest
from hmac import digest as signature
from pathlib import Path
from typing import Literal

from minicache_course.errors import TamperingError

Kind = Literal[
    "import",  # about to import the module `name`
    "file",  # about to collect the test file `name`
    "test",  # about to run the test `name`
    "task",  # the test files of `task` are read: it has `total` tests, those included that ran already
    "collected",  # all test files are read: `total` tests will run
    "control",  # among the tests of `task` is `name`, which has to fail
    "unimportable",  # the module `name` could not be imported: `message`
    "result",  # the test, or test file, `name` is done: `outcome`, `message`, `printed`, `needs`, `distance`
    "lost",  # noted by the owner: the run was lost in `name`, a module or a test of `task`: `message`
    "tampered",  # part of the grader, `name`, has been replaced
    "finished",  # the run came to its end
]

_MAX_LINE_NBYTES = 2**24
_CHUNK_NBYTES = 2**16


@dataclass(frozen=True)
class Event:
    """One line. Which fields are used depends on `kind`; `shown` has its texts in the reader's language."""

    kind: Kind
    name: str = ""
    task: str = ""
    title: str = ""
    outcome: str = ""
    message: str = ""
    printed: str = ""
    needs: str = ""
    distance: int = 0
    total: int = 0
    shown: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """A run's input.

    Attributes:
        arguments: pytest's.
        folder: where it runs.
        events: the named pipe for what it tells.
        key: signs each line, as hexadecimal digits.
        log: the file for its output; "" leaves it where it goes.
        preload: modules to import before any learner's file is.
        done: ids of the tests that have a result.
        lost_tasks: ids of the tasks in which an earlier run was lost: their other tests are not run.
        unusable: module → why the learner's file is not to be imported.
        shown: the texts among these → the same in the reader's language.
        guard: the module that notices tampering and adds a test that has to fail to each task; "" for one's own code.
        user: the user's id to become, from root; −1 to stay.
        limits: name in `resource`, without RLIMIT_ → the most.
    """

    arguments: list[str]
    folder: str
    events: str = ""
    key: str = ""
    log: str = ""
    preload: list[str] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    lost_tasks: list[str] = field(default_factory=list)
    unusable: dict[str, str] = field(default_factory=dict)
    shown: dict[str, str] = field(default_factory=dict)
    guard: str = ""
    user: int = -1
    limits: dict[str, int] = field(default_factory=dict)


class Journal:
    """The run's side: its job, and its way to report.

    Args:
        job: the run's input.
        tell: takes an event, before it returns: the next thing may end the run.

    Attributes:
        job: the run's input, without its key.
        tell: takes an event.
    """

    def __init__(self, job: Job, tell: Callable[[Event], None]) -> None:
        self.job = replace(job, key="")
        self.tell = tell


def piped(job: Job) -> Journal:
    """The journal of a run that tells by its job's pipe: each event is written, signed, before `tell` returns."""
    return Journal(job, _writer(os.open(job.events, os.O_WRONLY), bytes.fromhex(job.key)))


def _writer(pipe: int, key: bytes) -> Callable[[Event], None]:
    """The function that writes. It holds what it calls: a learner's file may replace a module's functions."""
    num_written = 0
    write, dumps, sign, getpid = os.write, json.dumps, signature, os.getpid
    own = getpid()

    def tell(event: Event) -> None:
        nonlocal num_written
        if getpid() != own:  # a learner's code has forked, and its child goes on with the tests as well
            return
        line = dumps({name: value for name, value in asdict(event).items() if value}).encode()
        signed = sign(key, b"%d %s" % (num_written, line), "sha256").hex().encode() + b" " + line + b"\n"
        num_written += 1
        while signed:
            signed = signed[write(pipe, signed) :]

    return tell


class Events:
    """The owner's end of the pipe.

    Args:
        pipe: its path; the named pipe is made here.
        key: what each line has to be signed with.
    """

    def __init__(self, pipe: Path, key: bytes) -> None:
        os.mkfifo(pipe)
        pipe.chmod(0o622)  # the run may be another user's
        self._pipe = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        self._key = key
        self._num_read = 0
        self._rest = b""

    def close(self) -> None:
        """Read no more."""
        os.close(self._pipe)

    def new(self) -> Iterator[Event]:
        """The events that have come since the last call. A line that is still being written waits for the next.

        Raises:
            TamperingError: a line is not the run's own.
        """
        while chunk := self._read():
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            for line in lines:
                yield self._checked(line)
            if len(self._rest) > _MAX_LINE_NBYTES:
                raise TamperingError("it wrote into the grader's pipe")

    def _read(self) -> bytes:
        try:
            return os.read(self._pipe, _CHUNK_NBYTES)
        except BlockingIOError:
            return b""

    def _checked(self, line: bytes) -> Event:
        mac, _, told = line.partition(b" ")
        expected = signature(self._key, b"%d %s" % (self._num_read, told), "sha256").hex().encode()
        if not compare_digest(mac, expected):
            raise TamperingError("it wrote into the grader's pipe")
        self._num_read += 1
        return Event(**json.loads(told))
