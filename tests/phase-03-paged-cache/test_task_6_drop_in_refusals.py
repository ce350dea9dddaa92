"""Phase 3, task 6: phase 1's tests of a cache's errors, with PagedKVCache instead of KVCache.

It is over a storage in which others have blocks, whose rows a refused append must not touch.
"""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

_spec = spec_from_file_location("drop_in", Path(__file__).with_name("drop_in.py"))
drop_in = module_from_spec(_spec)
_spec.loader.exec_module(drop_in)

vars().update(
    drop_in.tests_of(
        "test_task_4_refuse.py",
        caches=drop_in.SHARED_STORAGE,
    )
)
