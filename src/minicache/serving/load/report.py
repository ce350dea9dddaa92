"""The results of a load test, and the simulator's prediction for comparison.

Part of phase 10's load client.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

from minicache.serving.load.client import LoadRun, Outcome
from minicache.simulator.report import ServingReport, Summary

LATE_SECONDS: Final = 0.01
"""A plan of which more than 1 % of the requests are sent later than this was not kept."""
BUSY_SHARE: Final = 0.7
"""Of one core: a client that is busier than this reads its events late."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What came of a run. Latencies are those of the requests whose whole answer came, from when they were sent.

    Attributes:
        num_requests: that were planned.
        num_sent: that were sent: fewer if the run was stopped.
        num_ok: whose whole answer came.
        num_refused: that were answered with 429.
        num_failed: that were answered with another error, or not to the end.
        num_timed_out: that took longer than the client waits.
        num_unfinished: that were in flight when the run was stopped.
        seconds: from the plan's beginning to the last answer's end.
        num_prompt_tokens: of the answered requests, as the server counts them, else as planned.
        num_output_tokens: of their answers.
        num_events: in which these came. Gaps are between events.
        ttft: time to first token.
        tpot: time per output token after the first, by request.
        itl: gaps between two events of one answer, all answers together: inter-token latency.
        latency: from sending to the last token.
        lag: by how much a request was sent later than planned; of all that were sent.
        retry_after: what the refusals asked to wait, in seconds.
        cpu_share: what the client itself used of one core.
        errors: what went wrong, and how often.
        notes: what a reader of the numbers must know.
        outcomes: what all this is made of, request by request. In `to_json` without the single gaps.
    """

    num_requests: int
    num_sent: int
    num_ok: int
    num_refused: int
    num_failed: int
    num_timed_out: int
    num_unfinished: int
    seconds: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_events: int
    ttft: Summary
    tpot: Summary
    itl: Summary
    latency: Summary
    lag: Summary
    retry_after: Summary
    cpu_share: float
    errors: dict[str, int]
    notes: list[str]
    outcomes: list[Outcome]

    @classmethod
    def of(cls, run: LoadRun, num_requests: int) -> LoadReport:
        """The report of a run, whether it went to its end or not.

        Args:
            run: after its end.
            num_requests: that were planned.
        """
        outcomes = run.outcomes
        answered = [outcome for outcome in outcomes if outcome.status == "ok"]
        statuses = Counter(outcome.status for outcome in outcomes)
        lag = Summary.of(outcome.lag for outcome in outcomes)
        return cls(
            num_requests=num_requests,
            num_sent=len(outcomes),
            num_ok=len(answered),
            num_refused=statuses["refused"],
            num_failed=statuses["failed"],
            num_timed_out=statuses["timed out"],
            num_unfinished=statuses["unfinished"],
            seconds=run.seconds,
            num_prompt_tokens=sum(_num_prompt_tokens(outcome) for outcome in answered),
            num_output_tokens=sum(outcome.num_tokens for outcome in answered),
            num_events=sum(len(outcome.token_times) for outcome in answered),
            ttft=Summary.of(outcome.ttft for outcome in answered),
            tpot=Summary.of(tpot for outcome in answered if (tpot := outcome.tpot) is not None),
            itl=Summary.of(gap for outcome in answered for gap in outcome.gaps),
            latency=Summary.of(outcome.latency for outcome in answered),
            lag=lag,
            retry_after=Summary.of(each.retry_after for each in outcomes if each.retry_after is not None),
            cpu_share=run.cpu_share,
            errors=dict(Counter(outcome.detail for outcome in outcomes if outcome.detail).most_common()),
            notes=_notes(answered, lag, run.cpu_share),
            outcomes=outcomes,
        )

    @property
    def requests_per_second(self) -> float:
        """Answered requests over the run's time."""
        return self.num_ok / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens of their answers over the run's time."""
        return self.num_output_tokens / self.seconds if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """As `json.dump` takes it."""
        values = {name: getattr(self, name) for name in self.__slots__ if name != "outcomes"}
        for name in ("ttft", "tpot", "itl", "latency", "lag", "retry_after"):
            values[name] = asdict(values[name])
        rates = {"requests_per_second": self.requests_per_second, "tokens_per_second": self.tokens_per_second}
        return values | rates | {"requests": [_request(outcome) for outcome in self.outcomes]}


def _request(outcome: Outcome) -> dict[str, Any]:
    """One request, for `to_json`."""
    has_tokens = len(outcome.token_times) > 0
    return {
        "planned": outcome.arrival.time,
        "sent": outcome.sent,
        "ended": outcome.ended,
        "status": outcome.status,
        "http_status": outcome.http_status,
        "num_prompt_tokens": _num_prompt_tokens(outcome),
        "num_output_tokens": outcome.num_tokens,
        "ttft": outcome.ttft if has_tokens else None,
        "latency": outcome.latency if has_tokens else None,
        "retry_after": outcome.retry_after,
        "detail": outcome.detail,
    }


def _num_prompt_tokens(outcome: Outcome) -> int:
    reported = outcome.num_prompt_tokens
    return outcome.arrival.num_prompt_tokens if reported is None else reported


def _notes(answered: Sequence[Outcome], lag: Summary, cpu_share: float) -> list[str]:
    """In what the run was not what it was meant to be."""
    notes = []
    if lag.p99 > LATE_SECONDS:
        notes.append(
            f"The client fell behind its schedule: of 100 requests one was sent {1e3 * lag.p99:,.0f} ms too late or "
            "more. So the server's load differs from the plan."
        )
    if cpu_share > BUSY_SHARE:
        notes.append(f"The client used {cpu_share:.0%} of a core: it may have read tokens late.")
    if uncounted := sum(outcome.num_output_tokens is None for outcome in answered):
        notes.append(f"In {uncounted:,} answers the server reported no token count: each event counts as one token.")
    if short := sum(outcome.num_tokens < outcome.arrival.num_output_tokens for outcome in answered):
        notes.append(f"{short:,} answers are shorter than requested: the server ignores ignore_eos or truncates.")
    if other := sum(_num_prompt_tokens(outcome) != outcome.arrival.num_prompt_tokens for outcome in answered):
        notes.append(f"{other:,} prompts have a different token count on the server than planned.")
    return notes


class Comparison(NamedTuple):
    """One number, measured and foretold.

    Attributes:
        metric: "ttft", "tpot", "latency", "requests_per_second" or "tokens_per_second".
        statistic: "mean", "p50", "p90" or "p99"; "" for a rate.
        measured: by the client.
        predicted: by the simulator.
    """

    metric: str
    statistic: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """By which part of the measured value the prediction is off: −0.1 is 10 % too low. NaN if nothing was seen."""
        return self.predicted / self.measured - 1 if self.measured else float("nan")


def compare(measured: LoadReport, predicted: ServingReport) -> list[Comparison]:
    """Both reports' numbers, side by side."""
    compared = [
        Comparison(metric, statistic, getattr(getattr(measured, metric), statistic), getattr(foretold, statistic))
        for metric, foretold in (("ttft", predicted.ttft), ("tpot", predicted.tpot), ("latency", predicted.latency))
        for statistic in ("mean", "p50", "p90", "p99")
    ]
    rates = ("requests_per_second", "tokens_per_second")
    return compared + [Comparison(rate, "", getattr(measured, rate), getattr(predicted, rate)) for rate in rates]
