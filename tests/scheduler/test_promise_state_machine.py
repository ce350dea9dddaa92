"""The guarantees of every stage from `paged` on, under any load.

Each step schedules a token or finishes a request; no request waits forever; what cannot fit is refused at once, with a
typed error; and after every step Σ references = Σ table entries, and free + used = total. The machine adds and aborts
requests in mid-run, and lets steps fail, in pools down to one request's size. At the end of each run the scheduler is
left alone, and has to be done within as many steps as there are tokens left.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minicache.errors import RequestTooLargeError
from minicache.request import Request, RequestStatus
from minicache.scheduler import SchedulerOutput, create_scheduler, fair

BLOCK_SIZE = 4
STOP = 9
MAX_TOKENS = 12


class Guarantees(RuleBasedStateMachine):
    """One scheduler, and all requests that it was ever given."""

    stage = "paged"

    @initialize(
        num_blocks=st.integers(1, 9),
        max_num_seqs=st.integers(1, 5),
        max_num_batched_tokens=st.sampled_from([8, 16, 64]),
        max_model_len=st.sampled_from([None, None, 11]),
        num_host_blocks=st.sampled_from([0, 1, 4, 20]),
        watermark=st.sampled_from([0.0, 0.3, 0.9]),
    )
    def begin(self, num_host_blocks: int, **options: object) -> None:
        swap = {"preemption": "swap", "num_host_blocks": num_host_blocks} if num_host_blocks else {}
        self.scheduler = create_scheduler(self.stage, block_size=BLOCK_SIZE, **options, **swap)  # type: ignore[arg-type]
        self.requests: list[Request] = []
        self.output: SchedulerOutput | None = None  # whose tokens are awaited

    @rule(
        prompt=st.integers(1, 30),
        max_tokens=st.integers(1, MAX_TOKENS),
        priority=st.integers(-1, 1),
        arrival_time=st.sampled_from([0.0, 1.0, 5.0]),
        group=st.sampled_from(["text", "text", "image"]),
    )
    def add(self, prompt: int, **options: object) -> None:
        request = Request(len(self.requests), [1] * prompt, stop_token_ids=[STOP], **options)  # type: ignore[arg-type]
        scheduler = self.scheduler
        limit = scheduler.max_model_len or 10**9
        room = min(scheduler.pool.num_blocks * BLOCK_SIZE, scheduler.max_num_batched_tokens, limit - 1)
        before = scheduler.num_waiting, scheduler.has_unfinished
        if prompt > room:
            with pytest.raises(RequestTooLargeError):
                scheduler.add_request(request)
            assert (scheduler.num_waiting, scheduler.has_unfinished) == before
        else:
            scheduler.add_request(request)
            self.requests.append(request)

    @rule(more=st.lists(st.tuples(st.integers(1, 12), st.integers(-2, 2)), min_size=2, max_size=5))
    def add_some(self, more: list[tuple[int, int]]) -> None:
        for prompt, priority in more:
            self.add(prompt, max_tokens=5, priority=priority, arrival_time=0.0, group="text")

    @precondition(lambda self: self.scheduler.has_unfinished)
    @rule(which=st.integers(0, 20), status=st.sampled_from(["SWAPPED", "RUNNING", "WAITING"]))
    def abort(self, which: int, status: str) -> None:
        """A request with that status is aborted, or if there is none, any."""
        unfinished = [each for each in self.requests if not each.status.is_finished]
        unfinished = [each for each in unfinished if each.status.name == status] or unfinished
        request = unfinished[which % len(unfinished)]
        assert self.scheduler.abort_request(request.request_id)
        assert request.status is RequestStatus.FINISHED_ABORTED
        assert not self.scheduler.abort_request(request.request_id)

    @rule()
    def schedule(self) -> None:
        """A step. If the one before was never committed, it has failed."""
        unfinished = self.scheduler.has_unfinished
        self.output = self.scheduler.schedule()
        if unfinished:
            assert self.output.scheduled or self.output.finished, "a step that neither computes nor finishes anything"
        limit = self.scheduler.max_num_batched_tokens
        large = [n for n in self.output.num_scheduled_tokens.values() if n > limit]
        assert self.output.total_num_scheduled_tokens - sum(large) <= limit

    @rule()
    def recover(self) -> None:
        """A step has failed, or an engine is careful: nothing is computed, nothing is held, and no output is lost."""
        outputs = [list(each.output_token_ids) for each in self.requests]
        self.scheduler.recover()
        self.output = None
        assert [each.output_token_ids for each in self.requests] == outputs
        assert self.scheduler.pool.num_used == self.scheduler.num_running == 0
        left = [each for each in self.requests if not each.status.is_finished]
        assert all(each.status is RequestStatus.WAITING and not each.num_computed_tokens for each in left)
        assert set(self.scheduler.waiting) == {each.request_id for each in left}

    @precondition(lambda self: self.output is not None)
    @rule(stopped=st.sets(st.integers(0, 40), max_size=2))
    def commit(self, stopped: set[int]) -> None:
        """The tokens of the step come; some of them are stop tokens."""
        assert self.output is not None
        tokens = {each: STOP if each in stopped else 0 for each in self.output.num_scheduled_tokens}
        awaited = [each for each in self.output.scheduled if not each.status.is_finished]
        had = [len(each.output_token_ids) for each in awaited]
        finished = self.scheduler.update_from_output(self.output, tokens)
        assert [len(each.output_token_ids) for each in awaited] == [count + 1 for count in had]
        assert all(each.status.is_finished for each in finished)
        self.output = None

    @rule(count=st.integers(1, 20))
    def abort_the_next_victim(self, count: int) -> None:
        """Run until a request is preempted; it is aborted before the step's tokens come."""
        for _ in range(count):
            self.schedule()
            assert self.output is not None
            for request_id in self.output.preempted[:1]:
                assert self.scheduler.abort_request(request_id)
            self.books_agree()
            self.commit(set())

    @rule(count=st.integers(1, 12))
    def run(self, count: int) -> None:
        for _ in range(count):
            self.schedule()
            self.books_agree()
            self.commit(set())
            self.books_agree()

    @invariant()
    def books_agree(self) -> None:
        scheduler = self.scheduler
        for pool, tables in (
            (scheduler.pool, [each.block_ids for each in self.requests]),
            (getattr(scheduler, "host_pool", None), [each.host_block_ids for each in self.requests]),
        ):
            if pool is not None:
                listed = Counter(block_id for table in tables for block_id in table)
                assert [pool.ref_count(each) for each in range(pool.num_blocks)] == [
                    listed[each] for each in range(pool.num_blocks)
                ]
                assert pool.num_free + pool.num_used == pool.num_blocks
                assert pool.num_used == len(listed)
        assert not any(each.block_ids or each.host_block_ids for each in self.requests if each.status.is_finished)
        scheduler.check()

    def teardown(self) -> None:
        """No request waits forever: in every step at least one gets a token, or finishes."""
        if not hasattr(self, "scheduler"):
            return
        left = [each for each in self.requests if not each.status.is_finished]
        steps = sum(each.max_tokens - len(each.output_token_ids) for each in left) + len(left)
        for _ in range(steps):
            if self.scheduler.has_unfinished:
                self.schedule()
                self.commit(set())
        assert not self.scheduler.has_unfinished, f"{left} have not finished after {steps} steps"
        for request in left:
            if request.status is RequestStatus.FINISHED_CAPACITY:  # it has filled the whole pool
                assert request.num_tokens > self.scheduler.pool.num_blocks * BLOCK_SIZE, request
            else:
                assert request.status is RequestStatus.FINISHED_LENGTH
                full = request.num_tokens == self.scheduler.max_model_len
                assert full or len(request.output_token_ids) == request.max_tokens, request


class FairGuarantees(Guarantees):
    """The same for `fair`; and of any BOUND + 1 admissions in a row, one is of the request that arrived first.

    With a bound of 64 a run of this machine would never reach it, so it is 2 here.
    """

    stage = "fair"
    bound = 2

    @initialize()
    def tighten(self) -> None:
        fair.STARVATION_BOUND = self.bound  # type: ignore[misc]
        self.num_bypasses = 0

    @rule()
    def schedule(self) -> None:
        waiting = dict(self.scheduler.waiting)
        if self.output is not None and self.output.scheduled:  # it has failed: its batch will wait, too
            waiting |= {each.request_id: each for each in self.scheduler.running}
        super().schedule()
        assert self.output is not None
        assert len({each.group for each in self.scheduler.running}) <= 1
        for request in self.output.scheduled:
            if waiting.pop(request.request_id, None) is not None:
                arrived = request.arrival_time, request.arrival_index
                bypasses = any((each.arrival_time, each.arrival_index) < arrived for each in waiting.values())
                self.num_bypasses = self.num_bypasses + 1 if bypasses else 0
                assert self.num_bypasses <= self.bound

    def teardown(self) -> None:
        super().teardown()
        fair.STARVATION_BOUND = 64  # type: ignore[misc]


QUICK = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestPaged = Guarantees.TestCase
TestPaged.settings = QUICK
TestFair = FairGuarantees.TestCase
TestFair.settings = QUICK
