"""Phase 7, task 12: three properties, and what breaks them within a few actions."""

from __future__ import annotations

import pytest

from minicache.request import RequestStatus
from minicache.scheduler.paged import PagedScheduler
from minicache.verifier.cases import cases
from minicache.verifier.explore import explore
from minicache.verifier.properties import nothing_is_lost, victims_are_last, work_is_done
from minicache.verifier.story import story
from minicache_course.checks import call, that


class Right(PagedScheduler):
    """First come, first served."""


class RightOrder(PagedScheduler):
    """The shortest prompt first, and preempted last: another order, just as right."""

    first_come = False

    def priority_key(self, request):
        return request.num_prompt_tokens, request.arrival_index


class ForgetsVictims(PagedScheduler):
    def preempt(self, request, output):
        super().preempt(request, output)
        self.waiting.remove(request)


class ForgetsOnAbort(PagedScheduler):
    """Aborting a request of the batch throws out the last of the batch too."""

    def finish_request(self, request_id, status):
        done = super().finish_request(request_id, status)
        if status is RequestStatus.FINISHED_ABORTED and self.running:
            self.running.pop()
        return done


class StartsAgain(PagedScheduler):
    """A victim loses the tokens that it has generated."""

    def preempt(self, request, output):
        super().preempt(request, output)
        request.output_token_ids = []


class StartsAgainAfterFailure(PagedScheduler):
    def recover(self):
        super().recover()
        for request in self.waiting.values():
            request.output_token_ids.clear()


class ForgetsTheNext(PagedScheduler):
    """Aborting a request that waits throws out the next one too."""

    def finish_request(self, request_id, status):
        waited = request_id in self.waiting
        done = super().finish_request(request_id, status)
        if waited and status is RequestStatus.FINISHED_ABORTED and self.waiting:
            self.waiting.remove(self.waiting.first())
        return done


class NeverForgets(PagedScheduler):
    """A request that was aborted while it waited stays in the queue."""

    def finish_request(self, request_id, status):
        request = self.waiting.get(request_id)
        done = super().finish_request(request_id, status)
        if request is not None:
            self.waiting.add(request)
        return done


class WaitsForCompany(PagedScheduler):
    """Admits no request into an empty batch unless two wait."""

    def may_admit(self, output):
        return super().may_admit(output) and (bool(self.running) or len(self.waiting) > 1)


class IdlesAfterFailure(PagedScheduler):
    """A step after one that failed is empty."""

    def schedule_waiting(self, output):
        if not any(request.num_preemptions for request in self.waiting.values()):
            super().schedule_waiting(output)


class TakesTheOldest(PagedScheduler):
    """Preempts the first of the batch."""

    def schedule_running(self, output):
        while len(self.running) > 1 and sum(map(self.blocks_missing, self.running)) > self.pool.num_free:
            self.running.append(self.running.pop(0))
            self.preempt(self.running[-1], output)
        super().schedule_running(output)


class TakesTheMostUrgent(TakesTheOldest, RightOrder):
    """Has an order of its own, and preempts from its beginning."""


def judged(prop, scheduler, num_requests=2, num_blocks=3, only=""):
    """By how many actions the property is broken, and what it says then; None if it holds whatever happens."""
    found = []
    for case in cases(scheduler, num_requests, num_blocks):
        if not case.name.endswith(only):
            continue
        violation = explore(case, (_called(prop),), ()).violation
        if violation is not None and violation.rule == prop.__name__:
            found.append((len(violation.actions), "\n".join(story(case, violation))))
    return min(found, default=None)


def _called(prop):
    """The property, as `call` calls it."""

    def checked(moment):
        said = call(prop, moment).value
        that(f"what {prop.__name__} returns is None or a text", said is None or isinstance(said, str)).gives(True)
        return said

    checked.__name__ = prop.__name__
    return checked


@pytest.mark.parametrize("scheduler", [Right, RightOrder])
@pytest.mark.parametrize("prop", [nothing_is_lost, work_is_done, victims_are_last])
def test_holds_of_a_right_scheduler(prop, scheduler):
    """The property holds whatever two requests can do to a scheduler that is right."""
    that(f"where {prop.__name__} is broken", judged(prop, scheduler)).gives(None)


def test_victims_may_be_ahead_of_others_that_wait():
    """With three requests, a victim may be ahead of one that has not been admitted yet."""
    that("where victims_are_last is broken", judged(victims_are_last, Right, 3, 4, only="recompute long")).gives(None)


@pytest.mark.parametrize(
    ("prop", "scheduler", "num_actions"),
    [
        (nothing_is_lost, ForgetsVictims, 5),
        (nothing_is_lost, ForgetsOnAbort, 4),
        (nothing_is_lost, ForgetsTheNext, 3),
        (nothing_is_lost, StartsAgain, 5),
        (nothing_is_lost, StartsAgainAfterFailure, 5),
        (nothing_is_lost, NeverForgets, 2),
        (work_is_done, WaitsForCompany, 2),
        (work_is_done, IdlesAfterFailure, 3),
        (victims_are_last, TakesTheOldest, 5),
        (victims_are_last, TakesTheMostUrgent, 5),
    ],
)
def test_a_wrong_scheduler_breaks_it(prop, scheduler, num_actions):
    """A scheduler that is wrong breaks the property, and at the first action that it could."""
    broken = judged(prop, scheduler)
    that(f"actions until {scheduler.__name__} breaks {prop.__name__}", broken and broken[0]).gives(num_actions)
