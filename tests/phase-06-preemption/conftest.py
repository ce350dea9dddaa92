"""What the tests of phase 6 share: a scheduler, requests, a step."""

from __future__ import annotations

import pytest

from minicache.request import Request
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.paged import PagedScheduler
from minicache.scheduler.queue import RequestQueue
from minicache_course.checks import call
from minicache_course.follow import following, following_schedulers


@pytest.fixture(autouse=True)
def _scenario():
    """A failure shows the scheduler, its requests, and the steps so far."""
    with following_schedulers(), following(PagedScheduler, "__init__"):
        yield


@pytest.fixture(scope="session")
def a_request():
    """`a_request(id, num_prompt, max_tokens=100)`: a new request, with a prompt of so many tokens."""

    def create(request_id, num_prompt, max_tokens=100, **options):
        return Request(request_id, [1] * num_prompt, max_tokens, **options)

    return create


@pytest.fixture(scope="session")
def paged():
    """`paged(requests, num_blocks=…)`: a PagedScheduler in whose queue they wait, with blocks of 4 by default."""

    def create(requests=(), *, cls=PagedScheduler, block_size=4, **options):
        scheduler = cls(block_size=block_size, **options)
        for request in requests:
            scheduler.add_request(request)
        return scheduler

    return create


class CountingQueue(RequestQueue):
    """A waiting queue that counts the requests that were looked at by going through it."""

    num_seen = 0

    def __iter__(self):
        for request_id in super().__iter__():
            self.num_seen += 1
            yield request_id


@pytest.fixture(scope="session")
def counting_queue():
    """`counting_queue(scheduler)`: gives a new scheduler a queue that counts what goes through it; the queue."""

    def give(scheduler):
        scheduler.waiting = CountingQueue(scheduler.priority_key)
        return scheduler.waiting

    return give


@pytest.fixture(scope="session")
def admit():
    """`admit(scheduler, others=0)`: what `schedule_waiting` adds to a step in which others compute so many tokens."""

    def admitted(scheduler, others=0):
        output = SchedulerOutput()
        if others:
            output.num_scheduled_tokens["others"] = others
            output.scheduled.append(Request("others", [1] * others, 1))
        scheduler.token_budget = scheduler.max_num_batched_tokens - others
        call(scheduler.schedule_waiting, output).gives(None)
        return output

    return admitted


@pytest.fixture(scope="session")
def a_step():
    """`a_step(scheduler)`: schedules a step, commits it with token 7 for each of its requests; the step's output."""

    def step(scheduler):
        output = call(scheduler.schedule).value
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 7))
        return output

    return step
