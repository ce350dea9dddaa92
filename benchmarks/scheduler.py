"""What it costs to decide a step: `schedule()` and `update_from_output()`, without a model.

Every stage decodes with 1, 64, 256 and 1,024 requests in the batch, all batch slots taken, and 0 or 100,000 requests
waiting. In each step every request computes one token; every sixteenth, those of `paged` and `fair` take a block, and
the requests are staggered so each step has its share of them. The batches of one stage take turns. Times are of
one step, minimum and median over the steps. One thread.

    python -m benchmarks.scheduler
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

from rich.progress import track

from benchmarks._record import record
from minicache.request import Request
from minicache.scheduler import SCHEDULERS, Scheduler, create_scheduler

RUNNING = (1, 64, 256, 1024)
WAITING = (0, 100_000)
STEPS, PROMPT, BLOCK_SIZE = 200, 100, 16
MAX_TOKENS = STEPS + 2  # none finishes: one token comes with the prompt, and one is left at the end
TOKEN = 5


def main() -> None:
    rows = [row for stage in track(SCHEDULERS, description="Scheduling") for row in measure(stage)]
    record("scheduler", {"steps": STEPS, "block_size": BLOCK_SIZE, **summary(rows), "rows": rows})


def measure(stage: str) -> list[dict[str, Any]]:
    """A row for each batch of a stage, in microseconds."""
    sizes = [(running, waiting) for running in RUNNING for waiting in WAITING]
    schedulers = [decoding(stage, running, waiting) for running, waiting in sizes]
    seconds: list[list[tuple[float, float]]] = [[] for _ in sizes]
    for _ in range(STEPS):
        for scheduler, times in zip(schedulers, seconds, strict=True):
            times.append(one_step(scheduler))
    return [
        {"stage": stage, "running": running, "waiting": waiting, **microseconds(times, running)}
        for (running, waiting), times in zip(sizes, seconds, strict=True)
    ]


def decoding(stage: str, running: int, waiting: int) -> Scheduler:
    """A scheduler whose batch is full of requests in decode, with others waiting."""
    longest = PROMPT + BLOCK_SIZE + MAX_TOKENS
    scheduler = create_scheduler(
        stage,
        num_blocks=running * -(-longest // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        max_num_seqs=running,
        max_num_batched_tokens=running * longest,
    )
    for number in range(running):
        scheduler.add_request(Request(number, [TOKEN] * (PROMPT + number % BLOCK_SIZE), MAX_TOKENS))
    one_step(scheduler)
    for number in range(running, running + waiting):
        scheduler.add_request(Request(number, [TOKEN], MAX_TOKENS))
    assert (scheduler.num_running, scheduler.num_waiting) == (running, waiting)
    return scheduler


def one_step(scheduler: Scheduler) -> tuple[float, float]:
    """Seconds that one step took to schedule, and to commit."""
    start = time.perf_counter()
    output = scheduler.schedule()
    scheduled = time.perf_counter()
    token_ids = dict.fromkeys(output.num_scheduled_tokens, TOKEN)
    sampled = time.perf_counter()
    scheduler.update_from_output(output, token_ids)
    return scheduled - start, time.perf_counter() - sampled


def microseconds(times: list[tuple[float, float]], running: int) -> dict[str, float]:
    """Of the steps' seconds: each half's minimum, and both together."""
    steps = [sum(pair) for pair in times]
    return {
        "schedule": round(1e6 * min(schedule for schedule, _ in times), 1),
        "update": round(1e6 * min(update for _, update in times), 1),
        "step": round(1e6 * min(steps), 1),
        "step_median": round(1e6 * median(steps), 1),
        "per_request": round(1e6 * min(steps) / running, 3),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the pages state: µs of a step by batch and stage, and what a long queue and a larger batch change."""
    step = {(row["stage"], row["running"], row["waiting"]): row["step"] for row in rows}
    none, many = WAITING
    return {
        "step": {stage: {str(running): step[stage, running, none] for running in RUNNING} for stage in SCHEDULERS},
        "slowest_at_256": max(step[stage, 256, waiting] for stage in SCHEDULERS for waiting in WAITING),
        "long_queue_over_none_at_256": {stage: step[stage, 256, many] / step[stage, 256, none] for stage in SCHEDULERS},
        "1024_over_256": {stage: step[stage, 1024, none] / step[stage, 256, none] for stage in SCHEDULERS},
    }


if __name__ == "__main__":
    main()
