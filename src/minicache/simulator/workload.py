"""Requests as published measurements describe them: when they arrive, and how many tokens go in and come out.

Phase 2 uses it to fill a memory, later phases to load a scheduler. A workload is three distributions and a limit; a
seed turns it into a list of arrivals, always the same one. Times are in seconds, lengths in tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Final

from minicache.errors import require_count, require_positive


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Log-normal lengths: the logarithm is normal with mean `mu` and standard deviation `sigma`.

    Attributes:
        mu: mean of the natural logarithm; e^mu tokens is the median.
        sigma: standard deviation of the natural logarithm, > 0.

    Raises:
        TypeError: `sigma` is not a number.
        ValueError: `sigma` is 0, negative, infinite or NaN.
    """

    mu: float
    sigma: float

    def __post_init__(self) -> None:
        require_positive("sigma", self.sigma)

    @classmethod
    def from_mean(cls, mean: float, cv: float) -> LengthDistribution:
        """The one with this mean and coefficient of variation.

        Args:
            mean: tokens, > 0.
            cv: standard deviation over mean, > 0.

        Raises:
            TypeError: an argument is not a number.
            ValueError: an argument is 0, negative, infinite or NaN.
        """
        require_positive("mean", mean)
        require_positive("cv", cv)
        variance = math.log1p(cv * cv)
        return cls(math.log(mean) - variance / 2, math.sqrt(variance))

    @property
    def mean(self) -> float:
        """The mean in tokens: e^(mu + sigma² / 2)."""
        return math.exp(self.mu + self.sigma**2 / 2)

    @property
    def cv(self) -> float:
        """Standard deviation over mean: √(e^(sigma²) − 1)."""
        return math.sqrt(math.expm1(self.sigma**2))

    def sample(self, rng: Random) -> int:
        """One length, rounded to whole tokens, at least 1."""
        return max(1, round(rng.lognormvariate(self.mu, self.sigma)))


@dataclass(frozen=True, slots=True)
class Workload:
    """What the users of a server ask for. `dataclasses.replace(SHAREGPT, rate=4.0)` makes another.

    Attributes:
        name: for people.
        prompt: tokens that go in.
        output: tokens that come out, drawn independently of the prompt's: the sources give no correlation.
        rate: requests per second, on average, > 0.
        arrival_cv: coefficient of variation of the time between two arrivals, > 0. 1 is Poisson, more is bursts.
        max_model_len: the most tokens of one request, prompt and output together, ≥ 2. A longer prompt is cut to leave
            one token of output, a longer output to what the prompt leaves; so the means fall a little short of
            those of the distributions.

    Raises:
        TypeError: a number has the wrong type.
        ValueError: a number is out of its bounds.
    """

    name: str
    prompt: LengthDistribution
    output: LengthDistribution
    rate: float
    max_model_len: int
    arrival_cv: float = 1.0

    def __post_init__(self) -> None:
        require_positive("rate", self.rate)
        require_positive("arrival_cv", self.arrival_cv)
        require_count("max_model_len", self.max_model_len, at_least=2)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request, as it reaches the server.

    Attributes:
        request_id: 0, 1, 2, … in the order of arrival.
        time: when, in seconds from the start.
        num_prompt_tokens: tokens of its prompt, ≥ 1.
        num_output_tokens: tokens that it will generate, ≥ 1. A server does not know them.
    """

    request_id: int
    time: float
    num_prompt_tokens: int
    num_output_tokens: int


AZURE_CODE: Final = Workload(
    "Azure code 2023",
    LengthDistribution.from_mean(2048, 0.96),
    LengthDistribution.from_mean(27.9, 2.15),
    rate=2.6,
    arrival_cv=13.2,
    max_model_len=16_384,
)
"""Code completion in Azure's public trace of 2023 (Patel et al. 2024, "Splitwise"): long prompts, short outputs, and
extreme bursts. Means and coefficients of variation of the lengths are those of the trace's 8,819 requests; the
log-normal shape is ours, and fits badly. Its medians are 1,477 in and 11.8 out, the trace's 1,469 and 13. The limit is
ours too: a log-normal's tail has no end."""

AZURE_CONVERSATION: Final = Workload(
    "Azure conversation 2023",
    LengthDistribution.from_mean(1155, 0.96),
    LengthDistribution.from_mean(211, 0.77),
    rate=5.5,
    arrival_cv=1.09,
    max_model_len=16_384,
)
"""Chats in the same trace: 19,366 requests, whose arrivals are close to Poisson. Means and coefficients of variation of
the lengths are the trace's, the shape is ours. Its medians are 833 in and 167 out, the trace's 1,020 and 129. The limit
is ours, as above."""

SHAREGPT: Final = Workload(
    "ShareGPT",
    LengthDistribution.from_mean(161.31, AZURE_CONVERSATION.prompt.cv),
    LengthDistribution.from_mean(337.99, AZURE_CONVERSATION.output.cv),
    rate=2.0,
    max_model_len=2048,
)
"""Chats, with the means that the PagedAttention paper gives (Kwon et al. 2023, figure 11), its Poisson arrivals and
OPT's limit. 2 requests a second is the rate of its figure 13. It prints no variance: the coefficients of variation,
0.96 in and 0.77 out, are assumed to be those of the chats in Azure's trace."""

ALPACA: Final = Workload(
    "Alpaca",
    LengthDistribution.from_mean(19.31, AZURE_CONVERSATION.prompt.cv),
    LengthDistribution.from_mean(58.45, AZURE_CONVERSATION.output.cv),
    rate=20.0,
    max_model_len=2048,
)
"""Instructions, from the same figure: short in, short out. The rate is ours; coefficients of variation as above."""


def poisson_arrivals(rate: float, rng: Random) -> Iterator[float]:
    """Times at which requests arrive that know nothing of each other: the gaps are exponential.

    Args:
        rate: requests per second, > 0.
        rng: where the randomness comes from.

    Yields:
        Seconds from the start, growing, without end.

    Raises:
        TypeError: `rate` is not a number.
        ValueError: `rate` is 0, negative, infinite or NaN.
    """
    require_positive("rate", rate)
    return _running_sum(lambda: rng.expovariate(rate))


def gamma_arrivals(rate: float, cv: float, rng: Random) -> Iterator[float]:
    """Times at which requests arrive in bursts, or in step: the gaps are Gamma-distributed.

    Args:
        rate: requests per second, > 0.
        cv: standard deviation over mean of the gaps, > 0. Below 1 more even than Poisson, at 1 Poisson, above 1 bursts.
        rng: where the randomness comes from.

    Yields:
        Seconds from the start, never falling, without end.

    Raises:
        TypeError: `rate` or `cv` is not a number.
        ValueError: `rate` or `cv` is 0, negative, infinite or NaN.
    """
    require_positive("rate", rate)
    require_positive("cv", cv)
    shape = 1 / cv**2  # a Gamma of shape a has a coefficient of variation of 1 / √a, and the mean a · scale
    scale = 1 / (rate * shape)
    return _running_sum(lambda: rng.gammavariate(shape, scale))


def varying_arrivals(rate: Callable[[float], float], max_rate: float, rng: Random) -> Iterator[float]:
    """Poisson arrivals whose rate changes, as over a day: arrivals at the highest rate, of which some do not come.

    One of time t comes with the probability rate(t) / max_rate (thinning: Lewis and Shedler 1979).

    Args:
        rate: requests per second at a time, 0 … max_rate.
        max_rate: the highest rate, > 0.
        rng: where the randomness comes from.

    Yields:
        Seconds from the start, growing, without end.

    Raises:
        TypeError: `max_rate` is not a number.
        ValueError: `max_rate` is 0, negative, infinite or NaN.
    """
    times = poisson_arrivals(max_rate, rng)
    return (time for time in times if rng.random() * max_rate < rate(time))


def _running_sum(gap: Callable[[], float]) -> Iterator[float]:
    time = 0.0
    while True:
        time += gap()
        yield time


def generate(workload: Workload, count: int, seed: int) -> list[Arrival]:
    """The first `count` requests of a workload.

    Times and lengths are drawn apart: the same seed gives the same lengths at every rate.

    Args:
        workload: what to draw from.
        count: requests, ≥ 0.
        seed: the same seed gives the same arrivals.

    Returns:
        Arrivals in the order of their times. `num_prompt_tokens + num_output_tokens ≤ workload.max_model_len` in each.

    Raises:
        TypeError: `count` or `seed` is not an int.
        ValueError: `count` is negative.
    """
    return list(stream(workload, count, seed))


def stream(workload: Workload, count: int, seed: int) -> Iterator[Arrival]:
    """What `generate` returns, one arrival at a time, each made when it is asked for.

    Arguments and errors are `generate`'s; a bad argument is refused at once, not when the first arrival is asked for.
    """
    require_count("count", count, at_least=0)
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"seed must be an int, got {seed!r}")
    return _draw(workload, count, seed)


def _draw(workload: Workload, count: int, seed: int) -> Iterator[Arrival]:
    times_rng, lengths_rng = Random(f"arrivals {seed}"), Random(f"lengths {seed}")
    if workload.arrival_cv == 1:
        times = poisson_arrivals(workload.rate, times_rng)
    else:
        times = gamma_arrivals(workload.rate, workload.arrival_cv, times_rng)
    for request_id, time in zip(range(count), times, strict=False):
        num_prompt_tokens = min(workload.prompt.sample(lengths_rng), workload.max_model_len - 1)
        num_output_tokens = min(workload.output.sample(lengths_rng), workload.max_model_len - num_prompt_tokens)
        yield Arrival(request_id, time, num_prompt_tokens, num_output_tokens)
