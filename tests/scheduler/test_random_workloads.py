"""Two hundred random workloads, small pools and all, audited after every call; and their traces, read back from disk.

The auditor says whether the books agree; what the requests got is counted here, from what was asked for alone.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from minicache.request import Request, RequestStatus
from minicache.scheduler import Scheduler, create_scheduler
from minicache.scheduler.audit import Auditor
from minicache.scheduler.audit_trace import audit_trace
from minicache.scheduler.observe import Recorder, observe
from minicache.trace import TraceStep, read_trace, write_trace

STOP = 3
MAX_STEPS = 2000


@dataclass
class Workload:
    """A stage with its options, requests, when each arrives, and what happens to whom."""

    name: str
    options: dict[str, object]
    requests: list[Request]
    arrivals: dict[int, list[Request]]
    aborts: dict[int, int]
    rng: random.Random
    steps: list[TraceStep] = field(default_factory=list)


def workload(seed: int) -> Workload:
    rng = random.Random(seed)
    name = ("static", "continuous", "paged", "paged", "fair")[seed % 5]
    block_size = rng.choice([1, 2, 3, 8, 16])
    max_model_len = rng.choice([None, None, None, 24])
    groups, priorities = (["text", "image"], [0, 0, 1, -1]) if name == "fair" else (["text"], [0])
    requests = [
        Request(
            index,
            [1] * rng.randint(1, rng.choice([4, 20])),
            rng.choice([1, rng.randint(1, 40), rng.randint(1, 40)]),
            stop_token_ids=[STOP] if rng.random() < 0.5 else [],
            ignore_eos=rng.random() < 0.2,
            group=rng.choice(groups),
            priority=rng.choice(priorities),
        )
        for index in range(rng.randint(2, 14))
    ]
    reserves = name in ("static", "continuous")
    longest = [request.num_prompt_tokens + reserves * request.max_tokens for request in requests]
    smallest = max(-(-tokens // block_size) for tokens in longest)  # one request's size
    options = {
        "num_blocks": smallest + rng.choice([0, 10, 20, 30, 40]) // block_size,
        "block_size": block_size,
        "max_num_seqs": rng.choice([1, 4, 20, 20]),
        "max_num_batched_tokens": rng.choice([20, 22, 64]),
        "max_model_len": max_model_len,
        "preemption": rng.choice(["recompute", "swap"]),
        "num_host_blocks": rng.choice([1, 4, 30, 60]),
        "watermark": rng.choice([0.0, 0.0, 0.1, 0.9]),
    }
    arrivals: dict[int, list[Request]] = {}
    for request in requests:
        arrivals.setdefault(rng.choice([0, 0, rng.randint(0, 20)]), []).append(request)
    aborts = {rng.randint(0, 30): request.request_id for request in requests if rng.random() < 0.15}
    return Workload(name, options, requests, arrivals, aborts, rng)


def serve(work: Workload) -> Scheduler:
    """Run it to its end, audited and recorded."""
    recorder, rng = Recorder(work.steps.append), work.rng
    scheduler = observe(create_scheduler(work.name, **work.options), Auditor(), recorder)
    last_arrival = max(work.arrivals)
    for step in range(MAX_STEPS):
        for request in work.arrivals.get(step, ()):
            scheduler.add_request(request)
        if step > last_arrival and not scheduler.has_unfinished:
            return scheduler
        if step in work.aborts and step % 2:
            scheduler.abort_request(work.aborts[step])
        output = scheduler.schedule()
        if rng.random() < 0.02:
            if rng.random() < 0.5:
                scheduler.recover()
            output = scheduler.schedule()  # the model failed
        if step in work.aborts and not step % 2:
            scheduler.abort_request(work.aborts[step])
        scheduler.update_from_output(output, {each: rng.randrange(60) for each in output.num_scheduled_tokens})
        scheduler.check()
    raise AssertionError(f"{work.name} has unfinished requests after {MAX_STEPS} steps")


def check_answer(work: Workload, request: Request, slots: int) -> None:
    """Every way to finish, from what was asked for."""
    generated = len(request.output_token_ids)
    longest = request.max_tokens
    if (limit := work.options["max_model_len"]) is not None:
        longest = min(longest, limit - request.num_prompt_tokens)
    stops = [] if request.ignore_eos else [index for index, each in enumerate(request.output_token_ids) if each == STOP]
    stopped = bool(request.stop_token_ids and stops)
    assert generated <= longest
    match request.status:
        case RequestStatus.FINISHED_STOPPED:
            assert stopped
            assert stops == [generated - 1]
        case RequestStatus.FINISHED_LENGTH:
            assert not stopped
            assert generated == longest
        case RequestStatus.FINISHED_CAPACITY:
            assert not stopped
            assert request.num_prompt_tokens + generated == slots + 1
        case RequestStatus.FINISHED_ABORTED:
            assert request.request_id in work.aborts.values()
        case _:
            raise AssertionError(f"{request!r} has not finished")


@pytest.mark.parametrize("seed", range(200))
def test_a_random_workload(seed: int, tmp_path: Path) -> None:
    work = workload(seed)
    scheduler = serve(work)
    slots = scheduler.pool.num_blocks * scheduler.pool.block_size
    for request in work.requests:
        check_answer(work, request, slots)
    assert scheduler.pool.num_free == scheduler.pool.num_blocks
    write_trace(tmp_path / "trace.jsonl", work.steps)
    limits = {name: work.options[name] for name in ("max_num_seqs", "max_num_batched_tokens")}
    num_steps = audit_trace(read_trace(tmp_path / "trace.jsonl"), **limits, first_come=work.name != "fair")
    assert num_steps == len(work.steps) > 0


@pytest.mark.slow
def test_the_workloads_are_worth_their_name() -> None:
    """What they are meant to try is tried: else a change of the generator could make them harmless."""
    kinds: Counter[str | None] = Counter()
    for seed in range(200):
        work = workload(seed)
        serve(work)
        kinds.update(event.reason or event.kind for step in work.steps for event in step.events)
    assert all(kinds[kind] >= 50 for kind in ("preempt", "resume", "stop", "length", "capacity", "abort"))
    assert all(kinds[kind] >= 20 for kind in ("swap_out", "swap_in"))
    assert kinds["preempt"] - kinds["swap_out"] >= 50
