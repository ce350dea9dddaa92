"""Every error that minicache raises on purpose.

Misuse of a call (a wrong shape, a negative count) raises the built-in `ValueError`, `TypeError` or `IndexError`. What
can happen to a correct caller (a full cache, an unknown word) has a class here, so that it can be caught by name.
"""


class MinicacheError(Exception):
    """The root of all the package's own errors."""


class CacheOverflowError(MinicacheError):
    """An append would pass the cache's `max_seq_len`. Nothing was written."""


class UnknownWordError(MinicacheError):
    """A text has a word that the tokenizer's vocabulary lacks."""


class UngrammaticalError(MinicacheError):
    """A text is not in the grammar. The message names the word and what could stand there."""


class CheckpointError(MinicacheError):
    """A checkpoint file is missing, unreadable, or made for another model or vocabulary."""


class CourseError(MinicacheError):
    """The course's table, files or a learner's request do not fit together."""
