"""What chunked prefill does to the inter-token latencies: the stall, the budget, goodput under an SLO, and its cost.

Three schedulers serve the same requests:

- "chunked", with a budget a step.
- "fair", phase 7's: a prompt is computed whole, in one step with the decodes. So no request skips a step, and every
  step is as long as its prompts make it. Orca batches so.
- "phased": a step is all prompts or all decodes, prompts first: decodes wait while any request can be admitted.
  vLLM served so when Sarathi-Serve (Agrawal et al., OSDI 2024) was measured against it.

A gap is the time from one token of a request to its next (the paper's TBT). The modelled server is Llama-3-8B on an
A100-80GB by the roofline (`minicache.simulator.costs`), Mistral-7B's attention on the paper's GPU. The paper's own is
the PCIe card and another model; its load is other texts. So ratios are compared with its 2.6, not rates.

    python -m benchmarks.chunked

Keys of results/chunked.json (times in ms unless the key ends in _s; rates in requests a second):

- `measured`: the stall, timed on this host. num_decoding requests are in decode when a prompt of long_prompt_tokens
  arrives. `.fair`, `.chunked`: before_ms (the median gap before it), longest_gap_ms, num_longer (gaps over twice
  before_ms from then on), ttft_ms (of the long prompt), points (ms since it arrived and gap in ms, of one request in
  decode). `.ratio`: longest gap, fair over chunked. `.ttft_ratio`: chunked over fair. `.num_tokens_that_differ`: of all
  num_tokens of the answers, chunked next to fair.
- `simulated`: the same on the modelled server, `.phased` too.
- `prefill`: one prompt alone, in chunks. `.simulated.points`, `.measured.points`: budget, num_chunks, ms, over_whole
  (ms over those of one step), rows_reread (cached rows that later chunks read).
- `budget`: how the budget moves latencies, at `.rate` requests a second of Azure's conversations. `.fair` and
  `.points` (with budget): ttft_p50_ms, ttft_p99_ms, tpot_p50_ms, tpot_p99_ms (of requests' means), gap_p50_ms,
  gap_p99_ms, gap_max_ms, batch, requests_per_second.
- `goodput`: the highest rate at which an SLO is met. `.slos.<slo>`: what is limited, to how much, by which budget.
  `.<load>.ways.<way>`: points as above with their rate, <way> being fair, phased, chunked_512, chunked_2048.
  `.<load>.<slo>`: capacity of fair, phased, chunked; ratio_to_fair, ratio_to_phased. null where no rate that was tried
  is within the SLO, or none beyond it; in `.conversation` nowhere. `.paper`: 2.6.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from math import exp, log
from random import Random
from statistics import median
from typing import Any, Final

import torch
from rich.progress import track

from benchmarks._record import record
from minicache.arithmetic.arithmetic import cache_bytes_per_token, cache_capacity_tokens, weight_bytes
from minicache.arithmetic.specs import A100_80GB, LLAMA_3_8B
from minicache.engine.llm import LLM
from minicache.engine.sampling import SamplingParams
from minicache.model import MiniGPT, MiniGPTConfig
from minicache.request import Request, RequestId
from minicache.scheduler import Scheduler, create_scheduler
from minicache.scheduler.observe import Observer
from minicache.scheduler.output import SchedulerOutput
from minicache.simulator.costs import RooflineCost, StepLoad
from minicache.simulator.report import ServingReport, Summary
from minicache.simulator.serving import ServingSimulation
from minicache.simulator.workload import AZURE_CODE, AZURE_CONVERSATION, SHAREGPT, Arrival, Workload, stream
from minicache_course.incidents.bases import PhasedScheduler

BLOCK_SIZE: Final = 16
MAX_NUM_SEQS: Final = 256
COST: Final = RooflineCost(LLAMA_3_8B, A100_80GB)
NUM_BLOCKS: Final = (
    cache_capacity_tokens(
        int(0.9 * A100_80GB.memory_bytes),
        weight_bytes(LLAMA_3_8B.num_parameters),
        cache_bytes_per_token(LLAMA_3_8B),
    )
    // BLOCK_SIZE
)
"""What 90 % of the memory has room for next to the weights."""
WHOLE: Final = AZURE_CONVERSATION.max_model_len + MAX_NUM_SEQS
"""Tokens of a step where prompts are computed whole: the longest prompt fits next to a full batch of decodes."""

SHAPE: Final = MiniGPTConfig(
    vocab_size=4096,
    hidden_size=256,
    num_layers=6,
    num_heads=8,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=688,
    max_seq_len=4096,
)
"""Of the random model that is timed: that of benchmarks/engine.py, for longer texts."""
REPEATS: Final = 5
NUM_DECODING, SHORT, LONG, NUM_BEFORE, NUM_AFTER = 8, 32, 3000, 15, 45
"""Requests in decode and the length of their prompts; the long prompt; tokens that they have when it comes, and get
from then on."""
ENGINE_BUDGET: Final = 128
SHOWN_BEFORE, SHOWN_AFTER = 250.0, 2500.0
"""How much of a run is recorded point by point, in ms before and after the long prompt comes."""

NUM_DECODING_THERE, SHORT_THERE, LONG_THERE, NUM_OUTPUT_THERE = 32, 500, 8000, 300
LATE: Final = 3.0
"""The same on the modelled server, and when the long prompt comes: all are in decode by then, whatever the way."""
BUDGET: Final = 512

BUDGETS: Final = (128, 256, 512, 1024, 2048, 4096, 8192)
ENGINE_BUDGETS: Final = (32, 64, 128, 256, 512, 1024)
TTFT_LIMIT: Final = 5.0
"""Seconds within which 99 % of the requests have their first token, in every SLO."""
OVERLOADED: Final = 4 * TTFT_LIMIT
"""A p99 of the TTFT above which no higher rate is tried."""


@dataclass(frozen=True, slots=True)
class Slo:
    """A limit on top of TTFT_LIMIT.

    Attributes:
        key: which figure of a point is limited, in ms.
        limit: to how many.
        budget: of the chunked scheduler.
    """

    key: str
    limit: float
    budget: int


SLOS: Final = {
    "strict": Slo("gap_p99_ms", 100.0, 512),
    "relaxed": Slo("gap_p99_ms", 500.0, 2048),
    "tpot": Slo("tpot_p99_ms", 60.0, 512),
}
"""The first two limits, and the budgets with them, are those of Sarathi-Serve's experiments with Mistral-7B
(github.com/microsoft/sarathi-serve, osdi-experiments/figure-5-6). "tpot" limits each request's mean, where a stall is
spread over its tokens. TTFT_LIMIT is ours."""
PAPER: Final = 2.6
"""Capacity over vLLM's, Mistral-7B on one A100 (Agrawal et al. 2024, abstract)."""


@dataclass(frozen=True, slots=True)
class Load:
    """A workload, for how many seconds its requests arrive, and at what rates."""

    workload: Workload
    seconds: float
    rates: tuple[float, ...]


LOADS: Final = {
    "conversation": Load(AZURE_CONVERSATION, 400.0, tuple(half / 2 for half in range(2, 21))),
    "code": Load(
        replace(AZURE_CODE, arrival_cv=1.0), 400.0, (0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5, 6.0)
    ),
    "sharegpt": Load(SHAREGPT, 60.0, (12.0, 16.0, 20.0, 24.0, 28.0)),
}
"""Code comes as Poisson arrivals: in the bursts of its trace, 13 times as uneven, whatever comes waits for what came
with it, and one would see nothing else. The prompts of ShareGPT are short: chunking should barely matter there."""
BUDGET_RATE: Final = 4.0
"""Requests a second of the first of these at which the budget is moved."""
WAYS: Final = ("fair", "phased")


def main() -> None:
    torch.set_num_threads(1)
    record(
        "chunked",
        {
            "block_size": BLOCK_SIZE,
            "num_blocks": NUM_BLOCKS,
            "measured": stall_measured(),
            "simulated": stall_simulated(),
            "prefill": {"simulated": prefill_simulated(), "measured": prefill_measured()},
            "budget": budgets(),
            "goodput": goodput(),
        },
    )


def scheduler(way: str, budget: int = WHOLE) -> Scheduler:
    """One of the three, over the modelled server's memory."""
    if way == "phased":
        return PhasedScheduler(
            num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=budget
        )
    return create_scheduler(
        way, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=budget
    )


# --- the stall, measured ----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Stall:
    """What a run of the stall found: when each of one request's tokens came, and the long prompt's first; in seconds.

    `answers` are all tokens, where they mean anything.
    """

    times: list[float]
    long_arrives: float
    long_first: float
    answers: list[list[int]]

    @property
    def gaps(self) -> list[float]:
        """From each token to the next."""
        return [later - earlier for earlier, later in pairwise(self.times)]

    def told(self) -> dict[str, Any]:
        """What is recorded. Time counts from when the long prompt came."""
        points = [
            [round(1e3 * (when - self.long_arrives), 2), round(1e3 * gap, 2)]
            for when, gap in zip(self.times[1:], self.gaps, strict=True)
        ]
        before = median([gap for when, gap in points if when <= 0][-NUM_BEFORE:])
        after = [gap for when, gap in points if when > 0]
        return {
            "before_ms": round(before, 2),
            "longest_gap_ms": max(after),
            "num_longer": sum(gap > 2 * before for gap in after),
            "ttft_ms": round(1e3 * (self.long_first - self.long_arrives), 2),
            "points": [point for point in points if -SHOWN_BEFORE < point[0] < SHOWN_AFTER],
        }


def stall_measured() -> dict[str, Any]:
    """A long prompt among requests in decode, on this host.

    Both ways take turns; the run with the shortest longest gap counts, the one that the machine disturbed least.
    """
    model = random_model()
    budgets = {"fair": SHAPE.max_seq_len * 2, "chunked": ENGINE_BUDGET}
    runs: dict[str, list[Stall]] = {way: [] for way in budgets}
    for _ in track(range(REPEATS), description="The stall"):
        for way, budget in budgets.items():
            runs[way].append(stalled(model, way, budget))
    best = {way: min(each, key=lambda run: run.told()["longest_gap_ms"]) for way, each in runs.items()}
    pairs = zip(*(chain.from_iterable(best[way].answers) for way in budgets), strict=True)
    return {
        "model": f"random Llama, {model.num_parameters():,} parameters, float32",
        "threads": 1,
        "repeats": REPEATS,
        "num_decoding": NUM_DECODING,
        "long_prompt_tokens": LONG,
        "budget": ENGINE_BUDGET,
        **compared({way: run.told() for way, run in best.items()}),
        "num_tokens": sum(map(len, best["fair"].answers)),
        "num_tokens_that_differ": sum(one != other for one, other in pairs),
    }


def random_model() -> MiniGPT:
    """The model that is timed, its weights as the engine lays them out."""
    torch.manual_seed(0)
    return MiniGPT(SHAPE).eval()


def stalled(model: MiniGPT, way: str, budget: int) -> Stall:
    """Requests in decode, then the long prompt, then decode until all have their tokens."""
    rng = Random(0)
    engine = LLM(model, scheduler=way, max_num_batched_tokens=budget)
    params = SamplingParams(max_tokens=NUM_BEFORE + NUM_AFTER, ignore_eos=True)
    names = [engine.add_request(tokens(rng, SHORT), params) for _ in range(NUM_DECODING)]
    answers: dict[RequestId, list[int]] = {name: [] for name in names}
    found = Stall([], 0.0, 0.0, [])
    late: RequestId | None = None
    while engine.has_unfinished:
        if late is None and len(answers[names[0]]) == NUM_BEFORE:
            prompt = tokens(rng, LONG)
            found.long_arrives = time.perf_counter()
            late = engine.add_request(prompt, SamplingParams(max_tokens=8, ignore_eos=True))
            answers[late] = []
        chunks = engine.step()
        now = time.perf_counter()
        for chunk in chunks:
            assert chunk.token_id is not None
            if chunk.request_id == late and not answers[late]:
                found.long_first = now
            if chunk.request_id == names[0]:
                found.times.append(now)
            answers[chunk.request_id].append(chunk.token_id)
    found.answers = list(answers.values())
    return found


def tokens(rng: Random, count: int) -> list[int]:
    """A prompt of the random model."""
    return [rng.randrange(SHAPE.vocab_size) for _ in range(count)]


def compared(told: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Runs of the stall, and how they compare."""
    fair, chunked = told["fair"], told["chunked"]
    return {
        **told,
        "ratio": round(fair["longest_gap_ms"] / chunked["longest_gap_ms"], 2),
        "ttft_ratio": round(chunked["ttft_ms"] / fair["ttft_ms"], 2),
    }


# --- the stall, modelled ----------------------------------------------------------------------------------------------


class Gaps(Observer):
    """Notes, on a simulation's clock, when tokens come: `gaps` of all requests, and the `times` of those in `watched`.

    Set `simulation` before it runs.
    """

    def __init__(self, *watched: RequestId) -> None:
        self.simulation: ServingSimulation | None = None
        self.gaps: list[float] = []
        self.times: dict[RequestId, list[float]] = {name: [] for name in watched}
        self._last: dict[RequestId, float] = {}

    def on_update(self, scheduler: Scheduler, output: SchedulerOutput, finished: list[Request]) -> None:
        """A request of which all tokens but the newest are computed has just gained that one."""
        assert self.simulation is not None
        now, last = self.simulation.now, self._last
        for request in output.scheduled:
            name = request.request_id
            if request.num_computed_tokens == request.num_tokens - 1:
                if name in last:
                    self.gaps.append(now - last[name])
                last[name] = now
                if name in self.times:
                    self.times[name].append(now)
        for request in finished:
            del last[request.request_id]


def simulate(scheduler: Scheduler, arrivals: Iterator[Arrival], gaps: Gaps) -> ServingReport:
    """One run on the modelled server."""
    gaps.simulation = ServingSimulation(scheduler, COST, arrivals, observers=[gaps])
    return gaps.simulation.run()


def stall_simulated() -> dict[str, Any]:
    """The same stall on the modelled server, with all three."""
    found = {}
    for way in (*WAYS, "chunked"):
        come = [Arrival(name, 0.0, SHORT_THERE, NUM_OUTPUT_THERE) for name in range(NUM_DECODING_THERE)]
        late = Arrival(NUM_DECODING_THERE, LATE, LONG_THERE, 8)
        gaps = Gaps(0, late.request_id)
        simulate(scheduler(way, BUDGET if way == "chunked" else WHOLE), iter([*come, late]), gaps)
        found[way] = Stall(gaps.times[0], LATE, gaps.times[late.request_id][0], []).told()
    return {
        "num_decoding": NUM_DECODING_THERE,
        "long_prompt_tokens": LONG_THERE,
        "budget": BUDGET,
        **compared(found),
    }


# --- a prompt alone, in chunks ----------------------------------------------------------------------------------------


def prefill_simulated() -> dict[str, Any]:
    """What chunking costs a prompt that has the modelled server to itself."""
    seconds = {}
    for budget in (*(each for each in BUDGETS if each < LONG_THERE), LONG_THERE):
        chunks = chunks_of(LONG_THERE, budget)
        seconds[budget] = sum(COST.step_seconds(StepLoad.of([(new, cached)])) for cached, new in chunks)
    return {"prompt_tokens": LONG_THERE, "points": [chunk_point(LONG_THERE, each, seconds) for each in seconds]}


def prefill_measured() -> dict[str, Any]:
    """The same on this host: the fastest of REPEATS runs in turns, until the first token is there."""
    model = random_model()
    prompt = tokens(Random(0), LONG)
    runs: dict[int, list[float]] = {budget: [] for budget in (*ENGINE_BUDGETS, LONG)}
    for _ in track(range(REPEATS), description="A prompt in chunks"):
        for budget, seconds in runs.items():
            engine = LLM(model, scheduler="chunked", max_num_batched_tokens=budget)
            start = time.perf_counter()
            engine.generate([prompt], SamplingParams(max_tokens=1, ignore_eos=True))
            seconds.append(time.perf_counter() - start)
    best = {budget: min(seconds) for budget, seconds in runs.items()}
    return {"prompt_tokens": LONG, "points": [chunk_point(LONG, budget, best) for budget in runs]}


def chunks_of(num_tokens: int, budget: int) -> list[tuple[int, int]]:
    """A prompt's chunks: where each begins, and its tokens."""
    return [(start, min(budget, num_tokens - start)) for start in range(0, num_tokens, budget)]


def chunk_point(num_tokens: int, budget: int, seconds: dict[int, float]) -> dict[str, Any]:
    """What is recorded of a budget. That of the whole prompt is among `seconds`."""
    chunks = chunks_of(num_tokens, budget)
    return {
        "budget": budget,
        "num_chunks": len(chunks),
        "ms": round(1e3 * seconds[budget], 1),
        "over_whole": round(seconds[budget] / seconds[num_tokens], 3),
        "rows_reread": sum(start for start, _ in chunks),
    }


# --- the budget -------------------------------------------------------------------------------------------------------


def budgets() -> dict[str, Any]:
    """TTFT and TPOT as the budget moves, at one rate."""
    points = [
        {"budget": budget, **at_rate("chunked", LOADS["conversation"], BUDGET_RATE, budget)}
        for budget in track(BUDGETS, description="Budgets")
    ]
    return {
        "rate": BUDGET_RATE,
        "seconds": LOADS["conversation"].seconds,
        "fair": at_rate("fair", LOADS["conversation"], BUDGET_RATE),
        "points": points,
    }


def at_rate(way: str, load: Load, rate: float, budget: int = WHOLE) -> dict[str, Any]:
    """A load at one rate, and the latencies."""
    gaps = Gaps()
    arrivals = stream(replace(load.workload, rate=rate), round(rate * load.seconds), seed=0)
    run = simulate(scheduler(way, budget), arrivals, gaps)
    gap = Summary.of(gaps.gaps)
    return {
        "rate": rate,
        **{f"ttft_{name}_ms": round(1e3 * getattr(run.ttft, name), 1) for name in ("p50", "p99")},
        **{f"tpot_{name}_ms": round(1e3 * getattr(run.tpot, name), 2) for name in ("p50", "p99")},
        **{f"gap_{name}_ms": round(1e3 * getattr(gap, name), 2) for name in ("p50", "p99", "max")},
        "batch": round(run.mean_batch_size, 1),
        "preemptions": run.num_preemptions,
        "requests_per_second": round(run.requests_per_second, 3),
    }


# --- goodput ----------------------------------------------------------------------------------------------------------


def goodput() -> dict[str, Any]:
    """For each load the curves of all ways, and what each serves within each SLO."""
    return {
        "ttft_p99_limit_s": TTFT_LIMIT,
        "paper": PAPER,
        "slos": {name: {"key": slo.key, "limit_ms": slo.limit, "budget": slo.budget} for name, slo in SLOS.items()},
        **{name: of_load(name, load) for name, load in LOADS.items()},
    }


def of_load(name: str, load: Load) -> dict[str, Any]:
    """One load: the curves, and the capacities."""
    chunked = {f"chunked_{slo.budget}": ("chunked", slo.budget) for slo in SLOS.values()}
    ways = {way: (way, WHOLE) for way in WAYS} | chunked
    curves = {
        told: curve(way, load, budget) for told, (way, budget) in track(ways.items(), description=f"Goodput, {name}")
    }
    return {
        "prompt_tokens": round(load.workload.prompt.mean),
        "output_tokens": round(load.workload.output.mean),
        "seconds": load.seconds,
        "ways": curves,
        **{slo: capacities(curves, each) for slo, each in SLOS.items()},
    }


def curve(way: str, load: Load, budget: int) -> list[dict[str, Any]]:
    """A point for each rate, up to the first that is far too much."""
    points = []
    for rate in load.rates:
        points.append(at_rate(way, load, rate, budget))
        if points[-1]["ttft_p99_ms"] > 1e3 * OVERLOADED:
            break
    return points


def capacities(curves: dict[str, list[dict[str, Any]]], slo: Slo) -> dict[str, Any]:
    """The highest rates within an SLO, and how they compare."""
    found = {way: highest(curves[way], slo) for way in WAYS}
    found["chunked"] = chunked = highest(curves[f"chunked_{slo.budget}"], slo)
    ratios = {
        f"ratio_to_{way}": round(chunked / other, 2) if chunked and (other := found[way]) else None for way in WAYS
    }
    return {**found, **ratios}


def highest(points: Sequence[dict[str, Any]], slo: Slo) -> float | None:
    """The highest rate within the SLO's limit and TTFT_LIMIT; None if even the first is not, or no point is beyond."""
    crossings = [
        crossing([(point["rate"], point[key]) for point in points], limit)
        for key, limit in ((slo.key, slo.limit), ("ttft_p99_ms", 1e3 * TTFT_LIMIT))
    ]
    return min((rate for rate in crossings if rate is not None), default=0.0) or None


def crossing(points: Sequence[tuple[float, float]], level: float) -> float | None:
    """The rate at which latency first exceeds a level, on a straight line through the logarithms.

    Returns:
        0 if the first point is above it already; None if no point is.
    """
    if points[0][1] > level:
        return 0.0
    for (rate_below, low), (rate_above, high) in pairwise(points):
        if low <= level < high:
            share = (log(level) - log(low)) / (log(high) - log(low))
            return round(exp(log(rate_below) + share * (log(rate_above) - log(rate_below))), 3)
    return None


if __name__ == "__main__":
    main()
