"""Fixtures of phase 9: the scheduler without later tasks, requests, steps, and random runs."""

from __future__ import annotations

import pytest

from minicache.errors import InvariantError
from minicache.request import Request
from minicache.scheduler.audit_sharing import SharingAuditor
from minicache.scheduler.chunked import ChunkedPrefillScheduler
from minicache.scheduler.observe import observe
from minicache.scheduler.sharing import SharingScheduler
from minicache_course import scenario
from minicache_course.checks import CheckFailed, call, that
from minicache_course.follow import following, following_schedulers


@pytest.fixture(autouse=True)
def _scenario():
    """A failure shows the schedulers and requests, and the calls so far."""
    with (
        scenario.telling(),
        following_schedulers(),
        following(ChunkedPrefillScheduler, "__init__"),
        following(SharingScheduler, fork_request=_fork),
    ):
        yield


def _fork(child, request_id, child_id, output_token_ids=None):
    said = "" if output_token_ids is None else f", with output {output_token_ids}"
    return f"fork_request({request_id!r}, {child_id!r}){said}", ""


class _Unprotected:
    """No request is ever protected: for tasks 1 and 2, which come before task 3."""

    def schedule_running(self, output):
        SharingScheduler.schedule_running(self, output)

    def head(self):
        return SharingScheduler.head(self)

    def preempt(self, request, output):
        SharingScheduler.preempt(self, request, output)


class _WholeBlocks:
    """An admitted request gets the blocks of all its tokens, as in phase 8: for task 1, which comes before task 2."""

    def blocks_to_take(self, request, found=()):
        return SharingScheduler.blocks_to_take(self, request, found)

    def blocks_missing(self, request):
        return SharingScheduler.blocks_missing(self, request)


class WholeBlocksScheduler(_WholeBlocks, _Unprotected, ChunkedPrefillScheduler):
    """`ChunkedPrefillScheduler` without tasks 2 and 3."""


class UnprotectedScheduler(_Unprotected, ChunkedPrefillScheduler):
    """`ChunkedPrefillScheduler` without task 3."""


@pytest.fixture(scope="session")
def whole_blocks():
    """`whole_blocks(budget, *requests)`: the scheduler without tasks 2 and 3; 1,000 blocks of 4 by default."""
    return _maker(WholeBlocksScheduler)


@pytest.fixture(scope="session")
def unprotected():
    """`unprotected(budget, *requests)`: the scheduler without task 3; 1,000 blocks of 4 by default."""
    return _maker(UnprotectedScheduler)


@pytest.fixture(scope="session")
def chunked():
    """`chunked(budget, *requests)`: the scheduler of this phase; 1,000 blocks of 4 by default."""
    return _maker(ChunkedPrefillScheduler)


def _maker(cls):
    def create(budget=8192, *requests, **options):
        scheduler = cls(**{"num_blocks": 1000, "block_size": 4, "max_num_batched_tokens": budget} | options)
        for request in requests:
            scheduler.add_request(request)
        return scheduler

    return create


@pytest.fixture(scope="session")
def a_request():
    """`a_request(id, prompt, max_tokens=9, **more)`: a new request; a number as prompt means that many tokens 1."""

    def create(request_id, prompt, max_tokens=9, **more):
        return Request(request_id, [1] * prompt if isinstance(prompt, int) else prompt, max_tokens, **more)

    return create


@pytest.fixture(scope="session")
def a_step():
    """`a_step(scheduler)`: schedules a step, commits token 7 for all its requests, checks, and returns its output."""

    def step(scheduler, token=7):
        __tracebackhide__ = True
        output = call(scheduler.schedule).value
        scheduled = [each.request_id for each in output.scheduled]
        that("the requests in `scheduled`, against those in `num_scheduled_tokens`", scheduled).gives(
            [*output.num_scheduled_tokens]
        )
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, token))
        scheduler.check()
        return output

    return step


@pytest.fixture(scope="session")
def serve(a_step):
    """`serve(scheduler, *requests, steps=None)`: id → tokens computed, for each step; all steps, or that many."""

    def run(scheduler, *requests, steps=None):
        __tracebackhide__ = True
        for request in requests:
            scheduler.add_request(request)
        work = []
        while scheduler.has_unfinished and len(work) != steps:
            work.append(dict(a_step(scheduler).num_scheduled_tokens))
            if len(work) > 2000:
                raise CheckFailed("requests served", f"{scheduler.num_running} still run after 2000 steps", "all")
        return work

    return run


@pytest.fixture(scope="session")
def random_run():
    """`random_run(scheduler, rng, *observers)`: serves random requests under the auditor, which must pass every step.

    They come in the first 60 steps, with two priorities and groups, and prompts that begin alike. Some are forked, some
    are aborted, and some steps fail: their tokens never come.
    """

    def run(scheduler, rng, *observers):
        __tracebackhide__ = True
        watched = observe(scheduler, SharingAuditor(), *observers)
        names, requests, awaited = iter(range(10**6)), [], False
        try:
            for step in range(4000):
                if step < 60:
                    requests += _arrivals(watched, rng, names, awaited)
                unfinished = [*watched.running, *watched.waiting.values()]
                if unfinished and rng.random() < 0.04:
                    watched.abort_request(rng.choice(unfinished).request_id)
                output = call(watched.schedule).value
                watched.check()
                if awaited := rng.random() < 0.05:
                    continue  # the step's tokens never come
                watched.update_from_output(output, {each: rng.randrange(3) for each in output.num_scheduled_tokens})
                watched.check()
                if step >= 60 and not watched.has_unfinished:
                    break
        except InvariantError as error:
            that("the auditor", f"InvariantError: {error}").gives("no error")
        that("requests that have not finished", [each for each in requests if not each.status.is_finished]).gives([])
        that("used blocks", scheduler.pool.num_used).gives(0)

    return run


def _arrivals(scheduler, rng, names, awaited):
    """Sometimes adds a request, sometimes a fork; returns them."""
    new = []
    if rng.random() < 0.3:
        prompt = [rng.randrange(2)] * rng.randint(1, 20)
        options = {"priority": rng.choice([0, 0, 1]), "group": rng.choice(["text", "text", "image"])}
        new.append(Request(next(names), prompt, rng.randint(1, 9), **options))
        scheduler.add_request(new[-1])
    parents = [each for each in scheduler.running if each.output_token_ids]
    if parents and not awaited and scheduler.num_running < scheduler.max_num_seqs and rng.random() < 0.2:
        parent = rng.choice(parents)
        outputs = parent.output_token_ids[: rng.randint(0, len(parent.output_token_ids))]
        new.append(scheduler.fork_request(parent.request_id, next(names), outputs))
    return new


@pytest.fixture(scope="session")
def random_options():
    """`random_options(rng)`: a scheduler's options: pools, batches and thresholds down to very small ones."""

    def options(rng):
        swap = rng.random() < 0.5
        return {
            "num_blocks": rng.randint(6, 20),
            "max_num_seqs": rng.randint(1, 8),
            "preemption": "swap" if swap else "recompute",
            "num_host_blocks": 6 if swap else 0,
            "prefix_caching": rng.random() < 0.6,
            "long_prefill_threshold": rng.choice([0, 0, 1, 3, 7]),
            "reserve_full_prompt": rng.random() < 0.5,
        }

    return options
