"""The figures of phase 12: one step ahead.

What the scheduler knows in each step is a trace that it left.
"""

from __future__ import annotations

from dataclasses import dataclass

from matplotlib.figure import Figure

from minicache.palette import Scheme
from minicache.request import Request
from minicache.scheduler import AsyncChunkedScheduler
from scripts.figures.style import TYPE_SIZE, Diagram, draw

SMALL = TYPE_SIZE * 0.85


def main() -> None:
    """Draw them all."""
    draw("async-one-step-late", one_step_late, size=(7.2, 3.42))


# --- theory 1: one step ahead -----------------------------------------------------------------------------------------

STOP = 9
ANSWERS = (7, STOP, 5)


@dataclass(frozen=True)
class Known:
    """What is known when a step has been scheduled: of the first request its tokens, and what the step computes."""

    labels: list[str]
    computes: dict[str, int]


def stopped_late() -> list[Known]:
    """A request with a prompt of four tokens, whose second token is a stop token, and one that waits for its blocks."""
    scheduler = AsyncChunkedScheduler(num_blocks=2, block_size=4)
    first = Request("a", [1, 2, 3, 4], 9, stop_token_ids=[STOP])
    for request in (first, Request("b", [1, 2, 3, 4, 5], 9)):
        scheduler.add_request(request)
    steps, before = list[Known](), None
    for number in range(4):
        output = scheduler.schedule()
        labels = [*"pppp", *map(str, first.output_token_ids), *"?" * first.num_placeholders]
        steps.append(Known(labels, {str(name): count for name, count in output.num_scheduled_tokens.items()}))
        if before is not None:
            scheduler.update_from_output(before, dict.fromkeys(before.num_scheduled_tokens, ANSWERS[number - 1]))
        before = output
    return steps


def one_step_late(figure: Figure, scheme: Scheme) -> None:
    """Four steps, what the CPU does while each runs, and what it knows of a request that stops."""
    steps = stopped_late()
    assert [step.computes for step in steps] == [{"a": 4}, {"a": 1}, {"a": 1}, {"b": 5}]
    diagram = Diagram(figure, scheme, width=24, height=11.4)
    left, wide, cpu, gpu, known = 5.0, 4.72, 1.0, 3.9, 7.4
    diagram.text(0.2, cpu + 0.6, "CPU", bold=True)
    diagram.text(0.2, gpu + 0.8, "GPU", bold=True)
    diagram.text(0.2, known - 0.75, "what schedule() knows of a", fontsize=SMALL)
    diagram.cell(left - 2.4, cpu, "schedule 1", "shared", width=2.3, height=1.2, fontsize=SMALL)
    looks = (("a: prompt", "prompt"), ("a: token 1", "generated"), ("a: in vain", "wasted"), ("b: prompt", "prompt"))
    for number, (label, role) in enumerate(looks):
        x = left + number * wide
        diagram.cell(x, gpu, f"step {number + 1}\n{label}", role, width=wide, height=1.7, fontsize=SMALL)
        if number:
            diagram.cell(
                x, cpu, f"commit {number}", "end" if number == 2 else None, width=2.15, height=1.2, fontsize=SMALL
            )
            diagram.arrow((x, gpu - 0.05), (x + 0.8, cpu + 1.3))
        at = x + (2.2 if number else 0.0)
        if number < 3:
            diagram.cell(at, cpu, f"schedule {number + 2}", "shared", width=2.4, height=1.2, fontsize=SMALL)
            roles = {"p": "prompt", "?": "free", str(STOP): "end"}
            labels = steps[number + 1].labels
            diagram.row(
                x,
                known,
                labels,
                [roles.get(each, "generated") for each in labels],
                width=0.68,
                height=1.0,
                fontsize=SMALL,
            )
    diagram.text(left + 2 * wide + 0.1, 0.55, "a leaves, its blocks are free", fontsize=SMALL)
    diagram.text(23.8, 2.75, "drops a's token", align="right", fontsize=SMALL)
    diagram.arrow((left, 9.4), (23.8, 9.4))
    diagram.text(23.8, 9.9, "time", align="right", fontsize=SMALL)
    diagram.legend(
        {"free": "placeholder", "end": "stop token", "wasted": "computed in vain"}, 0.2, 10.3, step=4.6, size=0.7
    )
