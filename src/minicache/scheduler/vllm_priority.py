"""Priorities as vLLM has them: the order of the queue, and the choice of the victim. No phase builds this module.

`create_scheduler("chunked", policy="priority", …)` makes this stage. Pure standard library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, Unpack

from minicache.request import Request, RequestId, RequestStatus
from minicache.scheduler.chunked import ChunkedOptions, ChunkedPrefillScheduler
from minicache.scheduler.fair import PriorityScheduler
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.vllm_options import VllmOptionsScheduler

Policy = Literal["fair", "priority"]
"""Who is served first, and who is preempted: by phase 7's rules, or by vLLM's."""

POLICY: Final = "priority"


class PriorityOptions(ChunkedOptions, total=False):
    """The keyword arguments of `VllmPriorityScheduler`, which documents them."""

    policy: Policy


class VllmPriorityScheduler(VllmOptionsScheduler):
    """`VllmOptionsScheduler` with vLLM 0.33's `policy="priority"` in place of phase 7's, equal to it step for step.

    - The queue is in the order of `priority_key`. Nothing bounds how long a request waits: none is `protected`, and
      num_bypasses is counted only.
    - The batch is in the order of admission, and the budget is spent in that order.
    - The victim is the request of the batch with the highest `priority_key`, wherever it stands. If it is in this step
      already, that is undone (`undo`), and its tokens return to the budget, for the requests behind the one that grows.
    - A waiting request preempts none, however urgent it is.

    Args:
        policy: "priority".
        options: `VllmOptionsScheduler`'s.

    Raises:
        TypeError, ValueError: as `VllmOptionsScheduler`, or `policy` is another.
    """

    Options = PriorityOptions

    def __init__(self, *, policy: Policy = POLICY, **options: Unpack[ChunkedOptions]) -> None:
        super().__init__(**options)
        if policy != POLICY:
            raise ValueError(f'policy must be "fair" or "priority"; got {policy!r}')
        self._num_returned = 0  # tokens of undone victims, until the request that grows has its own

    # The queue and the batch

    def head(self) -> Request | None:
        """As `PriorityScheduler.head`: no bound, and no protection."""
        return PriorityScheduler.head(self)

    def admit(self, request: Request, output: SchedulerOutput, found: Sequence[int] = ()) -> None:
        """As `VllmOptionsScheduler.admit`; the request is then the last of the batch."""
        super().admit(request, output, found)
        self.move_to_the_end(request)

    def fork_request(
        self, request_id: RequestId, child_id: RequestId, output_token_ids: Sequence[int] | None = None
    ) -> Request:
        """As `VllmOptionsScheduler.fork_request`; the child is then the last of the batch."""
        child = super().fork_request(request_id, child_id, output_token_ids)
        self.move_to_the_end(child)
        return child

    def move_to_the_end(self, request: Request) -> None:
        """Make a request of the batch its last one."""
        self.running.remove(request)
        self.running.append(request)

    # Victims

    def schedule_running(self, output: SchedulerOutput) -> None:
        """As `VllmOptionsScheduler.schedule_running`; but a request that was its own victim does not end the step.

        Blocks that the step fills are cached at its end, those of undone victims never.
        """
        for request in self.running.copy():
            if request.status is not RequestStatus.RUNNING:  # another one's victim
                continue
            missing = self.blocks_missing(request)
            if missing <= self.pool.num_free or self.make_room(request, output):
                if missing:
                    self.grow(request, output)
                self.schedule_tokens(request, output)
            self.token_budget += self._num_returned
            self._num_returned = 0
        if self.prefix_caching:
            for request, num_new in zip(output.scheduled, output.num_scheduled_tokens.values(), strict=True):
                self.cache_blocks(request, request.num_computed_tokens, request.num_computed_tokens + num_new)

    def make_room(self, request: Request, output: SchedulerOutput) -> bool:
        """As `PagedScheduler.make_room`; but victims are those of the highest `priority_key`, scheduled or not."""
        while self.blocks_missing(request) > self.pool.num_free:
            if len(self.running) == 1:
                self.finish_request(request.request_id, RequestStatus.FINISHED_CAPACITY)
                output.finished.append(request.request_id)
                return False
            victim = max(self.running, key=self.priority_key)
            self.preempt(victim, output)
            if victim is request:
                return False
        return True

    def preempt(self, request: Request, output: SchedulerOutput) -> None:
        """As `SharingScheduler.preempt`, of any request of the batch; what it has in this step is undone (`undo`).

        Args:
            request: of the batch.
            output: the step so far.
        """
        if request.request_id in output.num_scheduled_tokens:
            self.undo(request, output)
        self.move_to_the_end(request)
        super(ChunkedPrefillScheduler, self).preempt(request, output)

    def undo(self, request: Request, output: SchedulerOutput) -> None:
        """Take a request of the batch out of the step.

        Its tokens return to the budget once the request that grows is scheduled. If the step was to copy blocks for it,
        it copies none of them. So there is nothing in these that could be swapped out, and the request has computed
        nothing.
        """
        output.scheduled.remove(request)
        self._num_returned += output.num_scheduled_tokens.pop(request.request_id)
        others = [pair for pair in output.blocks_to_copy if pair[1] not in request.block_ids]
        if len(others) < len(output.blocks_to_copy):
            output.blocks_to_copy[:] = others
            request.num_computed_tokens = 0
