"""Other processes, that are killed or held at chosen moments. POSIX only.

A child is a fork of the test's process. It may `prepare` something, and then does its `work`. The moments of the work
are the calls of the system that its Python makes, by `os`, `io`, `mmap` or `sqlite3`: one before each of them, and one
after it. They are counted, so a child is killed at the same moment in every run.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
import threading
import warnings
from contextlib import contextmanager, suppress
from types import ModuleType

from minicache_course.checks import is_not_written, that, told

MODULES = {"posix", "_io", "io", "fcntl", "mmap", "sqlite3", "_sqlite3", "_dbm", "_gdbm"}
PURE = {"fspath", "getpid", "getcwd"}
MOST = 10
"""Moments of a work that are tried, if it has more: forks take time. One of each kind is."""
PATIENCE = 0.1
"""Seconds for which a child is held if others wait for it: it may have locked the folder."""


class Child:
    """A fork that does some work.

    Args:
        prepare: makes what `work` is given.
        work: what is watched.
        kill_at: the number of a moment: there it is killed (SIGKILL).
        hold_at: the number of a moment, or of which kind it is: there it is held until `let_go`.
        kill_in_write: it is killed when a file becomes longer than so many bytes; up to there it is written.
    """

    def __init__(self, prepare, work, *, kill_at=-1, hold_at=-1, kill_in_write=0):
        self.place = ""  # the moment at which it was killed or is held
        self._news, news = os.pipe()
        leave, self._leave = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # other threads: none of them holds a lock of ours
            self.pid = os.fork()
        if not self.pid:
            os.close(self._news), os.close(self._leave)
            _live(prepare, work, news, leave, kill_at, hold_at, kill_in_write)
        os.close(news), os.close(leave)
        self._told = os.fdopen(self._news, encoding="utf-8")

    def wait_until_held(self):
        """Wait until it is held: whether it is. If it is not, it has ended before that moment."""
        self.place = self._told.readline().rstrip("\n")
        return self.place.startswith(("before", "after"))

    def let_go(self):
        """It may go on, if it is held."""
        with suppress(BrokenPipeError):
            os.write(self._leave, b"!")

    def end(self):
        """Wait for its end. What it has told last: "done …", or an error; "" if it was killed.

        Raises:
            NotImplementedError: a starter's, in the child.
        """
        try:
            self.let_go()
            lines = [self.place, *self._told.read().splitlines()]
            self.place = next((line for line in lines if line.startswith(("before", "after", "in"))), "")
            end = next((line for line in lines if line.startswith(("done", "raised", "unwritten"))), "")
        finally:
            self._told.close()
            os.close(self._leave)
            os.kill(self.pid, signal.SIGKILL)  # if the test ran out of patience
            os.waitpid(self.pid, 0)
        if end.startswith("unwritten"):
            raise NotImplementedError(end.removeprefix("unwritten "))
        return end


def _live(prepare, work, news, leave, kill_at, hold_at, kill_in_write):
    """The child's life. It never returns."""
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        prepared, places = prepare(), []

        def profile(frame, event, arg):
            if event not in ("c_call", "c_return", "c_exception") or not _is_of_the_system(arg):
                return
            places.append(("before " if event == "c_call" else "after ") + arg.__name__)
            is_last = len(places) - 1 == kill_at
            if is_last or len(places) - 1 == hold_at or (places[-1] == hold_at and places.count(hold_at) == 1):
                os.write(news, places[-1].encode() + b"\n")
                if is_last:
                    os.kill(os.getpid(), signal.SIGKILL)
                select.select([leave], [], [], 10.0)

        if kill_in_write:
            os.write(news, b"in a write\n")
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_FSIZE, (kill_in_write, kill_in_write))
        sys.setprofile(profile)
        try:
            result = work(prepared)
        finally:
            sys.setprofile(None)
        last = ["done", ",".join(places).replace(" ", "_") or "-", result if isinstance(result, str) else ""]
    except BaseException as error:
        last = ["unwritten", str(error)] if is_not_written(error) else ["raised", told(error)]
    os.write(news, " ".join(" ".join(last).split()).encode() + b"\n")
    os.kill(os.getpid(), signal.SIGKILL)


def _is_of_the_system(function):
    owner = getattr(function, "__self__", None)
    module = owner.__name__ if isinstance(owner, ModuleType) else type(owner).__module__
    return module in MODULES and function.__name__ not in PURE


def do(prepare, work):
    """Have a child do it, that is killed after that: where its moments are, "before_replace" for instance."""
    __tracebackhide__ = True
    end = Child(prepare, work).end()
    that("the end of another process", end if end.startswith("raised") else "done").gives("done")
    return [place for place in end.split(" ")[1].split(",") if place != "-"]


def moments(prepare, work):
    """Some of the moments of a work: all if they are few, else the last of each kind, and some between."""
    __tracebackhide__ = True
    places = do(prepare, work)
    if len(places) <= MOST:
        return list(range(len(places)))
    evenly = {round(index * (len(places) - 1) / (MOST - 1)) for index in range(MOST)}
    return sorted(evenly.union({place: number for number, place in enumerate(places)}.values()))


def kinds(prepare, work):
    """The calls of the system in a work, each once: "before replace" for instance is the moment before the first."""
    __tracebackhide__ = True
    return sorted({place.replace("_", " ", 1) for place in do(prepare, work) if place.startswith("before")})


def killed(prepare, work, moment):
    """Where a child was killed that did it up to a moment, "before replace" for instance."""
    __tracebackhide__ = True
    child = Child(prepare, work, kill_at=moment)
    end = child.end()
    that("the end of another process", end if end.startswith("raised") else "killed, or done").gives("killed, or done")
    return child.place or "after all"


def killed_in_write(prepare, work, nbytes):
    """Have a child do it that is killed when a file becomes longer than that. Whether it came to that."""
    end = Child(prepare, work, kill_in_write=nbytes).end()
    return not end.startswith("done")


@contextmanager
def held(prepare, work, moment):
    """A child that does it is held at a moment, until the end of the block, or for `PATIENCE`. Then it must end well.

    Gives a list, to which what it has returned is added, if that is a string.
    """
    __tracebackhide__ = True
    child, results = Child(prepare, work, hold_at=moment), []
    child.wait_until_held()
    timer = threading.Timer(PATIENCE, child.let_go)
    timer.start()
    try:
        yield results
    finally:
        timer.cancel()
        timer.join()
        end = child.end()
    that(
        f"the end of the other process, which was held {child.place or 'nowhere'}",
        end if end.startswith("raised") else "done",
    ).gives("done")
    results += end.split(" ", 2)[2:]


def num_calls(fn, *args):
    """How many calls of functions a call makes, in all that it calls: those of C too, and so those of the system."""
    number = 0

    def profile(frame, event, arg):
        nonlocal number
        number += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        fn(*args)
    finally:
        sys.setprofile(None)
    return number


@contextmanager
def files_up_to(nbytes):
    """A disk on which no file becomes longer than that: what is written beyond fails, as on a full one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
