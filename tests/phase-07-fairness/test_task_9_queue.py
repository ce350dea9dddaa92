"""Phase 7, task 9: the waiting queue: its first, the first of a class, its oldest, at any length, and any may leave."""

from __future__ import annotations

import random
import sys
import tracemalloc

import pytest

from minicache.request import Request
from minicache.scheduler.paged import PagedScheduler
from minicache.scheduler.queue import LazyHeap, RequestQueue
from minicache_course.checks import call, that
from minicache_course.seeds import fresh

SMALL, LARGE = 30, 480
"""Two lengths of a queue. A cost that doubles with the length is 16 times as high at the second."""


def by_priority(request):
    return request.priority, request.arrival_index


def numbered(number, priority=0, **more):
    """A request as a scheduler numbers it."""
    request = Request(number, [1], 1, priority=priority, **more)
    request.arrival_index = number
    return request


def ids(requests):
    return [None if each is None else each.request_id for each in requests]


# --- RequestQueue ---------------------------------------------------------------------------------------------------


def test_a_queue_knows_first_first_of_a_group_and_oldest():
    """Four requests of two classes: the first of all, the first of each class, the oldest, and iteration in order."""
    queue = RequestQueue(by_priority)
    that("first() and oldest() of an empty queue", [queue.first(), queue.first("text"), queue.oldest()]).gives(
        [None, None, None]
    )
    requests = [numbered(0, 2, group="text"), numbered(1, 1, group="image"), numbered(2, 3, group="image")]
    for request in (*requests, numbered(3, 0, group="text", arrival_time=-5.0)):
        queue.add(request)
    that("first()", ids([queue.first()])).gives([3])
    that("first of text, image, audio", ids(map(queue.first, ("text", "image", "audio")))).gives([3, 1, None])
    that("oldest(), by arrival_time", ids([queue.oldest()])).gives([3])
    that("iteration", list(queue)).gives([3, 1, 0, 2])
    queue.remove(queue[3])
    that("first() of all and of text, once 3 has left", ids([queue.first(), queue.first("text")])).gives([1, 0])
    that("oldest() once 3 has left", ids([queue.oldest()])).gives([0])
    that("the ids that wait", sorted(queue)).gives([0, 1, 2])
    that("whether 3 waits, and 2", [3 in queue, 2 in queue]).gives([False, True])


def test_an_id_may_come_again():
    """A request leaves, and another of the same id joins: the queue has the second, with its own key and group."""
    queue = RequestQueue(by_priority)
    old, new, other = numbered(0, 1, group="a"), numbered(9, 5, group="b"), numbered(1, 3, group="b")
    new.request_id = 0
    for request in (old, other):
        queue.add(request)
    queue.remove(old)
    queue.add(new)
    that("whether the queue has the second", queue[0] is new).gives(True)
    that("first() and first of a, b", ids([queue.first(), queue.first("a"), queue.first("b")])).gives([1, None, 1])
    queue.remove(other)
    that("whether the second is first of all and of b", [queue.first() is new, queue.first("b") is new]).gives(
        [True, True]
    )


def test_what_is_not_in_a_queue_cannot_leave():
    """remove raises KeyError for a request that never joined, and for one that has left."""
    queue, request = RequestQueue(by_priority), numbered(0)
    call(queue.remove, request).raises(KeyError)
    queue.add(request)
    queue.remove(request)
    call(queue.remove, request).raises(KeyError)
    that("len", len(queue)).gives(0)


@pytest.mark.parametrize("group", ["a", "b"], ids=["the same group", "another group"])
@pytest.mark.parametrize("number", [9, 0], ids=["another key", "the same key"])
def test_another_request_of_the_same_id_cannot_leave(number, group):
    """Another request has the id of one that waits: remove raises KeyError, and the one that waits is still there."""
    queue, waits, another = RequestQueue(by_priority), numbered(0, group="a"), numbered(number, group=group)
    another.request_id = 0
    queue.add(waits)
    call(queue.remove, another).raises(KeyError)
    that("whether the id waits, after that", 0 in queue).gives(True)
    that(
        "ids of first(), first('a') and oldest(), after that", ids([queue.first(), queue.first("a"), queue.oldest()])
    ).gives([0, 0, 0])
    call(queue.remove, waits).gives(None)
    that("len, once the one that waited has left", len(queue)).gives(0)


@pytest.mark.parametrize("seed", range(5))
def test_random_moves(seed):
    """200 requests make 1,000 moves: join, leave from anywhere, come back. The queue answers as a sorted list does."""
    rng, queue, inside = random.Random(fresh(seed)), RequestQueue(by_priority), []
    outside = [
        numbered(number, rng.randint(0, 5), group=rng.choice("abc"), arrival_time=float(rng.randint(0, 9)))
        for number in range(200)
    ]
    for move in range(1000):
        joins = outside and (not inside or rng.random() < 0.5)
        source, target = (outside, inside) if joins else (inside, outside)
        request = source.pop(rng.randrange(len(source)))
        target.append(request)
        (queue.add if joins else queue.remove)(request)
        best = sorted(inside, key=by_priority)
        oldest = sorted(inside, key=lambda each: (each.arrival_time, each.arrival_index))
        of = [next((each for each in best if each.group == group), None) for group in "abc"]
        expected = ids([*(best[:1] or [None]), *of, *(oldest[:1] or [None])])
        got = ids([queue.first(), *map(queue.first, "abc"), queue.oldest()])
        that(f"first(), first of a, b, c, and oldest() after move {move}", got).gives(expected)
        that(f"len after move {move}", len(queue)).gives(len(inside))
    that("iteration", list(queue)).gives(ids(sorted(inside, key=by_priority)))


# --- what it costs --------------------------------------------------------------------------------------------------


class Number(float):
    """A number that is compared in Python: `operations` then sees the comparisons that C code makes."""

    def __lt__(self, other):
        return float(self) < float(other)

    def __gt__(self, other):
        return float(self) > float(other)

    def __eq__(self, other):
        return float(self) == float(other)

    __hash__ = float.__hash__


class Waiting(Request):
    """A request that is compared in Python, too, as when a list is searched for it."""

    def __eq__(self, other):
        return self is other

    __hash__ = Request.__hash__


class TooMany(BaseException):
    """More operations than a call may take."""


def operations(fn, limit=float("inf")):
    """Python instructions that a call takes: a count, which is the same on every machine. It ends beyond the limit."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        if count > limit:
            raise TooMany
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        fn()
    except TooMany:
        pass
    finally:
        sys.settrace(before)
    return count


def a_queue_of(length):
    """A queue of so many requests of three classes, with any priorities and arrival times, and the requests."""
    rng, queue, requests = random.Random(fresh(length)), RequestQueue(by_priority), []
    for number in range(length):
        request = Waiting(number, [1], 1, group="abc"[number % 3], arrival_time=Number(rng.random()))
        request.priority, request.arrival_index = Number(rng.random()), number
        queue.add(request)
        requests.append(request)
    rng.shuffle(requests)
    return queue, requests


def costs_no_more(description, prepare, calls=lambda length: 1):
    """Fail unless what `prepare(length)` returns takes at most three times as many operations a call at LARGE."""
    __tracebackhide__ = True
    small = operations(prepare(SMALL)) / calls(SMALL)
    limit = 3 * small * calls(LARGE)
    within = operations(prepare(LARGE), limit) <= limit
    if not within and any(isinstance(each, LazyHeap) for each in vars(RequestQueue(by_priority)).values()):
        LazyHeap(by_priority).first()  # not written: the starter's queue is right, and its cost is not graded yet
    told = (
        f"{description}: {small:.0f} operations with {SMALL} waiting. With {LARGE:,}: whether at most 3 times as many"
    )
    that(told, within).gives(True)


@pytest.mark.parametrize("question", ["first", "first of a group", "oldest"])
def test_a_question_costs_the_same_at_any_length(question):
    """With 480 requests in the queue, a query takes no more than three times what it takes with 30."""

    def ask(length):
        queue, _ = a_queue_of(length)
        return {"first": queue.first, "first of a group": lambda: queue.first("b"), "oldest": queue.oldest}[question]

    costs_no_more(f"asking for the {question}", ask)


def test_joining_and_leaving_cost_the_same_at_any_length():
    """30 leave from anywhere and come back: with 480 in the queue no more than three times what it is with 30."""

    def churn(length):
        queue, requests = a_queue_of(length)

        def leave_and_come_back():
            for request in requests[:SMALL]:
                queue.remove(request)
                queue.first()
                queue.add(request)

        return leave_and_come_back

    costs_no_more(f"{SMALL} requests that leave and come back", churn)


def test_emptying_a_queue_costs_the_same_a_request():
    """All leave in any order, and first() is called each time: a request costs no more than three times as much."""

    def empty(length):
        queue, requests = a_queue_of(length)

        def all_leave():
            for request in requests:
                queue.remove(request)
                queue.first()
                queue.oldest()

        return all_leave

    costs_no_more("each request, where all leave", empty, calls=lambda length: length)


def grown_by(come_and_go):
    """Bytes that are kept after 10,000 requests more have come and gone, over those after the first 1,000."""
    come_and_go(1000)
    tracemalloc.start()
    try:
        come_and_go(1000)
        before = tracemalloc.get_traced_memory()[0]
        come_and_go(10_000)
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


def test_those_that_have_left_take_no_memory():
    """10,000 requests come and go while one waits at the head: less than 50 KB more are kept than before."""
    queue = RequestQueue(by_priority)
    queue.add(numbered(0, priority=-1))

    def come_and_go(count):
        for number in range(1, count + 1):
            request = numbered(number)
            queue.add(request)
            queue.remove(request)

    grown = grown_by(come_and_go)
    that(f"{grown:,} bytes more: whether that is less than 50,000", grown < 50_000).gives(True)


def test_groups_that_have_left_take_no_memory():
    """10,000 requests come and go, each in its own class: less than 50 KB more are kept than before."""
    queue = RequestQueue(by_priority)

    def come_and_go(count):
        for number in range(1, count + 1):
            request = numbered(number, group=f"group {number}")
            queue.add(request)
            queue.remove(request)

    grown = grown_by(come_and_go)
    that(f"{grown:,} bytes more: whether that is less than 50,000", grown < 50_000).gives(True)


# --- with a scheduler -----------------------------------------------------------------------------------------------


def test_random_load(room):
    """Phase 6's scheduler on this queue: any requests, any pool: every request is served, and the auditor agrees."""
    room.survives(PagedScheduler, auditor=True)
