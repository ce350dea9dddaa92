"""What the pages on the plug-ins show: the lab's example, and the decisions that the theory page works through."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

from minicache.plugins.adapter import SchedulerAdapter
from minicache.request import Request
from minicache.scheduler import create_scheduler

PHASE = Path(__file__).resolve().parents[2] / "docs" / "en" / "phase-11-scale-out"


def test_the_labs_example():
    text = (PHASE / "lab" / "07-the-plug-in.md").read_text(encoding="utf-8")
    examples = "\n\n".join(re.findall(r"```pycon\n(.*?)```", text, re.DOTALL))
    names = {"SchedulerAdapter": SchedulerAdapter, "create_scheduler": create_scheduler}
    test = doctest.DocTestParser().get_doctest(examples, names, "the lab", None, 0)
    assert test.examples
    assert doctest.DocTestRunner().run(test).failed == 0


def test_the_theory_pages_steps_and_blocks():
    """The table of decisions, and the block numbers that vLLM's workers are sent: ours and one."""
    scheduler = create_scheduler(
        "chunked", num_blocks=6, block_size=4, max_num_batched_tokens=8, reserve_full_prompt=False
    )
    a, b = Request("a", range(11, 17), 12), Request("b", range(20, 32), 4)
    scheduler.add_request(a)
    scheduler.add_request(b)
    token = 100
    steps, preempted = [], []
    for _ in range(5):
        output = scheduler.schedule()
        steps.append(dict(output.num_scheduled_tokens))
        preempted.append(output.preempted)
        blocks = {each.request_id: [block + 1 for block in each.block_ids] for each in output.scheduled}
        tokens = {}
        for each in output.scheduled:
            if each.num_computed_tokens + output.num_scheduled_tokens[each.request_id] == each.num_tokens:
                tokens[each.request_id] = token = token + 1
        scheduler.update_from_output(output, tokens)
    assert steps == [{"a": 6, "b": 2}, {"a": 1, "b": 7}, {"a": 1, "b": 3}, {"a": 1}, {"a": 1, "b": 7}]
    assert preempted == [[], [], [], ["b"], []]
    assert blocks == {"a": [1, 2, 6], "b": [5, 4]}
    assert b.output_token_ids == [104]
    assert a.output_token_ids == [101, 102, 103, 105, 106]
