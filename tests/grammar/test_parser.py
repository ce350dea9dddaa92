"""The parser against the generator's texts, against hand-written English, and against mistakes."""

from collections.abc import Callable
from random import Random

import pytest

from minicache.errors import UngrammaticalError
from minicache.grammar import check_text, sample_text, split_words
from minicache.grammar.lexicon import ADJECTIVES, POSSESSIVES, TIMES, VERBS, Tense


def test_thousands_of_generated_texts_are_grammatical() -> None:
    rng = Random(0)
    for _ in range(2000):
        check_text(sample_text(rng, 160))


def test_every_beginning_of_a_text_is_an_unfinished_text() -> None:
    rng = Random(1)
    for _ in range(30):
        words = sample_text(rng, 60)
        for length in range(len(words) + 1):
            check_text(words[:length], unfinished=True)


GOOD = [
    "Yesterday I worked.",
    "Tomorrow she will walk to the market.",
    "Every day he walks to school with his friend.",
    "Now they are not swimming.",
    "Did she work yesterday? Yes, she did.",
    "Are you tired now? No, I am not.",
    "Was the doctor late last week? No, he was not, but tomorrow he will be late.",
    "Do I work every day? Yes, you do.",
    "What will the children do tomorrow? They will play the piano.",
    "Yesterday I did not go home. Then the teacher ate an orange, and then she slept, but tomorrow they will rest.",
    "Now we are cooking soup, because we are hungry.",
    "Every morning my mother studies music. After that she drinks tea with her sister.",
]


@pytest.mark.parametrize("text", GOOD)
def test_good_english(text: str) -> None:
    check_text(split_words(text))


BAD = [  # the text, the word that is wrong, and one that could stand there
    ("Yesterday I work.", "work", "ate"),
    ("Yesterday I was worked.", "worked", "angry"),
    ("Tomorrow she walks.", "walks", "will"),
    ("Tomorrow she will walks.", "walks", "be"),
    ("Every day they walks.", "walks", "buy"),
    ("Every day he walk.", "walk", "buys"),
    ("Every day he do not walk.", "do", "does"),
    ("Now I is working.", "is", "am"),
    ("Now I am work.", "work", "buying"),
    ("Yesterday they was tired.", "was", "were"),
    ("I worked tomorrow.", "tomorrow", "again"),
    ("Did she worked yesterday?", "worked", "buy"),
    ("Does they work every day?", "they", "Anna"),
    ("Did she work tomorrow?", "tomorrow", "again"),
    ("Did she work yesterday? Yes, she was.", "was", "did"),
    ("Did she work yesterday? Yes, he did.", "he", "she"),
    ("Did you work yesterday? Yes, you did.", "you", "I"),
    ("Did she work yesterday? Yes, she did not.", "not", "."),
    ("Did she work yesterday? Tomorrow she will work.", "Tomorrow", "Yes"),
    ("What did she do yesterday? She works.", "works", "ate"),
    ("What did she do yesterday? He worked.", "He", "She"),
    ("Then I worked.", "Then", "Yesterday"),
    ("Yesterday I worked. Then I will rest.", "will", "ate"),
    ("Yesterday I worked. Meanwhile I rested.", "Meanwhile", "Then"),
    ("Yesterday I worked, and then she rests.", "rests", "ate"),
    ("Yesterday I worked, but she rested.", "she", "tomorrow"),
    ("Yesterday I worked, because she was tired.", "she", "I"),
    ("Yesterday I ate a apple.", "apple", "cake"),
    ("Yesterday I ate the piano.", "piano", "apple"),
    ("Yesterday I walked with her friend.", "her", "my"),
    ("Yesterday I went to home.", "home", "school"),
    ("Yesterday I went to school in the park.", "in", "again"),
    ("Yesterday worked I.", "worked", "I"),
    ("yesterday I worked.", "yesterday", "Yesterday"),
    ("Yesterday i worked.", "i", "I"),
    ("Yesterday I worked?", "?", "."),
]


@pytest.mark.parametrize(("text", "wrong", "right"), BAD)
def test_bad_english_is_refused_at_the_wrong_word(text: str, wrong: str, right: str) -> None:
    words = split_words(text)
    with pytest.raises(UngrammaticalError) as refusal:
        check_text(words)
    message, _, advice = str(refusal.value).partition("; could stand here: ")
    position = int(message.split()[1].rstrip(","))
    assert words[position - 1] == wrong
    assert repr(wrong) in message
    assert repr(right) in advice or "more" in advice
    check_text(words[: position - 1], unfinished=True)  # up to there it is good …
    check_text([*words[: position - 1], right], unfinished=True)  # … and what the advice names can follow
    with pytest.raises(UngrammaticalError):
        check_text(words, unfinished=True)


def test_a_text_that_breaks_off_is_refused_unless_allowed() -> None:
    with pytest.raises(UngrammaticalError, match="breaks off after word 2, 'I'"):
        check_text(["Yesterday", "I"])
    check_text(["Yesterday", "I"], unfinished=True)
    with pytest.raises(UngrammaticalError, match="breaks off"):  # a question needs its answer
        check_text(split_words("Did she work yesterday?"))
    with pytest.raises(UngrammaticalError, match="empty"):
        check_text([])
    with pytest.raises(UngrammaticalError):
        check_text([""])


# Mutations ------------------------------------------------------------------------------------------------------------

_THIRD = {verb.third: verb.base for verb in VERBS}
_ING = {verb.ing: verb.base for verb in VERBS}
_OTHER_BE = {"am": "is", "is": "are", "are": "am", "was": "were", "were": "was", "does": "do", "did": "does"}
_HEADS = {phrase[0]: tense for phrase, tense in TIMES.items() if len(phrase) == 1}


def _wrong_third_person(words: list[str], at: int) -> str | None:
    return _THIRD.get(words[at])


def _wrong_ing(words: list[str], at: int) -> str | None:
    return _ING.get(words[at])


def _wrong_auxiliary(words: list[str], at: int) -> str | None:
    return _OTHER_BE.get(words[at])


def _wrong_tense(words: list[str], at: int) -> str | None:
    """Another time than the sentence's verb has."""
    tense = _HEADS.get(words[at])
    return None if tense is None else "tomorrow" if tense is not Tense.FUTURE else "yesterday"


def _wrong_owner(words: list[str], at: int) -> str | None:
    """Possessives after "with" belong to the subject."""
    others = {mine: "your" if mine != "your" else "my" for mine in POSSESSIVES.values()}
    return others.get(words[at]) if at and words[at - 1] == "with" else None


def _wrong_article(words: list[str], at: int) -> str | None:
    return {"a": "an", "an": "a"}.get(words[at])


def _adjective_for_a_noun(words: list[str], at: int) -> str | None:
    return ADJECTIVES[0] if words[at - 1] in ("a", "an", "my") else None


@pytest.mark.parametrize(
    "mutate",
    [
        _wrong_third_person,
        _wrong_ing,
        _wrong_auxiliary,
        _wrong_tense,
        _wrong_owner,
        _wrong_article,
        _adjective_for_a_noun,
    ],
)
def test_a_wrong_form_anywhere_is_refused(mutate: Callable[[list[str], int], str | None]) -> None:
    rng, refused = Random(5), 0
    while refused < 100:
        words = sample_text(rng, 80)
        for at in range(len(words)):
            if (wrong := mutate(words, at)) is None:
                continue
            with pytest.raises(UngrammaticalError):
                check_text([*words[:at], wrong, *words[at + 1 :]])
            refused += 1


def test_wrong_order_is_refused() -> None:
    """No two neighbours of these texts may change places, unless they are equal."""
    rng, accepted = Random(6), []
    for _ in range(60):
        words = sample_text(rng, 50)
        for at in range(len(words) - 1):
            if words[at] == words[at + 1]:
                continue
            swapped = [*words[:at], words[at + 1], words[at], *words[at + 2 :]]
            try:
                check_text(swapped)
            except UngrammaticalError:
                continue
            accepted.append(" ".join(swapped))
    assert not accepted


def test_a_missing_word_is_refused_where_it_is_needed() -> None:
    rng = Random(7)
    for _ in range(60):
        words = sample_text(rng, 50)
        for at, word in enumerate(words):
            if word in ("will", "to", "be", ",", ".", "?", "but", "because", "with"):
                with_gap = [*words[:at], *words[at + 1 :]]
                with pytest.raises(UngrammaticalError):
                    check_text(with_gap)
