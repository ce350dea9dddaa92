"""Phase 10, task 5: server-sent events, and clients that leave: first without a network, then over a real socket."""

from __future__ import annotations

import asyncio
import json

import pytest

from minicache.serving.http.streaming import ClientLeftError, EventStream, sse_event, unless_client_leaves
from minicache_course.checks import call, that
from minicache_course.language import said

# One event


@pytest.mark.parametrize(
    ("data", "event"),
    [
        ('{"text": " saw"}', b'data: {"text": " saw"}\n\n'),
        ("[DONE]", b"data: [DONE]\n\n"),
        ("", b"data: \n\n"),
        ("two\nlines", b"data: two\ndata: lines\n\n"),
        ("two\r\nlines", b"data: two\ndata: lines\n\n"),
        ("two\rlines", b"data: two\ndata: lines\n\n"),
        ("one\n", b"data: one\ndata: \n\n"),
        ("a\n\nb", b"data: a\ndata: \ndata: b\n\n"),
        ("\r\n\r", b"data: \ndata: \ndata: \n\n"),
        ("añ…", "data: añ…\n\n".encode()),
        ("a\u2028b\x0bc\x85d", "data: a\u2028b\x0bc\x85d\n\n".encode()),
        (" data: x", b"data:  data: x\n\n"),
    ],
)
def test_sse_event(data, event):
    """A `data:` line for each line of the data, an empty line, and LF alone. Only CR, LF and CR LF are line breaks."""
    call(sse_event, data).gives(event)


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_events_in_any_pieces(events_of, step):
    """A client that splits at LF, and gets the bytes in pieces of any size, finds the data again."""
    data = ['{"text": "añ"}', "two\nlines", "", "\n", "[DONE]"]
    that("what the client finds", events_of(b"".join(map(sse_event, data)), step)).gives(data)


# A client that leaves


BROKEN = OSError("the connection is broken")  # no ConnectionError: uvicorn's is an OSError of its own


class Channel:
    """What an ASGI server gives an application: `receive` and `send`. The test says what the client does.

    Attributes:
        sent: the messages so far.
        breaks_at: so many messages can be sent, the next raises `error`.
        has_room: `send` waits for it, with the message noted.
    """

    def __init__(self, breaks_at=None, error=BROKEN):
        self.sent, self.breaks_at, self.error, self.has_room = [], breaks_at, error, asyncio.Event()
        self.has_room.set()
        self._coming = asyncio.Queue()

    def comes(self, kind):
        """The server hands the application a message of this type."""
        self._coming.put_nowait({"type": kind})

    async def receive(self):
        return await self._coming.get()

    async def send(self, message):
        if len(self.sent) == self.breaks_at:
            raise self.error
        self.sent.append(message)
        await self.has_room.wait()

    def let(self):
        """What `send` holds goes out; the message after it is held again."""
        self.has_room.set()
        self.has_room = asyncio.Event()

    def pieces(self):
        """The bodies that were sent."""
        return [message["body"] for message in self.sent if message["type"] == "http.response.body"]


def test_the_result_of_the_work_is_returned(scenario):
    """The client stays: the work's result is returned, and no task is left listening."""

    async def main():
        channel = Channel()

        async def work():
            await asyncio.sleep(0)
            return 42

        (await scenario.ask("unless_client_leaves", unless_client_leaves(channel.receive, work()))).gives(42)
        scenario.check_no_task_is_left()

    scenario.run(main)


@pytest.mark.parametrize("kind", ["a task", "a future"])
def test_the_work_may_be_anything_that_can_be_awaited(scenario, kind):
    """The work may have begun already, or be a future that is set elsewhere: its result is returned."""

    async def main():
        channel = Channel()
        work = asyncio.get_running_loop().create_future()
        work.set_result(42)
        if kind == "a task":
            work = asyncio.ensure_future(asyncio.sleep(0, 42))
        (await scenario.ask(f"unless_client_leaves, of {kind}", unless_client_leaves(channel.receive, work))).gives(42)
        scenario.check_no_task_is_left()

    scenario.run(main)


def test_an_error_of_the_work_is_raised(scenario):
    """The work raises: so does the call, and no task is left listening."""

    async def main():
        channel = Channel()

        async def work():
            await asyncio.sleep(0)
            raise ZeroDivisionError("the work's own")

        outcome = await scenario.ask(
            "unless_client_leaves, of failing work", unless_client_leaves(channel.receive, work())
        )
        outcome.raises(ZeroDivisionError, saying="the work's own")
        scenario.check_no_task_is_left()

    scenario.run(main)


def test_work_is_cancelled_when_the_client_leaves(scenario):
    """The client disconnects: ClientLeftError, and by then the work was cancelled, and has cleaned up."""

    async def main():
        channel = Channel()
        log = []

        async def work():
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                log.append("cleared up")

        task = asyncio.ensure_future(unless_client_leaves(channel.receive, work()))
        await scenario.waits("unless_client_leaves", task, "the work is not done, and the client is there")
        for kind in ("http.request", "http.request", "http.response.debug"):
            channel.comes(kind)
            await scenario.waits(f"unless_client_leaves, when {kind!r} comes", task, "the client has not left")
        that("what the work has done", log).gives([])
        channel.comes("http.disconnect")
        outcome = await scenario.wakes("unless_client_leaves, when the client leaves", task)
        outcome.raises(ClientLeftError)
        that("what the work had done when that was raised", log).gives(["cleared up"])
        scenario.check_no_task_is_left()

    scenario.run(main)


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("the client leaves", ClientLeftError),
        ("the caller is cancelled", asyncio.CancelledError),
        ("the client leaves, and the caller is cancelled while the work cleans up", asyncio.CancelledError),
    ],
)
def test_cancelled_work_is_waited_for(scenario, how, error):
    """Cancelled work cleans up for an hour: the call ends when it has, also if its caller is cancelled meanwhile."""

    async def main():
        channel, may_end, log = Channel(), asyncio.Event(), []

        async def work():
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await may_end.wait()
                log.append("cleared up")
                return 42

        called = f"unless_client_leaves, when {how}"
        task = asyncio.ensure_future(unless_client_leaves(channel.receive, work()))
        await scenario.waits("unless_client_leaves", task, "the work is not done, and the client is there")
        if "client" in how:
            channel.comes("http.disconnect")
        else:
            task.cancel()
        await scenario.waits(called, task, "the work was cancelled, and has not ended yet")
        if "while" in how:
            task.cancel()
        scenario.loop.seconds_ahead += 3600.0
        await scenario.waits(called, task, "the work was cancelled, and has not ended yet")
        may_end.set()
        outcome = await scenario.ask(called, task)
        that("what the work has done", log).gives(["cleared up"])
        outcome.raises(error)
        scenario.check_no_task_is_left()

    scenario.run(main)


def test_work_done_as_the_client_leaves_counts(scenario):
    """The work is done in the same iteration as the disconnect: its result counts, or its error."""

    async def main():
        async def work(error=None):
            if error:
                raise error
            return 42

        for error in (None, ZeroDivisionError("the work's own")):
            channel = Channel()
            channel.comes("http.disconnect")
            called = f"unless_client_leaves, work that {said('raises') if error else 'is done'} as the client leaves"
            outcome = await scenario.ask(called, unless_client_leaves(channel.receive, work(error)))
            if error:
                outcome.raises(ZeroDivisionError, saying="the work's own")
            else:
                outcome.gives(42)

    scenario.run(main)


def test_work_is_cancelled_with_its_caller(scenario):
    """The server cancels the caller: the work is cancelled as well, and no task is left."""

    async def main():
        channel = Channel()
        log = []

        async def work():
            try:
                await asyncio.Event().wait()
            finally:
                log.append("cleared up")

        task = asyncio.ensure_future(unless_client_leaves(channel.receive, work()))
        await scenario.waits("unless_client_leaves", task, "the work is not done, and the client is there")
        task.cancel()
        (await scenario.ask("unless_client_leaves, cancelled", task)).raises(asyncio.CancelledError)
        that("what the work has done", log).gives(["cleared up"])
        scenario.check_no_task_is_left()

    scenario.run(main)


# A response of events


class Pieces:
    """A generator of pieces for an `EventStream`, and its `close`; `log` notes what happens to them.

    Args:
        pieces: what it gives; an exception is raised instead.
        let: before each piece it waits for one of these, if there are any.
    """

    def __init__(self, *pieces, let=None):
        self.log, self.num_given = [], 0
        self._pieces, self._let = pieces, let

    async def give(self):
        try:
            for piece in self._pieces:
                if self._let is not None:
                    await self._let.acquire()
                if isinstance(piece, Exception):
                    raise piece
                self.num_given += 1
                yield piece
        finally:
            self.log.append("generator ended")

    def close(self):
        self.log.append("close")

    def start(self, channel):
        """The response, as a task that answers a request."""
        response = EventStream(self.give(), self.close)
        return asyncio.ensure_future(response({"type": "http"}, channel.receive, channel.send))

    def check_closed(self, how):
        """`close` was called, once, and the generator has ended, or never began."""
        __tracebackhide__ = True
        that(f"how often `close` was called, {how}", self.log.count("close")).gives(1)
        if self.num_given:
            that(f"whether the generator has ended, {how}", "generator ended" in self.log).gives(True)


def test_head_then_pieces_then_end(scenario):
    """Head, one body for each piece, and an empty body that is the last."""

    async def main():
        channel, pieces = Channel(), Pieces(b"data: 1\n\n", b"data: 2\n\ndata: 3\n\n")
        (await scenario.ask("an EventStream of two pieces", pieces.start(channel))).gives(None)
        head, *bodies = channel.sent
        that("the first message", (head["type"], head["status"])).gives(("http.response.start", 200))
        kinds = sorted({type(each).__name__ for pair in head["headers"] for each in pair})
        that('the types of header names and values: ASGI wants bytes, as in (b"name", b"value")', kinds).gives(
            ["bytes"]
        )
        headers = {bytes(name).lower(): bytes(value) for name, value in head["headers"]}
        that("content-type", headers.get(b"content-type")).gives(b"text/event-stream; charset=utf-8")
        that("cache-control", headers.get(b"cache-control")).gives(b"no-cache")
        that("x-accel-buffering, without which nginx holds events back", headers.get(b"x-accel-buffering")).gives(b"no")
        that("content-length of a body of unknown length", headers.get(b"content-length")).gives(None)
        got = [(each["type"], each.get("body", b""), each.get("more_body", False)) for each in bodies]
        that("the other messages: type, body, more_body", got).gives(
            [
                ("http.response.body", b"data: 1\n\n", True),
                ("http.response.body", b"data: 2\n\ndata: 3\n\n", True),
                ("http.response.body", b"", False),
            ]
        )
        pieces.check_closed("when all was sent")
        scenario.check_no_task_is_left()

    scenario.run(main)


def test_pieces_are_sent_as_they_come(scenario):
    """Each piece is sent before the next exists: nothing is collected, and the head does not wait for a piece."""

    async def main():
        channel, let = Channel(), asyncio.Semaphore(0)
        pieces = Pieces(b"1", b"2", b"3", let=let)
        task = pieces.start(channel)
        await scenario.until("the head is sent, before there is a piece", lambda: len(channel.sent) == 1, task=task)
        for number in range(3):
            let.release()
            what = f"piece {number + 1} is sent, before there is another"
            await scenario.until(what, lambda number=number: len(channel.sent) >= number + 2, task=task)
        (await scenario.ask("an EventStream of three pieces", task)).gives(None)
        that("the bodies that were sent", channel.pieces()).gives([b"1", b"2", b"3", b""])

    scenario.run(main)


def test_a_slow_client_holds_its_own_pieces_back(scenario):
    """The connection has no room: no piece is requested beyond the one that is being sent."""

    async def main():
        channel = Channel()
        pieces = Pieces(*[b"x"] * 50)
        task = None
        for place, num_pieces in (("the head", 0), ("the first piece", 1)):
            channel.has_room.clear()
            task = task or pieces.start(channel)
            await scenario.until(f"{place} is being sent", lambda n=num_pieces: len(channel.sent) == 1 + n, task=task)
            await scenario.waits(f"an EventStream, while {place} is being sent", task, "the connection has no room")
            that(f"pieces taken from the generator while {place} is being sent", pieces.num_given).gives(num_pieces)
            channel.let()
        channel.has_room.set()
        (await scenario.ask("the same, when the client reads", task)).gives(None)
        that("how many bodies were sent", len(channel.pieces())).gives(51)

    scenario.run(main)


@pytest.mark.parametrize("num_pieces", [0, 1])
def test_a_client_that_leaves_is_no_error(scenario, num_pieces):
    """The client disconnects before the first piece, or after it: no error, no more is sent, `close` is called."""

    async def main():
        channel, let = Channel(), asyncio.Semaphore(num_pieces)
        pieces = Pieces(b"1", b"2", b"3", let=let)
        task = pieces.start(channel)
        await scenario.until("head and pieces are sent", lambda: len(channel.sent) == 1 + num_pieces, task=task)
        await scenario.waits("an EventStream", task, "there is no piece, and the client is there")
        channel.comes("http.disconnect")
        (await scenario.ask("an EventStream whose client leaves", task)).gives(None)
        that("the bodies that were sent", channel.pieces()).gives([b"1", b"2", b"3"][:num_pieces])
        pieces.check_closed("when the client has left")
        scenario.check_no_task_is_left()

    scenario.run(main)


@pytest.mark.parametrize("breaks_at", [0, 1, 3])
def test_a_broken_connection_is_no_error(scenario, breaks_at):
    """Sending raises an OSError, at the head, at a piece or at the end: no error for anybody, `close` is called."""

    async def main():
        channel, pieces = Channel(breaks_at), Pieces(b"1", b"2")
        outcome = await scenario.ask(f"an EventStream, when message {breaks_at} cannot be sent", pieces.start(channel))
        outcome.gives(None)
        pieces.check_closed("when the connection is broken")
        scenario.check_no_task_is_left()

    scenario.run(main)


def test_another_error_of_send_is_raised(scenario):
    """Sending raises what is no OSError, as for a message that ASGI does not allow: that is a bug, and goes through."""

    async def main():
        channel, pieces = Channel(1, RuntimeError("a bug")), Pieces(b"1", b"2")
        outcome = await scenario.ask("an EventStream whose `send` raises a RuntimeError", pieces.start(channel))
        outcome.raises(RuntimeError, saying="a bug")
        pieces.check_closed("when `send` has failed")
        scenario.check_no_task_is_left()

    scenario.run(main)


@pytest.mark.parametrize("error", [ZeroDivisionError("a bug"), OSError("a bug")], ids=["ZeroDivisionError", "OSError"])
def test_a_piece_that_fails(scenario, error):
    """The generator raises: that is an error of the server's, so it goes through, and `close` is called."""

    async def main():
        channel, pieces = Channel(), Pieces(b"1", error, b"2")
        called = f"an EventStream whose generator, not `send`, raises {type(error).__name__}"
        outcome = await scenario.ask(called, pieces.start(channel))
        outcome.raises(type(error), saying="a bug")
        that("the bodies that were sent", channel.pieces()).gives([b"1"])
        pieces.check_closed("when the generator has failed")
        scenario.check_no_task_is_left()

    scenario.run(main)


def test_a_generator_that_fails_when_it_is_closed(scenario):
    """The client disconnects, and the generator's cleanup raises: `close` was called nevertheless."""

    async def main():
        channel, log, let = Channel(), [], asyncio.Semaphore(0)

        async def give():
            await let.acquire()
            try:
                yield b"1"
            finally:
                raise ZeroDivisionError("a bug")

        response = EventStream(give(), lambda: log.append("close"))
        task = asyncio.ensure_future(response({"type": "http"}, channel.receive, channel.send))
        await scenario.until("the head is sent", lambda: channel.sent, task=task)
        channel.has_room.clear()
        let.release()
        await scenario.until("a piece is being sent", lambda: len(channel.sent) == 2, task=task)
        channel.comes("http.disconnect")
        await scenario.ask("an EventStream whose generator cannot be closed", task)
        that("what was called", log).gives(["close"])

    scenario.run(main)


def test_a_cancelled_response_is_closed(scenario):
    """The server cancels the response: `close` is called, and nothing is left running."""

    async def main():
        channel = Channel()
        pieces = Pieces(b"1", b"2", let=asyncio.Semaphore(1))
        task = pieces.start(channel)
        await scenario.until("a piece is sent", lambda: len(channel.sent) == 2, task=task)
        task.cancel()
        (await scenario.ask("an EventStream that is cancelled", task)).raises(asyncio.CancelledError)
        pieces.check_closed("when the response was cancelled")
        scenario.check_no_task_is_left()

    scenario.run(main)


# Over a socket


def text_of(events):
    """The text of a stream's events, which must end with [DONE]."""
    __tracebackhide__ = True
    that("the last event", events[-1]).gives("[DONE]")
    choices = [json.loads(event)["choices"][0] for event in events[:-1]]
    early = {each["finish_reason"] for each in choices[:-1]} - {None}
    that("whether an event before the last has a finish_reason", bool(early)).gives(False)
    return "".join(each["text"] for each in choices)


def test_a_stream_over_a_socket(served):
    """A client that splits at LF gets the tokens of `generate`, each in an event of its own, and [DONE]."""
    client = served.post([1, 2, 3], stream=True).read_head()
    that("the status", client.status).gives(200)
    that("Content-Type", client.headers.get("content-type")).gives("text/event-stream; charset=utf-8")
    that("Content-Length", client.headers.get("content-length")).gives(None)
    events = client.events()
    that("the text of its events", text_of(events)).gives(served.right_text([1, 2, 3]))
    that("how many events, of 6 tokens", len(events)).gives(7)
    served.until_idle()


def test_events_come_one_by_one(served):
    """The event of a token is at the client before the next step is over."""
    served.llm.hold()
    client = served.post([1, 2, 3], stream=True)
    pieces = client.read_head().pieces()
    for number in range(3):
        served.llm.let(1)
        that(f"the beginning of what comes after step {number + 1}", next(pieces)[:6]).gives(b"data: ")


def test_an_answer_without_stream(served):
    """Without `stream` the answer is one body, with a length."""
    client = served.post([1, 2, 3]).read_head()
    that("the status", client.status).gives(200)
    that("the text", client.json()["choices"][0]["text"]).gives(served.right_text([1, 2, 3]))
    served.until_idle()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_closes_its_connection(served, stream):
    """It is aborted: no step is begun with it any more, its blocks are free, and the other client gets its answer."""
    llm = served.llm
    llm.hold()
    stays = served.post([1, 2, 3], stream=True, max_tokens=8)
    served.until("one request is there", lambda: served.engine.num_unfinished == 1)
    leaves = served.post([4] * 30, stream=stream, max_tokens=99)
    served.until("two requests are there", lambda: served.engine.num_unfinished == 2)
    at = len(llm.steps)
    llm.let(3)
    served.until("both are in a step", lambda: any(len(step) == 2 for step in llm.steps[at:]))
    leaves.leave()
    served.until(
        "the slot of the client that left is free", lambda: served.engine.num_unfinished == 1, "1 unfinished answer"
    )
    served.until("a step is held", lambda: len(llm.steps) >= at + 3)
    at = len(llm.steps)
    llm.let_all()
    that("the text of the other", text_of(stays.read_head().events())).gives(served.right_text([1, 2, 3], 8))
    served.until_idle()
    that(
        "steps with more than one request, begun afterwards", [step for step in llm.steps[at:] if len(step) > 1]
    ).gives([])


def test_too_many_requests_get_429(served):
    """2 batch slots and a queue of 1: the fourth gets 429, and Retry-After in whole seconds; three are answered."""
    served.llm.hold()
    clients = [served.post([number], stream=True) for number in (1, 2, 3)]
    served.until("three requests are there", lambda: served.engine.num_unfinished == 3)
    client = served.post([4], stream=True).read_head()
    that("the status of the fourth", client.status).gives(429)
    seconds = client.headers.get("retry-after", "missing")
    that(f"whether its Retry-After, {seconds}, is a whole number", seconds.isdecimal()).gives(True)
    that("its error's code", client.json()["error"]["code"]).gives("queue_full")
    served.llm.let_all()
    for number, each in zip((1, 2, 3), clients, strict=True):
        that(f"the text of client {number}", text_of(each.read_head().events())).gives(served.right_text([number]))
    served.until_idle()


def test_a_client_that_reads_slowly_gets_everything(served):
    """A client does not read: its answer is computed anyway, and so is another's; then it reads all of it."""
    at = len(served.llm.steps)
    slow = served.post([1], stream=True, max_tokens=100)
    served.until("the slow client's request is in a step", lambda: len(served.llm.steps) > at)
    other = served.post([2], stream=True)
    that("the text of the other", text_of(other.read_head().events())).gives(served.right_text([2]))
    served.until_idle()
    that("the text of the slow one", text_of(slow.read_head().events())).gives(served.right_text([1], 100))


def test_a_request_that_breaks_its_step(served):
    """Its stream ends with an event that has an `error`; the next client is served."""
    client = served.post([13], stream=True).read_head()
    *_, event, done = client.events()
    that("the last event", done).gives("[DONE]")
    that("whether the one before has an error", "error" in json.loads(event)).gives(True)
    other = served.post([2], stream=True)
    that("the text of the next", text_of(other.read_head().events())).gives(served.right_text([2]))
    served.until_idle()
