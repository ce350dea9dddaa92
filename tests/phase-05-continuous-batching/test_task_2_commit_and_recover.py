"""Phase 5, task 2: commit a step, finish requests, free their blocks, and recover."""

from __future__ import annotations

import random

import pytest

from minicache.request import RequestStatus
from minicache_course.checks import call, that
from minicache_course.seeds import fresh

FINISHED = [status for status in RequestStatus if status.is_finished]


def batch_of(scheduler, *requests):
    """All `requests` in the batch, with the output of the step that computes their prompts."""
    for request in requests:
        scheduler.add_request(request)
    return scheduler.schedule()


def ids_of(requests):
    return [request.request_id for request in requests]


def answers(scheduler, request, tokens):
    """Commit `tokens`, one a step, until the request has finished: how many were committed."""
    for count, token in enumerate(tokens, start=1):
        scheduler.update_from_output(scheduler.schedule(), {request.request_id: token})
        if request.status.is_finished:
            return count
    return None


# A token each


def test_a_prompt_is_computed_and_a_token_generated(plain, request_of):
    """After the step that computes 3 prompt tokens, 3 are computed, and the generated token is the output."""
    scheduler = plain()
    request = request_of("a", 3)
    output = batch_of(scheduler, request)
    call(scheduler.update_from_output, output, {"a": 77}).gives([])
    that("num_computed_tokens", request.num_computed_tokens).gives(3)
    that("output_token_ids", request.output_token_ids).gives([77])
    that("num_tokens", request.num_tokens).gives(4)
    that("its status", request.status.name).gives("RUNNING")


def test_a_committed_step_is_over(plain, request_of):
    """Until it is committed, the step is the scheduler's `outstanding`; then that is None."""
    scheduler = plain()
    output = batch_of(scheduler, request_of("a"))
    that("whether outstanding is the step, before the commit", scheduler.outstanding is output).gives(True)
    call(scheduler.update_from_output, output, {"a": 7}).gives([])
    that("outstanding after the commit", scheduler.outstanding).gives(None)


def test_decode_goes_on_token_by_token(plain, request_of):
    """Each later step computes one token, the newest, and generates the next."""
    scheduler = plain()
    request = request_of("a", 3, max_tokens=9)
    scheduler.add_request(request)
    outputs = request.output_token_ids
    for step, token in enumerate([40, 41, 0, 43]):
        output = scheduler.schedule()
        call(scheduler.update_from_output, output, {"a": token}).gives([])
        that(f"num_computed_tokens after step {step}", request.num_computed_tokens).gives(3 + step)
    that("output_token_ids", request.output_token_ids).gives([40, 41, 0, 43])
    told = "whether it is the list of before, to which tokens are appended (a copy costs more with each token)"
    that(told, request.output_token_ids is outputs).gives(True)


def test_a_step_without_some_of_the_batch(plain, request_of, state_of):
    """A later stage may leave b out of a step: b needs no token, and stays in the batch unchanged."""
    scheduler = plain()
    requests = [request_of(request_id) for request_id in "abc"]
    scheduler.update_from_output(batch_of(scheduler, *requests), {"a": 1, "b": 2, "c": 3})

    def schedule_running(output):
        for request in scheduler.running[::2]:
            scheduler.compute(request, output)

    scheduler.schedule_running = schedule_running
    output = scheduler.schedule()
    refuses(scheduler, state_of, output, {"a": 4}, ValueError)
    finished = call(scheduler.update_from_output, output, {"a": 4, "c": 5}).value
    that("those that have finished", ids_of(finished)).gives([])
    output = scheduler.schedule()
    scheduler.update_from_output(output, {"a": 6, "c": 7})
    scheduler.update_from_output(scheduler.schedule(), {"a": 8, "c": 9})
    that("the batch when a and c have finished", ids_of(scheduler.running)).gives(["b"])
    that("output of b", requests[1].output_token_ids).gives([2])


def test_tokens_are_found_by_id(plain, request_of):
    """Each request gets its token, in whatever order they are given."""
    scheduler = plain()
    requests = [request_of(request_id) for request_id in ("a", 5, "c")]
    output = batch_of(scheduler, *requests)
    call(scheduler.update_from_output, output, {"c": 12, "a": 10, 5: 11}).gives([])
    that("outputs of a, 5, c", [request.output_token_ids for request in requests]).gives([[10], [11], [12]])


def test_a_prompt_in_parts(plain, request_of):
    """10 prompt tokens, 4 a step: a token given before the last of them is computed is ignored."""
    scheduler = plain(chunk=4)
    request = request_of("a", 10)
    scheduler.add_request(request)
    for computed, tokens, generated in [(4, {"a": 90}, []), (8, {}, []), (10, {"a": 91}, [91])]:
        call(scheduler.update_from_output, scheduler.schedule(), tokens).gives([])
        that("num_computed_tokens", request.num_computed_tokens).gives(computed)
        that(f"output_token_ids with {computed} of 10 prompt tokens computed", request.output_token_ids).gives(
            generated
        )


def test_a_stop_token_in_the_middle_of_a_prompt_is_ignored(plain, request_of):
    """A token for a request that is still in prefill is ignored, a stop token too."""
    scheduler = plain(chunk=4)
    request = request_of("a", 6, stop_token_ids=[9], max_tokens=1)
    scheduler.add_request(request)
    call(scheduler.update_from_output, scheduler.schedule(), {"a": 9}).gives([])
    that("its status", request.status.name).gives("RUNNING")
    that("output_token_ids", request.output_token_ids).gives([])


# Finished requests


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_the_max_tokens_th_token_finishes_a_request(plain, request_of, max_tokens):
    """A request finishes with its max_tokens-th token, not before and not after: FINISHED_LENGTH, "length"."""
    scheduler = plain()
    request = request_of("a", 3, max_tokens=max_tokens)
    scheduler.add_request(request)
    that("tokens until it finished", answers(scheduler, request, [7] * 20)).gives(max_tokens)
    that("output_token_ids", request.output_token_ids).gives([7] * max_tokens)
    that("its status", request.status.name).gives("FINISHED_LENGTH")
    that("finish_reason", request.finish_reason).gives("length")


@pytest.mark.parametrize(("num_prompt_tokens", "num_output_tokens"), [(9, 1), (8, 2), (3, 7)])
def test_prompt_and_output_stay_within_max_model_len(plain, request_of, num_prompt_tokens, num_output_tokens):
    """With max_model_len 10, prompt and output together are 10 tokens at most: FINISHED_LENGTH."""
    scheduler = plain(max_model_len=10)
    request = request_of("a", num_prompt_tokens, max_tokens=50)
    scheduler.add_request(request)
    that("tokens until it finished", answers(scheduler, request, [7] * 20)).gives(num_output_tokens)
    that("its status", request.status.name).gives("FINISHED_LENGTH")


def test_a_stop_token_finishes_a_request_and_stays(plain, request_of):
    """The stop token is the last of the output: FINISHED_STOPPED, "stop"."""
    scheduler = plain()
    request = request_of("a", 3, max_tokens=10, stop_token_ids=[50, 51])
    scheduler.add_request(request)
    that("tokens until it finished", answers(scheduler, request, [1, 2, 51, 4])).gives(3)
    that("output_token_ids", request.output_token_ids).gives([1, 2, 51])
    that("its status", request.status.name).gives("FINISHED_STOPPED")
    that("finish_reason", request.finish_reason).gives("stop")


def test_a_stop_token_as_the_last_token_has_stopped(plain, request_of):
    """A request whose max_tokens-th token is a stop token has stopped: "stop", not "length"."""
    scheduler = plain()
    request = request_of("a", 3, max_tokens=2, stop_token_ids=[50])
    scheduler.add_request(request)
    that("tokens until it finished", answers(scheduler, request, [1, 50])).gives(2)
    that("finish_reason", request.finish_reason).gives("stop")


def test_ignore_eos_ignores_stop_tokens(plain, request_of):
    """With ignore_eos, stop tokens have no effect: the request continues to max_tokens."""
    scheduler = plain()
    request = request_of("a", 3, max_tokens=4, stop_token_ids=[50], ignore_eos=True)
    scheduler.add_request(request)
    that("tokens until it finished", answers(scheduler, request, [50, 50, 50, 50, 50])).gives(4)
    that("finish_reason", request.finish_reason).gives("length")


def test_a_stop_token_in_the_prompt_means_nothing(plain, request_of):
    """Only generated tokens finish a request: its prompt may contain its stop token."""
    scheduler = plain()
    request = request_of("a", 3, max_tokens=4, stop_token_ids=[1, 2, 3])
    scheduler.add_request(request)
    that("tokens until it finished", answers(scheduler, request, [9, 2])).gives(2)


def test_finished_requests_leave_and_the_others_keep_their_order(plain, request_of):
    """Of a, b, c, d, two finish in one step: they are returned in batch order, the other two keep theirs."""
    scheduler = plain()
    requests = [request_of(request_id, stop_token_ids=[9]) for request_id in "dacb"]
    output = batch_of(scheduler, *requests)
    finished = call(scheduler.update_from_output, output, {"a": 9, "b": 9, "c": 1, "d": 1}).value
    that("those that have finished", ids_of(finished)).gives(["a", "b"])
    that("the batch", ids_of(scheduler.running)).gives(["d", "c"])
    that("num_running", scheduler.num_running).gives(2)
    that("has_unfinished", scheduler.has_unfinished).gives(True)
    call(scheduler.check).gives(None)


def test_finished_requests_are_returned_in_batch_order(plain, request_of):
    """However they finish: a by max_tokens, b by a stop token, c by max_tokens; a, b, c are returned in order."""
    scheduler = plain()
    requests = [request_of(request_id, max_tokens=1, stop_token_ids=[9]) for request_id in "abc"]
    finished = call(scheduler.update_from_output, batch_of(scheduler, *requests), {"a": 1, "b": 9, "c": 3}).value
    that("those that have finished", [(each.request_id, each.status.name) for each in finished]).gives(
        [("a", "FINISHED_LENGTH"), ("b", "FINISHED_STOPPED"), ("c", "FINISHED_LENGTH")]
    )


def test_when_all_have_finished_nothing_is_left(plain, request_of):
    """After the last one: nothing runs, nothing is unfinished, all blocks are free."""
    scheduler = plain()
    requests = [request_of(request_id, max_tokens=1) for request_id in "abc"]
    finished = call(scheduler.update_from_output, batch_of(scheduler, *requests), {"a": 1, "b": 2, "c": 3}).value
    that("those that have finished", ids_of(finished)).gives(["a", "b", "c"])
    that("num_running", scheduler.num_running).gives(0)
    that("has_unfinished", scheduler.has_unfinished).gives(False)
    that("used blocks", scheduler.pool.num_used).gives(0)
    that("their blocks", [request.block_ids for request in requests]).gives([[], [], []])


def test_waiting_requests_are_not_touched(plain, request_of):
    """A request that arrived after schedule() keeps waiting, and gets no token."""
    scheduler = plain()
    output = batch_of(scheduler, request_of("a", max_tokens=1))
    late = request_of("b")
    scheduler.add_request(late)
    scheduler.update_from_output(output, {"a": 1})
    that("the waiting queue", list(scheduler.waiting)).gives(["b"])
    that("has_unfinished", scheduler.has_unfinished).gives(True)
    that("its output_token_ids", late.output_token_ids).gives([])


def test_an_id_is_free_again_when_its_request_has_finished(plain, request_of):
    """Once a has finished, another request may have the id a."""
    scheduler = plain()
    scheduler.update_from_output(batch_of(scheduler, request_of("a", max_tokens=1)), {"a": 1})
    call(scheduler.add_request, request_of("a")).gives(None)


def test_numbers_go_on_when_requests_have_finished(plain, request_of):
    """a and b arrive, a finishes, c arrives: c is number 2, the third to arrive; then all finish, and d is number 3."""
    scheduler = plain()
    requests = [request_of(request_id, stop_token_ids=[9]) for request_id in "abcd"]
    for request in requests[:2]:
        scheduler.add_request(request)
    scheduler.update_from_output(scheduler.schedule(), {"a": 9, "b": 1})
    scheduler.add_request(requests[2])
    that("arrival_index of a, b, c", [request.arrival_index for request in requests[:3]]).gives([0, 1, 2])
    scheduler.update_from_output(scheduler.schedule(), {"b": 9, "c": 9})
    scheduler.add_request(requests[3])
    that("arrival_index of d, which arrives when all have finished", requests[3].arrival_index).gives(3)


# The blocks


def test_blocks_go_back_last_one_first(plain, request_of):
    """Of the blocks 0, 1, 2, release frees 2, then 1, then 0: the beginning survives longest."""
    scheduler = plain(num_blocks=5)
    request = request_of("a", 8, max_tokens=4)
    batch_of(scheduler, request)
    that("its blocks", request.block_ids).gives([0, 1, 2])
    scheduler.release(request)
    that("its blocks, once released", request.block_ids).gives([])
    that("the free blocks, the longest free first", scheduler.pool.allocate(5)).gives([3, 4, 2, 1, 0])


def test_blocks_go_back_in_one_call(plain, request_of):
    """release() calls pool.free once, with all blocks."""
    scheduler, freed = plain(num_blocks=5), []
    request = request_of("a", 8, max_tokens=4)
    batch_of(scheduler, request)
    scheduler.pool.free = lambda block_ids: freed.append(list(block_ids))
    scheduler.release(request)
    that("what pool.free was called with", freed).gives([[2, 1, 0]])


def test_a_request_without_blocks_releases_nothing(plain, request_of):
    """Releasing a request without blocks does nothing, however often."""
    scheduler = plain(num_blocks=5)
    request = request_of("a")
    scheduler.release(request)
    scheduler.release(request)
    that("its blocks", request.block_ids).gives([])
    that("free blocks", scheduler.pool.num_free).gives(5)


def test_blocks_are_released_once(plain, request_of):
    """Releasing a request again does nothing to its former blocks, which another one has now."""
    scheduler = plain(num_blocks=3)
    request = request_of("a", 8, max_tokens=4)
    batch_of(scheduler, request)
    scheduler.release(request)
    that("all blocks, taken by another", len(scheduler.pool.allocate(3))).gives(3)
    scheduler.release(request)
    that("used blocks", scheduler.pool.num_used).gives(3)


def test_a_stage_may_have_more_to_give_back(plain, request_of):
    """A finished request's blocks are freed through release(), which a later stage extends: once, and only for it."""
    scheduler = plain()
    requests = [request_of(request_id, stop_token_ids=[9]) for request_id in "abcd"]
    output = batch_of(scheduler, *requests)
    scheduler.finish_request("c", RequestStatus.FINISHED_STOPPED)
    scheduler.update_from_output(output, {"a": 9, "b": 1, "d": 9})
    scheduler.abort_request("b")
    that("released", scheduler.released).gives(["c", "a", "d", "b"])


@pytest.mark.parametrize("how", ["commit", "abort", "abort while it waits"])
def test_the_order_in_which_a_request_finishes(plain, request_of, how):
    """It leaves queue or batch, gets its final status, is released; only then is it no longer unfinished."""
    scheduler = plain()
    scheduler.add_request(request_of("a", max_tokens=1))
    if how != "abort while it waits":
        output = scheduler.schedule()
    if how == "commit":
        scheduler.update_from_output(output, {"a": 1})
    else:
        scheduler.abort_request("a")
    status = "FINISHED_LENGTH" if how == "commit" else "FINISHED_ABORTED"
    told = f"what release() finds ({how}): status, whether it is in queue or batch, has_unfinished"
    that(told, scheduler.found).gives([(status, False, True)])
    that("has_unfinished afterwards", scheduler.has_unfinished).gives(False)


class Counted(list):
    """A list that counts the elements that its methods read or move."""

    def __init__(self, items=()):
        super().__init__(items)
        self.work = 0

    def remove(self, item):
        self.work += len(self)
        super().remove(item)

    def pop(self, at=-1):
        self.work += len(self) - at % len(self)
        return super().pop(at)

    def index(self, *arguments):
        self.work += len(self)
        return super().index(*arguments)

    def __delitem__(self, at):
        self.work += len(self)
        super().__delitem__(at)

    def __contains__(self, item):
        self.work += len(self)
        return super().__contains__(item)


def test_a_commit_takes_time_in_proportion_to_the_batch(plain, request_of):
    """8 and 64 requests finish in one step: the batch is not searched, nor compacted, once for each of them."""
    for count in (8, 64):
        scheduler = plain(num_blocks=200)
        output = batch_of(scheduler, *(request_of(each, max_tokens=1) for each in range(count)))
        batch = scheduler.running = Counted(scheduler.running)
        finished = call(scheduler.update_from_output, output, dict.fromkeys(range(count), 7)).value
        that(f"how many of {count} have finished", len(finished)).gives(count)
        told = f"whether more than 2 · {count} elements of `running` were looked at or moved, one by one"
        that(told, batch.work > 2 * count).gives(False)


# Finished from outside


@pytest.mark.parametrize("status", FINISHED, ids=lambda status: status.name)
def test_a_running_request_can_be_finished(plain, request_of, status):
    """It leaves the batch with that status and keeps its tokens; the others keep their order."""
    scheduler = plain()
    requests = [request_of(request_id) for request_id in "abcd"]
    scheduler.update_from_output(batch_of(scheduler, *requests), {"a": 1, "b": 2, "c": 3, "d": 4})
    call(scheduler.finish_request, "b", status).gives(True)
    that("its status", requests[1].status.name).gives(status.name)
    that("its output_token_ids", requests[1].output_token_ids).gives([2])
    that("its blocks", requests[1].block_ids).gives([])
    that("the batch", ids_of(scheduler.running)).gives(["a", "c", "d"])
    call(scheduler.check).gives(None)


def test_a_waiting_request_can_be_finished(plain, request_of):
    """It leaves the queue, from the middle too; the others keep their positions."""
    scheduler = plain()
    for request_id in "abc":
        scheduler.add_request(request_of(request_id))
    call(scheduler.finish_request, "b", RequestStatus.FINISHED_STOPPED).gives(True)
    that("the waiting queue", list(scheduler.waiting)).gives(["a", "c"])
    call(scheduler.finish_request, "a", RequestStatus.FINISHED_STOPPED).gives(True)
    that("the waiting queue", list(scheduler.waiting)).gives(["c"])
    call(scheduler.check).gives(None)


def test_an_unknown_request_cannot_be_finished(plain, request_of, state_of):
    """An id that no request has, or whose request has finished before: False, and nothing changes."""
    scheduler = plain()
    scheduler.update_from_output(batch_of(scheduler, request_of("a"), request_of("b", max_tokens=1)), {"a": 1, "b": 1})
    before = state_of(scheduler)
    for request_id in ("unknown", "b"):
        call(scheduler.finish_request, request_id, RequestStatus.FINISHED_ABORTED).gives(False)
        call(scheduler.abort_request, request_id).gives(False)
    that("what is to be seen afterwards", state_of(scheduler)).gives(before)


@pytest.mark.parametrize("status", [each for each in RequestStatus if not each.is_finished], ids=lambda each: each.name)
def test_a_status_that_is_no_end_is_refused(plain, request_of, state_of, status):
    """WAITING, RUNNING and SWAPPED are not FINISHED statuses: ValueError, and nothing changes."""
    scheduler = plain()
    batch_of(scheduler, request_of("a"))
    scheduler.add_request(request_of("b"))
    before = state_of(scheduler)
    for request_id in "ab":
        call(scheduler.finish_request, request_id, status).raises(ValueError)
    that("what is to be seen afterwards", state_of(scheduler)).gives(before)


def test_abort_finishes_a_request_once(plain, request_of):
    """FINISHED_ABORTED, "abort"; True the first time and False the second; the id is free again."""
    scheduler = plain()
    running, waiting = request_of("a"), request_of("b")
    batch_of(scheduler, running)
    scheduler.add_request(waiting)
    for request in (waiting, running):
        call(scheduler.abort_request, request.request_id).gives(True)
        that("finish_reason", request.finish_reason).gives("abort")
        call(scheduler.abort_request, request.request_id).gives(False)
    that("has_unfinished", scheduler.has_unfinished).gives(False)
    that("used blocks", scheduler.pool.num_used).gives(0)
    call(scheduler.add_request, request_of("a")).gives(None)


def test_an_abort_is_a_finish(plain, request_of):
    """abort_request calls finish_request, so an observer of one sees both."""
    scheduler = plain()
    scheduler.add_request(request_of("a"))
    seen = []
    scheduler.finish_request = lambda request_id, status: seen.append((request_id, status.name)) or True
    call(scheduler.abort_request, "a").gives(True)
    that("what finish_request was called with", seen).gives([("a", "FINISHED_ABORTED")])


def test_an_abort_between_schedule_and_commit_is_passed_over(plain, request_of):
    """A request that was finished while the model ran is skipped: it needs no token, and gets none."""
    for tokens in ({"a": 1, "c": 3}, {"a": 1, "b": 2, "c": 3}):
        scheduler = plain()
        requests = [request_of(request_id, max_tokens=1) for request_id in "abc"]
        output = batch_of(scheduler, *requests)
        scheduler.abort_request("b")
        finished = call(scheduler.update_from_output, output, tokens).value
        that("those that have finished with the step", ids_of(finished)).gives(["a", "c"])
        that("output of b", requests[1].output_token_ids).gives([])
        that("finish_reason of b", requests[1].finish_reason).gives("abort")
        that("used blocks", scheduler.pool.num_used).gives(0)


def test_a_new_request_does_not_get_the_old_ones_token(plain, request_of):
    """a is aborted while the model runs, and another a arrives: the token of the step is for neither of them."""
    scheduler = plain()
    old = request_of("a", max_tokens=1)
    output = batch_of(scheduler, old)
    scheduler.abort_request("a")
    new = request_of("a")
    scheduler.add_request(new)
    call(scheduler.update_from_output, output, {"a": 1}).gives([])
    that("output and finish_reason of the one aborted", (old.output_token_ids, old.finish_reason)).gives(([], "abort"))
    that("its output_token_ids", new.output_token_ids).gives([])
    that("its num_computed_tokens", new.num_computed_tokens).gives(0)
    that("the waiting queue", list(scheduler.waiting)).gives(["a"])


# Commits that are refused


def refuses(scheduler, state_of, output, tokens, error):
    """The commit raises `error` and changes nothing."""
    before = state_of(scheduler)
    call(scheduler.update_from_output, output, tokens).raises(error)
    that(f"what is to be seen after {tokens} was refused", state_of(scheduler)).gives(before)


def test_a_step_is_committed_once(plain, request_of, state_of):
    """The same output again: ValueError, and no second token."""
    scheduler = plain()
    output = batch_of(scheduler, request_of("a"))
    scheduler.update_from_output(output, {"a": 1})
    refuses(scheduler, state_of, output, {"a": 1}, ValueError)


def test_an_empty_step_is_committed_once_too(plain, state_of):
    """A step without requests is committed with no tokens; the same output again is a ValueError."""
    scheduler = plain()
    output = scheduler.schedule()
    call(scheduler.update_from_output, output, {}).gives([])
    refuses(scheduler, state_of, output, {}, ValueError)


def test_only_the_last_schedule_can_be_committed(plain, request_of, state_of):
    """schedule() twice, because the model failed: only the second output can be committed."""
    scheduler = plain()
    first = batch_of(scheduler, request_of("a"))
    second = scheduler.schedule()
    refuses(scheduler, state_of, first, {"a": 1}, ValueError)
    call(scheduler.update_from_output, second, {"a": 1}).gives([])


def test_the_output_of_another_scheduler_is_refused(plain, request_of, state_of):
    """The output of another scheduler: ValueError, even if it looks the same."""
    scheduler, other = plain(), plain()
    batch_of(scheduler, request_of("a"))
    refuses(scheduler, state_of, batch_of(other, request_of("a")), {"a": 1}, ValueError)


COMMITS = [
    pytest.param({}, ValueError, id="none"),
    pytest.param({"a": 1, "b": 2}, ValueError, id="one is missing, the last"),
    pytest.param({"b": 2, "c": 3}, ValueError, id="one is missing, the first"),
    pytest.param({"a": 1, "b": 2, "c": 3, "d": 4}, ValueError, id="one too many"),
    pytest.param({"a": 1, "b": 2, "d": 4}, ValueError, id="an unknown one in place of the last"),
    pytest.param({"a": 1, "b": 2, "c": -1}, ValueError, id="a negative one, the last"),
    pytest.param({"a": -7, "b": 2, "c": 3}, ValueError, id="a negative one, the first"),
    pytest.param({"a": 1, "b": 2, "c": 3.0}, TypeError, id="a float"),
    pytest.param({"a": 1, "b": 2, "c": "3"}, TypeError, id="a string"),
    pytest.param({"a": 1, "b": 2, "c": None}, TypeError, id="None"),
    pytest.param({"a": 1, "b": 2, "c": [3]}, TypeError, id="a list"),
    pytest.param({"a": 1, "b": 2, "c": True}, TypeError, id="True"),
]


@pytest.mark.parametrize(("tokens", "error"), COMMITS)
def test_a_commit_is_all_or_nothing(plain, request_of, state_of, tokens, error):
    """A token missing, negative, or for an unknown id: ValueError; not an int: TypeError. Then a commit works."""
    scheduler = plain()
    requests = [request_of(request_id, max_tokens=1) for request_id in "abc"]
    output = batch_of(scheduler, *requests)
    refuses(scheduler, state_of, output, tokens, error)
    finished = call(scheduler.update_from_output, output, {"a": 1, "b": 2, "c": 3}).value
    that("those that finish with the correct commit", ids_of(finished)).gives(["a", "b", "c"])


def test_a_token_for_a_request_that_waits(plain, request_of, state_of):
    """b arrives while the model computes a. The step did not have b: a token for it is refused, ValueError."""
    scheduler = plain()
    output = batch_of(scheduler, request_of("a"))
    scheduler.add_request(request_of("b"))
    refuses(scheduler, state_of, output, {"a": 1, "b": 2}, ValueError)


# A step that failed


def test_restart_takes_back_all_but_the_output(plain, request_of):
    """restart(request): its blocks are free, none of its tokens is computed, it is WAITING; its output stays."""
    scheduler = plain()
    request = request_of("a", 5)
    scheduler.update_from_output(batch_of(scheduler, request), {"a": 7})
    scheduler.running.clear()
    call(scheduler.restart, request).gives(None)
    that("its status", request.status.name).gives("WAITING")
    that("its num_computed_tokens", request.num_computed_tokens).gives(0)
    that("its output_token_ids", request.output_token_ids).gives([7])
    that("its blocks", request.block_ids).gives([])
    that("used blocks", scheduler.pool.num_used).gives(0)
    that("released, through release()", scheduler.released).gives(["a"])


def test_recover_puts_the_whole_batch_back_into_the_queue(plain, request_of):
    """The whole batch waits again, with nothing computed and no block; generated tokens stay."""
    scheduler = plain()
    requests = [request_of(request_id) for request_id in "abc"]
    scheduler.update_from_output(batch_of(scheduler, *requests), {"a": 1, "b": 2, "c": 3})
    scheduler.schedule()
    call(scheduler.recover).gives(None)
    that("the waiting queue", list(scheduler.waiting)).gives(["a", "b", "c"])
    that("the batch", ids_of(scheduler.running)).gives([])
    that("their status", [request.status.name for request in requests]).gives(["WAITING"] * 3)
    that("num_computed_tokens", [request.num_computed_tokens for request in requests]).gives([0, 0, 0])
    that("their outputs", [request.output_token_ids for request in requests]).gives([[1], [2], [3]])
    that("their blocks", [request.block_ids for request in requests]).gives([[], [], []])
    that("used blocks", scheduler.pool.num_used).gives(0)
    that("num_preemptions", [request.num_preemptions for request in requests]).gives([1, 1, 1])
    call(scheduler.check).gives(None)


def test_everything_is_computed_again(plain, request_of):
    """After recover(), a request of 3 prompt tokens and 2 generated ones has 5 scheduled, and then continues."""
    scheduler = plain()
    request = request_of("a", 3, max_tokens=4)
    scheduler.add_request(request)
    for token in (40, 41):
        scheduler.update_from_output(scheduler.schedule(), {"a": token})
    scheduler.schedule()
    scheduler.recover()
    output = scheduler.schedule()
    that("tokens of the next step", output.num_scheduled_tokens).gives({"a": 5})
    call(scheduler.update_from_output, output, {"a": 42}).gives([])
    output = scheduler.schedule()
    that("tokens of the step after it", output.num_scheduled_tokens).gives({"a": 1})
    that("those that finish", ids_of(scheduler.update_from_output(output, {"a": 43}))).gives(["a"])
    that("output_token_ids", request.output_token_ids).gives([40, 41, 42, 43])


def test_recovered_requests_wait_before_later_arrivals(plain, request_of):
    """a and b run, c arrives while the model fails: the queue is a, b, c. a and b are preempted, c is not.

    It was their first step: nothing of them was computed. They have lost their batch slots.
    """
    scheduler = plain()
    requests = first, second, late = [request_of(request_id) for request_id in "abc"]
    batch_of(scheduler, first, second)
    scheduler.add_request(late)
    scheduler.recover()
    that("the waiting queue", list(scheduler.waiting)).gives(["a", "b", "c"])
    that("num_preemptions of a, b, c", [request.num_preemptions for request in requests]).gives([1, 1, 0])


def test_a_failed_step_cannot_be_committed(plain, request_of, state_of):
    """After recover(), the tokens of the failed step are refused: ValueError."""
    scheduler = plain()
    output = batch_of(scheduler, request_of("a"))
    scheduler.recover()
    refuses(scheduler, state_of, output, {"a": 1}, ValueError)


def test_what_a_waiting_request_holds_is_taken_back(plain, request_of):
    """From phase 6 on, a waiting request may be SWAPPED, with computed tokens. Its copies are not trusted either."""
    scheduler = plain()
    request = request_of("a", 5)
    scheduler.add_request(request)
    request.status = RequestStatus.SWAPPED
    request.num_computed_tokens = 5
    request.num_preemptions = 1
    scheduler.recover()
    that("its status", request.status.name).gives("WAITING")
    that("its num_preemptions: it was not in the batch", request.num_preemptions).gives(1)
    that("its num_computed_tokens", request.num_computed_tokens).gives(0)
    that("released, through release()", scheduler.released).gives(["a"])
    that("the waiting queue", list(scheduler.waiting)).gives(["a"])


def test_every_request_of_the_queue_is_restarted(plain, request_of):
    """recover() calls restart for each request of the queue, including those that were already waiting."""
    scheduler = plain()
    batch_of(scheduler, request_of("a"), request_of("b"))
    scheduler.add_request(request_of("c"))
    seen, restart = [], scheduler.restart

    def watched(request):
        seen.append(request.request_id)
        restart(request)

    scheduler.restart = watched
    scheduler.recover()
    that("what restart was called with", sorted(set(seen))).gives(["a", "b", "c"])


def test_a_step_that_was_never_committed_has_failed(plain, request_of):
    """schedule() calls recover() if the previous step was never committed, and only then."""
    scheduler = plain()
    seen, recover = [], scheduler.recover

    def watched():
        seen.append("recover")
        recover()

    scheduler.recover = watched
    output = batch_of(scheduler, request_of("a"))
    scheduler.update_from_output(output, {"a": 1})
    scheduler.schedule()
    that("calls of recover() after a committed step", seen).gives([])
    output = scheduler.schedule()
    that("calls of recover() after one that was not", seen).gives(["recover"])
    that("tokens of the next step", output.num_scheduled_tokens).gives({"a": 4})


def test_recover_of_nothing_does_no_harm(plain):
    """recover() without a request, or between two steps, raises nothing."""
    scheduler = plain()
    call(scheduler.recover).gives(None)
    that("has_unfinished", scheduler.has_unfinished).gives(False)


# All together


def test_many_steps(plain, request_of):
    """Requests arrive, finish, are aborted; steps fail: each has the expected tokens, and no block is lost."""
    rng = random.Random(fresh(5))
    scheduler = plain(num_blocks=400)
    requests, expected = {}, {}  # id → request; id → the output that it should have
    for step in range(300):
        if step < 150 and rng.random() < 0.4:
            request = request_of(step, rng.randint(1, 6), rng.randint(1, 8), stop_token_ids=[0])
            requests[step], expected[step] = request, []
            scheduler.add_request(request)
        output = scheduler.schedule()
        if rng.random() < 0.1:
            call(scheduler.recover).gives(None)
            call(scheduler.check).gives(None)
            continue
        if rng.random() < 0.1 and scheduler.running:
            scheduler.abort_request(rng.choice(scheduler.running).request_id)
        tokens = {request.request_id: rng.randint(0, 9) for request in output.scheduled}
        expected_to_finish = []
        for request in output.scheduled:
            mine = expected[request.request_id]
            if request.finish_reason != "abort":
                mine.append(tokens[request.request_id])
                if mine[-1] == 0 or len(mine) == request.max_tokens:
                    expected_to_finish.append(request.request_id)
        finished = call(scheduler.update_from_output, output, tokens).value
        that(f"those that finish in step {step}", ids_of(finished)).gives(expected_to_finish)
        call(scheduler.check).gives(None)
    that("all outputs", {each: request.output_token_ids for each, request in requests.items()}).gives(expected)
    that("used blocks in the end", scheduler.pool.num_used).gives(0)
