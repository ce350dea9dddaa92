"""Phase 5, task 1: queue new requests, refuse those that can never be served, and admit one."""

from __future__ import annotations

import pytest

from minicache.errors import RequestTooLargeError
from minicache.request import RequestStatus
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.queue import RequestQueue
from minicache_course.checks import call, that


def queue_of(scheduler):
    """The ids of the waiting queue, the next one first."""
    return list(scheduler.waiting)


def ids_of(requests):
    return [request.request_id for request in requests]


# Into the queue


def test_a_new_scheduler_is_empty(plain):
    """A new scheduler has no head, nothing waiting, nothing running and nothing unfinished."""
    scheduler = plain()
    call(scheduler.head).gives(None)
    counts = scheduler.num_waiting, scheduler.num_running, scheduler.has_unfinished
    that("num_waiting, num_running, has_unfinished of a new scheduler", counts).gives((0, 0, False))


def test_requests_wait_in_the_order_of_arrival(plain, request_of):
    """The first to arrive is first in the queue, whatever the ids: 7, "b", 3, "a"."""
    scheduler = plain()
    ids = [7, "b", 3, "a"]
    for request_id in ids:
        call(scheduler.add_request, request_of(request_id)).gives(None)
    that("the waiting queue", queue_of(scheduler)).gives(ids)
    that("num_waiting", scheduler.num_waiting).gives(4)
    that("num_running", scheduler.num_running).gives(0)
    that("has_unfinished", scheduler.has_unfinished).gives(True)


def test_requests_are_numbered_as_they_arrive(plain, request_of):
    """arrival_index is 0, 1, 2, …, and continues when the queue has become shorter."""
    scheduler = plain()
    requests = [request_of(request_id) for request_id in "abcd"]
    for request in requests[:3]:
        scheduler.add_request(request)
    scheduler.schedule()  # all three are in the batch now
    scheduler.add_request(requests[3])
    that("arrival_index of a, b, c, d", [request.arrival_index for request in requests]).gives([0, 1, 2, 3])


def test_an_arrival_while_the_model_runs(plain, request_of):
    """A request that arrives between schedule() and the commit does not change the outstanding step."""
    scheduler = plain()
    scheduler.add_request(request_of("a"))
    output = scheduler.schedule()
    call(scheduler.add_request, request_of("b")).gives(None)
    that("whether the step is still outstanding", scheduler.outstanding is output).gives(True)


def test_a_waiting_request_has_no_memory(plain, request_of):
    """A request that was added is WAITING, and no block is allocated for it."""
    scheduler = plain()
    request = request_of("a")
    scheduler.add_request(request)
    that("its status", request.status.name).gives("WAITING")
    that("its block_ids", request.block_ids).gives([])
    that("used blocks", scheduler.pool.num_used).gives(0)


def test_register_does_not_queue(plain, request_of):
    """register(request) numbers the request and reserves its id; it is unfinished, and not in the queue."""
    scheduler = plain()
    request = request_of("a")
    call(scheduler.register, request).gives(None)
    that("its arrival_index", request.arrival_index).gives(0)
    that("the waiting queue", queue_of(scheduler)).gives([])
    that("has_unfinished", scheduler.has_unfinished).gives(True)
    call(scheduler.add_request, request_of("a")).raises(ValueError)
    late = request_of("b")
    scheduler.add_request(late)
    that("arrival_index of the next request", late.arrival_index).gives(1)


def test_add_request_registers(plain, request_of):
    """add_request calls register, and queues the request only if that does not raise."""
    scheduler = plain()
    request = request_of("a")

    def refuse(request):
        raise RequestTooLargeError("not today")

    scheduler.register = refuse
    call(scheduler.add_request, request).raises(RequestTooLargeError, "not today")
    that("the waiting queue", queue_of(scheduler)).gives([])


def test_the_head_stays_in_the_queue(plain, request_of):
    """head() returns the first request, however often it is called, and removes nothing."""
    scheduler = plain()
    first, second = request_of("first"), request_of("second")
    scheduler.add_request(first)
    scheduler.add_request(second)
    for _ in range(3):
        head = call(scheduler.head).value
        that("whether head() is the request that arrived first", head is first).gives(True)
    that("the waiting queue after head()", queue_of(scheduler)).gives(["first", "second"])


def test_the_next_request_moves_up(plain, request_of):
    """Once the head has left the queue, the next request is the head; then there is none."""
    scheduler = plain()
    requests = [request_of("a"), request_of("b")]
    for request in requests:
        scheduler.add_request(request)
    scheduler.waiting.remove(requests[0])
    that("whether head() is b, after a has left", scheduler.head() is requests[1]).gives(True)
    scheduler.waiting.remove(requests[1])
    call(scheduler.head).gives(None)


def test_the_head_is_found_at_once(plain, request_of):
    """head() does not search the queue: with 1,000 requests waiting it reads no more of them than with 10."""
    looked_at = {}
    for num_waiting in (10, 1000):
        keys = []
        scheduler = plain()
        scheduler.waiting = RequestQueue(lambda request, keys=keys: keys.append(0) or (request.arrival_index,))
        for request_id in range(num_waiting):
            scheduler.add_request(request_of(request_id))
        keys.clear()
        that(f"id of head(), with {num_waiting:,} waiting", call(scheduler.head).value.request_id).gives(0)
        looked_at[num_waiting] = len(keys)
    told = "whether head() looks at more requests with 1,000 waiting than with 10 (it is called in every step)"
    that(told, looked_at[1000] > looked_at[10] + 10).gives(False)


# Refused: not new


@pytest.mark.parametrize("wrong", [None, "a", {"request_id": "a"}], ids=repr)
def test_only_requests_are_served(plain, wrong):
    """None, an id or a dict is a TypeError, and nothing waits."""
    scheduler = plain()
    call(scheduler.add_request, wrong).raises(TypeError, saying="Request")
    that("the waiting queue", queue_of(scheduler)).gives([])
    that("has_unfinished", scheduler.has_unfinished).gives(False)


def test_the_id_of_a_waiting_request_is_taken(plain, request_of, state_of):
    """A second request with the same id: ValueError. The first keeps its position."""
    scheduler = plain()
    first, second = request_of("a"), request_of("a", 5)
    scheduler.add_request(first)
    scheduler.add_request(request_of("b"))
    before = state_of(scheduler, second)
    call(scheduler.add_request, second).raises(ValueError)
    that("what is to be seen after the refusal", state_of(scheduler, second)).gives(before)
    that("whether head() is still the first", scheduler.head() is first).gives(True)


@pytest.mark.parametrize("request_id", ["a", "b", "c"])
def test_the_id_of_a_running_request_is_taken(plain, request_of, state_of, request_id):
    """The id of a request in the batch is in use too, at any position: ValueError."""
    scheduler = plain()
    for each in "abc":
        scheduler.add_request(request_of(each))
    scheduler.schedule()
    again = request_of(request_id)
    before = state_of(scheduler, again)
    call(scheduler.add_request, again).raises(ValueError)
    that("what is to be seen after the refusal", state_of(scheduler, again)).gives(before)


def test_the_same_request_cannot_wait_twice(plain, request_of):
    """A request that is already waiting is refused, by this scheduler and any other: ValueError."""
    scheduler, other = plain(), plain()
    request = request_of("a")
    scheduler.add_request(request)
    call(scheduler.add_request, request).raises(ValueError)
    call(other.add_request, request).raises(ValueError)
    that("the waiting queue here", queue_of(scheduler)).gives(["a"])
    that("the waiting queue there", queue_of(other)).gives([])


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
    """A request that runs, has finished, or has computed or generated tokens: ValueError, and nothing waits."""
    scheduler = plain()
    request = request_of("a")
    spoil(request)
    call(scheduler.add_request, request).raises(ValueError)
    that("the waiting queue", queue_of(scheduler)).gives([])
    that("has_unfinished", scheduler.has_unfinished).gives(False)
    that("its arrival_index", request.arrival_index).gives(-1)


# Refused: too large


@pytest.mark.parametrize("num_prompt_tokens", [1, 8, 9])
def test_a_prompt_that_leaves_room_for_one_token(plain, request_of, num_prompt_tokens):
    """With max_model_len 10, a prompt of 9 tokens is accepted: it may generate one."""
    scheduler = plain(max_model_len=10)
    call(scheduler.check_size, request_of("a", num_prompt_tokens)).gives(None)
    call(scheduler.add_request, request_of("a", num_prompt_tokens)).gives(None)
    that("num_waiting", scheduler.num_waiting).gives(1)


@pytest.mark.parametrize("num_prompt_tokens", [10, 11, 50])
def test_a_prompt_that_leaves_no_room(plain, request_of, num_prompt_tokens):
    """With max_model_len 10, a prompt of 10 tokens or more leaves no space for output: RequestTooLargeError."""
    scheduler = plain(max_model_len=10)
    call(scheduler.check_size, request_of("a", num_prompt_tokens)).raises(RequestTooLargeError, "max_model_len")
    call(scheduler.add_request, request_of("a", num_prompt_tokens)).raises(RequestTooLargeError, "max_model_len")
    that("num_waiting", scheduler.num_waiting).gives(0)


def test_max_tokens_may_exceed_max_model_len(plain, request_of):
    """A prompt of 5 with max_tokens 1000 is fine with max_model_len 10: it finishes when it is 10 long."""
    call(plain(max_model_len=10, num_blocks=1000).add_request, request_of("a", 5, max_tokens=1000)).gives(None)


def test_a_prompt_must_fit_into_one_step(plain, request_of):
    """With max_num_batched_tokens 8, a prompt of 8 is accepted, one of 9 is too large for any step."""
    scheduler = plain(max_num_batched_tokens=8)
    call(scheduler.add_request, request_of("a", 8)).gives(None)
    call(scheduler.add_request, request_of("b", 9)).raises(RequestTooLargeError, "max_num_batched_tokens")
    that("the waiting queue", queue_of(scheduler)).gives(["a"])


def test_a_stage_that_chunks_prompts_has_no_such_limit(plain, request_of):
    """With `chunks_prompts`, a prompt of 9 is accepted by a scheduler with max_num_batched_tokens 8."""
    scheduler = plain(max_num_batched_tokens=8)
    scheduler.chunks_prompts = True
    call(scheduler.check_size, request_of("b", 9)).gives(None)


def test_a_request_must_fit_into_the_pool(plain, request_of):
    """5 blocks of 4 tokens: 16 + 4 tokens need all of them and are accepted; 16 + 5 need a sixth."""
    scheduler = plain(num_blocks=5)
    call(scheduler.add_request, request_of("a", 16, max_tokens=4)).gives(None)
    call(scheduler.add_request, request_of("b", 16, max_tokens=5)).raises(RequestTooLargeError, "block")
    that("the waiting queue", queue_of(scheduler)).gives(["a"])


def test_the_stage_decides_what_a_request_needs(plain, request_of):
    """check_size calls blocks_to_admit, which every stage defines in its own way."""
    scheduler = plain(num_blocks=5)
    scheduler.blocks_to_admit = lambda request: 5
    call(scheduler.check_size, request_of("a", 1)).gives(None)
    scheduler.blocks_to_admit = lambda request: 6
    call(scheduler.check_size, request_of("a", 1)).raises(RequestTooLargeError)


def test_a_full_server_refuses_nothing(plain, request_of):
    """All blocks are in use now and will be free later: a request that fits into the empty pool may wait."""
    scheduler = plain(num_blocks=5)
    scheduler.add_request(request_of("a", 16, max_tokens=4))
    scheduler.schedule()
    that("free blocks", scheduler.pool.num_free).gives(0)
    call(scheduler.add_request, request_of("b", 16, max_tokens=4)).gives(None)


def test_a_refused_request_leaves_no_trace(plain, request_of, state_of):
    """A request that is too large keeps the number −1, is not queued, uses no number, and may go elsewhere."""
    scheduler = plain(max_model_len=10)
    scheduler.add_request(request_of("a"))
    large = request_of("b", 10)
    before = state_of(scheduler, large)
    call(scheduler.add_request, large).raises(RequestTooLargeError)
    that("arrival_index of the one that was refused", large.arrival_index).gives(-1)
    that("the waiting queue", queue_of(scheduler)).gives(["a"])
    that("what is to be seen after the refusal", state_of(scheduler, large)).gives(before)
    small = request_of("b")
    call(scheduler.add_request, small).gives(None)
    that("arrival_index of the next one", small.arrival_index).gives(1)
    call(plain().add_request, large).gives(None)


def test_only_refused_requests_leave_nothing_to_do(plain, request_of):
    """When all requests were refused, nothing is unfinished."""
    scheduler = plain(num_blocks=2)
    call(scheduler.add_request, request_of("a", 50)).raises(RequestTooLargeError)
    that("has_unfinished", scheduler.has_unfinished).gives(False)


# Into the batch


def test_schedule_tokens_adds_what_is_not_computed(plain, request_of):
    """Scheduled are a new request's prompt, the newest token in decode, or the rest of a partly computed prompt."""
    scheduler, output = plain(), SchedulerOutput()
    new, decoding, half = request_of("new", 6), request_of("decoding", 6), request_of("half", 6)
    decoding.num_computed_tokens = 6
    decoding.output_token_ids.append(9)
    half.num_computed_tokens = 4
    for request in (new, decoding, half):
        call(scheduler.schedule_tokens, request, output).gives(None)
    that("num_scheduled_tokens", output.num_scheduled_tokens).gives({"new": 6, "decoding": 1, "half": 2})
    that("ids of .scheduled", ids_of(output.scheduled)).gives(["new", "decoding", "half"])
    that("num_computed_tokens, which only a commit changes", new.num_computed_tokens).gives(0)


def test_schedule_tokens_charges_the_budget(plain, request_of):
    """Of a budget of 20, a prompt of 6 leaves 14, and another of 9 leaves 5."""
    scheduler, output = plain(max_num_batched_tokens=20), SchedulerOutput()
    for request, left in ((request_of("a", 6), 14), (request_of("b", 9), 5)):
        scheduler.schedule_tokens(request, output)
        that(f"token_budget after {request.request_id}", scheduler.token_budget).gives(left)


@pytest.mark.parametrize("budget", [6, 20], ids=lambda what: f"a budget of {what}")
def test_what_was_generated_is_computed_again(plain, request_of, budget):
    """A request of 5 + 2 uncomputed tokens, as after a failed step, has 7 scheduled, whatever the budget.

    Checking the budget is the caller's task: a request that has outgrown it is still scheduled.
    """
    scheduler, output = plain(max_num_batched_tokens=budget), SchedulerOutput()
    back = request_of("back", 5)
    back.output_token_ids += [7, 8]
    call(scheduler.schedule_tokens, back, output).gives(None)
    that("num_scheduled_tokens", output.num_scheduled_tokens).gives({"back": 7})
    that("token_budget", scheduler.token_budget).gives(budget - 7)


def test_admit_moves_a_request_into_the_batch(plain, request_of):
    """An admitted request has left the queue, is RUNNING in the batch, has its blocks, and its prompt is scheduled."""
    scheduler, output = plain(max_num_batched_tokens=20), SchedulerOutput()
    requests = [request_of("a", 5, 3), request_of("b", 1, 1)]
    for request in requests:
        scheduler.add_request(request)
    for request in requests:
        call(scheduler.admit, request, output).gives(None)
    that("the waiting queue", queue_of(scheduler)).gives([])
    that("the batch", ids_of(scheduler.running)).gives(["a", "b"])
    that("their status", [request.status.name for request in requests]).gives(["RUNNING", "RUNNING"])
    that("their blocks", [request.block_ids for request in requests]).gives([[0, 1], [2]])
    that("num_scheduled_tokens", output.num_scheduled_tokens).gives({"a": 5, "b": 1})
    same = [got is given for got, given in zip(output.scheduled, requests, strict=True)]
    that(".scheduled has the requests themselves", same).gives([True, True])
    that("token_budget", scheduler.token_budget).gives(14)
    call(scheduler.check).gives(None)


def test_the_batch_is_in_the_order_of_the_priority_key(plain, request_of):
    """c is admitted, then a, then b: the batch is a, b, c, and the step's order is that of the admissions."""
    scheduler, output = plain(), SchedulerOutput()
    requests = {request_id: request_of(request_id) for request_id in "abc"}
    for request in requests.values():
        scheduler.add_request(request)
    for request_id, left in (("c", ["a", "b"]), ("a", ["b"]), ("b", [])):
        scheduler.admit(requests[request_id], output)
        that(f"the waiting queue after {request_id} was admitted", queue_of(scheduler)).gives(left)
    that("the batch", ids_of(scheduler.running)).gives(["a", "b", "c"])
    that("ids of .scheduled", ids_of(output.scheduled)).gives(["c", "a", "b"])


def test_a_stage_may_have_another_order(plain, request_of):
    """admit inserts a request at its `priority_key`: here the newest is first."""
    scheduler, output = plain(), SchedulerOutput()
    scheduler.priority_key = lambda request: (-request.arrival_index,)
    requests = [request_of(request_id) for request_id in "abc"]
    for request in requests:
        scheduler.add_request(request)
    for request in requests:
        scheduler.admit(request, output)
    that("the batch", ids_of(scheduler.running)).gives(["c", "b", "a"])


def test_blocks_that_a_request_has_are_counted(plain, request_of):
    """A stage may give a request some blocks before it is admitted: admit appends those that are missing."""
    scheduler, output = plain(), SchedulerOutput()
    request = request_of("a", 5, 7)
    scheduler.add_request(request)
    request.block_ids = scheduler.pool.allocate(1)
    scheduler.admit(request, output)
    that("its blocks, of which it had the first", request.block_ids).gives([0, 1, 2])


def test_what_a_request_has_done_counts(plain, request_of):
    """A stage may admit a request with 4 of its 5 + 2 tokens computed: the other 3 are scheduled, and all are kept."""
    scheduler, output = plain(), SchedulerOutput()
    request = request_of("a", 5, 7)
    scheduler.add_request(request)
    request.output_token_ids += [7, 8]
    request.num_computed_tokens = 4
    scheduler.admit(request, output)
    that("num_scheduled_tokens", output.num_scheduled_tokens).gives({"a": 3})
    that("its output and num_computed_tokens", (request.output_token_ids, request.num_computed_tokens)).gives(
        ([7, 8], 4)
    )


def test_a_stage_may_have_another_number_of_blocks_missing(plain, request_of):
    """admit allocates the number of blocks that blocks_missing returns, which a later stage overrides."""
    scheduler, output = plain(), SchedulerOutput()
    scheduler.blocks_missing = lambda request: 1
    request = request_of("a", 5, 7)
    scheduler.add_request(request)
    scheduler.admit(request, output)
    that("its blocks", request.block_ids).gives([0])


def test_a_stage_may_schedule_other_tokens(plain, request_of):
    """admit calls schedule_tokens, which a later stage overrides, as its last action."""
    scheduler, output = plain(), SchedulerOutput()
    seen = []

    def schedule_tokens(request, output):
        seen.append((request.request_id, request.status.name, list(request.block_ids)))
        seen.append((queue_of(scheduler), ids_of(scheduler.running)))

    scheduler.schedule_tokens = schedule_tokens
    request = request_of("a", 5, 3)
    scheduler.add_request(request)
    scheduler.admit(request, output)
    that("what schedule_tokens was called with: id, status, blocks", seen[:1]).gives([("a", "RUNNING", [0, 1])])
    that("queue and batch at that moment", seen[1:]).gives([([], ["a"])])
