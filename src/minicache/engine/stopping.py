"""From tokens to text, while they come: what can be shown already, and where the text ends.

The engine keeps a `TextStream` for each request. Two things make it more than `decode(token_ids)`: a token's text may
depend on its neighbours (the space between two words; a letter whose bytes are spread over two tokens), and a text that
may be the beginning of a stop string must not be shown before it is known to be none. No phase builds this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol


class Tokenizer(Protocol):
    """What the engine asks of a tokenizer. `minicache.grammar.Tokenizer` is one."""

    @property
    def end_token_id(self) -> int:
        """The token by which the model says that its text is over; −1 if there is none.

        If there are several, the tokenizer has `end_token_ids` too.
        """

    def encode(self, text: str) -> list[int]:
        """A text as token ids, without an end token."""

    def decode(self, ids: Sequence[int], /) -> str:
        """Token ids as a text, in which end tokens do not show."""


def end_token_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens by which the model says that its text is over: one, or several, or none."""
    several: tuple[int, ...] | None = getattr(tokenizer, "end_token_ids", None)
    if several is not None:
        return tuple(several)
    return (tokenizer.end_token_id,) if tokenizer.end_token_id >= 0 else ()


class TextStream:
    """The text of one request's answer, as its tokens come.

    With the prompt's text before it, it reads as `decode(prompt_token_ids + token_ids)` does: if a space belongs
    between the prompt and the first word, the text begins with it. A token costs a `decode` of a few tokens, however
    long the text is.

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
        # The newest tokens whose text is known, and their text: what the next token's is found by comparison with.
        self._known = list(prompt_token_ids[-_NUM_NEIGHBOURS:])
        self._known_text = tokenizer.decode(self._known)
        if not self._known_text:
            self._known = list(prompt_token_ids)
            self._known_text = tokenizer.decode(self._known)
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
        # A letter whose bytes are not all there decodes to U+FFFD.
        if len(text) <= len(self._known_text) or text.endswith(_UNFINISHED):
            return ""
        piece = text[len(self._known_text) :]
        self._known, self._new = self._new, []
        self._known_text = self._tokenizer.decode(self._known)
        return self._show(piece)

    def finish(self) -> str:
        """The request has ended: what was held back can be shown, unless a stop string was found."""
        if self.is_stopped:
            return ""
        piece = self._tokenizer.decode([*self._known, *self._new])[len(self._known_text) :]
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
_NUM_NEIGHBOURS: Final = 8
"""Tokens of the prompt that may decide how the answer's first token is written."""
