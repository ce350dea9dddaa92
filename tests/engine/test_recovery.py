"""After a step that failed, wherever it failed, the next steps give the tokens that would have come without it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

import pytest

import minicache.engine.kv
from minicache.engine.llm import LLM
from minicache.engine.sampling import SamplingParams
from minicache.grammar import Tokenizer
from minicache.model import MiniGPT
from minicache.request import RequestStatus

SMALL: dict[str, Any] = {"num_blocks": 14, "block_size": 4, "max_num_batched_tokens": 64}
SWAP: dict[str, Any] = SMALL | {"preemption": "swap", "num_host_blocks": 40}
ENGINES: dict[str, dict[str, Any]] = {
    "static": {"scheduler": "static", "num_blocks": 40},
    "continuous": {"scheduler": "continuous", "num_blocks": 40},
    "continuous, dense": {"scheduler": "continuous", "num_blocks": 40, "cache": "dense"},
    "paged": SMALL | {"scheduler": "paged"},
    "paged, dense": SMALL | {"scheduler": "paged", "cache": "dense"},
    "paged, swap": SWAP | {"scheduler": "paged"},
    "paged, prefixes": SMALL | {"scheduler": "paged", "prefix_caching": True},
    "fair": SMALL | {"scheduler": "fair"},
    "fair, swap, prefixes": SWAP | {"scheduler": "fair", "prefix_caching": True},
    "chunked": SMALL | {"max_num_batched_tokens": 7},
    "chunked, dense": SMALL | {"max_num_batched_tokens": 7, "cache": "dense"},
    "chunked, swap, prefixes": SWAP | {"max_num_batched_tokens": 12, "prefix_caching": True},
    "async": SMALL | {"max_num_batched_tokens": 7, "async_scheduling": True},
    "async, swap, prefixes": SWAP | {"max_num_batched_tokens": 12, "prefix_caching": True, "async_scheduling": True},
}


class Failing:
    """A function that raises in some of its calls, before it does anything or after."""

    def __init__(self, function: Callable[..., Any], first: int, every: int, *, after: bool = False) -> None:
        self.function, self.first, self.every, self.after = function, first, every, after
        self.num_calls = self.num_failures = 0

    def __call__(self, *arguments: Any) -> Any:
        self.num_calls += 1
        fails = self.num_calls >= self.first and (self.num_calls - self.first) % self.every == 0
        result = None if fails and not self.after else self.function(*arguments)
        if fails:
            self.num_failures += 1
            raise OSError("the device is gone")
        return result


WHERE = ("schedule", "move_blocks", "run_model", "run_model, after", "sample", "update", "update, after")


def sabotage(llm: LLM, where: str, **options: int) -> Failing:
    name, _, after = where.partition(", ")
    owner: Any = {"schedule": llm.scheduler, "move_blocks": llm.memory, "update": llm.scheduler}.get(name, llm)
    attribute = "update_from_output" if name == "update" else name
    failing = Failing(getattr(owner, attribute), **options, after=bool(after) or name == "schedule")
    setattr(owner, attribute, failing)
    return failing


def serve(llm: LLM, prompts: list[list[int]], wishes: list[SamplingParams]) -> dict[Any, dict[int, list[Any]]]:
    """Serve them by steps, some of which fail: request → index → tokens, and the reason why it has finished."""
    names = [llm.add_request(prompt, params) for prompt, params in zip(prompts, wishes, strict=True)]
    got: dict[Any, dict[int, list[Any]]] = {name: {} for name in names}
    for _ in range(3000):
        if not llm.has_unfinished:
            return got
        try:
            chunks = llm.step()
        except (OSError, KeyboardInterrupt):
            llm.scheduler.check()
            assert llm.scheduler.num_running == 0
            continue
        for chunk in chunks:
            told = got[chunk.request_id].setdefault(chunk.index, [])
            assert chunk.finish_reason is not None or chunk.token_id is not None
            told += [chunk.token_id] if chunk.finish_reason is None else [chunk.token_id, chunk.finish_reason]
    raise AssertionError("it does not come to an end")


def wishes_of(temperature: float) -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=each, temperature=temperature, seed=each, ignore_eos=True, n=1 + (each == 9))
        for each in (12, 9, 5, 14, 7)
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
@pytest.mark.parametrize("engine", ENGINES)
def test_tokens_are_those_of_a_run_without_failures(
    model: MiniGPT, prompts: list[list[int]], engine: str, temperature: float
) -> None:
    wishes = wishes_of(temperature)
    plain = serve(LLM(model, num_blocks=200), prompts[:5], wishes)
    for where in WHERE:
        llm = LLM(model, **ENGINES[engine])
        if where == "update" and temperature and llm.overlap is None:
            continue  # its tokens were drawn already
        failing = sabotage(llm, where, first=3, every=11)
        assert serve(llm, prompts[:5], wishes) == plain, where
        assert failing.num_failures > 1, where
        assert llm.scheduler.pool.num_used == 0
        assert not llm.answers


@pytest.mark.parametrize("what", ["swap_out", "swap_in", "copy_blocks"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_copies_that_fail(
    model: MiniGPT, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, what: str, after: bool
) -> None:
    """Blocks that were not copied are not taken for copied: nothing is swapped in that was never written."""
    llm = LLM(model, **SWAP | {"num_blocks": 200 if what == "copy_blocks" else 14})
    wishes = [
        SamplingParams(max_tokens=14, temperature=1.0, seed=seed, ignore_eos=True, n=3) for seed in range(len(prompts))
    ]
    owner = minicache.engine.kv if what == "copy_blocks" else llm.memory.host_storage  # type: ignore[attr-defined]
    failing = Failing(getattr(owner, what), 1, 3, after=after)
    monkeypatch.setattr(owner, what, failing)
    got = serve(llm, prompts, wishes)
    assert failing.num_failures
    monkeypatch.undo()
    assert got == serve(LLM(model, num_blocks=400), prompts, wishes)


def test_a_request_longer_than_a_step_is_computed_again(model: MiniGPT, prompts: list[list[int]]) -> None:
    """Its prompt fits into a step; with what it has generated it does not, and after a failure it must."""
    for name in ("static", "continuous", "paged", "fair"):
        llm = LLM(model, scheduler=name, num_blocks=64, max_num_batched_tokens=12)  # type: ignore[arg-type]
        failing = sabotage(llm, "run_model", first=15, every=100)
        got = serve(llm, prompts[:3], [SamplingParams(max_tokens=20, ignore_eos=True)] * 3)
        assert failing.num_failures == 1
        assert got == serve(LLM(model), prompts[:3], [SamplingParams(max_tokens=20, ignore_eos=True)] * 3)


@pytest.mark.parametrize("overlaps", [False, True])
def test_an_interrupt_is_recovered_from_too(model: MiniGPT, prompts: list[list[int]], overlaps: bool) -> None:
    """Ctrl-C in the middle of the model, in a notebook."""
    llm = LLM(model, num_blocks=64, async_scheduling=overlaps)
    expected = llm.generate(prompts[:2], SamplingParams(max_tokens=5))
    fine = llm.run_model

    def interrupted(output: Any) -> Any:
        raise KeyboardInterrupt

    llm.run_model = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts[:2], SamplingParams(max_tokens=5))
    llm.run_model = fine  # type: ignore[method-assign]
    assert not llm.has_unfinished
    assert llm.generate(prompts[:2], SamplingParams(max_tokens=5)) == expected


class Interrupts:
    """KeyboardInterrupts in the scheduler's own code, at lines that run there: `first`, 4 · `first`, 9 · `first`, …"""

    def __init__(self, llm: LLM, first: int) -> None:
        self.first, self.num_lines, self.num_raised = first, 0, 0
        for name in ("schedule", "update_from_output"):
            setattr(llm.scheduler, name, partial(self.run, getattr(llm.scheduler, name)))

    def run(self, method: Callable[..., Any], *arguments: Any) -> Any:
        before = sys.gettrace()
        sys.settrace(self.trace)
        try:
            return method(*arguments)
        finally:
            sys.settrace(before)

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and not frame.f_code.co_filename.endswith("restore.py"):
            self.num_lines += 1
            if self.num_lines == self.first * (self.num_raised + 1) ** 2:
                self.num_raised += 1
                raise KeyboardInterrupt
        return self.trace


@pytest.mark.parametrize("engine", [*ENGINES, "drafts"])
def test_an_interrupt_in_the_schedulers_own_code_loses_nothing(
    model: MiniGPT, prompts: list[list[int]], engine: str
) -> None:
    wishes = wishes_of(0)
    plain = serve(LLM(model, num_blocks=200), prompts[:5], wishes)
    drafts = SWAP | {"max_num_batched_tokens": 24, "speculative": "minigpt-draft"}
    for first in range(30, 60, 3):
        llm = LLM(model, **ENGINES.get(engine, drafts))
        interrupts = Interrupts(llm, first)
        assert serve(llm, prompts[:5], wishes) == plain, first
        assert interrupts.num_raised > 5
        llm.scheduler.check()
        assert llm.scheduler.pool.num_used == 0
        assert not llm.answers


def test_a_request_that_outgrew_the_memory_in_the_failed_step_is_told(model: MiniGPT, prompts: list[list[int]]) -> None:
    llm = LLM(model, scheduler="paged", num_blocks=3, block_size=2, max_model_len=200)
    llm.add_request(prompts[0], SamplingParams(max_tokens=99, ignore_eos=True), request_id="a")
    failing = None
    chunks = []
    while llm.has_unfinished:
        if len(chunks) == 3 and failing is None:
            failing = sabotage(llm, "update", first=1, every=100)
        with suppress(OSError):
            chunks += llm.step()
    if failing is None or not failing.num_failures:
        pytest.fail("the step with the end has not failed")
    assert (chunks[-1].token_id, chunks[-1].finish_reason) == (None, "capacity")


@pytest.mark.parametrize("overlaps", [False, True])
def test_log_probabilities_of_recovered_requests(model: MiniGPT, prompts: list[list[int]], overlaps: bool) -> None:
    def run(llm: LLM, **options: int) -> list[Any]:
        failing = sabotage(llm, "run_model", **options) if options else None
        for prompt in prompts[:3]:
            llm.add_request(prompt, SamplingParams(max_tokens=6, ignore_eos=True), num_logprobs=2)
        chunks: dict[Any, list[Any]] = {}
        while llm.has_unfinished:
            try:
                for chunk in llm.step():
                    assert chunk.logprobs is not None
                    assert chunk.logprobs.token_id == chunk.token_id
                    chunks.setdefault(chunk.request_id, []).append([each for each, _ in chunk.logprobs.top])
            except OSError:
                pass
        assert failing is None or failing.num_failures
        return [chunks[each] for each in range(3)]

    failing = LLM(model, num_blocks=64, async_scheduling=overlaps)
    assert run(failing, first=3, every=4) == run(LLM(model, num_blocks=64))


def test_a_tokenizer_that_fails_on_a_finished_request_hangs_no_stream(
    model: MiniGPT, tokenizer: Tokenizer, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a stop string has held back cannot be decoded when the request ends, by capacity and by its length."""
    llm = LLM(model, scheduler="paged", num_blocks=3, block_size=2, max_model_len=200, tokenizer=tokenizer)
    decode, calls = tokenizer.decode, []
    request = llm.add_request(prompts[0], SamplingParams(max_tokens=99, ignore_eos=True))
    answer = llm.answers[request]

    def raise_at_the_end(ids: Any) -> str:
        calls.append(answer.request.status)
        if answer.request.status.is_finished:
            raise RuntimeError("cannot be written")
        return decode(ids)

    monkeypatch.setattr(tokenizer, "decode", raise_at_the_end)
    chunks = []
    while llm.has_unfinished:
        chunks += llm.step()
    assert RequestStatus.FINISHED_CAPACITY in calls
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["error"]
    assert not llm.answers
