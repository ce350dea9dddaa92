"""What the generator guarantees about its texts, apart from grammar (test_parser has that)."""

from collections import Counter
from random import Random

import pytest

from minicache.grammar import check_text, sample_text
from minicache.grammar.lexicon import vocabulary


def test_a_seed_fixes_the_text() -> None:
    assert sample_text(Random(7)) == sample_text(Random(7))
    assert len({tuple(sample_text(Random(seed))) for seed in range(50)}) == 50


def test_every_word_of_the_vocabulary_occurs_and_no_other() -> None:
    rng = Random(0)
    seen = {word for _ in range(800) for word in sample_text(rng)}
    assert seen == set(vocabulary())


def test_texts_of_all_lengths_up_to_the_limit_occur() -> None:
    rng = Random(1)
    lengths = [len(sample_text(rng)) for _ in range(600)]
    assert max(lengths) <= 511
    by_octave = Counter(length.bit_length() for length in lengths)
    assert all(by_octave[bits] >= 20 for bits in range(4, 10)), by_octave  # 8 … 15 words, …, 256 … 511 words


def test_a_text_more_often_goes_on_than_ends() -> None:
    rng = Random(2)
    texts = [sample_text(rng) for _ in range(600)]
    sentences = [sum(word in ".?" for word in text) for text in texts]
    for so_far in (2, 4, 8, 16):
        reached = sum(count >= so_far for count in sentences)
        ended = sum(so_far <= count < so_far + 2 for count in sentences)  # a question and its answer end together
        assert ended / reached < 0.5


def test_a_cut_text_has_exactly_the_limit_or_ends_by_itself() -> None:
    rng = Random(3)
    for _ in range(200):
        words = sample_text(rng, 60, cut=True)
        assert len(words) <= 60
        check_text(words, unfinished=len(words) == 60)


def test_a_limit_below_a_sentence_is_refused() -> None:
    with pytest.raises(ValueError, match="max_words=60"):
        sample_text(Random(0), 2)
