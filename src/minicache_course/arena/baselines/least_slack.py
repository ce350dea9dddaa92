"""Least slack first (Mok 1983): the request whose first token is needed soonest, less what its prompt takes.

A request that has missed its limit waits behind all that can still meet theirs.
"""

from __future__ import annotations

from minicache.request import Request
from minicache.scheduler import ChunkedPrefillScheduler, Scheduler
from minicache_course.arena import Arena


class LeastSlackFirst(ChunkedPrefillScheduler):
    """Chunked, with another head of the queue."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        super().__init__(**(arena.options | {"max_num_batched_tokens": 512}), prefix_caching=True)

    def slack(self, request: Request) -> float:
        """Seconds that it can wait from now on, if it then had the machine for itself; below 0: it is too late."""
        arena, service = self.arena, self.arena.service(request)
        needed = arena.step_seconds([(request.num_prompt_tokens, 0)])
        num_gone = len(request.output_token_ids)
        return request.arrival_time + service.ttft + num_gone * service.tpot - needed - arena.now()

    def head(self) -> Request | None:
        """The one with the least slack of those that have any; else the first that came."""
        waiting = list(self.waiting.values())
        in_time = [request for request in waiting if self.slack(request) >= 0]
        if in_time:
            return min(in_time, key=lambda request: (self.slack(request), request.arrival_index))
        return waiting[0] if waiting else None


def create(arena: Arena) -> Scheduler:
    """The policy."""
    return LeastSlackFirst(arena)
