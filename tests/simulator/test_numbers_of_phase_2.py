"""The numbers on phase 2's page on workloads, computed again: the page must not drift from what `generate` draws."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev

import pytest

from minicache.simulator.workload import AZURE_CODE, SHAREGPT, generate

PAGE = Path(__file__).parents[2] / "docs/en/phase-02-fragmentation/theory/05-workloads.md"
COUNT = 20_000


def of_the_limit() -> list[str]:
    uncut = generate(replace(SHAREGPT, max_model_len=10**9), COUNT, seed=0)
    cut = generate(SHAREGPT, COUNT, seed=0)
    means = [
        f"{fmean(e.num_prompt_tokens for e in drawn):.1f} and {fmean(e.num_output_tokens for e in drawn):.1f}"
        for drawn in (uncut, cut)
    ]
    return [f"these 20,000 requests means of {means[0]}", f"they are {means[1]}"]


def of_a_look_into_the_server() -> list[str]:
    drawn = generate(SHAREGPT, COUNT, seed=0)
    outputs = [each.num_output_tokens for each in drawn]
    mean, cv = fmean(outputs), pstdev(outputs) / fmean(outputs)
    # Anyone who looks meets a request as often as it has steps, that is, outputs.
    seen = sum(output**2 for output in outputs) / sum(outputs)
    prompt = sum(each.num_prompt_tokens * each.num_output_tokens for each in drawn) / sum(outputs)
    return [
        f"338 · (1 + 1.05²) = {338 * (1 + 1.05**2):.0f}",
        f"a mean of {mean:.0f} and a cv of {cv:.3f}, which makes {mean:.0f} · (1 + {cv:.3f}²) = {seen:.0f}",
        f"It will write {seen:.0f}, and has on average written half of them, {seen / 2:.0f}",
        f"Its prompt has {prompt:.0f}, a little less than the mean of {fmean(e.num_prompt_tokens for e in drawn):.0f}",
        f"Together about {prompt + seen / 2:.0f}",
    ]


def of_the_bursts() -> list[str]:
    times = [0.0, *(each.time for each in generate(AZURE_CODE, COUNT, seed=0))]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return [
        f"{sum(gap < 0.01 for gap in gaps) / COUNT:.0%} are shorter than 10 ms".replace("%", " %"),
        f"the longest is {max(gaps):.0f} s. The mean is {fmean(gaps):.1f} s",
    ]


@pytest.mark.parametrize("stated", [of_the_limit, of_a_look_into_the_server, of_the_bursts])
def test_the_page_states_what_is_drawn(stated):
    text = " ".join(PAGE.read_text(encoding="utf-8").split())  # wherever the lines are broken
    assert [number for number in stated() if number not in text] == []
