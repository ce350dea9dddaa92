"""The auditor on the engine: a real model's steps, with preemptions and swaps, aborts and stop strings.

And at random: whatever comes together, the tokens are those of one request at a time, decoded without a cache.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from minicache.engine.llm import LLM
from minicache.engine.sampling import SamplingParams
from minicache.grammar import Tokenizer
from minicache.model import MiniGPT
from minicache.scheduler import SchedulerOutput
from minicache.scheduler.audit import Auditor
from minicache.scheduler.audit_sharing import SharingAuditor
from minicache.scheduler.audit_trace import audit_trace
from minicache.scheduler.observe import Recorder
from minicache.trace import TraceStep

TIGHT: dict[str, Any] = {"num_blocks": 10, "block_size": 4, "max_num_batched_tokens": 40}


@pytest.mark.parametrize(
    "options",
    [
        {"scheduler": "continuous", "num_blocks": 40, "block_size": 4},
        TIGHT | {"scheduler": "paged"},
        TIGHT | {"scheduler": "fair", "preemption": "swap", "num_host_blocks": 6},
        TIGHT | {"scheduler": "paged", "preemption": "swap", "num_host_blocks": 40},
        TIGHT | {"max_num_batched_tokens": 7, "preemption": "swap", "num_host_blocks": 40},
    ],
    ids=["continuous", "recompute", "swap to a small host", "swap", "in chunks"],
)
def test_an_audited_engine(
    model: MiniGPT, tokenizer: Tokenizer, prompts: list[list[int]], options: dict[str, Any]
) -> None:
    steps: list[TraceStep] = []
    auditor = Auditor()
    llm = LLM(model, **options, tokenizer=tokenizer, observers=[auditor, Recorder(steps.append)])
    params = SamplingParams(max_tokens=14, temperature=0.8, seed=1, ignore_eos=True, stop=(" the",))
    ids = [llm.add_request(prompt, params) for prompt in prompts]
    while llm.has_unfinished:
        llm.step()
        if auditor.step == 3:
            llm.abort_request(ids[2])
    assert auditor.step >= 13
    assert audit_trace(steps) == len(steps) == auditor.step + 1
    kinds = {event.kind for step in steps for event in step.events}
    assert ("preempt" in kinds) == (options["num_blocks"] < 40)
    assert ("swap_in" in kinds) == ("num_host_blocks" in options)


# At random

LENGTHS = (1, 2, 5, 9, 14)
SEEDS = (1, 2)
OutOfOrder = type("OutOfOrder", (Exception,), {})


class Counts(SharingAuditor):
    """Audits, and counts what a run has to have had."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = dict.fromkeys(
            ("chunks", "preempted", "swapped", "forks", "hits", "copies", "aborts", "failures"), 0
        )

    def on_fork(self, *args: Any) -> None:
        self.seen["forks"] += 1
        super().on_fork(*args)

    def on_schedule(self, scheduler: Any, output: SchedulerOutput) -> None:
        tokens = output.num_scheduled_tokens
        left = [each.num_tokens - each.num_computed_tokens - tokens[each.request_id] for each in output.scheduled]
        self.seen["chunks"] += sum(map(bool, left))
        self.seen["preempted"] += len(output.preempted)
        self.seen["swapped"] += len(output.swapped_in)
        self.seen["copies"] += len(output.blocks_to_copy)
        super().on_schedule(scheduler, output)
        self.seen["hits"] = scheduler.stats.num_hit_tokens


def serve_at_random(
    seed: int, model: MiniGPT, prompts: list[list[int]], alone: Callable[..., list[int]]
) -> dict[str, int]:
    """Serves a random workload by the default scheduler, and compares every token. What happened in it, counted."""
    rng, auditor = random.Random(seed), Counts()
    swap = rng.random() < 0.4
    block_size = rng.choice([1, 2, 4, 16])
    room = max(map(len, prompts)) + 8 + max(LENGTHS)  # for one request, the largest that there can be
    llm = LLM(
        model,
        block_size=block_size,
        num_blocks=-(-room // block_size) + rng.choice([0, 0, 2, 200]),
        max_num_seqs=rng.choice([1, 2, 4, 8, 8]),
        max_num_batched_tokens=rng.choice([1, 3, 7, 16, 100]),
        long_prefill_threshold=rng.choice([0, 0, 1, 4]),
        prefix_caching=rng.random() < 0.6,
        preemption="swap" if swap else "recompute",
        num_host_blocks=rng.randint(1, 40) if swap else 0,
        watermark=rng.choice([0.0, 0.0, 0.1]),
        observers=[auditor],
    )
    fine, failing = llm.run_model, rng.choice([0.0, 0.0, 0.15])
    if failing and (llm.scheduler.max_num_batched_tokens < 16 or getattr(llm.scheduler, "long_prefill_threshold", 0)):
        failing = 0.01  # after a failure all is computed again: where that takes many steps, the run would never end

    def run_model(output: SchedulerOutput) -> Any:
        if rng.random() < failing:
            auditor.seen["failures"] += 1
            raise OutOfOrder
        return fine(output)

    llm.run_model = run_model  # type: ignore[method-assign]
    expected: dict[Any, list[int]] = {}
    got: dict[Any, list[int]] = {}

    def params_of(n: int = 1) -> SamplingParams:
        sampled = rng.random() < 0.4
        options: dict[str, Any] = {"temperature": 0.9, "seed": rng.choice(SEEDS)} if sampled else {}
        return SamplingParams(max_tokens=rng.choice(LENGTHS), ignore_eos=True, n=n, **options)

    def wanted(prompt: list[int], params: SamplingParams) -> list[int]:
        """The first tokens of the longest answer: so each is computed once for all runs."""
        whole = SamplingParams(
            max_tokens=LENGTHS[-1], temperature=params.temperature, seed=params.seed, ignore_eos=True
        )
        return alone(prompt, LENGTHS[-1], whole if params.temperature else None)[: params.max_tokens]

    def prompt_of() -> list[int]:
        """A prompt, a part of one, or one with the beginning of its answer: what others have begun with, too."""
        prompt = rng.choice(prompts)
        match rng.randrange(4):
            case 0:
                return prompt[: max(1, len(prompt) // 2)]
            case 1:
                return prompt + alone(prompt, LENGTHS[-1])[:8]
        return prompt

    def step() -> None:
        try:
            chunks = llm.step()
        except OutOfOrder:
            return
        for chunk in chunks:
            got[chunk.request_id].append(chunk.token_id)

    for _ in range(rng.randint(1, 3)):  # answers that are asked for together: forks
        asked = [(prompt_of(), params_of(rng.choice([1, 1, 2, 3]))) for _ in range(rng.randint(1, 4))]
        try:
            answers = llm.generate([prompt for prompt, _ in asked], [params for _, params in asked])
        except OutOfOrder:
            assert not llm.has_unfinished
            continue
        found = [answer.token_ids for answer in answers]
        assert found == [wanted(prompt, its.of_answer(turn)) for prompt, its in asked for turn in range(its.n)]
    for _ in range(40):  # requests that come and go
        if rng.random() < 0.4:
            prompt, params = prompt_of(), params_of()
            name = llm.add_request(prompt, params, priority=rng.choice([0, 0, 1]))
            expected[name], got[name] = wanted(prompt, params), []
        if llm.answers and rng.random() < 0.06:
            name = rng.choice(list(llm.answers))
            assert llm.abort_request(name)
            auditor.seen["aborts"] += 1
            assert expected[name][: len(got[name])] == got[name]
            del expected[name]
        step()
    for _ in range(5000):
        if not llm.has_unfinished:
            break
        step()
    assert {name: got[name] for name in expected} == expected
    assert llm.scheduler.pool.num_used == 0
    return auditor.seen


def test_random_workloads(model: MiniGPT, prompts: list[list[int]], alone: Callable[..., list[int]]) -> None:
    """Forks, aborts, priorities, both preemptions, prefix cache, chunks, models that fail, and tiny pools."""
    seen = [serve_at_random(seed, model, prompts[:3], alone) for seed in (3, 12, 13, 14)]
    for event in seen[0]:
        assert sum(each[event] for each in seen) > 1, f"{event} are not tested"
