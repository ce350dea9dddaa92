"""The server under a load that does not wait for it: latencies at several rates, next to what the simulator foretells.

`minicache serve` runs in a process of its own, with MiniGPT, 32 batch slots and 64 places behind them. The load client
sends ShareGPT's lengths, scaled down to MiniGPT's 512 tokens (in the mean 40 in and 84 out), as a Poisson process: an
open loop, whose requests come whether or not earlier ones were answered. Rates are parts of what the server can do,
which is found first: 160 of the same requests at once, twice, and how many a second it answers (the line is long enough
then).

The same arrivals are then served in simulated time, by the same scheduler, with steps that cost what they cost this
host: calibrated between the runs, of which the median counts, for the loads were not served at a quiet moment either.
The simulator turns no one away, so at a rate above 1 it foretells a line that the server refuses to have.

    python -m benchmarks.serving_http
"""

from __future__ import annotations

import asyncio
import math
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks._record import record
from minicache.engine.kv import default_num_blocks
from minicache.model import load_minigpt
from minicache.scheduler import Scheduler, create_scheduler
from minicache.serving.load import (
    Endpoint,
    LoadReport,
    LoadRun,
    PlannedRequest,
    fit_workload,
    make_requests,
    predict,
    workload_arrivals,
)
from minicache.simulator.report import ServingReport, Summary
from minicache.simulator.workload import SHAREGPT
from minicache_cli.calibrate import Measurement, fit, measure, swap_seconds

PARTS = (0.2, 0.4, 0.6, 0.8, 1.3)
"""Rates, as parts of what the server answers at most."""
SECONDS = 20.0
"""For so long requests come, at each rate."""
MAX_NUM_SEQS, MAX_WAITING, MAX_MODEL_LEN, BLOCK_SIZE = 32, 64, 512, 16
NUM_AT_ONCE = 160
STATISTICS = ("p50", "p90", "p99")
console = Console(highlight=False)


def main() -> None:
    torch.set_num_threads(1)
    rounds = [measure(1, console)]
    with a_server(NUM_AT_ONCE) as endpoint:
        send(endpoint, plan(32, math.inf))  # the first steps of a process are slower
        rate = max(send(endpoint, plan(NUM_AT_ONCE, math.inf)).requests_per_second for _ in range(2))
    console.print(f"At once: {rate:.1f} requests a second.")
    runs: dict[float, tuple[list[PlannedRequest], LoadReport]] = {}
    with a_server(MAX_WAITING) as endpoint:
        send(endpoint, plan(32, math.inf))
        for part in PARTS:
            requests = plan(round(part * rate * SECONDS), part * rate)
            runs[part] = requests, send(endpoint, requests)
            console.print(f"{part:g} of it: {runs[part][1].num_ok} answered, {runs[part][1].num_refused} refused.")
            rounds.append(measure(1, console))
    steps = [Measurement(same[0].load, median(each.seconds for each in same)) for same in zip(*rounds, strict=True)]
    cost = fit(steps, swap_seconds(3))
    found = [
        point(part, part * rate, measured, predict(requests, scheduler(), cost))
        for part, (requests, measured) in runs.items()
    ]
    show(found)
    record(
        "serving_http",
        {
            "requests_per_second_at_most": round(rate, 2),
            "seconds": SECONDS,
            "max_num_seqs": MAX_NUM_SEQS,
            "max_waiting": MAX_WAITING,
            "rates": found,
        },
    )


# The load


def plan(count: int, rate: float) -> list[PlannedRequest]:
    """So many of the requests, at that rate; infinity: at once."""
    arrivals = workload_arrivals(fit_workload(SHAREGPT, MAX_MODEL_LEN), count, rate)
    return make_requests(arrivals, model="minigpt")


def send(endpoint: Endpoint, requests: Sequence[PlannedRequest]) -> LoadReport:
    """Send them when they are due, and wait for every answer."""
    run = LoadRun(endpoint, requests)
    asyncio.run(run.run())
    report = LoadReport.of(run, len(requests))
    if report.num_ok + report.num_refused < len(requests):
        raise RuntimeError(f"not every request was answered or refused: {report.errors}")
    return report


def scheduler() -> Scheduler:
    """The server's, for the simulator."""
    num_blocks = default_num_blocks(load_minigpt(), BLOCK_SIZE, MAX_NUM_SEQS, MAX_MODEL_LEN)
    return create_scheduler(
        "chunked",
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=8192,
        max_model_len=MAX_MODEL_LEN,
        prefix_caching=True,
    )


# The server


@contextmanager
def a_server(max_waiting: int) -> Iterator[Endpoint]:
    """`minicache serve` on a free port, until it is not needed any more."""
    sizes = {"max-num-seqs": MAX_NUM_SEQS, "max-waiting": max_waiting, "block-size": BLOCK_SIZE}
    options = {"port": 0, **sizes, "log-level": "warning"}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-u", "-c", "from minicache_cli import app; app()", "serve", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            port = next(int(found[1]) for line in process.stdout if (found := re.search(r":(\d+)/v1", line)))
            yield Endpoint("127.0.0.1", port)
        finally:
            process.terminate()


# What is recorded


def point(part: float, rate: float, measured: LoadReport, predicted: ServingReport) -> dict[str, Any]:
    """One rate: what the clients felt, and what the simulator says that they would."""
    return {
        "part": part,
        "rate": round(rate, 2),
        "num_requests": measured.num_requests,
        "num_ok": measured.num_ok,
        "num_refused": measured.num_refused,
        "share_refused": round(measured.num_refused / measured.num_requests, 4),
        "retry_after_p50_s": round(measured.retry_after.p50, 1) if measured.num_refused else None,
        "measured": told(measured.ttft, measured.tpot, measured.requests_per_second, measured.tokens_per_second),
        "predicted": told(predicted.ttft, predicted.tpot, predicted.requests_per_second, predicted.tokens_per_second),
        "itl_p99_ms": round(1e3 * measured.itl.p99, 2),
        "itl_max_ms": round(1e3 * measured.itl.max, 2),
        "client_lag_p99_ms": round(1e3 * measured.lag.p99, 2),
        "client_cpu_share": round(measured.cpu_share, 3),
        "notes": measured.notes,
    }


def told(ttft: Summary, tpot: Summary, requests_per_second: float, tokens_per_second: float) -> dict[str, float]:
    """The numbers that both have."""
    return {
        **{f"ttft_{name}_ms": round(1e3 * getattr(ttft, name), 1) for name in STATISTICS},
        **{f"tpot_{name}_ms": round(1e3 * getattr(tpot, name), 2) for name in STATISTICS},
        "requests_per_second": round(requests_per_second, 2),
        "tokens_per_second": round(tokens_per_second, 1),
    }


def show(found: Sequence[dict[str, Any]]) -> None:
    """Measured next to predicted."""
    table = Table(title="Milliseconds, measured and predicted", box=SIMPLE_HEAD)
    for heading in ("rate", "refused", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99"):
        table.add_column(heading, justify="right")
    for each in found:
        pairs = [
            f"{each['measured'][f'{what}_{name}_ms']:,.1f} {each['predicted'][f'{what}_{name}_ms']:,.1f}"
            for what in ("ttft", "tpot")
            for name in ("p50", "p99")
        ]
        table.add_row(f"{each['rate']:.1f}/s", f"{each['num_refused']}", *pairs)
    console.print(table)


if __name__ == "__main__":
    main()
