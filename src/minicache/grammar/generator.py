"""Texts of the little English, drawn at random: what MiniGPT is trained on.

A text is a small story. The subject, the time and the verb change from sentence to sentence by habits (each habit is a
preferred successor, the likeliest of all), so text decoded greedily wanders instead of repeating itself.
None of the habits is a rule: `parser` asks only for grammar.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TypeVar

from minicache.grammar import lexicon
from minicache.grammar.lexicon import Person, Phrase, Subject, Tense, Verb

T = TypeVar("T")

MAX_SENTENCES = 100
HABIT_STRENGTH = 0.3

# The kinds of sentence, each with the one that likes to follow it being the next in the row.
KINDS = ("time first", "opener", "yes or no", "time last", "what")

_TIMES = tuple(lexicon.TIMES)


def sample_text(rng: Random, max_words: int = 511, *, cut: bool = False) -> list[str]:
    """Draw one text.

    The number of sentences, from 1 to 100, is log-uniform: as many texts have 5 to 9 as have 50 to 99, and after any
    sentence but the last few the end is unlikely. A question and its answer count as one.

    Args:
        rng: the source of randomness; the same state gives the same text.
        max_words: the most words (punctuation counts) that the text may have. The default leaves room for the end
            token in a context of 512.
        cut: what happens to a longer text. False: it ends at the last sentence that fits. True: it breaks off after
            `max_words` words, perhaps within a sentence, as a completion does at its token limit.

    Returns:
        The words in order, punctuation separate: `["Yesterday", "I", "worked", "."]`.

    Raises:
        ValueError: `max_words` is too small for the first sentence (60 is always enough), or below 1 with `cut`.
    """
    num_sentences = int(1.5 * ((MAX_SENTENCES + 1) / 1.5) ** rng.random())
    story = _Story(rng)
    words: list[str] = []
    for _ in range(num_sentences):
        sentence = story.next_sentence()
        if not cut and len(words) + len(sentence) > max_words:
            break
        words += sentence
        if len(words) >= max_words:
            break
    if not words or max_words < 1:
        raise ValueError(f"no sentence fits into {max_words} words; max_words=60 is always enough")
    return words[:max_words]


class _Story:
    """The memory of a text: who acted last, when, and what they did."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.subject = rng.choice(lexicon.SUBJECTS)
        self.time = rng.choice(_TIMES)
        self.verb = rng.choice(lexicon.VERBS)
        self.kind = ""

    @property
    def tense(self) -> Tense:
        return lexicon.TIMES[self.time]

    # What comes next: the habits ---------------------------------------------------------------------------------

    def successor(self, row: Sequence[T], last: T) -> T:
        """The one after `last` in a row that closes to a ring, or, more often, any."""
        if self.rng.random() < HABIT_STRENGTH:
            return row[(row.index(last) + 1) % len(row)]
        return self.rng.choice(row)

    def next_verb(self) -> Verb:
        self.verb = self.successor(lexicon.VERBS, self.verb)
        return self.verb

    def next_time(self) -> Phrase:
        self.time = self.successor(_TIMES, self.time)
        return self.time

    def next_subject(self) -> Subject:
        """A noun is taken up by its pronoun; after a pronoun the story turns to someone else."""
        if self.subject in lexicon.NOUN_SUBJECTS and self.rng.random() < 0.6:
            self.subject = lexicon.PRONOUNS[self.rng.choice(self.subject.pronouns)]
        elif self.rng.random() < 0.4:
            self.subject = self.rng.choice(tuple(lexicon.PRONOUNS.values()))
        else:
            self.subject = self.rng.choice(lexicon.NOUN_SUBJECTS)
        return self.subject

    def next_sentence(self) -> list[str]:
        """One sentence, or a question with its answer."""
        if not self.kind:  # nothing came before: an opener would have nothing to continue
            self.kind = self.rng.choice(("time first", "time first", "time last", "yes or no", "what"))
        else:
            self.kind = self.successor(KINDS, self.kind)
        if self.kind == "yes or no":
            return self.yes_no_question()
        if self.kind == "what":
            return self.what_question()
        return self.statement()

    # Sentences -----------------------------------------------------------------------------------------------------

    def statement(self) -> list[str]:
        if self.kind == "opener":
            words = [*lexicon.capitalised(self.rng.choice(lexicon.OPENERS[self.tense])), *self.clause()]
        elif self.kind == "time first":
            words = [*lexicon.capitalised(self.next_time()), *self.clause()]
        else:
            time = self.next_time()
            words = [*lexicon.capitalised(tuple(self.clause())), *time]
        return [*words, *self.tail(0.7 if self.kind == "opener" else 0.3), "."]

    def yes_no_question(self) -> list[str]:
        subject, tense = self.next_subject(), lexicon.TIMES[self.next_time()]
        about_state = self.rng.random() < 0.2
        auxiliary = _auxiliary(tense, subject.person, about_state)
        if about_state:
            rest = [*(["be"] if tense is Tense.FUTURE else []), self.rng.choice(lexicon.ADJECTIVES)]
        else:
            verb = self.next_verb()
            rest = [verb.ing if tense is Tense.NOW else verb.base, *self.complement(subject)]
        question = [*lexicon.capitalised((auxiliary,)), *subject.phrase, *rest, *self.time, "?"]
        answerer = self.answerer(subject)
        reply = [answerer.phrase[0], _auxiliary(tense, answerer.person, about_state)]
        if self.rng.random() < 0.5:
            return [*question, "Yes", ",", *reply, "."]
        return [*question, "No", ",", *reply, "not", *self.contrast(0.6), "."]

    def what_question(self) -> list[str]:
        subject, tense = self.next_subject(), lexicon.TIMES[self.next_time()]
        doing = "doing" if tense is Tense.NOW else "do"
        question = ["What", _auxiliary(tense, subject.person), *subject.phrase, doing, *self.time, "?"]
        answerer = self.answerer(subject)
        reply = [*lexicon.capitalised(answerer.phrase), *self.action(answerer, tense, negated=False)]
        return [*question, *reply, *self.tail(0.4), "."]

    def answerer(self, asked: Subject) -> Subject:
        """The subject as it appears in the answer: I and you change places, a noun becomes a pronoun."""
        pronoun = {"I": "you", "you": "I"}.get(asked.phrase[0]) or self.rng.choice(asked.pronouns)
        self.subject = lexicon.PRONOUNS[pronoun]
        return self.subject

    def tail(self, probability: float) -> list[str]:
        """Up to two more clauses: the same time goes on, another time contrasts, or a reason closes."""
        words: list[str] = []
        for _ in range(2):
            if self.rng.random() >= probability:
                break
            ways = {Tense.PAST: (1, 3, 1), Tense.FUTURE: (2, 1, 2), Tense.HABIT: (1, 1, 3), Tense.NOW: (3, 1, 1)}
            way = self.rng.choices(("go on", "contrast", "reason"), ways[self.tense])[0]
            if way == "reason":
                return words + self.reason()
            if way == "contrast":
                words += self.contrast(1.0)
            else:
                words += [",", *self.rng.choice(lexicon.CONNECTORS[self.tense]), *self.clause()]
        return words

    def contrast(self, probability: float) -> list[str]:
        if self.rng.random() >= probability:
            return []
        return [",", "but", *self.next_time(), *self.clause()]

    def reason(self) -> list[str]:
        pronoun = lexicon.PRONOUNS[self.rng.choice(self.subject.pronouns)]
        self.subject = pronoun
        return [",", "because", *pronoun.phrase, *self.state(pronoun, self.tense, negated=False)]

    # Clauses ---------------------------------------------------------------------------------------------------------

    def clause(self) -> list[str]:
        """A subject and what it does, or how it is, at the story's time."""
        subject, negated = self.next_subject(), self.rng.random() < 0.2
        predicate = self.state if self.rng.random() < 0.12 else self.action
        return [*subject.phrase, *predicate(subject, self.tense, negated=negated)]

    def state(self, subject: Subject, tense: Tense, *, negated: bool) -> list[str]:
        """A form of *be* and an adjective: "was not tired", "will be tired"."""
        adjective = self.rng.choice(lexicon.ADJECTIVES)
        auxiliary = _auxiliary(tense, subject.person, about_state=True)
        return [auxiliary, *(["not"] * negated), *(["be"] if tense is Tense.FUTURE else []), adjective]

    def action(self, subject: Subject, tense: Tense, *, negated: bool) -> list[str]:
        """The next verb in the form that tense and subject ask for, with what follows it."""
        verb, person = self.next_verb(), subject.person
        if negated or tense in (Tense.FUTURE, Tense.NOW):
            form = verb.ing if tense is Tense.NOW else verb.base
            words = [_auxiliary(tense, person), *(["not"] * negated), form]
        elif tense is Tense.PAST:
            words = [verb.past]
        else:
            words = [verb.third if person is Person.SINGULAR else verb.base]
        return [*words, *self.complement(subject)]

    def complement(self, subject: Subject) -> list[str]:
        """What the verb needs after it, and sometimes a place, company or a manner."""
        rng = self.rng
        kind = rng.choice(self.verb.complements)
        words = list(rng.choice(lexicon.COMPLEMENTS[kind]))
        if rng.random() < (0.7 if kind == "nothing" else 0.25):
            extra = rng.choice(("place", "company", "manner"))
            if extra == "company":
                possessive = lexicon.POSSESSIVES[rng.choice(subject.pronouns)]
                words += ["with", possessive, rng.choice(lexicon.COMPANIONS)]
            elif extra == "manner" or kind == "destination":
                words += rng.choice(lexicon.MANNERS)
            else:
                words += rng.choice(lexicon.LOCATIONS)
        return words


def _auxiliary(tense: Tense, person: Person, about_state: bool = False) -> str:
    """The verb that carries tense and agreement in questions, negations and short answers.

    About a state ("tired") it is a form of *be*, which the present continuous needs as well; else *do* or *will*.
    """
    if tense is Tense.FUTURE:
        return "will"
    if tense is Tense.PAST:
        if not about_state:
            return "did"
        return "were" if person is Person.PLURAL else "was"
    if tense is Tense.HABIT and not about_state:
        return "does" if person is Person.SINGULAR else "do"
    return {Person.I: "am", Person.SINGULAR: "is", Person.PLURAL: "are"}[person]
