"""The measurement, on models whose grammaticality is known, and on the shipped one."""

import pytest
import torch
from benchmarks.grammaticality import PROMPTS, measure_grammaticality

from minicache.cache.dense import KVCache
from minicache.engine.decoding import decode
from minicache.errors import UnknownWordError
from minicache.grammar import Tokenizer, check_text, split_words
from minicache.model import MiniGPT, MiniGPTConfig, load_minigpt


@pytest.mark.slow
def test_the_shipped_model_speaks_grammatically() -> None:
    report = measure_grammaticality(load_minigpt(), 64, max_new_tokens=128, seed=1)
    assert len(report.completions) == 64
    # 500 completions are at 98 % or more (benchmarks/grammaticality.py); 64 of them scatter, by 1.8 % each way.
    assert report.share >= 0.95, report.failures
    assert report.count(ended=True, grammatical=True) > 0
    assert report.count(ended=False, grammatical=True) > 0


def test_a_model_that_babbles_is_found_out() -> None:
    torch.manual_seed(0)
    babbler = MiniGPT(MiniGPTConfig(Tokenizer().vocab_size, num_layers=1))
    report = measure_grammaticality(babbler, 20, max_new_tokens=20)
    assert report.share < 0.2
    assert len(report.failures) == 20 - round(20 * report.share)
    assert all(failure.error for failure in report.failures)


def test_counts_add_up_and_a_seed_repeats() -> None:
    model = load_minigpt()
    report, again = (measure_grammaticality(model, 20, max_new_tokens=30, seed=4) for _ in range(2))
    assert report == again
    counts = [report.count(ended=e, grammatical=g) for e in (True, False) for g in (True, False)]
    assert sum(counts) == len(report.completions) == 20
    assert {completion.text.split()[0] for completion in report.completions} == {p.split()[0] for p in PROMPTS}


@pytest.mark.parametrize("prompt", PROMPTS)
def test_prompts_are_beginnings_of_texts(prompt: str) -> None:
    check_text(split_words(prompt), unfinished=True)


def test_what_cannot_be_measured_is_refused() -> None:
    model = MiniGPT(MiniGPTConfig(Tokenizer().vocab_size, num_layers=1))
    with pytest.raises(ValueError, match="at least one"):
        measure_grammaticality(model, 0)
    with pytest.raises(ValueError, match="temperature"):
        measure_grammaticality(model, 1, temperature=0.0)
    with pytest.raises(UnknownWordError):
        measure_grammaticality(model, 1, prompts=["Gestern ich"])


@pytest.mark.slow
def test_greedy_texts_are_grammatical_far_beyond_a_sentence() -> None:
    """What the demo shows: 200 likeliest words in a row, every text of them grammatical."""
    model, tokenizer = load_minigpt(), Tokenizer()
    for prompt in PROMPTS[:8]:
        prompt_ids = tokenizer.encode(prompt)
        steps = decode(model, torch.tensor([prompt_ids]), 200, cache=KVCache(4, 1, 2, 512, 32))
        token_ids = [*prompt_ids, *map(int, steps)]
        while tokenizer.end_token_id in token_ids:
            end = token_ids.index(tokenizer.end_token_id)
            check_text(tokenizer.decode_words(token_ids[:end]))
            token_ids = token_ids[end + 1 :]
        check_text(tokenizer.decode_words(token_ids), unfinished=True)
