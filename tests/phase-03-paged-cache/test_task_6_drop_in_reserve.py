"""Phase 3, task 6: phase 1's tests of the memory that a cache reserves, with PagedKVCache instead of KVCache.

Its blocks have 3 rows.
"""

from __future__ import annotations

from pathlib import Path

from minicache_course.templates import load

drop_in = load(Path(__file__).with_name("drop_in.py"))

vars().update(
    drop_in.tests_of(
        "test_task_2_reserve.py",
        caches=drop_in.OWN_STORAGE[1:2],
    )
)
