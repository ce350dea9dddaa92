"""Speculative decoding yields the tokens of greedy decoding, whatever is proposed, in fewer forward passes."""

from __future__ import annotations

import random

import pytest
import torch

from minicache.cache.paged import PagedKVCache
from minicache.engine.decoding import decode
from minicache.engine.speculative import NgramDrafter, SpeculationStats, num_accepted, speculative_decode
from minicache.errors import CacheOverflowError

NUM_NEW = 40


class Oracle:
    """Knows the answer, and is wrong at every `wrong`-th position."""

    def __init__(self, tokens, wrong=0):
        self.tokens, self.wrong = tokens, wrong

    def draft(self, token_ids, num_tokens):
        start = len(token_ids)
        drafts = self.tokens[start : start + num_tokens]
        return [
            token + 1 if self.wrong and place % self.wrong == 0 else token for place, token in enumerate(drafts, start)
        ]


class Rubbish:
    """Proposes random tokens."""

    def __init__(self):
        self.rng = random.Random(0)

    def draft(self, token_ids, num_tokens):
        return [self.rng.randrange(300) for _ in range(num_tokens)]


def a_cache(model, max_seq_len=None, block_size=4, batch_size=1):
    config = model.config
    length = config.max_seq_len if max_seq_len is None else max_seq_len
    return PagedKVCache(
        config.num_layers, batch_size, config.num_kv_heads, length, config.head_dim, block_size=block_size
    )


def greedy_tokens(model, prompt, num_new=NUM_NEW):
    return [int(token) for token in decode(model, torch.tensor([prompt]), num_new)]


def speculated(model, prompt, drafter, num_new=NUM_NEW, cache=None, **options):
    cache = a_cache(model) if cache is None else cache
    return [
        int(token)
        for token in speculative_decode(model, torch.tensor([prompt]), num_new, cache=cache, drafter=drafter, **options)
    ]


@pytest.mark.parametrize("num_drafts", [0, 1, 3, 8])
def test_the_tokens_are_those_of_greedy_decoding(model, prompts, num_drafts):
    for prompt in prompts[:4]:
        expected = greedy_tokens(model, prompt)
        for drafter in (NgramDrafter(), NgramDrafter(1), Rubbish(), Oracle(prompt + expected, wrong=3)):
            cache = a_cache(model)
            assert speculated(model, prompt, drafter, cache=cache, num_drafts=num_drafts) == expected
            assert cache.num_tokens == len(prompt) + NUM_NEW - 1
            assert cache.storage.pool.num_used == -(-cache.num_tokens // 4)


def test_passes_with_an_oracle(model, prompts):
    """4 right draft tokens a pass: after the prompt's pass, which yields one, 39 tokens come 5 at a time."""
    expected, stats = greedy_tokens(model, prompts[0]), SpeculationStats()
    oracle = Oracle(prompts[0] + expected)
    assert speculated(model, prompts[0], oracle, num_drafts=4, stats=stats) == expected
    assert (stats.num_passes, stats.num_tokens) == (1 + 8, 40)
    assert stats.acceptance_rate == 1
    assert stats.tokens_per_pass == pytest.approx(40 / 9)


def test_passes_with_rubbish(model, prompts):
    """Nearly all draft tokens are rejected: about a pass a token, as without any."""
    stats = SpeculationStats()
    speculated(model, prompts[0], Rubbish(), num_drafts=4, stats=stats)
    assert stats.num_passes > 36
    assert stats.num_tokens == 40
    assert stats.acceptance_rate < 0.1


@pytest.mark.parametrize("num_new", [0, 1, 2, 5])
def test_it_stops_in_time(model, prompts, num_new):
    """It proposes nothing past the end, and stores no more entries than decoding does."""
    expected = greedy_tokens(model, prompts[1], 12)
    cache = a_cache(model)
    assert speculated(model, prompts[1], Oracle(prompts[1] + expected), num_new, cache) == expected[:num_new]
    assert cache.num_tokens == (len(prompts[1]) + num_new - 1 if num_new else 0)


def test_a_cache_that_ends(model, prompts):
    """Room for 9 tokens more than the prompt: 10 tokens are yielded, the last of which is never stored."""
    prompt, found = prompts[2], list[int]()
    expected = greedy_tokens(model, prompt, 20)
    cache = a_cache(model, len(prompt) + 9)
    tokens = speculative_decode(
        model, torch.tensor([prompt]), 20, cache=cache, drafter=Oracle(prompt + expected), num_drafts=4
    )
    with pytest.raises(CacheOverflowError):
        found.extend(map(int, tokens))
    assert found == expected[:10]


def test_what_is_refused(model, prompts):
    full = a_cache(model)
    speculated(model, prompts[0], NgramDrafter(), 2, full)
    for arguments, error, says in [
        ({"cache": full}, ValueError, "empty"),
        ({"cache": a_cache(model, batch_size=2)}, ValueError, "one sequence"),
        ({"num_new": -1}, ValueError, "max_new_tokens"),
        ({"num_drafts": -1}, ValueError, "num_drafts"),
        ({"num_drafts": 1.5}, TypeError, "num_drafts"),
        ({"prompt": []}, ValueError, "at least one token"),
    ]:
        with pytest.raises(error, match=says):
            speculated(model, **{"prompt": prompts[0], "drafter": NgramDrafter()} | arguments)
    with pytest.raises(ValueError, match="max_ngram"):
        NgramDrafter(0)


# The drafter


@pytest.mark.parametrize(
    ("tokens", "max_ngram", "num_tokens", "drafts"),
    [
        ([1, 2, 3, 1, 2], 3, 4, [3, 1, 2]),  # "1 2" occurs at the beginning
        ([1, 2, 3, 1, 2], 3, 1, [3]),
        ([1, 2, 3, 1, 2], 3, 0, []),
        ([5, 2, 8, 1, 2, 9, 1, 2], 3, 2, [9, 1]),  # the longest ending, "1 2", before the latest "2"
        ([2, 8, 2, 9, 2], 3, 1, [9]),  # of two occurrences the later
        ([4, 4, 4], 3, 3, [4]),  # the ending may overlap what it is found in
        ([1, 2, 3], 3, 4, []),
        ([7], 3, 4, []),
        ([], 3, 4, []),
        ([1, 2, 9, 3, 2], 1, 4, [9, 3, 2]),
    ],
)
def test_what_followed_before(tokens, max_ngram, num_tokens, drafts):
    assert NgramDrafter(max_ngram).draft(tokens, num_tokens) == drafts


@pytest.mark.parametrize(
    ("drafts", "picked", "accepted"),
    [([], [1], 0), ([1], [1, 2], 1), ([1], [2, 2], 0), ([1, 2, 3], [1, 9, 3, 4], 1), ([1, 2], [1, 2, 5], 2)],
)
def test_acceptance_ends_at_the_first_difference(drafts, picked, accepted):
    assert num_accepted(drafts, picked) == accepted


def test_nothing_has_happened_yet():
    assert (SpeculationStats().acceptance_rate, SpeculationStats().tokens_per_pass) == (0, 0)
