"""`add_request` with n > 1: n answers with one name, each of them what a request of its own would get."""

from __future__ import annotations

from typing import Any

import pytest

from minicache.engine.answers import AnswerId
from minicache.engine.llm import LLM
from minicache.engine.sampling import SamplingParams
from minicache.errors import RequestTooLargeError
from minicache.scheduler import ContinuousBatchScheduler
from minicache.scheduler.observe import Observer

N, SEED, LENGTH = 3, 11, 8


class Watch(Observer):
    """Who was forked, who was added; and checks the books."""

    def __init__(self) -> None:
        self.forked: list[tuple[Any, Any]] = []
        self.added: list[Any] = []

    def on_add(self, scheduler, request):
        self.added.append((request.request_id, request.arrival_time))

    def on_fork(self, scheduler, parent, child):
        self.forked.append((parent.request_id, child.request_id, child.arrival_time))
        scheduler.check()

    def on_schedule(self, scheduler, output):
        scheduler.check()


@pytest.fixture
def watch():
    return Watch()


@pytest.fixture
def llm(model, watch):
    return LLM(model, num_blocks=64, block_size=4, observers=[watch])


def params_of(n=N, **options):
    return SamplingParams(
        **{"max_tokens": LENGTH, "temperature": 0.9, "seed": SEED, "ignore_eos": True, "n": n} | options
    )


@pytest.fixture(scope="module")
def expected(prompts, alone):
    """For each prompt its answers: requests with a seed of their own, alone and without a cache."""
    return [[alone(prompt, LENGTH, params_of(1, seed=SEED + turn)) for turn in range(N)] for prompt in prompts]


def finish(llm, chunks=()):
    """Steps until all has ended. Name → index → tokens; and every answer has one last chunk."""
    tokens: dict[Any, dict[int, list[int]]] = {}
    reasons: dict[Any, list[str]] = {}
    chunks, num_steps = list(chunks), 0
    while True:
        for chunk in chunks:
            answer = tokens.setdefault(chunk.request_id, {}).setdefault(chunk.index, [])
            assert (chunk.request_id, chunk.index) not in reasons, "a chunk after the last"
            if chunk.token_id is not None:
                answer.append(chunk.token_id)
            if chunk.finish_reason:
                reasons[chunk.request_id, chunk.index] = chunk.finish_reason
        if not llm.has_unfinished:
            break
        chunks, num_steps = llm.step(), num_steps + 1
        assert num_steps < 500
    assert not llm.answers
    assert llm.scheduler.pool.num_used == 0
    assert reasons.keys() == {(name, index) for name, its in tokens.items() for index in its}
    return {name: [its[index] for index in range(len(its))] for name, its in tokens.items()}


@pytest.mark.parametrize(
    ("options", "num_forks"),
    [
        ({}, 2),
        ({"prefix_caching": True, "max_num_batched_tokens": 7}, 2),
        ({"scheduler": "paged", "prefix_caching": True}, 2),
        ({"scheduler": "fair"}, 0),
        ({"scheduler": "static"}, 0),
        ({"cache": "dense"}, 0),
    ],
    ids=str,
)
def test_n_answers_with_one_name(model, prompts, expected, watch, options, num_forks):
    llm = LLM(model, num_blocks=64, observers=[watch], **options)
    names = [llm.add_request(prompt, params_of()) for prompt in prompts[:3]]
    assert finish(llm) == dict(zip(names, expected, strict=False))
    assert len(watch.forked) == num_forks * len(names)


def test_forks_begin_with_the_step_of_the_first_token(llm, prompts, watch):
    name = llm.add_request(prompts[0], params_of(), arrival_time=2.5)
    assert len(llm.answers) == N
    assert watch.added == [(name, 2.5)]
    (chunk,) = llm.step()
    assert (chunk.request_id, chunk.index) == (name, 0)
    assert watch.forked == [(name, AnswerId(name, 1), 2.5), (name, AnswerId(name, 2), 2.5)]
    chunks = llm.step()
    assert [(each.request_id, each.index) for each in chunks] == [(name, 0), (name, 1), (name, 2)]


def test_more_answers_than_seats(model, prompts, expected, watch):
    """Two batch slots: one fork gets the second; the last answer begins when the first has ended, as any request."""
    llm = LLM(model, num_blocks=64, max_num_seqs=2, observers=[watch])
    name = llm.add_request(prompts[0], params_of())
    assert finish(llm) == {name: expected[0]}
    assert [child for _, child, _ in watch.forked] == [AnswerId(name, 1)]


def test_a_fork_waits_for_a_seat(model, prompts, expected, watch):
    """A short request has the second batch slot; the fork gets it with the end of the step that ends the short one."""
    llm = LLM(model, num_blocks=64, max_num_seqs=2, observers=[watch])
    name = llm.add_request(prompts[0], params_of(2))
    short = llm.add_request(prompts[1], params_of(1, max_tokens=3))
    chunks = [chunk for _ in range(2) for chunk in llm.step()]
    assert not watch.forked
    chunks += llm.step()
    assert len(watch.forked) == 1
    assert finish(llm, chunks) == {name: expected[0][:2], short: [expected[1][0][:3]]}


@pytest.mark.parametrize("options", [{}, {"preemption": "swap", "num_host_blocks": 30}], ids=str)
def test_preempted_answers(model, prompts, expected, watch, options):
    llm = LLM(model, num_blocks=10, block_size=4, observers=[watch], **options)
    names = [llm.add_request(prompt, params_of()) for prompt in prompts]
    assert finish(llm) == dict(zip(names, expected, strict=True))
    assert watch.forked


def test_the_first_answer_ends_with_its_first_token(llm, prompts, expected, watch):
    stop = expected[3][0][0]
    name = llm.add_request(prompts[3], params_of(stop_token_ids=[stop]))
    (chunk,) = llm.step()
    assert (chunk.index, chunk.finish_reason) == (0, "stop")
    assert llm.has_unfinished
    with pytest.raises(ValueError, match="already here"):  # its other answers have begun
        llm.add_request(prompts[0], params_of(1), request_id=name)
    wanted = [tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for tokens in expected[3]]
    assert finish(llm, [chunk]) == {name: wanted}
    assert not watch.forked
    llm.add_request(prompts[0], params_of(1), request_id=name)
    assert finish(llm) == {name: [expected[0][0]]}


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
@pytest.mark.parametrize("max_num_seqs", [2, 8])
def test_aborting_ends_all_answers(model, prompts, expected, num_steps, max_num_seqs):
    """Before the first token, with forks that wait for a batch slot, and later; others go on."""
    llm = LLM(model, num_blocks=64, max_num_seqs=max_num_seqs)
    name = llm.add_request(prompts[0], params_of())
    other = llm.add_request(prompts[1], params_of(1))
    chunks = [chunk for _ in range(num_steps) for chunk in llm.step() if chunk.request_id == other]
    assert llm.abort_request(name)
    assert list(llm.answers) == [other]
    assert not llm.abort_request(name)
    assert finish(llm, chunks) == {other: expected[1][:1]}


def test_aborting_when_the_first_answer_has_ended(llm, prompts, expected, watch):
    stop = expected[3][0][0]
    name = llm.add_request(prompts[3], params_of(stop_token_ids=[stop]))
    llm.step()
    assert llm.abort_request(name)
    assert not llm.has_unfinished
    assert llm.scheduler.pool.num_used == 0


def test_what_waits_for_an_aborted_request_is_not_handed_over(llm, prompts):
    """A stream runs steps for a request of `add_request`, and keeps its chunks for the next `step()`."""
    name = llm.add_request(prompts[0], params_of())
    stream = llm.stream([prompts[1]], params_of(1))
    next(stream)
    next(stream)
    assert llm.abort_request(name)
    assert [chunk.index for chunk in stream] == [0] * (LENGTH - 2)
    assert not llm.has_unfinished


def test_chunks_that_streams_have_run_up(llm, prompts, expected):
    """Of one request, in steps of someone else: all there, with its name; the stream's have one name too."""
    name = llm.add_request(prompts[0], params_of())
    streamed = list(llm.stream([prompts[1]], params_of(max_tokens=LENGTH)))
    assert len({chunk.request_id for chunk in streamed}) == 1
    assert finish(llm) == {name: expected[0]}


class Failing:
    """Makes some passes of an engine fail, before the model runs."""

    def __init__(self, llm: LLM, failures: set[int]) -> None:
        self.fine, self.failures, self.num_passes = llm.run_model, failures, 0
        llm.run_model = self.run_model

    def run_model(self, output):
        self.num_passes += 1
        if self.num_passes - 1 in self.failures:
            raise OSError("gone")
        return self.fine(output)


@pytest.mark.parametrize("options", [{"num_blocks": 64}, {"num_blocks": 10, "block_size": 4}], ids=str)
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_steps_that_fail(model, prompts, expected, options, prefix_caching):
    llm = LLM(model, prefix_caching=prefix_caching, **options)
    failing = Failing(llm, {0, 1, 3, 4, 8})
    step, failures = llm.step, 0

    def patient():
        nonlocal failures
        try:
            return step()
        except OSError:
            failures += 1
            return []

    llm.step = patient
    names = [llm.add_request(prompt, params_of()) for prompt in prompts[:3]]
    assert finish(llm) == dict(zip(names, expected, strict=False))
    assert failures == len(failing.failures)


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_aborting_after_a_failure(model, prompts, expected, num_steps):
    """What an engine does whose model fails: the newest request goes, and the others go on."""
    llm = LLM(model, num_blocks=64, max_num_seqs=3)
    kept = llm.add_request(prompts[1], params_of())
    chunks = [chunk for _ in range(num_steps) for chunk in llm.step()]
    Failing(llm, {0})
    name = llm.add_request(prompts[0], params_of())
    with pytest.raises(OSError, match="gone"):
        llm.step()
    assert llm.abort_request(name)
    assert finish(llm, chunks) == {kept: expected[1]}


class Capacity(ContinuousBatchScheduler):
    """Ends a request without a token, in the first step that has it."""

    def schedule(self):
        from minicache.request import RequestStatus

        output = super().schedule()
        if self.running and not self.running[0].output_token_ids and self.running[0].request_id == "a":
            victim = self.running[0]
            output.num_scheduled_tokens.pop(victim.request_id)
            output.scheduled.remove(victim)
            self.finish_request(victim.request_id, RequestStatus.FINISHED_CAPACITY)
            output.finished.append(victim.request_id)
        return output


@pytest.mark.parametrize("aborted", [False, True])
def test_the_first_answer_outgrows_the_memory_and_the_model_fails(model, prompts, expected, aborted):
    """The first has finished without a token in a step that failed: the others are still unfinished."""
    llm = LLM(model, scheduler=Capacity(num_blocks=64))
    llm.forks = True  # so the others wait for the first one
    llm.add_request(prompts[0], params_of(), request_id="a")
    other = llm.add_request(prompts[1], params_of(1))
    Failing(llm, {0})
    with pytest.raises(OSError, match="gone"):
        llm.step()
    assert llm.abort_request(other)
    assert llm.has_unfinished
    if aborted:
        assert llm.abort_request("a")
        assert not llm.has_unfinished
        return
    (chunk,) = llm.step()
    assert (chunk.index, chunk.token_id, chunk.finish_reason) == (0, None, "capacity")
    assert finish(llm, [chunk]) == {"a": [[], *expected[0][1:]]}


def test_alone_an_answer_outgrows_the_memory(model, prompts, expected, watch):
    """A pool of two blocks: the prompt and 3 tokens. Every answer gets as far as it would by itself."""
    llm = LLM(model, num_blocks=2, block_size=4, scheduler="paged", max_model_len=200, observers=[watch])
    prompt = prompts[0]
    name = llm.add_request(prompt, params_of())
    num_tokens = 2 * 4 - len(prompt) + 1
    assert finish(llm) == {name: [tokens[:num_tokens] for tokens in expected[0]]}


def test_nothing_is_added_if_anything_is_wrong(llm, prompts, tokenizer):
    llm.add_request(prompts[0], params_of(), request_id="a")
    llm.add_request(prompts[0], params_of(1), request_id=AnswerId("b", 2))
    for name, wrong, prompt in [
        ("a", ValueError, prompts[1]),
        (AnswerId("a", 1), ValueError, prompts[1]),
        ("b", ValueError, prompts[1]),
        ("c", RequestTooLargeError, [1] * 300),
        ("c", ValueError, []),
        ("c", IndexError, [10**6]),
        ("c", ValueError, "She"),  # a text, and no tokenizer
        (["c"], TypeError, prompts[1]),
    ]:
        for n in (1, N) if name != "b" else (N,):
            with pytest.raises(wrong):
                llm.add_request(prompt, params_of(n), request_id=name)
    with pytest.raises(ValueError, match="finite"):
        llm.add_request(prompts[1], params_of(), request_id="c", arrival_time=float("inf"))
    assert list(llm.answers) == ["a", AnswerId("a", 1), AnswerId("a", 2), AnswerId("b", 2)]
    assert llm.scheduler.num_waiting == 2


def test_names_that_the_engine_makes_are_of_no_unfinished_request(llm, prompts, expected):
    """Request 1 has ended with its first token, its second answer has not: 1 is taken, the next is 2."""
    stop = expected[3][0][0]
    llm.add_request(prompts[3], params_of(stop_token_ids=[stop]), request_id=0)
    llm.step()
    assert llm.add_request(prompts[0], params_of(1)) == 1
