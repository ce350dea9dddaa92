"""When the CPU and the GPU of a server work, with and without asynchronous scheduling: a timeline, and the gain.

No phase builds this; phase 12's pages draw it. Pure standard library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from minicache.errors import require_positive


class Span(NamedTuple):
    """Some work, from when to when.

    Attributes:
        work: what is done. The CPU schedules and commits, the GPU computes.
        step: of which step, from 0 on.
        begins: in seconds since the start.
        ends: likewise.
    """

    work: Literal["schedule", "compute", "commit"]
    step: int
    begins: float
    ends: float


def timeline(
    gpu_seconds: Sequence[float], schedule_seconds: float, commit_seconds: float, *, overlaps: bool
) -> list[Span]:
    """The work of a run of steps.

    The CPU does one thing at a time, and so does the GPU. A step is computed once it is scheduled, and the one before
    is computed; it is committed once it is computed. In turn, a step is scheduled once the one before is committed.
    Overlapped, once the second last is: the GPU then computes the one between.

    Args:
        gpu_seconds: what the GPU takes for each step, > 0.
        schedule_seconds: what the CPU takes to schedule a step and to start it, > 0.
        commit_seconds: what the CPU takes to commit a step, > 0.
        overlaps: whether scheduling is asynchronous.

    Returns:
        The spans, in the order in which they begin.

    Raises:
        TypeError, ValueError: a time is no positive number.
    """
    for name, seconds in (("schedule_seconds", schedule_seconds), ("commit_seconds", commit_seconds)):
        require_positive(name, seconds)
    for seconds in gpu_seconds:
        require_positive("gpu_seconds", seconds)
    spans, cpu, gpu, ends = list[Span](), 0.0, 0.0, list[float]()
    lead = 1 if overlaps else 0  # steps that are scheduled ahead of the commits

    def commit(step: int, now: float) -> float:
        begins = max(now, ends[step])
        spans.append(Span("commit", step, begins, begins + commit_seconds))
        return begins + commit_seconds

    for step, seconds in enumerate(gpu_seconds):
        spans.append(Span("schedule", step, cpu, cpu + schedule_seconds))
        cpu += schedule_seconds
        begins = max(cpu, gpu)
        gpu = begins + seconds
        ends.append(gpu)
        spans.append(Span("compute", step, begins, gpu))
        if step >= lead:
            cpu = commit(step - lead, cpu)
    for step in range(len(ends) - lead, len(ends)):
        cpu = commit(step, cpu)
    return sorted(spans, key=lambda span: span.begins)


def overlap_gain(cpu_over_gpu: float) -> float:
    """How many times as many tokens a second a server generates if it overlaps, in a long run of equal steps.

    A step takes CPU time + GPU time in turn, and the longer of the two overlapped.

    Args:
        cpu_over_gpu: CPU time of a step, schedule and commit together, over its GPU time, > 0.

    Returns:
        The factor: from 1 to 2. 2 if both times are equal.

    Raises:
        TypeError, ValueError: it is no positive number.
    """
    require_positive("cpu_over_gpu", cpu_over_gpu)
    return (1 + cpu_over_gpu) / max(1, cpu_over_gpu)
