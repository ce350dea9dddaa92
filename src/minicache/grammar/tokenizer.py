"""Text to token ids and back: one token a word, punctuation separate.

The vocabulary is the lexicon's; nothing is learned and nothing is split. A word that opens a sentence is another token
than the same word inside one ("Yesterday", "yesterday"), so every token has one spelling.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterable, Sequence

from minicache.errors import UnknownWordError
from minicache.grammar.lexicon import PUNCTUATION, vocabulary

END = "<end>"
_WORD_OR_MARK = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")


def split_words(text: str) -> list[str]:
    """Split a text into words and punctuation marks: `"Did she?"` is `["Did", "she", "?"]`."""
    return _WORD_OR_MARK.findall(text)


def join_words(words: Iterable[str]) -> str:
    """Write words as a text: a space between two words, none before a punctuation mark."""
    return "".join(word if word in PUNCTUATION else f" {word}" for word in words).removeprefix(" ")


class Tokenizer:
    """The word-level tokenizer of the little English.

    Attributes:
        words: the vocabulary, `words[id]` being the spelling of a token. Id 0 is the end token, which is no word of a
            text: `decode` leaves it out.
        end_token_id: the token that ends a text.
        max_token_chars: the most characters of a text that one token stands for: the longest word and a space.
        begins_with_space: a text that continues another begins with the space between the two.
        fingerprint: a short hash of the vocabulary. Equal fingerprints mean equal ids.
    """

    def __init__(self) -> None:
        self.words = (END, *vocabulary())
        self.end_token_id = 0
        self.max_token_chars = max(map(len, self.words)) + 1
        self.begins_with_space = True
        self.fingerprint = hashlib.sha256("\n".join(self.words).encode()).hexdigest()[:16]
        self._ids = {word: token_id for token_id, word in enumerate(self.words)}

    @property
    def vocab_size(self) -> int:
        """The number of tokens, the end token included."""
        return len(self.words)

    def encode(self, text: str) -> list[int]:
        """Turn a text into token ids, one for each word and punctuation mark. No end token is added.

        Raises:
            UnknownWordError: a word is not in the vocabulary. The message names it and the nearest known words.
        """
        return self.encode_words(split_words(text))

    def encode_words(self, words: Sequence[str]) -> list[int]:
        """Turn words that are already separate into token ids. Raises what `encode` raises."""
        unknown = next((word for word in words if word not in self._ids or word == END), None)
        if unknown is not None:
            raise UnknownWordError(self._not_known(unknown))
        return [self._ids[word] for word in words]

    def decode(self, ids: Iterable[int]) -> str:
        """Turn token ids into a text; end tokens are left out.

        Raises:
            IndexError: an id lies outside 0 … vocab_size − 1.
        """
        return join_words(self.decode_words(ids))

    def decode_words(self, ids: Iterable[int]) -> list[str]:
        """Turn token ids into separate words. Leaves out and raises what `decode` does."""
        ids = list(ids)
        outside = next((token_id for token_id in ids if not 0 <= token_id < self.vocab_size), None)
        if outside is not None:
            raise IndexError(f"token id {outside} is outside the vocabulary, 0 … {self.vocab_size - 1}")
        return [self.words[token_id] for token_id in ids if token_id != self.end_token_id]

    def token_bytes(self) -> list[bytes]:
        """What each token adds to a text: its word with a space before it, or its mark; the end token nothing."""
        marks = {*PUNCTUATION, END}
        return [b""] + [(word if word in marks else f" {word}").encode() for word in self.words[1:]]

    def _not_known(self, word: str) -> str:
        spellings: dict[str, list[str]] = {}
        for known in self.words[1:]:
            spellings.setdefault(known.lower(), []).append(known)
        near = difflib.get_close_matches(word.lower()[:100], spellings, n=3, cutoff=0.5)  # all are shorter
        nearest = [known for lowered in near for known in spellings[lowered]]
        advice = f"nearest: {', '.join(map(repr, nearest))}" if nearest else "no known word is near"
        return f"MiniGPT does not know the word {word!r}; {advice}"
