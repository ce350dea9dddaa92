"""Phase 7, task 11: no request is bypassed forever."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minicache.request import Request
from minicache.scheduler.audit import Auditor
from minicache.scheduler.fair import STARVATION_BOUND, FairScheduler, PriorityScheduler
from minicache.scheduler.observe import Observer, observe
from minicache.scheduler.output import SchedulerOutput
from minicache_course.checks import call, that
from minicache_course.follow import following_schedulers
from minicache_course.seeds import fresh


@pytest.fixture(autouse=True)
def _scenario():
    """A failure shows the schedulers, the requests and the steps so far."""
    with following_schedulers():
        yield


class Admissions(Observer):
    """Of every admission, in order: whether it was of the request that arrived first of all that waited."""

    def __init__(self):
        self.waiting = {}  # id → request, as of the last call
        self.running = set()
        self.were_oldest = []
        self.order = []

    def on_add(self, scheduler, request):
        self.waiting[request.request_id] = request

    def on_finish(self, scheduler, request):
        self.waiting.pop(request.request_id, None)

    def on_schedule(self, scheduler, output):
        for request in output.scheduled:
            if request.request_id in self.waiting:
                del self.waiting[request.request_id]
                earlier = [each for each in self.waiting.values() if arrival(each) < arrival(request)]
                self.were_oldest.append(not earlier)
                self.order.append(request.request_id)
        self.waiting = dict(scheduler.waiting)

    @property
    def longest(self):
        """The most admissions in a row ahead of one that had arrived earlier."""
        longest = current = 0
        for oldest in self.were_oldest:
            current = 0 if oldest else current + 1
            longest = max(longest, current)
        return longest


def arrival(request):
    return request.arrival_time, request.arrival_index


def step(scheduler):
    """One step, whose tokens are all 0. Its output."""
    output = scheduler.schedule()
    scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 0))
    return output


def steps_until_served(scheduler, request, next_rival, limit):
    """Steps until `request` has a token, while another rival comes at every step; None after `limit`."""
    for number in range(limit):
        scheduler.add_request(next_rival(number))
        output = step(scheduler)
        that(f"groups in step {number}", len({each.group for each in output.scheduled})).gives(1)
        if request.output_token_ids:
            return number
    return None


def test_under_endless_urgent_requests_a_lowly_one_is_served(request_of):
    """One slot, and an urgent request of one token at every step: after 64 of them the low-priority one is admitted."""
    scheduler = FairScheduler(num_blocks=64, max_num_seqs=1)
    lowly = request_of("lowly", 10, 1, priority=9)
    scheduler.add_request(lowly)
    took = steps_until_served(scheduler, lowly, lambda number: request_of(number, 10, 1), 300)
    that("urgent requests that went before it", took).gives(STARVATION_BOUND)


def test_under_endless_texts_an_image_is_served(request_of):
    """Texts of 5 tokens come at every step and keep the batch busy: after 64 of them it drains, and the image runs."""
    scheduler = FairScheduler(num_blocks=64, max_num_seqs=4)
    scheduler.add_request(request_of("text"))
    step(scheduler)
    image = request_of("image", 10, 1, group="image")
    scheduler.add_request(image)
    took = steps_until_served(scheduler, image, lambda number: request_of(number, 10, 5), 1000)
    # 64 texts of 5 steps in 4 batch slots, and what is in the batch when the bound is reached has to finish.
    that("whether the image was served within 100 steps", took is not None and took <= 100).gives(True)


def test_under_endless_small_ones_a_large_one_is_served(request_of):
    """A large request waits for blocks that small urgent ones would always take: the batch drains for it."""
    scheduler = FairScheduler(num_blocks=8, block_size=4)
    large = request_of("large", 30, 1, priority=1)
    scheduler.add_request(request_of("small", 3, 8))
    step(scheduler)
    scheduler.add_request(large)
    took = steps_until_served(scheduler, large, lambda number: request_of(number, 3, 8), 1000)
    that("whether the large one was served within 200 steps", took is not None and took <= 200).gives(True)


def test_the_oldest_is_by_arrival_time(request_of):
    """The oldest is the oldest by arrival_time: a request that was added late may be older than one added before it."""
    scheduler = FairScheduler(num_blocks=64, max_num_seqs=1)
    young, old = request_of("young", 10, 1, priority=9, arrival_time=5.0), request_of("old", 10, 1, priority=9)
    scheduler.add_request(young)
    scheduler.add_request(old)
    took = steps_until_served(scheduler, old, lambda number: request_of(number, 10, 1, arrival_time=10.0 + number), 300)
    that("urgent requests that went before the old one", took).gives(STARVATION_BOUND)
    that("tokens of the young one", young.output_token_ids).gives([])


def test_what_was_found_is_passed_on(request_of):
    """The blocks that `admit` is given go on to the stage below: phase 8 finds them there."""
    given = []

    class Below(PriorityScheduler):
        def admit(self, request, output, found=()):
            given.append((request.request_id, list(found)))
            super().admit(request, output, found)

    class Both(FairScheduler, Below):
        pass

    scheduler = Both(num_blocks=64)
    request = request_of("a")
    scheduler.add_request(request)
    scheduler.token_budget = scheduler.max_num_batched_tokens
    call(scheduler.admit, request, SchedulerOutput(), [3, 5]).gives(None)
    that("admit of the stage below: (id, found)", given).gives([("a", [3, 5])])


@pytest.mark.parametrize("num_waiting", [10, 400])
def test_the_queue_is_asked_for_its_oldest(request_of, counting_queue, num_waiting):
    """10 or 400 requests wait, and an urgent one is admitted: the oldest is found without going through them."""
    scheduler = FairScheduler(num_blocks=64, max_num_seqs=1)
    queue = counting_queue(scheduler)
    for number in range(num_waiting):
        scheduler.add_request(request_of(number, priority=int(number > 0)))
    scheduler.add_request(request_of("urgent", priority=-1))
    output = scheduler.schedule()
    that("num_scheduled_tokens", output.num_scheduled_tokens).gives({"urgent": 10})
    that("num_bypasses", scheduler.num_bypasses).gives(1)
    that(f"of {num_waiting + 1} requests, those met by going through `waiting`", queue.num_seen).gives(0)


def test_one_added_late_is_bypassed_too(request_of):
    """80 urgent requests are added, then a low-priority one that arrived before them: 64 bypass it, and it is next."""
    scheduler = FairScheduler(num_blocks=64, max_num_seqs=1)
    for number in range(80):
        scheduler.add_request(request_of(number, 10, 1, arrival_time=10.0 + number))
    scheduler.add_request(request_of("old", 10, 1, priority=9))
    order = [request_id for _ in range(81) for request_id in step(scheduler).num_scheduled_tokens]
    that("admissions before the old one", order.index("old")).gives(STARVATION_BOUND)


def test_the_count_begins_anew(request_of):
    """Three low-priority requests under endless urgent ones: each is served after 64 others, one after the other."""
    scheduler = FairScheduler(num_blocks=64, max_num_seqs=1)
    for number in range(3):
        scheduler.add_request(request_of(f"lowly {number}", 10, 1, priority=9))
    order = []
    for number in range(3 * STARVATION_BOUND + 10):
        scheduler.add_request(request_of(number, 10, 1))
        order += step(scheduler).num_scheduled_tokens
    turns = [order.index(f"lowly {number}") for number in range(3)]
    that("admissions before each of the lowly ones", turns).gives([64, 129, 194])


def test_priority_and_groups_decide_below_the_bound(room, request_of):
    """Fewer than 64 requests in all: priorities, then arrival, in batches of one class, as in task 10."""
    requests = [
        request_of(0, 10, 2, group="a", priority=1),
        request_of(1, 10, 2, group="b", priority=2),
        request_of(2, 10, 2, group="c", priority=0),
        request_of(3, 10, 2, group="a", priority=3),
        request_of(4, 10, 2, group="b", priority=0),
    ]
    tally = room.run(FairScheduler(num_blocks=64), requests, auditor=True)
    that("the batches, one after the other", [sorted(ids) for ids in tally.order[::2]]).gives([[2], [1, 4], [0, 3]])


def test_an_aborted_one_is_not_waited_for(request_of):
    """The bound is reached, and the low-priority request aborted: the urgent ones go on, and no step is idle."""
    scheduler = FairScheduler(num_blocks=64, max_num_seqs=1)
    scheduler.add_request(request_of("lowly", 10, 1, priority=9))
    for number in range(STARVATION_BOUND):
        scheduler.add_request(request_of(number, 10, 1))
        step(scheduler)
    scheduler.abort_request("lowly")
    scheduler.add_request(request_of("next", 10, 1))
    that("the step after that", step(scheduler).num_scheduled_tokens).gives({"next": 10})


def test_an_abort_does_not_set_the_count_back(request_of):
    """Two of low priority wait. After 40 bypasses of both, the older is aborted. The other waits for 24 more."""
    scheduler = FairScheduler(num_blocks=64, max_num_seqs=1)
    for name in ("older", "other"):
        scheduler.add_request(request_of(name, 10, 1, priority=9))
    order = []
    for number in range(STARVATION_BOUND + 10):
        if number == 40:
            scheduler.abort_request("older")
        scheduler.add_request(request_of(number, 10, 1))
        order += step(scheduler).num_scheduled_tokens
    before = order.index("other") if "other" in order else None
    that(f"admissions before the other lowly one, of {len(order)}", before).gives(STARVATION_BOUND)


def test_only_bypasses_in_a_row_count(request_of):
    """40 bypasses, then the low-priority one is served, as no other waits: the next is bypassed 64 times, not 24."""
    scheduler = FairScheduler(num_blocks=64, max_num_seqs=1)
    scheduler.add_request(request_of("first", 10, 1, priority=9))
    for number in range(40):
        scheduler.add_request(request_of(number, 10, 1))
        step(scheduler)
    that("scheduled when no urgent one is there", list(step(scheduler).num_scheduled_tokens)).gives(["first"])
    second = request_of("second", 10, 1, priority=9)
    scheduler.add_request(second)
    took = steps_until_served(scheduler, second, lambda number: request_of(100 + number, 10, 1), 300)
    that("urgent requests that went before the second", took).gives(STARVATION_BOUND)


def test_the_bound_holds_in_one_step(request_of):
    """81 requests fit at once: the bound holds in one step too. The one of low priority is the 65th, not the last."""
    scheduler = FairScheduler(num_blocks=200)
    admissions = Admissions()
    watched = observe(scheduler, admissions)
    watched.add_request(request_of("lowly", 10, 1, priority=9))
    for number in range(80):
        watched.add_request(request_of(number, 10, 1))
    that("requests in step 0", len(step(watched).scheduled)).gives(81)
    that("the most admissions ahead of an earlier one", admissions.longest).gives(STARVATION_BOUND)
    that("admissions before the lowly one", admissions.order.index("lowly")).gives(STARVATION_BOUND)


@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    num_blocks=st.integers(4, 12),
    max_num_seqs=st.integers(1, 5),
    swap=st.booleans(),
    groups=st.integers(1, 3),
)
def test_of_any_65_admissions_one_is_of_the_oldest(seed, num_blocks, max_num_seqs, swap, groups):
    """Any load that favours late arrivals: of any 65 admissions in a row, at least one is of the oldest request."""
    rng = random.Random(fresh(seed))
    options = {"preemption": "swap", "num_host_blocks": 6} if swap else {}
    scheduler = FairScheduler(num_blocks=num_blocks, block_size=4, max_num_seqs=max_num_seqs, **options)
    admissions = Admissions()
    watched = observe(scheduler, admissions, Auditor())
    number = 0
    while watched.has_unfinished or number < 110:
        for _ in range(rng.randint(0, 3) if number < 110 else 0):
            prompt = rng.randint(1, min(12, 4 * num_blocks - 6))
            late = {"priority": -number if rng.random() < 0.8 else 5, "group": "abc"[rng.randrange(groups)]}
            watched.add_request(Request(number, [1] * prompt, rng.randint(1, 5), **late))
            number += 1
        if watched.has_unfinished:
            step(watched)
    longest = admissions.longest
    told = f"the most admissions ahead of an earlier one are {longest}: whether that is at most 64"
    that(told, longest <= STARVATION_BOUND).gives(True)


def test_random_load(room):
    """Any requests of three classes, any pool, both preemptions: every one is served, and phase 6's auditor agrees."""
    room.survives(FairScheduler, auditor=True, groups=("text", "image", "audio"))
