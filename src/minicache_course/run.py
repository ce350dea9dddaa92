"""One grading run, in a process of its own: its limits, its output, pytest.

`python -m minicache_course.run` reads its job from its standard input. `server.py` forks such processes instead.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from minicache.errors import KernelUnavailableError
from minicache_course.journal import Job

PLUGINS = ("minicache_course.plugin", "pytest_timeout", "_hypothesis_pytestplugin")
"""What a run loads, and no other plugin that is installed: looking for those takes longer than most tasks' tests."""

LIMITS = {"CORE": 0, "FSIZE": 2**28}
"""What every run is held to: a loop that prints must not fill the disk."""


def load(preload: Sequence[str]) -> None:
    """Import what runs need, before any learner's file is."""
    for name in ("pytest", *PLUGINS, "minicache_course.session"):
        import_module(name)
    for name in preload:
        with suppress(ImportError, KernelUnavailableError):  # the run that needs it will say so
            if name in ("torch", "triton"):  # whichever imports Triton: built for the interpreter or not, for all runs
                runtime = import_module("minicache.kernels.runtime")
                runtime.interpret_without_gpu()
                if name == "triton":
                    runtime.require_triton(runtime.usual_device())  # its canary runs once, here
            import_module(name)
        if name == "torch":  # whose first tensor on "meta", or first dispatch mode, imports as much again, Triton too
            torch = sys.modules["torch"]
            torch.stack([torch.arange(1, device="meta")])
    gc.collect()
    gc.freeze()  # what is loaded stays: no run need look through it for garbage, and pytest looks five times at its end


def run(job: Job) -> NoReturn:
    """Run pytest as the job says, and end the process."""
    code = 70  # EX_SOFTWARE, should pytest itself fail
    try:
        os.chdir(job.folder)
        with suppress(OSError):  # should the machine run out of memory, it is a run that ends: not on every system
            Path("/proc/self/oom_score_adj").write_text("1000")
        for name, most in (LIMITS | job.limits).items():
            _limit(getattr(resource, f"RLIMIT_{name}"), most)
        output = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) if job.log else 1
        for target, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
            os.dup2(source, target)
        faulthandler.register(signal.SIGUSR1, file=os.dup(1))  # a test's output goes elsewhere
        import pytest

        from minicache_course.journal import piped

        plugins = [sys.modules[name] for name in PLUGINS]
        code = pytest.main(job.arguments, [*plugins, piped(job)] if job.events else plugins)
    except BaseException:  # for the log: a forked process has no other output
        traceback.print_exc()
    finally:
        os._exit(code)


def _limit(which: int, most: int) -> None:
    hard = resource.getrlimit(which)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(which, (most, most))


def main() -> NoReturn:
    """Become the run that the job on the standard input describes."""
    job = Job(**json.load(sys.stdin))
    if job.user >= 0:
        os.setgroups([])
        os.setgid(job.user)
        os.setuid(job.user)
    load(job.preload)
    run(job)


if __name__ == "__main__":
    main()
