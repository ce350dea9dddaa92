"""`FleetClient` in front of replicas that the tests play: what clients get when replicas die, refuse or are slow."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from minicache.engine.sampling import SamplingParams
from minicache.errors import EngineDiedError, EngineStoppedError, QueueFullError, RequestTooLargeError
from minicache.grammar import Tokenizer
from minicache.serving.http.backend import served_engine
from minicache.serving.replica.fleet import FleetClient, FleetRequest, Piece
from minicache.serving.replica.messages import CacheInfo, EngineInfo
from minicache.serving.replica.stats import DEATH

INFO = EngineInfo(512, 300, 4, CacheInfo(16, 64, 0, True, 512))


def next_token(token_ids: tuple[int, ...]) -> int:
    """The model: a token depends on all tokens before it, so what is left out or comes twice changes the rest."""
    return (sum((at + 1) * token_id for at, token_id in enumerate(token_ids)) + 7) % 250


def greedy(prompt: tuple[int, ...], count: int) -> list[int]:
    token_ids = prompt
    for _ in range(count):
        token_ids += (next_token(token_ids),)
    return list(token_ids[len(prompt) :])


@dataclass
class Replicas:
    """Replicas that answer greedily, a token a piece.

    Attributes:
        deaths: after how many tokens the first attempt dies, the second, …; then none does.
        asked: every request that was sent.
        num_open: answers under way.
        gate: what each token waits for.
        ends_quietly: a death ends the pieces without an error.
    """

    deaths: list[int] = field(default_factory=list)
    asked: list[FleetRequest] = field(default_factory=list)
    num_open: int = 0
    gate: Callable[[], Awaitable[object]] = lambda: asyncio.sleep(0)
    ends_quietly: bool = False
    error: Exception | None = None

    async def send(self, request: FleetRequest) -> AsyncGenerator[Piece, None]:
        number = len(self.asked)
        self.asked.append(request)
        if self.error is not None:
            raise self.error
        dies_after = self.deaths[number] if number < len(self.deaths) else None
        self.num_open += 1
        try:
            name, token_ids, num_given = f"replica-{number}", request.token_ids, 0
            yield Piece(name, [], [])
            while True:
                if num_given == dies_after:
                    if self.ends_quietly:
                        return
                    raise EngineDiedError("killed")
                await self.gate()
                token_ids += (next_token(token_ids),)
                num_given += 1
                is_last = num_given == request.params.max_tokens
                yield Piece(name, [(token_ids[-1], "length" if is_last else None, None)], [])
                if is_last:
                    return
        finally:
            self.num_open -= 1


async def describe() -> EngineInfo:
    return INFO


def client_of(replicas: Replicas, *, max_unfinished: int = 8, tokenizer: Tokenizer | None = None) -> FleetClient:
    return FleetClient(replicas.send, describe, tokenizer, max_unfinished=max_unfinished)


PROMPT = tuple(range(5, 45))


@pytest.mark.parametrize("ends_quietly", [False, True])
@pytest.mark.parametrize("deaths", [[], [0], [5], [19], [5, 0], [3, 4]])
def test_a_client_gets_every_token_once_however_replicas_die(deaths: list[int], ends_quietly: bool) -> None:
    async def ask() -> tuple[list[int | None], str | None, int]:
        replicas = Replicas(deaths, ends_quietly=ends_quietly)
        async with client_of(replicas) as client:
            with await client.add_request(PROMPT, SamplingParams(max_tokens=20)) as stream:
                chunks = [chunk async for chunk in stream]
            assert await client.drain(5)
            assert (client.num_unfinished, replicas.num_open) == (0, 0)
            return [chunk.token_id for chunk in chunks], chunks[-1].finish_reason, client.num_failovers

    assert asyncio.run(ask()) == (greedy(PROMPT, 20), "length", len(deaths))


def test_the_next_replica_is_asked_to_continue_what_was_received() -> None:
    async def ask() -> list[FleetRequest]:
        replicas = Replicas([20])
        async with client_of(replicas) as client:
            with await client.add_request(PROMPT, SamplingParams(max_tokens=30, seed=3), cache_salt="a") as stream:
                _ = [chunk async for chunk in stream]
        return replicas.asked

    first, second = asyncio.run(ask())
    assert (first.token_ids, first.params.max_tokens) == (PROMPT, 30)
    assert (second.token_ids, second.params.max_tokens) == (PROMPT + tuple(greedy(PROMPT, 20)), 10)
    assert len(first.routed.block_hashes), len(second.routed.block_hashes) == (2, 3)
    assert second.routed.block_hashes[:2] == first.routed.block_hashes
    assert second.params.seed != first.params.seed


def test_the_live_page_has_the_replicas() -> None:
    async def ask() -> tuple[bytes, ...]:
        async with client_of(Replicas([5])) as client:
            served = served_engine(client, "minigpt")
            first = await served.picture()
            with await client.add_request(PROMPT, SamplingParams(max_tokens=20)) as stream:
                during = await served.picture()
                _ = [chunk async for chunk in stream]
            await client.drain(5)
            return first, during, await served.picture()

    first, during, after = asyncio.run(ask())
    assert json.loads(first) == {"num_unfinished": 0, "num_failovers": 0, "replicas": []}
    assert json.loads(during)["num_unfinished"] == 1
    told = json.loads(after)
    assert (told["num_unfinished"], told["num_failovers"]) == (0, 1)
    states = [(each["name"], each["has_died"], each["hit_rate"]) for each in told["replicas"]]
    assert states == [("replica-0", True, None), ("replica-1", False, None)]


def test_a_request_that_kills_every_replica_is_given_up() -> None:
    async def ask() -> tuple[list[int | None], str, list[int], list[str]]:
        replicas, dead = Replicas([2] * 9), []
        async with client_of(replicas) as client:
            client.on_stats = lambda number, updates: dead.append(number) if updates == DEATH else None
            with await client.add_request(PROMPT, SamplingParams(max_tokens=20)) as stream:
                chunks = [(await anext(stream)).token_id for _ in range(6)]
                with pytest.raises(EngineDiedError) as raised:
                    await anext(stream)
            assert await client.drain(5)
            return chunks, str(raised.value), dead, list(client.numbers)

    assert asyncio.run(ask()) == (
        greedy(PROMPT, 6),
        "3 replicas died while serving this request",
        [0, 1, 2],
        ["replica-0", "replica-1", "replica-2"],
    )


def test_what_the_engine_refuses_is_raised_and_takes_no_slot() -> None:
    async def ask() -> int:
        async with client_of(Replicas(error=RequestTooLargeError("too long"))) as client:
            with pytest.raises(RequestTooLargeError):
                await client.add_request(PROMPT, SamplingParams(n=3))
            await client.drain(5)
            return client.num_unfinished

    assert asyncio.run(ask()) == 0


def test_several_answers_are_requests_of_their_own() -> None:
    async def ask() -> dict[int, list[int | None]]:
        answers: dict[int, list[int | None]] = {0: [], 1: [], 2: []}
        replicas = Replicas([4])
        async with client_of(replicas) as client:
            with await client.add_request(PROMPT, SamplingParams(max_tokens=9, n=3, seed=5)) as stream:
                assert client.num_unfinished == 3
                async for chunk in stream:
                    answers[chunk.index].append(chunk.token_id)
        assert sorted(asked.params.seed for asked in replicas.asked[:3]) == [5, 6, 7]
        return answers

    assert asyncio.run(ask()) == dict.fromkeys(range(3), greedy(PROMPT, 9))


def test_a_client_that_leaves_ends_its_answers() -> None:
    async def ask() -> None:
        replicas, never = Replicas(), asyncio.Event()
        replicas.gate = never.wait
        async with client_of(replicas) as client:
            stream = await client.add_request(PROMPT, SamplingParams(max_tokens=9, n=2))
            assert (client.num_unfinished, replicas.num_open) == (2, 2)
            stream.close()
            assert await client.drain(5)
            assert replicas.num_open == 0

    asyncio.run(ask())


def test_a_stop_string_ends_the_answer_there_too() -> None:
    tokenizer = Tokenizer()
    prompt = tuple(tokenizer.encode("Yesterday the doctor"))
    text = tokenizer.decode(greedy(prompt, 8))
    stop = text.split()[2]

    async def ask() -> tuple[str, str | None]:
        replicas = Replicas([3])
        async with client_of(replicas, tokenizer=tokenizer) as client:
            with await client.add_request(prompt, SamplingParams(max_tokens=200, stop=stop, ignore_eos=True)) as stream:
                chunks = [chunk async for chunk in stream]
            assert await client.drain(5)
            assert replicas.num_open == 0
        return "".join(chunk.text for chunk in chunks), chunks[-1].finish_reason

    told, reason = asyncio.run(ask())
    assert reason == "stop"
    assert stop not in told
    assert len(told.split()) <= 2


def test_full_draining_and_stopped() -> None:
    async def ask() -> None:
        replicas, never = Replicas(), asyncio.Event()
        replicas.gate = never.wait
        async with client_of(replicas, max_unfinished=3) as client:
            stream = await client.add_request(PROMPT, SamplingParams(n=2))
            with pytest.raises(QueueFullError):
                await client.add_request(PROMPT, SamplingParams(n=2))
            with pytest.raises(ValueError, match="at most 3"):
                await client.add_request(PROMPT, SamplingParams(n=4))
            assert not await client.drain(0.01)
            with pytest.raises(EngineStoppedError):
                await client.add_request(PROMPT, SamplingParams())
            await client.stop()
            with pytest.raises(EngineStoppedError):
                await stream.take()
            assert (client.num_unfinished, replicas.num_open) == (0, 0)

    asyncio.run(ask())
