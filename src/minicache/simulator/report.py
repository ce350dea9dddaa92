"""What a run of the simulator found: latencies as their users felt them, and what the server was doing meanwhile.

Given, not built; used from phase 6 on. Pure standard library.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final

NUM_SAMPLES: Final = 512
"""The most samples of a series: when there are more, every other one is dropped."""


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The value that `percent` % of the values lie below, interpolated between the two nearest (NumPy's "linear").

    Args:
        ordered: at least one value, the smallest first.
        percent: 0 … 100.

    Raises:
        ValueError: there is no value.
    """
    if not ordered:
        raise ValueError("no values, no percentile")
    place = (len(ordered) - 1) * percent / 100
    below = min(int(place), len(ordered) - 2) if len(ordered) > 1 else 0
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True, slots=True)
class Summary:
    """A distribution in five numbers: its mean, three percentiles and its largest value; all 0 if nothing was seen."""

    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    @classmethod
    def of(cls, values: Iterable[float]) -> Summary:
        """The summary of any number of values."""
        ordered = sorted(values)
        if not ordered:
            return cls()
        p50, p90, p99 = (percentile(ordered, percent) for percent in (50, 90, 99))
        return cls(sum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


@dataclass(slots=True)
class RequestTimes:
    """When each finished request came, got its first token and left, in the order of leaving. 28 bytes a request.

    Attributes:
        arrival: seconds on the server's clock.
        first_token: seconds from arrival to the first token: the time to first token, TTFT.
        latency: seconds from arrival to the last token.
        num_output_tokens: tokens that it generated.
    """

    arrival: array[float] = field(default_factory=lambda: array("d"))
    first_token: array[float] = field(default_factory=lambda: array("d"))
    latency: array[float] = field(default_factory=lambda: array("d"))
    num_output_tokens: array[int] = field(default_factory=lambda: array("i"))

    def __len__(self) -> int:
        return len(self.arrival)

    def add(self, arrival: float, first_token: float, latency: float, num_output_tokens: int) -> None:
        """One more request has finished."""
        self.arrival.append(arrival)
        self.first_token.append(first_token)
        self.latency.append(latency)
        self.num_output_tokens.append(num_output_tokens)

    def per_output_token(self) -> Iterator[float]:
        """Of each request the mean time between tokens after the first, TPOT. One with a single token has none."""
        for first, latency, count in zip(self.first_token, self.latency, self.num_output_tokens, strict=True):
            if count > 1:
                yield (latency - first) / (count - 1)

    def normalized(self) -> Iterator[float]:
        """Of each request its latency per output token: what the PagedAttention paper plots over the rate."""
        for latency, count in zip(self.latency, self.num_output_tokens, strict=True):
            yield latency / count


@dataclass(slots=True)
class Samples:
    """A state over time, as at most `NUM_SAMPLES` samples, evenly spread over however long it takes.

    Attributes:
        seconds: between two samples, or a little more: a sample is taken when a step ends.
        time: of the samples.
    """

    seconds: float = 0.1
    time: list[float] = field(default_factory=list)

    def add(self, time: float, *state: float) -> float:
        """Take a sample: a value for each field of the state, in their order.

        Returns:
            When the next one is due.
        """
        columns = [getattr(self, each.name) for each in fields(self)[1:]]
        for column, value in zip(columns, (time, *state), strict=True):
            column.append(value)
        if len(self.time) > NUM_SAMPLES:
            self.seconds *= 2
            for column in columns:
                del column[1::2]
        return time + self.seconds


@dataclass(slots=True)
class Series(Samples):
    """The server's state over time.

    Attributes:
        num_running: requests in the batch.
        num_waiting: requests in the waiting queue.
        memory: the part of the blocks that are in use, 0 … 1.
    """

    num_running: list[int] = field(default_factory=list)
    num_waiting: list[int] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What came of a run, of a server or a fleet. Times are in seconds of its clock, which starts at 0.

    Attributes:
        num_requests: that arrived: those of the next three, and in a fleet those that it has given up.
        num_finished: that got all of their tokens.
        num_refused: that were too large, and turned away at once.
        num_outgrown: that finished early, for the whole memory was too small for one of them (FINISHED_CAPACITY).
        num_prompt_tokens: of the requests that were not refused.
        num_output_tokens: that were generated.
        num_computed_tokens: of prompts and outputs, that the model ran on: again after a preemption, and not if a
            prefix cache or a tier had them.
        tier_hit_tokens: that were loaded from a tier, by its name; {} without tiers.
        makespan: when the last request finished.
        ttft: time to first token, from the arrival.
        tpot: time per output token after the first, by request.
        latency: end to end.
        times: what the summaries are made of, request by request. Not in `to_json`.
    """

    num_requests: int
    num_finished: int
    num_refused: int
    num_outgrown: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    tier_hit_tokens: dict[str, int]
    makespan: float
    ttft: Summary
    tpot: Summary
    latency: Summary
    times: RequestTimes

    @property
    def requests_per_second(self) -> float:
        """Finished requests over the makespan; 0 if it is."""
        return self.num_finished / self.makespan if self.makespan else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the makespan; 0 if it is."""
        return self.num_output_tokens / self.makespan if self.makespan else 0.0

    def to_json(self) -> dict[str, Any]:
        """All but `times`, as `json.dump` takes it."""
        facts = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "times"}
        facts = {
            name: asdict(value) if isinstance(value, Summary | Samples) else value for name, value in facts.items()
        }
        return facts | {"requests_per_second": self.requests_per_second, "tokens_per_second": self.tokens_per_second}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingReport(Report):
    """What came of a server's run.

    Attributes:
        refusal: the message of the first refusal; None if there was none.
        num_recomputed_tokens: that were computed a second time, after a preemption.
        num_preemptions: how often a request lost its place in the batch.
        num_swapped_blocks: that were copied to the host or back.
        num_steps: that the model took.
        busy_seconds: during which a step ran.
        normalized_latency: end-to-end latency over output tokens, by request.
        mean_batch_size, max_batch_size: requests in a step; the mean is over the busy time.
        mean_memory, max_memory: the part of the blocks that were in use, 0 … 1; the mean is over the busy time.
        series: batch, waiting queue and memory over time.
    """

    refusal: str | None
    num_recomputed_tokens: int
    num_preemptions: int
    num_swapped_blocks: int
    num_steps: int
    busy_seconds: float
    normalized_latency: Summary
    mean_batch_size: float
    max_batch_size: int
    mean_memory: float
    max_memory: float
    series: Series
