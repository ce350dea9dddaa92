"""Words to ids and back."""

from random import Random

import pytest

from minicache.errors import UnknownWordError
from minicache.grammar import Tokenizer, join_words, sample_text, split_words

tokenizer = Tokenizer()


def test_round_trip_of_texts() -> None:
    rng = Random(0)
    for _ in range(300):
        words = sample_text(rng)
        text = join_words(words)
        ids = tokenizer.encode(text)
        assert len(ids) == len(words)
        assert tokenizer.decode(ids) == text
        assert split_words(text) == words == tokenizer.decode_words(ids)


def test_round_trip_of_every_token() -> None:
    assert [tokenizer.encode(tokenizer.decode([token_id])) for token_id in range(1, tokenizer.vocab_size)] == [
        [token_id] for token_id in range(1, tokenizer.vocab_size)
    ]


def test_one_token_a_word_and_a_mark() -> None:
    ids = tokenizer.encode("Did she, yesterday?")
    assert [tokenizer.words[token_id] for token_id in ids] == ["Did", "she", ",", "yesterday", "?"]
    assert tokenizer.encode("") == []


def test_the_end_token_is_no_word() -> None:
    assert tokenizer.decode([*tokenizer.encode("I worked."), tokenizer.end_token_id]) == "I worked."
    with pytest.raises(UnknownWordError):
        tokenizer.encode(tokenizer.words[tokenizer.end_token_id])
    with pytest.raises(UnknownWordError):
        tokenizer.encode_words([tokenizer.words[tokenizer.end_token_id]])


@pytest.mark.parametrize(
    ("text", "word", "near"),
    [
        ("Yesterday I wlked.", "wlked", "walked"),
        ("Yesterday i worked.", "i", "I"),
        ("Yesturday I", "Yesturday", "Yesterday"),
    ],
)
def test_an_unknown_word_is_named_with_the_nearest(text: str, word: str, near: str) -> None:
    with pytest.raises(UnknownWordError) as refusal:
        tokenizer.encode(text)
    assert repr(word) in str(refusal.value)
    assert repr(near) in str(refusal.value)


@pytest.mark.parametrize("token_id", [-1, tokenizer.vocab_size])
def test_an_id_outside_the_vocabulary_is_refused(token_id: int) -> None:
    with pytest.raises(IndexError, match=str(token_id)):
        tokenizer.decode([token_id])
