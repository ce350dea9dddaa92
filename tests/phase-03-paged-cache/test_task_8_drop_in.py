"""Phase 3, task 8: phase 1's tests of attention, with PagedKVCache instead of KVCache.

What a test's first line calls KVCache is your PagedKVCache, and the brackets say which: with a storage of its own and
blocks of 1, 3 or 16 rows, or over a storage in which others have blocks.
"""

from __future__ import annotations

from pathlib import Path

from minicache_course.templates import load

drop_in = load(Path(__file__).with_name("drop_in.py"))

vars().update(
    drop_in.tests_of(
        "test_task_6_attend.py",
        caches=drop_in.OWN_STORAGE + drop_in.SHARED_STORAGE,
    )
)
