"""Shortest remaining answer first, by a predictor wrong by up to a factor of two (Fu et al. 2024, learning to rank).

It knows every length, and blurs it; so it is not a policy that can be handed in.
"""

from __future__ import annotations

from minicache.request import Request
from minicache.scheduler import ChunkedPrefillScheduler, Scheduler, SchedulerOutput
from minicache.scheduler.queue import PriorityKey
from minicache_course.arena import Arena


class ShortestFirst(ChunkedPrefillScheduler):
    """The next to be admitted is the one with the fewest predicted tokens left; the last to be preempted, too."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        super().__init__(**(arena.options | {"max_num_batched_tokens": 512}), prefix_caching=True)

    def predicted(self, request: Request) -> float:
        """How long the answer will be, times ½ to 2."""
        assert self.arena.length is not None
        blur = request.arrival_index * 2654435761 % 2**32 / 2**32  # as good as chance, and the same in every run
        return self.arena.length(request) * (0.5 + 1.5 * blur)

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
