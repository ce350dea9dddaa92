"""Phase 3, task 6: phase 1's tests of the cache, with PagedKVCache instead of KVCache.

What a test's first line calls KVCache is your PagedKVCache, with blocks of 1, 3 or 16 rows, as the brackets say.
"""

from __future__ import annotations

from pathlib import Path

from minicache_course.templates import load

drop_in = load(Path(__file__).with_name("drop_in.py"))

vars().update(
    drop_in.tests_of(
        "test_task_3_append_and_read.py",
        "test_task_5_reset.py",
        caches=drop_in.OWN_STORAGE,
    )
)
