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


def judged(prop, scheduler, num_requests=2):
    """What the property says of a scheduler, by the shortest way there, as a story; None if it holds."""
    for case in cases(scheduler, num_requests):
        found = explore(case, (_called(prop),), ()).violation
        if found is not None and found.rule == prop.__name__:
            return "\n".join(story(case, found))
    return None


def _called(prop):
    """The property, with what it raises reported as a call's."""

    def checked(moment):
        said = call(prop, moment).value
        that(f"what {prop.__name__} returns is None or a text", said is None or isinstance(said, str)).gives(True)
        return said

    checked.__name__ = prop.__name__
    return checked


PROPERTIES = (nothing_is_lost, work_is_done, victims_are_last)


@pytest.mark.parametrize("scheduler", [Right, RightOrder])
@pytest.mark.parametrize("prop", PROPERTIES, ids=lambda prop: prop.__name__)
def test_holds_of_a_right_scheduler(prop, scheduler):
    """The property holds whatever happens to a scheduler that is right."""
    that(f"{prop.__name__} on a right scheduler", judged(prop, scheduler)).gives(None)


@pytest.mark.parametrize(
    ("prop", "scheduler"),
    [
        (nothing_is_lost, ForgetsVictims),
        (nothing_is_lost, ForgetsOnAbort),
        (nothing_is_lost, StartsAgain),
        (nothing_is_lost, StartsAgainAfterFailure),
        (nothing_is_lost, NeverForgets),
        (work_is_done, WaitsForCompany),
        (work_is_done, IdlesAfterFailure),
        (victims_are_last, TakesTheOldest),
        (victims_are_last, TakesTheMostUrgent),
    ],
    ids=lambda each: each.__name__,
)
def test_a_wrong_scheduler_breaks_it(prop, scheduler):
    """A scheduler that breaks the property is found, and a message says what is wrong."""
    said = judged(prop, scheduler)
    that(f"{prop.__name__} finds a moment on {scheduler.__name__}", said is not None).gives(True)
