"""The waiting queue and the fair scheduler: against a slow queue that is right, and in memory that stays small."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicache.request import Request
from minicache.scheduler.fair import STARVATION_BOUND, FairScheduler
from minicache.scheduler.queue import LazyHeap, RequestQueue
from minicache_course.incidents.scanning import ScanningQueue


def numbered(number: int, priority: int = 0, **more: Any) -> Request:
    request = Request(number, [1], 1, priority=priority, **more)
    request.arrival_index = number
    return request


def by_priority(request: Request) -> tuple[float, ...]:
    return request.priority, request.arrival_index


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(-3, 3)), max_size=200))
def test_a_heap_is_a_sorted_list(moves: list[tuple[int, int]]) -> None:
    """A request that is in it leaves, another joins; the first is always the lowest of those that are there."""
    heap = LazyHeap(by_priority)
    requests: dict[int, Request] = {}
    inside: list[Request] = []
    for number, priority in moves:
        request = requests.setdefault(number, numbered(number, priority))
        if request in inside:
            inside.remove(request)
            del heap.members[number]
        else:
            inside.append(request)
            heap.add(request)
        assert heap.first() is min(inside, key=by_priority, default=None)


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(-2, 2), st.sampled_from("ab"), st.integers(0, 3)), max_size=99)
)
def test_a_queue_answers_as_the_slow_one(moves: list[tuple[int, int, str, int]]) -> None:
    """Requests join and leave, and come back: `RequestQueue` and `ScanningQueue` say the same at every move."""
    queue, slow = RequestQueue(by_priority), ScanningQueue(by_priority)
    requests: dict[int, Request] = {}
    for number, priority, group, arrival in moves:
        if number in queue:
            queue.remove(requests[number])
            slow.remove(requests[number])
        else:
            request = numbered(number, priority, group=group, arrival_time=float(arrival))
            request = requests.setdefault(number, request)
            queue.add(request)
            slow.add(request)
        assert list(queue) == list(slow)
        assert queue.oldest() is slow.oldest()
        for asked in (None, "a", "b"):
            assert queue.first(asked) is slow.first(asked)


def test_a_request_that_is_not_there_cannot_leave() -> None:
    with pytest.raises(KeyError):
        RequestQueue(by_priority).remove(numbered(0))


def test_memory_does_not_grow_with_those_that_have_left() -> None:
    """One request waits for good at the head of the queue; behind it 30,000 come and go, each in a group of its own."""
    scheduler = FairScheduler(num_blocks=4, max_num_seqs=1)
    scheduler.add_request(Request("running", [1] * 8, 10_000))
    scheduler.update_from_output(scheduler.schedule(), {"running": 0})
    scheduler.add_request(Request("first", [1] * 8, 1, priority=-1))

    def come_and_go(count: int) -> None:
        for number in range(count):
            scheduler.add_request(Request(number, [1], 1, group=f"group {number}"))
            assert scheduler.abort_request(number)

    come_and_go(1000)
    tracemalloc.start()
    come_and_go(1000)
    before = tracemalloc.get_traced_memory()[0]
    come_and_go(28_000)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 50_000
    assert scheduler.head() is scheduler.waiting["first"]


def test_an_id_may_be_used_again_while_its_first_key_is_in_a_heap() -> None:
    """An aborted request's key may lie in the heaps for long: the next one of that id is another request."""
    scheduler = FairScheduler(num_blocks=64, max_num_seqs=1)
    for number in range(10):
        scheduler.add_request(Request(number, [1], 1, priority=number))
    scheduler.abort_request(5)
    again = Request(5, [1], 1, priority=99)
    scheduler.add_request(again)
    order = []
    while scheduler.has_unfinished:
        output = scheduler.schedule()
        order += output.scheduled
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 0))
    assert [request.request_id for request in order] == [0, 1, 2, 3, 4, 6, 7, 8, 9, 5]
    assert order[-1] is again


def test_preempted_over_and_over_beside_an_older_one() -> None:
    """A request that loses its batch slot again and again joins the queue again and again, and is served in the end."""
    rng = random.Random(3)
    scheduler = FairScheduler(num_blocks=7, block_size=2)
    requests = [Request(n, [1] * rng.randint(1, 6), 7, priority=rng.randint(0, 1)) for n in range(12)]
    for request in requests:
        scheduler.add_request(request)
    for _ in range(200):
        if scheduler.has_unfinished:
            output = scheduler.schedule()
            scheduler.check()
            scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 0))
    assert not scheduler.has_unfinished
    assert max(request.num_preemptions for request in requests) > 1


def test_the_bound_is_64() -> None:
    """It is a guarantee to callers: a request is bypassed by at most so many in a row."""
    assert STARVATION_BOUND == 64
