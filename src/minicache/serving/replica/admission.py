"""Admission slots, as the two clients of engines elsewhere count them (`client`, `fleet`): by `AsyncEngine`'s rules."""

from __future__ import annotations

from collections.abc import Sequence

from minicache.engine.async_engine import MAX_RETRY_AFTER, MIN_RETRY_AFTER
from minicache.errors import QueueFullError


def retry_seconds(finished_at: Sequence[float], num_waiting: int = 1) -> float:
    """Seconds until `num_waiting` answers will be finished, at the rate of the last ones; bounded.

    Args:
        finished_at: when they finished, in order.
        num_waiting: ≥ 1.
    """
    if len(finished_at) < 2:
        return MIN_RETRY_AFTER
    between = (finished_at[-1] - finished_at[0]) / (len(finished_at) - 1)
    return min(max(num_waiting * between, MIN_RETRY_AFTER), MAX_RETRY_AFTER)


def require_slots(num_answers: int, num_unfinished: int, max_unfinished: int, retry_after: float) -> None:
    """Raise unless `num_answers` more fit, where `num_unfinished` of `max_unfinished` slots are taken.

    Raises:
        ValueError: there are fewer slots altogether.
        QueueFullError: too many are taken now.
    """
    if num_answers > max_unfinished:
        raise ValueError(f"{num_answers} answers requested: at most {max_unfinished} can be in progress")
    if num_unfinished + num_answers > max_unfinished:
        raise QueueFullError(
            f"{num_unfinished} of {max_unfinished} admission slots are taken, and {num_answers} needed", retry_after
        )
