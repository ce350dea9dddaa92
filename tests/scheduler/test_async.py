"""Asynchronous scheduling: what is counted ahead, what comes one step late, and what an auditor notices.

`test_golden_traces.py` has vLLM's schedules, `test_lost_steps.py` runs with a memory, with forks, aborts and failures.
"""

from __future__ import annotations

import random
from zlib import crc32

import pytest

from minicache.errors import InvariantError
from minicache.request import Request, RequestStatus
from minicache.scheduler import AsyncChunkedScheduler, create_scheduler
from minicache.scheduler.audit_async import AsyncAuditor
from minicache.scheduler.audit_sharing import SharingAuditor
from minicache.scheduler.audit_trace import audit_trace
from minicache.scheduler.drive import drive
from minicache.scheduler.observe import Recorder, observe
from minicache.scheduler.restore import restore

TOKEN, STOP = 7, 9


def overlapping(cls=AsyncChunkedScheduler, **options):
    """A scheduler with blocks of 4, under the auditor."""
    return observe(cls(**{"num_blocks": 8, "block_size": 4} | options), AsyncAuditor())


def request_of(request_id, num_prompt=4, max_tokens=9, **more):
    number = crc32(str(request_id).encode()) % 1000
    return Request(request_id, [number + place for place in range(num_prompt)], max_tokens, **more)


def scheduled(scheduler, *requests):
    for request in requests:
        scheduler.add_request(request)
    return scheduler.schedule()


def tokens_of(output, token=TOKEN):
    return dict.fromkeys(output.num_scheduled_tokens, token)


# Ahead of the tokens


def test_a_step_is_scheduled_while_one_is_outstanding():
    """The placeholder is counted on: one token, in a block of its own, before the first token is known."""
    scheduler, request = overlapping(), request_of("a", 4)
    first = scheduled(scheduler, request)
    second = scheduler.schedule()
    assert (first.num_scheduled_tokens, second.num_scheduled_tokens) == ({"a": 4}, {"a": 1})
    assert (request.num_computed_tokens, request.num_placeholders, request.output_token_ids) == (4, 1, [])
    assert len(request.block_ids) == 2
    assert scheduler.update_from_output(first, tokens_of(first)) == []
    assert (request.num_computed_tokens, request.num_placeholders, request.output_token_ids) == (4, 0, [TOKEN])
    third = scheduler.schedule()
    assert (third.num_scheduled_tokens, request.num_computed_tokens, request.num_placeholders) == ({"a": 1}, 5, 1)


def test_a_chunk_of_a_prompt_has_no_placeholder():
    scheduler, request = overlapping(max_num_batched_tokens=4), request_of("a", 9)
    first = scheduled(scheduler, request)
    second = scheduler.schedule()
    assert (first.num_scheduled_tokens, second.num_scheduled_tokens) == ({"a": 4}, {"a": 4})
    assert (request.num_computed_tokens, request.num_placeholders) == (4, 0)
    assert scheduler.update_from_output(first, tokens_of(first)) == []
    assert scheduler.schedule().num_scheduled_tokens == {"a": 1}
    assert request.output_token_ids == []


@pytest.mark.parametrize(
    ("options", "max_tokens", "num_steps", "reason"),
    [({}, 3, 3, "length"), ({"max_model_len": 6}, 9, 2, "length"), ({"num_blocks": 2}, 20, 5, "capacity")],
)
def test_no_step_computes_behind_the_last_token(options, max_tokens, num_steps, reason):
    """It is on its way: the request is passed over, and keeps its slot until it has come."""
    scheduler, request = overlapping(**options), request_of("a", 4, max_tokens)
    output = scheduled(scheduler, request)
    for _ in range(num_steps - 1):
        assert output.num_scheduled_tokens
        before, output = output, scheduler.schedule()
        assert scheduler.update_from_output(before, tokens_of(before)) == []
    before, output = output, scheduler.schedule()
    assert (output.num_scheduled_tokens, scheduler.num_running) == ({}, 1)
    assert scheduler.update_from_output(before, tokens_of(before)) == [request]
    assert (request.finish_reason, len(request.output_token_ids)) == (reason, num_steps)
    assert scheduler.update_from_output(output, {}) == []
    assert scheduler.pool.num_used == 0


def test_without_overlap_it_schedules_as_chunked():
    """Each step is committed before the next: the same steps, token by token."""
    orders = []
    for stage in ("chunked", "async"):
        options = {"num_blocks": 12, "block_size": 4, "max_num_batched_tokens": 9, "max_num_seqs": 3}
        scheduler = observe(create_scheduler(stage, prefix_caching=True, **options), SharingAuditor())
        requests = [Request(number, [1] * (3 * number + 1), 30) for number in range(8)]
        tally = drive(scheduler, requests)
        assert {request.finish_reason for request in requests} == {"length", "capacity"}
        orders.append((tally.order, tally.finished, tally.num_prefill_tokens, tally.num_preemptions))
    assert orders[0] == orders[1]
    assert orders[0][3] > 0


# One step late


def test_a_stop_token_is_noticed_one_step_late():
    """The next step computes one token more of the request, which is dropped. Its blocks are free, and its id."""
    scheduler, old = overlapping(), request_of("a", stop_token_ids=[STOP])
    first = scheduled(scheduler, old)
    second = scheduler.schedule()
    assert scheduler.update_from_output(first, {"a": STOP}) == [old]
    assert (old.finish_reason, old.block_ids, scheduler.pool.num_used) == ("stop", [], 0)
    third = scheduled(scheduler, new := request_of("a"))
    assert scheduler.update_from_output(second, {"a": TOKEN}) == []
    assert (old.output_token_ids, new.output_token_ids) == ([STOP], [])
    scheduler.update_from_output(third, {"a": TOKEN})
    assert new.output_token_ids == [TOKEN]


@pytest.mark.parametrize("ignores", [True, False])
def test_the_last_token_may_be_a_stop_token(ignores):
    scheduler = overlapping()
    request = request_of("a", 4, 1, stop_token_ids=[STOP], ignore_eos=ignores)
    output = scheduled(scheduler, request)
    assert scheduler.schedule().num_scheduled_tokens == {}
    assert scheduler.update_from_output(output, {"a": STOP}) == [request]
    assert request.finish_reason == ("length" if ignores else "stop")


def short_of_blocks(**options):
    """Requests of 3 and 4 blocks, and all 7 are used: the second step preempts b, whose first token is on its way."""
    scheduler = overlapping(num_blocks=7, **options)
    a, b = request_of("a", 12), request_of("b", 16, stop_token_ids=[STOP])
    first = scheduled(scheduler, a, b)
    second = scheduler.schedule()
    assert second.preempted == ["b"]
    return scheduler, a, b, first, second


@pytest.mark.parametrize("swap", [{}, {"preemption": "swap", "num_host_blocks": 4}], ids=["recompute", "swap"])
def test_a_stale_token_is_appended(swap):
    """It changes no counter. The request comes back with it."""
    scheduler, a, b, first, second = short_of_blocks(**swap)
    computed = 16 if swap else 0
    assert (b.num_computed_tokens, b.num_placeholders, b.output_token_ids) == (computed, 0, [])
    assert scheduler.update_from_output(first, {"a": 5, "b": 6}) == []
    assert (b.num_computed_tokens, b.num_placeholders, b.output_token_ids) == (computed, 0, [6])
    assert b.status is (RequestStatus.SWAPPED if swap else RequestStatus.WAITING)
    assert a.output_token_ids == [5]
    scheduler.abort_request("a")
    third = scheduler.schedule()
    assert third.num_scheduled_tokens == {"b": 17 - computed}
    scheduler.update_from_output(second, {"a": 5})
    scheduler.update_from_output(third, {"b": 8})
    assert b.output_token_ids == [6, 8]


@pytest.mark.parametrize("swap", [{}, {"preemption": "swap", "num_host_blocks": 4}], ids=["recompute", "swap"])
def test_a_stale_token_may_finish_its_request(swap):
    scheduler, _, b, first, _ = short_of_blocks(**swap)
    assert scheduler.update_from_output(first, {"a": 5, "b": STOP}) == [b]
    assert (b.finish_reason, b.output_token_ids, b.host_block_ids) == ("stop", [STOP], [])
    assert scheduler.num_waiting == 0
    assert scheduler.host_pool is None or scheduler.host_pool.num_used == 0


def test_a_stale_chunk_has_no_token():
    """The prompt of b is not computed to its end when it is preempted."""
    scheduler = overlapping(num_blocks=5, max_num_batched_tokens=11, reserve_full_prompt=False)
    a, b = request_of("a", 7), request_of("b", 16)
    outputs = [scheduled(scheduler, a, b)]
    while not outputs[-1].preempted:
        outputs.append(scheduler.schedule())
        before = outputs[-2]
        num_tokens = len(b.output_token_ids)
        scheduler.update_from_output(before, tokens_of(before))
    assert before.num_scheduled_tokens.keys() == {"a", "b"}
    assert (b.status, num_tokens, b.output_token_ids) == (RequestStatus.WAITING, 0, [])


@pytest.mark.parametrize("tokens", [{"b": 6}, {"a": 5, "b": 6}], ids=["no token for it", "a token for it"])
@pytest.mark.parametrize("when", ["before the next schedule()", "before the commit"])
def test_a_client_leaves_while_its_step_runs(when, tokens):
    scheduler, old, other = overlapping(), request_of("a"), request_of("b")
    first = scheduled(scheduler, old, other)
    if when == "before the next schedule()":
        scheduler.abort_request("a")
    scheduler.schedule()
    scheduler.abort_request("a")
    assert (old.finish_reason, old.block_ids, old.num_placeholders) == ("abort", [], 0)
    if when == "before the next schedule()":
        assert old.num_computed_tokens == 0
    assert scheduler.update_from_output(first, tokens) == []
    assert (old.output_token_ids, other.output_token_ids) == ([], [6])


# Misuse and failures


def test_a_third_step_is_refused():
    scheduler = overlapping()
    first = scheduled(scheduler, request := request_of("a"))
    second = scheduler.schedule()
    with pytest.raises(ValueError, match="two steps are outstanding: commit the older one"):
        scheduler.schedule()
    with pytest.raises(ValueError, match="an older one has to be committed first"):
        scheduler.update_from_output(second, {"a": TOKEN})
    assert (request.num_computed_tokens, request.output_token_ids) == (4, [])
    scheduler.update_from_output(first, {"a": TOKEN})
    scheduler.update_from_output(second, {"a": TOKEN})
    with pytest.raises(ValueError, match="already committed"):
        scheduler.update_from_output(second, {"a": TOKEN})
    assert request.output_token_ids == [TOKEN, TOKEN]


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        ({"a": TOKEN}, ValueError, "no token for request 'b'"),
        ({"a": TOKEN, "b": TOKEN, "c": TOKEN}, ValueError, "did not have: .*'c'"),
        ({"a": TOKEN, "b": 7.0}, TypeError, "must be an int; got float"),
        ({"a": TOKEN, "b": -1}, ValueError, "at least 0, got -1"),
    ],
)
def test_a_bad_commit_changes_nothing(tokens, error, message):
    """Neither of a running request, nor of the preempted one that gets a stale token."""
    scheduler, a, b, first, _ = short_of_blocks()
    with pytest.raises(error, match=message):
        scheduler.update_from_output(first, tokens)
    assert (a.num_placeholders, a.output_token_ids, b.output_token_ids) == (1, [], [])
    scheduler.update_from_output(first, {"a": 5, "b": 6})
    assert (a.output_token_ids, b.output_token_ids) == ([5], [6])


@pytest.mark.parametrize("interrupted", [False, True])
def test_recover_gives_up_both_steps(interrupted):
    scheduler, a, _, first, second = short_of_blocks(prefix_caching=True)
    if interrupted:
        restore(scheduler)
    scheduler.recover()
    assert (a.num_placeholders, a.num_computed_tokens, scheduler.pool.num_used) == (0, 0, 0)
    for output in (first, second):
        with pytest.raises(ValueError, match="given up"):
            scheduler.update_from_output(output, tokens_of(output))
    assert scheduler.schedule().num_scheduled_tokens == {"a": 12, "b": 16}


def test_a_request_is_forked_between_steps_only():
    scheduler = overlapping()
    first = scheduled(scheduler, request_of("a"))
    second = scheduler.schedule()
    scheduler.update_from_output(first, {"a": TOKEN})
    with pytest.raises(ValueError, match="between two steps"):
        scheduler.fork_request("a", "b")
    scheduler.update_from_output(second, {"a": TOKEN})
    assert scheduler.fork_request("a", "b").output_token_ids == [TOKEN, TOKEN]


def test_options():
    with pytest.raises(ValueError, match='num_speculative_tokens: "async" computes one token'):
        create_scheduler("async", num_blocks=8, num_speculative_tokens=2)
    scheduler = create_scheduler("async", num_blocks=8, long_prefill_threshold=3, reserve_full_prompt=False)
    assert (scheduler.overlaps, create_scheduler("chunked", num_blocks=8).overlaps) == (True, False)


# Random runs


def token_of(request):
    """What a model would generate next for the request: it depends on the request and the position."""
    return crc32(repr((request.request_id, len(request.output_token_ids))).encode()) % 12


def serve(scheduler, arrivals, depth):
    """Serve the requests with `depth` steps in flight, and return how many steps it took."""
    coming, flight, num_steps = list(arrivals), [], 0
    while coming or scheduler.has_unfinished or flight:
        while coming and coming[0][0] <= num_steps:
            scheduler.add_request(coming.pop(0)[1])
        if scheduler.has_unfinished:
            flight.append(scheduler.schedule())
            scheduler.check()
        if len(flight) > depth or (flight and not scheduler.has_unfinished):
            output = flight.pop(0)
            scheduler.update_from_output(output, {each.request_id: token_of(each) for each in output.scheduled})
            scheduler.check()
        num_steps += 1
        assert num_steps < 2000
    return num_steps


def arrivals_of(rng):
    beginning = [rng.randrange(2) for _ in range(20)]
    arrivals = []
    for number in range(rng.randint(2, 14)):
        prompt = beginning[: rng.randint(1, 20)] + [rng.randrange(3) for _ in range(rng.randint(0, 6))]
        options = {"stop_token_ids": rng.choice([(), (1, 2)]), "priority": rng.choice([0, 0, 1])}
        request = Request(number, prompt, rng.randint(1, 14), group=rng.choice(["text", "text", "image"]), **options)
        arrivals.append((rng.randint(0, 20), request))
    return sorted(arrivals, key=lambda arrival: arrival[0])


@pytest.mark.parametrize("seed", range(40))
def test_the_same_tokens_as_without_overlap(seed):
    """Whatever the pool, some too small for a request: outputs and reasons are the same, and all blocks are free."""
    rng = random.Random(seed)
    options = {
        "num_blocks": rng.randint(7, 14),
        "block_size": 4,
        "max_num_seqs": rng.choice([2, 4, 8]),
        "max_num_batched_tokens": rng.choice([5, 9, 30]),
        "max_model_len": rng.choice([None, None, 28]),
        "prefix_caching": rng.random() < 0.5,
        "reserve_full_prompt": rng.random() < 0.5,
        "long_prefill_threshold": rng.choice([0, 0, 4]),
        "watermark": rng.choice([0.0, 0.2]),
        "preemption": rng.choice(["recompute", "swap"]),
        "num_host_blocks": 5,
    }
    answers, steps = [], []
    for stage, depth in (("chunked", 0), ("async", 0), ("async", 1)):
        arrivals = arrivals_of(random.Random(seed))
        scheduler = create_scheduler(stage, **options)
        if depth:
            scheduler = observe(scheduler, AsyncAuditor(), Recorder(steps.append))
        serve(scheduler, arrivals, depth)
        answers.append([(request.output_token_ids, request.finish_reason) for _, request in arrivals])
        assert scheduler.pool.num_used == 0
        assert scheduler.host_pool is None or scheduler.host_pool.num_used == 0
    assert answers[1] == answers[2] == answers[0]
    if not options["prefix_caching"]:
        limits = {name: options[name] for name in ("max_num_seqs", "max_num_batched_tokens")}
        assert audit_trace(steps, **limits) == len(steps)


# What the auditor notices


class FreesEarly(AsyncChunkedScheduler):
    """Frees the blocks of a request whose last token is on its way, while the step that computes it runs."""

    def num_uncomputed(self, request):
        num_uncomputed = super().num_uncomputed(request)
        if not num_uncomputed:
            self.pool.free(request.block_ids[::-1])
            request.block_ids = []
        return num_uncomputed


class FreesTwice(AsyncChunkedScheduler):
    """Drops the result of a finished request, and frees again the blocks that it had while the step ran."""

    def schedule(self):
        output = super().schedule()
        self.held = [(request, request.block_ids[:]) for request in output.scheduled]
        return output

    def update_from_output(self, output, token_ids):
        finished = super().update_from_output(output, token_ids)
        for request, block_ids in self.held:
            if request in finished:
                self.pool.free([block_id for block_id in block_ids if self.pool.ref_count(block_id)])
        return finished


class KeepsPlaceholders(AsyncChunkedScheduler):
    """Forgets at a preemption that the placeholder is stale."""

    def release(self, request):
        on_its_way = request.num_placeholders
        super().release(request)
        request.num_placeholders = on_its_way


class ReadsPlaceholders(AsyncChunkedScheduler):
    """Takes the placeholder for the token, if the request was preempted."""

    def append_token(self, request, token):
        return super().append_token(request, token if request.status is RequestStatus.RUNNING else -1)


class HashesPlaceholders(AsyncChunkedScheduler):
    """Caches a block that the step fills with a placeholder, as if the placeholder were token 0."""

    def schedule_running(self, output):
        unknown = [request for request in self.running if request.num_placeholders]
        super().schedule_running(output)
        for request in unknown:
            if request.request_id in output.num_scheduled_tokens:
                request.output_token_ids.append(0)
                self.cache_blocks(request, request.num_tokens - 1, request.num_tokens)
                request.output_token_ids.pop()


class DropsStaleTokens(AsyncChunkedScheduler):
    """A preempted request loses the token that was on its way."""

    def append_token(self, request, token):
        return request.status is RequestStatus.RUNNING and super().append_token(request, token)


class MixesRowsUp(AsyncChunkedScheduler):
    """Gives the tokens to the batch as it is now, and not as it was when the step was scheduled."""

    def update_from_output(self, output, token_ids):
        rows = [request_id for request_id in output.num_scheduled_tokens if request_id not in self.ahead_preempted()]
        moved = dict(zip(rows, token_ids.values(), strict=False))
        return super().update_from_output(output, {**token_ids, **moved})

    def ahead_preempted(self):
        return self.ahead.preempted if self.ahead is not None else []


class CountsTwice(AsyncChunkedScheduler):
    """Counts a step as computed when it is scheduled, and when it is committed."""

    def append_token(self, request, token):
        request.num_computed_tokens += request.num_placeholders
        return super().append_token(request, token)


class GoesBeyond(AsyncChunkedScheduler):
    """Does not know that the last token is on its way."""

    def num_uncomputed(self, request):
        return request.num_tokens + request.num_placeholders - request.num_computed_tokens


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (FreesEarly, "holdings"),
        (FreesTwice, "blocks"),
        (KeepsPlaceholders, "flight"),
        (ReadsPlaceholders, "flight: .* has got -1"),
        (HashesPlaceholders, "found"),
        (DropsStaleTokens, "flight"),
        (MixesRowsUp, "flight: .* has got .* which was not generated for it"),
        (CountsTwice, "flight"),
        (GoesBeyond, "work: .* last one is on its way"),
    ],
)
def test_the_auditor_notices(broken, rule):
    """Requests that begin alike and preempt each other, with stop tokens and last tokens."""

    def run(cls):
        for seed in range(20):
            scheduler = overlapping(cls, num_blocks=9, prefix_caching=True, max_num_batched_tokens=16)
            serve_without_check(scheduler, arrivals_of(random.Random(seed)))

    run(AsyncChunkedScheduler)
    with pytest.raises(InvariantError, match=rf"^step \d+, {rule}"):
        run(broken)


def serve_without_check(scheduler, arrivals):
    before = None
    for step in range(300):
        for at, request in arrivals:
            if at == step:
                scheduler.add_request(request)
        output = scheduler.schedule()
        if before is not None:
            scheduler.update_from_output(before, {each.request_id: token_of(each) for each in before.scheduled})
        before = output
