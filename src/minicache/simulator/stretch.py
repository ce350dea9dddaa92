"""Stretches in which a scheduler has nothing to decide: the simulator need not call it at every step.

While no request arrives, finishes, or runs short of blocks, each step of a batch in decode is the one before, with one
token more for each request. `most_quiet_steps` is how many such steps are to come, `blocks_taken` what they take, and
`settle` leaves scheduler and requests as if each had been scheduled; only which blocks a request gets may differ.
Given, not built. Pure standard library.
"""

from __future__ import annotations

from minicache.request import Request
from minicache.scheduler import ContinuousBatchScheduler, FairScheduler, PagedScheduler, Scheduler, StaticBatchScheduler

STAGES = (StaticBatchScheduler, ContinuousBatchScheduler, PagedScheduler, FairScheduler)
"""Those known to decide nothing in such a stretch. A subclass may, and is called at every step."""


def most_quiet_steps(scheduler: Scheduler) -> int:
    """In how many steps to come the scheduler surely has nothing to decide, if no request arrives.

    Args:
        scheduler: in its last step every request of the batch was in decode, and none was admitted, preempted or
            finished; none has arrived since.

    Returns:
        0 if there is none, or if the scheduler must be called. In none of these steps does a request finish or run
        short of blocks.
    """
    if type(scheduler) not in STAGES or not scheduler.running:
        return 0
    longest = scheduler.max_model_len
    to_the_end = min(request.max_tokens - len(request.output_token_ids) for request in scheduler.running)
    if longest is not None:
        to_the_end = min(to_the_end, longest - max(request.num_tokens for request in scheduler.running))
    # In m · block_size steps no request takes more than m blocks.
    blocks_each = scheduler.pool.num_free // len(scheduler.running)
    return min(to_the_end - 1, blocks_each * scheduler.pool.block_size)


def blocks_taken(scheduler: Scheduler, num_steps: int) -> list[int]:
    """How many blocks the batch takes at each of the next `num_steps` quiet steps."""
    block_size, taken = scheduler.pool.block_size, [0] * num_steps
    for request in scheduler.running:
        # The step after `room` more tokens is the first that needs a block; requests with a reservation have them all.
        room = len(request.block_ids) * block_size - request.num_tokens + 1
        for step in range(max(0, room), num_steps, block_size):
            taken[step] += 1
    return taken


def settle(scheduler: Scheduler, num_steps: int) -> None:
    """Give every request of the batch the blocks and the tokens of `num_steps` quiet steps."""
    for request in scheduler.running:
        missing = _blocks_for(request, num_steps, scheduler.pool.block_size) - len(request.block_ids)
        if missing > 0:
            request.block_ids += scheduler.pool.allocate(missing)
        request.num_computed_tokens += num_steps
        request.output_token_ids += [0] * num_steps


def _blocks_for(request: Request, num_steps: int, block_size: int) -> int:
    """Blocks for what `request` has computed after `num_steps` more steps."""
    return -(-(request.num_computed_tokens + num_steps) // block_size)
