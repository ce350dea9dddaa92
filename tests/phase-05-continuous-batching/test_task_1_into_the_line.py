"""Phase 5, task 1: take requests on, refuse what can never be served, and keep the line."""

from __future__ import annotations

import pytest

from minicache.course.checks import call, that
from minicache.errors import RequestTooLargeError
from minicache.request import RequestStatus


def line_of(scheduler):
    """The ids of those that wait, the next one first."""
    return list(scheduler.waiting)


# Into the line


def test_nobody_waits_in_a_new_scheduler(plain):
    """A new scheduler has no head, nobody waiting, nobody running and nothing unfinished."""
    scheduler = plain()
    call(scheduler.head).gives(None)
    counts = scheduler.num_waiting, scheduler.num_running, scheduler.has_unfinished
    that("num_waiting, num_running, has_unfinished of a new scheduler", counts).gives((0, 0, False))


def test_requests_wait_in_the_order_in_which_they_came(plain, request_of):
    """Who comes first stands first, whatever the ids: 7, "b", 3, "a"."""
    scheduler = plain()
    ids = [7, "b", 3, "a"]
    for request_id in ids:
        call(scheduler.add_request, request_of(request_id)).gives(None)
    that("the line", line_of(scheduler)).gives(ids)
    that("num_waiting", scheduler.num_waiting).gives(4)
    that("num_running", scheduler.num_running).gives(0)
    that("has_unfinished", scheduler.has_unfinished).gives(True)


def test_requests_are_numbered_as_they_come(plain, request_of):
    """arrival_index is 0, 1, 2, …, and goes on counting when the line has become shorter."""
    scheduler = plain()
    requests = [request_of(request_id) for request_id in "abcd"]
    for request in requests[:3]:
        scheduler.add_request(request)
    scheduler.schedule()  # everybody is in the batch now
    scheduler.add_request(requests[3])
    that("arrival_index of a, b, c, d", [request.arrival_index for request in requests]).gives([0, 1, 2, 3])


def test_a_request_that_waits_has_no_memory(plain, request_of):
    """To be taken on is not to be admitted: the request is WAITING, and no block is taken for it."""
    scheduler = plain()
    request = request_of("a")
    scheduler.add_request(request)
    that("its status", request.status.name).gives("WAITING")
    that("its block_ids", request.block_ids).gives([])
    that("used blocks", scheduler.pool.num_used).gives(0)


def test_the_head_stays_where_it_is(plain, request_of):
    """head() says who is next, as often as it is asked, and takes nobody out of the line."""
    scheduler = plain()
    first, second = request_of("first"), request_of("second")
    scheduler.add_request(first)
    scheduler.add_request(second)
    for _ in range(3):
        head = call(scheduler.head).value
        that("head() is the request that came first", head is first).gives(True)
    that("the line after head()", line_of(scheduler)).gives(["first", "second"])


def test_the_next_one_moves_up(plain, request_of):
    """Once the head has left the line, the one behind it is the head; then nobody."""
    scheduler = plain()
    requests = [request_of("a"), request_of("b")]
    for request in requests:
        scheduler.add_request(request)
    del scheduler.waiting["a"]
    that("head() after a has left", scheduler.head() is requests[1]).gives(True)
    del scheduler.waiting["b"]
    call(scheduler.head).gives(None)


def test_who_has_lost_a_place_waits_at_the_head(plain, request_of):
    """line_up(request, first=True) puts it before all who wait; line_up(request) behind them."""
    scheduler = plain()
    for request_id in "ab":
        scheduler.add_request(request_of(request_id))
    call(scheduler.line_up, request_of("victim"), first=True).gives(None)
    that("the line", line_of(scheduler)).gives(["victim", "a", "b"])
    that("the head's id", scheduler.head().request_id).gives("victim")
    call(scheduler.line_up, request_of("late")).gives(None)
    that("the line", line_of(scheduler)).gives(["victim", "a", "b", "late"])
    call(scheduler.line_up, request_of("second victim"), first=True).gives(None)
    that("the line", line_of(scheduler)).gives(["second victim", "victim", "a", "b", "late"])


def test_to_line_up_is_not_to_arrive(plain, request_of):
    """A request that comes back into the line keeps the number that it got when it arrived."""
    scheduler = plain()
    requests = [request_of("a"), request_of("b")]
    for request in requests:
        scheduler.add_request(request)
    del scheduler.waiting["a"]
    scheduler.line_up(requests[0], first=True)
    late = request_of("c")
    scheduler.add_request(late)
    numbers = [request.arrival_index for request in (*requests, late)]
    that("arrival_index of a, who waited twice, of b, and of c", numbers).gives([0, 1, 2])


def test_a_stage_may_keep_its_line_in_another_order(plain, request_of):
    """add_request lines up through line_up: a stage that orders its line otherwise overrides only that."""
    scheduler = plain()
    lined_up = []
    scheduler.line_up = lambda request, *, first=False: lined_up.append((request.request_id, first))
    scheduler.add_request(request_of("a"))
    that("what line_up was called with", lined_up).gives([("a", False)])


# Refused: not new


@pytest.mark.parametrize("nobody", [None, "a", {"request_id": "a"}], ids=repr)
def test_what_is_no_request(plain, nobody):
    """A scheduler serves Requests: None, an id or a dict is a TypeError, and nobody waits."""
    scheduler = plain()
    call(scheduler.add_request, nobody).raises(TypeError, saying="Request")
    that("the line", line_of(scheduler)).gives([])
    that("has_unfinished", scheduler.has_unfinished).gives(False)


def test_an_id_that_waits_is_taken(plain, request_of, state_of):
    """A second request with the same id: ValueError. The first keeps its place."""
    scheduler = plain()
    first, second = request_of("a"), request_of("a", 5)
    scheduler.add_request(first)
    scheduler.add_request(request_of("b"))
    before = state_of(scheduler, second)
    call(scheduler.add_request, second).raises(ValueError)
    that("what is to be seen after the refusal", state_of(scheduler, second)).gives(before)
    that("head() is still the first", scheduler.head() is first).gives(True)


@pytest.mark.parametrize("request_id", ["a", "b", "c"])
def test_an_id_that_runs_is_taken(plain, request_of, state_of, request_id):
    """The id of a request in the batch is taken too, wherever it stands there: ValueError."""
    scheduler = plain()
    for each in "abc":
        scheduler.add_request(request_of(each))
    scheduler.schedule()
    again = request_of(request_id)
    before = state_of(scheduler, again)
    call(scheduler.add_request, again).raises(ValueError)
    that("what is to be seen after the refusal", state_of(scheduler, again)).gives(before)


def test_the_same_request_cannot_wait_twice(plain, request_of):
    """A request that waits already is refused, here and by any other scheduler: ValueError."""
    scheduler, other = plain(), plain()
    request = request_of("a")
    scheduler.add_request(request)
    call(scheduler.add_request, request).raises(ValueError)
    call(other.add_request, request).raises(ValueError)
    that("the line here", line_of(scheduler)).gives(["a"])
    that("the line there", line_of(other)).gives([])


def running(request):
    request.status = RequestStatus.RUNNING


def aborted(request):
    request.status = RequestStatus.FINISHED_ABORTED


def computed(request):
    request.num_computed_tokens = 2


def answered(request):
    request.output_token_ids.append(9)


@pytest.mark.parametrize("spoil", [running, aborted, computed, answered])
def test_a_request_that_is_not_new_is_refused(plain, request_of, spoil):
    """One that runs, has ended, has computed tokens or has generated some: ValueError, and nobody waits."""
    scheduler = plain()
    request = request_of("a")
    spoil(request)
    call(scheduler.add_request, request).raises(ValueError)
    that("the line", line_of(scheduler)).gives([])
    that("has_unfinished", scheduler.has_unfinished).gives(False)
    that("its arrival_index", request.arrival_index).gives(-1)


# Refused: too large


@pytest.mark.parametrize("num_prompt_tokens", [1, 8, 9])
def test_a_prompt_that_leaves_room_for_one_token(plain, request_of, num_prompt_tokens):
    """With max_model_len 10, a prompt of 9 tokens is taken on: it may generate one."""
    scheduler = plain(max_model_len=10)
    call(scheduler.check_size, request_of("a", num_prompt_tokens)).gives(None)
    call(scheduler.add_request, request_of("a", num_prompt_tokens)).gives(None)
    that("num_waiting", scheduler.num_waiting).gives(1)


@pytest.mark.parametrize("num_prompt_tokens", [10, 11, 50])
def test_a_prompt_that_leaves_no_room(plain, request_of, num_prompt_tokens):
    """With max_model_len 10, 10 tokens of prompt or more can generate nothing: RequestTooLargeError says so."""
    scheduler = plain(max_model_len=10)
    call(scheduler.check_size, request_of("a", num_prompt_tokens)).raises(RequestTooLargeError, "max_model_len")
    call(scheduler.add_request, request_of("a", num_prompt_tokens)).raises(RequestTooLargeError, "max_model_len")
    that("num_waiting", scheduler.num_waiting).gives(0)


def test_max_tokens_may_be_more_than_the_model_takes(plain, request_of):
    """A prompt of 5 with max_tokens 1000 is fine with max_model_len 10: it ends when it is 10 long."""
    call(plain(max_model_len=10, num_blocks=1000).add_request, request_of("a", 5, max_tokens=1000)).gives(None)


def test_a_prompt_must_fit_into_one_step(plain, request_of):
    """With max_num_batched_tokens 8, a prompt of 8 is taken on, one of 9 is too large for any step."""
    scheduler = plain(max_num_batched_tokens=8)
    call(scheduler.add_request, request_of("a", 8)).gives(None)
    call(scheduler.add_request, request_of("b", 9)).raises(RequestTooLargeError, "max_num_batched_tokens")
    that("the line", line_of(scheduler)).gives(["a"])


def test_a_request_must_fit_into_the_pool(plain, request_of):
    """5 blocks of 4 tokens: 16 + 4 tokens need all of them and are taken on; 16 + 5 need a sixth."""
    scheduler = plain(num_blocks=5)
    call(scheduler.add_request, request_of("a", 16, max_tokens=4)).gives(None)
    call(scheduler.add_request, request_of("b", 16, max_tokens=5)).raises(RequestTooLargeError, "block")
    that("the line", line_of(scheduler)).gives(["a"])


def test_what_a_request_needs_is_its_stages_to_say(plain, request_of):
    """check_size asks blocks_to_admit, which every stage answers in its own way."""
    scheduler = plain(num_blocks=5)
    scheduler.blocks_to_admit = lambda request: 5
    call(scheduler.check_size, request_of("a", 1)).gives(None)
    scheduler.blocks_to_admit = lambda request: 6
    call(scheduler.check_size, request_of("a", 1)).raises(RequestTooLargeError)


def test_a_full_server_refuses_nobody(plain, request_of):
    """All blocks are in use now, and will be free one day: who fits into the empty pool may wait for that."""
    scheduler = plain(num_blocks=5)
    scheduler.add_request(request_of("a", 16, max_tokens=4))
    scheduler.schedule()
    that("free blocks", scheduler.pool.num_free).gives(0)
    call(scheduler.add_request, request_of("b", 16, max_tokens=4)).gives(None)
    that("the line", line_of(scheduler)).gives(["b"])


def test_who_is_refused_leaves_no_trace(plain, request_of, state_of):
    """A refused request is not numbered, its id stays free, and another scheduler may take it on."""
    scheduler = plain(max_model_len=10)
    scheduler.add_request(request_of("a"))
    large = request_of("b", 10)
    before = state_of(scheduler, large)
    call(scheduler.add_request, large).raises(RequestTooLargeError)
    that("arrival_index of the one that was refused", large.arrival_index).gives(-1)
    that("the line", line_of(scheduler)).gives(["a"])
    that("what is to be seen after the refusal", state_of(scheduler, large)).gives(before)
    small = request_of("b")
    call(scheduler.add_request, small).gives(None)
    that("arrival_index of the next one", small.arrival_index).gives(1)
    call(plain().add_request, large).gives(None)


def test_only_refused_requests_leave_nothing_to_do(plain, request_of):
    """When all that came was refused, nothing is unfinished."""
    scheduler = plain(num_blocks=2)
    call(scheduler.add_request, request_of("a", 50)).raises(RequestTooLargeError)
    that("has_unfinished", scheduler.has_unfinished).gives(False)
