"""The auditor on the engine: a real model's steps, with preemptions and swaps, aborts and stop strings."""

from __future__ import annotations

from typing import Any

import pytest

from minicache.engine import LLM
from minicache.grammar import Tokenizer
from minicache.model import MiniGPT
from minicache.sampling import SamplingParams
from minicache.scheduler.audit import Auditor
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
    ],
    ids=["continuous", "recompute", "swap to a small host", "swap"],
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
