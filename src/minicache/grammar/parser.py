"""Reading the little English: is a text grammatical, and if not, which word is wrong?

The second account of the rules. `generator` goes from a meaning to words; this module goes from words to a meaning,
knows nothing of the generator, and shares only the word lists of `lexicon` with it. What holds a text together:

- the time of a clause fixes the tense of its verb, and the subject its form;
- a clause without a time of its own ("Then she …", "…, and they …") keeps the time of the clause before;
- a question is answered at once: "Yes, she did.", "No, I am not.", or "What …?" by a sentence;
- "with my friend" names the subject's friend, "because she was tired" the subject's reason.

The reader goes along every reading that is still open and remembers the furthest word at which one failed: that word
is the error, and what the readings would have taken there is the advice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, cast

from minicache.errors import UngrammaticalError
from minicache.grammar import lexicon
from minicache.grammar.lexicon import Person, Phrase, Subject, Tense, Verb, capitalised

_END = None  # the key under which a trie node keeps the value of the phrase that ends there
_SUGGESTIONS = 8
Trie = dict[str | None, Any]


def check_text(words: Sequence[str], *, unfinished: bool = False) -> None:
    """Check that words form a grammatical text.

    Args:
        words: the words in order, punctuation separate, without the end token.
        unfinished: also accept a text that breaks off, even within a sentence, as long as it could still become
            grammatical. A completion that was cut at a token limit is such a text.

    Raises:
        UngrammaticalError: the text is empty, has a word that cannot stand where it stands, or (unless `unfinished`)
            breaks off. The message names the word, its position, and what could stand there.
    """
    reader = _Reader(words)
    if reader.reads_to_the_end() or (unfinished and reader.furthest == len(words)):
        return
    raise UngrammaticalError(reader.complaint())


def next_words(words: Sequence[str]) -> tuple[frozenset[str], bool]:
    """How a text can go on.

    Args:
        words: the words of its beginning, as for `check_text`; there may be none.

    Returns:
        The words that can stand next; and whether the text is grammatical as it is.

    Raises:
        UngrammaticalError: no grammatical text begins so. The message is that of `check_text`.
    """
    reader = _Reader(words)
    may_end = reader.reads_on()
    if reader.furthest < len(words):
        raise UngrammaticalError(reader.complaint())
    return frozenset(reader.expected), may_end


class _Sentence(NamedTuple):
    """What one sentence leaves for the next: where it stops, and the tense that "Then …" would keep."""

    position: int
    tense: Tense


@dataclass(frozen=True)
class _Clause:
    """A clause that was read: where it stops, whose it was, and when."""

    position: int
    pronouns: tuple[str, ...]
    tense: Tense


# Agreement, as tables from a word to what it says ---------------------------------------------------------------------

_Agreement = Mapping[str, frozenset[Person]]
_EVERYBODY = frozenset(Person)
_I, _SINGULAR, _PLURAL = (frozenset({person}) for person in Person)
_BE_NOW = {"am": _I, "is": _SINGULAR, "are": _PLURAL}
_DO_NOW = {"do": _I | _PLURAL, "does": _SINGULAR}

# Before an action: the auxiliary of questions, negations, and of the tenses that always have one.
_ACTION_AUXILIARIES: dict[Tense, _Agreement] = {
    Tense.PAST: {"did": _EVERYBODY},
    Tense.FUTURE: {"will": _EVERYBODY},
    Tense.HABIT: _DO_NOW,
    Tense.NOW: _BE_NOW,
}
# Before a state ("tired").
_STATE_AUXILIARIES: dict[Tense, _Agreement] = {
    Tense.PAST: {"was": _I | _SINGULAR, "were": _PLURAL},
    Tense.FUTURE: {"will": _EVERYBODY},
    Tense.HABIT: _BE_NOW,
    Tense.NOW: _BE_NOW,
}
_SWAPPED = {"I": ("you",), "you": ("I",)}  # who answers a question about me


def _auxiliary(tense: Tense, person: Person, state: bool) -> list[str]:
    table = (_STATE_AUXILIARIES if state else _ACTION_AUXILIARIES)[tense]
    return [word for word, persons in table.items() if person in persons]


def _trie(phrases: Mapping[Phrase, object]) -> Trie:
    """Lay phrases out as nested dicts, word by word, so one walk tries them all."""
    root: Trie = {}
    for phrase, value in phrases.items():
        node = root
        for word in phrase:
            node = node.setdefault(word, {})
        node[_END] = value
    return root


def _words(*words: str) -> Trie:
    return _trie({(word,): word for word in words})


def _capital(phrases: Mapping[Phrase, object]) -> Trie:
    return _trie({capitalised(phrase): value for phrase, value in phrases.items()})


_SUBJECTS = {subject.phrase: subject for subject in lexicon.SUBJECTS}
_SUBJECT, _SUBJECT_CAPITAL = _trie(_SUBJECTS), _capital(_SUBJECTS)
_TIME, _TIME_CAPITAL = _trie(lexicon.TIMES), _capital(lexicon.TIMES)
_TIME_OF = {tense: _trie({phrase: t for phrase, t in lexicon.TIMES.items() if t is tense}) for tense in Tense}
_OPENER = {tense: _capital(dict.fromkeys(phrases)) for tense, phrases in lexicon.OPENERS.items()}
_CONNECTOR = {tense: _trie(dict.fromkeys(phrases)) for tense, phrases in lexicon.CONNECTORS.items()}
_ADJECTIVE, _COMPANION = _words(*lexicon.ADJECTIVES), _words(*lexicon.COMPANIONS)
_FORMS: dict[str, Callable[[Verb], str]] = {
    "base": lambda verb: verb.base,
    "third": lambda verb: verb.third,
    "past": lambda verb: verb.past,
    "ing": lambda verb: verb.ing,
}
_VERB = {name: _trie({(form(verb),): verb for verb in lexicon.VERBS}) for name, form in _FORMS.items()}
_COMPLEMENT = {name: _trie(dict.fromkeys(phrases, name)) for name, phrases in lexicon.COMPLEMENTS.items()}
_MANNER = _trie(dict.fromkeys(lexicon.MANNERS))
_LOCATION = _trie(dict.fromkeys(lexicon.LOCATIONS))


@cache
def _agreeing(persons: frozenset[Person]) -> Trie:
    """The subjects of these persons."""
    return _trie({phrase: subject for phrase, subject in _SUBJECTS.items() if subject.person in persons})


@cache
def _just(*words: str) -> Trie:
    """The trie of a few single words, each its own value."""
    return _words(*words)


class _Reader:
    """One text being read. The rules are generators: each yields every way in which it can be read from a position."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = words
        self.furthest = 0
        self.expected: set[str] = set()

    def reads_to_the_end(self) -> bool:
        """Read sentence after sentence, along all readings at once."""
        open_readings: set[tuple[int, Tense | None]] = {(0, None)}
        while open_readings:
            position, tense = reading = min(open_readings, key=lambda reading: reading[0])
            if position == len(self.words) > 0:
                return True
            open_readings.remove(reading)
            open_readings.update(self.sentence(position, tense))
        return False

    def reads_on(self) -> bool:
        """As `reads_to_the_end`, along every reading, and into the sentence behind the last."""
        left: set[tuple[int, Tense | None]] = {(0, None)}
        done = set()
        while left:
            reading = min(left, key=lambda reading: reading[0])
            left.remove(reading)
            done.add(reading)
            left.update({(position, tense) for position, tense in self.sentence(*reading)} - done)
        return any(position == len(self.words) > 0 for position, _ in done)

    def complaint(self) -> str:
        """Say which word is wrong, and what could stand there."""
        could = sorted(self.expected, key=str.lower)
        more = f" and {len(could) - _SUGGESTIONS} more" if len(could) > _SUGGESTIONS else ""
        advice = f"could stand here: {', '.join(map(repr, could[:_SUGGESTIONS]))}{more}"
        if not self.words:
            return f"the text is empty; {advice}"
        if self.furthest == len(self.words):
            return f"the text breaks off after word {self.furthest}, {self.words[-1]!r}; {advice}"
        before = " ".join(self.words[max(0, self.furthest - 4) : self.furthest])
        where = f"after {before!r}" if before else "at the beginning"
        return f"word {self.furthest + 1}, {self.words[self.furthest]!r}, cannot stand {where}; {advice}"

    # Words -----------------------------------------------------------------------------------------------------------

    def phrase(self, position: int, node: Trie) -> Iterator[tuple[int, Any]]:
        """Every phrase of a trie that stands at a position: where it stops, and its value."""
        while True:
            if _END in node:
                yield position, node[_END]
            following = node.get(self.words[position]) if position < len(self.words) else None
            if following is None:
                self.miss(position, node)
                return
            position, node = position + 1, following

    def miss(self, position: int, node: Trie) -> None:
        """Remember what a reading would have taken at the furthest position that any has reached."""
        if position > self.furthest:
            self.furthest, self.expected = position, set()
        if position == self.furthest:
            self.expected.update(word for word in node if word is not _END)

    def sequence(self, position: int, *words: str) -> Iterator[int]:
        """These words, one after the other."""
        for stop, _ in self.phrase(position, _chain(words)):
            yield stop

    # Sentences -------------------------------------------------------------------------------------------------------

    def sentence(self, start: int, tense: Tense | None) -> Iterator[_Sentence]:
        """A statement or an answered question; `tense` is that of the sentence before, None at the beginning."""
        for clause in self.first_clause(start, tense):
            yield from self.tail(clause)
        yield from self.yes_no_question(start)
        yield from self.what_question(start)

    def first_clause(self, start: int, tense: Tense | None) -> Iterator[_Clause]:
        """A time and a clause, an opener and a clause, or a clause and a time."""
        for position, own_tense in self.phrase(start, _TIME_CAPITAL):
            yield from self.clause(position, own_tense)
        if tense is not None:
            for position, _ in self.phrase(start, _OPENER[tense]):
                yield from self.clause(position, tense)
        for own_tense in Tense:
            for clause in self.clause(start, own_tense, _SUBJECT_CAPITAL):
                for position, _ in self.phrase(clause.position, _TIME_OF[own_tense]):
                    yield _Clause(position, clause.pronouns, own_tense)

    def tail(self, clause: _Clause) -> Iterator[_Sentence]:
        """The rest of a sentence: any number of further clauses, a reason at most at the end, and the full stop."""
        yield from self.full_stop(clause)
        for position in self.sequence(clause.position, ","):
            for after, _ in self.phrase(position, _CONNECTOR[clause.tense]):
                for following in self.clause(after, clause.tense):
                    yield from self.tail(following)
            for following in self.contrast(position):
                yield from self.tail(following)
            for reason in self.reason(position, clause):
                yield from self.full_stop(reason)

    def full_stop(self, clause: _Clause) -> Iterator[_Sentence]:
        for position in self.sequence(clause.position, "."):
            yield _Sentence(position, clause.tense)

    def contrast(self, start: int) -> Iterator[_Clause]:
        """The word "but", another time, and a clause."""
        for after in self.sequence(start, "but"):
            for position, tense in self.phrase(after, _TIME):
                yield from self.clause(position, tense)

    def reason(self, start: int, clause: _Clause) -> Iterator[_Clause]:
        """The word "because", the subject's pronoun, and a state at the same time."""
        for after in self.sequence(start, "because"):
            for position, pronoun in self.phrase(after, _just(*clause.pronouns)):
                for stop in self.state(position, lexicon.PRONOUNS[pronoun], clause.tense):
                    yield _Clause(stop, (pronoun,), clause.tense)

    # Questions -------------------------------------------------------------------------------------------------------

    def yes_no_question(self, start: int) -> Iterator[_Sentence]:
        """As in "Did she work yesterday ?" or "Is she tired now ?", and the short answer."""
        for tense in Tense:
            for state in (False, True):
                for position, subject in self.inverted(start, tense, state, capital=True):
                    for asked in self.asked(position, subject, tense, state):
                        for time, _ in self.phrase(asked, _TIME_OF[tense]):
                            for stop in self.sequence(time, "?"):
                                yield from self.short_answer(stop, subject, tense, state)

    def inverted(self, start: int, tense: Tense, state: bool, *, capital: bool) -> Iterator[tuple[int, Subject]]:
        """An auxiliary and then the subject that it agrees with."""
        table = (_STATE_AUXILIARIES if state else _ACTION_AUXILIARIES)[tense]
        for word, persons in table.items():
            for after in self.sequence(start, word.capitalize() if capital else word):
                yield from self.phrase(after, _agreeing(persons))

    def asked(self, start: int, subject: Subject, tense: Tense, state: bool) -> Iterator[int]:
        """What a question says of its subject, up to the time."""
        if state:
            for position in self.sequence(start, "be") if tense is Tense.FUTURE else (start,):
                for stop, _ in self.phrase(position, _ADJECTIVE):
                    yield stop
        else:
            yield from self.verb(start, "ing" if tense is Tense.NOW else "base", subject)

    def short_answer(self, start: int, asked: Subject, tense: Tense, state: bool) -> Iterator[_Sentence]:
        """As in "Yes , she did ." or "No , she did not ." with perhaps a contrast: "…, but tomorrow she will work"."""
        for after, word in self.phrase(start, _just("Yes", "No")):
            for comma in self.sequence(after, ","):
                for position, pronoun in self.phrase(comma, _just(*_answering(asked))):
                    person = lexicon.PRONOUNS[pronoun].person
                    for stop, _ in self.phrase(position, _just(*_auxiliary(tense, person, state))):
                        if word == "Yes":
                            yield from self.full_stop(_Clause(stop, (pronoun,), tense))
                        else:
                            yield from self.refusal(stop, tense, pronoun)

    def refusal(self, start: int, tense: Tense, pronoun: str) -> Iterator[_Sentence]:
        for stop in self.sequence(start, "not"):
            yield from self.full_stop(_Clause(stop, (pronoun,), tense))
            for comma in self.sequence(stop, ","):
                for clause in self.contrast(comma):
                    yield from self.full_stop(clause)

    def what_question(self, start: int) -> Iterator[_Sentence]:
        """As in "What did she do yesterday ?" and a sentence that says what."""
        for after in self.sequence(start, "What"):
            for tense in Tense:
                for position, subject in self.inverted(after, tense, False, capital=False):
                    for doing in self.sequence(position, "doing" if tense is Tense.NOW else "do"):
                        for time, _ in self.phrase(doing, _TIME_OF[tense]):
                            for stop in self.sequence(time, "?"):
                                yield from self.reply(stop, subject, tense)

    def reply(self, start: int, asked: Subject, tense: Tense) -> Iterator[_Sentence]:
        for pronoun in _answering(asked):
            subject = lexicon.PRONOUNS[pronoun]
            for position in self.sequence(start, *capitalised((pronoun,))):
                for stop in self.affirmed_action(position, subject, tense):
                    yield from self.tail(_Clause(stop, (pronoun,), tense))

    # Clauses ---------------------------------------------------------------------------------------------------------

    def clause(self, start: int, tense: Tense, subjects: Trie = _SUBJECT) -> Iterator[_Clause]:
        """A subject, and what it does or how it is."""
        for position, subject in self.phrase(start, subjects):
            for predicate in (self.affirmed_action, self.negated_action, self.state):
                for stop in predicate(position, subject, tense):
                    yield _Clause(stop, subject.pronouns, tense)

    def affirmed_action(self, start: int, subject: Subject, tense: Tense) -> Iterator[int]:
        """As in "worked", "will work", "works", "is working"."""
        if tense is Tense.PAST:
            yield from self.verb(start, "past", subject)
        elif tense is Tense.HABIT:
            yield from self.verb(start, "third" if subject.person is Person.SINGULAR else "base", subject)
        else:
            for position, _ in self.phrase(start, _just(*_auxiliary(tense, subject.person, False))):
                yield from self.verb(position, "ing" if tense is Tense.NOW else "base", subject)

    def negated_action(self, start: int, subject: Subject, tense: Tense) -> Iterator[int]:
        """As in "did not work", "will not work", "does not work", "is not working"."""
        for position, _ in self.phrase(start, _just(*_auxiliary(tense, subject.person, False))):
            for after in self.sequence(position, "not"):
                yield from self.verb(after, "ing" if tense is Tense.NOW else "base", subject)

    def state(self, start: int, subject: Subject, tense: Tense) -> Iterator[int]:
        """As in "was tired", "will not be tired"."""
        for position, _ in self.phrase(start, _just(*_auxiliary(tense, subject.person, True))):
            for after in (position, *self.sequence(position, "not")):
                for adjective in self.sequence(after, "be") if tense is Tense.FUTURE else (after,):
                    for stop, _ in self.phrase(adjective, _ADJECTIVE):
                        yield stop

    def verb(self, start: int, form: str, subject: Subject) -> Iterator[int]:
        """A verb in one form, one of its complements, and perhaps a place, company or a manner."""
        for position, entry in self.phrase(start, _VERB[form]):
            for name in cast(Verb, entry).complements:
                for stop, _ in self.phrase(position, _COMPLEMENT[name]):
                    yield stop
                    yield from self.extra(stop, subject, moving=name == "destination")

    def extra(self, start: int, subject: Subject, *, moving: bool) -> Iterator[int]:
        """As in "with her friend", "quietly", or (unless the verb said where to) "in the garden"."""
        for table in (_MANNER,) if moving else (_MANNER, _LOCATION):
            for stop, _ in self.phrase(start, table):
                yield stop
        for after in self.sequence(start, "with"):
            possessives = (lexicon.POSSESSIVES[pronoun] for pronoun in subject.pronouns)
            for position, _ in self.phrase(after, _just(*possessives)):
                for stop, _ in self.phrase(position, _COMPANION):
                    yield stop


def _answering(asked: Subject) -> tuple[str, ...]:
    return _SWAPPED.get(asked.phrase[0], asked.pronouns)


@cache
def _chain(words: Phrase) -> Trie:
    """The trie of one phrase."""
    return _trie({words: None})
