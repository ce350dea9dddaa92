"""Figures that pages work out from data sheets, from the roofline and from drawn workloads, computed and not typed.

A page asks for them as for what a benchmark wrote: `result("stall", "free_tokens")` is computed here, by the function
of that name, when the page is built. Values are numbers, which the page formats, or words of a table's cells.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from minicache.arithmetic.arithmetic import (
    arithmetic_intensity,
    cache_bytes_per_token,
    cache_capacity_tokens,
    max_concurrent_sequences,
    step_bytes,
    step_flops,
    step_seconds,
    weight_bytes,
)
from minicache.arithmetic.specs import (
    A100_40GB,
    A100_80GB,
    DEEPSEEK_V3,
    GIB,
    H100,
    H200,
    L4,
    LLAMA_3_8B,
    LLAMA_3_70B,
    MINIGPT,
    OPT_13B,
    QWEN3_32B,
    Accelerator,
    Transformer,
)
from minicache.errors import UngrammaticalError
from minicache.fleet import MovingCosts
from minicache.grammar import check_text
from minicache.request import Request
from minicache.scheduler import ChunkedPrefillScheduler
from minicache.simulator.costs import BANDWIDTH_EFFICIENCY, FLOPS_EFFICIENCY, RooflineCost, StepLoad
from minicache.simulator.overlap import overlap_gain
from minicache.simulator.workload import (
    ALPACA,
    AZURE_CODE,
    AZURE_CONVERSATION,
    SHAREGPT,
    generate,
)

Numbers = dict[str, Any]

COMPUTED: dict[str, Callable[[], Numbers]] = {}
"""Every figure's function, by its name."""


def computed(function: Callable[[], Numbers]) -> Callable[[], Numbers]:
    """Let pages ask for it; it runs once."""
    COMPUTED[function.__name__] = cache(function)
    return function


# --- phase 1 --------------------------------------------------------------------------------------------------------


@computed
def positions_and_entries() -> Numbers:
    """What a position and a KV entry cost, of MiniGPT and Llama-3-8B; 500 tokens with and without a cache."""

    def crossing(model: Transformer) -> float:
        return 2 * model.num_parameters / (4 * model.num_layers * model.num_heads * model.head_dim)

    without = sum(step_flops(MINIGPT, 2 + step) for step in range(500))
    with_it = step_flops(MINIGPT, 2) + sum(step_flops(MINIGPT, 1, 1 + step) for step in range(1, 500))
    return {
        "parameters": MINIGPT.num_parameters,
        "position": 2 * MINIGPT.num_parameters,
        "entry": 4 * MINIGPT.num_layers * MINIGPT.num_heads * MINIGPT.head_dim,
        "crossing": crossing(MINIGPT),
        "crossing_llama": round(crossing(LLAMA_3_8B), -2),
        "without_gflop": without / 1e9,
        "with_gflop": with_it / 1e9,
        "ratio": without / with_it,
        "arithmetic_at_512": step_flops(MINIGPT, 512) / step_flops(MINIGPT, 1, 511),
    }


@computed
def decode_steps() -> Numbers:
    """A decode step with 511 tokens in each cache, by the number of sequences."""
    weights = weight_bytes(MINIGPT.num_parameters, "float32")
    small, large = [], []
    for batch in (1, 8, 32, 128):
        flops, nbytes = step_flops(MINIGPT, 1, 511, batch), step_bytes(MINIGPT, 1, 511, batch, "float32")
        caches = nbytes - weights
        small.append(
            {"batch": batch, "weights": weights, "caches": caches, "share": f"{100 * caches / nbytes:.0f} %"}
            | {"linear": f"{2 * MINIGPT.num_parameters * batch / weights:g}", "attention": "1.0"}
            | {"step": f"{arithmetic_intensity(flops, nbytes):.2f}"}
        )
        flops, nbytes = step_flops(LLAMA_3_8B, 1, 511, batch), step_bytes(LLAMA_3_8B, 1, 511, batch)
        ms = 1e3 * step_seconds(A100_40GB, flops, nbytes)
        share = 100 - 100 * weight_bytes(LLAMA_3_8B.num_parameters) / nbytes
        large.append(
            {"batch": batch, "bytes": f"{nbytes / 1e9:.2f} · 10⁹", "share": f"{share:.{int(share < 10)}f} %"}
            | {
                "intensity": f"{arithmetic_intensity(flops, nbytes):.3g}",
                "ms": f"{ms:.2f}",
                "each": f"{ms / batch:.2f}",
            }
        )
    return {"minigpt": small, "llama": large}


@computed
def an_a100_of_40_gb() -> Numbers:
    """The cache of Llama-3-8B with 4 GiB set aside: tokens, and sequences of 2,048 and of 518 slots."""
    weights, row = weight_bytes(LLAMA_3_8B.num_parameters), cache_bytes_per_token(LLAMA_3_8B)
    tokens = cache_capacity_tokens(A100_40GB.memory_bytes, weights, row, reserved_bytes=4 * GIB)
    sequences = {f"of_{slots}": max_concurrent_sequences(tokens, slots) for slots in (2048, 518)}
    return {"tokens": tokens, "twice": 2 * tokens} | sequences


# --- phase 2 --------------------------------------------------------------------------------------------------------

COUNT = 20_000


@computed
def workloads() -> Numbers:
    """20,000 requests of each: lengths before and after the limit, in the server and at its door; gaps."""
    uncut, cut = (generate(each, COUNT, seed=0) for each in (replace(SHAREGPT, max_model_len=10**9), SHAREGPT))
    outputs = [each.num_output_tokens for each in cut]
    # A request is sampled as often as it has steps, that is, output tokens.
    seen = sum(output**2 for output in outputs) / sum(outputs)
    prompt = sum(each.num_prompt_tokens * each.num_output_tokens for each in cut) / sum(outputs)
    gaps = [
        later - earlier for earlier, later in pairwise([0.0, *(each.time for each in generate(AZURE_CODE, COUNT, 0))])
    ]
    loads = {"chat": AZURE_CONVERSATION, "code": AZURE_CODE, "sharegpt": SHAREGPT, "alpaca": ALPACA}
    medians = {name: {"in": math.exp(load.prompt.mu), "out": math.exp(load.output.mu)} for name, load in loads.items()}
    drawn = {
        f"{name}_{part}": fmean(getattr(each, f"num_{part}_tokens") for each in made)
        for name, made in (("uncut", uncut), ("cut", cut))
        for part in ("prompt", "output")
    }
    limit = SHAREGPT.max_model_len
    return {
        "median": medians,
        **drawn,
        "cut_percent": 100 * sum(each.num_prompt_tokens + each.num_output_tokens == limit for each in cut) / COUNT,
        "cv": pstdev(outputs) / fmean(outputs),
        "running": seen,
        "half": seen / 2,
        "running_prompt": prompt,
        "holds": prompt + seen / 2,
        "short_gaps_percent": 100 * sum(gap < 0.01 for gap in gaps) / COUNT,
        "longest_gap": max(gaps),
        "mean_gap": fmean(gaps),
    }


# --- phase 5 --------------------------------------------------------------------------------------------------------


@computed
def after_they() -> Numbers:
    """MiniGPT's words after "They": sums of probabilities, the wrong ones, and how many top_p = 0.9 leaves."""
    from scripts.figures.phase_05 import kept, words_after  # PyTorch, which no other figure needs

    words, logits = words_after("They")
    plain, hot = kept(logits), kept(logits, temperature=2.0)
    wrong = [place for place, word in enumerate(words) if not _is_grammatical(["They", word])]
    return {
        "sums": plain.cumsum(-1)[:3].tolist(),
        "wrong": len(wrong),
        "wrong_percent_hot": 100 * float(hot[wrong].sum()),
        "five_percent_hot": 100 * float(hot[:5].sum()),
        "left": int((kept(logits, top_p=0.9) > 0).sum()),
        "left_hot": int((kept(logits, temperature=2.0, top_p=0.9) > 0).sum()),
    }


def _is_grammatical(words: list[str]) -> bool:
    try:
        check_text(words, unfinished=True)
    except UngrammaticalError:
        return False
    return True


# --- phase 9 --------------------------------------------------------------------------------------------------------

COST = RooflineCost(LLAMA_3_8B, A100_80GB)
ROW = cache_bytes_per_token(LLAMA_3_8B)
READING, MULTIPLYING = BANDWIDTH_EFFICIENCY * A100_80GB.bandwidth, FLOPS_EFFICIENCY * A100_80GB.peak_flops
WEIGHTS = weight_bytes(LLAMA_3_8B.num_parameters)
PER_TOKEN = 2 * LLAMA_3_8B.num_parameters / MULTIPLYING


def seconds(*batch: tuple[int, int]) -> float:
    """A step's time by the roofline, for (new, cached) tokens of each sequence."""
    return COST.step_seconds(StepLoad.of(batch))


@computed
def stall() -> Numbers:
    """A prompt of 8,000 tokens arrives among 32 decodes of 1,000: the step's parts, what is free, budgets."""

    def parts(new: int, pairs: int) -> list[float]:
        work = 4 * LLAMA_3_8B.num_heads * LLAMA_3_8B.head_dim * LLAMA_3_8B.num_layers
        found = [WEIGHTS / READING, (new + 32_000) * ROW / READING, new * PER_TOKEN, pairs * work / MULTIPLYING]
        return [1e3 * each for each in found]

    alone, together = parts(32, 32 * 1001), parts(8032, 32 * 1001 + 8000 * 8001 // 2)
    decodes, whole = 1e3 * seconds(*[(1, 1000)] * 32), 1e3 * seconds(*[(1, 1000)] * 32, (8000, 0))
    few = 1e3 * (WEIGHTS + 4 * 1001 * ROW) / READING
    return {
        "alone": [*alone, decodes],
        "together": [*together, whole],
        "times": whole / decodes,
        "token": 1e3 * PER_TOKEN,
        "ridge": (alone[0] + alone[1]) / (1e3 * PER_TOKEN),
        "few": few,
        "few_ridge": int(few / (1e3 * PER_TOKEN)),
        "budgets": [
            {"budget": budget, "chunk": min(budget - 32, 8000), "steps": steps, "gap": f"{1e3 * gap:.0f} ms"}
            | {"first": f"{first:.2f} s"}
            for budget in (64, 128, 256, 512, 1024, 2048, 8192)
            for steps, gap, first in [_gap_and_first(budget)]
        ],
    }


def _gap_and_first(budget: int) -> tuple[int, float, float]:
    """Steps for the prompt, the longest of them and all of them, by the real scheduler on the roofline's clock."""
    scheduler = ChunkedPrefillScheduler(num_blocks=4000, max_num_batched_tokens=40_000)
    readers = [Request(each, [each] * 1000, 400) for each in range(32)]
    for request in readers:
        scheduler.add_request(request)
    scheduler.update_from_output(scheduler.schedule(), dict.fromkeys(range(32), 7))
    scheduler.max_num_batched_tokens = budget
    prompt = Request("long", [99] * 8000, 2)
    scheduler.add_request(prompt)
    taken = []
    while not prompt.output_token_ids:
        before = {each.request_id: each.num_computed_tokens for each in (*readers, prompt)}
        output = scheduler.schedule()
        taken.append(seconds(*((new, before[name]) for name, new in output.num_scheduled_tokens.items())))
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 7))
    return len(taken), max(taken), sum(taken)


@computed
def rereading() -> Numbers:
    """What chunks of 512 of a prompt of 8,000 read again; how long chunks of other sizes take."""
    starts = range(0, 8000, 512)

    def alone(budget: int) -> float:
        return sum(seconds((min(budget, 8000 - at), at)) for at in range(0, 8000, budget))

    return {
        "entries": sum(starts),
        "entries_gb": sum(starts) * ROW / 1e9,
        "entries_ms": 1e3 * sum(starts) * ROW / READING,
        "weights_gb": len(starts) * WEIGHTS / 1e9,
        "weights_ms": 1e3 * len(starts) * WEIGHTS / READING,
        "multiplying_512": 1e3 * 512 * PER_TOKEN,
        "multiplying_128": 1e3 * 128 * PER_TOKEN,
        "over_128": alone(64) / alone(128),
        "first_chunk": 1e3 * seconds((512, 0)),
    }


@computed
def goodput_by_hand() -> Numbers:
    """The highest rates of equal requests of 2,000 and 51 tokens, whole and in chunks of 512."""
    whole, decode = seconds((2000, 0)), seconds((1, 2025))
    full = seconds((502, 1000), *[(1, 2025)] * 10)
    request = whole + 50 * decode
    long = {
        budget: [1e3 * seconds((min(budget, 20_000 - at), at)) for at in range(0, 20_000, budget)]
        for budget in (400, 416, 512)
    }
    return {
        "whole_ms": 1e3 * whole,
        "decode_ms": 1e3 * decode,
        "full_ms": 1e3 * full,
        "request": request,
        "rate_whole": 1 / request,
        "work": 4 * full,
        "rate_chunks": 512 / 2050 / full,
        "ratio": 512 / 2050 / full * request,
        "longest": {str(budget): max(found) for budget, found in long.items()},
        "first_of_60_ms": 512 * next(place for place, ms in enumerate(long[512]) if ms > 60),
    }


@computed
def drafts() -> Numbers:
    """Tokens a pass yields with k draft tokens of acceptance α; when a pass over five tokens of each pays."""

    def tokens(alpha: float, k: int) -> float:
        return (1 - alpha ** (k + 1)) / (1 - alpha)

    paying = []
    for count in (1, 8, 32, 64, 128):
        plain, drafted = (1e3 * seconds(*[(new, 1000)] * count) for new in (1, 5))
        paying.append(
            {"count": count, "tokens": 5 * count, "plain": f"{plain:.1f}", "drafted": f"{drafted:.1f}"}
            | {"pays": f"{drafted / plain:.2f}"}
        )
    yields = [
        {"k": k} | {f"at_{100 * alpha:.0f}": f"{tokens(alpha, k):.2f}" for alpha in (0.2, 0.5, 0.8, 0.95)}
        for k in (1, 2, 4, 8)
    ]
    return {"yields": yields, "paying": paying}


# --- phase 11 -------------------------------------------------------------------------------------------------------

GBIT = 1e9 / 8


def moving(model: Transformer, accelerator: Accelerator, bandwidth: float = 1.0) -> MovingCosts:
    """What it costs to compute a prompt there and to send its cache."""
    each = 2 * model.num_parameters / (accelerator.peak_flops * FLOPS_EFFICIENCY)
    return MovingCosts(model, each, bandwidth, latency=0.0001)


@computed
def prefill_apart() -> Numbers:
    """8,000 tokens of Llama-3-8B over a link, and the break-even bandwidths of models and accelerators."""
    links = []
    for gbits in (10, 25, 100, 400):
        made = moving(LLAMA_3_8B, A100_80GB, gbits * GBIT)
        alone, sending, there = made.prefill_seconds(8000), made.link_seconds(8000), made.remote_seconds(8000, 8000)
        cells = {"sending": sending, "layers": there, "end": alone + sending + made.latency}
        links.append({"link": f"{gbits} Gbit/s"} | {name: f"{value:.3f} s" for name, value in cells.items()})
    models = {
        "OPT-13B (multi-head)": OPT_13B,
        "Llama-3-8B (8 KV heads)": LLAMA_3_8B,
        "Qwen3-32B (8 KV heads)": QWEN3_32B,
        "Llama-3-70B (8 KV heads)": LLAMA_3_70B,
    }
    rates = [
        {"model": name, "bytes": cache_bytes_per_token(model)}
        | {
            name: f"{moving(model, gpu).break_even_bandwidth() / GBIT:.1f} Gbit/s"
            for name, gpu in (("a100", A100_80GB), ("h100", H100), ("l4", L4))
        }
        for name, model in models.items()
    ]
    slow = moving(LLAMA_3_8B, A100_80GB, 10 * GBIT)
    alone, there = slow.prefill_seconds(8000), slow.remote_seconds(8000, 8000)
    return {
        "links": links,
        "rates": rates,
        "alone": alone,
        "there": there,
        "two": 2 * alone,
        "thirty": 31 * alone,
        "forty": there + 40 * alone,
        "cached": slow.prefill_seconds(500),
        "arriving_gbit": 8 * AZURE_CONVERSATION.prompt.mean * cache_bytes_per_token(LLAMA_3_8B) / GBIT,
    }


@computed
def two_or_more() -> Numbers:
    """The share of 1,000 bins with two balls or more, two choices each, and of those with three."""
    path = Path(__file__).parents[1] / "benchmarks" / "results" / "two_choices.json"
    bins = json.loads(path.read_text(encoding="utf-8"))["balls"]["1000"]["2"]["bins"]
    two, three = (sum(count for load, count in bins.items() if int(load) >= least) / 1000 for least in (2, 3))
    return {"bins": 1000 * two, "share": two, "squared": two**2, "three": three}


@computed
def a_hit() -> Numbers:
    """What 2,000 found tokens save on an A100-40GB, and what eight more requests of 1,000 tokens cost."""
    token = 2 * LLAMA_3_8B.num_parameters / (A100_40GB.peak_flops * FLOPS_EFFICIENCY)
    step = 8 * 1000 * cache_bytes_per_token(LLAMA_3_8B) / (A100_40GB.bandwidth * BANDWIDTH_EFFICIENCY)
    return {"token_us": 1e6 * token, "saved_ms": 2e6 * token, "step_ms": 1e3 * step, "answer_ms": 2e5 * step}


@computed
def divided_caches() -> Numbers:
    """Tokens that fit on GPUs which divide a model, to the thousand."""

    def fit(model: Transformer, ranks: int, gpu: Accelerator = H100, dtype: str = "float16", copies: int = 1) -> int:
        weights = weight_bytes(model.num_parameters, dtype) // ranks
        return cache_capacity_tokens(
            int(0.9 * gpu.memory_bytes), weights, cache_bytes_per_token(model) * copies // ranks
        )

    latent = fit(DEEPSEEK_V3, 8, H200, "int8", copies=8)
    found = {
        "tp_8": fit(LLAMA_3_70B, 8),
        "tp_4": fit(LLAMA_3_70B, 4),
        "two_tp_4": 2 * fit(LLAMA_3_70B, 4),
        "tp_2": fit(LLAMA_3_70B, 2),
        "four_tp_2": 4 * fit(LLAMA_3_70B, 2),
        "small_apart": 8 * fit(LLAMA_3_8B, 1),
        "small_tp_8": fit(LLAMA_3_8B, 8),
        "tp_16": fit(LLAMA_3_70B, 16, copies=2),
        "tp_16_even": fit(LLAMA_3_70B, 16),
        "latent": latent,
        "latent_apart": 8 * latent,
    }
    return {name: round(number, -3) for name, number in found.items()}


# --- what the field does today --------------------------------------------------------------------------------------


@computed
def latent_attention() -> Numbers:
    """DeepSeek-V3's attention by its report: 128 heads of 128, a latent of 512 and a RoPE key of 64."""
    heads, latent, rope, width = 128, 512, 64, 128
    rebuilt, plain = 2 * latent * heads * 2 * width, 2 * heads * (2 * width + rope)
    absorbed, nbytes = 2 * heads * (2 * latent + rope), 2 * (latent + rope)
    layers, read = DEEPSEEK_V3.num_layers, 1e3 * 8192 * DEEPSEEK_V3.num_layers / H100.bandwidth
    work = 8192 * layers / 1e12
    return {
        "rebuilt": rebuilt,
        "plain": plain,
        "absorbed": absorbed,
        "nbytes": nbytes,
        "times": absorbed / plain,
        "intensity": absorbed / nbytes,
        "break_even": rebuilt / (absorbed - plain),
        "rebuilt_tflop": work * rebuilt,
        "rebuilt_ms": 1e15 * work * rebuilt / H100.peak_flops,
        "plain_ms": read * plain,
        "absorbed_ms": read * nbytes,
        "chunk_absorbed": 2048 * work * absorbed,
        "chunk_plain": 2048 * work * plain,
    }


@computed
def tiers() -> Numbers:
    """Computing tokens of a prompt at half an H100's peak, or loading them."""
    row = cache_bytes_per_token(LLAMA_3_8B)
    models = []
    for model, active in (
        (LLAMA_3_8B, LLAMA_3_8B.num_parameters),
        (LLAMA_3_70B, LLAMA_3_70B.num_parameters),
        (DEEPSEEK_V3, 37_000_000_000),
    ):
        rate = H100.peak_flops / 2 / (2 * active)
        models.append({"rate": round(rate, -2), "gb": rate * cache_bytes_per_token(model) / 1e9})
    links = [{"rate": round(rate / row, -3), "ms": 8e6 * row / rate} for rate in (55e9, 12.5e9, 7e9)]
    return {"models": models, "links": links}


@computed
def gpu_steps() -> Numbers:
    """Decode steps of Llama-3-8B on an H100 with 1,000 cached tokens each; the scheduler's times are measured ones."""
    weights, rows = weight_bytes(LLAMA_3_8B.num_parameters), []
    for requests, scheduler in SCHEDULER_MS.items():
        nbytes = weights + requests * 1000 * cache_bytes_per_token(LLAMA_3_8B)
        gpu = 1e3 * nbytes / H100.bandwidth
        rows.append(
            {"requests": requests, "bytes": f"{nbytes / 1e9:.1f} GB", "gpu": f"{gpu:.1f} ms", "cpu": f"{scheduler} ms"}
            | {"in_turn": f"{gpu + scheduler:.1f} ms", "overlapped": f"{gpu:.1f} ms"}
        )
    return {"alone": H100.bandwidth / weights, "rows": rows, "idle_percent": 100 * 2.9 / (gpu + 2.9)}


SCHEDULER_MS = {1: 0.04, 64: 0.7, 256: 2.9}
"""Requests → milliseconds of vLLM 0.33's scheduler, schedule and update of a decode step, measured on a CPU."""


@computed
def async_gain() -> Numbers:
    """Decode steps of Llama-3-8B on an H100, 1,000 cached tokens a request, in turn and overlapped."""
    cost, rows = RooflineCost(LLAMA_3_8B, H100, overhead_seconds=0), []
    for requests, cpu in SCHEDULER_MS.items():
        gpu = 1e3 * cost.step_seconds(StepLoad.of([(1, 1000)] * requests))
        rates = [1e3 * requests / milliseconds for milliseconds in (cpu + gpu, max(cpu, gpu))]
        rows.append(
            {"requests": requests, "cpu": f"{cpu} ms", "gpu": f"{gpu:.1f} ms", "ratio": f"{cpu / gpu:.3f}"}
            | {"in_turn": f"{rates[0]:,.0f}", "overlapped": f"{rates[1]:,.0f}"}
            | {"gain": f"{overlap_gain(cpu / gpu):.3f}"}
        )
    return {"rows": rows, "useful": 200 / 201}
