"""Phase 6, task 7: an auditor that lets right schedulers work, and stops broken ones at the step that is wrong."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from inspect import signature
from pathlib import Path

import pytest

from minicache.errors import InvariantError
from minicache.memory.blocks import BlockPool
from minicache.request import Request, RequestStatus
from minicache.scheduler.audit import Auditor
from minicache.scheduler.continuous import ContinuousBatchScheduler
from minicache.scheduler.drive import drive
from minicache.scheduler.fair import FairScheduler
from minicache.scheduler.observe import observe
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.static import StaticBatchScheduler
from minicache_course.checks import CheckFailed, call, that, told
from minicache_course.follow import following
from minicache_course.seeds import fresh

_spec = spec_from_file_location("right_paged", Path(__file__).with_name("right_paged.py"))
right_paged = module_from_spec(_spec)
_spec.loader.exec_module(right_paged)
PagedScheduler = right_paged.right_scheduler()


class RightFairScheduler(FairScheduler, PagedScheduler):
    """Phase 7's, upon it."""


@pytest.fixture(autouse=True)
def _followed():
    with following(PagedScheduler, "__init__"):
        yield


class Broken(PagedScheduler):
    """What all broken schedulers share: they will not be asked how they are."""

    def check(self):
        raise AssertionError("an auditor asks no scheduler to check itself")


def requests_of(*sizes, **options):
    return [Request(n, [1] * num_prompt, max_tokens, **options) for n, (num_prompt, max_tokens) in enumerate(sizes)]


FOUR = [(4, 9)] * 4  # in 4 blocks of 4: step 0 admits all, step 1 preempts 3 and 2
ALONE = {"sizes": [(4, 9)], "num_blocks": 20}
SWAP = {"preemption": "swap", "num_host_blocks": 8}
AWAY = {"sizes": [(4, 9), (8, 9)], "num_blocks": 3, **SWAP}  # step 1 swaps the second one out
FULL_HOST = AWAY | {"num_host_blocks": 1}  # which is too small for it


def expose(cls, says, sizes=FOUR, *, num_blocks=4, token=0, request_options=None, then=(), **options):
    """Runs a broken scheduler under an auditor, which must raise InvariantError saying `says`.

    `then` are functions of the scheduler, each of which must raise it after two steps. Without them a whole run must.
    """
    options |= {"num_blocks": num_blocks, "block_size": 4}
    told_options = ", ".join(f"{name}={value!r}" for name, value in options.items())
    called = f"a run of {cls.__name__}({told_options}) under your Auditor"
    for last in then or [None]:
        requests, scheduler = requests_of(*sizes, **(request_options or {})), observe(cls(**options), Auditor())
        if last is None:
            outcome = call(drive, scheduler, requests, token=lambda request: token, max_steps=60)
        else:
            drive(scheduler, requests, max_steps=2)
            outcome = call(last, scheduler)
        if last is None and outcome.error is None:
            got = f"no error in {outcome.value.num_steps} steps"
            raise CheckFailed(called, got, f"InvariantError saying {says!r}")
        replace(outcome, called=called).raises(InvariantError, saying=says)


def aborting(request_id):
    return lambda scheduler: scheduler.abort_request(request_id)


def recovering(scheduler):
    scheduler.schedule()
    scheduler.recover()


def scheduling_again(scheduler):
    scheduler.schedule()
    scheduler.schedule()


RECOVERY = {"then": [recovering, scheduling_again], **SWAP}


def broken(says, *, after="", instead="", **run):
    """A test that exposes a PagedScheduler with the decorated function after one of its methods, or instead of it.

    After `schedule` the function gets the scheduler and the step, after another method the scheduler and as many of the
    method's arguments as it takes. Instead of a method it gets the scheduler, the right method, and the arguments.
    """

    def expose_with(change):
        def method(scheduler, *arguments, **named):
            right = getattr(super(cls, scheduler), after or instead)
            if instead:
                return change(scheduler, right, *arguments, **named)
            result = right(*arguments, **named)
            if after == "schedule":
                change(scheduler, result)
            else:
                given = signature(right).bind(*arguments, **named).args
                change(scheduler, *given[: change.__code__.co_argcount - 1])
            return result

        def test():
            __tracebackhide__ = True
            expose(cls, says, **run)

        cls = type("Broken", (Broken,), {after or instead: method})
        test.__name__, test.__qualname__, test.__doc__ = change.__name__, change.__name__, change.__doc__
        return test

    return expose_with


def passes(scheduler, requests=(), *, arrivals=(), what, max_steps=100):
    """Runs a right scheduler under an auditor, which must be silent; the tally, and the auditor."""
    auditor = Auditor()
    outcome = call(drive, observe(scheduler, auditor), requests, arrivals=arrivals, max_steps=max_steps)
    silent(outcome, f"{what}, under your Auditor")
    return outcome.value, auditor


def silent(outcome, what):
    """Says all of the error that a right run must not raise, and of what run."""
    if outcome.error is not None:
        raise CheckFailed(what, told(outcome.error), "no error") from outcome.error


# Right schedulers

STAGES = {
    "static": StaticBatchScheduler,
    "continuous": ContinuousBatchScheduler,
    "paged": PagedScheduler,
    "fair": RightFairScheduler,
}


def a_setup(seed):
    """A stage, its options, requests for it, and the random numbers for what comes."""
    rng = random.Random(fresh(seed))
    name = rng.choice(["static", "continuous", "paged", "paged", "paged", "fair"])
    block_size = rng.choice([1, 2, 4])
    extra = {"fair": {"priority": 1, "group": "image"}}.get(name, {})
    requests = [
        Request(n, [1] * rng.randint(1, 12), rng.randint(1, 12), stop_token_ids=[3], ignore_eos=rng.random() < 0.3)
        if rng.random() < 0.7
        else Request(n, [1] * rng.randint(1, 12), rng.randint(1, 12), **extra)
        for n in range(10)
    ]
    reserves = name in ("static", "continuous")
    slots = [each.num_prompt_tokens + each.max_tokens * reserves for each in requests]
    options = {
        "num_blocks": max(-(-each // block_size) for each in slots) + rng.randint(0, 3),
        "block_size": block_size,
        "max_num_seqs": rng.choice([1, 3, 10]),
        "max_num_batched_tokens": rng.choice([12, 14, 40]),
        "max_model_len": rng.choice([None, 20]),
        "preemption": rng.choice(["recompute", "swap"]),
        "num_host_blocks": rng.choice([1, 4, 20]),
        "watermark": rng.choice([0.0, 0.2]),
    }
    return name, options, requests, rng


def a_run(seed, *observers):
    """A random run of a right stage, with aborts, and steps that fail: what was done in each step."""
    name, options, requests, rng = a_setup(seed)
    stage = STAGES[name]
    known = {option: value for option, value in options.items() if option in stage.Options.__annotations__}
    scheduler = observe(stage(**known), *observers)
    steps, coming = [], list(requests)
    while coming or scheduler.has_unfinished:
        while coming and rng.random() < 0.6:
            scheduler.add_request(coming.pop(0))
        if rng.random() < 0.05:
            scheduler.abort_request(rng.randrange(10))
        output = scheduler.schedule()
        if rng.random() < 0.1:
            if rng.random() < 0.5:
                scheduler.recover()
            output = scheduler.schedule()
        if rng.random() < 0.05:
            scheduler.abort_request(rng.randrange(10))
        tokens = {request_id: rng.randrange(10) for request_id in output.num_scheduled_tokens}
        finished = scheduler.update_from_output(output, tokens)
        steps.append((tokens, output.preempted, [each.request_id for each in finished]))
        assert len(steps) < 1000
    return steps


@pytest.mark.parametrize("seed", range(25))
def test_right_schedulers_pass(seed):
    """Static, continuous, paged and fair runs with preemptions, swaps, aborts and failed steps: no error.

    And no interference: the run is the same with the auditor and without.
    """
    name, options, _, _ = a_setup(seed)
    what = f"a run of the stage {name!r} with {', '.join(f'{key}={value!r}' for key, value in options.items())}"
    alone, audited = call(a_run, seed), call(a_run, seed, Auditor())
    for how, outcome in (("without an auditor", alone), ("under your Auditor", audited)):
        silent(outcome, f"{what}, {how}")
    that(f"{what}: whether the auditor has changed nothing", audited.value == alone.value).gives(True)


def test_one_that_has_outgrown_the_step_passes():
    """16 tokens a step, and a request that comes back with more: the one step that may be larger."""
    scheduler = PagedScheduler(num_blocks=11, block_size=4, max_num_batched_tokens=16)
    what = "a request that has outgrown the step"
    tally, auditor = passes(scheduler, requests_of((12, 20), (12, 20)), what=what, max_steps=200)
    that("whether more than 16 tokens were computed again", tally.num_recomputed_tokens > 16).gives(True)
    that("the last step that was audited", auditor.step).gives(tally.num_steps - 1)


def test_the_end_of_the_pool_passes():
    """A request that ends for want of memory, and the next one that takes its place in the same step."""
    scheduler = PagedScheduler(num_blocks=3, block_size=4)
    tally, _ = passes(scheduler, requests_of((12, 50), (9, 2)), what="a request that outgrows the pool")
    that("when each finished", tally.finished).gives({0: 1, 1: 2})


def test_a_step_that_only_finishes_a_request_passes():
    """No token is scheduled, one waits, and another is finished: that is progress too."""

    class Careful(PagedScheduler):
        def schedule_waiting(self, output):
            if not output.finished:
                super().schedule_waiting(output)

    scheduler = Careful(num_blocks=3, block_size=4)
    tally, _ = passes(scheduler, requests_of((12, 50), (9, 2)), what="a step that only finishes a request")
    that("when each finished", tally.finished).gives({0: 1, 1: 3})


def test_an_auditor_may_come_late():
    """Switched on in the middle of a run: nothing before it is held against anybody, and it sees what comes."""
    scheduler = PagedScheduler(num_blocks=4, block_size=4, **SWAP)
    for request in requests_of(*FOUR):
        scheduler.add_request(request)
    for _ in range(3):
        output = scheduler.schedule()
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 0))
    auditor = Auditor()
    call(drive, observe(scheduler, auditor), max_steps=100)
    that("has_unfinished", scheduler.has_unfinished).gives(False)
    that("whether it has audited a step after step 10", auditor.step > 10).gives(True)


def test_a_block_with_two_references_passes():
    """Two requests share a block, the pool counts two references, and two list it: one used block, and right."""

    class Shares(PagedScheduler):
        def admit(self, request, output, found=()):
            super().admit(request, output, found)
            if len(self.running) == 2:
                self.pool.free(request.block_ids[:1])
                request.block_ids[0] = self.running[0].block_ids[0]
                self.pool.share(request.block_ids[:1])

    tally, _ = passes(Shares(num_blocks=10, block_size=4), requests_of((8, 3), (8, 3)), what="a shared block")
    that("when each finished", tally.finished).gives({0: 2, 1: 2})


def test_a_prompt_in_pieces_passes():
    """A step that has reached max_num_batched_tokens may compute a part of a prompt. It brings no token of output."""

    class InPieces(PagedScheduler):
        def schedule_waiting(self, output):
            while (request := self.head()) and output.total_num_scheduled_tokens < self.max_num_batched_tokens:
                self.admit(request, output)

        def schedule_tokens(self, request, output):
            left = self.max_num_batched_tokens - output.total_num_scheduled_tokens
            output.num_scheduled_tokens[request.request_id] = min(
                left, request.num_tokens - request.num_computed_tokens
            )
            output.scheduled.append(request)

    scheduler = InPieces(num_blocks=10, block_size=4, max_num_batched_tokens=8)
    tally, _ = passes(
        scheduler, requests_of((6, 3), (7, 3)), what="6 tokens of 6 and 2 of 7, then 1 and 5, in steps of 8"
    )
    that("who computes in each step", tally.order).gives([[0, 1], [0, 1], [0, 1], [1]])


class ByFours(Broken):
    """Computes `chunk` tokens of a request in a step, where its limit says 4."""

    chunk = 4

    def largest_chunk(self, num_tokens):
        return min(num_tokens, 4)

    def schedule_tokens(self, request, output):
        left = request.num_tokens - request.num_computed_tokens
        output.num_scheduled_tokens[request.request_id] = min(left, self.chunk)
        output.scheduled.append(request)


def test_a_limit_for_each_request_passes():
    """The step has room for all 10 tokens of a prompt, and the scheduler's `largest_chunk` of 10 is 4: 4, 4 and 2."""
    tally, _ = passes(ByFours(num_blocks=10, block_size=4), requests_of((10, 2), (4, 2)), what="4 tokens of 10, 4 of 4")
    that("who computes in each step", tally.order).gives([[0, 1], [0, 1], [0], [0]])


def test_an_end_by_max_model_len_passes():
    """Prompts of 5, 9 tokens wanted, and max_model_len is 8: they end with 3, and had cause to."""
    scheduler = PagedScheduler(num_blocks=10, block_size=4, max_model_len=8)
    tally, _ = passes(scheduler, requests_of((5, 9), (5, 9)), what="two that end at max_model_len")
    that("when each finished", tally.finished).gives({0: 2, 1: 2})


def test_an_id_that_is_used_again_passes():
    """Between schedule and commit a request is aborted, and another comes with its id: it was not in the step."""
    scheduler = observe(PagedScheduler(num_blocks=10, block_size=4), Auditor())
    scheduler.add_request(Request("r", [1] * 4, 9))
    output = call(scheduler.schedule).value
    scheduler.abort_request("r")
    scheduler.add_request(Request("r", [1] * 4, 1))
    call(scheduler.update_from_output, output, {"r": 0}).gives([])
    output = call(scheduler.schedule).value
    that("how many finish with its own step", len(call(scheduler.update_from_output, output, {"r": 0}).value)).gives(1)


def test_an_end_beside_a_victim_passes():
    """In one step two are preempted and then the oldest is finished: its blocks are free now, and were not."""

    class Deadline(PagedScheduler):
        def schedule_running(self, output):
            super().schedule_running(output)
            if output.preempted:
                oldest = self.running[0]
                output.scheduled.remove(oldest)
                del output.num_scheduled_tokens[oldest.request_id]
                self.finish_request(oldest.request_id, RequestStatus.FINISHED_ABORTED)
                output.finished.append(oldest.request_id)

    scheduler = Deadline(num_blocks=4, block_size=4)
    tally, _ = passes(scheduler, requests_of(*FOUR), what="a scheduler that ends its oldest after a preemption")
    that("the first to end", next(iter(tally.finished.items()))).gives((0, 1))


# Rules "places" and "end", which were written for you: what you build on is still there


@broken("step 1, places", after="preempt")
def test_a_victim_in_no_place(scheduler, request, output):
    """A preempted request is no longer in the batch, and not in the queue either."""
    scheduler.waiting.remove(request)


@broken("step 0, places", after="admit")
def test_a_status_that_stays(scheduler, request, output):
    """An admitted request is still WAITING."""
    request.status = RequestStatus.WAITING


@broken("step 1, places", after="preempt")
def test_a_victim_that_is_running(scheduler, request, output):
    """A preempted request is still RUNNING."""
    request.status = RequestStatus.RUNNING


@broken("step 0, places", after="admit")
def test_twice_in_the_batch(scheduler, request, output):
    """An admitted request is in the batch twice."""
    scheduler.running.append(request)


@broken("step 0, places", after="admit")
def test_in_batch_and_queue(scheduler, request, output):
    """An admitted request stays in the queue."""
    scheduler.waiting.add(request)


@broken("step 0, places", after="schedule")
def test_a_stranger(scheduler, output):
    """In the batch there is one that was never added."""
    scheduler.running.append(Request("stranger", [1], 1))
    scheduler.running[-1].status = RequestStatus.RUNNING


@broken("step 0, places", after="admit")
def test_a_copy_in_the_batch(scheduler, request, output):
    """In the batch stands a copy of the request: the same id, and not the same request."""
    scheduler.running[-1] = copy.copy(request)


@broken("step 1, places", after="preempt")
def test_a_copy_in_the_queue(scheduler, request, output):
    """In the queue stands a copy of the request that was preempted."""
    scheduler.waiting.remove(request)
    scheduler.waiting.add(copy.copy(request))


@broken("step 1, places", after="schedule", sizes=[(16, 9)])
def test_an_end_that_is_not_listed(scheduler, output):
    """A request that is finished for lack of memory is in no list of the step."""
    output.finished.clear()


@broken("step 0, end", after="schedule")
def test_an_end_of_none(scheduler, output):
    """An id that no request has is listed as finished."""
    output.finished.append("none")


@broken("step 0, end", after="schedule")
def test_an_end_of_one_that_goes_on(scheduler, output):
    """A request of the batch is listed as finished, and goes on."""
    output.finished.append(scheduler.running[0].request_id)


@broken("step 1, end", instead="finish_request", sizes=[(16, 9)])
def test_an_end_without_a_status(scheduler, right, request_id, status):
    """A request that is finished for lack of memory leaves, gives everything back, and is WAITING."""
    request = next(each for each in scheduler.running if each.request_id == request_id)
    done = right(request_id, status)
    request.status = RequestStatus.WAITING
    return done


@pytest.mark.parametrize("sizes", [FOUR, [(12, 9), (4, 9)]], ids=["four of one block", "one of all four blocks"])
def test_an_end_for_want_of_memory_that_there_is(sizes):
    """A request that the pool is large enough for ends for want of memory, after one victim."""

    class GivesUpEarly(Broken):
        def make_room(self, request, output):
            self.preempt(self.running[-1], output)
            self.finish_request(request.request_id, RequestStatus.FINISHED_CAPACITY)
            output.finished.append(request.request_id)
            return False

    expose(GivesUpEarly, "step 1, end", sizes)


@broken("step 1, end", instead="finish_request", sizes=[(16, 9)])
def test_an_end_with_another_reason(scheduler, right, request_id, status):
    """A request that is finished for lack of memory is FINISHED_LENGTH."""
    return right(request_id, RequestStatus.FINISHED_LENGTH)


def test_a_copy_that_waits():
    """Not the request that was added stands in the queue, but a copy: its client would wait forever."""

    class TakesACopy(Broken):
        def add_request(self, request):
            self.register(request)
            self.waiting.add(copy.copy(request))

    scheduler = observe(TakesACopy(num_blocks=4, block_size=4), Auditor())
    call(scheduler.add_request, Request("r", [1] * 4, 9)).raises(InvariantError, saying="step 0, places")


def lying(name, lie):
    """A broken scheduler that says something else than what is right when it is asked for `name`."""
    honest = getattr(PagedScheduler, name).fget
    return type("Liar", (Broken,), {name: property(lambda scheduler: lie(honest(scheduler)))})


@pytest.mark.parametrize(
    ("name", "lie"),
    [
        pytest.param("num_running", lambda count: count + 1, id="one too many in the batch"),
        pytest.param("num_running", lambda count: count - 1, id="one too few in the batch"),
        pytest.param("num_waiting", lambda count: count + 1, id="one too many in the queue"),
        pytest.param("num_waiting", lambda count: count - 1, id="one too few in the queue"),
        pytest.param("has_unfinished", lambda left: not left, id="none unfinished"),
    ],
)
def test_counts_that_lie(name, lie):
    """One in the batch and one in the queue; num_running, num_waiting or has_unfinished is wrong."""
    scheduler = observe(lying(name, lie)(num_blocks=4, block_size=4, max_num_seqs=1), Auditor())
    for request in requests_of((4, 9), (4, 9)):
        scheduler.add_request(request)
    call(scheduler.schedule).raises(InvariantError, saying="step 0, places")


def test_has_unfinished_when_none_is_left():
    """has_unfinished is True when no request is left: a server would call schedule forever."""
    expose(lying("has_unfinished", lambda left: True), "step 1, places", [(4, 2)])


@pytest.mark.parametrize("name", ["FINISHED_LENGTH", "FINISHED_CAPACITY"])
def test_an_end_from_outside_without_a_cause(name):
    """With 1 of 9 tokens a request is said to have all of them, or to be too large for a pool with room for it."""
    scheduler = observe(PagedScheduler(num_blocks=4, block_size=4), Auditor())
    scheduler.add_request(Request("r", [1] * 4, 9))
    scheduler.update_from_output(scheduler.schedule(), {"r": 0})
    call(scheduler.finish_request, "r", RequestStatus[name]).raises(InvariantError, saying="step 0, end")


@pytest.mark.parametrize("name", ["FINISHED_STOPPED", "FINISHED_ABORTED"])
def test_an_end_from_outside_passes(name):
    """A stop string was found, or the client has left: only they know, and the scheduler need not."""
    scheduler = observe(PagedScheduler(num_blocks=4, block_size=4), Auditor())
    for request in requests_of((4, 9), (4, 9)):
        scheduler.add_request(request)
    scheduler.update_from_output(scheduler.schedule(), {0: 0, 1: 0})
    call(scheduler.finish_request, 0, RequestStatus[name]).gives(True)
    tally = call(drive, scheduler, max_steps=20).value
    that("who ends in the steps that follow", list(tally.finished)).gives([1])


@broken("step 1, end", instead="release", then=[aborting(0)], **SWAP)
def test_an_abort_that_keeps_blocks(scheduler, right, request):
    """Aborted, a request of the batch keeps its blocks."""
    if not request.status.is_finished:
        right(request)


@broken("step 1, end", instead="release_host", then=[aborting(3)], **SWAP)
def test_an_abort_that_keeps_host_blocks(scheduler, right, request):
    """Aborted, a request that was swapped out keeps its CPU blocks."""
    if not request.status.is_finished:
        right(request)


@broken("step 1, end", instead="finish_request", then=[aborting(0)], **SWAP)
def test_an_abort_that_keeps_the_slot(scheduler, right, request_id, status):
    """Aborted, a request keeps its batch slot."""
    batch = list(scheduler.running)
    done = right(request_id, status)
    scheduler.running = batch
    return done


@broken("step 1, end", instead="finish_request", then=[aborting(3)], **SWAP)
def test_an_abort_that_stays_queued(scheduler, right, request_id, status):
    """Aborted, a request stays in the queue."""
    request = scheduler.waiting[request_id]
    done = right(request_id, status)
    scheduler.waiting.add(request)
    return done


# Rule "recovery", which was written for you


@broken("step 2, recovery", instead="recover", **RECOVERY)
def test_a_recovery_of_nothing(scheduler, right):
    """Recovers nothing: its batch goes on."""
    scheduler.outstanding = None


@broken("step 2, recovery", instead="restart", **RECOVERY)
def test_a_recovery_with_computed_tokens(scheduler, right, request):
    """Frees the blocks, and counts their tokens as computed."""
    scheduler.release(request)
    request.status = RequestStatus.WAITING


@broken("step 2, recovery", after="restart", **RECOVERY)
def test_a_recovery_without_the_answers(scheduler, request):
    """Requests begin from their prompts, and would generate what their clients have read already."""
    request.output_token_ids.clear()


@broken("step 2, recovery", instead="recover", **RECOVERY)
def test_a_recovery_that_counts_too_little(scheduler, right):
    """A recovery counts no preemption of those in the batch."""
    counts = [(request, request.num_preemptions) for request in scheduler.running]
    right()
    for request, count in counts:
        request.num_preemptions = count


@broken("step 2, recovery", instead="recover", **RECOVERY)
def test_a_recovery_that_counts_too_much(scheduler, right):
    """A recovery counts a preemption of those that wait."""
    for request in scheduler.waiting.values():
        request.num_preemptions += 1
    right()


@broken("step 2, recovery", instead="restart", **RECOVERY)
def test_a_recovery_that_keeps_the_swap_space(scheduler, right, request):
    """What was swapped out stays there, though the copy may not have been made."""
    if request.status is not RequestStatus.SWAPPED:
        right(request)


@pytest.mark.parametrize("where", ["blocks", "CPU blocks"])
def test_a_recovery_that_loses_a_block(where):
    """After it nothing is in use, and the pool, or the host's, counts a block as used."""

    class Loses(Broken):
        def recover(self):
            super().recover()
            (self.pool if where == "blocks" else self.host_pool).allocate(1)

    expose(Loses, "step 2, blocks", then=[recovering], **SWAP)


# Rule "blocks"


@broken("step 2, blocks", instead="release", sizes=[(4, 3), (4, 9)], num_blocks=10)
def test_a_block_that_is_lost(scheduler, right, request):
    """A finished request takes its blocks along: at the commit of step 2 they are used, and none lists them."""
    request.block_ids = []


@broken("step 0, blocks", after="admit")
def test_a_block_with_two_tables(scheduler, request, output):
    """The second request is given the first one's block: one reference is counted, and two list it."""
    if len(scheduler.running) == 2:
        scheduler.pool.free(request.block_ids)
        request.block_ids = list(scheduler.running[0].block_ids)


@broken("step 0, blocks", after="admit", sizes=[(8, 9)])
def test_a_block_twice_in_one_table(scheduler, request, output):
    """A request lists one of its blocks twice: two of its positions would share their rows. The other one is free."""
    scheduler.pool.free([request.block_ids[1]])
    request.block_ids[1] = request.block_ids[0]


@broken("step 1, blocks", after="swap_out", **AWAY)
def test_a_cpu_block_twice_in_one_list(scheduler, request, num_blocks, output):
    """A request that was swapped out lists one of its two CPU blocks twice. The other one is free."""
    scheduler.host_pool.free([request.host_block_ids[1]])
    request.host_block_ids[1] = request.host_block_ids[0]


def test_the_blocks_that_no_request_has_cost_nothing():
    """A run in a pool of 20 blocks, and in one of 2000: `ref_count` is asked as often."""
    asked = []

    class Counting(BlockPool):
        def ref_count(self, block_id):
            asked[-1] += 1
            return super().ref_count(block_id)

    for num_blocks in (20, 2000):
        asked.append(0)
        scheduler = PagedScheduler(num_blocks=num_blocks, block_size=4)
        scheduler.pool = Counting(num_blocks, 4)
        passes(scheduler, requests_of(*FOUR), what=f"a run in {num_blocks} blocks")
    that(f"calls of ref_count with 2000 blocks, where 20 take {asked[0]}", asked[1]).gives(asked[0])


@pytest.mark.parametrize("block_id", [4, -1])
def test_a_block_that_does_not_exist(block_id):
    """Of 4 blocks, block 4 and block −1: InvariantError, not the pool's IndexError."""

    class Invents(Broken):
        def admit(self, request, output, found=()):
            super().admit(request, output, found)
            request.block_ids[-1] = block_id

    expose(Invents, "step 0, blocks", [(8, 9)])


@broken("blocks: ", instead="release_host", **SWAP)
def test_a_host_block_that_is_lost(scheduler, right, request):
    """A swapped request comes back, and its CPU blocks stay used forever."""
    request.host_block_ids = []


@broken("step 1, blocks", after="preempt")
def test_host_blocks_without_a_host(scheduler, request, output):
    """With recompute there is no CPU swap space: no request can have CPU blocks."""
    request.host_block_ids = [0]


@pytest.mark.parametrize(("off", "name"), [(1, "num_free"), (-1, "num_free"), (1, "num_used")])
def test_a_pool_that_lies(off, name):
    """Its references are right, and num_free or num_used is one too many or too few."""

    class Liar(Broken):
        def __init__(self, **options):
            super().__init__(**options)
            honest = getattr(BlockPool, name).fget
            kind = type("Pool", (BlockPool,), {name: property(lambda pool: honest(pool) + off)})
            self.pool = kind(self.pool.num_blocks, self.pool.block_size)

    expose(Liar, "step 0, blocks", [(4, 9)], num_blocks=20)


@pytest.mark.parametrize("where", ["blocks", "CPU blocks"])
def test_a_block_with_a_reference_too_many(where):
    """Two references are counted, and one request lists it: when that one leaves, the block stays used forever."""

    class OwnsTwice(Broken):
        def admit(self, request, output, found=()):
            super().admit(request, output, found)
            if where == "blocks":
                self.pool.share(request.block_ids[:1])

        def swap_out(self, request, num_blocks, output):
            super().swap_out(request, num_blocks, output)
            if where == "CPU blocks":
                self.host_pool.share(request.host_block_ids[:1])

    expose(OwnsTwice, "step 0, blocks" if where == "blocks" else "step 1, blocks", **SWAP)


# Rule "holdings"


@pytest.mark.parametrize(("off", "step"), [(-1, 1), (1, 0)], ids=["a token late", "a token early"])
def test_a_block_at_the_wrong_token(off, step):
    """Growing one token late, a token has no slot; one token early, a block is held without need."""

    class CountsWrong(Broken):
        def blocks_missing(self, request):
            return -(-(request.num_tokens + off) // 4) - len(request.block_ids)

        def blocks_to_admit(self, request):
            return -(-(request.num_tokens + max(off, 0)) // 4)

    expose(CountsWrong, f"step {step}, holdings", [(4, 9)], num_blocks=10)


def test_a_token_without_a_slot_is_seen_before_it_is_computed():
    """The step that needs the block is stopped when it is scheduled: after the commit its KV entry would be lost."""

    class NeverGrows(Broken):
        def blocks_missing(self, request):
            return 0 if request.block_ids else super().blocks_missing(request)

    scheduler = observe(NeverGrows(num_blocks=10, block_size=4), Auditor())
    scheduler.add_request(Request("r", [1] * 4, 9))
    output = call(scheduler.schedule).value
    call(scheduler.update_from_output, output, {"r": 0}).gives([])
    call(scheduler.schedule).raises(InvariantError, saying="step 1, holdings")


def test_a_victim_that_keeps_its_blocks():
    """It waits, and its blocks are as used as before: memory that no request can use."""

    class Keeps(Broken):
        def release(self, request):
            if request.status.is_finished:
                super().release(request)

        def make_room(self, request, output):
            super().preempt(self.running[-1], output)
            return self.blocks_missing(request) <= self.pool.num_free

    expose(Keeps, "step 1, holdings", [(4, 9), (4, 9)], num_blocks=2)


@broken("step 1, holdings", instead="preempt")
def test_a_victim_that_believes_to_be_computed(scheduler, right, request, output):
    """Its blocks are gone and its computed tokens are not: what it computes next would attend to nothing."""
    computed = request.num_computed_tokens
    right(request, output)
    request.num_computed_tokens = computed


@broken("step 1, holdings", instead="swap_out", **AWAY)
def test_a_swapped_request_that_keeps_its_blocks(scheduler, right, request, num_blocks, output):
    """Swapped out, it has CPU blocks, and its device blocks besides."""
    kept = request.block_ids[-1]
    scheduler.pool.share([kept])
    right(request, num_blocks, output)
    request.block_ids = [kept]


@pytest.mark.parametrize("off", [-1, 1], ids=["one too few", "one too many"])
def test_a_number_of_host_blocks_that_is_wrong(off):
    """CPU blocks for just what is computed."""

    class SwapsOther(Broken):
        def swap_out(self, request, num_blocks, output):
            super().swap_out(request, num_blocks + off, output)

    expose(SwapsOther, "step 1, holdings", [(4, 9), (8, 9)], num_blocks=3, **SWAP)


@broken("holdings: ", instead="swap_in", **SWAP)
def test_host_blocks_of_the_batch(scheduler, right, request, output):
    """Back in the batch, and still with CPU blocks, though they were given back."""
    kept = request.host_block_ids
    scheduler.host_pool.share(kept)
    right(request, output)
    request.host_block_ids = kept


@broken("step 1, holdings", after="preempt")
def test_nothing_computed_and_swapped(scheduler, request, output):
    """SWAPPED with nothing computed: there is nothing that the host could have."""
    request.status = RequestStatus.SWAPPED


@broken("step 1, holdings", after="preempt", **FULL_HOST)
def test_host_blocks_of_one_that_is_recomputed(scheduler, request, output):
    """It has nothing computed, waits for a new start, and takes a CPU block along."""
    if request.status is RequestStatus.WAITING:
        request.host_block_ids = scheduler.host_pool.allocate(1)


# Rule "order"


@broken("step 1, order", instead="schedule_running", sizes=[(2, 9), (4, 9)], num_blocks=2)
def test_the_oldest_is_preempted(scheduler, right, output):
    """The first arrival is preempted, and later ones go on."""
    if scheduler.running and scheduler.blocks_missing(scheduler.running[-1]) > scheduler.pool.num_free:
        scheduler.running.append(scheduler.running.pop(0))
        scheduler.preempt(scheduler.running[-1], output)
    right(output)


@broken("step 0, order", after="schedule")
def test_a_batch_in_another_order(scheduler, output):
    """The last arrival stands first in the batch."""
    scheduler.running.insert(0, scheduler.running.pop())


@broken("step 1, order", instead="priority_key", sizes=[*FOUR, (8, 9)])
def test_a_victim_behind_newcomers(scheduler, right, request):
    """A victim stands behind a request that arrived later."""
    return (request.num_preemptions, request.arrival_index)


@broken("order: ", instead="head", sizes=[(8, 9), (4, 9)], max_num_seqs=1)
def test_a_newcomer_that_overtakes(scheduler, right):
    """The shortest of the queue is admitted first."""
    return min(scheduler.waiting.values(), key=lambda request: request.num_tokens, default=None)


def test_two_with_one_number():
    """Asked alone: two requests with the same arrival_index, in the batch or in the queue, have no order."""
    auditor, scheduler = Auditor(), PagedScheduler(num_blocks=4, block_size=4)
    call(drive, observe(scheduler, auditor), requests_of(*FOUR), max_steps=2)
    that("the batch and the queue", ([each.request_id for each in scheduler.running], list(scheduler.waiting))).gives(
        ([0, 1], [2, 3])
    )
    call(auditor.check_order, scheduler).gives(None)
    batch, queue = scheduler.running, list(scheduler.waiting.values())
    for former, later in (batch, queue):
        number, later.arrival_index = later.arrival_index, former.arrival_index
        call(auditor.check_order, scheduler).raises(InvariantError, saying="order")
        later.arrival_index = number


def test_an_order_of_its_own():
    """A scheduler that is not `first_come` is no business of this rule: the shortest may go first there."""

    class ShortestFirst(PagedScheduler):
        first_come = False

        def head(self):
            return min(self.waiting.values(), key=lambda request: request.num_tokens, default=None)

    scheduler = ShortestFirst(num_blocks=4, block_size=4, max_num_seqs=1)
    tally, _ = passes(scheduler, requests_of((8, 2), (4, 2)), what="a scheduler that is not first_come")
    that("finished, in order", list(tally.finished)).gives([1, 0])


def test_victims_in_an_order_of_its_own():
    """The last arrival is the first of the batch, and the first arrivals are its last: these are preempted."""

    class LastFirst(PagedScheduler):
        first_come = False

        def priority_key(self, request):
            return (-request.arrival_index,)

    scheduler = LastFirst(num_blocks=4, block_size=4)
    tally, _ = passes(scheduler, requests_of(*FOUR), what="a scheduler in which the last arrival is the first")
    that("finished, in order", list(tally.finished)).gives([3, 2, 1, 0])


# Rule "work"


@broken("step 0, work", instead="schedule_waiting", max_num_batched_tokens=7)
def test_too_many_tokens(scheduler, right, output):
    """Two prompts of 4 in a step of at most 7 tokens."""
    scheduler.token_budget += 1
    right(output)


@broken("step 0, work", instead="schedule_waiting", max_num_seqs=3)
def test_too_many_requests(scheduler, right, output):
    """Four in a batch of at most three."""
    scheduler.max_num_seqs += 1
    right(output)
    scheduler.max_num_seqs -= 1


@broken("step 0, work", instead="schedule_waiting", max_num_seqs=1)
def test_nothing_happens(scheduler, right, output):
    """One batch slot, and none is admitted because one is kept free: the queue waits forever."""
    scheduler.max_num_seqs -= 1
    right(output)
    scheduler.max_num_seqs += 1


@broken("step 1, work", instead="schedule_running", sizes=[(4, 9)], **SWAP)
def test_nothing_but_a_preemption(scheduler, right, output):
    """The only request is swapped out, and nothing is computed: that is no progress."""
    if scheduler.running:
        scheduler.preempt(scheduler.running[-1], output)


@broken("step 1, work", instead="schedule_tokens", num_blocks=20)
def test_a_request_of_the_batch_is_left_out(scheduler, right, request, output):
    """In the batch, with blocks, and never computed again."""
    if request.request_id != 1 or not request.output_token_ids:
        right(request, output)


@broken("work: ", after="schedule_tokens")
def test_a_prompt_without_its_answer(scheduler, request, output):
    """A victim comes back, and only its prompt is computed again: what it had generated is not in the cache."""
    if not request.num_computed_tokens:
        output.num_scheduled_tokens[request.request_id] = request.num_prompt_tokens


@pytest.mark.parametrize("num_new", [0, 2])
def test_a_number_of_tokens_that_is_not_there(num_new):
    """A request in decode has one token to compute, not none, and not two."""

    class Miscounts(Broken):
        def schedule_tokens(self, request, output):
            super().schedule_tokens(request, output)
            if request.num_computed_tokens == 5:
                output.num_scheduled_tokens[request.request_id] = num_new

    expose(Miscounts, "step 2, work", [(4, 9)], num_blocks=20)


def test_no_tokens_in_a_full_step():
    """Two requests fill a step of 8 tokens, and the third is scheduled with 0: a request that computes has at least 1.

    In a step with tokens to spare it is wrong for another reason: it could compute more.
    """

    class ListsAll(Broken):
        def schedule_waiting(self, output):
            self.token_budget += 4
            super().schedule_waiting(output)
            if len(output.scheduled) > 2:
                output.num_scheduled_tokens[output.scheduled[2].request_id] = 0

    expose(ListsAll, "step 0, work", [(4, 9)] * 3, num_blocks=20, max_num_batched_tokens=8)


@pytest.mark.parametrize("chunk", [3, 5])
def test_another_number_than_the_limit_for_each_request(chunk):
    """`largest_chunk` is 4, and the step has room: a request computes 3 tokens of 10, or 5."""
    cls = type(f"By{chunk}sWhereTheLimitIs4", (ByFours,), {"chunk": chunk})
    expose(cls, "step 0, work", [(10, 2), (4, 2)], num_blocks=10)


@broken("step 0, work", after="schedule")
def test_two_lists_that_disagree(scheduler, output):
    """`scheduled` in another order than `num_scheduled_tokens`: requests would get each other's tokens."""
    output.scheduled.reverse()


@broken("step 0, work", after="schedule", max_num_seqs=2)
def test_work_for_a_waiting_request(scheduler, output):
    """Work for a request that is still in the queue, and has no blocks."""
    if request := scheduler.head():
        scheduler.schedule_tokens(request, output)


@broken("step 0, work", instead="schedule_waiting", max_num_seqs=2, max_num_batched_tokens=8)
def test_too_many_requests_of_which_some_have_nothing_to_do(scheduler, right, output):
    """A batch of three where two may be. The step is full with two of them, and max_num_seqs is about the batch."""
    scheduler.max_num_seqs, scheduler.token_budget = (3, 12)
    right(output)
    scheduler.max_num_seqs = 2
    if len(output.scheduled) > 2:
        del output.num_scheduled_tokens[output.scheduled.pop().request_id]


@broken("step 0, work", after="schedule")
def test_a_copy_in_the_step(scheduler, output):
    """`scheduled` has a copy of a request of the batch: the same id, and not the same request."""
    output.scheduled[:] = map(copy.copy, output.scheduled)


@pytest.mark.parametrize(
    ("tokens", "excused"),
    [
        pytest.param({"large": 9}, True, id="alone"),
        pytest.param({"a": 3, "b": 4, "large": 9}, True, id="where a token was left"),
        pytest.param({"a": 4, "b": 4, "large": 9}, False, id="where none was left"),
        pytest.param({"a": 1, "large": 8}, False, id="one that a step has room for"),
        pytest.param({"a": 1, "new": 9}, False, id="one that was never preempted"),
        pytest.param({"new": 1, "large": 9}, False, id="with one that was just admitted"),
        pytest.param({"large": 9, "larger": 10}, False, id="two of them"),
    ],
)
def test_the_one_excuse(tokens, excused):
    """has_outgrown_request, which was given: in steps of 8, a and b were running, large and larger were preempted."""
    auditor = Auditor()
    scheduler = observe(PagedScheduler(num_blocks=20, block_size=4, max_num_seqs=2), auditor)
    requests = {name: Request(name, [1] * 4, 9) for name in ("a", "b", "new", "large", "larger")}
    for request in requests.values():
        scheduler.add_request(request)
    scheduler.update_from_output(scheduler.schedule(), {"a": 0, "b": 0})
    requests["large"].num_preemptions = requests["larger"].num_preemptions = 1
    output = SchedulerOutput(num_scheduled_tokens=tokens, scheduled=[requests[name] for name in tokens])
    call(auditor.has_outgrown_request, output, 8).gives(excused)


# Rule "victims"


@broken("step 1, victims", after="schedule")
def test_a_victim_that_is_not_listed(scheduler, output):
    """It has left the batch, and `preempted` does not say so."""
    output.preempted.clear()


@broken("step 1, victims", after="schedule", num_blocks=20)
def test_a_victim_that_did_not_leave(scheduler, output):
    """`preempted` names one that is in the batch."""
    if scheduler.running[0].output_token_ids:
        output.preempted.append(scheduler.running[-1].request_id)


@broken("step 1, victims", after="schedule")
def test_victims_in_the_wrong_order(scheduler, output):
    """The last one is named first, in the order in which they left."""
    output.preempted.sort()


@broken("step 1, victims", after="schedule")
def test_victims_that_are_named_twice(scheduler, output):
    """`preempted` names each victim twice."""
    output.preempted *= 2


def test_one_between_two_victims_stays():
    """Two of four are preempted, the last of the batch and then the second: the third has arrived after that one."""

    class TakesEveryOther(Broken):
        first_come = False

        def preempt(self, request, output):
            super().preempt(self.running[-1], output)
            self.running.append(self.running.pop(1))
            super().preempt(self.running[-1], output)

    expose(TakesEveryOther, "step 1, victims", [(4, 9), (8, 9), (2, 9), (2, 9)], num_blocks=5)


def test_a_newer_one_stays():
    """It has an order of its own, so rule "order" is silent; but victims are the last of the batch in every stage."""

    class TakesTheMiddle(Broken):
        first_come = False

        def preempt(self, request, output):
            self.running.append(self.running.pop(1))
            super().preempt(self.running[-1], output)

    expose(TakesTheMiddle, "step 1, victims", [(4, 9), (2, 9), (2, 9)], num_blocks=3)


@broken("step 1, victims", instead="schedule_running", sizes=[(4, 9), (4, 9)], num_blocks=20)
def test_memory_was_not_short(scheduler, right, output):
    """Two requests, room for both, and one of them is sent away: it could have stayed."""
    if len(scheduler.running) > 1:
        scheduler.preempt(scheduler.running[-1], output)
    right(output)


@pytest.mark.parametrize(("newest", "num_blocks"), [(2, 3), (12, 5)], ids=["a small newest", "a large newest"])
def test_one_victim_too_many(newest, num_blocks):
    """One block was missing, and two requests were preempted. The one preempted last could have stayed."""

    class Overdoes(Broken):
        def make_room(self, request, output):
            self.preempt(self.running[-1], output)
            return super().make_room(request, output)

        def schedule_running(self, output):
            super().schedule_running(output)
            if output.preempted and len(self.running) > 1:
                victim = self.running[-1]
                output.scheduled.remove(victim)
                del output.num_scheduled_tokens[victim.request_id]
                self.preempt(victim, output)

    expose(Overdoes, "step 1, victims", [(4, 9), (2, 9), (newest, 9)], num_blocks=num_blocks)


def test_one_is_admitted_beside():
    """Memory is short, a request is preempted, and a new one gets its slot in the same step."""

    class RobsPeter(Broken):
        first_come = False

        def head(self):
            return min(self.waiting.values(), key=lambda request: request.num_tokens, default=None)

        def schedule(self):
            output = super().schedule()
            if output.preempted:
                self.schedule_waiting(output)
            return output

    scheduler = observe(RobsPeter(num_blocks=6, block_size=4), Auditor())
    first, second, small = requests_of((8, 9), (16, 9), (1, 9))
    arrivals = [(0, first), (0, second), (1, small)]
    call(drive, scheduler, arrivals=arrivals, max_steps=20).raises(InvariantError, saying="step 1, victims")


@broken("step 1, victims", after="preempt")
def test_a_preemption_that_is_not_counted(scheduler, request, output):
    """num_preemptions counts how often a request has lost its place."""
    request.num_preemptions = 0


@broken("step 1, victims", after="preempt")
def test_an_answer_that_is_lost(scheduler, request, output):
    """A victim loses what it had generated: its client has read that already."""
    request.output_token_ids.clear()


@broken("step 0, victims", after="schedule")
def test_a_preemption_of_one_that_stayed(scheduler, output):
    """num_preemptions grows, and the request is in the batch."""
    scheduler.running[0].num_preemptions += 1


@broken("step 0, victims", after="schedule", max_num_seqs=2)
def test_an_answer_from_nowhere(scheduler, output):
    """While others are scheduled, one that waits gets a token."""
    scheduler.waiting[2].output_token_ids.append(0)


@broken("step 2, victims", after="schedule", **AWAY)
def test_a_row_that_is_lost_on_the_host(scheduler, output):
    """A request that stays swapped out has a token fewer computed than before. Its blocks are as many."""
    for request in scheduler.waiting.values():
        if request.status is RequestStatus.SWAPPED and request.request_id not in output.swapped_out:
            request.num_computed_tokens -= 1


# Rule "swaps"


@broken("step 1, swaps", after="schedule", **AWAY)
def test_pairs_in_another_order(scheduler, output):
    """The right pairs, the last one first: they are to stand in the order of the request's tokens."""
    for pairs in output.swapped_out.values():
        pairs.reverse()


@pytest.mark.parametrize("which", [0, "none"])
def test_a_way_back_of_one_that_was_not_away(which):
    """swapped_in names one that was never swapped out, or that is not there at all."""

    class Dreams(Broken):
        def schedule(self):
            output = super().schedule()
            output.swapped_in[which] = [(0, 0)]
            return output

    expose(Dreams, "step 0, swaps", num_blocks=20, **SWAP)


def test_one_that_was_swapped_out_waits_now():
    """It was SWAPPED before the step and is WAITING after it: asked alone, the rule sees that."""
    auditor, scheduler = Auditor(), PagedScheduler(num_blocks=4, block_size=4, **SWAP)
    call(drive, observe(scheduler, auditor), requests_of(*FOUR), max_steps=2)
    swapped = auditor.notes[3].request
    that("request 3 in the notes, after step 1", auditor.notes[3].status.name).gives("SWAPPED")
    call(auditor.check_swaps, scheduler, SchedulerOutput()).gives(None)
    swapped.status = RequestStatus.WAITING
    call(auditor.check_swaps, scheduler, SchedulerOutput()).raises(InvariantError, saying="swaps")


@broken("step 1, swaps", after="swap_out", **AWAY)
def test_the_wrong_pairs(scheduler, request, num_blocks, output):
    """The CPU blocks are the right ones, in the wrong order: the beginning would come back as the end."""
    pairs = output.swapped_out[request.request_id]
    hosts = [host_block for _, host_block in pairs][::-1]
    output.swapped_out[request.request_id] = [(pair[0], host) for pair, host in zip(pairs, hosts, strict=True)]


@broken("step 1, swaps", after="swap_out", **SWAP)
def test_blocks_of_another_request(scheduler, request, num_blocks, output):
    """The pairs name the blocks of another request."""
    hosts = request.host_block_ids
    output.swapped_out[request.request_id] = list(zip(scheduler.running[0].block_ids, hosts, strict=False))


@broken("step 1, swaps", after="schedule", **SWAP)
def test_a_swap_that_is_not_listed(scheduler, output):
    """Swapped out, and not said: nothing would be copied."""
    output.swapped_out.clear()


@broken("step 1, swaps", after="schedule", **FULL_HOST)
def test_a_swap_that_was_none(scheduler, output):
    """swapped_out names a victim that is recomputed."""
    output.swapped_out |= {request_id: [(0, 0)] for request_id in output.preempted}


@pytest.mark.parametrize("how", ["turned round", "forgotten", "the wrong blocks"])
def test_the_way_back(how):
    """swapped_in has pairs (CPU block, block), the blocks in the order of the request's tokens."""

    class Returns(Broken):
        def swap_in(self, request, output):
            super().swap_in(request, output)
            pairs = output.swapped_in.pop(request.request_id)
            if how == "turned round":
                output.swapped_in[request.request_id] = [pair[::-1] for pair in pairs]
            elif how == "the wrong blocks":
                output.swapped_in[request.request_id] = [(pair[0], request.block_ids[-1]) for pair in pairs]

    expose(Returns, "swaps: ", [(4, 9), (8, 9)], num_blocks=4, **SWAP)


@broken("step 2, swaps", after="schedule", **SWAP)
def test_host_blocks_that_move(scheduler, output):
    """While a request is swapped out its CPU blocks are exchanged for others: nothing copies from these to those."""
    for request in scheduler.waiting.values():
        if request.status is RequestStatus.SWAPPED and request.request_id not in output.swapped_out:
            old, request.host_block_ids = (request.host_block_ids, scheduler.host_pool.allocate(1))
            scheduler.host_pool.free(old)


# Rule "tokens"


def committing(before=lambda request: None, after=lambda request: None, returns=lambda finished: finished):
    """A broken scheduler that does something to each request of a step before, or after, the commit."""

    class Commits(Broken):
        def update_from_output(self, output, token_ids):
            for request in output.scheduled:
                before(request)
            finished = super().update_from_output(output, token_ids)
            for request in output.scheduled:
                after(request)
            return returns(finished)

    return Commits


def add(name, number):
    return lambda request: setattr(request, name, getattr(request, name) + number)


@pytest.mark.parametrize(
    ("cls", "step"),
    [
        pytest.param(committing(after=lambda request: request.output_token_ids.append(0)), 0, id="a token twice"),
        pytest.param(committing(after=lambda request: request.output_token_ids.pop()), 0, id="a token lost"),
        pytest.param(committing(after=add("num_computed_tokens", -1)), 0, id="a computed token too few"),
        pytest.param(committing(after=add("num_computed_tokens", 1)), 0, id="a computed token too many"),
        pytest.param(committing(add("max_tokens", 1), add("max_tokens", -1)), 2, id="one goes on past max_tokens"),
        pytest.param(committing(add("max_tokens", -1), add("max_tokens", 1)), 1, id="one ends a token early"),
        pytest.param(committing(returns=lambda finished: []), 2, id="finished requests are not returned"),
        pytest.param(committing(returns=lambda finished: finished[::-1]), 2, id="finished requests in the wrong order"),
        pytest.param(committing(returns=lambda finished: finished * 2), 2, id="finished requests twice"),
        pytest.param(
            committing(returns=lambda finished: [*map(copy.copy, finished)]), 2, id="copies of finished requests"
        ),
    ],
)
def test_commits(cls, step):
    """Two prompts of 5 with 3 tokens each, ample memory: what the commit does wrong is seen at once."""
    expose(cls, f"step {step}, tokens", [(5, 3), (5, 3)], num_blocks=20)


@pytest.mark.parametrize(
    ("off", "step"), [(1, 2), (-1, 1)], ids=["one goes on past max_model_len", "one ends a token early"]
)
def test_max_model_len(off, step):
    """Prompts of 5, at most 8 tokens in all, which they have after step 2: that is an end, and nothing less is."""

    class Miscounts(Broken):
        def update_from_output(self, output, token_ids):
            self.max_model_len += off
            finished = super().update_from_output(output, token_ids)
            self.max_model_len -= off
            return finished

    expose(Miscounts, f"step {step}, tokens", [(5, 9), (5, 9)], num_blocks=20, max_model_len=8)


@broken("step 0, tokens", instead="update_from_output")
def test_tokens_for_a_copy(scheduler, right, output, token_ids):
    """Between schedule and commit the requests of the step are exchanged for copies: these get the tokens."""
    output.scheduled[:] = map(copy.deepcopy, output.scheduled)
    return right(output, token_ids)


@broken("step 0, tokens", instead="update_from_output", max_num_seqs=2)
def test_tokens_for_a_waiting_request(scheduler, right, output, token_ids):
    """A commit that moves a request which was not in the step."""
    for request in scheduler.waiting.values():
        request.output_token_ids.append(0)
    return right(output, token_ids)


@broken(
    "step 0, tokens", instead="update_from_output", sizes=[(5, 3)], token=3, request_options={"stop_token_ids": [3]}
)
def test_a_stop_token_that_is_passed_over(scheduler, right, output, token_ids):
    """Token 3 is a stop token, and the request goes on."""
    stops = [(request, request.stop_token_ids) for request in output.scheduled]
    for request, _ in stops:
        request.stop_token_ids = frozenset()
    finished = right(output, token_ids)
    for request, ids in stops:
        request.stop_token_ids = ids
    return finished


def test_a_stop_token_that_was_to_be_ignored():
    """ignore_eos is set, token 3 comes, and the request ends."""
    cls = committing(
        before=lambda request: setattr(request, "ignore_eos", False),
        after=lambda request: setattr(request, "ignore_eos", True),
    )
    options = {"stop_token_ids": [3], "ignore_eos": True}
    expose(cls, "step 0, tokens", [(5, 3)], token=3, request_options=options)


@broken("step 2, tokens", instead="update_from_output", sizes=[(5, 3)])
def test_a_reason_that_is_not_the_reason(scheduler, right, output, token_ids):
    """FINISHED_STOPPED needs a stop token: this one has come to max_tokens."""
    finished = right(output, token_ids)
    for request in finished:
        request.status = RequestStatus.FINISHED_STOPPED
    return finished
