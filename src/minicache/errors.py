"""Every error that minicache raises on purpose.

Misuse of a call (a wrong shape, a negative count) raises the built-in `ValueError`, `TypeError` or `IndexError`. What
can happen to a correct caller (a full cache, an unknown word) has a class here, to be caught by name.
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


class EngineNotReadyError(MinicacheError):
    """The engine's process is starting, for the first time or again: come back in a few seconds."""


class EngineDiedError(MinicacheError):
    """The engine's process has ended by itself while it had this request. Another is started: send it again."""


class StepFailedError(MinicacheError):
    """A step of the model failed in which this request took part. Its cause is what the model raised."""


class RankFailedError(MinicacheError):
    """A rank of a model on several processes has raised an error. The step has failed; the ranks can run the next."""


class RankDiedError(MinicacheError):
    """A rank of a model on several processes has ended or does not answer: the engine cannot run any more."""


class NoReplicaError(MinicacheError):
    """No replica of the fleet can take a request: there is none, or all are full. Nothing has changed."""


class BrokenStreamError(MinicacheError):
    """What a replica sends does not continue what it sent before: tokens are missing, or differ. Nothing changed."""


class LivelockError(MinicacheError):
    """A loop that would never end was stopped: every turn of it undoes the turn before."""


class InvariantError(MinicacheError):
    """A `check()` found a structure in a state that no sequence of calls should reach."""


class KernelUnavailableError(MinicacheError):
    """A kernel was asked for where it cannot run: no Triton, GPU or interpreter, or one that miscomputes; no numba."""


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


class PluginError(MinicacheError):
    """The engine around a plug-in is set up, or behaves, in a way that the plug-in cannot serve."""


class LoadClientError(MinicacheError):
    """The load client cannot start: no server answers at its address, or not with OpenAI's API."""


class ResultsError(MinicacheError):
    """A file that is to be gone on with holds other results."""


class WorkerDiedError(MinicacheError):
    """A process that computed results has died; the results that it had told of are kept."""


class CourseError(MinicacheError):
    """The course's table, files or a learner's request do not fit together."""


class TamperingError(CourseError):
    """A submission meddles with its grader: what it has earned cannot be known."""


def require_count(name: str, value: object, *, at_least: int = 1) -> None:
    """Refuse `value` unless it is a whole number, `at_least` or more.

    Args:
        name: what the caller calls the value; the message begins with it.
        value: what was given.
        at_least: the smallest allowed value.

    Raises:
        TypeError: `value` is not an `int` (a `bool` and a `float` such as 2.0 are refused too).
        ValueError: `value` is below `at_least`.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < at_least:
        raise ValueError(f"{name} must be at least {at_least}, got {value}")


def require_positive(name: str, value: object) -> None:
    """Refuse `value` unless it is a finite real number above 0.

    Args:
        name: what the caller calls the value; the message begins with it.
        value: what was given.

    Raises:
        TypeError: `value` is not a real number (a `bool` is refused too).
        ValueError: `value` is 0, negative, infinite or NaN.
    """
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} must be above 0 and finite, got {value!r}")
