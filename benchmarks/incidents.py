"""What eight bugs of real schedulers cost: on the smallest workload that shows each, and where they were reported.

- `incidents`, **counted**: each incident's smallest workload (`minicache_course.incidents.table`), run by the
  scheduler with the bug and by the one without.
- `thrash`, **counted**: incident 3 as it was reported: a long request and a short one; and a long one that decodes when
  three of 50, 51 and 52 tokens come. In each, memory for all.
- `starvation`: incidents 2 and 3 together, as they were reported: 40 equal requests at once, 4,000 tokens to generate
  in all, memory for eight. Before is `StarvingScheduler`, after is `FairScheduler`. A request has starved if it takes
  more than TIMEOUT times as long as the server after the fix takes for all 40; it is still served. Time is given in
  three ways: in steps, **counted**; in seconds of Llama-3-8B on an L4, **modelled** by the roofline
  (`minicache.simulator.costs`); and in seconds of MiniGPT in this project's engine on this machine, **measured**: the
  faster of REPEATS runs each, which take turns.

    python -m benchmarks.incidents
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import mean
from typing import Any, Final

import torch
from rich.progress import track

from benchmarks._record import record
from minicache.arithmetic.specs import L4, LLAMA_3_8B
from minicache.engine.llm import LLM
from minicache.engine.sampling import SamplingParams
from minicache.request import Request, RequestId
from minicache.scheduler import FairScheduler, Scheduler, SchedulerOutput
from minicache.scheduler.drive import Tally, drive
from minicache.scheduler.observe import Observer, observe
from minicache.scheduler.paged import PagedScheduler
from minicache.simulator.costs import FixedCost, RooflineCost, StepCost, StepLoad
from minicache_course.incidents.broken import StarvingScheduler, ThrashScheduler
from minicache_course.incidents.case_3_thrash import FixedThrashScheduler
from minicache_course.incidents.table import INCIDENTS, measure

NUM_REQUESTS, NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 40, 60, 100
MEMORY_FOR: Final = 8
"""So many requests fit into the pool when they have all of their tokens."""
BLOCK_SIZE: Final = 16
TIMEOUT: Final = 1.5
"""In the report the server took 196 s after the fix, and before it a request of 247 s was still waited for."""
REPEATS: Final = 2

KINDS: dict[str, type[PagedScheduler]] = {"before": StarvingScheduler, "after": FairScheduler}


def main() -> None:
    torch.set_num_threads(1)
    record("incidents", {"incidents": incidents(), "thrash": thrash(), "starvation": starvation()})


def incidents() -> list[dict[str, Any]]:
    """Each incident's counters, with the bug and without."""
    return [
        {
            "number": incident.number,
            "name": incident.name,
            "slug": incident.slug,
            "counter": incident.counter,
            "broken": measure(incident.workload, incident.broken).as_dict(),
            "fixed": measure(incident.workload, incident.fixed).as_dict(),
        }
        for incident in INCIDENTS
    ]


def thrash() -> dict[str, Any]:
    """Incident 3's two reported workloads: (step of arrival, prompt tokens), each with 100 tokens to generate."""
    workloads = {"two": [(0, 120), (0, 50)], "four": [(0, 100), (1, 50), (1, 51), (1, 52)]}
    kinds: dict[str, type[Scheduler]] = {"broken": ThrashScheduler, "fixed": FixedThrashScheduler}
    found: dict[str, Any] = {}
    for name, workload in workloads.items():
        found[name] = {"prompts": [prompt for _, prompt in workload]}
        for how, kind in kinds.items():
            arrivals = [(step, Request(number, [1] * prompt, 100)) for number, (step, prompt) in enumerate(workload)]
            found[name][how] = counted(drive(kind(num_blocks=64), arrivals=arrivals))
    return found


def counted(tally: Tally) -> dict[str, Any]:
    """What a run has cost."""
    return {
        "num_steps": tally.num_steps,
        "num_prefill_tokens": tally.num_prefill_tokens,
        "num_preemptions": tally.num_preemptions,
        "mean_batch_size": round(tally.mean_batch_size, 2),
        "max_batch_size": max(tally.batch_sizes),
        "finished": {str(name): step + 1 for name, step in tally.finished.items()},
    }


def starvation() -> dict[str, Any]:
    """40 equal requests before and after, on three clocks."""
    clocks: dict[str, Callable[[str], dict[RequestId, float]]] = {
        "steps": lambda name: modelled(name, FixedCost()),
        "modelled_seconds": lambda name: modelled(name, RooflineCost(LLAMA_3_8B, L4)),
    }
    times = {clock: {name: run(name) for name in KINDS} for clock, run in clocks.items()}
    times["measured_seconds"] = measured()
    return {
        "num_requests": NUM_REQUESTS,
        "num_prompt_tokens": NUM_PROMPT_TOKENS,
        "num_output_tokens": NUM_OUTPUT_TOKENS,
        "num_blocks": num_blocks(),
        "block_size": BLOCK_SIZE,
        "timeout": TIMEOUT,
        "repeats": REPEATS,
        "work": {name: counted(drive(make(name), requests())) for name in KINDS},
        **{clock: told(each) for clock, each in times.items()},
    }


def num_blocks() -> int:
    return MEMORY_FOR * -(-(NUM_PROMPT_TOKENS + NUM_OUTPUT_TOKENS) // BLOCK_SIZE)


def make(name: str) -> PagedScheduler:
    return KINDS[name](num_blocks=num_blocks(), block_size=BLOCK_SIZE)


def requests() -> list[Request]:
    return [Request(number, [1] * NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS) for number in range(NUM_REQUESTS)]


def told(times: dict[str, dict[RequestId, float]]) -> dict[str, Any]:
    """When each request finished, before and after, and what that means."""
    timeout = TIMEOUT * max(times["after"].values())
    return {
        "timeout": round(timeout, 3),
        **{
            name: {
                "starved": sum(each > timeout for each in ends.values()),
                "fastest": round(min(ends.values()), 3),
                "average": round(mean(ends.values()), 3),
                "slowest": round(max(ends.values()), 3),
                "requests": [round(ends[number], 3) for number in range(NUM_REQUESTS)],
            }
            for name, ends in times.items()
        },
    }


class Ends(Observer):
    """Notes when each request has finished, by a clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.times: dict[RequestId, float] = {}

    def on_update(self, scheduler: Scheduler, output: SchedulerOutput, finished: list[Request]) -> None:
        """Note what has finished with this step."""
        self.times |= {request.request_id: self.clock() for request in finished}


class Clock(Observer):
    """Simulated time: each step takes the seconds of a cost model."""

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost
        self.now = 0.0

    def on_schedule(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Let the step take its time."""
        new = output.num_scheduled_tokens.values()
        batch = [(num_new, each.num_computed_tokens) for num_new, each in zip(new, output.scheduled, strict=True)]
        self.now += self.cost.step_seconds(StepLoad.of(batch))


def modelled(name: str, cost: StepCost) -> dict[RequestId, float]:
    """Request → when it finished, if a step takes what `cost` says."""
    clock = Clock(cost)
    ends = Ends(lambda: clock.now)
    drive(observe(make(name), clock, ends), requests())
    return ends.times


def measured() -> dict[str, dict[RequestId, float]]:
    """Before and after: request → when it finished, in seconds, MiniGPT in the engine. The faster of the repeats."""
    best: dict[str, dict[RequestId, float]] = {}
    for _ in track(range(REPEATS), description="Serving 40 requests"):
        for name in KINDS:
            ends = Ends(time.perf_counter)
            engine = LLM("minigpt", scheduler=make(name), observers=[ends])
            prompts = [[1 + number] * NUM_PROMPT_TOKENS for number in range(NUM_REQUESTS)]
            start = time.perf_counter()
            engine.generate(prompts, SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True))
            times = {request_id: end - start for request_id, end in ends.times.items()}
            if name not in best or max(times.values()) < max(best[name].values()):
                best[name] = times
    return best


if __name__ == "__main__":
    main()
