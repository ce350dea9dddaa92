"""What the tests of phase 7 share: how an exposing test is judged, right schedulers of many kinds, and random load."""

from __future__ import annotations

import random
import traceback
from pathlib import Path

import pytest

from minicache.errors import InvariantError, MinicacheError
from minicache.request import Request, RequestStatus
from minicache.scheduler.audit import Auditor
from minicache.scheduler.drive import drive
from minicache.scheduler.observe import Observer, observe
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.paged import PagedScheduler
from minicache.scheduler.queue import RequestQueue
from minicache_course.checks import CheckFailed, is_not_written, that, told
from minicache_course.exposing import Judge, OutOfSteps
from minicache_course.incidents.bases import EngineScheduler, ForkingScheduler, PhasedScheduler
from minicache_course.seeds import fresh


class SweepingScheduler(EngineScheduler):
    """Right: gives up all that can never fit before it admits any other."""

    def schedule_waiting(self, output):
        for request in list(self.waiting.values()):
            if self.blocks_to_admit(request) > self.pool.num_blocks:
                self.give_up(request, output)
        super().schedule_waiting(output)


class StoppingScheduler(PagedScheduler):
    """Right: batches of one class, and none bypasses a request of another class."""

    def head(self):
        request = super().head()
        return request if request and (not self.running or self.running[0].group == request.group) else None


class PassingScheduler(PagedScheduler):
    """Right: batches of one class, and those of the batch's class bypass those of another class."""

    def head(self):
        group = self.running[0].group if self.running else None
        return next((each for each in self.waiting.values() if group in (None, each.group)), None)


class NewestFirstScheduler(PagedScheduler):
    """Right: names the newest first in its output. The work of a step may be carried out in any order."""

    def schedule(self):
        output = super().schedule()
        output.scheduled.reverse()
        output.num_scheduled_tokens = dict(reversed(output.num_scheduled_tokens.items()))
        return output


class HalfCapScheduler(EngineScheduler):
    """Incident 1 with another cap: half of the slots stay empty, and one slot is none."""

    def has_slot(self):
        return len(self.running) < self.max_num_seqs // 2


class OverfullScheduler(EngineScheduler):
    """Incident 1 the other way round: a batch of N + 1."""

    def has_slot(self):
        return len(self.running) <= self.max_num_seqs


class LongestBucketScheduler(PhasedScheduler):
    """Incident 3 with another bucket: the longest requests run, and the others are preempted."""

    def choose(self, candidates):
        longest = max(request.num_tokens for request in candidates)
        return [request for request in candidates if request.num_tokens == longest]


VARIANTS = {1: [HalfCapScheduler, OverfullScheduler], 3: [LongestBucketScheduler]}
"""Of some incidents, schedulers with the same bug in other numbers. An exposing test must not know the numbers."""

SWAP = {"preemption": "swap", "num_host_blocks": 1000}
WATERMARK = {"watermark": 0.25}  # of the smallest pool that a test has, 4 blocks, that is one
RIGHT = {
    1: [(PagedScheduler, {}), (EngineScheduler, {}), (PhasedScheduler, {}), (EngineScheduler, WATERMARK)],
    2: [
        (PagedScheduler, {}),
        (PhasedScheduler, {}),
        (PagedScheduler, SWAP),
        (PagedScheduler, WATERMARK),
        (NewestFirstScheduler, {}),
    ],
    3: [(PagedScheduler, {}), (PhasedScheduler, {}), (PhasedScheduler, SWAP), (PagedScheduler, WATERMARK)],
    4: [(PagedScheduler, {}), (EngineScheduler, {}), (EngineScheduler, SWAP), (PhasedScheduler, {})],
    5: [(EngineScheduler, {}), (SweepingScheduler, {}), (EngineScheduler, SWAP), (EngineScheduler, WATERMARK)],
    6: [(StoppingScheduler, {}), (PassingScheduler, {}), (PassingScheduler, SWAP), (StoppingScheduler, WATERMARK)],
    7: [(PagedScheduler, {}), (EngineScheduler, {}), (EngineScheduler, SWAP), (PhasedScheduler, {})],
    8: [(ForkingScheduler, {}), (ForkingScheduler, SWAP), (ForkingScheduler, WATERMARK)],
}
"""Of each incident, schedulers without its bug, and options that its test must not depend on."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Report an error of the waiting queue, or of a head() that returns a request that does not wait, as such."""
    try:
        return (yield)
    except Exception as error:
        if is_not_written(error) or "test_task_9_" in item.nodeid:
            raise
        if fault := queue_fault():
            called = "RequestQueue, of task 9, in which this scheduler keeps its waiting requests"
            raise CheckFailed(called, fault, "what a sorted list gives: fix task 9 first") from error
        last = traceback.extract_tb(error.__traceback__)[-1]
        if isinstance(error, KeyError) and (last.name, Path(last.filename).name) == ("remove", "queue.py"):
            got = f"a request that is not in `waiting`: {told(error)}"
            raise CheckFailed("head(), whose request is admitted next", got, "one of those that wait") from error
        raise


def queue_fault():
    """What a RequestQueue does wrong in 300 random moves, in words; None: nothing."""
    rng, queue, inside = random.Random(fresh(0)), RequestQueue(lambda each: (each.priority, each.arrival_index)), []
    for number in range(300):
        if inside and rng.random() < 0.5:
            request = inside.pop(rng.randrange(len(inside)))
            move, change = f"remove({request.request_id})", queue.remove
        else:
            request = Request(number, [1], 1, priority=rng.randint(0, 9), group=rng.choice("ab"))
            request.arrival_index = number
            inside.append(request)
            move, change = f"add({number})", queue.add
        try:
            change(request)
            found = [queue.first(), queue.first("a"), queue.oldest()]
        except Exception as error:
            return f"after {move}: {told(error)}"
        best = sorted(inside, key=lambda each: (each.priority, each.arrival_index))
        of_a = [each for each in best if each.group == "a"]
        oldest = min(inside, key=lambda each: each.arrival_index, default=None)
        for name, got, right in zip(("first()", "first('a')", "oldest()"), found, (best, of_a, [oldest]), strict=True):
            if got is not (right[0] if right else None):
                return f"after {move}, {name} gives {got!r}, not {right[0] if right else None!r}"
    return None


class Room(Judge):
    """Judges exposing tests and fixes, and runs the fixes."""

    right, variants = RIGHT, VARIANTS

    def run(self, scheduler, requests=(), *, auditor=False, arrivals=(), max_steps=2000):
        """Drive a scheduler, watched at every step, until all requests have finished. The tally."""
        __tracebackhide__ = True
        requests, arrivals = list(requests), list(arrivals)
        observers = [Watch(), *([Auditor()] if auditor else [])]
        try:
            tally = drive(observe(scheduler, *observers), requests, arrivals=arrivals, max_steps=max_steps)
        except (MinicacheError, OutOfSteps) as error:
            raise CheckFailed(f"a run of {type(scheduler).__name__}", told(error), "every request served") from error
        left = [each.request_id for each in (*scheduler.running, *scheduler.waiting.values())]
        that(f"requests that had not finished after {max_steps} steps", left).gives([])
        return tally

    def survives(self, create, *, auditor=False, groups=("text",), too_large=False, num_runs=25, preemption=True):
        """Random load, in pools down to one request's size: every request gets all tokens, and the books agree."""
        __tracebackhide__ = True
        for seed in range(num_runs):
            rng = random.Random(fresh(seed))
            num_blocks = rng.randint(4, 12)
            options = {"num_blocks": num_blocks, "block_size": 4, "max_num_seqs": rng.randint(1, 5)}
            options |= {"max_num_batched_tokens": rng.choice([24, 64])}
            options |= rng.choice([{}, {"watermark": 0.2}, SWAP if preemption else {}])
            requests = [random_request(rng, number, num_blocks, groups, too_large) for number in range(8)]
            arrivals = sorted(((rng.randint(0, 20), each) for each in requests), key=lambda each: each[0])
            self.run(create(**options), auditor=auditor, arrivals=arrivals)
            for request in requests:
                feasible = request.num_prompt_tokens + request.max_tokens <= 4 * num_blocks
                wanted = RequestStatus.FINISHED_LENGTH if feasible else RequestStatus.FINISHED_CAPACITY
                that(f"the status of {request!r}, in a pool of {num_blocks} blocks of 4", request.status).gives(wanted)


def random_request(rng, number, num_blocks, groups, too_large):
    """One that fits into the pool alone, prompt and answer; or one whose prompt never does."""
    room = 4 * num_blocks
    if too_large and rng.random() < 0.25:
        return Request(number, [1] * (room + 1), 3)
    prompt = rng.randint(1, min(room - 1, 24))
    return Request(number, [1] * prompt, rng.randint(1, min(12, room - prompt)), group=rng.choice(groups))


class Watch(Observer):
    """Scheduled tokens have blocks, waiting requests have none, and every step schedules or finishes something.

    It calls only the auditor's rules on blocks and holdings. The others are for stages of the course: an engine of the
    incident room may admit in the step in which it evicts, or leave some of the batch out of a step.
    """

    def __init__(self):
        self.auditor = Auditor()

    def on_schedule(self, scheduler, output):
        for request, num_new in zip(output.scheduled, output.num_scheduled_tokens.values(), strict=True):
            room = len(request.block_ids) * scheduler.pool.block_size
            if request.num_computed_tokens + num_new > room or request.status is not RequestStatus.RUNNING:
                raise InvariantError(f"{request!r} computes {num_new} tokens, and has blocks for {room}")
        if scheduler.num_running > scheduler.max_num_seqs:
            raise InvariantError(f"{scheduler.num_running} requests in the batch of {scheduler.max_num_seqs}")
        if not output.scheduled and not output.finished and scheduler.has_unfinished:
            raise InvariantError(f"a step that schedules and finishes nothing, and {scheduler.num_waiting} wait")
        self.check(scheduler, output)

    def on_update(self, scheduler, output, finished):
        self.check(scheduler, SchedulerOutput())

    def check(self, scheduler, output):
        """The books agree."""
        scheduler.check()
        self.auditor.check_blocks(scheduler)
        self.auditor.check_holdings(scheduler, output)


@pytest.fixture(scope="session")
def room():
    """The judge."""
    return Room()


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
def request_of():
    """`request_of(id, num_prompt_tokens, max_tokens, **more)`: a new request."""
    return lambda request_id, prompt=10, tokens=5, **more: Request(request_id, [1] * prompt, tokens, **more)
