"""Every error that minicache raises on purpose.

Misuse of a call (a wrong shape, a negative count) raises the built-in `ValueError`, `TypeError` or `IndexError`. What
can happen to a correct caller (a full cache, an unknown word) has a class here, to be caught by name.
"""


class MinicacheError(Exception):
    """Base class of the package's errors."""


class CacheOverflowError(MinicacheError):
    """An append would exceed the cache's `max_seq_len`. Nothing was written."""


class OutOfSlotsError(MinicacheError):
    """No free run is large enough for a contiguous reservation. Nothing was reserved."""


class OutOfBlocksError(MinicacheError):
    """The pool has fewer free blocks than requested. Nothing was allocated and nothing was written."""


class SharedBlockError(MinicacheError):
    """A table would write into a block that another table reads too. Nothing was allocated and nothing was written."""


class CorruptBlockError(MinicacheError):
    """A block in a tier is not what was stored there. It is dropped, and its tokens are computed."""


class RequestTooLargeError(MinicacheError):
    """A request could never be served, so it is refused before it is queued. Nothing has changed."""


class QueueFullError(MinicacheError):
    """All admission slots are taken. Nothing has changed; retry after `retry_after` seconds.

    Args:
        message: what is full.
        retry_after: seconds after which a slot may be free.
    """

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineStoppedError(MinicacheError):
    """The engine accepts no more requests, or stopped before this one was complete."""


class EngineNotReadyError(MinicacheError):
    """The engine's process is starting or restarting: retry in a few seconds."""


class EngineDiedError(MinicacheError):
    """The engine's process died with this request and is being restarted: send the request again."""


class StepFailedError(MinicacheError):
    """A step of the model with this request failed. The model's error is the cause."""


class RankFailedError(MinicacheError):
    """A rank of a tensor-parallel model raised an error. The step has failed; the ranks can run the next."""


class RankDiedError(MinicacheError):
    """A rank of a tensor-parallel model died or does not answer: the engine cannot continue."""


class NoReplicaError(MinicacheError):
    """No replica of the fleet can accept a request: there is none, or all are full. Nothing has changed."""


class BrokenStreamError(MinicacheError):
    """A replica's tokens do not continue its earlier ones: some are missing or different. Nothing has changed."""


class LivelockError(MinicacheError):
    """An endless loop was stopped: each iteration undoes the one before."""


class InvariantError(MinicacheError):
    """A `check()` found a structure in a state that no sequence of calls should reach."""


class UnsupportedSchedulerError(MinicacheError):
    """The verifier has no model of what such a scheduler does."""


class KernelUnavailableError(MinicacheError):
    """A requested kernel cannot run here: no Triton, GPU or interpreter, or one that miscomputes; no numba."""


class MemoryAccessError(MinicacheError):
    """A kernel under the tracer accessed memory outside its tensors, or entries that it must not access."""


class UnknownWordError(MinicacheError):
    """A text has a word that the tokenizer's vocabulary lacks."""


class UngrammaticalError(MinicacheError):
    """A text is not in the grammar. The message has the word and the alternatives."""


class CheckpointError(MinicacheError):
    """A checkpoint file is missing, unreadable, or made for another model or vocabulary."""


class UnsupportedModelError(CheckpointError):
    """A checkpoint requires an unsupported feature. The message has field and value."""


class HubError(CheckpointError):
    """A model requested by hub name: the hub cannot be reached or lacks it, and there is no local copy."""


class PullError(CheckpointError):
    """A model of the shelf is not on this machine, or cannot be fetched. The message says what to do."""


class MissingExtraError(MinicacheError):
    """A feature needs packages that are not installed. The message has the command to install them."""


class ConstraintError(MinicacheError):
    """A JSON schema, a regular expression or a choice cannot be followed. The message names what is at fault."""


class CheckoutError(MinicacheError):
    """A folder is no checkout of an engine that can be audited, or no adapter for it is found."""


class PluginError(MinicacheError):
    """The host engine of a plug-in has an unsupported configuration or behaviour."""


class LoadClientError(MinicacheError):
    """The load client cannot start: no server answers at its address, or not with OpenAI's API."""


class ResultsError(MinicacheError):
    """A results file to resume holds other results."""


class WorkerDiedError(MinicacheError):
    """A worker process died; the results that it had reported are kept."""


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
