"""Phase 9, task 3: no request waits forever, though it may be preempted in the middle of its prompt."""

from __future__ import annotations

import random

import pytest

from minicache.request import Request, RequestStatus
from minicache.scheduler.audit_sharing import SharingAuditor
from minicache.scheduler.fair import STARVATION_BOUND
from minicache.scheduler.observe import Observer, observe
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.queue import arrival_key
from minicache_course import scenario
from minicache_course.checks import call, that
from minicache_course.seeds import fresh, in_use

# Whether it has gained a token


@pytest.mark.parametrize(
    ("num_output", "at_admission", "num_computed", "status", "gained"),
    [
        pytest.param(0, 0, 0, RequestStatus.RUNNING, False, id="nothing is computed"),
        pytest.param(0, 0, 18, RequestStatus.RUNNING, False, id="two tokens short of its prompt"),
        pytest.param(0, 0, 19, RequestStatus.RUNNING, False, id="one token short of its prompt"),
        pytest.param(1, 0, 20, RequestStatus.RUNNING, True, id="has its first token"),
        pytest.param(5, 0, 24, RequestStatus.RUNNING, True, id="has five tokens"),
        pytest.param(5, 5, 0, RequestStatus.RUNNING, False, id="back again, nothing is computed"),
        pytest.param(5, 5, 20, RequestStatus.RUNNING, False, id="back again, its prompt is computed"),
        pytest.param(5, 5, 24, RequestStatus.RUNNING, False, id="back again, the newest token is left"),
        pytest.param(6, 5, 25, RequestStatus.RUNNING, True, id="back again, and has one more"),
        pytest.param(5, 0, 24, RequestStatus.SWAPPED, False, id="swapped out"),
        pytest.param(5, 0, 0, RequestStatus.WAITING, False, id="waits"),
        pytest.param(5, 0, 24, RequestStatus.FINISHED_ABORTED, False, id="aborted"),
    ],
)
def test_has_gained_token(chunked, a_request, num_output, at_admission, num_computed, status, gained):
    """In the batch, with more output tokens than at its admission: earlier ones do not count."""
    request = a_request("a", 20)
    request.output_token_ids += [7] * num_output
    request.num_outputs_at_admission = at_admission
    request.num_computed_tokens, request.status = num_computed, status
    call(chunked(8).has_gained_token, request).gives(gained)


# When a request is protected no longer


@pytest.mark.parametrize(
    ("num_output", "at_admission", "status", "stays"),
    [
        pytest.param(0, 0, RequestStatus.RUNNING, True, id="runs, no token yet"),
        pytest.param(5, 5, RequestStatus.RUNNING, True, id="runs, none since its admission"),
        pytest.param(1, 0, RequestStatus.RUNNING, False, id="runs, has a token"),
        pytest.param(6, 5, RequestStatus.RUNNING, False, id="runs, has one more"),
        pytest.param(0, 0, RequestStatus.WAITING, True, id="waits"),
        pytest.param(6, 5, RequestStatus.SWAPPED, True, id="is swapped out"),
        pytest.param(0, 0, RequestStatus.FINISHED_ABORTED, False, id="aborted"),
        pytest.param(9, 5, RequestStatus.FINISHED_LENGTH, False, id="finished"),
    ],
)
def test_protection_ends_with_a_token_or_the_end(chunked, a_request, num_output, at_admission, status, stays):
    """A request that has finished or gained a token is protected no longer, before the step admits any."""
    scheduler, request = chunked(8), a_request("a", 20)
    request.output_token_ids += [7] * num_output
    request.num_outputs_at_admission, request.status = at_admission, status
    scheduler.protected, seen = request, []
    scheduler.add_request(a_request("b", 20))
    scheduler.head = lambda: seen.append(scheduler.protected)  # there is no next request
    call(scheduler.schedule)
    that("the protected request when others could be admitted", seen).gives([request if stays else None])
    that("the protected request after the step", scheduler.protected).gives(request if stays else None)


# When a request becomes protected


@pytest.fixture(scope="session")
def two(chunked, serve, a_request):
    """`two(prompt, priority)`: a scheduler after two steps of 8 tokens, at most 6 of them of one request.

    "old" has computed 12 tokens. "other" came after the first step, with another priority, and has computed 2.
    """

    def create(prompt=30, priority=-1, **options):
        scheduler = chunked(8, a_request("old", prompt), **{"long_prefill_threshold": 6} | options)
        serve(scheduler, steps=1)
        work = serve(scheduler, a_request("other", 10, priority=priority), steps=1)
        that("the second step", work).gives([{"old": 6, "other": 2}])
        return scheduler

    return create


def test_protection_ends_with_the_token_though_preemption_follows(two):
    """Protection ends with its token, even if it is preempted in the next step."""
    scheduler = two(12)
    scheduler.protected = scheduler.running[-1]
    scheduler.pool.allocate(scheduler.pool.num_free)  # "other" has to take its blocks
    that("preempted", call(scheduler.schedule).value.preempted).gives(["old"])
    that("the protected request", scheduler.protected).gives(None)


def preempt_last(scheduler, status=RequestStatus.WAITING):
    """Preempt the last of the batch, by hand, and check that it waits. Returns the id of the protected request."""
    __tracebackhide__ = True
    victim, output = scheduler.running[-1], SchedulerOutput()
    call(scheduler.preempt, victim, output).gives(None)
    scenario.done("the test preempts", repr(victim.request_id))
    that("preempted", output.preempted).gives([victim.request_id])
    seen = victim.status, victim.num_preemptions, len(victim.block_ids), victim.request_id in scheduler.waiting
    that("status, preemptions, blocks of the victim, and whether it waits", seen).gives((status, 1, 0, True))
    scheduler.check()
    return scheduler.protected and scheduler.protected.request_id


def test_protected_when_bypassed_in_the_middle_of_a_prompt(two):
    """12 of 30 tokens are computed, a later arrival is ahead of it, and it is preempted: it is protected."""
    scheduler = two()
    that("the batch", [each.request_id for each in scheduler.running]).gives(["other", "old"])
    that("the protected request", preempt_last(scheduler)).gives("old")


def test_protected_when_swapped_out_in_the_middle_of_a_prompt(two):
    """A request that is swapped out keeps its computed tokens, but its admission yielded no token: it is protected."""
    scheduler = two(preemption="swap", num_host_blocks=20)
    that("the protected request", preempt_last(scheduler, RequestStatus.SWAPPED)).gives("old")


def test_not_protected_when_preempted_in_decode(two):
    """All of its 12 tokens are computed, and it has gained a token: it is not protected."""
    that("the protected request", preempt_last(two(12))).gives(None)


def test_not_protected_in_order_of_arrival(two):
    """The last of the batch arrived last: in strict order of arrival no request is ever protected."""
    scheduler = two(priority=1)
    that("the batch", [each.request_id for each in scheduler.running]).gives(["old", "other"])
    that("the protected request", preempt_last(scheduler)).gives(None)


def test_protected_one_token_short_of_its_prompt(two):
    """12 of 13 tokens are computed when it is preempted: it has gained no token."""
    that("the protected request", preempt_last(two(13))).gives("old")


@pytest.mark.parametrize(("first", "late"), [(1, 0), (0, 1)], ids=["late before first", "first before late"])
def test_protected_when_one_of_two_came_later(chunked, serve, a_request, first, late):
    """Two are ahead of it in the batch. One arrived before it and one later, in either order: it is protected."""
    scheduler = chunked(12, num_blocks=9, long_prefill_threshold=4)
    requests = [a_request("first", 4, 20, priority=first), a_request("old", 24, 2, priority=2)]
    serve(scheduler, *requests, a_request("late", 4, 20, priority=late), steps=5)
    that("the last of the batch", scheduler.running[-1].request_id).gives("old")
    that("the protected request", preempt_last(scheduler)).gives("old")


def test_not_protected_when_alone_in_the_batch(chunked, serve, a_request):
    """No other request is in the batch: none has bypassed it."""
    scheduler = chunked(8, a_request("old", 30))
    serve(scheduler, steps=1)
    that("the protected request", preempt_last(scheduler)).gives(None)


def test_not_protected_for_requests_that_wait(two, a_request):
    """A request lost its slot to an earlier arrival. A later one waits, and has bypassed none."""
    scheduler = two(priority=1)
    scheduler.add_request(a_request("later", 4, priority=-5))
    that("the protected request", preempt_last(scheduler)).gives(None)


def test_not_protected_while_an_older_one_waits(two, a_request):
    """An image that arrived before it waits for the batch to drain: the image is next, so none is protected."""
    scheduler = two()
    scheduler.add_request(a_request("image", 4, group="image", arrival_time=-1.0))
    that("the protected request", preempt_last(scheduler)).gives(None)


def test_protected_though_a_younger_one_waits(two, a_request):
    """An urgent image that arrived after it waits: this changes nothing."""
    scheduler = two()
    scheduler.add_request(a_request("image", 4, group="image", priority=-9))
    that("the protected request", preempt_last(scheduler)).gives("old")


def test_arrival_is_by_the_clock(two):
    """Arrival is by arrival_time first: here the other request, added later, arrived before."""
    scheduler = two()
    scheduler.running[0].arrival_time = -1.0
    that("the protected request", preempt_last(scheduler)).gives(None)


def test_an_earlier_arrival_takes_over_protection(two):
    """Protection passes from "other" to "old", which arrived earlier. It stays there when "other" is preempted, too."""
    scheduler = two()
    scheduler.protected = scheduler.running[0]
    that("the protected request", preempt_last(scheduler)).gives("old")
    that("the protected request after the next victim", preempt_last(scheduler)).gives("old")


# Which request may be admitted


def test_without_protection_head_is_that_of_phase_7(chunked, a_request):
    """As in phase 7: the waiting request of highest priority that is compatible with the batch."""
    scheduler = chunked(8)
    call(scheduler.head).gives(None)
    requests = a_request("a", 4, priority=2), a_request("b", 4, priority=1), a_request("c", 4, priority=1)
    for request in requests:
        scheduler.add_request(request)
    call(scheduler.head).gives(requests[1])
    that("waiting requests", len(scheduler.waiting)).gives(3)


def test_the_bound_of_phase_7_holds(chunked, a_request):
    """The test sets num_bypasses to 64: the request that arrived first is next, whatever its priority."""
    scheduler = chunked(8, first := a_request("a", 4, priority=9), second := a_request("b", 4))
    call(scheduler.head).gives(second)
    scheduler.num_bypasses = STARVATION_BOUND
    call(scheduler.head).gives(first)


def test_the_protected_request_is_next(two, a_request):
    """The protected request is next, ahead of a more urgent one, and `head` leaves it in the queue."""
    scheduler = two()
    old = scheduler.running[-1]
    preempt_last(scheduler)
    scheduler.add_request(a_request("urgent", 4, priority=-9))
    for _ in range(2):
        call(scheduler.head).gives(old)
    that("waiting requests", sorted(scheduler.waiting)).gives(["old", "urgent"])


def test_none_joins_the_protected_request(two, a_request):
    """The protected request is in the batch, without a token yet: none may join, though slots and blocks are free."""
    scheduler = two()
    scheduler.protected = scheduler.running[-1]
    scheduler.add_request(a_request("urgent", 1, priority=-9))
    call(scheduler.head).gives(None)
    output = call(scheduler.schedule).value
    that("the step", output.num_scheduled_tokens).gives({"other": 6, "old": 2})
    that("the protected request", scheduler.protected).gives(scheduler.running[-1])


def test_others_join_again_once_it_has_a_token(two, serve, a_request):
    """In the step after the one that completes its prompt, others join again."""
    scheduler = two(16)
    scheduler.protected = scheduler.running[-1]
    work = serve(scheduler, a_request("urgent", 1, 1, priority=-9), steps=4)
    expected = [{"other": 6, "old": 2}, {"other": 2, "old": 2}, {"other": 1, "old": 1, "urgent": 1}]
    that("the next steps", work).gives([*expected, {"other": 1, "old": 1}])
    that("the protected request", scheduler.protected).gives(None)


def test_the_bound_comes_before_the_protected_request(two, a_request):
    """One request is protected, an earlier one waits, and the test sets num_bypasses: at 64 the earlier one is next."""
    scheduler = two()
    scheduler.protected = protected = scheduler.running[-1]
    scheduler.add_request(first := a_request("first", 4, priority=9, arrival_time=-1.0))
    scheduler.num_bypasses = STARVATION_BOUND - 1
    call(scheduler.head).gives(None)
    scheduler.num_bypasses = STARVATION_BOUND
    call(scheduler.head).gives(first)
    scheduler.preempt(protected, SchedulerOutput())
    scheduler.protected = protected
    call(scheduler.head).gives(first)
    scheduler.num_bypasses = STARVATION_BOUND - 1
    call(scheduler.head).gives(protected)


def test_an_incompatible_protected_request_waits_for_the_batch_to_drain(two, a_request):
    """The protected request is an image, and the batch is of texts: none is next until it has drained."""
    scheduler = two()
    image = a_request("image", 4, group="image")
    scheduler.add_request(image)
    scheduler.add_request(a_request("text", 4, priority=-9))
    scheduler.protected = image
    call(scheduler.head).gives(None)
    for request_id in ("old", "other"):
        scheduler.abort_request(request_id)
    call(scheduler.head).gives(image)


def test_others_join_when_the_protected_request_is_aborted(two, serve, a_request):
    """The protected request is aborted: others join in the next step."""
    scheduler = two()
    preempt_last(scheduler)
    scheduler.abort_request("old")
    that("the next step", serve(scheduler, a_request("urgent", 1), steps=1)).gives([{"other": 6, "urgent": 1}])


def test_the_bound_goes_on_counting(two, a_request):
    """Only `admit` counts bypasses of the oldest. 60 of 64 stay 60, whichever request is preempted and protected."""
    scheduler = two()
    scheduler.add_request(a_request("image", 4, group="image", priority=-9))
    scheduler.num_bypasses = 60
    preempt_last(scheduler)
    that("num_bypasses when a request has become protected", scheduler.num_bypasses).gives(60)
    scheduler.protected.status = RequestStatus.FINISHED_ABORTED
    call(scheduler.schedule_running, SchedulerOutput()).gives(None)
    that("the protected request, once it is aborted", scheduler.protected).gives(None)
    that("num_bypasses when none is protected any more", scheduler.num_bypasses).gives(60)


# Stories


def test_a_long_prompt_under_an_endless_stream(chunked, a_request):
    """60 tokens at 16 a step, of low priority; urgent requests keep coming, are ahead of it and take its blocks."""
    options = {"num_blocks": 20, "max_num_seqs": 8, "reserve_full_prompt": False}
    scheduler = chunked(16, old := a_request("old", 60, 10, priority=5), **options)
    number = num_preempted = 0
    while not old.status.is_finished and number < 10 * STARVATION_BOUND:
        while scheduler.num_waiting < 4:
            scheduler.add_request(a_request(number, 8, 20))
            number += 1
        output = call(scheduler.schedule).value
        num_preempted += "old" in output.preempted
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 1))
    that(f"whether it has finished before {number} others had come", old.status.is_finished).gives(True)
    that("whether it was ever preempted", num_preempted > 0).gives(True)


def under_a_stream(scheduler, old, num_urgent):
    """Serve `old` while urgent requests of 8 + 4 tokens arrive every fourth step. Returns its preemptions."""
    __tracebackhide__ = True
    scheduler.add_request(old)
    for step in range(4 * num_urgent):
        if step % 4 == 0:
            scheduler.add_request(Request(step, [2] * 8, 4))
        output = call(scheduler.schedule).value
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 7))
        if old.status.is_finished:
            return old.num_preemptions
    story = f"{old!r}, preempted {old.num_preemptions} times, has finished before {num_urgent} urgent ones had come"
    that(f"whether {story}", False).gives(True)


@pytest.mark.parametrize("num_prompt", [24, 25])
@pytest.mark.parametrize("swap", [False, True], ids=["recompute", "swap"])
def test_a_last_chunk_of_one_token(chunked, a_request, num_prompt, swap):
    """25 tokens at 8 a step: 24 are soon computed, and a block is missing for the last one, again and again."""
    options = {"preemption": "swap", "num_host_blocks": 9} if swap else {}
    options |= {"long_prefill_threshold": 8, "reserve_full_prompt": False}
    scheduler = chunked(16, num_blocks=9, **options)
    num_preemptions = under_a_stream(scheduler, a_request("old", num_prompt, 4, priority=1), 60)
    that(f"preempted {num_preemptions} times: whether that is at most 5 times", num_preemptions <= 5).gives(True)


@pytest.mark.parametrize("reserve", [True, False], ids=["the whole prompt", "the first chunk"])
@pytest.mark.parametrize("num_blocks", [8, 9, 10])
@pytest.mark.parametrize("threshold", [0, 1, 4, 8])
def test_prompts_of_any_length_under_a_stream(chunked, a_request, num_blocks, threshold, reserve):
    """Last chunks of any size, in small pools: it finishes, though urgent requests keep arriving."""
    options = {"num_blocks": num_blocks, "long_prefill_threshold": threshold, "reserve_full_prompt": reserve}
    for num_prompt in range(1, 4 * num_blocks - 3, 2 if threshold else 1):
        scheduler = chunked(16, **options)
        under_a_stream(scheduler, a_request("old", num_prompt, 4, priority=1), 5 * STARVATION_BOUND)


class Protection(Observer):
    """The rule from outside: which request is protected, and that no other is admitted before it gains a token.

    Except the one that arrived first, once the bound is reached. `bypasses` has how many were admitted in a row ahead
    of the one that arrived first of all that waited, up to now, and at most.
    """

    def __init__(self):
        self.there, self.batch, self.protected, self.num_protected = [], [], None, 0
        self.had = {}  # id of the object → its tokens of output when it was last admitted
        self.bypasses = [0, 0]

    def note(self, scheduler, *_):
        """The state after a call is the state before the next one."""
        self.batch = list(scheduler.running)
        self.there = [*self.batch, *scheduler.waiting.values()]

    on_add = on_fork = on_update = on_finish = on_recover = note

    def on_schedule(self, scheduler, output):
        __tracebackhide__ = True
        it = self.protected
        if it and (it.status.is_finished or (it in self.batch and self.gained(it))):
            self.protected = None
        waiting = [each for each in self.there if each not in self.batch]
        for place in reversed(range(len(self.batch))):  # victims are taken from the end
            victim = self.batch[place]
            if victim.request_id in output.preempted:
                waiting.append(victim)
                bypassed = any(arrival_key(each) > arrival_key(victim) for each in self.batch[:place])
                if not self.gained(victim) and bypassed and min(waiting, key=arrival_key) is victim:
                    self.protected, self.num_protected = victim, self.num_protected + 1
        that("the protected request", scheduler.protected).gives(self.protected)
        for request in [each for each in output.scheduled if each not in self.batch]:
            if self.protected and request is not self.protected:
                bound = f"{self.bypasses[0]} of {STARVATION_BOUND} were admitted ahead of the first arrival"
                allowed = self.bypasses[0] >= STARVATION_BOUND
                story = f"whether {request!r} may be admitted while {self.protected!r} is protected: {bound}"
                that(story, allowed).gives(True)
            waiting.remove(request)
            self.had[id(request)] = len(request.output_token_ids)
            oldest = all(arrival_key(request) < arrival_key(each) for each in waiting)
            self.bypasses[0] = 0 if oldest else self.bypasses[0] + 1
            self.bypasses[1] = max(self.bypasses)
        that("whether 65 in a row were admitted", self.bypasses[1] > STARVATION_BOUND).gives(False)
        self.note(scheduler)

    def gained(self, request):
        return len(request.output_token_ids) > self.had.get(id(request), 0)


def test_the_protected_request_does_not_bypass_for_ever(chunked, serve, a_request):
    """The protected request is admitted again and again, while an earlier arrival waits: 64 times at most."""
    options, rule = {"num_blocks": 40, "block_size": 16, "reserve_full_prompt": False}, Protection()
    watched = observe(chunked(64, **options), rule)
    serve(watched, a_request("first", 20, 700, priority=1), steps=1)
    serve(watched, a_request("protected", 620, 2, priority=2), steps=1)
    serve(watched, a_request("urgent", 1, 600))
    that("the most admissions ahead of an earlier arrival", rule.bypasses[1]).gives(STARVATION_BOUND)


@pytest.mark.parametrize("seed", range(12))
def test_random_runs(chunked, random_run, random_options, seed):
    """Small pools, preemption, priorities, classes, forks, aborts: the auditor finds no error, and the rule holds."""
    rng = random.Random(fresh(seed))
    random_run(chunked(rng.choice([2, 4, 9, 30]), **random_options(rng)), rng, Protection())


@pytest.mark.parametrize("swap", [False, True], ids=["recompute", "swap"])
@pytest.mark.parametrize("seed", range(4))
def test_a_prompt_of_any_length_finishes_under_late_and_urgent_requests(chunked, serve, swap, seed):
    """Each request is more urgent than the earlier ones, and memory is short: all are served, by the rule."""
    rng, rule = random.Random(fresh(seed)), Protection()
    options = {"preemption": "swap", "num_host_blocks": 8} if swap else {}
    options |= {"num_blocks": rng.randint(10, 16), "long_prefill_threshold": 4, "reserve_full_prompt": False}
    scheduler = observe(chunked(10, **options), rule, SharingAuditor())
    for number in range(30):
        prompt = rng.choice([2, 6, 30])
        scheduler.add_request(Request(number, [1] * prompt, rng.randint(1, 9), priority=-number))
        serve(scheduler, steps=rng.randint(0, 6))
    serve(scheduler)
    if in_use() is None:  # other draws may protect none
        that("whether any request was ever protected", rule.num_protected > 0).gives(True)


@pytest.mark.parametrize("num_slots", [1, 3])
def test_of_any_65_admissions_one_is_of_the_oldest(chunked, serve, num_slots):
    """Phase 7's bound: more urgent requests at every step, and never more than 64 bypass the first arrival."""
    rng, rule = random.Random(fresh(num_slots)), Protection()
    scheduler = observe(chunked(10, num_blocks=12, max_num_seqs=num_slots, long_prefill_threshold=4), rule)
    for number in range(220):
        prompt = rng.choice([1, 2, 12])
        scheduler.add_request(Request(number, [1] * prompt, rng.randint(1, 3), priority=-number))
        serve(scheduler, steps=number % num_slots == 0)
    serve(scheduler)
    that("the most admissions ahead of an earlier arrival", rule.bypasses[1]).gives(STARVATION_BOUND)
