"""A right `PagedScheduler`, whatever is in scheduler/paged.py: what task 7's schedulers are made of.

It is the reference's, packed by running this file as a script: the reference is not there to ask where a submission is
graded.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from types import FunctionType

import minicache.scheduler.paged as paged
from minicache.scheduler.base import Scheduler

FILE = Path(__file__).with_suffix(".py.gz")


def unpacked():
    """The packed source."""
    return gzip.decompress(FILE.read_bytes())


def right_scheduler():
    """The class. It is a subclass of that in `minicache.scheduler.paged`, which an auditor may ask for, and calls none
    of its methods: where both would be found, `Scheduler`'s stand in front.
    """
    namespace = {"__name__": "right_paged"}
    exec(unpacked(), namespace)
    namespace["AllocStatus"] = paged.AllocStatus
    theirs = paged.PagedScheduler
    own = {name: vars(Scheduler).get(name) for name, each in vars(theirs).items() if isinstance(each, FunctionType)}
    right = namespace["PagedScheduler"]
    right.__bases__ = (type("Scheduler", (theirs,), {name: each for name, each in own.items() if each}),)
    return right


if __name__ == "__main__":
    FILE.write_bytes(gzip.compress(Path(paged.__file__).read_bytes(), mtime=0))
