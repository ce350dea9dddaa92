"""Phase 10, task 2: the thread's loop: commands, a step, its chunks to the event loop. Requests are added by hand."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from minicache.engine.async_engine import AnswerStream
from minicache_course.checks import call, that

PROMPTS = {"a": [1, 2, 3], "b": [7], "c": [5] * 9}


# deliver


@pytest.mark.parametrize("texts", [("", "x"), ("",)])
def test_a_chunk_without_text_is_delivered(scenario, tiny_llm, a_chunk, texts):
    """A token may add no text, half of a character for one. Its chunk reaches the stream: it counts as a token."""

    async def main():
        engine = scenario.new_engine(tiny_llm())
        engine.streams["a"] = stream = AnswerStream("a", 1, lambda stream: None)
        engine.num_unfinished = 1
        engine.call_in_loop = lambda function, *arguments: function(*arguments)
        engine.yield_to_loop = lambda: None
        chunks = [a_chunk(text) for text in texts]
        engine.deliver(chunks)
        stream.put(a_chunk("the next step's"))
        called = f"take() of a stream, after the texts {list(texts)} and then one more were delivered"
        (await scenario.ask(called, stream.take())).gives([*chunks, a_chunk("the next step's")])

    scenario.run(main)


@pytest.mark.parametrize("num_chunks", [0, 1, 3])
def test_deliver_makes_one_call_for_a_step(scenario, tiny_llm, a_chunk, num_chunks):
    """All chunks of a step are one call of the event loop, for which the thread then waits; without chunks neither."""

    async def main():
        engine = scenario.new_engine(tiny_llm())
        engine.streams["a"] = stream = AnswerStream("a", 1, lambda stream: None)
        engine.num_unfinished = 1
        calls = []

        def call_in_loop(function, *arguments):
            calls.append("call_in_loop")
            function(*arguments)

        engine.call_in_loop = call_in_loop
        engine.yield_to_loop = lambda: calls.append("yield_to_loop")  # there is no thread to wait in
        chunks = [a_chunk("x" * (number + 1)) for number in range(num_chunks)]
        call(engine.deliver, chunks).gives(None)
        expected = ["call_in_loop", "yield_to_loop"] if chunks else []
        that(f"what deliver calls, of {num_chunks} chunks", calls).gives(expected)
        if chunks:
            (await scenario.ask("take() of their stream", stream.take())).gives(chunks)

    scenario.run(main)


# dispatch


def test_dispatch_gives_chunks_to_their_streams(scenario, tiny_llm, a_chunk):
    """Each chunk goes to the stream of its request; a finished answer frees its slot, and its time is noted."""

    async def main():
        engine = scenario.new_engine(tiny_llm())
        streams = {name: AnswerStream(name, n, lambda stream: None) for name, n in (("a", 1), ("b", 2))}
        engine.streams.update(streams)
        engine.num_unfinished = 4  # and one that is none of theirs
        before = time.monotonic()
        chunks = {
            "a": [a_chunk("one"), a_chunk("two", "stop")],
            "b": [a_chunk("un", "capacity", request_id="b", index=1), a_chunk("deux", request_id="b")],
        }
        call(engine.dispatch, [chunks["a"][0], chunks["b"][0], chunks["b"][1], chunks["a"][1]]).gives(None)
        told = "engine.streams: the only answer of 'a' has ended, and one of two of 'b'"
        that(told, list(engine.streams)).gives(["b"])
        for name, stream in streams.items():
            (await scenario.ask(f"take() of stream {name!r}", stream.take())).gives(chunks[name])
        that("engine.num_unfinished: of 4 answers, 2 have ended", engine.num_unfinished).gives(2)
        that("how many timestamps finished_at has", len(engine.finished_at)).gives(2)
        engine.dispatch([a_chunk("fin", "stop", request_id="b")])
        that("engine.num_unfinished, when 3 of 4 have ended", engine.num_unfinished).gives(1)
        that("engine.streams, when all answers of both have ended", list(engine.streams)).gives([])
        times = list(engine.finished_at)
        that("how many timestamps finished_at has", len(times)).gives(3)
        seconds = [round(each - before, 6) for each in (*times, time.monotonic())]
        told = f"finished_at is {seconds[:-1]}, in seconds of time.monotonic() since the test began {seconds[-1]} s ago"
        that(
            f"{told}: whether the newest is last, and all lie in between", [0, *seconds] == sorted([0, *seconds])
        ).gives(True)

    scenario.run(main)


def test_the_last_finished_answer_clears_finished_at(scenario, tiny_llm, a_chunk):
    """The last unfinished answer ends: `finished_at` is empty again, or a pause would look like slow service."""

    async def main():
        engine = scenario.new_engine(tiny_llm())
        engine.streams["a"] = AnswerStream("a", 1, lambda stream: None)
        engine.num_unfinished = 1
        engine.dispatch([a_chunk("one", "stop")])
        that("engine.num_unfinished, when the last has ended", engine.num_unfinished).gives(0)
        that("engine.finished_at, when none is unfinished", list(engine.finished_at)).gives([])

    scenario.run(main)


def test_dispatch_drops_a_chunk_without_a_stream(scenario, tiny_llm, a_chunk):
    """A chunk whose client has left meanwhile is dropped: no error, no slot is freed; the others get theirs."""

    async def main():
        engine = scenario.new_engine(tiny_llm())
        engine.streams["a"] = stream = AnswerStream("a", 1, lambda stream: None)
        engine.num_unfinished = 1
        call(engine.dispatch, [a_chunk("gone", "stop", request_id="z"), a_chunk("here")]).gives(None)
        (await scenario.ask("take() of a stream whose chunk was behind the dropped one", stream.take())).gives(
            [a_chunk("here")]
        )
        that("engine.num_unfinished, after the end of a request without a stream", engine.num_unfinished).gives(1)

    scenario.run(main)


# What comes of it


@pytest.mark.parametrize("names", ["a", "abc"])
def test_each_stream_gets_its_tokens(scenario, tiny_llm, params, add_by_hand, all_tokens, right_answers, names):
    """Each stream has the tokens that `LLM.generate` generates for its prompt alone, in order, and ends."""

    async def main():
        engine = scenario.engine(tiny_llm())
        streams = {name: add_by_hand(engine, name, PROMPTS[name], params(seed=ord(name))) for name in names}
        for name, stream in streams.items():
            outcome = await scenario.ask(f"the tokens of stream {name!r}", all_tokens(stream))
            outcome.gives(right_answers(PROMPTS[name], params(seed=ord(name))))
        that("engine.streams, when all have ended", list(engine.streams)).gives([])
        that("engine.num_unfinished, when all have ended", engine.num_unfinished).gives(0)

    scenario.run(main)


def test_two_answers_come_in_one_stream(scenario, tiny_llm, params, add_by_hand, all_tokens, right_answers):
    """A request with n = 2 has one stream, and both answers are in it."""

    async def main():
        engine = scenario.engine(tiny_llm())
        its = params(max_tokens=4, n=2)
        stream = add_by_hand(engine, "a", PROMPTS["a"], its)
        outcome = await scenario.ask("the tokens of a stream with n = 2", all_tokens(stream))
        outcome.gives(right_answers(PROMPTS["a"], its))
        that("engine.num_unfinished, when both have ended", engine.num_unfinished).gives(0)

    scenario.run(main)


def test_each_call_is_made_in_its_own_thread(scenario, tiny_llm, params, add_by_hand, all_tokens):
    """Steps and commands run in the engine's thread; chunks are put into their streams in the event loop's."""

    async def main():
        engine = scenario.engine(tiny_llm())
        ran, put = set(), set()

        class Spy(AnswerStream):
            def put(self, chunk):
                put.add(threading.get_ident())
                super().put(chunk)

        engine.commands.put(lambda: ran.add(threading.get_ident()))
        engine.streams["a"] = stream = Spy("a", 1, lambda stream: None)
        engine.num_unfinished += 1
        engine.commands.put(lambda: engine.llm.add_request([1, 2], params(), request_id="a"))
        await scenario.result("the tokens of a stream", all_tokens(stream))
        here = threading.get_ident()
        that("whether steps run in the event loop's thread", here in engine.llm.threads).gives(False)
        that("whether steps and commands run in one thread", ran == engine.llm.threads).gives(True)
        that("whether chunks are put in the event loop's thread, all of them", put == {here}).gives(True)

    scenario.run(main)


# When commands run


def test_commands_are_run_before_the_step(scenario, tiny_llm, params):
    """Three commands are there, and a request is unfinished: the commands run, in their order, then a step."""

    async def main():
        llm = tiny_llm()
        llm.add_request([1, 2], params(max_tokens=1), request_id="a")
        engine = scenario.new_engine(llm)
        log = []
        for number in range(3):
            engine.commands.put(lambda number=number: log.append((number, len(llm.steps))))
        engine.start()
        await scenario.until("the request is served", lambda: not llm.answers)
        that("commands in order, and how many steps had begun then", log).gives([(0, 0), (1, 0), (2, 0)])

    scenario.run(main)


def test_no_step_for_an_aborted_request(scenario, tiny_llm, params):
    """The only request is aborted by a command that is there: no step is begun for it."""

    async def main():
        llm = tiny_llm()
        llm.add_request([1, 2], params(), request_id="a")
        engine = scenario.new_engine(llm)
        ran = threading.Event()
        engine.commands.put(lambda: llm.abort_request("a"))
        engine.commands.put(ran.set)
        engine.start()
        await scenario.until("the commands have run", ran.is_set)
        engine.commands.put(None)
        await scenario.until("the thread has ended", engine.has_ended.is_set, "that None ends it")
        that("the requests of each step", llm.steps).gives([])
        that("calls of llm.step() with nothing unfinished", llm.num_empty_steps).gives(0)

    scenario.run(main)


def test_commands_are_run_between_two_steps(scenario, tiny_llm, params, add_by_hand):
    """Commands that arrive during a step run when it is over, all of them before the next one begins."""

    async def main():
        llm = tiny_llm()
        llm.hold()
        engine = scenario.engine(llm)
        add_by_hand(engine, "a", [1, 2], params(max_tokens=3))
        await scenario.until("the first step is under way", lambda: len(llm.steps) == 1)
        log = []
        for number in range(2):
            engine.commands.put(lambda number=number: log.append((number, len(llm.steps))))
        add_by_hand(engine, "b", [3], params(max_tokens=2))
        await asyncio.sleep(0)
        that("commands run while the step is in progress", log).gives([])
        llm.let(1)
        await scenario.until("the second step is under way", lambda: len(llm.steps) == 2)
        that("commands in order, and how many steps had begun then", log).gives([(0, 1), (1, 1)])
        that("the requests of each step", llm.steps).gives([["a"], ["a", "b"]])

    scenario.run(main)


def test_chunks_come_with_their_step(scenario, tiny_llm, params, add_by_hand):
    """The chunk of a step is in its stream before the next step is over: tokens are not kept back to the end."""

    async def main():
        llm = tiny_llm()
        llm.hold()
        engine = scenario.engine(llm)
        stream = add_by_hand(engine, "a", [1, 2], params(max_tokens=3))
        for number in range(3):
            llm.let(1)
            chunks = await scenario.result(f"stream.take() after step {number + 1} of 3", stream.take())
            that("chunks that it gave", len(chunks)).gives(1)

    scenario.run(main)


# Nothing to do


def test_an_idle_thread_sleeps(scenario, tiny_llm, counting_queue):
    """Nothing is unfinished: no step is begun, and the thread sleeps until a command arrives, without polling."""

    async def main():
        llm = tiny_llm()
        engine = scenario.new_engine(llm)
        engine.commands = counting_queue()
        ran = threading.Event()
        engine.commands.put(ran.set)
        engine.start()
        await scenario.until("the first command has run", ran.is_set)
        before = llm.num_asks + engine.commands.num_looks
        for _ in range(15):
            await asyncio.sleep(0.01)
        num_looks = llm.num_asks + engine.commands.num_looks - before
        told = "not at all" if num_looks <= 10 else f"{num_looks} times"
        that("how often the idle thread has polled in 0.15 s", told).gives("not at all")
        that("calls of llm.step() by an idle engine, after one command", llm.num_empty_steps).gives(0)

    scenario.run(main)


def test_a_command_wakes_an_idle_thread(scenario, tiny_llm, params, add_by_hand, all_tokens, right_answers):
    """One request, nothing for a while, then another: both are served."""

    async def main():
        engine = scenario.engine(tiny_llm())
        for name in "ab":
            stream = add_by_hand(engine, name, PROMPTS[name], params())
            outcome = await scenario.ask(f"the tokens of stream {name!r}, of an idle engine", all_tokens(stream))
            outcome.gives(right_answers(PROMPTS[name], params()))
            await asyncio.sleep(0.01)

    scenario.run(main)


# The end


def test_none_ends_an_idle_thread(scenario, tiny_llm):
    """The command None ends an idle thread."""

    async def main():
        engine = scenario.engine(tiny_llm())
        engine.commands.put(None)
        await scenario.until("the thread has ended", engine.has_ended.is_set, "that None ends it")

    scenario.run(main)


def test_none_ends_the_thread_after_its_step(scenario, tiny_llm, params, add_by_hand):
    """None arrives during a step: that is the last step, although a request is unfinished and commands wait."""

    async def main():
        llm = tiny_llm()
        llm.hold()
        engine = scenario.engine(llm)
        add_by_hand(engine, "a", [1, 2], params())
        await scenario.until("the first step is under way", lambda: len(llm.steps) == 1)
        ran = []
        engine.commands.put(None)
        engine.commands.put(lambda: ran.append("a command behind None"))
        llm.let_all()
        await scenario.until("the thread has ended", engine.has_ended.is_set, "that None ends it")
        that("the requests of each step", llm.steps).gives([["a"]])
        that("commands that ran after None", ran).gives([])

    scenario.run(main)


# A step that fails


def test_a_failed_step_goes_to_fail_step(scenario, tiny_llm, params, add_by_hand, all_tokens, right_answers):
    """A step's exception goes to `fail_step`, whatever that does; the thread goes on, and serves the others."""

    async def main():
        llm = tiny_llm()
        engine = scenario.new_engine(llm)
        errors = []

        def fail_step(error):  # for task 4's
            errors.append(error)
            llm.abort_request("b")

        engine.fail_step = fail_step
        streams = {name: add_by_hand(engine, name, prompt, params()) for name, prompt in (("a", [1, 2]), ("b", [13]))}
        engine.start()
        outcome = await scenario.ask("the tokens of stream 'a', while 'b' makes a step fail", all_tokens(streams["a"]))
        outcome.gives(right_answers([1, 2], params()))
        that("what fail_step was called with", list(map(type, errors))).gives([ArithmeticError])

    scenario.run(main)


@pytest.mark.parametrize("what", ["a command", "deliver", "a step, with no Exception"])
def test_any_other_error_ends_the_thread(scenario, tiny_llm, params, what):
    """A command raises, or `deliver`: that is no failed step but a bug, so the thread ends, and the error is known.

    A step that raises what is no `Exception` (SystemExit, KeyboardInterrupt) has not failed: the process is to end.
    """

    async def main():
        llm = tiny_llm()
        engine = scenario.new_engine(llm)
        suspected = []

        error = ZeroDivisionError if "step" not in what else KeyboardInterrupt

        def broken(*arguments):
            raise error("a bug")

        engine.fail_step = suspected.append
        if what == "a command":
            engine.commands.put(broken)
        else:
            setattr(engine if what == "deliver" else llm, "deliver" if what == "deliver" else "step", broken)
            llm.add_request([1, 2], params(), request_id="a")
        engine.start()
        that(f"what ends the thread, when {what} raises", await scenario.what_ends(engine)).gives([error])
        that("what fail_step was called with", suspected).gives([])

    scenario.run(main)
