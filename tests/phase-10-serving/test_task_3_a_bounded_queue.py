"""Phase 10, task 3: bounded admission, Retry-After, and a client that disconnects: nothing of its request remains."""

from __future__ import annotations

import asyncio
import time

import pytest

from minicache.engine.async_engine import MAX_RETRY_AFTER, MIN_RETRY_AFTER
from minicache.errors import EngineStoppedError, QueueFullError, RequestTooLargeError, StepFailedError, UnknownWordError
from minicache_course.checks import call, that


async def opened(scenario, engine, prompt, params, **options):
    """A stream that `add_request` must give."""
    __tracebackhide__ = True
    outcome = await scenario.ask(f"add_request({prompt}, n={params.n})", engine.add_request(prompt, params, **options))
    return outcome.value


def check_idle(engine):
    __tracebackhide__ = True
    that("engine.num_unfinished, when no request is unfinished", engine.num_unfinished).gives(0)
    that("engine.streams, when no request is unfinished", list(engine.streams)).gives([])


# Admission


@pytest.mark.parametrize("n", [1, 2])
def test_a_request_gets_its_tokens(scenario, tiny_llm, params, all_tokens, right_answers, n):
    """A request gets a stream with its prompt's length, a slot for each answer, and the tokens of `generate`."""

    async def main():
        engine = scenario.engine(tiny_llm())
        stream = await opened(scenario, engine, [4, 5, 6], params(n=n))
        that("stream.num_prompt_tokens", stream.num_prompt_tokens).gives(3)
        outcome = await scenario.ask("the tokens of the stream", all_tokens(stream))
        outcome.gives(right_answers([4, 5, 6], params(n=n)))
        check_idle(engine)
        stream.close()
        check_idle(engine)

    scenario.run(main)


def test_a_text_prompt_is_counted_in_tokens(scenario, tiny_llm, params):
    """The prompt is a text: the stream's num_prompt_tokens counts tokens, not letters."""

    async def main():
        engine = scenario.engine(tiny_llm())
        stream = await opened(scenario, engine, "Yesterday I saw the cat.", params())
        that("stream.num_prompt_tokens of 'Yesterday I saw the cat.'", stream.num_prompt_tokens).gives(6)
        stream.close()

    scenario.run(main)


def test_twelve_clients_on_four_batch_slots(scenario, tiny_llm, params, all_tokens, right_answers):
    """Twelve clients at once, of which four have batch slots: each gets its own tokens."""

    async def main():
        engine = scenario.engine(tiny_llm())

        async def client(number):
            stream = await engine.add_request([number + 1, 40], params(seed=number))
            return await all_tokens(stream)

        clients = [asyncio.ensure_future(client(number)) for number in range(12)]
        for number, its in enumerate(clients):
            outcome = await scenario.ask(f"the tokens of client {number} of 12", its)
            outcome.gives(right_answers([number + 1, 40], params(seed=number)))
        check_idle(engine)

    scenario.run(main)


def test_options_are_passed_to_the_llm(scenario, tiny_llm, params):
    """`llm.add_request` gets the options, an id that was never used, and the time of arrival."""

    async def main():
        llm = tiny_llm()
        engine = scenario.engine(llm)
        told = []
        add_request = llm.add_request

        def spy(prompt, its, **options):
            told.append(options)
            return add_request(prompt, its, **options)

        llm.add_request = spy
        before = time.monotonic()
        for _ in range(2):
            stream = await opened(scenario, engine, [1], params(), priority=3, cache_salt="x")
            stream.close()
        that("the options that were given", [(each["priority"], each["cache_salt"]) for each in told]).gives(
            [(3, "x")] * 2
        )
        that("different ids of two requests", len({each["request_id"] for each in told})).gives(2)
        times = [before, *(each["arrival_time"] for each in told), time.monotonic()]
        that("whether arrival times are those of time.monotonic(), in order", times == sorted(times)).gives(True)

    scenario.run(main)


@pytest.mark.parametrize("option", ["request_id", "arrival_time"])
def test_request_id_and_arrival_time_are_the_engines(scenario, tiny_llm, params, all_tokens, right_answers, option):
    """A caller's own request_id or arrival_time never replaces the engine's. A TypeError is fine."""

    async def main():
        llm = tiny_llm()
        engine = scenario.engine(llm)
        given = []
        add_request = llm.add_request

        def spy(prompt, its, **options):
            given.append(options[option])
            return add_request(prompt, its, **options)

        llm.add_request = spy
        adding = engine.add_request([1], params(), **{option: -1})
        outcome = await scenario.ask(f"add_request(…, {option}=-1)", adding)
        that(f"whether the LLM is given the caller's {option}", -1 in given).gives(False)
        if outcome.error is not None:
            outcome.raises(TypeError)
        else:
            outcome = await scenario.ask("its tokens", all_tokens(outcome.value))
            outcome.gives(right_answers([1], params()))
        check_idle(engine)

    scenario.run(main)


def test_all_finished_is_cleared_with_the_first_slot(scenario, tiny_llm, params):
    """`all_finished` is set while nothing is unfinished: not from the moment on in which a slot is taken."""

    async def main():
        llm = tiny_llm()
        llm.hold()
        engine = scenario.engine(llm)
        that("engine.all_finished.is_set(), of a new engine", engine.all_finished.is_set()).gives(True)
        coming = asyncio.ensure_future(engine.add_request([1], params()))
        await scenario.until("a slot is taken", lambda: engine.num_unfinished == 1, task=coming)
        that("engine.all_finished.is_set(), with 1 unfinished answer", engine.all_finished.is_set()).gives(False)
        llm.let_all()
        stream = await scenario.result("add_request", coming)
        stream.close()
        that("engine.all_finished.is_set(), when the only client has left", engine.all_finished.is_set()).gives(True)

    scenario.run(main)


def test_arrival_time_is_when_the_client_came(scenario, tiny_llm, params):
    """The time of arrival is when the client came, and not when the thread had time for it, a step later."""

    async def main():
        llm = tiny_llm()
        llm.hold()
        engine = scenario.new_engine(llm)
        await scenario.open_together(engine, ([1], params()))
        await scenario.until("a step is under way", lambda: llm.steps)
        coming = asyncio.ensure_future(engine.add_request([2], params(max_tokens=50)))
        await scenario.waits("add_request during a step", coming, "the thread is in a step")
        came = time.monotonic()
        await asyncio.sleep(0.01)
        llm.let(1)
        stream = await scenario.result("add_request", coming)
        arrival = llm.answers[stream.request_id].request.arrival_time
        that("whether its arrival_time is before the end of the step that it waited for", arrival <= came).gives(True)

    scenario.run(main)


# No slot


@pytest.mark.parametrize(("max_waiting", "slots"), [(0, 2), (1, 3), (3, 5)])
def test_admission_slots_are_bounded(scenario, tiny_llm, params, max_waiting, slots):
    """2 batch slots and max_waiting: so many are admitted, the next is refused at once, in the middle of a step."""

    async def main():
        llm = tiny_llm(max_num_seqs=2)
        llm.hold()
        engine = scenario.new_engine(llm, max_waiting=max_waiting)
        [first] = await scenario.open_together(engine, ([1], params(max_tokens=50)))
        await scenario.until("a step is under way, and held", lambda: llm.steps)
        coming = [asyncio.ensure_future(engine.add_request([2], params())) for _ in range(slots - 1)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        that(f"engine.num_unfinished, of {slots} requests", engine.num_unfinished).gives(slots)
        engine.finished_at.extend([100.0, 107.0])  # enough for an estimate
        called = f"add_request with {slots} of {slots} slots taken"
        outcome = await scenario.ask(called, engine.add_request([3], params()), "a QueueFullError, at once")
        outcome.raises(QueueFullError)
        that("the error's retry_after", outcome.error.retry_after).gives(engine.retry_after())
        that("engine.num_unfinished, after a request was refused", engine.num_unfinished).gives(slots)
        first.close()
        that("engine.num_unfinished, after one of them has left", engine.num_unfinished).gives(slots - 1)
        coming.append(asyncio.ensure_future(engine.add_request([4], params())))
        await asyncio.sleep(0)
        that("engine.num_unfinished, after another has come", engine.num_unfinished).gives(slots)
        llm.let_all()
        for task in coming:
            await scenario.result("add_request of a request that was admitted", task)

    scenario.run(main)


def test_n_answers_take_n_slots(scenario, tiny_llm, params, all_tokens):
    """4 slots: 3 answers of one request leave room for 1, not for 2. Then they finish, and there is room for 4."""

    async def main():
        llm = tiny_llm(max_num_seqs=2)
        engine = scenario.engine(llm, max_waiting=2)
        llm.hold()
        three = asyncio.ensure_future(engine.add_request([1], params(n=3)))
        await asyncio.sleep(0)
        told = "add_request(n=2) with 3 of 4 slots taken by one request, n = 3"
        outcome = await scenario.ask(told, engine.add_request([2], params(n=2)), "a QueueFullError, at once")
        outcome.raises(QueueFullError)
        one = asyncio.ensure_future(engine.add_request([3], params()))
        await asyncio.sleep(0)
        that("engine.num_unfinished, with 3 answers and 1", engine.num_unfinished).gives(4)
        llm.let_all()
        for task in (three, one):
            stream = await scenario.result("add_request of a request that was admitted", task)
            await scenario.result("its tokens", all_tokens(stream))
        check_idle(engine)
        four = await opened(scenario, engine, [4], params(n=4))
        await scenario.result("the tokens of 4 answers", all_tokens(four))
        check_idle(engine)

    scenario.run(main)


@pytest.mark.parametrize("num_unfinished", [0, 4])
def test_more_answers_than_slots_is_a_value_error(scenario, tiny_llm, params, num_unfinished):
    """n = 5 with 4 slots can never be served: a ValueError, taken slots or not: coming back later would not help."""

    async def main():
        engine = scenario.engine(tiny_llm(max_num_seqs=2), max_waiting=2)
        engine.num_unfinished = num_unfinished
        outcome = await scenario.ask(
            f"add_request(n=5), with {num_unfinished} of 4 slots taken", engine.add_request([1], params(n=5))
        )
        outcome.raises(ValueError)
        engine.num_unfinished -= num_unfinished
        check_idle(engine)

    scenario.run(main)


@pytest.mark.parametrize(
    ("times", "num_unfinished", "seconds"),
    [
        ([], 8, MIN_RETRY_AFTER),
        ([100.0], 8, MIN_RETRY_AFTER),
        ([100.0, 103.0], 4, 6.0),
        ([100.0, 101.0, 109.0], 5, 13.5),
        ([100.0, 103.0], 2, 3.0),
        ([100.0, 103.0], 1, 3.0),
        ([100.0, 100.25], 4, MIN_RETRY_AFTER),
        ([100.0, 100.0], 9, MIN_RETRY_AFTER),
        ([100.0, 190.0], 2, MAX_RETRY_AFTER),
        ([100.0, 103.0], 200, MAX_RETRY_AFTER),
    ],
)
def test_retry_after(scenario, tiny_llm, times, num_unfinished, seconds):
    """Answers beyond the batch slots × seconds between two ends; between 1 and 60. 2 batch slots."""

    async def main():
        engine = scenario.new_engine(tiny_llm(max_num_seqs=2))
        engine.finished_at.extend(times)
        engine.num_unfinished = num_unfinished
        outcome = call(engine.retry_after)
        that(f"retry_after(), {num_unfinished} unfinished, ends at {times}", outcome.value).is_close(seconds)

    scenario.run(main)


# Refused by the engine


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ([], ValueError),
        ([1, 10**6], IndexError),
        ("Yesterday I xyzzy", UnknownWordError),
        ([1] * 600, RequestTooLargeError),
    ],
    ids=["empty", "no such token", "unknown word", "too long"],
)
def test_a_request_that_the_llm_refuses_frees_its_slot(scenario, tiny_llm, params, all_tokens, prompt, error):
    """An exception of `llm.add_request` reaches the client, and its slot is free again; the others are served."""

    async def main():
        engine = scenario.engine(tiny_llm(), max_waiting=0)
        for _ in range(engine.max_unfinished + 1):
            outcome = await scenario.ask("add_request of what the LLM refuses", engine.add_request(prompt, params()))
            outcome.raises(error)
            check_idle(engine)
        stream = await opened(scenario, engine, [1], params())
        await scenario.result("the tokens of another request", all_tokens(stream))

    scenario.run(main)


def test_a_draining_or_ended_engine_admits_no_request(scenario, tiny_llm, params):
    """An engine that is draining, or whose thread has ended, refuses, and puts no command."""

    async def main():
        engine = scenario.new_engine(tiny_llm())
        engine.is_draining, engine.num_unfinished = True, engine.max_unfinished
        its = params(n=engine.max_unfinished + 1)
        called = "add_request of more answers than slots, draining and full"
        (await scenario.ask(called, engine.add_request([1], its))).raises(EngineStoppedError)
        engine.num_unfinished = 0
        outcome = await scenario.ask("add_request of an engine that is draining", engine.add_request([1], params()))
        outcome.raises(EngineStoppedError)
        engine.is_draining, engine.error = False, MemoryError("no room")
        outcome = await scenario.ask("add_request of an engine that has ended", engine.add_request([1], params()))
        outcome.raises(EngineStoppedError)
        check_idle(engine)
        that("whether a command was put", not engine.commands.empty()).gives(False)

    scenario.run(main)


# Leaving


@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_is_aborted_before_the_next_step(scenario, tiny_llm, params, all_tokens, right_answers, n):
    """A client leaves during a step: its slots are free at once, the next step is without it, its blocks are free."""

    async def main():
        llm = tiny_llm()
        llm.hold()
        engine = scenario.new_engine(llm)
        requests = ([1, 2], params(max_tokens=8)), ([3] * 20, params(max_tokens=99, n=n))
        stays, leaves = await scenario.open_together(engine, *requests)
        llm.let(1)
        await scenario.until("the second step is under way", lambda: len(llm.steps) == 2)
        that("how many answers are in the second step", len(llm.steps[1])).gives(1 + n)
        before = engine.num_unfinished
        call(leaves.close).gives(None)
        that(
            "slots that are free at once, of a client with n answers that leaves", before - engine.num_unfinished
        ).gives(n)
        that("whether engine.streams has the stream of the client that left", leaves in engine.streams.values()).gives(
            False
        )
        llm.let_all()
        (await scenario.ask("the tokens of the other", all_tokens(stays))).gives(
            right_answers([1, 2], params(max_tokens=8))
        )
        await scenario.until("the thread is idle", lambda: llm.is_clean, "no request is left, and all blocks are free")
        late = [step for step in llm.steps[2:] if leaves.request_id in step]
        that("steps with the request, begun after its client has left", len(late)).gives(0)
        check_idle(engine)

    scenario.run(main)


def test_a_client_cancelled_before_it_is_accepted(scenario, tiny_llm, params):
    """A client's task is cancelled while `add_request` waits for a step: its slot is free, and nothing of it runs."""

    async def main():
        llm = tiny_llm()
        llm.hold()
        engine = scenario.new_engine(llm)
        [first] = await scenario.open_together(engine, ([1], params(max_tokens=99)))
        await scenario.until("a step is under way", lambda: llm.steps)
        coming = asyncio.ensure_future(engine.add_request([2], params(max_tokens=99)))
        await scenario.waits("add_request during a step", coming, "the thread is in a step")
        that("engine.num_unfinished, of two requests", engine.num_unfinished).gives(2)
        coming.cancel()
        (await scenario.ask("add_request, cancelled", coming)).raises(asyncio.CancelledError)
        that("engine.num_unfinished, when one of two has left", engine.num_unfinished).gives(1)
        that("whether engine.streams has the first stream alone", list(engine.streams.values()) == [first]).gives(True)
        first.close()
        llm.let_all()
        await scenario.until("the thread is idle", lambda: llm.is_clean, "no request is left, and all blocks are free")
        ran = {name for step in llm.steps for name in step}
        that("whether only the first request was in a step", ran == {first.request_id}).gives(True)
        check_idle(engine)

    scenario.run(main)


def test_leaving_frees_the_slots_of_unfinished_answers(scenario, tiny_llm, params, a_chunk):
    """One of two answers has finished when the client leaves: one slot was freed then, and one is now."""

    async def main():
        llm = tiny_llm()
        llm.hold()
        engine = scenario.new_engine(llm)
        stream, _ = await scenario.open_together(engine, ([1], params(n=2)), ([2], params(n=2)))
        that("engine.num_unfinished, of two requests with n = 2", engine.num_unfinished).gives(4)
        engine.dispatch([a_chunk("one", "length", request_id=stream.request_id)])
        that("engine.num_unfinished, when one of 4 answers has ended", engine.num_unfinished).gives(3)
        stream.close()
        that("engine.num_unfinished, when the other answer's client has left", engine.num_unfinished).gives(2)

    scenario.run(main)


def test_leave_frees_slots_once(scenario, tiny_llm, params, all_tokens):
    """`leave` of a stream that the engine no longer has frees no slot: not twice, and not after the end."""

    async def main():
        llm = tiny_llm()
        llm.hold()
        engine = scenario.new_engine(llm)
        requests = [([number], params(max_tokens=max_tokens)) for number, max_tokens in ((1, 1), (2, 99), (3, 99))]
        ended, stays, leaves = await scenario.open_together(engine, *requests)
        llm.let(1)
        await scenario.result("the tokens of a stream", all_tokens(ended))
        that("engine.num_unfinished, of two requests", engine.num_unfinished).gives(2)
        leaves.close()
        call(engine.leave, leaves).gives(None)
        call(engine.leave, ended).gives(None)
        that("engine.num_unfinished, when one of two has left, twice", engine.num_unfinished).gives(1)
        told = "whether engine.streams has only the stream of the client that stays"
        that(told, list(engine.streams.values()) == [stays]).gives(True)

    scenario.run(main)


# Failing


def test_fail_ends_streams_and_frees_their_slots(scenario, tiny_llm, params, a_chunk):
    """`fail`: these streams raise the error after their chunks; their slots are free; the others go on."""

    async def main():
        llm = tiny_llm(max_num_seqs=8)
        llm.hold()
        engine = scenario.new_engine(llm)
        requests = [([number], params(n=2)) for number in (1, 2, 3)]
        one, two, three = await scenario.open_together(engine, *requests)
        engine.dispatch([a_chunk("half", "length", request_id=one.request_id)])
        that("engine.num_unfinished, 5 of 6 answers", engine.num_unfinished).gives(5)
        error = StepFailedError("the model broke")
        call(engine.fail, ["unknown", one.request_id, "unknown", two.request_id], error).gives(None)
        that("engine.num_unfinished, when 3 of 5 answers were failed", engine.num_unfinished).gives(2)
        that("whether engine.streams has the third stream alone", list(engine.streams.values()) == [three]).gives(True)
        (await scenario.ask("take() of a failed stream with a chunk", one.take())).gives(
            [a_chunk("half", "length", request_id=one.request_id)]
        )
        for stream in (one, two):
            (await scenario.ask("take() of a failed stream", stream.take())).raises(StepFailedError, "the model broke")
            stream.close()
        told = "whether `fail` has put a command: its caller aborts the requests"
        that(told, not engine.commands.empty()).gives(False)
        engine.fail([one.request_id], error)
        that("engine.num_unfinished, when the clients of those failed have closed", engine.num_unfinished).gives(2)

    scenario.run(main)
