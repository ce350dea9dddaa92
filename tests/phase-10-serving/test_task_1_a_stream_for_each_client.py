"""Phase 10, task 1: the stream of one request: chunks in order, the end, an error, and a client that disconnects."""

from __future__ import annotations

import asyncio

import pytest

from minicache.engine.async_engine import AnswerStream
from minicache.errors import StepFailedError
from minicache_course.checks import call, that

BROKEN = StepFailedError("the model broke")


@pytest.fixture
def a_stream():
    """`a_stream(num_answers=1)`: a stream, and the list of streams that have called `leave`."""

    def create(num_answers=1):
        left = []
        return AnswerStream("a", num_answers, left.append), left

    return create


async def read(stream, texts):
    """Read to the end, into a list that also has the chunks before an error."""
    async for chunk in stream:
        texts.append(chunk.text)


def texts(chunks):
    return [chunk.text for chunk in chunks]


# Fetching


def test_take_fetches_all(scenario, a_stream, a_chunk):
    """Three chunks were put: one `take()` gives a list of the three, in their order."""

    async def main():
        stream, _ = a_stream()
        chunks = [a_chunk("the"), a_chunk(" cat"), a_chunk(" saw")]
        for chunk in chunks:
            call(stream.put, chunk).gives(None)
        (await scenario.ask("stream.take() after three chunks", stream.take())).gives(chunks)

    scenario.run(main)


def test_take_waits_for_a_chunk(scenario, a_stream, a_chunk):
    """`take()` waits for a chunk, the first time and again each time when all have been fetched."""

    async def main():
        stream, _ = a_stream()
        for text in ("the", " cat", " saw"):
            taking = asyncio.ensure_future(stream.take())
            await scenario.waits("stream.take() when no chunk is there", taking, "the answer has not ended")
            stream.put(a_chunk(text))
            (await scenario.ask("stream.take(), waiting when a chunk is put", taking)).gives([a_chunk(text)])

    scenario.run(main)


def test_anext_gives_one_chunk_after_the_other(scenario, a_stream, a_chunk):
    """`async for` gives each chunk, waits for those that are not there yet, and ends after the last."""

    async def main():
        stream, _ = a_stream()
        found = []
        stream.put(a_chunk("the"))
        reading = asyncio.ensure_future(read(stream, found))
        await scenario.waits("async for, with one chunk there", reading, "the answer has not ended")
        that("what `async for` has given so far", found).gives(["the"])
        stream.put(a_chunk(" cat"))
        stream.put(a_chunk(" saw"))
        await scenario.waits("async for, when two more chunks were put", reading, "the answer has not ended")
        that("what `async for` has given so far", found).gives(["the", " cat", " saw"])
        stream.put(a_chunk(" her", "length"))
        (await scenario.ask("async for, when the last chunk was put", reading)).gives(None)
        that("what `async for` has given", found).gives(["the", " cat", " saw", " her"])

    scenario.run(main)


def test_anext_and_take_in_turns(scenario, a_stream, a_chunk):
    """`anext()` fetches one chunk; the others stay, and `take()` finds them."""

    async def main():
        stream, _ = a_stream()
        for text in ("the", " cat", " saw"):
            stream.put(a_chunk(text))
        (await scenario.ask("anext(stream) of three chunks", stream.__anext__())).gives(a_chunk("the"))
        (await scenario.ask("stream.take() after that", stream.take())).gives([a_chunk(" cat"), a_chunk(" saw")])

    scenario.run(main)


def test_a_cancelled_take_loses_no_chunk(scenario, a_stream, a_chunk):
    """A `take()` that is cancelled while it waits loses nothing: the next one returns the chunk."""

    async def main():
        stream, _ = a_stream()
        taking = asyncio.ensure_future(stream.take())
        await scenario.waits("stream.take() when no chunk is there", taking, "the answer has not ended")
        taking.cancel()
        await asyncio.wait({taking})
        stream.put(a_chunk("the"))
        (await scenario.ask("stream.take() after one that was cancelled", stream.take())).gives([a_chunk("the")])

    scenario.run(main)


def test_take_gives_all_that_came_meanwhile(scenario, a_stream, a_chunk):
    """2,000 chunks are stored in order without a reader; `put()` never waits for one."""

    async def main():
        stream, _ = a_stream()
        for number in range(2000):
            stream.put(a_chunk(str(number)))
        chunks = await scenario.result("stream.take() after 2,000 chunks", stream.take())
        that("the texts of the chunks that it gave", texts(chunks)).gives([str(number) for number in range(2000)])

    scenario.run(main)


@pytest.mark.parametrize("how", ["take", "anext"])
def test_put_wakes_the_reader(scenario, a_stream, a_chunk, how):
    """A waiting reader is woken by `put()`, at once: it does not poll."""

    async def main():
        stream, _ = a_stream()
        task = asyncio.ensure_future(stream.take() if how == "take" else stream.__anext__())
        await scenario.waits(f"{how}() of a new stream", task, "nothing has come")
        stream.put(a_chunk("the"))
        outcome = await scenario.wakes(f"{how}(), waiting when a chunk is put", task)
        outcome.gives([a_chunk("the")] if how == "take" else a_chunk("the"))

    scenario.run(main)


@pytest.mark.parametrize("what", ["put", "fail"])
def test_no_wake_up_is_lost(scenario, a_stream, a_chunk, what):
    """A chunk, or an error, may come at any moment after `take()` has begun: whenever it comes, the reader wakes up."""

    async def main():
        for num_turns in range(6):
            stream, _ = a_stream()
            task = asyncio.ensure_future(stream.take())
            for _ in range(num_turns):
                await asyncio.sleep(0)
            if what == "put":
                stream.put(a_chunk("the"))
            else:
                stream.fail(BROKEN)
            called = f"take(), {num_turns} iterations of the event loop before {what}()"
            outcome = await scenario.wakes(called, task)
            if what == "put":
                outcome.gives([a_chunk("the")])
            else:
                outcome.raises(StepFailedError)

    scenario.run(main)


# The end


@pytest.mark.parametrize("reason", ["stop", "length", "capacity"])
def test_nothing_comes_after_the_last_chunk(scenario, a_stream, a_chunk, reason):
    """After the last chunk `take()` returns [], however often it is called, and `async for` ends."""

    async def main():
        stream, left = a_stream()
        stream.put(a_chunk("the"))
        stream.put(a_chunk(" end", reason))
        that(f"stream.num_unfinished after a chunk whose finish_reason is {reason!r}", stream.num_unfinished).gives(0)
        that("texts that take() gives", texts(await scenario.result("stream.take()", stream.take()))).gives(
            ["the", " end"]
        )
        for _ in range(2):
            (await scenario.ask("stream.take() when the answer has ended", stream.take())).gives([])
        (await scenario.ask("anext(stream) when the answer has ended", stream.__anext__())).raises(StopAsyncIteration)
        stream.close()
        that("what `leave` was called with, by close() after the end", left).gives([])

    scenario.run(main)


def test_a_stream_of_two_answers_ends_with_the_second(scenario, a_stream, a_chunk):
    """One of two answers is finished: the stream goes on until the other is, too."""

    async def main():
        stream, left = a_stream(num_answers=2)
        stream.put(a_chunk("one", "length", index=0))
        that("stream.num_unfinished, when one of two answers has ended", stream.num_unfinished).gives(1)
        (await scenario.ask("stream.take()", stream.take())).gives([a_chunk("one", "length", index=0)])
        taking = asyncio.ensure_future(stream.take())
        await scenario.waits("stream.take() when one of two answers has ended", taking, "the other goes on")
        stream.put(a_chunk("two", index=1))
        (await scenario.ask("stream.take(), waiting", taking)).gives([a_chunk("two", index=1)])
        stream.put(a_chunk("!", "stop", index=1))
        that("stream.num_unfinished, when both have ended", stream.num_unfinished).gives(0)
        (await scenario.ask("stream.take()", stream.take())).gives([a_chunk("!", "stop", index=1)])
        (await scenario.ask("stream.take() when both have ended", stream.take())).gives([])
        that("what `leave` was called with", left).gives([])

    scenario.run(main)


# An error


@pytest.mark.parametrize("reason", [None, "stop"])
def test_an_error_comes_after_the_chunks(scenario, a_stream, a_chunk, reason):
    """The stream is failed while two chunks wait: `take()` returns these first, and then raises the error."""

    async def main():
        stream, left = a_stream()
        stream.put(a_chunk("the"))
        stream.put(a_chunk(" cat", reason))
        call(stream.fail, BROKEN).gives(None)
        outcome = await scenario.ask("stream.take(), of a failed stream with two chunks", stream.take())
        outcome.gives([a_chunk("the"), a_chunk(" cat", reason)])
        for number in (1, 2):
            called = f"stream.take(), of a failed stream whose chunks are fetched, call {number} of 2"
            outcome = await scenario.ask(called, stream.take(), "a StepFailedError, each time")
            outcome.raises(StepFailedError, saying="the model broke")
        stream.close()
        that("what `leave` was called with, by close() of a failed stream", left).gives([])

    scenario.run(main)


def test_async_for_raises_the_error(scenario, a_stream, a_chunk):
    """`async for` gives the chunks that came before the error, and then raises it: it must not just end."""

    async def main():
        stream, _ = a_stream()
        found = []
        stream.put(a_chunk("the"))
        stream.put(a_chunk(" cat"))
        stream.fail(BROKEN)
        outcome = await scenario.ask("async for, of a failed stream with two chunks", read(stream, found))
        outcome.raises(StepFailedError, saying="the model broke")
        that("what `async for` has given before", found).gives(["the", " cat"])

    scenario.run(main)


@pytest.mark.parametrize("how", ["take", "anext", "accepted"])
def test_an_error_wakes_the_reader(scenario, a_stream, how):
    """A reader that waits for a chunk, or for the request to be accepted, is woken by an error, and raises it."""

    async def main():
        stream, _ = a_stream()
        waiting = {"take": stream.take, "anext": stream.__anext__, "accepted": stream.accepted}[how]
        task = asyncio.ensure_future(waiting())
        await scenario.waits(f"{how}() of a new stream", task, "nothing has come")
        stream.fail(BROKEN)
        outcome = await scenario.ask(f"{how}(), waiting when the stream is failed", task)
        outcome.raises(StepFailedError, saying="the model broke")

    scenario.run(main)


# Leaving


def test_close_calls_leave_once(scenario, a_stream, a_chunk):
    """`close()` of an unfinished stream calls `leave` with it, once; a second `close()` does nothing."""

    async def main():
        stream, left = a_stream()
        stream.put(a_chunk("the"))
        call(stream.close).gives(None)
        that("how often `leave` was called with this stream, after close()", left.count(stream)).gives(1)
        stream.close()
        that("how often `leave` was called, after another close()", len(left)).gives(1)
        (await scenario.ask("stream.take() of a closed stream", stream.take())).gives([])
        (await scenario.ask("anext(stream) of a closed stream", stream.__anext__())).raises(StopAsyncIteration)

    scenario.run(main)


@pytest.mark.parametrize("first", ["close", "fail"])
def test_a_closed_stream_raises_no_error(scenario, a_stream, a_chunk, first):
    """A stream is closed and failed, in either order: the client has gone, so `take()` returns [] without an error."""

    async def main():
        stream, _ = a_stream()
        stream.put(a_chunk("the"))
        if first == "close":
            stream.close()
            stream.fail(BROKEN)
        else:
            stream.fail(BROKEN)
            stream.close()
        (await scenario.ask("stream.take(), closed and failed", stream.take())).gives([])
        (await scenario.ask("anext(stream), closed and failed", stream.__anext__())).raises(StopAsyncIteration)

    scenario.run(main)


def test_close_with_one_of_two_answers_unfinished(scenario, a_stream, a_chunk):
    """One of two answers is finished: `close()` calls `leave` for the other."""

    async def main():
        stream, left = a_stream(num_answers=2)
        stream.put(a_chunk("one", "length", index=0))
        stream.close()
        that("how often `leave` was called, with one answer unfinished", len(left)).gives(1)

    scenario.run(main)


@pytest.mark.parametrize("how", ["take", "anext"])
def test_close_wakes_the_reader(scenario, a_stream, how):
    """Another task waits for a chunk when the stream is closed: it wakes up and gets none."""

    async def main():
        stream, _ = a_stream()
        task = asyncio.ensure_future(stream.take() if how == "take" else stream.__anext__())
        await scenario.waits(f"{how}() of a new stream", task, "nothing has come")
        stream.close()
        outcome = await scenario.ask(f"{how}(), waiting when the stream is closed", task)
        if how == "take":
            outcome.gives([])
        else:
            outcome.raises(StopAsyncIteration)

    scenario.run(main)


def test_leaving_a_with_block_closes_the_stream(scenario, a_stream, a_chunk):
    """A `with` block that is left by a task that is cancelled closes the stream: `close` is no coroutine."""

    async def main():
        stream, left = a_stream()

        async def client():
            with stream:
                await stream.take()

        task = asyncio.ensure_future(client())
        await scenario.waits("stream.take() in a `with` block", task, "nothing has come")
        task.cancel()
        outcome = await scenario.ask("a cancelled task in a `with` block", task)
        outcome.raises(asyncio.CancelledError)
        that("how often `leave` was called", len(left)).gives(1)

    scenario.run(main)
