"""The little English that MiniGPT speaks: tenses, agreement, questions, negation, chained sentences.

`lexicon` has the words, `generator` writes texts, `parser` checks them, `tokenizer` turns words into token ids. Pure
standard library.
"""

from minicache.grammar.generator import sample_text
from minicache.grammar.parser import check_text
from minicache.grammar.tokenizer import Tokenizer, join_words, split_words

__all__ = ["Tokenizer", "check_text", "join_words", "sample_text", "split_words"]
