"""What the tests of phase 8 share: schedulers, requests, a step; a memory that tracks the contents of every block."""

from __future__ import annotations

import pytest

from minicache.engine.beam import BeamSearch
from minicache.memory.prefix import CachingBlockPool
from minicache.request import Request
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.prefix_caching import PrefixCachingScheduler
from minicache.scheduler.sharing import SharingScheduler
from minicache_course import scenario
from minicache_course.checks import CheckFailed, that
from minicache_course.follow import following, following_schedulers
from minicache_course.language import said


@pytest.fixture(autouse=True)
def _scenario():
    """A failure shows the pool, the schedulers and requests, or the search, and the calls so far."""
    with (
        scenario.telling(),
        following_schedulers(),
        following(PrefixCachingScheduler, "__init__"),
        following(SharingScheduler, "__init__", fork_request=_fork),
        following(CachingBlockPool, "__init__", "allocate", "share", "free", "cache", "uncache", "reset"),
        following(BeamSearch, "__init__", advance=_advance),
    ):
        yield


def _fork(child, request_id, child_id, output_token_ids=None):
    said = "" if output_token_ids is None else f", with output {output_token_ids}"
    return f"fork_request({request_id!r}, {child_id!r}){said}", ""


def _advance(steps, candidates):
    return f"advance({candidates}) → {[tuple(step) for step in steps]}", ""


@pytest.fixture(scope="session")
def caching():
    """`caching(requests, num_blocks=…)`: a scheduler with a prefix cache and without forks, blocks of 4 by default."""
    return _maker(PrefixCachingScheduler, prefix_caching=True)


@pytest.fixture(scope="session")
def sharing():
    """`sharing(requests, num_blocks=…)`: a scheduler that forks, blocks of 4 and no prefix cache by default."""
    return _maker(SharingScheduler)


def _maker(cls, **usual):
    def create(requests=(), **options):
        scheduler = cls(**{"num_blocks": 20, "block_size": 4} | usual | options)
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
    """`a_step(scheduler)`: schedules a step, commits token 7 for each of its requests, checks, returns its output."""

    def step(scheduler, token=7):
        output = scheduler.schedule()
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, token))
        scheduler.check()
        return output

    return step


@pytest.fixture(scope="session")
def serve(a_step):
    """`serve(scheduler, *requests)`: serves all until they finish; id → the tokens that its first step computed."""

    def run(scheduler, *requests):
        for request in requests:
            scheduler.add_request(request)
        first = {}
        for _ in range(1000):
            if not scheduler.has_unfinished:
                return first
            first = dict(a_step(scheduler).num_scheduled_tokens) | first
        raise CheckFailed("requests served", f"{scheduler.num_running} still run after 1000 steps", "all")

    return run


class Memory:
    """The contents of a device, slot by slot. No hash is trusted.

    Keys and values of a token depend on all tokens before it and on the adapter, and belong to a tenant. So a slot
    holds all of that: (salt, adapter, the tokens up to this one).
    """

    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.blocks = {}  # block → offset → what is there
        self.host = {}

    def run(self, output: SchedulerOutput, *, fails=False):
        """Carry out a step: swaps, copies, and the model's writes, which are garbage if the step fails.

        Then every request of the step must read its own tokens, all of them.
        """
        __tracebackhide__ = True
        for pairs in output.swapped_out.values():
            self.host |= {host: dict(self.blocks.get(block, {})) for block, host in pairs}
        for pairs in output.swapped_in.values():
            self.blocks |= {block: dict(self.host[host]) for host, block in pairs}
        self.blocks |= {target: dict(self.blocks.get(source, {})) for source, target in output.blocks_to_copy}
        for request in output.scheduled:
            first = request.num_computed_tokens
            for position in range(first, first + output.num_scheduled_tokens[request.request_id]):
                block_id, offset = self._slot(request, position)
                held = "garbage" if fails else _held(request, position)
                self.blocks.setdefault(block_id, {})[offset] = held
        if not fails:
            for request in output.scheduled:
                num_tokens = request.num_computed_tokens + output.num_scheduled_tokens[request.request_id]
                self._holds(request.block_ids, request, num_tokens, said("reads"))

    def finds(self, request):
        """The blocks that `find_prefix` finds for a request must hold its tokens."""
        __tracebackhide__ = True
        blocks = self.scheduler.find_prefix(request)
        self._holds(blocks, request, len(blocks) * self.scheduler.pool.block_size, said("finds"))

    def _holds(self, block_ids, request, num_tokens, verb):
        __tracebackhide__ = True
        block_size = self.scheduler.pool.block_size
        for position in range(num_tokens):
            block_id = block_ids[position // block_size]
            got, wanted = self.blocks.get(block_id, {}).get(position % block_size), _held(request, position)
            if got != wanted:  # told only then: this is looked at often
                where = f"at position {position}, in block {block_id}"
                that(f"(salt, adapter, tokens) of what {request.request_id!r} {verb} {where}", got).gives(wanted)

    def _slot(self, request, position):
        __tracebackhide__ = True
        index, offset = divmod(position, self.scheduler.pool.block_size)
        if index >= len(request.block_ids):
            wanted = f"at least {index + 1}, for {position + 1} tokens"
            raise CheckFailed(f"blocks of {request.request_id!r}", f"{len(request.block_ids)}", wanted)
        return request.block_ids[index], offset


def _held(request, position):
    return request.cache_salt, request.adapter, request.token_ids(0, position + 1)


@pytest.fixture(scope="session")
def memory():
    """`memory(scheduler)`: a `Memory`; `.run(output)` carries out a step, and checks that all read their own tokens."""
    return Memory
