"""The numbers on phase 5's pages, computed again: the pages must not drift from what schedulers and model do."""

from __future__ import annotations

import doctest
import importlib
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean

import pytest
import torch

from minicache.cache.dense import KVCache
from minicache.cache.selective import SelectiveStep
from minicache.engine.llm import LLM
from minicache.engine.sampling import SamplingParams, TokenSampler, keep_top_k, keep_top_p
from minicache.errors import UngrammaticalError
from minicache.grammar import Tokenizer, check_text
from minicache.memory.blocks import blocks_for
from minicache.request import Request
from minicache.scheduler import SchedulerOutput, create_scheduler
from minicache.scheduler.drive import drive
from minicache.simulator.workload import ALPACA, SHAREGPT, generate
from minicache.trace import to_json

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs/en/phase-05-continuous-batching"


@pytest.fixture(scope="module")
def figures():
    """The module that draws the figures: its runs are those that the pages describe."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        yield importlib.import_module("scripts.figures.phase_05")


@cache
def page(name: str) -> str:
    """A page as one line, wherever its lines are broken."""
    return " ".join((PAGES / name).read_text(encoding="utf-8").split())


def missing_on(name: str, *stated: str) -> list[str]:
    return [number for number in stated if number not in page(name)]


def steps_of(name: str, lengths: list[tuple[int, int]], num_slots: int) -> int:
    requests = (Request(index, [0] * prompt, output) for index, (prompt, output) in enumerate(lengths))
    return drive(create_scheduler(name, num_blocks=4096, max_num_seqs=num_slots), requests, max_steps=100_000).num_steps


def test_the_six_requests(figures):
    """Steps, shares and means of both grids, and the table of the continuous one, step by step."""
    static, static_tally = figures.run_six("static")
    steps, tally = figures.run_six("continuous")
    used = sum(len(step.batch) for step in steps)
    shares = [figures.utilisation(trace, figures.SLOTS) for trace in (static, steps)]
    means = [fmean(end + 1 for end in each.finished.values()) for each in (static_tally, tally)]
    assert not missing_on(
        "theory/02-iteration-level-scheduling.md",
        f"{len(steps)} steps instead of {len(static)}, and {used} of {3 * len(steps)} slot-steps used",
        f"**{shares[1]:.0%}**".replace("%", " %"),
        f"D is done after {tally.finished['D'] + 1} steps instead of {static_tally.finished['D'] + 1}",
        f"a request is done after {means[0]:.1f} steps on average",
        f"{means[1]:.1f} steps on average",
    )
    assert not missing_on(
        "theory/01-why-batches-drain.md",
        f"{len(static)} steps of three slots are {3 * len(static)} slot-steps, and {used} of them generate a token",
        f"= **{shares[0]:.0%}**".replace("%", " %"),
    )
    rows = []
    for step in steps:
        admitted = {event.request_id for event in step.events if event.kind == "admit"}
        batch = " ".join("+" * (entry.request_id in admitted) + str(entry.request_id) for entry in step.batch)
        ends = ", ".join(str(event.request_id) for event in step.events if event.kind == "finish")
        rows.append((step.step, batch, step.num_tokens, ends, step.num_waiting))
    told = [
        line.strip("| ").split("|")
        for line in (PAGES / "theory/02-iteration-level-scheduling.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("| ") and line[2].isdigit()
    ]
    cells = [[cell.strip() for cell in line] + [""] * (5 - len(line)) for line in told]
    assert [
        (int(step), batch, int(tokens.split("= ")[-1]), ends, len(waits.split()))
        for step, batch, tokens, ends, waits in cells
    ] == rows


def test_the_checks_of_the_first_two_pages(figures):
    """The answers to "Check yourself", by running them."""
    assert steps_of("static", [(1, 10), (1, 10), (1, 10), (1, 200)], 4) == 200
    assert steps_of("static", [(1, 10), (1, 10), (1, 10), (1, 200)], 2) == 210
    assert steps_of("static", [(1, 10), (1, 200), (1, 10), (1, 10)], 2) == 210
    backwards = list(figures.SIX.values())[::-1]
    assert (steps_of("static", backwards, 3), steps_of("continuous", backwards, 3)) == (14, 12)
    assert blocks_for(4 + 100, 16) == 7


def test_the_share_of_a_static_batch():
    """The table of slots: mean over longest of 20,480 answers, in batches in the order of arrival."""
    outputs = [[each.num_output_tokens for each in generate(workload, 20_480, 0)] for workload in (SHAREGPT, ALPACA)]
    rows = []
    for slots in (1, 2, 4, 8, 16, 32, 64, 128):
        longest = [sum(max(each[at : at + slots]) for at in range(0, len(each), slots)) for each in outputs]
        shares = [sum(each) / (slots * steps) for each, steps in zip(outputs, longest, strict=True)]
        rows.append(f"| {slots} | {shares[0]:.0%} | {shares[1]:.0%} |".replace("%", " %"))
    assert not missing_on("theory/01-why-batches-drain.md", *rows)


def test_the_load(figures):
    """80 Poisson arrivals on eight slots: every row of the table, and the run with all of them there at once."""
    columns = []
    for name in ("static", "continuous"):
        steps, tally, coming = figures.run_burst(name)
        first = [tally.first_token[each.request_id] - step + 1 for step, each in coming]
        last = [tally.finished[each.request_id] - step + 1 for step, each in coming]
        assert [step.step for step in steps] == list(range(tally.num_steps)), (
            "an idle step would shift the queue's plot"
        )
        columns.append(
            (
                str(len(steps)),
                f"{figures.utilisation(steps, figures.BURST_SLOTS):.0%}".replace("%", " %"),
                f"{fmean(first):.1f}",
                f"{fmean(last):.1f}",
                str(max(last)),
                str(max(step.num_waiting for step in steps)),
            )
        )
    lengths = [(each.num_prompt_tokens, each.num_output_tokens) for _, each in coming]
    total = sum(output for _, output in lengths)
    at_once = [steps_of(name, lengths, figures.BURST_SLOTS) for name in ("static", "continuous")]
    mean, longest = fmean(output for _, output in lengths), max(output for _, output in lengths)
    assert not missing_on(
        "theory/02-iteration-level-scheduling.md",
        *(f"| {static} | {continuous} |" for static, continuous in zip(*columns, strict=True)),
        f"have {mean:.0f} tokens on average and {longest} at most",
        f"0.18 · {mean:.0f} = {0.18 * round(mean):.1f} slots",
        f"the static scheduler takes {at_once[0]} steps and the continuous one {at_once[1]}",
        f"{total:,} / 8 = {-(-total // 8)}",
    )


def test_the_line_of_a_trace(figures):
    """The JSON on the page about traces is what the recorder writes for step 3."""
    steps, _ = figures.run_six("continuous")
    assert not missing_on("theory/06-traces.md", *to_json(steps[3]).replace('"batch": [', '"batch": [ ').split(", {"))


def test_what_stays_of_a_distribution(figures):
    """Logits, probabilities and counts after "They", with the figure's own cut and the package's."""
    words, logits = figures.words_after("They")
    plain = figures.kept(logits)
    hot = figures.kept(logits, temperature=2.0)
    wrong = []
    for place, word in enumerate(words):
        try:
            check_text(["They", word], unfinished=True)
        except UngrammaticalError:
            wrong.append(place)
    before = plain.cumsum(-1)
    counts = [
        int((TokenSampler(SamplingParams(temperature=temperature, top_p=0.9)).probabilities(logits) > 0).sum())
        for temperature in (1.0, 2.0)
    ]
    assert not missing_on(
        "theory/05-sampling-and-stopping.md",
        f"a score for each of {Tokenizer().vocab_size} words",
        "{:.2f} for *{}*, {:.2f} for *{}*, {:.2f} for *{}*".format(
            *(part for place in range(3) for part in (float(logits[place]), words[place]))
        ),
        f"*will* has 0.{plain[0] * 1000:.0f}; with *are* the sum is {before[1]:.3f}, which is not enough",
        f"with *did* it is {before[2]:.3f}",
        f"Of these, {len(wrong)} are wrong",
        f"gives them {float(plain[wrong].sum()):.3%} together".replace("%", " %"),
        f"the {len(wrong)} wrong ones {float(hot[wrong].sum()):.1%}".replace("%", " %"),
        f"The five words above have {float(hot[:5].sum()):.0%} together".replace("%", " %"),
        f"p = 0.9 leaves {counts[0]} words. At temperature 2 it leaves {counts[1]}",
    )


@pytest.mark.parametrize(
    "setting", [{}, {"temperature": 0.5}, {"top_k": 2}, {"top_p": 0.9}, {"temperature": 2.0, "top_p": 0.9}]
)
def test_the_figure_shows_what_the_sampler_draws_from(figures, setting):
    """The figure cuts by itself; the package cuts alike."""
    _, logits = figures.words_after("They")
    params = replace(SamplingParams(temperature=1.0), **setting)
    torch.testing.assert_close(
        TokenSampler(params).probabilities(logits), figures.kept(logits, **setting).double(), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("name", sorted(path.name for path in (PAGES / "lab").glob("*.md")))
def test_the_worked_examples_of_the_labs(name):
    """What the labs' pages show at the prompt is what comes out."""
    examples = "\n\n".join(
        re.findall(r"```pycon\n(.*?)```", (PAGES / "lab" / name).read_text(encoding="utf-8"), re.DOTALL)
    )
    given = (create_scheduler, drive, keep_top_k, keep_top_p, KVCache, LLM, Request, SamplingParams, SchedulerOutput)
    names = {each.__name__: each for each in (*given, SelectiveStep, TokenSampler)} | {"torch": torch}
    case = doctest.DocTestParser().get_doctest(examples, names, name, None, 0)
    runner = doctest.DocTestRunner(optionflags=doctest.IGNORE_EXCEPTION_DETAIL)
    runner.run(case)
    assert runner.summarize() == (0, len(case.examples))
    assert case.examples
