"""`AsyncEngine` without HTTP, at its worst moments: cancelled at the door, stopped in a long step, its thread dead."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from minicache.engine.async_engine import AsyncEngine
from minicache.engine.llm import LLM
from minicache.engine.sampling import SamplingParams
from minicache.errors import EngineStoppedError, InvariantError, StepFailedError

SECONDS = 60
LONG = SamplingParams(max_tokens=400, ignore_eos=True)


@pytest.fixture
def model(tiny: Any) -> Any:
    return tiny


@pytest.fixture
def llm(model: Any) -> LLM:
    torch.set_num_threads(1)
    return LLM(model, num_blocks=128, prefix_caching=True)


class Gate:
    """Holds the model in its step until it is opened."""

    def __init__(self, model: Any) -> None:
        self.entered, self._may_go = threading.Event(), threading.Event()
        self.num_passes = 0
        model.before = self._wait

    def _wait(self, token_ids: torch.Tensor) -> None:
        self.num_passes += 1
        self.entered.set()
        assert self._may_go.wait(SECONDS)

    async def closed(self) -> None:
        """Until a step waits at it."""
        while not self.entered.is_set():
            await asyncio.sleep(0.001)

    def open(self) -> None:
        self._may_go.set()


def run(work: Callable[[], Awaitable[None]]) -> None:
    """Run it, and see that no task is left."""

    async def run_all() -> None:
        await asyncio.wait_for(work(), SECONDS)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run_all())
    assert not [each for each in threading.enumerate() if each.name == "minicache-engine"]


async def until_idle(engine: AsyncEngine) -> None:
    while engine.num_unfinished or not engine.commands.empty() or engine.llm.has_unfinished:
        await asyncio.sleep(0.001)


def assert_all_is_given_back(engine: AsyncEngine) -> None:
    assert (engine.num_unfinished, engine.streams, engine.llm.answers) == (0, {}, {})
    scheduler = engine.llm.scheduler
    scheduler.check()
    assert scheduler.pool.num_free == scheduler.pool.num_blocks


def test_who_is_cancelled_at_the_door_is_never_computed(llm: LLM, model: Any) -> None:
    """Its command waits behind a long step, and its abort right behind that."""
    gate = Gate(model)

    async def work() -> None:
        async with AsyncEngine(llm) as engine:
            first = await engine.add_request([5, 6], LONG)
            await gate.closed()
            others = [asyncio.create_task(engine.add_request([7, 8, 9], LONG)) for _ in range(5)]
            await asyncio.sleep(0)
            assert engine.num_unfinished == 6
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            assert engine.num_unfinished == 1
            sizes: list[int] = []
            model.after = lambda token_ids, logits: (sizes.append(token_ids.shape[1]), logits)[1]
            gate.open()
            for _ in range(5):
                await anext(first)
            first.close()
            await until_idle(engine)
            assert set(sizes) <= {1, 2}
            assert_all_is_given_back(engine)

    run(work)


def test_a_stream_closed_in_a_long_step_is_aborted_before_the_next(llm: LLM, model: Any) -> None:
    gate = Gate(model)

    async def work() -> None:
        async with AsyncEngine(llm) as engine:
            stream = await engine.add_request([5, 6], LONG)
            await gate.closed()
            stream.close()
            assert engine.num_unfinished == 0
            gate.open()
            await until_idle(engine)
            assert gate.num_passes == 1
            assert_all_is_given_back(engine)

    run(work)


def test_stopping_in_a_long_step_ends_every_stream_at_once(llm: LLM, model: Any) -> None:
    """Readers get the error at once; the thread follows when its step is over."""
    gate = Gate(model)

    async def work() -> None:
        engine = AsyncEngine(llm)
        engine.start()
        stream = await engine.add_request([5, 6], LONG)
        await gate.closed()
        asking = asyncio.create_task(engine.add_request([7], LONG))
        reading = asyncio.create_task(stream.take())
        await asyncio.sleep(0)
        stopping = asyncio.create_task(engine.stop())
        for task in (asking, reading):
            with pytest.raises(EngineStoppedError):
                await task
        with pytest.raises(EngineStoppedError):
            await engine.add_request([5], LONG)
        assert not stopping.done()
        gate.open()
        await stopping
        await engine.stop()  # again does no harm
        assert_all_is_given_back(engine)

    run(work)


@pytest.mark.parametrize("turns", [0, 1, 2])
def test_a_drain_that_is_cancelled_as_the_last_answer_ends(llm: LLM, turns: int) -> None:
    async def work() -> None:
        engine = AsyncEngine(llm)
        engine.all_finished.clear()
        draining = asyncio.create_task(engine.drain(SECONDS))
        await asyncio.sleep(0.01)
        engine.all_finished.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        is_cancelled = draining.cancel()
        await asyncio.wait([draining])
        assert draining.cancelled() == is_cancelled

    run(work)


def test_a_drain_that_is_over_in_time_and_one_that_is_not(llm: LLM, model: Any) -> None:
    gate = Gate(model)

    async def work() -> None:
        async with AsyncEngine(llm) as engine:
            stream = await engine.add_request([5, 6], SamplingParams(max_tokens=3, ignore_eos=True))
            await gate.closed()
            assert not await engine.drain(0.01)
            with pytest.raises(EngineStoppedError):
                await engine.add_request([5], LONG)
            draining = asyncio.create_task(engine.drain(SECONDS))
            gate.open()
            assert [chunk.finish_reason async for chunk in stream] == [None, None, "length"]
            assert await draining

    run(work)


def test_when_the_thread_dies_everybody_is_told(llm: LLM, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(model)

    async def work() -> None:
        async with AsyncEngine(llm) as engine:
            stream = await engine.add_request([5, 6], LONG)
            await gate.closed()
            asking = asyncio.create_task(engine.add_request([7], LONG))
            await asyncio.sleep(0)

            def break_books(request_id: Any) -> bool:
                raise InvariantError("the books do not agree")

            monkeypatch.setattr(llm, "abort_request", break_books)
            engine.commands.put(lambda: llm.abort_request(0))
            gate.open()
            with pytest.raises(EngineStoppedError, match="the books"):
                async for _ in stream:
                    pass
            with pytest.raises(EngineStoppedError, match="the books"):
                async for _ in await asking:
                    pass
            with pytest.raises(EngineStoppedError, match="the books"):
                await engine.add_request([5], LONG)
            assert isinstance(engine.error, InvariantError)
            assert (engine.num_unfinished, engine.streams) == (0, {})
            assert await engine.drain(SECONDS)

    run(work)


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_step_that_fails_once_ends_the_newcomers_only(model: Any, overlaps: bool) -> None:
    """If a step is in flight behind it, that one is not blamed."""
    torch.set_num_threads(1)
    llm = LLM(model, num_blocks=128, prefix_caching=True, async_scheduling=overlaps)
    expected = [each.token_ids for each in llm.generate([[5, 6]], SamplingParams(max_tokens=30, ignore_eos=True))]
    gate = Gate(model)

    async def work() -> None:
        async with AsyncEngine(llm) as engine:
            old = await engine.add_request([5, 6], SamplingParams(max_tokens=30, ignore_eos=True))
            await gate.closed()
            new = asyncio.gather(*(engine.add_request([7, 8, 9], LONG) for _ in range(3)))
            await asyncio.sleep(0)
            fail_when_new(model)
            gate.open()
            for stream in await new:
                with pytest.raises(StepFailedError, match="no newcomers"):
                    await stream.take()
            assert [chunk.token_id async for chunk in old] == expected[0]
            assert_all_is_given_back(engine)

    run(work)


def fail_when_new(model: Any) -> None:
    def raise_if_new(token_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        if (token_ids == 8).any() and token_ids.shape[1] > 3:
            raise RuntimeError("no newcomers")
        return logits

    model.after = raise_if_new


@pytest.mark.parametrize(
    "options",
    [{}, {"preemption": "swap", "num_host_blocks": 32}, {"async_scheduling": True}],
    ids=["recompute", "swap", "async"],
)
def test_clients_that_come_and_go_as_they_like_get_what_they_would_get_alone(model: Any, options: Any) -> None:
    """Few blocks, so they preempt each other; they leave at the door, after a few tokens, or not at all."""
    torch.set_num_threads(1)
    rng = random.Random(1)
    wishes = [
        (
            [rng.randrange(1, 60) for _ in range(rng.randint(1, 40))],
            SamplingParams(
                max_tokens=rng.randint(1, 25),
                temperature=rng.choice((0.0, 1.0)),
                seed=rng.randrange(9),
                n=rng.choice((1, 1, 3)),
                ignore_eos=True,
            ),
        )
        for _ in range(20)
    ]
    alone = LLM(model, num_blocks=64)
    expected = [[each.token_ids for each in alone.generate([prompt], params)] for prompt, params in wishes]
    llm = LLM(model, num_blocks=24, max_num_seqs=12, max_num_batched_tokens=64, prefix_caching=True, **options)

    async def client(engine: AsyncEngine, number: int) -> None:
        for _ in range(rng.randrange(20)):
            await asyncio.sleep(0)
        prompt, params = wishes[number]
        got: list[list[int]] = [[] for _ in range(params.n)]
        num_wanted = rng.choice((None, None, rng.randint(1, 10)))
        with await engine.add_request(prompt, params) as stream:
            async for chunk in stream:
                assert chunk.token_id is not None
                got[chunk.index].append(chunk.token_id)
                if num_wanted is not None and sum(map(len, got)) >= num_wanted:
                    return
        assert got == expected[number]

    async def work() -> None:
        async with AsyncEngine(llm) as engine:
            tasks = [asyncio.create_task(client(engine, number)) for number in range(len(wishes))]
            for task in rng.sample(tasks, 3):
                asyncio.get_running_loop().call_later(rng.random() / 20, task.cancel)
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            assert [each for each in ended if each and not isinstance(each, asyncio.CancelledError)] == []
            await until_idle(engine)
            assert_all_is_given_back(engine)

    run(work)
