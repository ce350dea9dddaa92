"""From tokens to text while they are generated: which text can be shown, and where it ends.

The engine keeps a `TextStream` for each request. It does more than `decode(token_ids)` for two reasons: a token's text
may depend on its neighbours (the space between two words; a letter whose bytes are spread over two tokens), and text
that may begin a stop string must not be shown until it is known not to. No phase builds this module.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, Protocol


class Tokenizer(Protocol):
    """The interface of a tokenizer that the engine uses. `minicache.grammar.Tokenizer` implements it.

    It may have `max_token_chars` too, the most characters of a text that one token stands for: texts that are too long
    are then refused before they are tokenised (`minicache.engine.answers.check_prompt_length`).
    """

    @property
    def end_token_id(self) -> int:
        """The token that the model generates at the end of its text; −1 if there is none.

        If there are several, the tokenizer has `end_token_ids` too.
        """

    def encode(self, text: str) -> list[int]:
        """A text as token ids, without an end token."""

    def decode(self, ids: Sequence[int], /) -> str:
        """Token ids as a text, in which end tokens do not show."""


def end_token_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that the model generates at the end of its text: one, several, or none."""
    several: tuple[int, ...] | None = getattr(tokenizer, "end_token_ids", None)
    if several is not None:
        return tuple(several)
    return (tokenizer.end_token_id,) if tokenizer.end_token_id >= 0 else ()


class StopStrings:
    """Finds the end of stop strings in a text, letter by letter, all of them at once (Aho and Corasick, CACM 1975).

    Its states are the beginnings of the strings: of all that the text read so far ends with, the longest. Reading a
    letter takes the same time on average, however many strings there are and however often they nearly occur.

    Args:
        strings: none of them empty.

    Attributes:
        num_letters: of a state's beginning.
        num_complete: state → the letters of the longest string that is complete in it; 0 if none is.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self.num_letters, self.num_complete = [0], [0]
        self._next: list[dict[str, int]] = [{}]
        self._shorter = [0]  # state → the longest other that it ends with
        for string in strings:
            state = 0
            for letter in string:
                if letter not in self._next[state]:
                    self._next[state][letter] = len(self._next)
                    self._next.append({})
                    self._shorter.append(0)
                    self.num_letters.append(self.num_letters[state] + 1)
                    self.num_complete.append(0)
                state = self._next[state][letter]
            self.num_complete[state] = len(string)
        states = deque(self._next[0].values())
        while states:  # the shorter ones first
            state = states.popleft()
            for letter, longer in self._next[state].items():
                states.append(longer)
                self._shorter[longer] = shorter = self.read(self._shorter[state], letter)
                self.num_complete[longer] = self.num_complete[longer] or self.num_complete[shorter]

    def read(self, state: int, letter: str) -> int:
        """The state after a letter; the first is 0."""
        while (longer := self._next[state].get(letter)) is None:
            if not state:
                return 0
            state = self._shorter[state]
        return longer


@lru_cache(maxsize=16)
def _stop_strings(strings: tuple[str, ...]) -> StopStrings:
    """One for all answers of a request, which are begun together."""
    return StopStrings(strings)


class TextStream:
    """The text of one request's answer, as its tokens are generated.

    A token's text is what it adds to the text of the tokens before it; the last of the prompt's count as such. So the
    pieces put together are the text that the tokens have when they follow the prompt. A token costs a `decode` of a few
    tokens, however long the text is and whatever the model generates.

    **Incomplete letters.** Bytes that are no whole letter yet decode to U+FFFD, so text that ends with one is held
    back. A letter has at most four bytes: of more than `_MAX_NEW` tokens that end so, some never become a letter, and
    all that no further byte can change is shown.

    Args:
        tokenizer: turns tokens into text.
        prompt_token_ids: what the answer continues.
        stop: strings that end the text. Read letter by letter, it ends before the first of them that is complete, and
            of several that are complete at the same letter, before the longest.

    Attributes:
        text: what has been shown.
        is_stopped: whether a stop string was found. The text is complete then, and cut before it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], stop: Sequence[str] = ()) -> None:
        self.text = ""
        self.is_stopped = False
        self._tokenizer = tokenizer
        self._end_token_ids = end_token_ids(tokenizer)
        self._stop = _stop_strings(tuple(stop)) if stop else None
        self._state = 0  # of _stop
        self._held = ""  # decoded, and perhaps the beginning of a stop string
        # The tokens before the new ones, and how many letters of their text have been taken.
        num_neighbours = _NUM_NEIGHBOURS
        self._known = list(prompt_token_ids[-num_neighbours:])
        while not (text := tokenizer.decode(self._known)) and num_neighbours < len(prompt_token_ids):
            num_neighbours *= 2
            self._known = list(prompt_token_ids[-num_neighbours:])
        self._known = self._known if text else []
        self._num_known = len(text)
        self._new: list[int] = []  # tokens after those, which have given no text yet

    def push(self, token_id: int) -> str:
        """Take the next token.

        Args:
            token_id: in the tokenizer's vocabulary.

        Returns:
            The text that can be shown now and could not before; "" if there is none.
        """
        if self.is_stopped or token_id in self._end_token_ids:
            return ""
        self._new.append(token_id)
        text = self._tokenizer.decode([*self._known, *self._new])
        is_unfinished = text.endswith(_UNFINISHED)
        if len(text) > self._num_known and not is_unfinished:
            piece = text[self._num_known :]
            self._known, self._new = self._new, []
            self._num_known = len(self._tokenizer.decode(self._known))
            return self._show(piece)
        if len(self._new) <= _MAX_NEW:
            return ""
        if not is_unfinished:  # tokens that show as nothing
            self._new = []
            return ""
        num_taken = max(self._num_known, len(text) - _MAX_UNFINISHED)
        piece = text[self._num_known : num_taken]
        self._known, self._new = [*self._known, *self._new][-2 * _MAX_NEW :], []
        self._num_known = max(0, len(self._tokenizer.decode(self._known)) - (len(text) - num_taken))
        return self._show(piece)

    def would_add(self, token_id: int) -> str:
        """What a token would add to the text as the next one; a letter that it leaves incomplete shows as U+FFFD."""
        if token_id in self._end_token_ids:
            return ""
        return self._tokenizer.decode([*self._known, *self._new, token_id])[self._num_known :]

    def take(self, token_id: int | None, finish_reason: str | None) -> tuple[str, str | None]:
        """Take the next token of an answer, or its end without one.

        Args:
            token_id: as for `push`; None if there is none.
            finish_reason: why the answer ends with it, as far as its tokens tell; None if they go on.

        Returns:
            The text that can be shown now and could not before; and why the answer ends: "stop" for a stop string,
            which goes before a limit that is reached with it.
        """
        text = "" if token_id is None else self.push(token_id)
        if self.is_stopped:
            return text, "stop"
        return (text + self.finish() if finish_reason else text), finish_reason

    @property
    def is_settled(self) -> bool:
        """Whether all tokens have given their text, though some of it may be held back for a stop string."""
        return not self._new

    def finish(self) -> str:
        """The request has finished: what was held back can be shown, unless a stop string was found."""
        if self.is_stopped:
            return ""
        text = self._tokenizer.decode([*self._known, *self._new])
        piece, self._num_known = text[self._num_known :], len(text)
        shown = self._show(piece) + self._held
        self.text += self._held
        self._held = ""
        return shown

    def _show(self, piece: str) -> str:
        """Add decoded text; returns how much of what is not shown yet can be shown."""
        if self._stop is None:
            self.text += piece
            return piece
        unshown, state = self._held + piece, self._state
        num_read = len(self._held)
        for letter in piece:
            state = self._stop.read(state, letter)
            num_read += 1
            if num_stop := self._stop.num_complete[state]:
                self.is_stopped = True
                num_shown = num_read - num_stop
                break
        else:
            num_shown = num_read - self._stop.num_letters[state]
        self._state = state
        self._held = "" if self.is_stopped else unshown[num_shown:]
        self.text += unshown[:num_shown]
        return unshown[:num_shown]


_UNFINISHED: Final = "\N{REPLACEMENT CHARACTER}"
_MAX_UNFINISHED: Final = 3
"""U+FFFDs at the end of a text that a byte can still change: one, or one for each byte of a letter but its last."""
_MAX_NEW: Final = 8
"""Tokens that are held back; a letter that is spread over tokens takes four at most."""
_NUM_NEIGHBOURS: Final = 8
"""Tokens of the prompt that may decide how the answer's first token is written."""
