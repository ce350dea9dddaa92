"""Pictures of a run: how the latencies are distributed, and what happened when. Part of phase 10's load client."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Final

from minicache.palette import color
from minicache.plots import save_plot
from minicache.serving.load.report import LoadReport
from minicache.simulator.report import ServingReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NUM_POINTS: Final = 5000
"""The most points of a curve."""


def save_plots(report: LoadReport, predicted: ServingReport | None, title: str, out: Path) -> list[Path]:
    """Draw the report into the folder `out`, with the prediction if there is one.

    Returns:
        The files.
    """
    files = [out / "distributions.png", out / "over-time.png"]
    save_plot(lambda figure: _distributions(figure, report, predicted), title, files[0])
    save_plot(lambda figure: _over_time(figure, report), title, files[1])
    return files


def _distributions(figure: Figure, report: LoadReport, predicted: ServingReport | None) -> None:
    """How many of the requests had to wait no longer than so long, for the first token and for each one after it."""
    left, right = figure.subplots(1, 2, sharey=True)
    answered = [outcome for outcome in report.outcomes if outcome.status == "ok"]
    _shares(left, [outcome.ttft for outcome in answered], 1.0, "generated", "-", "measured")
    _shares(right, [tpot for outcome in answered if (tpot := outcome.tpot) is not None], 1e3, "generated", "-", "")
    if predicted is not None:
        _shares(left, list(predicted.times.first_token), 1.0, "end", "--", "predicted")
        _shares(right, list(predicted.times.per_output_token()), 1e3, "end", "--", "")
        left.legend(loc="lower right")
    left.set(xlabel="time to first token in s", ylabel="fraction of requests", ylim=(0, 1.02), xlim=(0, None))
    right.set(xlabel="time per output token in ms", xlim=(0, None))


def _shares(axes: Axes, values: Sequence[float], scale: float, role: str, line: str, label: str) -> None:
    """The empirical distribution of the values."""
    if not values:
        return
    ordered = sorted(scale * value for value in values)
    every = len(ordered) // NUM_POINTS + 1
    shares = [(place + 1) / len(ordered) for place in range(len(ordered))]
    axes.step(
        ordered[::every] + ordered[-1:],
        shares[::every] + shares[-1:],
        where="post",
        color=color(role),
        linestyle=line,
        label=label,
    )


def _over_time(figure: Figure, report: LoadReport) -> None:
    """How long each request waited for its first token, those that got none, and how many were in flight."""
    above, below = figure.subplots(2, 1, sharex=True)
    answered = [outcome for outcome in report.outcomes if outcome.status == "ok"]
    above.scatter(
        [outcome.sent for outcome in answered],
        [outcome.ttft for outcome in answered],
        s=8,
        linewidths=0,
        color=color("generated"),
        label="answered",
    )
    if others := [outcome.sent for outcome in report.outcomes if outcome.status != "ok"]:
        above.scatter(others, [0.0] * len(others), s=16, marker="x", color=color("end"), label="refused or failed")
        above.legend(loc="upper right")
    above.set(ylabel="time to first token in s", ylim=(0, None))
    times, counts = zip(*_in_flight(report), strict=True)
    below.step(times, counts, where="post", color=color("shared"))
    below.set(xlabel="time in s", ylabel="requests in flight", ylim=(0, None))


def _in_flight(report: LoadReport) -> Iterator[tuple[float, int]]:
    """When the number of requests in flight changed, and to what."""
    changes = [(outcome.sent, 1) for outcome in report.outcomes] + [(each.ended, -1) for each in report.outcomes]
    changes.sort()
    counts = accumulate(change for _, change in changes)
    yield 0.0, 0
    yield from zip((time for time, _ in changes), counts, strict=True)
