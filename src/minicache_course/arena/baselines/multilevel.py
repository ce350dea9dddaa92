"""Multi-level feedback: the fewer tokens a request has had, the sooner it is served (FastServe: Wu et al. 2023, §4).

Lengths are unknown, so an answer is taken for short until it is not: at 64, 128, 256, … tokens it sinks by a level. A
waiting request of a higher level takes the memory of the lowest in the batch, which is swapped out.
"""

from __future__ import annotations

from minicache.request import Request
from minicache.scheduler import ChunkedPrefillScheduler, Scheduler, SchedulerOutput
from minicache.scheduler.queue import PriorityKey
from minicache_course.arena import Arena

QUANTUM = 64
"""Tokens of the first level."""


class MultiLevelFeedback(ChunkedPrefillScheduler):
    """Chunked, in the order of levels."""

    def __init__(self, arena: Arena) -> None:
        options = arena.options | {"max_num_batched_tokens": 512}
        super().__init__(**options, prefix_caching=True, preemption="swap", num_host_blocks=arena.options["num_blocks"])

    def level(self, request: Request) -> int:
        """0 for the shortest answers so far."""
        return (len(request.output_token_ids) // QUANTUM).bit_length()

    def priority_key(self, request: Request) -> PriorityKey:
        """Level, then arrival."""
        return self.level(request), request.arrival_index

    def schedule_running(self, output: SchedulerOutput) -> None:
        """As the stage's own; but first, the lowest make room for one of a higher level that waits."""
        self.running.sort(key=self.priority_key)
        head = self.waiting.first()
        while head is not None and self.running and self.level(self.running[-1]) > self.level(head):
            if self.blocks_to_admit(head) <= self.pool.num_free:
                break
            self.preempt(self.running[-1], output)
        super().schedule_running(output)


def create(arena: Arena) -> Scheduler:
    """The policy."""
    return MultiLevelFeedback(arena)
