"""Which tokens keep a text in MiniGPT's language: masks from the state of a parser.

Brackets within brackets are more than finitely many states can count: a context-free language needs a parser, which
knows at every word what it would have taken there. Here a token is a word, so what the parser expects next is the mask.
No phase builds this module.
"""

from __future__ import annotations

from collections.abc import Sequence

from minicache.grammar.parser import next_words
from minicache.grammar.tokenizer import Tokenizer


class SentenceMasks:
    """The tokens that may follow a text of MiniGPT's language.

    Args:
        tokenizer: MiniGPT's.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids = {word: token_id for token_id, word in enumerate(tokenizer.words)}

    def allowed(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """The tokens that may come next, in ascending order.

        Args:
            token_ids: the text so far, from its first word: prompt and answer.

        Returns:
            The tokens of the words that the parser expects; and the end token, if the text may end here.

        Raises:
            UngrammaticalError: no grammatical text begins so.
        """
        words, may_end = next_words(self._tokenizer.decode_words(token_ids))
        ends = {self._tokenizer.end_token_id} if may_end else set()
        return tuple(sorted({self._ids[word] for word in words} | ends))
