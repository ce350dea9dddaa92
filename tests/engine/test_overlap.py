"""Asynchronous scheduling in the engine: it overlaps, and gives the tokens of the synchronous engine, whatever happens.

`test_recovery.py` has what fails where, for this engine too.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from minicache.cache.quantized import KV_CACHE_DTYPES
from minicache.engine.beam import BeamSearchParams
from minicache.engine.beam_requests import beam_search
from minicache.engine.kv import PagedMemory
from minicache.engine.llm import LLM
from minicache.engine.runners.gpu import GPUModelRunner, eagerly
from minicache.engine.sampling import SamplingParams
from minicache.grammar import Tokenizer
from minicache.kernels import cpu
from minicache.model import MiniGPT, load_minigpt
from minicache.scheduler import AsyncChunkedScheduler, ChunkedPrefillScheduler, SchedulerOutput
from minicache.scheduler.audit_async import AsyncAuditor
from minicache.scheduler.observe import Observer

SECONDS = 60
PROMPTS = ("Yesterday I", "She", "Did the children read the book yesterday? Yes, they", "The", "Later my sister")
GREEDY = SamplingParams(max_tokens=9, ignore_eos=True)
OutOfOrder = type("OutOfOrder", (Exception,), {})


def overlapping(model: Any, *observers: Observer, **options: Any) -> LLM:
    """An engine that overlaps, under the auditor."""
    return LLM(model, observers=[AsyncAuditor(), *observers], async_scheduling=True, **{"num_blocks": 64} | options)


# It overlaps


class Schedules(Observer):
    """Tells that a step was scheduled while the model ran."""

    def __init__(self) -> None:
        self.is_running, self.has_scheduled = threading.Event(), threading.Event()

    def on_schedule(self, *_: Any) -> None:
        if self.is_running.is_set():
            self.has_scheduled.set()


def test_the_next_step_is_scheduled_while_the_model_runs(model: MiniGPT, prompts: list[list[int]]) -> None:
    """The model of the first step returns only after the second step was scheduled."""
    schedules = Schedules()
    llm = overlapping(model, schedules)
    fine = llm.run_model

    def run_model(output: SchedulerOutput) -> Any:
        schedules.is_running.set()
        assert schedules.has_scheduled.wait(SECONDS)
        return fine(output)

    llm.run_model = run_model  # type: ignore[method-assign]
    llm.add_request(prompts[0], GREEDY)
    assert llm.step() == []
    assert schedules.is_running.wait(SECONDS)
    (chunk,) = llm.step()
    assert [chunk.token_id] == LLM(model).generate(prompts[:1], SamplingParams(max_tokens=1))[0].token_ids


def test_has_unfinished_until_the_last_step_is_over(model: MiniGPT, prompts: list[list[int]]) -> None:
    """A client leaves, and the step that has its request is still in flight."""
    llm = overlapping(model)
    name = llm.add_request(prompts[0], GREEDY)
    llm.step()
    assert llm.abort_request(name)
    assert (llm.scheduler.has_unfinished, llm.has_unfinished) == (False, True)
    assert llm.step() == []
    assert not llm.has_unfinished
    assert llm.scheduler.outstanding is None


def test_generate_leaves_no_step_in_flight(model: MiniGPT, prompts: list[list[int]]) -> None:
    llm = overlapping(model)
    stop = LLM(model).generate(prompts[:1], GREEDY)[0].token_ids[3]
    (answer,) = llm.generate(prompts[:1], SamplingParams(max_tokens=9, stop_token_ids=[stop]))
    assert (len(answer.token_ids), answer.finish_reason) == (4, "stop")
    assert not llm.has_unfinished
    stream = llm.stream(prompts[:2], GREEDY)
    next(stream)
    stream.close()
    assert not llm.has_unfinished


# The same tokens


@pytest.mark.parametrize("held", [None, *KV_CACHE_DTYPES])
@pytest.mark.parametrize("has_kernels", [True, False], ids=["runner", "loop"])
def test_the_same_tokens(
    model: MiniGPT, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, held: Any, has_kernels: bool
) -> None:
    """By the CPU's runner, and by the loop's own `run_model`; in chunks, with too few blocks."""
    if not has_kernels:
        monkeypatch.setattr(cpu, "why_unavailable", lambda: "numba is away for the test of overlap")
    llm = overlapping(model, kv_cache_dtype=held, num_blocks=10, block_size=4, max_num_batched_tokens=7)
    assert llm.generate(prompts, GREEDY) == LLM(model, kv_cache_dtype=held).generate(prompts, GREEDY)


def test_the_same_tokens_by_a_gpus_runner(model: MiniGPT, prompts: list[list[int]]) -> None:
    """Padded decode steps and packed ones, here on a CPU; sampled by its own sampler."""
    params = [SamplingParams(max_tokens=9, ignore_eos=True, temperature=each % 2, seed=each) for each in range(8)]
    found = []
    for llm in (LLM(model, num_blocks=64), overlapping(model, max_num_batched_tokens=16)):
        assert isinstance(llm.memory, PagedMemory)
        llm.runner = GPUModelRunner(model, llm.memory, 256, eagerly)
        found.append(llm.generate(prompts, params))
    assert found[0] == found[1]


def test_log_probabilities(model: MiniGPT, prompts: list[list[int]]) -> None:
    """Of some of the requests, each chunk has its own."""
    found = []
    for llm in (LLM(model, num_blocks=64), overlapping(model)):
        for number, prompt in enumerate(prompts):
            llm.add_request(prompt, GREEDY, num_logprobs=3 if number % 2 else None)
        chunks: dict[Any, list[Any]] = {}
        while llm.has_unfinished:
            for chunk in llm.step():
                its = chunk.logprobs
                assert its is None or its.token_id == chunk.token_id
                chunks.setdefault(chunk.request_id, []).append(its and (its.token_id, [id for id, _ in its.top]))
        found.append(chunks)
    assert found[0] == found[1]
    assert [each[0] is None for each in found[1].values()] == [number % 2 == 0 for number in range(len(prompts))]


def test_an_id_that_is_used_again_at_once(model: MiniGPT, prompts: list[list[int]]) -> None:
    """The token of its old request, which the step in flight still picks, does not reach the new one."""
    llm = overlapping(model)
    llm.add_request(prompts[0], GREEDY, request_id="a")
    llm.step()
    llm.step()
    llm.abort_request("a")
    llm.add_request(prompts[1], GREEDY, request_id="a")
    tokens = []
    while llm.has_unfinished:
        tokens += [chunk.token_id for chunk in llm.step()]
    assert tokens == LLM(model).generate(prompts[1:2], GREEDY)[0].token_ids


def test_blocks_of_a_request_that_fails_while_another_finds_them(model: MiniGPT, prompts: list[list[int]]) -> None:
    """Its logits are no numbers. The other one was scheduled before that was known; it computes the beginning again."""
    shared = prompts[2]
    spoilt = 1 + max(*shared, *LLM(model).generate([shared], GREEDY)[0].token_ids)
    (expected,) = LLM(model).generate([shared], GREEDY)
    llm = overlapping(model, block_size=4, prefix_caching=True)
    fine, storage = llm.run_model, llm.storage
    assert storage is not None

    def run_model(output: SchedulerOutput) -> Any:
        logits = fine(output)
        for row, request in enumerate(output.scheduled):
            if spoilt in request.token_ids(request.num_computed_tokens, request.num_tokens):
                logits = logits.clone().index_fill_(0, torch.tensor([row]), torch.nan)
                for layer in range(model.config.num_layers):
                    storage.k(layer)[request.block_ids] = torch.nan
        return logits

    llm.run_model = run_model  # type: ignore[method-assign]
    bad = llm.add_request([*shared, spoilt], GREEDY)
    chunks = llm.step()
    good = llm.add_request(shared, GREEDY)
    while llm.has_unfinished:
        chunks += llm.step()
    assert [each.finish_reason for each in chunks if each.request_id == bad] == ["error"]
    assert [each.token_id for each in chunks if each.request_id == good] == expected.token_ids


def test_beam_search_commits_each_step_before_the_next(model: MiniGPT, prompts: list[list[int]]) -> None:
    params = BeamSearchParams(3, 8)
    llm = overlapping(model)
    assert beam_search(llm, prompts, params) == beam_search(LLM(model, num_blocks=64), prompts, params)
    assert llm.generate(prompts, GREEDY) == LLM(model).generate(prompts, GREEDY)


# Refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheduler": "fair"}, "the scheduler 'fair' cannot schedule .* take \"chunked\""),
        ({"cache": "dense"}, 'take "paged"'),
        ({"tensor_parallel_size": 2}, "leave out tensor_parallel_size or async_scheduling"),
        ({"speculative": "ngram"}, "leave out speculative or async_scheduling"),
        ({"scheduler": ChunkedPrefillScheduler(num_blocks=8)}, "ChunkedPrefillScheduler cannot schedule"),
    ],
    ids=["scheduler", "dense", "several processes", "drafts", "a scheduler"],
)
def test_what_does_not_go_together(model: MiniGPT, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(model, async_scheduling=True, **options)


def test_a_scheduler_of_ones_own(model: MiniGPT, prompts: list[list[int]]) -> None:
    llm = LLM(model, scheduler=AsyncChunkedScheduler(num_blocks=64), async_scheduling=True)  # type: ignore[arg-type]
    assert llm.generate(prompts, GREEDY) == LLM(model).generate(prompts, GREEDY)


# At random

PARAMS = (
    SamplingParams(max_tokens=1),
    SamplingParams(max_tokens=14, ignore_eos=True),
    SamplingParams(max_tokens=9, ignore_eos=True, temperature=0.9, seed=1),
    SamplingParams(max_tokens=14, stop=(" the", ".")),
    SamplingParams(max_tokens=14, temperature=0.9, seed=2, stop=("e ",)),
    SamplingParams(max_tokens=14, ignore_eos=True, stop_token_ids=range(1, 346, 9)),
    SamplingParams(max_tokens=6, temperature=0.9, seed=3, n=3),
    SamplingParams(max_tokens=3, temperature=0.9, seed=4, n=2, stop_token_ids=range(1, 346, 5)),
)


@cache
def shared_model() -> MiniGPT:
    return load_minigpt()


@cache
def answers_without_overlap(prompt: int, params: int) -> list[tuple[list[int], str, str]]:
    """The synchronous engine's answers: tokens, text and reason of each."""
    llm = LLM(shared_model(), tokenizer=Tokenizer(), num_blocks=200)
    answers = llm.generate([PROMPTS[prompt]], PARAMS[params])
    return [(answer.token_ids, answer.text, answer.finish_reason) for answer in answers]


class Overlapping(RuleBasedStateMachine):
    """Requests arrive, leave and finish, steps fail in the scheduler, in the worker and at the commit."""

    @initialize(
        num_blocks=st.sampled_from([10, 12, 16, 64]),
        max_num_seqs=st.sampled_from([1, 3, 8]),
        max_num_batched_tokens=st.sampled_from([5, 9, 64]),
        num_host_blocks=st.sampled_from([0, 0, 3, 20]),
        prefix_caching=st.booleans(),
    )
    def begin(self, num_host_blocks: int, **options: Any) -> None:
        torch.set_num_threads(1)
        swap = {"preemption": "swap", "num_host_blocks": num_host_blocks} if num_host_blocks else {}
        self.llm = overlapping(shared_model(), tokenizer=Tokenizer(), block_size=4, **options, **swap)
        self.wanted: dict[Any, tuple[int, int]] = {}
        self.got: dict[Any, dict[int, tuple[list[int], str, str | None]]] = {}
        self.failing: set[str] = set()
        for owner, name in (
            (self.llm.scheduler, "schedule"),
            (self.llm.scheduler, "update_from_output"),
            (self.llm.memory, "move_blocks"),
            (self.llm, "run_model"),
            (self.llm, "sample"),
        ):
            self.sabotage(owner, name)

    def sabotage(self, owner: Any, name: str) -> None:
        """Have a method fail once, after it has done its work, when that is asked for; a commit fails before."""
        fine = getattr(owner, name)

        def method(*arguments: Any) -> Any:
            fails = name in self.failing
            self.failing.discard(name)
            if fails and name in ("update_from_output", "sample"):
                raise OutOfOrder
            result = fine(*arguments)
            if fails:
                raise OutOfOrder
            return result

        setattr(owner, name, method)

    @rule(prompt=st.integers(0, len(PROMPTS) - 1), params=st.integers(0, len(PARAMS) - 1), id=st.integers(0, 6))
    def add(self, prompt: int, params: int, id: int) -> None:
        """Under an id that may have been another's, in a step that is still in flight."""
        if not self.llm.answers_of(id):
            self.llm.add_request(PROMPTS[prompt], PARAMS[params], request_id=id)
            self.wanted[id], self.got[id] = (prompt, params), {}

    @precondition(lambda self: self.llm.answers)
    @rule(which=st.integers(0, 20))
    def abort(self, which: int) -> None:
        ids = [each for each in self.wanted if self.llm.answers_of(each)]
        id = ids[which % len(ids)]
        assert self.llm.abort_request(id)
        del self.wanted[id], self.got[id]

    @rule(where=st.sampled_from(["schedule", "update_from_output", "move_blocks", "run_model", "sample"]))
    def fail(self, where: str) -> None:
        self.failing.add(where)

    @rule(count=st.integers(1, 6))
    def run(self, count: int) -> None:
        for _ in range(count):
            try:
                chunks = self.llm.step()
            except OutOfOrder:
                assert not self.llm.overlap.flights  # type: ignore[union-attr]
                continue
            for chunk in chunks:
                tokens, text, reason = self.got[chunk.request_id].setdefault(chunk.index, ([], "", None))
                assert reason is None, "a chunk after the last"
                tokens += [] if chunk.token_id is None else [chunk.token_id]
                self.got[chunk.request_id][chunk.index] = tokens, text + chunk.text, chunk.finish_reason

    @invariant()
    def they_are_those_of_the_synchronous_engine(self) -> None:
        for id, answers in self.got.items():
            expected = answers_without_overlap(*self.wanted[id])
            for index, (tokens, text, reason) in answers.items():
                if reason is None:
                    assert tokens == expected[index][0][: len(tokens)]
                    assert expected[index][1].startswith(text)
                else:
                    assert (tokens, text, reason) == expected[index]
        self.llm.scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "llm"):
            return
        self.failing.clear()
        for _ in range(500):
            if self.llm.has_unfinished:
                self.run(1)
        self.they_are_those_of_the_synchronous_engine()
        assert not self.llm.has_unfinished
        for id, wanted in self.wanted.items():
            assert len(self.got[id]) == PARAMS[wanted[1]].n
            assert all(reason for _, _, reason in self.got[id].values())
        assert self.llm.scheduler.pool.num_used == 0
        assert not self.llm.answers


TestOverlapping = Overlapping.TestCase
TestOverlapping.settings = settings(
    max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
