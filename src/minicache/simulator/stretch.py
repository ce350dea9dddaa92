"""Stretches in which a scheduler has nothing to decide: the simulator need not call it at every step.

While no request arrives, is admitted, finishes, or runs short of blocks, each step of a batch in decode is the one
before, with one token more for each request. `most_quiet_steps` is how many such steps are to come, `blocks_taken` what
they take, and `settle` leaves scheduler and requests as if each had been scheduled; only which blocks a request gets
may differ, and with them what a prefix cache evicts first. Given, not built. Pure standard library.
"""

from __future__ import annotations

from itertools import islice

from minicache.scheduler import (
    ChunkedPrefillScheduler,
    ContinuousBatchScheduler,
    FairScheduler,
    PagedScheduler,
    PrefixCachingScheduler,
    Scheduler,
    SharingScheduler,
    StaticBatchScheduler,
    VllmOptionsScheduler,
)

STAGES = (
    StaticBatchScheduler,
    ContinuousBatchScheduler,
    PagedScheduler,
    FairScheduler,
    SharingScheduler,
    ChunkedPrefillScheduler,
    VllmOptionsScheduler,
)
"""Those known to decide nothing in such a stretch. A subclass may, and is called at every step."""


def most_quiet_steps(scheduler: Scheduler) -> int:
    """In how many steps to come the scheduler surely has nothing to decide, if no request arrives.

    Args:
        scheduler: no request has arrived since its last step. If requests wait and there is a batch slot, that step was
            one of decodes alone, in which none was admitted, preempted or finished.

    Returns:
        0 if there is none, or if the scheduler must be called. In none of these steps does a request finish or run
        short of blocks.
    """
    running = scheduler.running
    if type(scheduler) not in STAGES or not running:
        return 0
    if isinstance(scheduler, PrefixCachingScheduler) and scheduler.waiting and len(running) < scheduler.max_num_seqs:
        return 0  # what the batch computes may be the prefix that lets one of them in
    if len(running) > scheduler.max_num_batched_tokens:
        return 0  # the budget is not enough for a token of each
    # In m · block_size steps no request takes more than m blocks.
    most = scheduler.pool.num_free // len(running) * scheduler.pool.block_size
    longest = scheduler.max_model_len
    for request in running:
        num_outputs = len(request.output_token_ids)
        num_tokens = request.num_prompt_tokens + num_outputs
        if request.num_computed_tokens != num_tokens - 1:
            return 0  # it is in its prompt, or computed again after a preemption
        to_the_end = request.max_tokens - num_outputs - 1
        if to_the_end < most:
            most = to_the_end
        if longest is not None and longest - num_tokens - 1 < most:
            most = longest - num_tokens - 1
    return most


def num_cached_tokens(scheduler: Scheduler) -> int:
    """Tokens that the requests of the batch have in the cache."""
    return sum([request.num_computed_tokens for request in scheduler.running])


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
    pool, block_size = scheduler.pool, scheduler.pool.block_size
    caching = scheduler if isinstance(scheduler, PrefixCachingScheduler) and scheduler.prefix_caching else None
    if caching:
        caching.cache_filled()
    # What a pool does takes longer for many requests one by one than for all at once.
    missing = [
        max(0, -(-(request.num_computed_tokens + num_steps) // block_size) - len(request.block_ids))
        for request in scheduler.running
    ]
    allocated = iter(pool.allocate(sum(missing)))
    generated = [0] * num_steps
    for request, num_missing in zip(scheduler.running, missing, strict=True):
        if num_missing:
            request.block_ids += islice(allocated, num_missing)
        start, stop = request.num_computed_tokens, request.num_computed_tokens + num_steps
        request.num_computed_tokens = stop
        request.output_token_ids += generated
        if caching and start // block_size < stop // block_size:
            caching.cache_blocks(request, start, stop)
