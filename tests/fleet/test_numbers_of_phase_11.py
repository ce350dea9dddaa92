"""The numbers on phase 11's pages that no benchmark has written, computed again."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from statistics import fmean

import pytest

from minicache.arithmetic.arithmetic import cache_bytes_per_token, cache_capacity_tokens, weight_bytes
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
    OPT_13B,
    QWEN3_32B,
    Accelerator,
    Transformer,
)
from minicache.fleet import MovingCosts, Place
from minicache.simulator.costs import BANDWIDTH_EFFICIENCY, FLOPS_EFFICIENCY
from minicache.simulator.workload import AZURE_CONVERSATION

ROOT = Path(__file__).parents[2]
PAGES, RESULTS = ROOT / "docs/en/phase-11-scale-out/theory", ROOT / "benchmarks" / "results"


def text(name: str) -> str:
    """A page's words, wherever its lines end."""
    return " ".join((PAGES / f"{name}.md").read_text(encoding="utf-8").split())


SECOND, CHOICES = text("01-what-a-second-machine-changes"), text("02-two-random-choices")
AFFINITY, DEATH = text("03-affinity-against-balance"), text("04-when-a-machine-dies")
APART, PLACES = text("06-prefill-and-decode-apart"), text("07-where-the-cache-goes")
PROMPT = 8000
GBIT = 1e9 / 8


def computed(replicas: Iterable[str]) -> int:
    """Prompt tokens that a chat's replicas compute, turn by turn: messages of 100 tokens, answers of 200."""
    has, total = Counter[str](), 0
    for turn, replica in enumerate(replicas):
        prompt = 100 + 300 * turn
        total += prompt - has[replica]
        has[replica] = prompt + 200
    return total


def test_a_chat_on_several_replicas() -> None:
    all_of_it = sum(100 + 300 * turn for turn in range(4))
    in_turn = [computed(order) for order in ("AAAA", "ABAB", "ABCD")]
    assert f"| | {all_of_it:,} | **{in_turn[0]}** | **{in_turn[1]:,}** | **{in_turn[2]:,}** |" in SECOND
    rates = " | ".join(f"{1 - each / all_of_it:.0%}".replace("%", " %") for each in in_turn)
    assert f"| hit rate | | {rates} |" in SECOND
    at_random = fmean(computed(order) for order in product("AB", repeat=4))
    assert f"{at_random:,} of {all_of_it:,}: a hit rate of {1 - at_random / all_of_it:.0%}".replace("%", " %") in SECOND


def test_two_replicas_and_many_machines() -> None:
    left = A100_40GB.memory_bytes - 4 * GIB - weight_bytes(LLAMA_3_8B.num_parameters, "float16")
    tokens = left // cache_bytes_per_token(LLAMA_3_8B)
    assert f"{tokens:,} tokens of 128 KiB" in SECOND
    assert f"Two replicas keep {2 * tokens:,}" in SECOND
    assert f"= {1 / (1 - 0.9**2):.1f} s" in SECOND
    assert f"0.999^1000 = {0.999**1000:.0%}".replace("%", " %") in SECOND
    assert f"1 − 0.99^20 = {1 - 0.99**20:.0%}".replace("%", " %") in SECOND


def test_squares() -> None:
    assert f"that is {0.9**5:.2f} against {0.9**31:.3f}" in CHOICES
    bins = json.loads((RESULTS / "two_choices.json").read_text(encoding="utf-8"))["balls"]["1000"]["2"]["bins"]
    share = sum(count for load, count in bins.items() if int(load) >= 2) / 1000
    assert f"{share:.3f}² = {share**2:.3f}" in CHOICES
    assert f"(It is {sum(count for load, count in bins.items() if int(load) >= 3) / 1000:.4f}:" in CHOICES


def test_what_a_hit_is_worth() -> None:
    token = 2 * LLAMA_3_8B.num_parameters / (A100_40GB.peak_flops * FLOPS_EFFICIENCY)
    assert f"that is {1e6 * token:.0f} µs. A hit of 2,000 tokens saves **{2e6 * token:.0f} ms**" in AFFINITY
    a_step = 8 * 1000 * cache_bytes_per_token(LLAMA_3_8B) / (A100_40GB.bandwidth * BANDWIDTH_EFFICIENCY)
    assert f"are {1e3 * a_step:.2f} ms a step. An answer of 200 tokens takes 200 steps: **{2e5 * a_step:.0f} ms**" in (
        AFFINITY
    )


def test_the_load_that_is_left() -> None:
    for count, share in ((2, 0.60), (4, 0.80), (10, 0.80), (100, 0.95)):
        assert f"| {count} | {share:.2f} | {share * count / (count - 1):.2f} |" in DEATH


def costs(model: Transformer, accelerator: Accelerator, bandwidth: float = 1.0) -> MovingCosts:
    seconds = 2 * model.num_parameters / (accelerator.peak_flops * FLOPS_EFFICIENCY)
    return MovingCosts(model, seconds, bandwidth, latency=0.0001)


@pytest.mark.parametrize("gbits", [10, 25, 100, 400])
def test_what_a_link_adds(gbits: int) -> None:
    made = costs(LLAMA_3_8B, A100_80GB, gbits * GBIT)
    alone, sending, there = made.prefill_seconds(PROMPT), made.link_seconds(PROMPT), made.remote_seconds(PROMPT, PROMPT)
    at_the_end = alone + sending + made.latency
    assert f"| {gbits} Gbit/s | {sending:.3f} s | {there:.3f} s | {at_the_end:.3f} s |" in APART
    assert f"alone takes {alone:.3f} s" in APART
    if gbits >= 25:
        assert there - alone < 0.011


def test_break_even_bandwidths() -> None:
    models = {"OPT-13B": OPT_13B, "Llama-3-8B": LLAMA_3_8B, "Qwen3-32B": QWEN3_32B, "Llama-3-70B": LLAMA_3_70B}
    for name, model in models.items():
        rates = [costs(model, each).break_even_bandwidth() / GBIT for each in (A100_80GB, H100, L4)]
        told = " | ".join(f"{rate:.1f} Gbit/s" for rate in rates)
        row = APART[APART.index(f"| {name} (") :]
        assert row.partition(") ")[2].startswith(f"| {cache_bytes_per_token(model):,} | {told} |")


@pytest.mark.parametrize(("here", "there", "chosen"), [(0, 0, "here"), (1, 0, "there"), (30, 40, "here")])
def test_here_or_there(here: int, there: int, chosen: str) -> None:
    made = costs(LLAMA_3_8B, A100_80GB, 10 * GBIT)
    places = Place("here", 0.0, 0, here), Place("there", 0.0, 0, there)
    assert made.choose(PROMPT, places[0], [places[1]]) == chosen
    prefill, remote = made.prefill_seconds(PROMPT), made.remote_seconds(PROMPT, PROMPT)
    told = {
        0: f"there {remote:.3f}",
        1: f"{2 * prefill:.3f}",
        30: f"{31 * prefill:.1f}, there {remote:.3f} + 40 · 0.686",
    }
    assert told[here] in APART
    assert f"{remote + 40 * prefill:.1f}" in APART
    assert f"{made.prefill_seconds(500):.3f} s for each" in APART


def tokens(model: Transformer, ranks: int, gpu: Accelerator = H100, dtype: str = "float16", copies: int = 1) -> int:
    """That fit on `ranks` GPUs which divide a model; each keeps its part of the cache `copies` times too often."""
    memory = int(0.9 * gpu.memory_bytes)
    weights = weight_bytes(model.num_parameters, dtype) // ranks
    return cache_capacity_tokens(memory, weights, cache_bytes_per_token(model) * copies // ranks)


def told(number: int) -> str:
    return f"{round(number, -3):,}"


def test_where_the_cache_goes() -> None:
    assert f"or **{told(tokens(LLAMA_3_70B, 8))} tokens**" in PLACES
    assert f"hold {told(tokens(LLAMA_3_70B, 4))} tokens of 81,920 bytes" in PLACES
    assert f"two replicas hold **{told(2 * tokens(LLAMA_3_70B, 4))}**" in PLACES
    assert (
        f"6.4 GB: {told(tokens(LLAMA_3_70B, 2))} tokens, four times: **{told(4 * tokens(LLAMA_3_70B, 2))}**" in PLACES
    )
    assert f"{told(8 * tokens(LLAMA_3_8B, 1))} tokens with eight" in PLACES
    assert f"{told(tokens(LLAMA_3_8B, 8))} with TP 8" in PLACES
    assert f"to {told(tokens(LLAMA_3_70B, 16, copies=2))} tokens" in PLACES
    assert f"would be {told(tokens(LLAMA_3_70B, 16))}" in PLACES


def test_what_a_latent_cache_takes() -> None:
    all_of_it = tokens(DEEPSEEK_V3, 8, H200, "int8", copies=8)
    assert f"left: {told(all_of_it)} tokens" in PLACES
    assert f"{told(8 * all_of_it)} tokens by the same count" in PLACES


def test_what_a_fleet_sends_over_its_links() -> None:
    tokens, result = AZURE_CONVERSATION.prompt.mean, json.loads((RESULTS / "disaggregation.json").read_text())
    sent = result["rate"] * tokens * cache_bytes_per_token(LLAMA_3_8B) / GBIT
    assert f"A mean prompt has {tokens:,.0f} tokens, and {result['rate']:.0f} of them a second are {sent:.1f}" in APART
    assert f"{sent / 2:.1f} on each of two links" in APART
    together, apart, blind = result["together"]["tpot_p99"], result["prefill_2"], result["blind_2"]
    assert apart["5"]["tpot_p99"] > together > apart["10"]["tpot_p99"]  # just above what arrives, and far above it
    assert blind["2"]["tpot_p99"] > 10 * apart["2"]["tpot_p99"]
    assert round(blind["2"]["num_moved"] / result["together"]["num_requests"], 1) == 0.8  # eight of ten
    assert round(2 / (sent / 2), 1) == 0.4  # room for four of ten
    assert 0.95 < (sent / 2) / 5 < 1  # only just
