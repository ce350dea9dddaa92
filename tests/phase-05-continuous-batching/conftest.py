"""What the tests of phase 5 share: a minimal scheduler, requests, and the state of a scheduler."""

from __future__ import annotations

import pytest

from minicache.memory.blocks import blocks_for
from minicache.request import Request, RequestStatus
from minicache.scheduler.base import Scheduler
from minicache_course.follow import following_schedulers


@pytest.fixture(autouse=True)
def _scenario():
    """A failure shows the schedulers, the requests and the steps so far."""
    with following_schedulers():
        yield


class Plain(Scheduler):
    """Admits every waiting request, in order; at most `chunk` tokens of each are computed in a step.

    Its hooks use nothing that the tasks ask for, so each task can be graded before the next one is written.
    """

    def __init__(self, *, chunk=10**6, **options):
        super().__init__(**options)
        self.chunk = chunk
        self.released = []  # ids, in the order in which `release` was called for them
        self.found = []  # and what each call found: status, whether in queue or batch, whether anything is unfinished

    def blocks_to_admit(self, request):
        return blocks_for(request.num_prompt_tokens + request.max_tokens, self.pool.block_size)

    def schedule_running(self, output):
        for request in self.running:
            self.compute(request, output)

    def may_admit(self, output):
        return True

    def schedule_waiting(self, output):
        while request := self.waiting.first():
            self.waiting.remove(request)
            request.block_ids = self.pool.allocate(self.blocks_to_admit(request))
            request.status = RequestStatus.RUNNING
            self.running.append(request)
            self.compute(request, output)

    def compute(self, request, output):
        num_new = request.num_tokens - request.num_computed_tokens
        output.num_scheduled_tokens[request.request_id] = min(num_new, self.chunk)
        output.scheduled.append(request)

    def release(self, request):
        self.released.append(request.request_id)
        is_there = any(each is request for each in (*self.running, *self.waiting.values()))
        self.found.append((request.status.name, is_there, self.has_unfinished))
        super().release(request)


@pytest.fixture(scope="session")
def plain():
    """`plain(chunk=…, **options)`: a `Plain` scheduler; by default it has 100 blocks of 4 tokens."""

    def make(**options):
        return Plain(**{"num_blocks": 100, "block_size": 4} | options)

    return make


@pytest.fixture(scope="session")
def request_of():
    """`request_of(id, num_prompt_tokens=3, max_tokens=4, **more)`: a new request whose prompt is 1, 2, 3, …"""

    def make(request_id, num_prompt_tokens=3, max_tokens=4, **more):
        return Request(request_id, list(range(1, num_prompt_tokens + 1)), max_tokens, **more)

    return make


@pytest.fixture(scope="session")
def state_of():
    """`state_of(scheduler, *requests)`: their public state, to compare before and after a call."""

    def look(scheduler, *requests):
        seen = {id(each): each for each in (*scheduler.waiting.values(), *scheduler.running, *requests)}
        return {
            "waiting": list(scheduler.waiting),
            "running": [request.request_id for request in scheduler.running],
            "has_unfinished": scheduler.has_unfinished,
            "num_free": scheduler.pool.num_free,
            "requests": [
                (
                    request.request_id,
                    request.status.name,
                    request.arrival_index,
                    request.num_computed_tokens,
                    list(request.output_token_ids),
                    list(request.block_ids),
                )
                for request in seen.values()
            ],
        }

    return look
