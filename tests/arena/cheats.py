"""Policies that break a rule: the text of each, and the rule that names it."""

from __future__ import annotations

HEAD = """
from minicache.errors import RequestTooLargeError
from minicache.request import Request, RequestStatus
from minicache.scheduler import ChunkedPrefillScheduler, PagedScheduler

class Policy(ChunkedPrefillScheduler):
{body}

def create(arena):
    return Policy(**arena.options, prefix_caching=True)
"""


def policy(body: str) -> str:
    """A policy whose class has this body."""
    return HEAD.format(body="\n".join(f"    {line}" for line in body.strip("\n").splitlines()))


WRITTEN = {
    # what its file may not say
    "import time": ("import", 1, "import time\n"),
    "from time import perf_counter": ("import", 1, "from time import perf_counter as now\n"),
    "random": ("import", 2, "import math\nimport random\n"),
    "the arena's own loop": ("import", 1, "from minicache_course.arena.loop import Loop\n"),
    "the simulator": ("import", 1, "from minicache.simulator import serving\n"),
    "a module of a module": ("import", 2, "import typing\nmodules = typing.sys.modules\n"),
    "a module taken from a module": ("import", 1, "from dataclasses import sys\n"),
    "a module as a value": ("import", 2, "import math\nm = math\n"),
    "a private name": ("import", 1, "from minicache.scheduler.base import _IN_QUEUE\n"),
    "every name": ("import", 1, "from math import *\n"),
    "a relative import": ("import", 1, "from . import loop\n"),
    "copying attributes by name": ("import", 1, "from functools import update_wrapper\n"),
    "the auditor": ("import", 1, "from minicache.scheduler.audit import Auditor\n"),
    "open": ("name", 1, "open('answers.json')\n"),
    "eval": ("name", 1, "eval('1')\n"),
    "getattr": ("name", 2, "def create(arena):\n    return getattr(arena, 'now')\n"),
    "__import__": ("name", 1, "__import__('time')\n"),
    "catching what stops it": ("name", 3, "try:\n    pass\nexcept:\n    pass\n"),
    "id": ("name", 1, "print_me = id(3)\n"),
    "a closure": ("attribute", 2, "def create(arena):\n    return arena.now.__closure__\n"),
    "a frame": ("attribute", 1, "f = (x for x in ()).gi_frame\n"),
    "a text that reads attributes": ("attribute", 1, "t = '{0.x}'.format(3)\n"),
    "subclasses": ("attribute", 1, "k = object.__subclasses__()\n"),
    "a pattern that reads attributes": (
        "attribute",
        3,
        "def create(arena):\n    match arena.now:\n        case object(__closure__=c):\n            return c\n",
    ),
    "a class's own fields": ("name", 2, "class A:\n    __slots__ = ()\n"),
    "no Python": ("syntax", 1, "def create(arena)\n"),
    "no create": ("create", 0, "x = 3\n"),
    "an exception": ("error", 2, "x = {}\nx['a']\n"),
}

DONE = {
    # what it does
    "it refuses long prompts": (
        "dropped",
        policy("""
def check_size(self, request):
    if request.num_prompt_tokens > 100:
        raise RequestTooLargeError("too hard")
"""),
    ),
    "it gives a request up": (
        "audit",
        policy("""
def schedule(self):
    output = super().schedule()
    if len(self.running) > 1:
        last = self.running[-1].request_id
        output.finished.append(last)
    return output
"""),
    ),
    "it aborts what is long": (
        "dropped",
        policy("""
def schedule(self):
    for request in list(self.running):
        if len(request.output_token_ids) > 5:
            self.finish_request(request.request_id, RequestStatus.FINISHED_ABORTED)
    return super().schedule()
"""),
    ),
    "it cuts answers": (
        "dropped",
        policy("""
def add_request(self, request):
    request.max_tokens = 2
    super().add_request(request)
"""),
    ),
    "it forgets a request": (
        "audit",
        policy("""
def add_request(self, request):
    if request.request_id != 1:
        super().add_request(request)
"""),
    ),
    "it leaves a request forever": (
        "audit",
        policy("""
def head(self):
    head = super().head()
    return None if head is None or head.request_id == 1 else head
"""),
    ),
    "it takes a prompt for computed": (
        "audit",
        policy("""
def find_prefix(self, request):
    return []
def admit(self, request, output, found=()):
    super().admit(request, output, found)
    request.num_computed_tokens = request.num_prompt_tokens - 1
    output.num_scheduled_tokens[request.request_id] = 1
"""),
    ),
    "it computes more than it says": (
        "audit",
        policy("""
def schedule(self):
    output = super().schedule()
    for request_id in output.num_scheduled_tokens:
        output.num_scheduled_tokens[request_id] = 1
    return output
def update_from_output(self, output, token_ids):
    for request in output.scheduled:
        if not request.output_token_ids:
            output.num_scheduled_tokens[request.request_id] = request.num_tokens - request.num_computed_tokens
    return super().update_from_output(output, token_ids)
"""),
    ),
    "it has a larger machine": (
        "machine",
        """
from minicache.scheduler import PagedScheduler
def create(arena):
    return PagedScheduler(**(arena.options | {"num_blocks": 10_000}))
""",
    ),
    "its batch has more slots": (
        "machine",
        """
from minicache.scheduler import PagedScheduler
def create(arena):
    return PagedScheduler(**(arena.options | {"max_num_seqs": 1000}))
""",
    ),
    "its memory grows": (
        "machine",
        """
from minicache.memory.blocks import BlockPool
from minicache.scheduler import PagedScheduler

class Policy(PagedScheduler):
    def schedule(self):
        if not self.pool.num_used:
            self.pool = BlockPool(10_000, 16)
        return super().schedule()

def create(arena):
    return Policy(**arena.options)
""",
    ),
    "it is no scheduler": ("create", "def create(arena):\n    return 3\n"),
    "it does nothing": (
        "audit",
        policy("""
def schedule_waiting(self, output):
    pass
"""),
    ),
    "it changes a class of ours, and a request is wrong by it": (
        "tampering",
        """
from minicache.request import Request
from minicache.scheduler import PagedScheduler
Request.num_tokens = 3
def create(arena):
    return PagedScheduler(**arena.options)
""",
    ),
    "it changes a table of ours": (
        "tampering",
        """
from minicache.memory.eviction import EVICTION, LeastRecentlyUsed
from minicache.scheduler import PagedScheduler

class Other(LeastRecentlyUsed):
    pass

EVICTION["lru"] = Other
def create(arena):
    return PagedScheduler(**arena.options)
""",
    ),
    "it changes a class of ours": (
        "tampering",
        """
from minicache.scheduler import PagedScheduler, SchedulerOutput
def create(arena):
    SchedulerOutput.total_num_scheduled_tokens = 0
    return PagedScheduler(**arena.options)
""",
    ),
}
