"""The spelling rules, against forms written out by hand."""

import pytest

from minicache.grammar import lexicon


@pytest.mark.parametrize(
    ("base", "third", "past", "ing"),
    [
        ("work", "works", "worked", "working"),
        ("watch", "watches", "watched", "watching"),
        ("carry", "carries", "carried", "carrying"),
        ("play", "plays", "played", "playing"),
        ("dance", "dances", "danced", "dancing"),
        ("open", "opens", "opened", "opening"),
        ("visit", "visits", "visited", "visiting"),
        ("stop", "stops", "stopped", "stopping"),
        ("wait", "waits", "waited", "waiting"),
        ("help", "helps", "helped", "helping"),
        ("agree", "agrees", "agreed", "agreeing"),
    ],
)
def test_regular_forms(base: str, third: str, past: str, ing: str) -> None:
    verb = lexicon.verb(base, "nothing")
    assert (verb.third, verb.past, verb.ing) == (third, past, ing)


@pytest.mark.parametrize(
    ("base", "third", "past", "ing"),
    [
        ("go", "goes", "went", "going"),
        ("swim", "swims", "swam", "swimming"),
        ("write", "writes", "wrote", "writing"),
        ("run", "runs", "ran", "running"),
        ("see", "sees", "saw", "seeing"),
        ("teach", "teaches", "taught", "teaching"),
        ("study", "studies", "studied", "studying"),
        ("read", "reads", "read", "reading"),
    ],
)
def test_forms_in_the_lexicon(base: str, third: str, past: str, ing: str) -> None:
    (verb,) = (verb for verb in lexicon.VERBS if verb.base == base)
    assert (verb.third, verb.past, verb.ing) == (third, past, ing)


def test_article_fits_the_noun() -> None:
    assert lexicon.with_article("apple cake", "a the") == (
        ("an", "apple"),
        ("the", "apple"),
        ("a", "cake"),
        ("the", "cake"),
    )
    assert lexicon.with_article("tea", "- the") == (("tea",), ("the", "tea"))


def test_every_complement_class_exists() -> None:
    used = {name for verb in lexicon.VERBS for name in verb.complements}
    assert used == set(lexicon.COMPLEMENTS)


def test_vocabulary_is_a_few_hundred_words_each_once() -> None:
    words = lexicon.vocabulary()
    assert len(set(words)) == len(words)
    assert 300 < len(words) < 600
