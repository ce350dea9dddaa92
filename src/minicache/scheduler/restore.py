"""A scheduler's books after an interrupt. No phase builds this module.

A KeyboardInterrupt may come between any two instructions: a request has left the queue, and is not in the batch yet;
blocks have left the free list, and no request lists them. Pure standard library.
"""

from __future__ import annotations

from minicache.request import RequestStatus
from minicache.scheduler.base import Scheduler
from minicache.scheduler.observe import ObservedScheduler
from minicache.scheduler.prefix_caching import PrefixCachingScheduler


def restore(scheduler: Scheduler) -> None:
    """Make queue, batch and pools anew from all unfinished requests, wherever the scheduler's code was interrupted.

    Every block is free. `Scheduler.recover`, which comes next, finds each request in exactly one place.
    """
    while isinstance(scheduler, ObservedScheduler):
        scheduler = scheduler.scheduler
    for pool in (scheduler.pool, scheduler.host_pool):
        if pool is not None:
            vars(pool).update(vars(type(pool)(pool.num_blocks, pool.block_size)))  # others refer to it too
    if isinstance(scheduler, PrefixCachingScheduler):
        scheduler._filled.clear()  # they name blocks by their requests, which have none any more
    scheduler.waiting, scheduler.running = type(scheduler.waiting)(scheduler.priority_key), []
    for request in list(scheduler._requests.values()):
        request.host_block_ids, request.draft_token_ids = [], []
        request.group_block_ids = [[] for _ in request.group_block_ids]
        if request.status.is_finished:
            del scheduler._requests[request.request_id]
        elif request.status is RequestStatus.RUNNING:
            scheduler.running.append(request)
        else:
            scheduler.waiting.add(request)
