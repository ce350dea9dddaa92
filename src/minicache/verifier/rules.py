"""What must hold at every moment of an exploration: each rule is a function of a `Moment`, as a learner's are.

Pure standard library.
"""

from __future__ import annotations

import sys
from typing import Any, Final

from minicache.errors import InvariantError
from minicache.scheduler.fair import FairScheduler
from minicache.verifier.world import Moment, Property


def books_agree(moment: Moment) -> str | None:
    """The auditor of phase 6 finds nothing, and neither does the scheduler's own `check()`."""
    auditor: Any = moment.auditor
    scheduler, kind = moment.scheduler, moment.action.kind
    try:
        if kind in ("schedule", "retry"):
            auditor.on_schedule(scheduler, moment.output)
        elif kind == "commit":
            auditor.on_update(scheduler, moment.output, moment.finished)
        elif kind == "fail":
            auditor.on_recover(scheduler)
        elif kind in ("abort", "error"):
            for request in moment.finished:
                auditor.on_finish(scheduler, request)
        scheduler.check()
    except InvariantError as error:
        return str(error).removeprefix("step 0, ")  # this auditor has seen one step only
    return None


def tokens_are_where_they_should_be(moment: Moment) -> str | None:
    """What a request has computed lies in its blocks, on the device or in CPU swap space, and nothing else does."""
    if moment.output is None or moment.action.kind == "commit":
        return None
    memory, num_new = moment.memory, moment.output.num_scheduled_tokens
    for request in moment.scheduler.running:
        end = request.num_computed_tokens + num_new.get(request.request_id, 0)
        if not memory.holds(bytes(request.token_ids(0, end)), request.block_ids, memory.blocks):
            return f"{request!r} would read what was not computed for its tokens"
    for request in moment.scheduler.waiting.values():
        if request.host_block_ids:
            tokens = bytes(request.token_ids(0, request.num_computed_tokens))
            if not memory.holds(tokens, request.host_block_ids, memory.host_blocks):
                return f"{request!r} was swapped out, and other tokens than its own are in CPU swap space"
    return None


def first_is_not_forgotten(moment: Moment) -> str | None:
    """Of any STARVATION_BOUND + 1 admissions in a row, one is of the request that arrived first of all that wait."""
    bound = sys.modules["minicache.scheduler.fair"].STARVATION_BOUND
    if isinstance(moment.scheduler, FairScheduler) and moment.num_bypasses > bound:
        return f"{moment.num_bypasses} requests in a row were admitted ahead of the one that arrived first"
    return None


RULES: Final[tuple[Property, ...]] = (books_agree, tokens_are_where_they_should_be, first_is_not_forgotten)
"""What holds for every scheduler of the course, from `PagedScheduler` on."""
