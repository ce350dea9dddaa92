"""The verifier: it reaches what can happen, finds what is wrong by the shortest way, and says so."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import pytest

from minicache.request import Request, RequestId, RequestStatus
from minicache.scheduler import ChunkedPrefillScheduler, FairScheduler, PagedScheduler, SchedulerOutput
from minicache.scheduler.base import Scheduler
from minicache.scheduler.queue import PriorityKey, RequestQueue, arrival_key
from minicache.verifier.cases import cases
from minicache.verifier.explore import Case, Report, explore
from minicache.verifier.rules import STAGE_PROPERTIES
from minicache.verifier.story import story
from minicache.verifier.together import explore_all
from minicache.verifier.world import Shape


def reports(scheduler: str | type[Scheduler], num_requests: int = 2, num_blocks: int = 3) -> list[Report]:
    return [explore(case, STAGE_PROPERTIES) for case in cases(scheduler, num_requests, num_blocks)]


def shortest(scheduler: type[Scheduler], num_requests: int = 2, num_blocks: int = 3) -> list[str]:
    """The kinds of the actions of the shortest counterexample, and the rule."""
    found = [each.violation for each in reports(scheduler, num_requests, num_blocks) if each.violation]
    best = min(found, key=lambda violation: len(violation.actions))
    return [*(action.kind for action in best.actions), best.rule]


@pytest.mark.parametrize("stage", ["static", "continuous", "paged", "fair"])  # chunked: `make check`
def test_nothing_is_wrong_with_the_reference(stage: str) -> None:
    for report in reports(stage):
        assert report.violation is None, report
        assert report.is_complete
        assert report.num_actions > report.num_states > 30


class LosesAVictim(PagedScheduler):
    def preempt(self, request: Request, output: SchedulerOutput) -> None:
        super().preempt(request, output)
        self.waiting.remove(request)


class SwapsTheWrongWay(PagedScheduler):
    def swap_out(self, request: Request, num_blocks: int, output: SchedulerOutput) -> None:
        super().swap_out(request, num_blocks, output)
        output.swapped_out[request.request_id].reverse()


class KeepsHashes(ChunkedPrefillScheduler):
    def recover(self) -> None:
        cache: Any = self._cache
        if cache is not None:
            cache.reset = lambda: None
        super().recover()
        if cache is not None:
            del cache.reset


class NeverTheFirst(FairScheduler):
    def head(self) -> Request | None:
        return max(self.waiting.values(), key=lambda each: each.arrival_index, default=None)


class Raises(PagedScheduler):
    def abort_request(self, request_id: Any) -> bool:
        if self.outstanding is not None and self._requests[request_id].status is RequestStatus.WAITING:
            raise KeyError(request_id)
        return super().abort_request(request_id)


class PlainQueue(RequestQueue):
    """A queue of another structure than the reference's, as learners write one."""

    def __init__(self, key: Callable[[Request], PriorityKey]) -> None:
        self._order = key
        self._all: dict[RequestId, Request] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._all

    def __getitem__(self, request_id: RequestId) -> Request:
        return self._all[request_id]

    def __iter__(self) -> Iterator[RequestId]:
        return (each.request_id for each in sorted(self._all.values(), key=self._order))

    def add(self, request: Request) -> None:
        self._all[request.request_id] = request

    def remove(self, request: Request) -> None:
        del self._all[request.request_id]

    def first(self, group: str | None = None) -> Request | None:
        return min((r for r in self._all.values() if group in (None, r.group)), key=self._order, default=None)

    def oldest(self) -> Request | None:
        return min(self._all.values(), key=arrival_key, default=None)


class HasAPlainQueue(FairScheduler):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.waiting = PlainQueue(self.priority_key)


def test_a_queue_may_have_another_structure() -> None:
    plain, reference = reports(HasAPlainQueue), reports(FairScheduler)
    assert all(report.violation is None for report in plain)
    assert [report.num_states for report in plain] == [report.num_states for report in reference]


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        (LosesAVictim, ["arrive", "arrive", "schedule", "commit", "schedule", "nothing_is_lost"]),
        (SwapsTheWrongWay, ["arrive", "arrive", "schedule", "commit", "schedule", "step_is_right"]),
        (KeepsHashes, ["arrive", "schedule", "retry", "tokens_are_where_they_should_be"]),
        (Raises, ["arrive", "schedule", "arrive", "abort", "error"]),
    ],
)
def test_the_shortest_way_to_a_mistake(scheduler: type[Scheduler], expected: Sequence[str]) -> None:
    assert shortest(scheduler) == expected


def test_a_request_that_is_bypassed_too_often() -> None:
    assert shortest(NeverTheFirst, 3)[-1] == "admits_in_order"
    assert explore(cases(NeverTheFirst, 3, 3)[0]).violation.rule == "first_is_not_forgotten"  # type: ignore[union-attr]


class CountsThePriority(FairScheduler):
    """Counts only what went ahead by its priority."""

    def admit(self, request: Request, output: SchedulerOutput, found: Sequence[int] = ()) -> None:
        oldest, before = self.waiting.oldest(), self.num_bypasses
        super().admit(request, output, found)
        if oldest is not None and oldest.priority == request.priority and oldest is not request:
            self.num_bypasses = before


def test_a_bypass_among_equal_priorities() -> None:
    case = next(case for case in cases(CountsThePriority, 3, 3) if case.name.endswith("equal classes"))
    assert explore(case).violation.rule == "first_is_not_forgotten"  # type: ignore[union-attr]


class ForgetsTheSalt(ChunkedPrefillScheduler):
    def find_prefix(self, request: Request) -> Sequence[int]:
        salt, request.cache_salt = request.cache_salt, None
        found = super().find_prefix(request)
        request.cache_salt = salt
        return found


def test_two_salts_share_no_blocks() -> None:
    broken = [report.case for report in reports(ForgetsTheSalt) if report.violation]
    assert broken == ["ForgetsTheSalt two salts"]


def test_the_first_violation_stops_the_other_searches() -> None:
    endless = Case("long", partial(PagedScheduler, num_blocks=8, block_size=2, max_num_seqs=8), (Shape([0], 9),) * 2, 8)
    short = next(case for case in cases(LosesAVictim, 2, 3))
    with closing(explore_all([endless, short] if len(os.sched_getaffinity(0)) > 1 else [short, endless])) as ended:
        assert next(ended).violation is not None


class StartsOver(ChunkedPrefillScheduler):
    """Preempts a request whose prompt is not computed yet, as soon as another one waits."""

    def schedule_running(self, output: SchedulerOutput) -> None:
        if self.running and self.waiting and not self.running[-1].output_token_ids:
            self.preempt(self.running[-1], output)
        super().schedule_running(output)


def test_a_circle_of_steps_is_a_livelock() -> None:
    one_slot = partial(StartsOver, num_blocks=4, block_size=2, max_num_seqs=1, max_num_batched_tokens=2)
    case = Case("one slot", one_slot, (Shape([0] * 4, 2),), 2)
    violation = explore(case, (), ()).violation
    assert violation is not None
    assert violation.rule == "livelock"
    assert violation.loop is not None
    told = list(story(case, violation))
    assert "And from here on, forever:" in told
    assert told[-1] == "→ livelock: these requests are scheduled forever, and never finish"


def test_the_story_ends_with_what_is_wrong() -> None:
    case = next(case for case in cases(SwapsTheWrongWay, 2, 3) if case.name.endswith("swap"))
    violation = explore(case).violation
    assert violation is not None
    told = list(story(case, violation))
    assert len(told) == len(violation.actions) + 2
    assert told[0] == "A server with 3 blocks of 2 tokens, 2 batch slots, at most 6 tokens a step."
    assert told[1] == "1. Request 0 arrives: 2 prompt tokens, at most 3 to generate, priority 0."
    assert told[-2] == "5. Step 1 is scheduled, tokens: 1 of request 0 in blocks 0 2. Request 1 is swapped out."
    assert told[-1].startswith("→ step_is_right: swaps: swapped_out is")


def test_two_at_once_find_the_same() -> None:
    one_by_one = [explore(case) for case in cases("continuous", 2)]
    together = sorted(explore_all(cases("continuous", 2)), key=lambda report: report.case)
    assert [(each.num_states, each.num_actions) for each in together] == [
        (each.num_states, each.num_actions) for each in sorted(one_by_one, key=lambda report: report.case)
    ]
