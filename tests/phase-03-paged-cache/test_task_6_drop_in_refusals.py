"""Phase 3, task 6: phase 1's tests of a cache's errors, with PagedKVCache instead of KVCache.

It is over a storage in which others have blocks, whose rows a refused append must not touch.
"""

from __future__ import annotations

from pathlib import Path

from minicache_course.templates import load

drop_in = load(Path(__file__).with_name("drop_in.py"))

vars().update(
    drop_in.tests_of(
        "test_task_4_refuse.py",
        caches=drop_in.SHARED_STORAGE,
    )
)
