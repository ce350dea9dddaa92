"""minicache: an LLM serving engine that you build yourself.

Importing the package brings in neither torch nor numpy. The names below are imported when they are first used; every
other one is imported from its package (`from minicache.scheduler import Scheduler`). The packages of the lower layers
are pure standard library. `BLUEPRINT.md` in this folder says what each package owns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicache.lazy import lazily

if TYPE_CHECKING:
    from minicache.cache import KVCache as KVCache
    from minicache.cache import PagedKVCache as PagedKVCache
    from minicache.engine import LLM as LLM
    from minicache.engine import AsyncEngine as AsyncEngine
    from minicache.engine import SamplingParams as SamplingParams
    from minicache.memory import BlockPool as BlockPool
    from minicache.memory import BlockTable as BlockTable
    from minicache.request import Request as Request
    from minicache.scheduler import create_scheduler as create_scheduler

__version__ = "1.0.0rc1"

__getattr__, __dir__ = lazily(
    __name__,
    cache="KVCache PagedKVCache",
    engine="LLM AsyncEngine SamplingParams",
    memory="BlockPool BlockTable",
    request="Request",
    scheduler="create_scheduler",
)
