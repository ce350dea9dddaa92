"""The words that MiniGPT speaks: subjects, verbs, times, places and things.

Pure data and spelling. How words may follow each other is written down twice, on purpose: `generator` builds sentences
from these tables, and `parser` reads sentences against them, each with its own account of tense and agreement.

A *phrase* is a tuple of words, because the tokenizer's unit is the word: `("last", "week")` is two tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import chain, zip_longest

Phrase = tuple[str, ...]

PUNCTUATION = (".", ",", "?")
VOWELS = "aeiou"


class Tense(Enum):
    """What a time asks of the verb."""

    PAST = "past"  # yesterday: worked, did not work
    FUTURE = "future"  # tomorrow: will work, will not work
    HABIT = "habit"  # every day: work or works, do not or does not work
    NOW = "now"  # now: am, is or are working


class Person(Enum):
    """What a subject asks of the verb."""

    I = "first person singular"  # noqa: E741  (the word itself)
    SINGULAR = "third person singular"
    PLURAL = "plural"  # `you` takes the plural's verb forms


@dataclass(frozen=True)
class Subject:
    """Who does it. `pronouns` are the ones that can take up this subject in a later clause."""

    phrase: Phrase
    person: Person
    pronouns: tuple[str, ...]


@dataclass(frozen=True)
class Verb:
    """A verb's forms, and the classes of `COMPLEMENTS` that can follow it."""

    base: str
    third: str
    past: str
    ing: str
    complements: tuple[str, ...]


def _doubles(base: str) -> bool:
    """Whether the last letter doubles before -ed and -ing: one vowel, right before one consonant (swim, swimming)."""
    return sum(letter in VOWELS for letter in base) == 1 and base[-2] in VOWELS and base[-1] not in "wxy"


def _ends_in_consonant_y(base: str) -> bool:
    return base.endswith("y") and base[-2] not in VOWELS


def verb(base: str, complements: str, past: str | None = None) -> Verb:
    """Spell a verb's forms by the regular rules; only an irregular past has to be given.

    Args:
        base: the infinitive without "to".
        complements: names of classes in `COMPLEMENTS`, separated by spaces.
        past: the past form if it is irregular ("went").
    """
    if _ends_in_consonant_y(base):
        third, regular = base[:-1] + "ies", base[:-1] + "ied"
    else:
        third = base + ("es" if base.endswith(("s", "sh", "ch", "x", "z", "o")) else "s")
        regular = base + ("d" if base.endswith("e") else base[-1] + "ed" if _doubles(base) else "ed")
    stem = base[:-1] if base.endswith("e") and not base.endswith("ee") else base + base[-1] * _doubles(base)
    return Verb(base, third, past or regular, stem + "ing", tuple(complements.split()))


def with_article(nouns: str, articles: str) -> tuple[Phrase, ...]:
    """Every noun of a list with every article of a list; the article `a` becomes `an` before a vowel, `-` is none."""
    phrases: list[Phrase] = []
    for noun in nouns.split():
        for article in articles.split():
            if article == "-":
                phrases.append((noun,))
            else:
                phrases.append(("an" if article == "a" and noun[0] in VOWELS else article, noun))
    return tuple(phrases)


def _phrases(listed: str) -> tuple[Phrase, ...]:
    """Split a comma-separated list into phrases."""
    return tuple(tuple(item.split()) for item in listed.split(","))


# Subjects -------------------------------------------------------------------------------------------------------------

POSSESSIVES = {"I": "my", "you": "your", "he": "his", "she": "her", "we": "our", "they": "their"}

PRONOUNS = {
    word: Subject(
        (word,),
        Person.I if word == "I" else Person.SINGULAR if word in ("he", "she") else Person.PLURAL,
        (word,),
    )
    for word in POSSESSIVES
}


def _named(listed: str, person: Person, *pronouns: str) -> list[Subject]:
    return [Subject(phrase, person, pronouns) for phrase in _phrases(listed)]


_SHE = _named("Anna, the girl, my mother, my sister", Person.SINGULAR, "she")
_HE = _named("my brother, Tom, the boy, my father", Person.SINGULAR, "he")
_THEY = _named("the children, my parents, the neighbours, the students", Person.PLURAL, "they")
_EITHER = _named("the teacher, the doctor, the farmer, the student", Person.SINGULAR, "she", "he")
# Interleaved: the generator likes to go on to the next in the list.
NOUN_SUBJECTS = tuple(chain.from_iterable(zip(_SHE, _THEY, _HE, _EITHER, strict=True)))
SUBJECTS = (*PRONOUNS.values(), *NOUN_SUBJECTS)

# Times ----------------------------------------------------------------------------------------------------------------

_PAST = _phrases("yesterday, last week, last night, two days ago, last year, last summer")
_FUTURE = _phrases("tomorrow, next week, in two days, next year, next summer")
_HABIT = _phrases("every day, every morning, every week, every evening")
_NOW = _phrases("now, right now, at this moment")

_BY_TENSE = {Tense.PAST: _PAST, Tense.NOW: _NOW, Tense.FUTURE: _FUTURE, Tense.HABIT: _HABIT}
# Interleaved, as above: yesterday, now, tomorrow, every day, last week, …
TIMES: dict[Phrase, Tense] = {
    phrase: tense
    for row in zip_longest(*([(phrase, tense) for phrase in phrases] for tense, phrases in _BY_TENSE.items()))
    for phrase, tense in filter(None, row)
}

# Words that keep the time of the clause before, at the head of a sentence and after a comma.
_IN_TURN, _AT_ONCE = _phrases("then, after that, later"), _phrases("meanwhile, at the same time")
OPENERS = {tense: _AT_ONCE if tense is Tense.NOW else _IN_TURN for tense in Tense}
_AND_THEN, _AND_WHILE = _phrases("and then, and"), _phrases("and, while")
CONNECTORS = {tense: _AND_WHILE if tense is Tense.NOW else _AND_THEN for tense in Tense}

# Verbs, in the order of a day: the generator likes to go on to the next ----------------------------------------------

VERBS = (
    verb("wake", "up", "woke"),
    verb("wash", "chore"),
    verb("drink", "drink", "drank"),
    verb("eat", "food", "ate"),
    verb("read", "text", "read"),
    verb("go", "destination", "went"),
    verb("open", "opening"),
    verb("work", "nothing"),
    verb("teach", "school", "taught"),
    verb("learn", "school"),
    verb("write", "text", "wrote"),
    verb("meet", "person", "met"),
    verb("walk", "destination nothing"),
    verb("buy", "thing food", "bought"),
    verb("carry", "thing"),
    verb("lose", "thing", "lost"),
    verb("find", "thing", "found"),
    verb("help", "person"),
    verb("run", "destination nothing", "ran"),
    verb("swim", "nothing", "swam"),
    verb("rest", "nothing"),
    verb("feed", "animal", "fed"),
    verb("visit", "person"),
    verb("wait", "nothing"),
    verb("see", "animal person", "saw"),
    verb("drive", "destination", "drove"),
    verb("come", "destination", "came"),
    verb("cook", "food"),
    verb("play", "game instrument"),
    verb("sing", "song nothing", "sang"),
    verb("dance", "nothing"),
    verb("watch", "film"),
    verb("study", "school"),
    verb("paint", "picture"),
    verb("clean", "chore"),
    verb("sleep", "nothing", "slept"),
)

# What follows a verb --------------------------------------------------------------------------------------------------

PLACES = with_article("market station beach library park river village", "the")
DESTINATIONS = (*_phrases("home, to school, to work"), *(("to", *place) for place in PLACES))
LOCATIONS = _phrases(
    "in the garden, at home, in the park, at school, in the kitchen, at the beach, by the river, "
    "at the station, in the library, in the village"
)
COMPANIONS = ("friend", "friends", "brother", "sister", "family", "neighbour")
MANNERS = _phrases("again, alone, quietly, happily")
ADJECTIVES = (
    *("tired", "happy", "sad", "hungry", "thirsty", "busy", "late"),
    *("ready", "angry", "cold", "calm", "proud"),
)

COMPLEMENTS: dict[str, tuple[Phrase, ...]] = {
    "nothing": ((),),
    "up": (("up",),),
    "destination": DESTINATIONS,
    "food": with_article("apple egg orange sandwich cake", "a the")
    + with_article("bread soup rice cheese fish", "- the"),
    "drink": with_article("tea coffee milk water", "- the"),
    "text": with_article("book letter story poem article", "a the"),
    "picture": with_article("picture map tree flower house", "a the"),
    "thing": with_article("hat coat clock lamp umbrella key phone bag", "a the"),
    "person": with_article("teacher doctor farmer baker", "the"),
    "animal": with_article("dog cat horse owl", "a the"),
    "film": with_article("film match show", "a the"),
    "song": with_article("song", "a the"),
    "game": with_article("football chess tennis cards", "-"),
    "instrument": with_article("piano guitar violin", "the"),
    "school": with_article("English Spanish history music", "-"),
    "chore": with_article("dishes windows floor kitchen", "the"),
    "opening": with_article("door window gate shop", "the"),
}

BE = ("am", "is", "are", "was", "were", "be")
DO = ("do", "does", "did", "doing")


def capitalised(phrase: Phrase) -> Phrase:
    """The phrase as it opens a sentence."""
    return (phrase[0][0].upper() + phrase[0][1:], *phrase[1:])


def vocabulary() -> tuple[str, ...]:
    """Every word of the language once: punctuation first, then the words in alphabetical order."""
    openings: Iterable[Phrase] = chain(
        (subject.phrase for subject in SUBJECTS),
        TIMES,
        *OPENERS.values(),
        ((word,) for word in (*BE[:-1], *DO[:-1], "will", "what", "yes", "no")),
    )
    inside: Iterable[Phrase] = chain(
        (subject.phrase for subject in SUBJECTS),
        TIMES,
        *CONNECTORS.values(),
        *COMPLEMENTS.values(),
        LOCATIONS,
        MANNERS,
        ((entry.base, entry.third, entry.past, entry.ing) for entry in VERBS),
        (tuple(POSSESSIVES.values()), COMPANIONS, ADJECTIVES, BE, DO, ("will", "not", "with", "but", "because")),
    )
    words = set(chain.from_iterable(map(capitalised, openings))) | set(chain.from_iterable(inside))
    return (*PUNCTUATION, *sorted(words))
