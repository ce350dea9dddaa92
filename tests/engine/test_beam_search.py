"""Beam search finds the answers and the scores that `transformers` finds with the same weights."""

from __future__ import annotations

import random
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2]))  # benchmarks/ is no part of the package

from benchmarks.engine import the_same_model
from tests.grid import grid

from minicache.engine.beam import BeamSearch, BeamSearchParams, Step
from minicache.engine.beam_requests import beam_search
from minicache.engine.llm import LLM
from minicache.errors import RequestTooLargeError
from minicache.model import MiniGPTConfig
from minicache.scheduler import SharingScheduler
from minicache.scheduler.observe import Observer

transformers: Any = import_module("transformers")
SHAPE = MiniGPTConfig(
    vocab_size=50,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=64,
    max_seq_len=128,
)
LENGTHS = (1, 4, 9, 16)


class Counts(Observer):
    def __init__(self):
        self.num_preempted = self.num_copies = self.num_forks = 0
        self.lengths = []

    def on_add(self, scheduler, request):
        self.lengths.append(request.num_prompt_tokens)

    def on_schedule(self, scheduler, output):
        self.num_preempted += len(output.preempted)
        self.num_copies += len(output.blocks_to_copy)
        scheduler.check()

    def on_fork(self, scheduler, parent, child):
        self.num_forks += 1


@pytest.fixture(scope="module")
def both():
    """A random Llama of `transformers`, and MiniGPT with its weights. Their logits are spread, so none tie."""
    llama, model = the_same_model(SHAPE)
    with torch.no_grad():
        llama.model.embed_tokens.weight.mul_(9)
    model.load_state_dict(llama.model.state_dict())
    return llama, model


@pytest.fixture(scope="module")
def prompts():
    rng = random.Random(2)
    return [[rng.randrange(SHAPE.vocab_size) for _ in range(length)] for length in LENGTHS]


def theirs(llama, prompt, params):
    """What `transformers` finds: (tokens, score), the best first."""
    out = llama.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        generation_config=transformers.GenerationConfig(
            num_beams=params.beam_width,
            num_return_sequences=params.beam_width,
            max_new_tokens=params.max_tokens,
            length_penalty=params.length_penalty,
            early_stopping=False,
            do_sample=False,
            eos_token_id=list(params.stop_token_ids) or None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        ),
    )
    found = []
    for tokens, score in zip(out.sequences[:, len(prompt) :].tolist(), out.sequences_scores.tolist(), strict=True):
        end = next((place + 1 for place, token in enumerate(tokens) if token in params.stop_token_ids), len(tokens))
        found.append((tokens[:end], score))
    return found


@grid(
    {
        "stop_token_ids": [(), (3,), (3, 7), tuple(range(20))],
        "length_penalty": [0.0, 0.6, 1.0, 2.0],
        "beam_width,max_tokens": [(2, 1), (3, 7), (5, 12)],
    }
)
def test_answers_and_scores(both, prompts, beam_width, max_tokens, length_penalty, stop_token_ids):
    """With memory for all; with so little that beams are preempted and run ahead of each other; and without forks."""
    llama, model = both
    params = BeamSearchParams(beam_width, max_tokens, length_penalty, stop_token_ids)
    expected = [theirs(llama, prompt, params) for prompt in prompts]
    options: dict[str, Any]
    for options in ({"num_blocks": 200}, {"num_blocks": 14}, {"num_blocks": 60, "prefix_caching": False}):
        llm = LLM(model, **{"scheduler": "paged", "block_size": 4, "prefix_caching": True} | options)
        for found, wanted in zip(beam_search(llm, prompts, params), expected, strict=True):
            assert [beam.token_ids for beam in found] == [tokens for tokens, _ in wanted]
            assert [beam.score for beam in found] == pytest.approx([score for _, score in wanted], abs=1e-4)
        assert not llm.has_unfinished
        assert llm.scheduler.pool.num_used == 0


@pytest.mark.parametrize(("max_num_batched_tokens", "max_num_seqs"), [(16, 64), (3, 3)])
def test_beams_longer_than_a_step(both, prompts, max_num_batched_tokens, max_num_seqs):
    """A beam that has to begin anew is a prompt of up to 27 tokens: the default scheduler computes it in chunks."""
    llama, model = both
    params, counts = BeamSearchParams(4, 12), Counts()
    limits = {"max_num_batched_tokens": max_num_batched_tokens, "max_num_seqs": max_num_seqs}
    llm = LLM(model, num_blocks=14, block_size=4, observers=[counts], **limits)
    for found, prompt in zip(beam_search(llm, prompts, params), prompts, strict=True):
        assert [beam.token_ids for beam in found] == [tokens for tokens, _ in theirs(llama, prompt, params)]
    assert max(counts.lengths) > max(LENGTHS)  # a beam began anew
    assert llm.scheduler.pool.num_used == 0


def test_with_another_scheduler_a_beam_may_be_longer_than_a_step(both, prompts):
    llm = LLM(both[1], scheduler="fair", num_blocks=14, block_size=4, max_num_batched_tokens=16)
    with pytest.raises(RequestTooLargeError, match="max_num_batched_tokens"):
        beam_search(llm, prompts, BeamSearchParams(4, 12))
    assert not llm.has_unfinished


def test_an_answer_ends_with_max_model_len(both, prompts):
    """16 tokens of prompt and a limit of 20 leave 4 for the answer, as if no more were asked for."""
    params = BeamSearchParams(3, 12)
    [few] = beam_search(LLM(both[1], max_model_len=20), prompts[-1:], params)
    [asked] = beam_search(LLM(both[1]), prompts[-1:], BeamSearchParams(3, 4))
    assert [beam.token_ids for beam in few] == [beam.token_ids for beam in asked]


def test_it_is_tested_under_pressure(both, prompts):
    counts = Counts()
    llm = LLM(both[1], scheduler=SharingScheduler(num_blocks=14, block_size=4), observers=[counts])
    beam_search(llm, prompts, BeamSearchParams(5, 12))
    assert counts.num_preempted > 3
    assert counts.num_copies > 3
    assert counts.num_forks > 20


def test_one_beam_is_greedy(both, prompts):
    _, model = both
    llm = LLM(model, scheduler="paged", prefix_caching=True)
    from minicache.engine.sampling import SamplingParams

    greedy = [answer.token_ids for answer in llm.generate(prompts, SamplingParams(max_tokens=9))]
    assert [[beam.token_ids for beam in beams] for beams in beam_search(llm, prompts, BeamSearchParams(1, 9))] == [
        [tokens] for tokens in greedy
    ]


def test_text(model, tokenizer):
    [beams] = beam_search(LLM(prefix_caching=True), ["The"], BeamSearchParams(3, 8))
    assert len(beams) == 3
    assert beams == sorted(beams, key=lambda beam: -beam.score)
    for beam in beams:
        shown = [token for token in beam.token_ids if token != tokenizer.end_token_id]
        assert "The" + beam.text == tokenizer.decode(tokenizer.encode("The") + shown)


def test_a_beam_that_outgrows_the_memory(both):
    """3 blocks of 4: a prompt of 8 and 20 tokens more do not fit. What was found so far is the answer."""
    llm = LLM(both[1], scheduler=SharingScheduler(num_blocks=3, block_size=4))
    [beams] = beam_search(llm, [[1] * 8], BeamSearchParams(2, 20))
    assert {beam.finish_reason for beam in beams} == {"capacity"}
    assert not llm.has_unfinished
    assert llm.scheduler.pool.num_used == 0


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"beam_width": 0}, ValueError, "beam_width"),
        ({"beam_width": 2.0}, TypeError, "beam_width"),
        ({"beam_width": 2, "max_tokens": 0}, ValueError, "max_tokens"),
        ({"beam_width": 2, "length_penalty": "1"}, TypeError, "length_penalty"),
        ({"beam_width": 2, "stop_token_ids": [-1]}, ValueError, "stop token"),
    ],
)
def test_params_that_are_refused(options, error, says):
    with pytest.raises(error, match=says):
        BeamSearchParams(**options)


def test_calls_that_are_refused(both, prompts):
    from minicache.engine.sampling import SamplingParams

    llm = LLM(both[1])
    with pytest.raises(TypeError, match="BeamSearchParams"):
        beam_search(llm, prompts, SamplingParams())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="list"):
        beam_search(llm, "The", BeamSearchParams(2))
    with pytest.raises(IndexError, match="vocabulary"):
        beam_search(llm, [[1], [99]], BeamSearchParams(2))
    assert not llm.has_unfinished
    llm.add_request(prompts[0], SamplingParams())
    with pytest.raises(ValueError, match="engine without requests"):
        beam_search(llm, prompts, BeamSearchParams(2))


def test_a_model_that_fails_leaves_nothing_behind(both, prompts):
    llm = LLM(both[1], scheduler="paged", prefix_caching=True)
    fine, calls = llm.run_model, []

    def fails(output):
        calls.append(output)
        if len(calls) == 4:
            raise RuntimeError("out of order")
        return fine(output)

    llm.run_model = fails  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="out of order"):
        beam_search(llm, prompts, BeamSearchParams(3, 8))
    assert not llm.has_unfinished
    assert llm.scheduler.pool.num_used == 0
    assert [len(beams) for beams in beam_search(llm, prompts, BeamSearchParams(3, 8))] == [3] * len(prompts)


# The decisions, by hand


def test_three_steps_by_hand():
    """Two beams over tokens 0, 1, 2; token 2 ends. Log-probabilities are whole numbers."""
    search = BeamSearch(BeamSearchParams(2, length_penalty=1.0), [2], max_tokens=3)
    assert search.num_candidates == 4
    # −1 for 0, −2 for 2 (which ends, second of all: an answer), −4 for 1.
    assert search.advance([[(0, -1.0), (2, -2.0), (1, -4.0)]]) == [Step(0, 0), Step(0, 1)]
    assert [(beam.token_ids, beam.score) for beam in search.answers] == [([2], -2.0)]
    # Beam 0 (−1): 1 for −2, 2 for −5. Beam 1 (−4): 0 for −1, 2 for −1.5. In all −3, −5, −5.5, −6: none that ends is
    # among the first two.
    assert search.advance([[(1, -2.0), (2, -5.0)], [(0, -1.0), (2, -1.5)]]) == [Step(0, 1), Step(1, 0)]
    assert len(search.answers) == 1
    # The third token is the last: the two likeliest are answers, −4 / 3 and −6 / 3.
    assert search.advance([[(0, -1.0), (1, -9.0)], [(1, -1.0), (0, -9.0)]]) == []
    assert search.is_over
    assert [(beam.token_ids, beam.finish_reason) for beam in search.answers] == [([0, 1, 0], "length"), ([2], "stop")]
    assert search.answers[0].score == pytest.approx(-4 / 3)


def test_it_ends_when_no_beam_can_be_better():
    """Two answers at once, and the best beam is not better than the worse of them: over, long before max_tokens."""
    search = BeamSearch(BeamSearchParams(2, length_penalty=0.0), [2, 3], max_tokens=50)
    assert search.advance([[(2, -1.0), (3, -1.5), (0, -1.5), (1, -2.0)]]) == []
    assert search.is_over
    assert [beam.token_ids for beam in search.answers] == [[2], [3]]


@pytest.mark.parametrize("options", [{}, {"scheduler": "paged"}, {"cache": "dense"}, {"prefix_caching": True}])
def test_a_search_whose_logits_are_no_numbers_fails_alone(both, prompts, options):
    """Its beams say "error": NaN ranks nothing. The other searches find what they find without it."""
    model, spoilt, params = both[1], 49, BeamSearchParams(3, 6, stop_token_ids=[49])

    def answers(llm, wanted):
        return [[(beam.token_ids, beam.finish_reason) for beam in beams] for beams in beam_search(llm, wanted, params)]

    good = [[each % spoilt for each in prompt] for prompt in prompts[:2]]
    expected = [answers(LLM(model), [prompt])[0] for prompt in good]
    handle = model.embed_tokens.register_forward_hook(
        lambda module, token_ids, embedded: embedded.masked_fill((token_ids[0] == spoilt)[..., None], torch.nan)
    )
    try:
        llm = LLM(model, **options)
        first, bad, second = answers(llm, [good[0], [3, spoilt, 5], good[1]])
    finally:
        handle.remove()
    assert bad == [([], "error")]
    assert [first, second] == expected
    assert not llm.has_unfinished
    assert llm.scheduler.pool.num_used == 0
