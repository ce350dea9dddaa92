"""Shortest remaining answer first, by an oracle (Schrage 1968): what a perfect predictor of lengths would be worth.

It knows every length, so it is not a policy that can be handed in.
"""

from __future__ import annotations

from minicache.request import Request
from minicache.scheduler import ChunkedPrefillScheduler, Scheduler, SchedulerOutput
from minicache.scheduler.queue import PriorityKey
from minicache_course.arena import Arena


class ShortestFirst(ChunkedPrefillScheduler):
    """The next to be admitted is the one with the fewest tokens left; the last to be preempted, too."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        super().__init__(**(arena.options | {"max_num_batched_tokens": 512}), prefix_caching=True)

    def predicted(self, request: Request) -> float:
        """How long the answer will be."""
        assert self.arena.length is not None
        return self.arena.length(request)

    def priority_key(self, request: Request) -> PriorityKey:
        """Tokens that are left, then arrival."""
        return self.predicted(request) - len(request.output_token_ids), request.arrival_index

    def schedule_running(self, output: SchedulerOutput) -> None:
        """As the stage's own, in the order that holds now."""
        self.running.sort(key=self.priority_key)
        super().schedule_running(output)


def create(arena: Arena) -> Scheduler:
    """The policy."""
    return ShortestFirst(arena)
