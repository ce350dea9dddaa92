"""Phase 11, task 4: a stream goes on elsewhere when its replica dies: no token twice, none lost."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minicache.errors import BrokenStreamError
from minicache.fleet.failover import MAX_SEED, FailoverStream
from minicache.fleet.views import ReplicaView
from minicache_course import scenario
from minicache_course.checks import CheckFailed, call, that
from minicache_course.follow import following
from minicache_course.seeds import fresh, one_of

PROMPT = (7, 8, one_of(9, range(10, 60)))
STOP = 99

repeatable = settings(max_examples=150, deadline=None, derandomize=True, database=None, report_multiple_bugs=False)


@pytest.fixture(autouse=True)
def _scenario():
    """A failure's message shows the stream and the calls made on it."""
    with (
        scenario.telling(),
        following(FailoverStream, "__init__", "receive", "finish", begin=_begin, fail=_fail, abort=_abort),
    ):
        yield


def _begin(attempt, replica_id):
    return f"begin({replica_id!r})", ""


def _fail(again, attempt):
    return f"fail(the attempt on {_replica(attempt)}) → {again!r}", ""


def _abort(attempt):
    return f"abort() → {'None' if attempt is None else f'the attempt on {_replica(attempt)}'}", ""


def _replica(attempt):
    return repr(getattr(attempt, "replica_id", attempt))


def a_stream(max_tokens=6, **options):
    return FailoverStream("r", PROMPT, max_tokens, **options)


def begin(stream, replica_id="a"):
    """`stream.begin(…)`, which must give an attempt that is `stream.attempt`."""
    __tracebackhide__ = True
    attempt = call(stream.begin, replica_id).value
    that("whether stream.attempt is what begin() has returned", stream.attempt is attempt).gives(True)
    return attempt


def asked(attempt):
    """The attempt's request to the replica, as a tuple."""
    __tracebackhide__ = True
    wanted = (attempt.replica_id, attempt.prompt_token_ids, attempt.max_tokens, attempt.seed)
    return that("(replica_id, prompt_token_ids, max_tokens, seed) of the attempt", wanted)


def state(stream):
    __tracebackhide__ = True
    return that(
        "(token_ids, finish_reason, is an attempt under way) of the stream",
        (list(stream.token_ids), stream.finish_reason, stream.attempt is not None),
    )


def a_replica(name, num_unfinished=0, max_unfinished=4):
    return ReplicaView(name, num_unfinished, max_unfinished)


def names(replicas):
    return [each.replica_id for each in replicas]


# One attempt, and nothing goes wrong


def test_the_first_attempt_asks_for_everything():
    """The prompt, all of max_tokens, and the client's seed, on the replica that the router has chosen."""
    attempt = begin(a_stream(6, seed=5), "b")
    asked(attempt).gives(("b", PROMPT, 6, 5))
    that("(number, num_received)", (attempt.number, attempt.num_received)).gives((1, 0))
    asked(begin(a_stream())).gives(("a", PROMPT, 6, None))


def test_what_comes_is_passed_on():
    """Each piece is new: all of it goes to the client, in order, and is kept."""
    stream = a_stream()
    attempt = begin(stream)
    call(stream.receive, attempt, 0, [1, 2]).gives([1, 2])
    call(stream.receive, attempt, 2, [3]).gives([3])
    call(stream.receive, attempt, 3, []).gives([])
    state(stream).gives(([1, 2, 3], None, True))


def test_the_end_is_the_replicas_to_say():
    """All tokens have arrived, and the stream waits for the end; then it is finished, for the replica's reason."""
    stream = a_stream(2)
    attempt = begin(stream)
    call(stream.receive, attempt, 0, [1, 2]).gives([1, 2])
    state(stream).gives(([1, 2], None, True))
    call(stream.finish, attempt, "length", 2).gives(None)
    state(stream).gives(([1, 2], "length", False))


def test_a_replica_may_end_early():
    """A stop string, a full cache: the replica knows why, and its word is kept."""
    stream = a_stream(6)
    attempt = begin(stream)
    call(stream.receive, attempt, 0, [1, 2]).gives([1, 2])
    call(stream.finish, attempt, "capacity", 2).gives(None)
    state(stream).gives(([1, 2], "capacity", False))


def test_an_answer_without_tokens_may_end():
    """No token was generated, and none is missing."""
    stream = a_stream(6)
    call(stream.finish, begin(stream), "stop", 0).gives(None)
    state(stream).gives(([], "stop", False))


# One death


def test_the_next_attempt_continues_prompt_and_tokens():
    """Four of six tokens came: the next replica continues the prompt and the four, for two more."""
    stream = a_stream(6)
    attempt = begin(stream)
    call(stream.receive, attempt, 0, [1, 2, 3, 4]).gives([1, 2, 3, 4])
    call(stream.fail, attempt).gives(True)
    state(stream).gives(([1, 2, 3, 4], None, False))
    second = begin(stream, "b")
    asked(second).gives(("b", (*PROMPT, 1, 2, 3, 4), 2, None))
    that("(number, num_received)", (second.number, second.num_received)).gives((2, 4))
    call(stream.receive, second, 0, [5]).gives([5])
    call(stream.receive, second, 1, [6]).gives([6])
    call(stream.finish, second, "length", 2).gives(None)
    state(stream).gives(([1, 2, 3, 4, 5, 6], "length", False))


@pytest.mark.parametrize("seed", [11, 0])
def test_a_death_before_the_first_token(seed):
    """Nothing was received: the next replica gets the same request, with the same seed."""
    stream = a_stream(6, seed=seed)
    call(stream.fail, begin(stream)).gives(True)
    asked(begin(stream, "b")).gives(("b", PROMPT, 6, seed))


def test_a_sampled_stream_does_not_draw_the_same_numbers_again():
    """The seed goes on with the tokens received: 11, and 11 + 3 after three; the last seed of all goes on at 0."""
    stream = a_stream(6, seed=11)
    attempt = begin(stream)
    call(stream.receive, attempt, 0, [1, 2, 3]).gives([1, 2, 3])
    call(stream.fail, attempt).gives(True)
    second = begin(stream, "b")
    asked(second).gives(("b", (*PROMPT, 1, 2, 3), 3, 14))
    call(stream.receive, second, 0, [4]).gives([4])
    call(stream.fail, second).gives(True)
    asked(begin(stream, "c")).gives(("c", (*PROMPT, 1, 2, 3, 4), 2, 15))
    last = a_stream(6, seed=MAX_SEED - 1)
    attempt = begin(last)
    call(last.receive, attempt, 0, [1]).gives([1])
    call(last.fail, attempt).gives(True)
    asked(begin(last, "b")).gives(("b", (*PROMPT, 1), 5, 0))


def test_an_attempt_stays_what_was_asked():
    """An attempt does not change when tokens arrive."""
    stream = a_stream(6)
    attempt = begin(stream)
    call(stream.receive, attempt, 0, [1, 2]).gives([1, 2])
    asked(attempt).gives(("a", PROMPT, 6, None))


# Only the end was lost


def test_all_tokens_came_and_the_end_was_lost():
    """The replica died after the last of max_tokens: the stream is finished, without another attempt."""
    stream = a_stream(3)
    attempt = begin(stream)
    call(stream.receive, attempt, 0, [1, 2, 3]).gives([1, 2, 3])
    call(stream.fail, attempt).gives(False)
    state(stream).gives(([1, 2, 3], "length", False))
    call(stream.begin, "b").raises(ValueError)


def test_a_stop_token_came_and_the_end_was_lost():
    """A stop token is the last of a stream. Another replica would go on after it."""
    stream = a_stream(6, stop_token_ids=[STOP, 98])
    attempt = begin(stream)
    call(stream.receive, attempt, 0, [1, STOP]).gives([1, STOP])
    call(stream.fail, attempt).gives(False)
    state(stream).gives(([1, STOP], "stop", False))


def test_a_stop_token_at_the_limit():
    """The last of max_tokens is a stop token: "stop", as an engine reports it."""
    stream = a_stream(2, stop_token_ids=[STOP])
    attempt = begin(stream)
    call(stream.receive, attempt, 0, [1, STOP]).gives([1, STOP])
    call(stream.fail, attempt).gives(False)
    state(stream).gives(([1, STOP], "stop", False))


def test_a_stop_token_in_the_prompt_stops_nothing():
    """Conversations contain end tokens. Only generated ones count."""
    stream = FailoverStream("r", [7, STOP], 6, stop_token_ids=[STOP])
    call(stream.fail, begin(stream)).gives(True)
    asked(begin(stream, "b")).gives(("b", (7, STOP), 6, None))


def test_complete_at_the_last_attempt_is_no_error():
    """No attempt is left, and none is needed."""
    stream = a_stream(2, max_attempts=1)
    attempt = begin(stream)
    call(stream.receive, attempt, 0, [1, 2]).gives([1, 2])
    call(stream.fail, attempt).gives(False)
    state(stream).gives(([1, 2], "length", False))


@pytest.mark.parametrize(
    ("max_tokens", "third"), [pytest.param(3, 3, id="max_tokens"), pytest.param(6, STOP, id="a stop token")]
)
def test_nothing_after_the_last_token(max_tokens, third):
    """A replica sends more after the last token, in the same piece and in another: the client gets none of it."""
    stream = a_stream(max_tokens, stop_token_ids=[STOP])
    attempt = begin(stream)
    call(stream.receive, attempt, 0, [1, 2, third, 4, 5]).gives([1, 2, third])
    call(stream.receive, attempt, 5, [6]).gives([])
    state(stream).gives(([1, 2, third], None, True))
    call(stream.finish, attempt, "length", 6).gives(None)
    state(stream).gives(([1, 2, third], "length", False))


# Late, twice, missing


def test_a_late_piece_of_an_earlier_attempt_is_dropped():
    """The first replica was only slow: its late tokens are not part of the second's stream."""
    stream = a_stream(6)
    first = begin(stream)
    call(stream.receive, first, 0, [1, 2]).gives([1, 2])
    call(stream.fail, first).gives(True)
    call(stream.receive, first, 2, [3]).gives([])
    second = begin(stream, "b")
    call(stream.receive, first, 2, [3]).gives([])
    call(stream.receive, second, 0, [4]).gives([4])
    call(stream.receive, first, 2, [4, 5]).gives([])
    state(stream).gives(([1, 2, 4], None, True))


def test_a_late_piece_that_makes_no_sense_is_dropped_too():
    """An attempt that is over cannot break the stream."""
    stream = a_stream(6)
    first = begin(stream)
    call(stream.fail, first).gives(True)
    begin(stream, "b")
    call(stream.receive, first, 3, [3]).gives([])
    call(stream.finish, first, "length", 6).gives(None)
    call(stream.fail, first).gives(False)
    state(stream).gives(([], None, True))


def test_a_second_attempt_on_the_same_replica_is_another():
    """The replica came back under its name. A late piece of the earlier attempt is recognized by its attempt."""
    stream = a_stream(6)
    first = begin(stream, "a")
    call(stream.fail, first).gives(True)
    second = begin(stream, "a")
    call(stream.receive, first, 0, [1]).gives([])
    call(stream.receive, second, 0, [2]).gives([2])


def test_what_comes_twice_is_passed_on_once():
    """A piece is sent again, alone or with more after it."""
    stream = a_stream(6)
    attempt = begin(stream)
    call(stream.receive, attempt, 0, [1, 2]).gives([1, 2])
    call(stream.receive, attempt, 0, [1, 2]).gives([])
    call(stream.receive, attempt, 1, (2, 3)).gives([3])  # any sequence
    call(stream.receive, attempt, 0, [1]).gives([])
    call(stream.receive, attempt, 3, [3]).gives([3])  # the token 3 again, and not the same one
    state(stream).gives(([1, 2, 3, 3], None, True))


def test_what_comes_twice_after_a_failover():
    """`start` counts the attempt's tokens: those before it are not part of it."""
    stream = a_stream(8)
    first = begin(stream)
    call(stream.receive, first, 0, [1, 2, 3]).gives([1, 2, 3])
    call(stream.fail, first).gives(True)
    second = begin(stream, "b")
    call(stream.receive, second, 0, [1, 2]).gives([1, 2])
    call(stream.receive, second, 0, [1, 2, 3]).gives([3])
    state(stream).gives(([1, 2, 3, 1, 2, 3], None, True))


def test_a_gap_is_noticed():
    """Two were received, and a piece begins at the fourth: the third is missing. Nothing has changed."""
    stream = a_stream(6)
    attempt = begin(stream)
    call(stream.receive, attempt, 0, [1, 2]).gives([1, 2])
    call(stream.receive, attempt, 3, [4]).raises(BrokenStreamError)
    state(stream).gives(([1, 2], None, True))
    call(stream.receive, attempt, 2, [3]).gives([3])


def test_a_gap_at_the_beginning_of_a_second_attempt():
    """The first token after a failover was lost."""
    stream = a_stream(6)
    first = begin(stream)
    call(stream.receive, first, 0, [1, 2]).gives([1, 2])
    call(stream.fail, first).gives(True)
    second = begin(stream, "b")
    call(stream.receive, second, 1, [4]).raises(BrokenStreamError)
    state(stream).gives(([1, 2], None, True))


def test_another_token_in_the_same_place_is_noticed():
    """Repeated tokens must be equal, or one of the two is wrong. The tokens after them are not taken either."""
    stream = a_stream(6)
    attempt = begin(stream)
    call(stream.receive, attempt, 0, [1, 2]).gives([1, 2])
    call(stream.receive, attempt, 1, [5, 3]).raises(BrokenStreamError)
    call(stream.receive, attempt, 0, [1, 5, 3]).raises(BrokenStreamError)
    state(stream).gives(([1, 2], None, True))


def test_a_replica_that_counts_fewer_tokens_has_ended():
    """Two were received, and the replica counts one: nothing is missing, and the stream is finished."""
    stream = a_stream(6)
    attempt = begin(stream)
    call(stream.receive, attempt, 0, [1, 2]).gives([1, 2])
    call(stream.finish, attempt, "stop", 1).gives(None)
    state(stream).gives(([1, 2], "stop", False))


def test_an_end_that_came_too_early_is_noticed():
    """The replica has generated three, and two were received: the third is lost. The stream is not finished."""
    stream = a_stream(6)
    attempt = begin(stream)
    call(stream.receive, attempt, 0, [1, 2]).gives([1, 2])
    call(stream.finish, attempt, "stop", 3).raises(BrokenStreamError)
    state(stream).gives(([1, 2], None, True))
    call(stream.fail, attempt).gives(True)
    second = begin(stream, "b")
    call(stream.receive, second, 0, [3]).gives([3])
    call(stream.finish, second, "stop", 2).raises(BrokenStreamError)  # of its own tokens it counts two, and one came
    call(stream.finish, second, "stop", 1).gives(None)
    state(stream).gives(([1, 2, 3], "stop", False))


@pytest.mark.parametrize(("number", "error"), [(-1, ValueError), ("1", TypeError), (True, TypeError)])
def test_numbers_are_looked_at(number, error):
    """A position or count below 0, or not whole, is the caller's mistake."""
    stream = a_stream(6)
    attempt = begin(stream)
    call(stream.receive, attempt, number, [1]).raises(error)
    call(stream.finish, attempt, "stop", number).raises(error)
    state(stream).gives(([], None, True))


@pytest.mark.parametrize(("number", "error"), [(-1, ValueError), ("1", TypeError)])
def test_numbers_are_looked_at_before_attempts(number, error):
    """Also of an attempt that is over, whose pieces are dropped: the caller's mistake is not hidden by a late piece."""
    stream = a_stream(6)
    attempt = begin(stream)
    call(stream.fail, attempt).gives(True)
    call(stream.receive, attempt, number, [1]).raises(error)
    call(stream.finish, attempt, "stop", number).raises(error)
    state(stream).gives(([], None, False))


# Several deaths, and giving up


def test_several_deaths_in_a_row():
    """Three replicas die, with two tokens, with none, with one; the fourth ends it."""
    stream = a_stream(5, max_attempts=4)
    for replica_id, pieces in (("a", [1, 2]), ("b", []), ("c", [3])):
        attempt = begin(stream, replica_id)
        call(stream.receive, attempt, 0, pieces).gives(pieces)
        call(stream.fail, attempt).gives(True)
    last = begin(stream, "d")
    asked(last).gives(("d", (*PROMPT, 1, 2, 3), 2, None))
    that("(number, num_received)", (last.number, last.num_received)).gives((4, 3))
    call(stream.receive, last, 0, [4, 5]).gives([4, 5])
    call(stream.finish, last, "length", 2).gives(None)
    state(stream).gives(([1, 2, 3, 4, 5], "length", False))


@pytest.mark.parametrize("max_attempts", [1, 2, 3])
def test_attempts_are_bounded(max_attempts):
    """A request that crashes its replicas fails before it has crashed all of them."""
    stream = a_stream(9, max_attempts=max_attempts)
    for number in range(max_attempts):
        attempt = begin(stream, f"replica {number}")
        call(stream.receive, attempt, 0, [number]).gives([number])
        call(stream.fail, attempt).gives(number < max_attempts - 1)
    state(stream).gives((list(range(max_attempts)), "error", False))
    call(stream.begin, "another").raises(ValueError)


def test_a_failure_counts_once():
    """Two connections notice the same failure: the second notice changes nothing, and costs no attempt."""
    stream = a_stream(6, max_attempts=2)
    first = begin(stream)
    call(stream.fail, first).gives(True)
    call(stream.fail, first).gives(False)
    second = begin(stream, "b")
    call(stream.fail, first).gives(False)
    state(stream).gives(([], None, True))
    call(stream.receive, second, 0, [1]).gives([1])


def test_one_attempt_at_a_time():
    """While one is under way there is no other; and a refused one is none."""
    stream = a_stream(6, max_attempts=2)
    first = begin(stream)
    call(stream.begin, "b").raises(ValueError)
    that("whether stream.attempt is still the first", stream.attempt is first).gives(True)
    that("num_attempts", stream.num_attempts).gives(1)
    call(stream.fail, first).gives(True)
    that("number of the next attempt", begin(stream, "b").number).gives(2)


def test_nothing_begins_after_the_end():
    """The stream is finished, as the replica has reported, with fewer tokens than requested."""
    stream = a_stream(6)
    attempt = begin(stream)
    call(stream.finish, attempt, "stop", 0).gives(None)
    call(stream.begin, "b").raises(ValueError)
    call(stream.fail, attempt).gives(False)
    call(stream.receive, attempt, 0, [1]).gives([])
    state(stream).gives(([], "stop", False))


def test_nothing_begins_for_a_client_that_has_all_tokens():
    """All tokens were received, and then the replica refuses the attempt: there is nothing left to request."""
    stream = a_stream(2)
    attempt = begin(stream)
    call(stream.receive, attempt, 0, [1, 2]).gives([1, 2])
    call(stream.refuse, attempt).gives(None)
    call(stream.begin, "b").raises(ValueError)


# Whom to ask next


def test_all_are_candidates_at_first():
    """No attempt has failed: the router sees all of them, in their order, full ones too."""
    replicas = [a_replica("b"), a_replica("a", 4), a_replica("c")]
    that("the candidates", names(call(a_stream().candidates, replicas).value)).gives(["b", "a", "c"])


def test_not_the_one_that_failed():
    """The others, in their order, how busy they may be."""
    stream = a_stream()
    call(stream.fail, begin(stream, "b")).gives(True)
    replicas = [a_replica("c", 3), a_replica("b"), a_replica("a", 4)]
    that("the candidates", names(call(stream.candidates, replicas).value)).gives(["c", "a"])
    call(stream.fail, begin(stream, "c")).gives(True)
    that("the candidates", names(call(stream.candidates, [*replicas, a_replica("d")]).value)).gives(["a", "d"])


def test_a_failed_one_is_better_than_none():
    """All others are full, or there are none: the replica may have been started again."""
    stream = a_stream()
    call(stream.fail, begin(stream, "b")).gives(True)
    full = [a_replica("c", 4), a_replica("b"), a_replica("a", 4)]
    that("the candidates", names(call(stream.candidates, full).value)).gives(["c", "b", "a"])
    that("the candidates", names(call(stream.candidates, [a_replica("b")]).value)).gives(["b"])
    that("the candidates", names(call(stream.candidates, []).value)).gives([])


def test_candidates_leave_the_list_as_it_is():
    """The list is the fleet's."""
    stream = a_stream()
    call(stream.fail, begin(stream, "b")).gives(True)
    replicas = [a_replica("b"), a_replica("a")]
    call(stream.candidates, replicas)
    that("the list that was given", names(replicas)).gives(["b", "a"])


# The client leaves


def test_the_client_leaves():
    """The attempt in progress is returned, to be cancelled; no tokens or attempts follow."""
    stream = a_stream()
    attempt = begin(stream)
    call(stream.receive, attempt, 0, [1]).gives([1])
    that("whether abort() gives the attempt under way", call(stream.abort).value is attempt).gives(True)
    state(stream).gives(([1], "abort", False))
    call(stream.receive, attempt, 1, [2]).gives([])
    call(stream.fail, attempt).gives(False)
    call(stream.finish, attempt, "length", 6).gives(None)
    call(stream.begin, "b").raises(ValueError)
    state(stream).gives(([1], "abort", False))


def test_the_client_leaves_between_two_attempts():
    """There is no attempt to cancel, and none can begin."""
    stream = a_stream()
    call(stream.fail, begin(stream)).gives(True)
    call(stream.abort).gives(None)
    call(stream.abort).gives(None)
    state(stream).gives(([], "abort", False))
    call(stream.begin, "b").raises(ValueError)


def test_the_client_leaves_before_the_end_is_reported():
    """All tokens were received, but no end: the stream is not finished yet, so it is aborted."""
    stream = a_stream(2)
    call(stream.receive, begin(stream), 0, [1, 2]).gives([1, 2])
    call(stream.abort)
    state(stream).gives(([1, 2], "abort", False))


def test_leaving_after_the_end_changes_nothing():
    """A client that has its answer closes the connection, as all do."""
    stream = a_stream(2)
    attempt = begin(stream)
    call(stream.receive, attempt, 0, [1, 2]).gives([1, 2])
    call(stream.finish, attempt, "length", 2).gives(None)
    call(stream.abort).gives(None)
    state(stream).gives(([1, 2], "length", False))


# Replicas that really compute


def next_token(token_ids):
    """A model with greedy sampling: the next token depends on all before it."""
    return random.Random(repr(token_ids)).choice([*range(12), STOP])


def generate(prompt_token_ids, max_tokens, stop_token_ids):
    """A replica's answer."""
    token_ids = []
    while len(token_ids) < max_tokens and not (token_ids and token_ids[-1] in stop_token_ids):
        token_ids.append(next_token([*prompt_token_ids, *token_ids]))
    return token_ids


@pytest.mark.parametrize("case", range(4))
@pytest.mark.parametrize("stop_token_ids", [(), (STOP,)])
def test_a_greedy_stream_has_the_same_tokens_wherever_it_dies(stop_token_ids, case):
    """The replica dies after each number of tokens: the client gets the tokens of a replica that lives."""
    prompt, max_tokens = (*PROMPT, fresh(case)), 12
    wanted = generate(prompt, max_tokens, stop_token_ids)
    for num_tokens in range(len(wanted) + 1):
        stream = FailoverStream("r", prompt, max_tokens, stop_token_ids=stop_token_ids)
        first = begin(stream)
        got = call(stream.receive, first, 0, wanted[:num_tokens]).value
        if call(stream.fail, first).value:
            second = begin(stream, "b")
            its = generate(second.prompt_token_ids, second.max_tokens, stop_token_ids)
            got = [*got, *call(stream.receive, second, 0, its).value]
            call(stream.finish, second, "end", len(its)).gives(None)
        that(f"what the client gets if the first replica dies after {num_tokens} tokens", got).gives(wanted)


@repeatable
@given(data=st.data())
def test_any_network_and_any_deaths(data):
    """Replicas die anywhere, pieces come late, twice or not at all: the client's tokens are those of one replica.

    If the stream was given up, they are the first of them.
    """
    max_tokens = data.draw(st.integers(1, 8), "max_tokens")
    stop_token_ids = data.draw(st.sampled_from([(), (STOP,)]))
    stream = FailoverStream(
        "r", PROMPT, max_tokens, stop_token_ids=stop_token_ids, max_attempts=data.draw(st.integers(1, 4))
    )
    wanted = generate(PROMPT, max_tokens, stop_token_ids)
    got, late = [], []
    while not stream.is_finished:
        if stream.num_attempts > 4:
            raise CheckFailed("attempts of a stream", str(stream.num_attempts), "at most max_attempts")
        attempt = begin(stream, data.draw(st.sampled_from("abc")))
        its = generate(attempt.prompt_token_ids, attempt.max_tokens, stop_token_ids)
        position = 0
        for _ in range(data.draw(st.integers(0, 5), "pieces")):
            start = data.draw(st.integers(0, position + 1), "start")
            piece = its[start : start + data.draw(st.integers(0, 3), "length")]
            late.append((attempt, start, piece))
            if start > position and len(stream.token_ids) < len(wanted):
                call(stream.receive, attempt, start, piece).raises(BrokenStreamError)
                continue
            got += call(stream.receive, attempt, start, piece).value
            position = max(position, min(start + len(piece), len(its)))
            for each in data.draw(st.lists(st.sampled_from(late), max_size=2), "late pieces"):
                if each[0] is not attempt:
                    call(stream.receive, *each).gives([])
        if data.draw(st.booleans(), "it dies"):
            call(stream.fail, attempt).value  # noqa: B018, the state shows the result
        else:
            got += call(stream.receive, attempt, position, its[position:]).value
            call(stream.finish, attempt, "end", len(its)).gives(None)
    that("what the client gets", got).gives(wanted[: len(got)] if stream.finish_reason == "error" else wanted)
    that("token_ids, against what the client got", list(stream.token_ids)).gives(got)
