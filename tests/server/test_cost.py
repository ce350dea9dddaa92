"""What one request may cost everyone else: bounds, and long work that does not keep the event loop."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import zmq
from tests.server.test_logprobs_text import PROMPT, Bytes, chunks_of

from minicache.engine.llm import LLM
from minicache.engine.sampling import SamplingParams
from minicache.model import load_minigpt
from minicache.serving.http import answering, bodies, turns
from minicache.serving.http.shapes import ChatShape, CompletionShape, Shape
from minicache.serving.http.shares import QUANTUM, Shares
from minicache.serving.http.turns import Together, Turns
from minicache.serving.replica import client as replica_client
from minicache.serving.replica.client import EngineClient
from minicache.serving.replica.core import EngineCore
from minicache.serving.replica.messages import (
    AbortRequest,
    AddRequest,
    CacheInfo,
    Caught,
    EngineInfo,
    Ready,
    Shutdown,
    StepResult,
    decode_from_engine,
    encode,
)

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Yesterday I"}]


@pytest.fixture(scope="module")
def server(serve_for_module: Any) -> Iterator[Any]:
    with serve_for_module() as running:
        yield running


# The price of a request


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 128, "logprobs": 20, "max_tokens": 500},
        {"n": 128, "logprobs": 20, "max_tokens": 2**31, "stream": True},
        {"prompt": ["Yesterday I"] * 250, "logprobs": 5, "max_tokens": 500},
    ],
    ids=["n", "n, streamed", "prompts"],
)
def test_a_request_that_costs_too_much_is_refused(server: Any, fields: dict[str, Any]) -> None:
    answer = server.complete(**{"prompt": "Yesterday I", **fields})
    assert answer.status == 400
    error = answer.json["error"]
    assert error["code"] == "request_too_costly"
    assert f"at most {answering.MAX_COST:,}" in error["message"]
    assert "lower n, max_tokens or logprobs" in error["message"]


def test_the_price_counts_answers_tokens_and_log_probabilities(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "MAX_COST", 100)
    assert server.complete(max_tokens=100).status == 200
    assert server.complete(max_tokens=101).status == 400
    assert server.complete(n=4, max_tokens=25).status == 200
    assert server.complete(n=5, max_tokens=25).status == 400
    assert server.complete(max_tokens=50, logprobs=0).status == 200
    assert server.complete(max_tokens=51, logprobs=0).status == 400
    assert server.complete(max_tokens=14, logprobs=5).status == 200
    assert server.complete(max_tokens=15, logprobs=5).status == 400
    assert server.complete(prompt=["I", "Yesterday I"], max_tokens=50).status == 200
    assert server.complete(prompt=["I", "Yesterday I"], max_tokens=51).status == 400
    assert server.complete(max_tokens=99, return_token_ids=True).status == 400  # the prompt's are sent too


def test_a_chat_without_a_limit_gets_what_its_price_allows(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "MAX_COST", 100)
    answer = server.ask("POST", CHAT, {"messages": HI, "n": 2, "logprobs": True, "top_logprobs": 3, "ignore_eos": True})
    assert answer.json["usage"]["completion_tokens"] == 2 * (100 // 2 // 5)


# Slices


class Counting(Bytes):
    """Counts the tokens that it decodes."""

    num_calls = 0

    def decode(self, ids: Sequence[int]) -> str:
        self.num_calls += 1
        return super().decode(ids)


@pytest.mark.parametrize("kind", [CompletionShape, ChatShape])
def test_a_long_answer_is_written_in_slices(kind: type[Shape], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minicache.serving.http.shapes.SLICE", 56)
    tokenizer = Counting()
    chunks = chunks_of(list(b"abcdefgh" * 20), [], "length")
    shape = kind("m", tokenizer, num_logprobs=6)  # eight tokens a slice
    shape.continue_prompts([PROMPT, PROMPT])
    tokenizer.num_calls, slices = 0, []
    work = shape.whole([chunks, chunks], len(PROMPT))
    while True:
        try:
            next(work)
        except StopIteration as end:
            body = json.loads(end.value)
            break
        slices.append(tokenizer.num_calls)
        tokenizer.num_calls = 0
    assert len(slices) == 2 * 160 // 8
    assert max(slices) < 8 * 10
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["usage"]["completion_tokens"] == 320


def test_between_two_slices_the_event_loop_turns() -> None:
    """However many there are whose work is long."""

    async def main() -> list[str]:
        happened: list[str] = []
        shared = Turns()

        def work() -> Generator[None, None, str]:
            for _ in range(5):
                happened.append("slice")
                yield
            happened.append("slice")
            return "done"

        async def tick() -> None:
            while True:
                happened.append("turn")
                await asyncio.sleep(0)

        ticking = asyncio.ensure_future(tick())
        assert await asyncio.gather(*(shared.run(work()) for _ in range(8))) == ["done"] * 8
        ticking.cancel()
        return happened

    happened = asyncio.run(main())
    assert happened.count("slice") == 8 * 6
    assert ("slice", "slice") not in pairwise(happened)


def test_between_two_slices_the_event_loop_sleeps_and_other_threads_run() -> None:
    def work(num_slices: int) -> Generator[None, None, None]:
        yield from (None for _ in range(num_slices - 1))

    begun = time.monotonic()
    asyncio.run(Turns().run(work(50)))
    assert time.monotonic() - begun >= 50 * turns.PAUSE_SECONDS


def test_small_pieces_share_a_slice_and_the_event_loop_sleeps_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> list[float]:
        shared, loop, slept = Turns(), asyncio.get_running_loop(), []
        later = loop.call_later

        def call_later(seconds: float, *arguments: Any) -> asyncio.TimerHandle:
            slept.append(seconds)
            return later(seconds, *arguments)

        monkeypatch.setattr(loop, "call_later", call_later)  # of this loop alone: the server's sleeps too
        for _ in range(8):
            async with shared.slice(turns.SLICE // 4):
                pass
        return slept

    assert asyncio.run(main()) == [turns.PAUSE_SECONDS] * 2


def test_work_is_done_once_for_all_who_ask_before_it_begins() -> None:
    counts: list[int] = []

    def work() -> int:
        time.sleep(0.05)
        counts.append(len(counts))
        return counts[-1]

    async def main() -> list[int]:
        together = Together(work)
        first = asyncio.ensure_future(together.result())
        await asyncio.sleep(0.01)  # it has begun
        rest = [asyncio.ensure_future(together.result()) for _ in range(20)]
        await asyncio.sleep(0)
        rest[0].cancel()
        return [await first, *(await asyncio.gather(*rest[1:]))]

    assert asyncio.run(main()) == [0, *[1] * 19]


@pytest.fixture
def slices(monkeypatch: pytest.MonkeyPatch) -> list[Turns]:
    """One for each slice of long work that was begun."""
    begun, entered = [], Turns.slice

    def counted(self: Turns, *size: int) -> Any:
        begun.append(self)
        return entered(self, *size)

    monkeypatch.setattr(Turns, "slice", counted)
    return begun


def test_log_probabilities_are_streamed_in_turns(server: Any, slices: list[Turns]) -> None:
    body = {"stream": True, "n": 4, "logprobs": 20, "max_tokens": 50, "ignore_eos": True}
    answer = server.complete(**body)
    events = answer.events[:-1]
    assert sum(len(event["choices"][0]["logprobs"]["tokens"]) for event in events if event["choices"]) >= 4 * 49
    assert len(slices) >= 4 * 50 * 22 // turns.SLICE
    slices.clear()
    assert server.complete(max_tokens=50, stream=True).status == 200
    assert not slices


def test_an_engine_that_is_faster_than_its_tokens_are_decoded_does_not_keep_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twenty steps have come: a client has each before the next is decoded, if that takes long."""
    monkeypatch.setattr(replica_client, "MIN_PAUSE", 0)
    monkeypatch.setattr(replica_client, "MAX_PAUSE", 0)

    class Engine:
        pid = 0

        def __init__(self, address: str) -> None:
            self.context = zmq.Context()
            self.socket = self.context.socket(zmq.PAIR)
            self.socket.connect(address)
            self.socket.send(encode(Ready(EngineInfo(512, 256, 8, CacheInfo(16, 32, 0, False, 512)))))
            self.has_ended = asyncio.Event()

        def run_twenty_steps(self) -> None:
            self.socket.send(encode(StepResult(accepted=[0])))
            for number in range(20):
                self.socket.send(encode(StepResult(tokens=[(0, 0, number, "length" if number == 19 else None)])))
            time.sleep(0.1)  # in the event loop: they all come meanwhile

        async def wait(self) -> int:
            await self.has_ended.wait()
            return 0

        def kill(self) -> None:
            self.has_ended.set()
            self.context.destroy(linger=0)

    async def main() -> list[int]:
        engines: list[Engine] = []

        async def start(number: int, address: str) -> Engine:
            engines.append(Engine(address))
            return engines[0]

        client = EngineClient(start, None)
        async with client:
            await client.ready()
            asyncio.get_running_loop().call_later(0.01, engines[0].run_twenty_steps)
            stream = await client.add_request([1], SamplingParams(max_tokens=20))
            taken = []
            while chunks := await stream.take():
                taken.append(len(chunks))
            engines[0].has_ended.set()
        return taken

    assert asyncio.run(main()) == [1] * 20


def test_an_engine_is_two_steps_with_log_probabilities_ahead_at_most(tmp_path: Path) -> None:
    """What else comes, it obeys meanwhile, and steps without log probabilities have no such bound."""
    llm = LLM(load_minigpt(), num_blocks=100)
    with zmq.Context() as context, context.socket(zmq.PAIR) as wire:
        wire.bind(f"ipc://{tmp_path}/engine")

        def serve() -> None:
            with context.socket(zmq.PAIR) as there:
                there.connect(f"ipc://{tmp_path}/engine")
                EngineCore(llm, there).run()

        engine = threading.Thread(target=serve)
        engine.start()

        def steps(num_steps: int) -> list[StepResult]:
            """So many with tokens; then none may come."""
            found: list[StepResult] = []
            while wire.poll(10_000 if len(found) < num_steps else 200):
                message = decode_from_engine(wire.recv())
                assert isinstance(message, StepResult)
                found += [message] if message.tokens else []
            return found

        params = SamplingParams(max_tokens=6, ignore_eos=True)
        wire.send(encode(AddRequest(0, [5, 6], params, num_logprobs=3)))
        assert [len(each.logprobs) for each in steps(2)] == [1, 1]
        wire.send(encode(Caught(1)))
        assert len(steps(1)) == 1
        wire.send(encode(AddRequest(1, [5, 6], params)))
        assert steps(0) == []
        wire.send(encode(AbortRequest(0)))
        wire.send(encode(Caught(2)))
        assert [len(each.logprobs) for each in steps(6)] == [0] * 6
        wire.send(encode(Shutdown()))
        engine.join()


# Bodies


def test_brackets_in_strings_are_no_arrays(server: Any) -> None:
    text = "[{" * 2**14 + '\\"'
    answer = server.complete(user=text)
    assert answer.status == 200


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
def test_a_body_of_too_many_arrays_is_refused_and_says_so(server: Any, path: str) -> None:
    body = b'{"x": "' + b"[" * 5 + b'", "y": [' + b"{}," * bodies.MAX_CONTAINERS + b"0]}"
    answer = server.ask("POST", path, body)
    assert answer.status == 400
    assert answer.json["error"]["message"] == "the body has more than 16,384 arrays and objects: send fewer at a time"


def test_a_body_may_be_a_megabyte(server: Any) -> None:
    assert server.complete(user="a" * (2**20 - 200)).status == 200
    assert server.complete(user="a" * 2**20).status == 413


def test_a_large_body_is_parsed_in_a_turn(server: Any, slices: list[Turns]) -> None:
    assert server.complete(stream=True, max_tokens=1).status == 200
    assert len(slices) == 0
    assert server.complete(stream=True, max_tokens=1, user="a" * bodies.SMALL_NBYTES).status == 200
    assert len(slices) == 1


# Shares


def test_a_clients_requests_of_one_size_are_in_their_order() -> None:
    shares = Shares()
    with shares.deadline("a", 50) as first, shares.deadline("a", 50) as second, shares.deadline("a", 50) as third:
        assert first < second < third


def test_another_clients_request_goes_before_the_rest_of_a_hundred() -> None:
    shares = Shares()
    with shares.deadline("a", 50) as first, shares.deadline("a", 50) as second, shares.deadline("b", 50) as other:
        assert first <= other < second


def test_a_small_request_goes_before_a_large_one_of_the_same_client() -> None:
    shares = Shares()
    with shares.deadline("a", 100_000) as large, shares.deadline("a", 50) as small:
        assert small == QUANTUM + 50 < large


def test_a_new_client_does_not_go_before_all_that_were_served_for_long() -> None:
    shares = Shares()
    for _ in range(100):
        with shares.deadline("idle", 10), shares.deadline("a", 1000):
            pass
    with shares.deadline("a", 1000) as first:
        assert first == 1000  # the clock has started again
        for _ in range(100):
            old = shares.deadline("a", 1000)
            with old as last, shares.deadline("new", 1000) as new:
                assert new <= last


def test_a_request_of_another_address_is_not_behind_a_queue(serve: Any, model: Any, gate: threading.Event) -> None:
    """One at a time, and five of one client wait: the one of another is next."""
    server = serve(max_num_seqs=1, prefix_caching=False)
    prompts: list[int] = []  # their lengths, as they are computed

    def before(token_ids: Any) -> None:
        if token_ids.shape[1] > 1:
            prompts.append(token_ids.shape[1])
        gate.wait(60)

    model.before = before

    def ask(prompt: str, address: str) -> None:
        body = {"prompt": prompt, "max_tokens": 3, "ignore_eos": True}
        assert server.ask("POST", "/v1/completions", body, {"X-Forwarded-For": address}).status == 200

    clients = [("Yesterday I", "192.0.2.1")] * 6 + [("Yesterday I did", "192.0.2.2")]
    threads = [threading.Thread(target=ask, args=client) for client in clients]
    for number, thread in enumerate(threads, start=1):
        thread.start()
        server.wait_until(lambda num=number: server.engine.num_unfinished == num)
    gate.set()
    for thread in threads:
        thread.join()
    assert prompts == [2, 3, 2, 2, 2, 2, 2]
