"""What `minicache update` carries over when a module has moved: a learner's file, its imports, its progress."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

MOVED = {
    "minicache.server": "minicache.serving.http",
    "minicache.replica": "minicache.serving.replica",
    "minicache.proxy": "minicache.serving.proxy",
    "minicache.load": "minicache.serving.load",
    "minicache.engine.runner": "minicache.engine.kv",
    "minicache.engine.speculation": "minicache.engine.drafting",
    "minicache.scheduler.incidents": "minicache_course.incidents",
    "minicache.kernels.one_head": "minicache_course.kernels.one_head",
    "minicache.kernels.online_softmax": "minicache_course.kernels.online_softmax",
    "minicache.kernels.tracer": "minicache_course.kernels.tracer",
    "minicache.notebook": "minicache_course.notebook",
    "minicache.course": "minicache_course",
}
"""Modules and packages of version 0.1.0 → where they are now."""

_NAMES = re.compile(rf"\b({'|'.join(map(re.escape, MOVED))})\b(?!/)")
_RENAMED = {
    "from minicache import notebook": "from minicache_course import notebook",
    "from minicache.engine.logprobs import ServedLLM": "from minicache.engine.llm import LLM as ServedLLM",
    "FairSharingScheduler": "SharingScheduler",
}
"""Text of files of version 0.1.0 → what stands there now."""
_FOLDERS = {
    "/".join(old.split(".")[1:]): "/".join(new.split(".")[1:])
    for old, new in MOVED.items()
    if new.count(".") and old.split(".")[1:] != new.split(".")[1:]
}


def moved_path(name: str) -> str:
    """Where a file of `labs/` belongs now: phase 10's `streaming.py` was in `server/`, and is in `serving/http/`."""
    labs, phase, *inside = PurePosixPath(name).parts
    path = "/".join(inside)
    for old, new in _FOLDERS.items():
        if labs == "labs" and path.startswith(f"{old}/"):
            return f"labs/{phase}/{new}{path.removeprefix(old)}"
    return name


def with_new_names(text: str) -> str:
    """A file's text, in which imports of modules that have moved find them."""
    for old, new in _RENAMED.items():
        text = text.replace(old, new)
    return _NAMES.sub(lambda found: MOVED[found[1]], text)
