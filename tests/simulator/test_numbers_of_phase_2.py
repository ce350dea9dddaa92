"""The numbers on phase 2's page on workloads, computed again: the page must not drift from what `generate` draws."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev

import pytest

from minicache.simulator.workload import ALPACA, AZURE_CODE, AZURE_CONVERSATION, SHAREGPT, generate

PAGE = Path(__file__).parents[2] / "docs/en/phase-02-fragmentation/theory/05-workloads.md"
COUNT = 20_000


def of_the_limit() -> list[str]:
    uncut = generate(replace(SHAREGPT, max_model_len=10**9), COUNT, seed=0)
    cut = generate(SHAREGPT, COUNT, seed=0)
    means = [
        f"{fmean(e.num_prompt_tokens for e in drawn):.1f} and {fmean(e.num_output_tokens for e in drawn):.1f}"
        for drawn in (uncut, cut)
    ]
    is_cut = sum(e.num_prompt_tokens + e.num_output_tokens == SHAREGPT.max_model_len for e in cut) / COUNT
    return [
        f"happens to {100 * is_cut:.1f} % of the requests",
        f"have means of {means[0]} before the cut, and of {means[1]} after it",
    ]


def of_a_look_into_the_server() -> list[str]:
    drawn = generate(SHAREGPT, COUNT, seed=0)
    outputs = [each.num_output_tokens for each in drawn]
    mean, cv = fmean(outputs), pstdev(outputs) / fmean(outputs)
    # A request is sampled as often as it has steps, that is, output tokens.
    seen = sum(output**2 for output in outputs) / sum(outputs)
    prompt = sum(each.num_prompt_tokens * each.num_output_tokens for each in drawn) / sum(outputs)
    arriving = fmean(each.num_prompt_tokens for each in drawn)
    return [
        f"338 · (1 + 0.77²) = {338 * (1 + 0.77**2):.0f}",
        f"a mean of {mean:.0f} and a cv of {cv:.3f}, which makes {mean:.0f} · (1 + {cv:.3f}²) = {seen:.0f}",
        f"It will generate {seen:.0f} tokens, and has on average generated half of them, {seen / 2:.0f}",
        f"Its prompt has {prompt:.0f} tokens, a little less than the mean of {arriving:.0f}",
        f"Together that is about {prompt + seen / 2:.0f}",
    ]


def of_the_bursts() -> list[str]:
    times = [0.0, *(each.time for each in generate(AZURE_CODE, COUNT, seed=0))]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return [
        f"{sum(gap < 0.01 for gap in gaps) / COUNT:.0%} are shorter than 10 ms".replace("%", " %"),
        f"the longest is {max(gaps):.0f} s. The mean is {fmean(gaps):.1f} s",
    ]


def of_the_trace() -> list[str]:
    median = {
        workload.name: [math.exp(lengths.mu) for lengths in (workload.prompt, workload.output)]
        for workload in (AZURE_CONVERSATION, AZURE_CODE, SHAREGPT, ALPACA)
    }
    (chat_in, chat_out), (code_in, code_out), sharegpt, alpaca = median.values()
    return [
        f"| 1,155 | 0.96 | 1,020 | {chat_in:.0f} | 211 | 0.77 | 129 | {chat_out:.0f} |",
        f"| 2,048 | 0.96 | 1,469 | {code_in:,.0f} | 27.9 | 2.15 | 13 | {code_out:.1f} |",
        f"| 161 | 0.96 | {sharegpt[0]:.0f} | 338 | 0.77 | {sharegpt[1]:.0f} |",
        f"| 19.3 | 0.96 | {alpaca[0]:.1f} | 58.5 | 0.77 | {alpaca[1]:.1f} |",
    ]


@pytest.mark.parametrize("stated", [of_the_trace, of_the_limit, of_a_look_into_the_server, of_the_bursts])
def test_the_page_states_what_is_drawn(stated):
    text = " ".join(PAGE.read_text(encoding="utf-8").split())  # wherever the lines are broken
    assert [number for number in stated() if number not in text] == []
