"""What the tests of phase 6 share: a scheduler, requests, a step. A loop that never ends costs its test ten seconds."""

from __future__ import annotations

import pytest

from minicache.request import Request
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.paged import PagedScheduler


def pytest_collection_modifyitems(items):
    for item in items:
        if "phase-06-preemption" in str(item.path):
            item.add_marker(pytest.mark.timeout(10))


@pytest.fixture(scope="session")
def a_request():
    """`a_request(id, num_prompt, max_tokens=100, generated=0)`: a new request, or one that was preempted long ago."""

    def create(request_id, num_prompt, max_tokens=100, **options):
        return Request(request_id, [1] * num_prompt, max_tokens, **options)

    return create


@pytest.fixture(scope="session")
def paged():
    """`paged(requests, num_blocks=…)`: a PagedScheduler whose line they stand in, with blocks of 4 unless told."""

    def create(requests=(), *, cls=PagedScheduler, block_size=4, **options):
        scheduler = cls(block_size=block_size, **options)
        for request in requests:
            scheduler.add_request(request)
        return scheduler

    return create


@pytest.fixture(scope="session")
def admit():
    """`admit(scheduler)`: what `scheduler.admit` adds to an empty step."""

    def admitted(scheduler):
        output = SchedulerOutput()
        scheduler.admit(output)
        return output

    return admitted


@pytest.fixture(scope="session")
def a_step():
    """`a_step(scheduler)`: schedules a step, reports token 7 for everybody in it, and returns its output."""

    def step(scheduler):
        output = scheduler.schedule()
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 7))
        return output

    return step
