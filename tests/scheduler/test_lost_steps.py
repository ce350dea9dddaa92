"""Steps that fail, on every stage: no request ever reads a KV entry that was not written for exactly its tokens.

`minicache.verifier.contents` models every slot, on the device and in CPU swap space. A step fails at a random point:
before a copy, between two, or while the model writes, which leaves garbage. Then `recover()` is called, or simply
`schedule()` again. Requests begin alike, have priorities, are forked, preempted and swapped; some are aborted between
`schedule()` and `update_from_output()`, or fail there. (The step is carried out as it was scheduled, for these too:
others may have found blocks that it fills.) At the end, every request has the tokens of a run in which nothing went
wrong.

A stage that overlaps schedules a step before the one before is carried out: its newest tokens are put in when it runs.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any
from zlib import crc32

import pytest

from minicache.request import Request, RequestStatus
from minicache.scheduler import (
    AsyncChunkedScheduler,
    ChunkedPrefillScheduler,
    ContinuousBatchScheduler,
    FairScheduler,
    PagedScheduler,
    Scheduler,
    SchedulerOutput,
    SharingScheduler,
    StaticBatchScheduler,
    VllmPriorityScheduler,
)
from minicache.scheduler.audit_async import AsyncAuditor
from minicache.scheduler.audit_priority import PriorityAuditor
from minicache.scheduler.audit_sharing import SharingAuditor
from minicache.scheduler.audit_trace import audit_trace
from minicache.scheduler.observe import Recorder, observe
from minicache.trace import TraceStep
from minicache.verifier.contents import Memory, Work, work_of

STAGES: list[type[Scheduler]] = [
    StaticBatchScheduler,
    ContinuousBatchScheduler,
    PagedScheduler,
    FairScheduler,
    *4 * [SharingScheduler],
    *4 * [ChunkedPrefillScheduler],
]
STOP = 4
LARGEST = 33  # tokens of a request, prompt and output
ARRIVALS, FAILURES, MAX_TURNS = 60, 150, 2000  # turns in which requests arrive, in which steps fail, and in all


def next_token(tokens: list[int]) -> int:
    """What the model generates after these."""
    return crc32(bytes(tokens)) % 6


def answer(prompt: list[int], outputs: list[int], max_tokens: int, stops: bool) -> list[int]:
    """The output of an undisturbed run that goes on from `outputs`."""
    outputs = list(outputs)
    while len(outputs) < max_tokens and not (stops and outputs and outputs[-1] == STOP):
        outputs.append(next_token(prompt + outputs))
    return outputs


def options_of(rng: random.Random, cls: type[Scheduler]) -> dict[str, Any]:
    """For requests of at most LARGEST tokens, each of which fits alone."""
    block_size = rng.choice([1, 2, 4])
    num_blocks = -(-LARGEST // block_size) + rng.choice([0, 1, 3, 20])
    options: dict[str, Any] = {
        "block_size": block_size,
        "num_blocks": num_blocks,
        "max_num_seqs": rng.choice([2, 4, 8]),
    }
    options["max_num_batched_tokens"] = rng.choice([24, 40, 200])
    if issubclass(cls, PagedScheduler) and rng.random() < 0.5:
        options |= {"preemption": "swap", "num_host_blocks": rng.choice([3, 30])}
    if issubclass(cls, SharingScheduler):
        options["prefix_caching"] = rng.random() < 0.8
    if issubclass(cls, ChunkedPrefillScheduler):
        options["max_num_batched_tokens"] = rng.choice([3, 7, 12, 30])
        options["long_prefill_threshold"] = rng.choice([0, 0, 2, 5])
        options["reserve_full_prompt"] = rng.random() < 0.5
    return options


class Run:
    """One scheduler, its memory, its requests, and what they have to get."""

    stages, auditor = STAGES, SharingAuditor

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.cls = rng.choice(self.stages)
        self.options = options_of(rng, self.cls)
        self.plain: Any = self.cls(**self.options)
        self.steps: list[TraceStep] = []
        observers = (self.auditor(), Recorder(self.steps.append)) if rng.random() < 0.75 else ()
        self.scheduler: Any = observe(self.plain, *observers)  # without observers, the scheduler itself
        self.memory = Memory(self.options["block_size"])
        self.forks = issubclass(self.cls, SharingScheduler) and rng.random() < 0.5
        self.failing, self.aborting = rng.choice([0.1, 0.3, 0.6]), rng.choice([0.0, 0.03, 0.15])
        self.beginning = [rng.randrange(2) for _ in range(24)]
        self.requests: list[Request] = []
        self.expected: list[list[int]] = []
        self.seen: Counter[str] = Counter()

    def add(self) -> None:
        rng = self.rng
        prompt = self.beginning[: rng.randint(1, 20)] + [rng.randrange(3) for _ in range(rng.randint(0, 4))]
        stops, max_tokens, priority = rng.random() < 0.3, rng.randint(1, 9), rng.choice([0, 0, 1, 2])
        stop_token_ids = [STOP] if stops else []
        self.requests.append(
            Request(len(self.requests), prompt, max_tokens, stop_token_ids=stop_token_ids, priority=priority)
        )
        self.expected.append(answer(prompt, [], max_tokens, stops))
        self.scheduler.add_request(self.requests[-1])

    def fork(self) -> None:
        """Give a request that decodes a child, which has a part of its output."""
        parents = [each for each in self.plain.running if each.output_token_ids]
        if not parents or self.plain.outstanding is not None or self.plain.num_running == self.options["max_num_seqs"]:
            return
        parent = self.rng.choice(parents)
        outputs = parent.output_token_ids[: self.rng.randint(0, len(parent.output_token_ids))]
        child = self.scheduler.fork_request(parent.request_id, len(self.requests), outputs)
        self.requests.append(child)
        stops = bool(child.stop_token_ids)
        self.expected.append(answer(child.prompt_token_ids, outputs, child.max_tokens, stops))
        self.seen["forks"] += 1

    def abort(self, when: str) -> None:
        unfinished = [*self.plain.running, *self.plain.waiting.values()]
        if unfinished and self.rng.random() < self.aborting:
            assert self.scheduler.abort_request(self.rng.choice(unfinished).request_id)
            self.seen[f"aborted {when}"] += 1

    def schedule(self) -> tuple[SchedulerOutput, list[Work]]:
        output = self.scheduler.schedule()
        self.plain.check()
        work = work_of(output)
        self.seen["preempted"] += len(output.preempted)
        self.seen["swapped in"] += len(output.swapped_in)
        self.seen["copied"] += len(output.blocks_to_copy)
        self.seen["chunks"] += sum(len(each.tokens) < each.request.num_tokens for each in work)
        self.seen["shared"] += len({block for each in work for block in each.block_ids}) < sum(
            len(each.block_ids) for each in work
        )
        self.abort("after schedule()")
        return output, work

    def step(self, *, may_fail: bool) -> None:
        rng, memory = self.rng, self.memory
        output, work = self.schedule()
        operations = memory.operations(output, work)
        if may_fail and rng.random() < self.failing:
            self.fail(operations, work)
            return
        for operation in operations:
            operation()
        for each in work:
            assert memory.reads_right(each), f"{each.request!r} reads what was not computed for its tokens"
        awaited = [each for each in work if len(each.tokens) == each.request.num_tokens]
        tokens = {each.request.request_id: next_token(each.tokens) for each in awaited}
        alive = [each for each in awaited if not each.request.status.is_finished]
        if alive and may_fail and rng.random() < 0.03:
            self.poison(rng.choice(alive), work)
        self.abort("before update_from_output()")
        if rng.random() < 0.5:
            tokens |= {each.request.request_id: 0 for each in work if each not in awaited}
        self.scheduler.update_from_output(output, tokens)

    def fail(self, operations: list[Callable[[], None]], work: list[Work]) -> None:
        """Carry out a part of a step, leave garbage where it stopped, and recover."""
        done = self.rng.randrange(len(operations) + 1)
        for operation in operations[:done]:
            operation()
        num_copies = len(operations) - len(work)
        self.seen["failed copies" if done < num_copies else "failed steps"] += 1
        for each in work[max(0, done - num_copies) :]:
            if self.rng.random() < 0.5:
                self.memory.write(each, garbage=True)
        self.abort("after a failure")
        if self.rng.random() < 0.5:
            self.scheduler.recover()
            self.plain.check()
            assert self.plain.pool.num_used == self.plain.num_running == 0
            self.abort("after a recovery")

    def poison(self, culprit: Work, work: list[Work]) -> None:
        """A request computes NaNs, and so does every other request of the step that reads them: all of these fail."""
        self.memory.write(culprit, garbage=True)
        for each in work:
            if not self.memory.reads_right(each) and not each.request.status.is_finished:
                assert self.scheduler.finish_request(each.request.request_id, RequestStatus.FINISHED_ERROR)
                self.seen["failed requests"] += 1

    def serve(self) -> None:
        for turn in range(MAX_TURNS):
            arriving = turn < ARRIVALS
            if arriving and self.rng.random() < 0.5:
                self.add()
            if arriving and self.forks and self.rng.random() < 0.3:
                self.fork()
            self.abort("between steps")
            if self.plain.has_unfinished:
                self.step(may_fail=turn < FAILURES)
            elif not arriving:
                return
        raise AssertionError(f"requests are unfinished after {MAX_TURNS} turns")

    def check(self) -> None:
        for request, expected in zip(self.requests, self.expected, strict=True):
            if request.status in (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR):
                assert request.output_token_ids == expected[: len(request.output_token_ids)]
            else:
                assert request.finish_reason in ("stop", "length")
                assert request.output_token_ids == expected
        assert self.plain.pool.num_used == 0
        host_pool = getattr(self.plain, "host_pool", None)
        assert host_pool is None or host_pool.num_used == 0
        if not self.seen["forks"] and not self.options.get("prefix_caching"):  # these are no events of a trace
            limits = {name: self.options[name] for name in ("max_num_seqs", "max_num_batched_tokens")}
            assert audit_trace(self.steps, **limits, first_come=self.plain.first_come) == len(self.steps)


class PriorityRun(Run):
    """vLLM's priorities: what is scheduled already may be undone."""

    stages, auditor = [VllmPriorityScheduler], PriorityAuditor


class OverlappingRun(Run):
    """Each step is scheduled while the one before is outstanding; now and then the server waits for all of them."""

    stages, auditor = [AsyncChunkedScheduler], AsyncAuditor

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.flight: list[tuple[SchedulerOutput, list[Work]]] = []
        self.patience = self.rng.choice([0.0, 0.1, 0.5])

    def step(self, *, may_fail: bool) -> None:
        self.flight.append(self.schedule())
        waits = self.rng.random() < self.patience
        while len(self.flight) > (0 if waits else 1):
            if not self.carry_out(may_fail):
                self.flight.clear()

    def carry_out(self, may_fail: bool) -> bool:
        """Run the oldest step, and commit it; False if that failed."""
        output, work = self.flight[0]
        operations = self.memory.operations(output, work)
        if may_fail and self.rng.random() < self.failing / 3:
            self.fail(operations, work)
            self.scheduler.recover()
            return False
        for operation in operations:
            operation()
        tokens = {}
        for each in work:
            assert self.memory.reads_right(each), f"{each.request!r} reads what was not computed for its tokens"
            tokens[each.request.request_id] = next_token(each.tokens)
        for _, later in self.flight[1:]:
            for each in later:
                if each.lacks_token:
                    each.tokens.append(tokens[each.request.request_id])
        self.seen["overlapped"] += len(self.flight) > 1
        self.abort("before update_from_output()")
        finished = self.scheduler.update_from_output(output, tokens)
        self.plain.check()
        del self.flight[0]
        if self.flight:
            self.seen["dropped"] += sum(each in self.flight[0][0].scheduled for each in finished)
            self.seen["stale"] += len(set(self.flight[0][0].preempted) & tokens.keys())
            self.seen["ended by a stale token"] += sum(
                each.request_id in self.flight[0][0].preempted for each in finished
            )
        return True


@pytest.mark.parametrize(
    "seed", [*range(100), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(100, 300))]
)
def test_nor_while_a_step_is_in_flight(seed: int) -> None:
    run = OverlappingRun(seed)
    run.serve()
    run.check()


@pytest.mark.parametrize("seed", [*range(60), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(60, 300))])
def test_nor_if_a_victim_was_scheduled(seed: int) -> None:
    run = PriorityRun(seed)
    run.serve()
    run.check()


@pytest.mark.parametrize(
    "seed", [*range(100), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(100, 300))]
)
def test_no_request_reads_what_was_not_computed_for_it(seed: int) -> None:
    run = Run(seed)
    run.serve()
    run.check()


@pytest.mark.slow
def test_the_runs_are_worth_their_name() -> None:
    """What they are meant to try is tried: otherwise a change of the generator could make them harmless."""
    seen: Counter[str] = Counter()
    for seed in range(60):
        run = Run(seed)
        run.serve()
        seen += run.seen
    assert len(seen) == 14
    assert min(seen.values()) >= 20, seen
