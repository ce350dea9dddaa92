"""Phase 9, task 3: nobody waits for ever, though a request may be preempted in the middle of its prompt."""

from __future__ import annotations

import random

import pytest

from minicache.course.checks import call, that
from minicache.request import Request, RequestStatus
from minicache.scheduler.audit_sharing import SharingAuditor
from minicache.scheduler.fair import STARVATION_BOUND
from minicache.scheduler.observe import Observer, observe
from minicache.scheduler.output import SchedulerOutput

# Who has caught up


@pytest.mark.parametrize(
    ("num_output", "at_admission", "num_computed", "status", "caught_up"),
    [
        pytest.param(0, 0, 0, RequestStatus.RUNNING, False, id="nothing is computed"),
        pytest.param(0, 0, 18, RequestStatus.RUNNING, False, id="two tokens short of its prompt"),
        pytest.param(0, 0, 19, RequestStatus.RUNNING, False, id="one token short of its prompt"),
        pytest.param(1, 0, 20, RequestStatus.RUNNING, True, id="its first token came"),
        pytest.param(5, 0, 24, RequestStatus.RUNNING, True, id="five tokens came"),
        pytest.param(5, 5, 0, RequestStatus.RUNNING, False, id="back again, nothing is computed"),
        pytest.param(5, 5, 20, RequestStatus.RUNNING, False, id="back again, its prompt is computed"),
        pytest.param(5, 5, 24, RequestStatus.RUNNING, False, id="back again, the newest token is left"),
        pytest.param(6, 5, 25, RequestStatus.RUNNING, True, id="back again, and a token came"),
        pytest.param(5, 0, 24, RequestStatus.SWAPPED, False, id="on the host"),
        pytest.param(5, 0, 0, RequestStatus.WAITING, False, id="waits"),
        pytest.param(5, 0, 24, RequestStatus.FINISHED_ABORTED, False, id="aborted"),
    ],
)
def test_a_token_came_of_it(chunked, a_request, num_output, at_admission, num_computed, status, caught_up):
    """In the batch, with more tokens of output than when it was admitted: what came before that does not count."""
    request = a_request("a", 20)
    request.output_token_ids += [7] * num_output
    request.num_outputs_at_admission = at_admission
    request.num_computed_tokens, request.status = num_computed, status
    call(chunked(8).has_caught_up, request).gives(caught_up)


# Who becomes due


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


def preempt_last(scheduler, status=RequestStatus.WAITING):
    """Preempt the last of the batch, by hand, and look whether it has lost its place. Who is due then."""
    __tracebackhide__ = True
    victim, output = scheduler.running[-1], SchedulerOutput()
    call(scheduler.preempt, victim, output).gives(None)
    that("preempted", output.preempted).gives([victim.request_id])
    seen = victim.status, victim.num_preemptions, len(victim.block_ids), victim.request_id in scheduler.waiting
    that("status, preemptions, blocks of the victim, and whether it waits", seen).gives((status, 1, 0, True))
    scheduler.check()
    return scheduler.due and scheduler.due.request_id


def test_overtaken_in_the_middle_of_a_prompt(two):
    """12 of 30 tokens are computed, one who came later stands before it, and it loses its place: it is due."""
    scheduler = two()
    that("the batch", [each.request_id for each in scheduler.running]).gives(["other", "old"])
    that("who is due", preempt_last(scheduler)).gives("old")


def test_swapped_out_in_the_middle_of_a_prompt(two):
    """On the host nothing is lost, but no token came of its admission either: it is due."""
    scheduler = two(preemption="swap", num_host_blocks=20)
    that("who is due", preempt_last(scheduler, RequestStatus.SWAPPED)).gives("old")


def test_overtaken_in_decode(two):
    """All of its 12 tokens are computed, and there came a token of it: nobody is due."""
    that("who is due", preempt_last(two(12))).gives(None)


def test_not_overtaken(two):
    """The last of the batch came last of all: in strict order of arrival nobody is ever due."""
    scheduler = two(priority=1)
    that("the batch", [each.request_id for each in scheduler.running]).gives(["old", "other"])
    that("who is due", preempt_last(scheduler)).gives(None)


def test_one_token_short(two):
    """12 of 13 tokens are computed when it loses its place: that is nothing yet, for no token came of it."""
    that("who is due", preempt_last(two(13))).gives("old")


@pytest.mark.parametrize(("first", "late"), [(1, 0), (0, 1)], ids=["late before first", "first before late"])
def test_one_of_two_came_later(chunked, serve, a_request, first, late):
    """Two are in the batch before it, by rank. One came before it and one later, in either order: it is due."""
    scheduler = chunked(12, num_blocks=9, long_prefill_threshold=4)
    requests = [a_request("first", 4, 20, priority=first), a_request("old", 24, 2, priority=2)]
    serve(scheduler, *requests, a_request("late", 4, 20, priority=late), steps=5)
    that("who is last in the batch", scheduler.running[-1].request_id).gives("old")
    that("who is due", preempt_last(scheduler)).gives("old")


def test_alone_in_the_batch(chunked, serve, a_request):
    """Nobody else is there, for whose sake it could have lost its place: nobody is due."""
    scheduler = chunked(8, a_request("old", 30))
    serve(scheduler, steps=1)
    that("who is due", preempt_last(scheduler)).gives(None)


def test_who_waits_does_not_count(two, a_request):
    """It lost its place to somebody who came before it. Later ones wait: they have overtaken nobody."""
    scheduler = two(priority=1)
    scheduler.add_request(a_request("later", 4, priority=-5))
    that("who is due", preempt_last(scheduler)).gives(None)


def test_an_older_one_waits(two, a_request):
    """An image that arrived before it waits for the batch to drain: that one comes first, so nobody is due."""
    scheduler = two()
    scheduler.add_request(a_request("image", 4, group="image", arrival_time=-1.0))
    that("who is due", preempt_last(scheduler)).gives(None)


def test_a_younger_one_waits(two, a_request):
    """An urgent image that came after it waits: it is due all the same."""
    scheduler = two()
    scheduler.add_request(a_request("image", 4, group="image", priority=-9))
    that("who is due", preempt_last(scheduler)).gives("old")


def test_arrival_is_by_the_clock(two):
    """What counts is arrival_time, then the order in which they were added: here the other one was there before."""
    scheduler = two()
    scheduler.running[0].arrival_time = -1.0
    that("who is due", preempt_last(scheduler)).gives(None)


def test_one_after_the_other(two):
    """Somebody is due, and one who arrived before him is overtaken: now that one is. The next victim is not."""
    scheduler = two()
    scheduler.due = scheduler.running[0]
    that("who is due", preempt_last(scheduler)).gives("old")
    that("who is due after the next victim", preempt_last(scheduler)).gives("old")


# Who may be admitted


def test_nobody_is_due(chunked, a_request):
    """As in phase 7: the best-ranked of those that wait, who is compatible with the batch."""
    scheduler = chunked(8)
    call(scheduler.head).gives(None)
    requests = a_request("a", 4, priority=2), a_request("b", 4, priority=1), a_request("c", 4, priority=1)
    for request in requests:
        scheduler.add_request(request)
    call(scheduler.head).gives(requests[1])
    that("requests that wait", len(scheduler.waiting)).gives(3)


def test_the_bound_of_phase_7_holds(chunked, a_request):
    """After 64 overtakes it is the turn of who arrived first, whatever its priority."""
    scheduler = chunked(8, first := a_request("a", 4, priority=9), second := a_request("b", 4))
    call(scheduler.head).gives(second)
    scheduler.num_overtakes = STARVATION_BOUND
    call(scheduler.head).gives(first)


def test_who_is_due_is_next(two, a_request):
    """It is next, before whoever is more urgent, and stays in the line."""
    scheduler = two()
    old = scheduler.running[-1]
    preempt_last(scheduler)
    scheduler.add_request(a_request("urgent", 4, priority=-9))
    for _ in range(2):
        call(scheduler.head).gives(old)
    that("who waits", sorted(scheduler.waiting)).gives(["old", "urgent"])


def test_nobody_beside_who_is_due(two, a_request):
    """It is in the batch again, and has not caught up: nobody may join, though there is room, and it goes on."""
    scheduler = two()
    scheduler.due = scheduler.running[-1]
    scheduler.add_request(a_request("urgent", 1, priority=-9))
    call(scheduler.head).gives(None)
    output = call(scheduler.schedule).value
    that("the step", output.num_scheduled_tokens).gives({"other": 6, "old": 2})
    that("who is due", scheduler.due).gives(scheduler.running[-1])


def test_until_it_has_caught_up(two, serve, a_request):
    """The step after the one that ends its prompt, others join again."""
    scheduler = two(16)
    scheduler.due = scheduler.running[-1]
    work = serve(scheduler, a_request("urgent", 1, 1, priority=-9), steps=4)
    expected = [{"other": 6, "old": 2}, {"other": 2, "old": 2}, {"other": 1, "old": 1, "urgent": 1}]
    that("the next steps", work).gives([*expected, {"other": 1, "old": 1}])
    that("who is due", scheduler.due).gives(None)


def test_the_bound_comes_before_who_is_due(two, a_request):
    """Somebody is due, and one waits who came before it. Once 64 were admitted ahead of that one, it is next."""
    scheduler = two()
    scheduler.due = due = scheduler.running[-1]
    scheduler.add_request(first := a_request("first", 4, priority=9, arrival_time=-1.0))
    scheduler.num_overtakes = STARVATION_BOUND - 1
    call(scheduler.head).gives(None)
    scheduler.num_overtakes = STARVATION_BOUND
    call(scheduler.head).gives(first)
    scheduler.preempt(due, SchedulerOutput())
    scheduler.due = due
    call(scheduler.head).gives(first)
    scheduler.num_overtakes = STARVATION_BOUND - 1
    call(scheduler.head).gives(due)


def test_of_another_group(two, a_request):
    """Who is due is an image, and the batch is of texts: nobody is next until it has drained."""
    scheduler = two()
    image = a_request("image", 4, group="image")
    scheduler.add_request(image)
    scheduler.add_request(a_request("text", 4, priority=-9))
    scheduler.due = image
    call(scheduler.head).gives(None)
    for request_id in ("old", "other"):
        scheduler.abort_request(request_id)
    call(scheduler.head).gives(image)


def test_who_is_due_leaves(two, serve, a_request):
    """Its client gives it up: the others join in the very next step."""
    scheduler = two()
    preempt_last(scheduler)
    scheduler.abort_request("old")
    that("the next step", serve(scheduler, a_request("urgent", 1), steps=1)).gives([{"other": 6, "urgent": 1}])


# Stories


def test_a_long_prompt_under_an_endless_stream(chunked, a_request):
    """60 tokens at 16 a step, of low priority; urgent requests without end rank before it and take its blocks."""
    scheduler = chunked(16, old := a_request("old", 60, 10, priority=5), num_blocks=20, max_num_seqs=8)
    number = num_preempted = 0
    while not old.status.is_finished and number < 10 * STARVATION_BOUND:
        while scheduler.num_waiting < 4:
            scheduler.add_request(a_request(number, 8, 20))
            number += 1
        output = call(scheduler.schedule).value
        num_preempted += "old" in output.preempted
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 1))
    that(f"whether it has ended before {number} others had come", old.status.is_finished).gives(True)
    that("whether it was ever preempted", num_preempted > 0).gives(True)


def under_a_stream(scheduler, old, num_urgent):
    """Serve `old` while 8 tokens for 4 more, ranked before it, come every fourth step: how often it was preempted."""
    __tracebackhide__ = True
    scheduler.add_request(old)
    for step in range(4 * num_urgent):
        if step % 4 == 0:
            scheduler.add_request(Request(step, [2] * 8, 4))
        output = call(scheduler.schedule).value
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 7))
        if old.status.is_finished:
            return old.num_preemptions
    story = f"{old!r}, preempted {old.num_preemptions} times, has ended before {num_urgent} urgent ones had come"
    that(f"whether {story}", False).gives(True)


@pytest.mark.parametrize("num_prompt", [24, 25])
@pytest.mark.parametrize("swap", [False, True], ids=["recompute", "swap"])
def test_whose_last_chunk_is_one_token(chunked, a_request, num_prompt, swap):
    """25 tokens at 8 a step: 24 are soon computed, and for the last one a block is missing, again and again."""
    options = {"preemption": "swap", "num_host_blocks": 9} if swap else {}
    scheduler = chunked(16, num_blocks=9, long_prefill_threshold=8, **options)
    num_preemptions = under_a_stream(scheduler, a_request("old", num_prompt, 4, priority=1), 60)
    that(f"preempted {num_preemptions} times: whether that is at most 5 times", num_preemptions <= 5).gives(True)


@pytest.mark.parametrize("num_blocks", [8, 9, 10])
@pytest.mark.parametrize("threshold", [0, 1, 4, 8])
def test_prompts_of_any_length_under_a_stream(chunked, a_request, num_blocks, threshold):
    """Whatever is left for its last chunk, in small pools: it ends, though urgent ones come without end."""
    for num_prompt in range(1, 4 * num_blocks - 3, 2 if threshold else 1):
        scheduler = chunked(16, num_blocks=num_blocks, long_prefill_threshold=threshold)
        under_a_stream(scheduler, a_request("old", num_prompt, 4, priority=1), 5 * STARVATION_BOUND)


class Owed(Observer):
    """The rule once more, from outside: who is owed a chance, and that nobody else is admitted until it is taken.

    But for the one that arrived first, once the bound has come. `overtakes` has how many were admitted in a row ahead
    of the one that arrived first of all that waited, up to now, and at most.
    """

    def __init__(self):
        self.there, self.batch, self.owed, self.num_owed = [], [], None, 0
        self.had = {}  # id of the object → its tokens of output when it was last admitted
        self.overtakes = [0, 0]

    def note(self, scheduler, *_):
        """What is there after a call is what is there before the next one."""
        self.batch = list(scheduler.running)
        self.there = [*self.batch, *scheduler.waiting.values()]

    on_add = on_fork = on_update = on_finish = note

    def on_schedule(self, scheduler, output):
        __tracebackhide__ = True
        if self.owed and (self.owed.status.is_finished or (self.owed in self.batch and self.gained(self.owed))):
            self.owed = None
        waiting = [each for each in self.there if each not in self.batch]
        for place in reversed(range(len(self.batch))):  # victims are taken from the end
            victim = self.batch[place]
            if victim.request_id in output.preempted:
                waiting.append(victim)
                overtaken = any(arrival(each) > arrival(victim) for each in self.batch[:place])
                if not self.gained(victim) and overtaken and min(waiting, key=arrival) is victim:
                    self.owed, self.num_owed = victim, self.num_owed + 1
        that("who is due", scheduler.due).gives(self.owed)
        for request in [each for each in output.scheduled if each not in self.batch]:
            if self.owed and request is not self.owed:
                bound = f"{self.overtakes[0]} of {STARVATION_BOUND} were admitted ahead of who arrived first"
                allowed = self.overtakes[0] >= STARVATION_BOUND
                that(f"whether {request!r} may be admitted while {self.owed!r} is due: {bound}", allowed).gives(True)
            waiting.remove(request)
            self.had[id(request)] = len(request.output_token_ids)
            oldest = all(arrival(request) < arrival(each) for each in waiting)
            self.overtakes[0] = 0 if oldest else self.overtakes[0] + 1
            self.overtakes[1] = max(self.overtakes)
        that("whether 65 in a row were admitted", self.overtakes[1] > STARVATION_BOUND).gives(False)
        self.note(scheduler)

    def gained(self, request):
        return len(request.output_token_ids) > self.had.get(id(request), 0)


def arrival(request):
    return request.arrival_time, request.arrival_index, request.fork_index


def test_who_is_due_does_not_overtake_for_ever(chunked, serve, a_request):
    """One who is due is admitted and preempted, over and over, while one waits who came before it: 64 times at most."""
    scheduler, owed = chunked(64, num_blocks=40, block_size=16), Owed()
    watched = observe(scheduler, owed)
    serve(watched, a_request("first", 20, 700, priority=1), steps=1)
    serve(watched, a_request("due", 620, 2, priority=2), steps=1)
    serve(watched, a_request("urgent", 1, 600))
    that("the most admissions ahead of an earlier one", owed.overtakes[1]).gives(STARVATION_BOUND)


@pytest.mark.parametrize("seed", range(12))
def test_random_runs(chunked, random_run, random_options, seed):
    """Small pools, preemption, priorities, groups, forks, aborts: the auditor likes every step, and the rule holds."""
    rng = random.Random(seed)
    random_run(chunked(rng.choice([2, 4, 9, 30]), **random_options(rng)), rng, Owed())


@pytest.mark.parametrize("swap", [False, True], ids=["recompute", "swap"])
@pytest.mark.parametrize("seed", range(4))
def test_late_and_urgent(chunked, serve, swap, seed):
    """Each request is more urgent than those before it, and memory is short: all are served, by the rule."""
    rng, owed = random.Random(seed), Owed()
    options = {"preemption": "swap", "num_host_blocks": 8} if swap else {}
    options |= {"num_blocks": rng.randint(10, 16), "long_prefill_threshold": 4}
    scheduler = observe(chunked(10, **options), owed, SharingAuditor())
    for number in range(30):
        prompt = rng.choice([2, 6, 30])
        scheduler.add_request(Request(number, [1] * prompt, rng.randint(1, 9), priority=-number))
        serve(scheduler, steps=rng.randint(0, 6))
    serve(scheduler)
    that("whether anybody was ever due", owed.num_owed > 0).gives(True)


@pytest.mark.parametrize("seats", [1, 3])
def test_of_any_65_admissions_one_is_of_the_oldest(chunked, serve, seats):
    """Phase 7's bound: at every step more urgent requests, and never more than 64 go before who arrived first."""
    rng, owed = random.Random(seats), Owed()
    scheduler = observe(chunked(10, num_blocks=12, max_num_seqs=seats, long_prefill_threshold=4), owed)
    for number in range(220):
        prompt = rng.choice([1, 2, 12])
        scheduler.add_request(Request(number, [1] * prompt, rng.randint(1, 3), priority=-number))
        serve(scheduler, steps=number % seats == 0)
    serve(scheduler)
    that("the most admissions ahead of an earlier one", owed.overtakes[1]).gives(STARVATION_BOUND)
