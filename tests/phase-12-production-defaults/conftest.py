"""What the tests of phase 12 share: right schedulers of many kinds, and runs one step ahead of the tokens."""

from __future__ import annotations

import random
from zlib import crc32

import pytest

from minicache.errors import MinicacheError
from minicache.request import Request, RequestStatus
from minicache.scheduler.async_chunked import AsyncChunkedScheduler
from minicache_course.checks import CheckFailed, that, told
from minicache_course.exposing import Judge, OutOfSteps
from minicache_course.incidents.async_bases import AlternatingScheduler, FetchingScheduler, SlottedScheduler
from minicache_course.incidents.async_broken import StalePlaceholderScheduler
from minicache_course.seeds import fresh


class HoldingScheduler(FetchingScheduler):
    """Right: holds back all blocks of a request that leaves, while any step that computes it is outstanding."""

    def release(self, request):
        computed_by = [each for each in (self.outstanding, self.ahead) if each and request in each.scheduled]
        if computed_by:
            self.hold(request, computed_by[-1])
        super().release(request)


class SparingScheduler(FetchingScheduler):
    """Right: holds back only the blocks that a step in flight writes."""

    def release(self, request):
        computed_by = [each for each in (self.outstanding, self.ahead) if each and request in each.scheduled]
        if computed_by:
            num_flying = sum(each.num_scheduled_tokens[request.request_id] for each in computed_by)
            first = max(0, request.num_computed_tokens - num_flying) // self.pool.block_size
            self.pool.free(request.block_ids[:first][::-1])
            request.block_ids = request.block_ids[first:]
            self.hold(request, computed_by[-1])
        super().release(request)


class PatientScheduler(FetchingScheduler):
    """Right: frees at once, and admits no request in the step after."""

    has_left = False

    def release(self, request):
        self.has_left |= request.status.is_finished
        super().release(request)

    def may_admit(self, output):
        has_left, self.has_left = self.has_left, False
        return not has_left and super().may_admit(output)


class TwiceStaleScheduler(StalePlaceholderScheduler):
    """Incident 10 with another number: two placeholders outlive their token."""

    def append_token(self, request, token):
        finished = super().append_token(request, token)
        request.num_placeholders *= 2
        return finished


class NotingScheduler(SlottedScheduler):
    """Right: notes the requests of each step by their slots."""

    def schedule(self):
        output = super().schedule()
        self.__dict__.setdefault("noted", {})[id(output)] = dict(self.slots)
        return output

    def receiver(self, output, slot):
        return self.noted[id(output)][slot]


class RowScheduler(SlottedScheduler):
    """Incident 11 by another number: tokens go by the place in the batch, as it is when they come."""

    def receiver(self, output, slot):
        row = self.slots_of(output).index(slot)
        return self.running[row] if row < len(self.running) else None


SWAP = {"preemption": "swap", "num_host_blocks": 1000}
WATERMARK = {"watermark": 0.25}
PREFIXES = {"prefix_caching": True}


RIGHT = {
    9: [
        (HoldingScheduler, {}),
        (SparingScheduler, {}),
        (PatientScheduler, {}),
        (HoldingScheduler, WATERMARK),
        (HoldingScheduler, PREFIXES),
    ],
    10: [
        (AlternatingScheduler, {}),
        (AsyncChunkedScheduler, {}),
        (AlternatingScheduler, SWAP),
        (AlternatingScheduler, WATERMARK),
        (AlternatingScheduler, PREFIXES),
    ],
    11: [
        (NotingScheduler, {}),
        (AsyncChunkedScheduler, {}),
        (NotingScheduler, SWAP),
        (NotingScheduler, WATERMARK),
        (NotingScheduler, PREFIXES),
    ],
}
"""Of each incident, schedulers without its bug, and options that its test must not depend on."""
VARIANTS = {10: [TwiceStaleScheduler], 11: [RowScheduler]}
"""Of some incidents, schedulers with the same bug in other numbers. An exposing test must not know the numbers."""


class Room(Judge):
    """Judges exposing tests and fixes."""

    right, variants = RIGHT, VARIANTS


def answer(request_id, index):
    """The token that the model generates for a request at a place of its output. No other request has it."""
    return 1000 * (1 + crc32(repr(request_id).encode()) % 10_000) + index


class Flight:
    """A run one step ahead of the tokens, with a model whose tokens tell whose they are. Every step is checked.

    Attributes:
        scheduler: what is run.
        rows: of each step, {request id: tokens}.
        requests: all that were added.
    """

    def __init__(self, scheduler, *, fetches=False):
        self.scheduler, self.fetches = scheduler, fetches
        self.rows, self.requests, self.flying = [], [], []  # flying: (step, its tokens, requests that get one)
        self.written = {}  # block → the request that the step before writes it for
        self.num_owed = {}  # id(request) → tokens that have come for it

    def add(self, *requests):
        for request in requests:
            self.scheduler.add_request(request)
            self.requests.append(request)

    def schedule(self):
        """Schedule a step, and check what it computes. The step."""
        __tracebackhide__ = True
        output = self.scheduler.schedule()
        block_size = self.scheduler.pool.block_size
        coming = self.flying[-1][2] if self.flying else []
        tokens, gets, written = {}, [], {}
        for request, num_new in zip(output.scheduled, output.num_scheduled_tokens.values(), strict=True):
            end = request.num_computed_tokens + num_new
            known = request.num_tokens + any(each is request for each in coming)
            if end > known:
                called = f"step {len(self.rows)}: {request!r}"
                raise CheckFailed(called, f"computes {end} tokens", f"at most {known}, which are known or on their way")
            if end > len(request.block_ids) * block_size:
                called = f"step {len(self.rows)}: {request!r}"
                raise CheckFailed(called, f"computes {end} tokens in {len(request.block_ids)} blocks", "blocks for all")
            if end == known:
                tokens[request.request_id] = answer(request.request_id, end - request.num_prompt_tokens)
                gets.append(request)
            start = request.num_computed_tokens // block_size
            clash = [block for block in request.block_ids[start:] if self.written.get(block, request) is not request]
            if self.fetches and not request.num_computed_tokens and clash:
                called = f"step {len(self.rows)}: {request!r}"
                got = f"is admitted into blocks {clash}, which a step in flight writes"
                raise CheckFailed(called, got, "blocks that none writes")
            written |= dict.fromkeys(request.block_ids[start:], request)
        self.written = written
        self.rows.append(dict(output.num_scheduled_tokens))
        self.flying.append((output, tokens, gets))
        self.scheduler.check()
        return output

    def commit(self):
        """Commit the oldest step, and check what every request has got. The requests that have finished."""
        __tracebackhide__ = True
        output, tokens, gets = self.flying.pop(0)
        for request in gets:
            if not request.status.is_finished:
                self.num_owed[id(request)] = self.num_owed.get(id(request), 0) + 1
        finished = self.scheduler.update_from_output(output, tokens)
        if not self.flying:
            self.written = {}
        for request in self.requests:
            wanted = [answer(request.request_id, index) for index in range(self.num_owed.get(id(request), 0))]
            that(f"the answer of request {request.request_id!r}", request.output_token_ids).gives(wanted)
        self.scheduler.check()
        return finished

    def step(self):
        """An iteration of the engine: schedule, then commit the step before."""
        __tracebackhide__ = True
        self.schedule()
        if len(self.flying) > 1:
            self.commit()

    def land(self, max_steps=500):
        """Serve until all have finished, and no step is in flight; all blocks are free then."""
        __tracebackhide__ = True
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished:
                break
            self.step()
        left = [request.request_id for request in self.requests if not request.status.is_finished]
        that(f"requests that had not finished after {max_steps} steps", left).gives([])
        while self.flying:
            self.commit()
        that("blocks in use when all have finished", self.scheduler.pool.num_used).gives(0)


class Sky:
    """Flights, by hand or at random."""

    def flight(self, scheduler, *requests, fetches=False):
        """A flight with these requests."""
        flight = Flight(scheduler, fetches=fetches)
        flight.add(*requests)
        return flight

    def request(self, request_id, prompt=4, tokens=9, *, stop=None, **more):
        """A new request; `stop`: the place in its output of its stop token."""
        stops = [] if stop is None else [answer(request_id, stop)]
        prompt = [7 + crc32(repr(request_id).encode()) % 90] * prompt
        return Request(request_id, prompt, tokens, stop_token_ids=stops, **more)

    def survives(self, create, *, fetches=False, num_runs=30):
        """Random load with stops, aborts and priorities, in pools down to one request's size: all is as it should."""
        __tracebackhide__ = True
        for seed in range(num_runs):
            rng = random.Random(fresh(seed))
            num_blocks = rng.randint(6, 14)
            options = {"num_blocks": num_blocks, "block_size": 4, "max_num_seqs": rng.randint(1, 5)}
            options |= {"max_num_batched_tokens": rng.choice([6, 64]), "prefix_caching": rng.random() < 0.5}
            flight = Flight(create(**options | rng.choice([{}, {"watermark": 0.2}, SWAP])), fetches=fetches)
            try:
                for number in range(10):
                    for _ in range(rng.randint(0, 4)):
                        flight.step()
                    stop = rng.choice([None, 0, 1, 5])
                    prompt, tokens = rng.randint(1, 12), rng.randint(1, 10)
                    flight.add(self.request(number, prompt, tokens, stop=stop, priority=rng.randint(0, 2)))
                    if rng.random() < 0.2:
                        flight.scheduler.abort_request(rng.randrange(number + 1))
                flight.land()
            except (MinicacheError, OutOfSteps) as error:
                called = f"a run of {type(flight.scheduler).__name__}"
                raise CheckFailed(called, told(error), "every request served") from error
            for request in flight.requests:
                got = len(request.output_token_ids)
                if request.status is RequestStatus.FINISHED_LENGTH:
                    that(f"tokens of {request!r}", got).gives(request.max_tokens)
                else:
                    that(f"{request!r} has stopped or was aborted", request.status.name).gives(
                        "FINISHED_ABORTED" if request.finish_reason == "abort" else "FINISHED_STOPPED"
                    )


@pytest.fixture(scope="session")
def room():
    """The judge of exposing tests."""
    return Room()


@pytest.fixture(scope="session")
def sky():
    """Makes flights and requests."""
    return Sky()
