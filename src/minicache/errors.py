"""Every error that minicache raises on purpose.

Misuse of a call (a wrong shape, a negative count) raises the built-in `ValueError`, `TypeError` or `IndexError`. What
can happen to a correct caller (a full cache, an unknown word) has a class here, so that it can be caught by name.
"""


class MinicacheError(Exception):
    """The root of all the package's own errors."""


class CacheOverflowError(MinicacheError):
    """An append would pass the cache's `max_seq_len`. Nothing was written."""


class OutOfSlotsError(MinicacheError):
    """No hole is large enough for a contiguous reservation. Nothing was reserved."""


class OutOfBlocksError(MinicacheError):
    """The pool has fewer free blocks than were asked for. Nothing was allocated and nothing was written."""


class SharedBlockError(MinicacheError):
    """A table would write into a block that another table reads too. Nothing was allocated and nothing was written."""


class RequestTooLargeError(MinicacheError):
    """A request can never be served: it is refused before it waits for anything. Nothing has changed."""


class QueueFullError(MinicacheError):
    """The server has as many requests as it takes. Nothing has changed; come again in `retry_after` seconds.

    Args:
        message: what is full.
        retry_after: seconds after which there may be a place.
    """

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineStoppedError(MinicacheError):
    """The engine takes no requests any more, or has ended before this one was answered."""


class StepFailedError(MinicacheError):
    """A step of the model failed in which this request took part. Its cause is what the model raised."""


class LivelockError(MinicacheError):
    """A loop that would never end was stopped: every turn of it undoes the turn before."""


class InvariantError(MinicacheError):
    """A `check()` found a structure in a state that no sequence of calls should reach."""


class KernelUnavailableError(MinicacheError):
    """A Triton kernel was asked for where none can run: no Triton, no GPU, no interpreter, or one that miscomputes."""


class MemoryAccessError(MinicacheError):
    """A kernel under the tracer touched memory that no tensor of its own owns, or that it had no business with."""


class UnknownWordError(MinicacheError):
    """A text has a word that the tokenizer's vocabulary lacks."""


class UngrammaticalError(MinicacheError):
    """A text is not in the grammar. The message names the word and what could stand there."""


class CheckpointError(MinicacheError):
    """A checkpoint file is missing, unreadable, or made for another model or vocabulary."""


class UnsupportedModelError(CheckpointError):
    """A model's folder asks for something that this package does not compute. The message names field and value."""


class HubError(CheckpointError):
    """A model was asked for by its hub name; the hub cannot be reached or lacks it, and no copy of it is here."""


class MissingExtraError(MinicacheError):
    """Something was asked for that needs packages which are not installed. The message says what to install."""


class LoadClientError(MinicacheError):
    """The load client cannot begin: nobody answers at the address that it was given, or not as OpenAI's API does."""


class CourseError(MinicacheError):
    """The course's table, files or a learner's request do not fit together."""
