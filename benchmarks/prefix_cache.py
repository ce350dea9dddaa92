"""What a prefix cache saves, and what it costs: system prompts, chats, hit rate against capacity, a scheduler's step.

- `system_prompt`, **modelled**: every prompt begins with the same 80, or 341, tokens. The paper (Kwon et al. 2023,
  section 6.4) translates with one example and with five in front, on LLaMA-13B, and serves 1.67 and 3.58 times as many
  requests as Orca (Oracle). Here OPT-13B, the same shape to a percent, on the same GPU and memory: 15,728 slots. The
  paper does not print how long its sentences are: OWN is assumed, and `by_answer` shows what another value would
  change. All requests are there at once, and time is the roofline's (`minicache.simulator.costs`); each request reads
  its whole context at every step, shared blocks once for each reference.
- `chat`, **modelled**: Llama-3-8B on an A100-40GB. Messages and answers as long as ShareGPT's; a prompt is all that was
  said before and a new message. How many turns and how long people think is assumed. Messages come at the same times
  with the cache and without, so their rate can be turned.
- `hit_rate`, **counted**: the lightest of those rates, with less memory and with more. The ceiling is memory without
  end: the full blocks of what the turn before computed.
- `step_cost`, **measured**: `schedule()` and `update_from_output()` in decode with the cache over the same without. On
  and off take turns, WINDOW steps at a time, in which every request fills one block. Times are medians;
  the ratio is the median of those of neighbouring windows, which share the machine's moods.

    python -m benchmarks.prefix_cache
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, takewhile
from math import exp, log, nan
from statistics import median
from typing import Any, Final

from rich.progress import track

from benchmarks._record import record
from minicache.arithmetic.arithmetic import cache_bytes_per_token, cache_capacity_tokens
from minicache.arithmetic.specs import A100_40GB, GIB, LLAMA_3_8B, OPT_13B
from minicache.memory.prefix import block_hash, root_hash
from minicache.request import Request
from minicache.scheduler import Scheduler, create_scheduler
from minicache.simulator.costs import RooflineCost
from minicache.simulator.machine import published_machine
from minicache.simulator.orca import OrcaScheduler
from minicache.simulator.prompts import behind_system_prompt, chats
from minicache.simulator.report import ServingReport
from minicache.simulator.serving import ServingSimulation
from minicache.simulator.traffic import CHATS
from minicache.simulator.workload import LengthDistribution, Workload

BLOCK_SIZE: Final = 16
WAYS: Final = {"without": False, "with": True}

NUM_SLOTS: Final = cache_capacity_tokens(12 * GIB, 0, cache_bytes_per_token(OPT_13B))
PAPER: Final = {80: 1.67, 341: 3.58}
"""Tokens of the shared beginning, and requests a second over those of Orca (Oracle)."""
NUM_REQUESTS: Final = 2000
SENTENCE, ANSWERS, ANSWER = 30, (20, 40, 80), 40
"""Tokens of what is translated, and of translations, on average. Assumed."""
SPREAD: Final = 0.5
"""Coefficient of variation of both. Assumed."""

CHAT_RATES: Final = (0.3, 0.6, 0.9, 1.2, 1.5, 1.8)
"""Chats that begin a second."""
CHAT_SECONDS: Final = 400.0
CHAT_BLOCKS: Final = published_machine("llama-3-8b", "a100-40gb", block_size=BLOCK_SIZE).num_blocks
"""What 90 % of the memory has room for next to the weights."""
LATENCY: Final = 1.0
"""Seconds to the first token, on average, at which rates are compared."""

CAPACITIES: Final = (512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 16_384)
"""Blocks."""

RUNNING: Final = (1, 64, 256)
STAGES: Final = ("paged", "fair", "chunked")
WINDOW: Final = BLOCK_SIZE
NUM_WINDOWS: Final = 60
LIMIT: Final = 1.3


def main() -> None:
    record(
        "prefix_cache",
        {
            "block_size": BLOCK_SIZE,
            "system_prompt": system_prompts(),
            "by_answer": by_answer(),
            "chat": chat(),
            "hit_rate": hit_rate(),
            "step_cost": step_cost(),
        },
    )


# --- one system prompt ------------------------------------------------------------------------------------------------


def translations(answer: float) -> Workload:
    """What comes after the shared beginning, all at once."""
    prompt, output = (LengthDistribution.from_mean(mean, SPREAD) for mean in (SENTENCE, answer))
    return Workload("translation", prompt, output, rate=1e9, max_model_len=2048)


def schedulers() -> dict[str, Scheduler]:
    """New ones, all over the same memory."""
    blocks = NUM_SLOTS // BLOCK_SIZE
    return {
        "oracle": OrcaScheduler("oracle", num_slots=NUM_SLOTS, max_model_len=2048),
        "without": create_scheduler("paged", num_blocks=blocks, block_size=BLOCK_SIZE),
        "with": create_scheduler("paged", num_blocks=blocks, block_size=BLOCK_SIZE, prefix_caching=True),
    }


def system_prompts() -> dict[str, Any]:
    """Both beginnings, three servers each."""
    found = {
        str(num_shared): behind(num_shared, ANSWER) | {"paper": PAPER[num_shared]}
        for num_shared in track(PAPER, description="System prompts")
    }
    lengths = {"own_prompt_tokens": SENTENCE, "own_output_tokens": ANSWER, "num_slots": NUM_SLOTS}
    return {"num_requests": NUM_REQUESTS, **lengths, **found}


def by_answer() -> dict[str, Any]:
    """How the gain depends on the length of the answers, which is assumed."""
    kept = ("with_over_without", "with_over_oracle")
    return {
        str(answer): {str(shared): {key: behind(shared, answer)[key] for key in kept} for shared in PAPER}
        for answer in track(ANSWERS, description="Other answers")
    }


def behind(num_shared: int, answer: float) -> dict[str, Any]:
    """What three servers make of requests with the same beginning."""
    runs, found, total = {}, 0, 0
    for name, scheduler in schedulers().items():
        requests = list(behind_system_prompt(translations(answer), num_shared, NUM_REQUESTS, seed=0))
        runs[name] = ServingSimulation(scheduler, RooflineCost(OPT_13B, A100_40GB), requests).run()
        found, total = counted(requests)  # the last one's are those with the cache
    rates = {name: run.requests_per_second for name, run in runs.items()}
    return {
        "prompt_tokens": total,
        "prefill_without": total,
        "prefill_with": total - found,
        "saved_percent": round(100 * found / total, 2),
        "requests_per_second": {name: round(rate, 2) for name, rate in rates.items()},
        "batch": {name: round(run.mean_batch_size, 1) for name, run in runs.items()},
        "preemptions": {name: run.num_preemptions for name, run in runs.items()},
        "with_over_without": round(rates["with"] / rates["without"], 2),
        "with_over_oracle": round(rates["with"] / rates["oracle"], 2),
    }


def counted(requests: Sequence[Request]) -> tuple[int, int]:
    """Of the tokens of all prompts, how many were found when their requests were first admitted; and how many."""
    return sum(each.num_cached_tokens for each in requests), sum(each.num_prompt_tokens for each in requests)


# --- chats ------------------------------------------------------------------------------------------------------------


def chat() -> dict[str, Any]:
    """Chats at several rates, with the cache and without."""
    points = [at_rate(rate) for rate in track(CHAT_RATES, description="Chats")]
    knees = {way: crossing([(point["rate"], point[way]["ttft_mean_ms"]) for point in points]) for way in WAYS}
    light = points[0]
    return {
        "num_blocks": CHAT_BLOCKS,
        "seconds": CHAT_SECONDS,
        "mean_turns": CHATS.mean_turns,
        "pause": CHATS.pause,
        "max_model_len": CHATS.max_model_len,
        "message_tokens": round(CHATS.message.mean, 2),
        "answer_tokens": round(CHATS.answer.mean, 2),
        "points": points,
        "light": light | {"ttft_ratio": round(light["without"]["ttft_mean_ms"] / light["with"]["ttft_mean_ms"], 2)},
        "at_one_second": knees,
        "throughput_ratio": round(knees["with"] / knees["without"], 2),
    }


def messages(rate: float) -> Iterator[Request]:
    """What is sent in the first CHAT_SECONDS."""
    coming = chats(replace(CHATS, rate=rate), round(rate * CHAT_SECONDS * 2) + 1, seed=0)
    return takewhile(lambda request: request.arrival_time < CHAT_SECONDS, coming)


def at_rate(rate: float) -> dict[str, Any]:
    """One rate, with the cache and without."""
    found: dict[str, Any] = {}
    for way, prefix_caching in WAYS.items():
        scheduler = create_scheduler(
            "paged", num_blocks=CHAT_BLOCKS, block_size=BLOCK_SIZE, prefix_caching=prefix_caching
        )
        requests, run = talked(scheduler, rate)
        cached, total = counted(requests)
        found |= {"rate": round(len(requests) / CHAT_SECONDS, 3), "num_requests": len(requests), "prompt_tokens": total}
        found[way] = {
            "ttft_mean_ms": round(1e3 * run.ttft.mean, 1),
            "ttft_p99_ms": round(1e3 * run.ttft.p99, 1),
            "token_ms": round(1e3 * run.normalized_latency.mean, 2),
            "batch": round(run.mean_batch_size, 1),
            "preemptions": run.num_preemptions,
            "recomputed_tokens": run.num_recomputed_tokens,
            "prefill_tokens": total - cached,
            "saved_percent": round(100 * cached / total, 2),
        }
    return found


def talked(scheduler: Scheduler, rate: float) -> tuple[list[Request], ServingReport]:
    """Chats at one rate, served."""
    requests = list(messages(rate))
    return requests, ServingSimulation(scheduler, RooflineCost(LLAMA_3_8B, A100_40GB), requests).run()


def crossing(points: Sequence[tuple[float, float]], level: float = 1e3 * LATENCY) -> float:
    """The rate at which latency reaches a level, on a straight line through the logarithms; NaN if it does not."""
    for (rate_below, low), (rate_above, high) in pairwise(points):
        if low <= level < high:
            share = (log(level) - log(low)) / (log(high) - log(low))
            return round(exp(log(rate_below) + share * (log(rate_above) - log(rate_below))), 3)
    return nan


# --- hit rate against capacity ----------------------------------------------------------------------------------------


def hit_rate() -> dict[str, Any]:
    """The part of the prompts' tokens that is found, with less memory and with more."""
    points = []
    for num_blocks in track(CAPACITIES, description="Capacities"):
        scheduler: Any = create_scheduler("paged", num_blocks=num_blocks, block_size=BLOCK_SIZE, prefix_caching=True)
        requests, run = talked(scheduler, CHAT_RATES[0])
        found, total = counted(requests)
        points.append(
            {
                "num_blocks": num_blocks,
                "tokens": num_blocks * BLOCK_SIZE,
                "percent": round(100 * found / total, 2),
                "evicted": scheduler.pool.num_evicted,
                "preemptions": run.num_preemptions,
            }
        )
    ceiling = ceiling_percent(list(messages(CHAT_RATES[0])))
    return {
        "ceiling_percent": ceiling,
        "largest_blocks": CAPACITIES[-1],
        "half_blocks": next((each["num_blocks"] for each in points if each["percent"] >= ceiling / 2), None),
        "points": points,
    }


def ceiling_percent(requests: Sequence[Request]) -> float:
    """What could be found at most: of each turn but the first the full blocks that the turn before has computed."""
    ends = {each.request_id: each.num_prompt_tokens + each.max_tokens - 1 for each in requests}
    before = [ends.get(turn_before(request), 0) // BLOCK_SIZE * BLOCK_SIZE for request in requests]
    return round(100 * sum(before) / sum(request.num_prompt_tokens for request in requests), 2)


def turn_before(request: Request) -> tuple[int, int]:
    """The id of the turn before, if there is one."""
    name: Any = request.request_id
    return name[0], name[1] - 1


# --- what it costs ----------------------------------------------------------------------------------------------------


def step_cost() -> dict[str, Any]:
    """Microseconds of a step, on and off, and their ratio."""
    found: dict[str, Any] = {stage: {} for stage in STAGES}
    for stage, running in track([(stage, running) for stage in STAGES for running in RUNNING], description="Steps"):
        both = {way: decoding(stage, running, prefix_caching=on) for way, on in (("off", False), ("on", True))}
        times: dict[str, list[float]] = {way: [] for way in both}
        for _ in range(NUM_WINDOWS):
            for way, scheduler in both.items():
                times[way].append(window_seconds(scheduler))
        off, on = median(times["off"]), median(times["on"])
        ratio = median(on / off for off, on in zip(times["off"], times["on"], strict=True))
        us = {f"{way}_us": round(1e6 * each / WINDOW, 2) for way, each in (("off", off), ("on", on))}
        more = {"ratio": round(ratio, 3), "us_per_filled_block": round(1e6 * (on - off) / running, 2)}
        found[stage][str(running)] = us | more
    worst = max(each["ratio"] for stage in STAGES for each in found[stage].values())
    return {"window": WINDOW, "worst_ratio": worst, "limit": LIMIT, "hash_us": hash_us(), **found}


def decoding(stage: str, running: int, *, prefix_caching: bool) -> Scheduler:
    """A scheduler with a batch in decode, in which another request fills a block at every step."""
    num_steps = NUM_WINDOWS * WINDOW
    longest = 2 * BLOCK_SIZE + num_steps + 2
    scheduler = create_scheduler(
        stage,
        num_blocks=running * -(-longest // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        max_num_seqs=running,
        max_num_batched_tokens=running * longest,
        prefix_caching=prefix_caching,
    )
    for number in range(running):
        prompt = [number + 1] * (BLOCK_SIZE + number % BLOCK_SIZE)
        scheduler.add_request(Request(number, prompt, num_steps + 2))
    one_step(scheduler)
    return scheduler


def window_seconds(scheduler: Scheduler) -> float:
    """Seconds of WINDOW steps, of nothing but the scheduler's calls."""
    return sum(one_step(scheduler) for _ in range(WINDOW))


def one_step(scheduler: Scheduler) -> float:
    """Seconds to schedule a step, and to commit it."""
    start = time.perf_counter()
    output = scheduler.schedule()
    scheduled = time.perf_counter()
    token_ids = dict.fromkeys(output.num_scheduled_tokens, 5)
    sampled = time.perf_counter()
    scheduler.update_from_output(output, token_ids)
    return scheduled - start + time.perf_counter() - sampled


def hash_us(count: int = 2000) -> float:
    """Microseconds to hash one block, the fastest of five rounds."""
    tokens = [30_000 + number for number in range(BLOCK_SIZE)]
    rounds = []
    for _ in range(5):
        parent, start = root_hash(), time.perf_counter()
        for _ in range(count):
            parent = block_hash(parent, tokens)
        rounds.append((time.perf_counter() - start) / count)
    return round(1e6 * min(rounds), 2)


if __name__ == "__main__":
    main()
