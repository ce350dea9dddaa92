"""Log probabilities next to the tokens, against the model's logits, recomputed for one request at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from minicache.engine.llm import LLM
from minicache.engine.logprobs import TokenLogprobs, token_logprobs
from minicache.engine.sampling import SamplingParams

LENGTH = 6
GREEDY = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=LENGTH, ignore_eos=True, temperature=1.3, top_k=7, seed=4)


@pytest.fixture(scope="module")
def rows_of(model):
    """For a prompt and its answer: log_softmax of the logits before each token, by one pass without a cache."""

    def rows(prompt: list[int], tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens]))[0].double()
        shifted = logits - logits.max(dim=-1, keepdim=True).values
        return (shifted - shifted.exp().sum(dim=-1, keepdim=True).log())[len(prompt) - 1 : -1]

    return rows


def finish(llm: LLM) -> dict[Any, dict[int, list[Any]]]:
    got: dict[Any, dict[int, list[Any]]] = {}
    while llm.has_unfinished:
        for chunk in llm.step():
            got.setdefault(chunk.request_id, {}).setdefault(chunk.index, []).append(chunk)
    return got


def check(chunks, prompt, rows_of, num_logprobs):
    """Chosen and likeliest tokens, against the recomputed rows."""
    tokens = [chunk.token_id for chunk in chunks]
    for chunk, row in zip(chunks, rows_of(prompt, tokens), strict=True):
        found = chunk.logprobs
        assert isinstance(found, TokenLogprobs)
        assert found.token_id == chunk.token_id
        assert found.logprob == pytest.approx(float(row[chunk.token_id]), abs=1e-4)
        assert len(found.top) == num_logprobs
        assert [value for _, value in found.top] == pytest.approx(row.topk(num_logprobs).values.tolist(), abs=1e-4)
        for token_id, value in found.top:
            assert value == pytest.approx(float(row[token_id]), abs=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 64},
        {"num_blocks": 12, "block_size": 4, "max_num_batched_tokens": 7, "prefix_caching": True},
        {"cache": "dense"},
    ],
    ids=str,
)
def test_a_batch_in_which_some_ask(model, prompts, rows_of, options):
    llm = LLM(model, **options)
    asked = [0, None, 5, 20, 1, None, 3, 2]
    for place, (prompt, num_logprobs) in enumerate(zip(prompts, asked, strict=True)):
        params = SAMPLED if place % 2 else GREEDY
        llm.add_request(prompt, params, request_id=place, num_logprobs=num_logprobs)
    got = finish(llm)
    plain = LLM(model, num_blocks=64)
    for place, (prompt, num_logprobs) in enumerate(zip(prompts, asked, strict=True)):
        chunks = got[place][0]
        (expected,) = plain.generate([prompt], SAMPLED if place % 2 else GREEDY)
        assert [chunk.token_id for chunk in chunks] == expected.token_ids
        if num_logprobs is None:
            assert all(chunk.logprobs is None for chunk in chunks)
        else:
            check(chunks, prompt, rows_of, num_logprobs)


@pytest.mark.parametrize("options", [{"num_blocks": 64}, {"scheduler": "fair", "num_blocks": 64}], ids=str)
def test_of_all_answers_to_a_prompt(model, prompts, rows_of, options):
    params = SamplingParams(max_tokens=LENGTH, ignore_eos=True, temperature=0.9, seed=1, n=3)
    llm = LLM(model, **options)
    name = llm.add_request(prompts[0], params, num_logprobs=2)
    got = finish(llm)[name]
    assert sorted(got) == [0, 1, 2]
    for chunks in got.values():
        check(chunks, prompts[0], rows_of, 2)


def test_a_greedy_token_is_the_likeliest(model, prompts):
    llm = LLM(model, num_blocks=64)
    name = llm.add_request(prompts[0], GREEDY, num_logprobs=1)
    for chunk in finish(llm)[name][0]:
        assert chunk.logprobs.top == ((chunk.token_id, chunk.logprobs.logprob),)


def test_steps_that_streams_make_and_steps_that_fail(model, prompts, rows_of):
    """Chunks wait in the engine while a stream steps; a name is used again before they are fetched."""
    llm = LLM(model, num_blocks=64)
    fine, num_passes = llm.run_model, 0

    def run_model(output):
        nonlocal num_passes
        num_passes += 1
        if num_passes == 3:
            raise OSError("gone")
        return fine(output)

    llm.run_model = run_model
    two = SamplingParams(max_tokens=2, ignore_eos=True, n=2, temperature=1.0, seed=3)
    llm.add_request(prompts[0], two, request_id="a")
    assert all(chunk.logprobs is None for chunk in llm.stream([prompts[1]], SamplingParams(max_tokens=2)))
    with pytest.raises(OSError, match="gone"):
        llm.step()
    list(llm.stream([prompts[1]], SamplingParams(max_tokens=3)))
    llm.add_request(prompts[0], two, request_id="a", num_logprobs=2)
    list(llm.stream([prompts[1]], GREEDY))
    chunks = llm.step()
    assert len(chunks) == 8
    assert [chunk.logprobs for chunk in chunks[:4]] == [None] * 4
    for index in (0, 1):
        check([chunk for chunk in chunks[4:] if chunk.index == index], prompts[0], rows_of, 2)
    assert not llm.has_unfinished


@pytest.mark.parametrize(("wrong", "error"), [(-1, ValueError), (21, ValueError), (True, TypeError), ("3", TypeError)])
def test_what_is_refused(model, prompts, wrong, error):
    llm = LLM(model, num_blocks=64)
    with pytest.raises(error, match="num_logprobs"):
        llm.add_request(prompts[0], GREEDY, num_logprobs=wrong)
    assert not llm.has_unfinished


def test_equals_and_small_vocabularies():
    """Four tokens, two of them equally likely, one impossible; half precision; more asked than there are."""
    logits = torch.tensor([[1.0, 0.0, 1.0, -math.inf]] * 2, dtype=torch.float16)
    first, second = token_logprobs(logits, [2, 1], (2, 20))
    total = math.log(2 * math.e + 1)
    assert first.logprob == pytest.approx(1 - total)
    assert second.logprob == pytest.approx(-total)
    assert [token_id for token_id, _ in first.top] == [0, 2]
    assert [token_id for token_id, _ in second.top] == [0, 2, 1, 3]
    assert second.top[3][1] == -math.inf
