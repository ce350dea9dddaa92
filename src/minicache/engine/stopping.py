"""From tokens to text while they are generated: which text can be shown, and where it ends.

The engine keeps a `TextStream` for each request. It does more than `decode(token_ids)` for two reasons: a token's text
may depend on its neighbours (the space between two words; a letter whose bytes are spread over two tokens), and text
that may begin a stop string must not be shown until it is known not to. No phase builds this module.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        self._stop = tuple(stop)
        self._num_held_max = max(map(len, self._stop), default=1) - 1
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
        if not self._stop:
            self.text += piece
            return piece
        unshown = self._held + piece
        ends = [(at + len(stop), at) for stop in self._stop if (at := unshown.find(stop)) >= 0]
        if ends:
            self.is_stopped = True
            num_shown = min(ends)[1]
        else:
            num_shown = len(unshown) - self._num_suspect(unshown)
        self._held = "" if self.is_stopped else unshown[num_shown:]
        self.text += unshown[:num_shown]
        return unshown[:num_shown]

    def _num_suspect(self, text: str) -> int:
        """How many letters at the end of `text` may be the beginning of a stop string."""
        for count in range(min(self._num_held_max, len(text)), 0, -1):
            end = text[-count:]
            if any(stop.startswith(end) for stop in self._stop):
                return count
        return 0


_UNFINISHED: Final = "\N{REPLACEMENT CHARACTER}"
_MAX_UNFINISHED: Final = 3
"""U+FFFDs at the end of a text that a byte can still change: one, or one for each byte of a letter but its last."""
_MAX_NEW: Final = 8
"""Tokens that are held back; a letter that is spread over tokens takes four at most."""
_NUM_NEIGHBOURS: Final = 8
"""Tokens of the prompt that may decide how the answer's first token is written."""
