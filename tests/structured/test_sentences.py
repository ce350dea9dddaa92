"""Masks from MiniGPT's parser: they let through every grammatical text, and nothing else."""

from __future__ import annotations

import random

import pytest

from minicache.errors import UngrammaticalError
from minicache.grammar import Tokenizer, check_text, sample_text
from minicache.structured import SentenceMasks


def test_grammatical_texts_are_let_through() -> None:
    tokenizer = Tokenizer()
    masks = SentenceMasks(tokenizer)
    for seed in range(15):
        token_ids = tokenizer.encode_words(sample_text(random.Random(seed)))
        for at, token_id in enumerate([*token_ids, 0]):
            assert token_id in masks.allowed(token_ids[:at])


def test_a_random_walk_is_grammatical_and_what_is_left_out_is_not() -> None:
    tokenizer, rng = Tokenizer(), random.Random(0)
    masks = SentenceMasks(tokenizer)
    for _ in range(20):
        token_ids: list[int] = []
        while len(token_ids) < 60:
            allowed = masks.allowed(token_ids)
            outside = rng.choice([each for each in range(1, tokenizer.vocab_size) if each not in allowed])
            with pytest.raises(UngrammaticalError):
                check_text(tokenizer.decode_words([*token_ids, outside]), unfinished=True)
            token_id = rng.choice(allowed)
            if token_id == 0:
                check_text(tokenizer.decode_words(token_ids))
                break
            token_ids.append(token_id)
            if 0 not in allowed and len(token_ids) > 1:
                with pytest.raises(UngrammaticalError):
                    check_text(tokenizer.decode_words(token_ids[:-1]))


def test_a_text_that_is_wrong_already_is_refused() -> None:
    tokenizer = Tokenizer()
    with pytest.raises(UngrammaticalError, match="word 3, 'work'"):
        SentenceMasks(tokenizer).allowed(tokenizer.encode("Yesterday she work"))
