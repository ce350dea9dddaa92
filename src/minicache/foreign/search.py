"""Random workloads that break a rule, and from each the smallest that still does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from minicache.foreign.adapter import Adapter
from minicache.foreign.rules import Finding, replay
from minicache.foreign.workload import random_workload, smaller

NUM_CANDIDATES, MAX_REPLAYS = 6, 500
"""Of each kind of finding, as many workloads are made smaller, each in at most so many runs; the smallest is kept."""


@dataclass(frozen=True, slots=True)
class Report:
    """What an audit has found.

    Attributes:
        num_workloads: that were run.
        num_steps: of all of them together.
        num_preemptions: requests that lost their place in the batch.
        findings: the smallest of each kind, the smallest first. Empty: no rule was broken.
        counts: kind → how many workloads ended with it.
    """

    num_workloads: int
    num_steps: int
    num_preemptions: int
    findings: list[Finding]
    counts: dict[str, int]


def audit(
    adapter: Adapter,
    num_requests: int = 6,
    seeds: Iterable[int] = range(300),
    tell: Callable[[int], None] | None = None,
) -> Report:
    """Drive an engine's scheduler over random workloads, and audit every step.

    Args:
        adapter: of the engine.
        num_requests: of each workload.
        seeds: one workload each.
        tell: called with how many workloads are done.
    """
    found: defaultdict[str, list[Finding]] = defaultdict(list)
    num_workloads = num_steps = num_preemptions = 0
    for seed in seeds:
        workload = random_workload(seed, num_requests, adapter)
        steps, finding = replay(adapter, workload)
        num_workloads += 1
        num_steps += len(steps)
        num_preemptions += sum(len(step.preempted) for step in steps)
        if finding is not None:
            found[finding.kind].append(finding)
        if tell is not None:
            tell(num_workloads)
    findings = [
        min((_smallest(adapter, each) for each in sorted(kind, key=_size)[:NUM_CANDIDATES]), key=_size)
        for kind in found.values()
    ]
    counts = {kind: len(each) for kind, each in found.items()}
    return Report(num_workloads, num_steps, num_preemptions, sorted(findings, key=_size), counts)


def _smallest(adapter: Adapter, finding: Finding) -> Finding:
    """The finding of the smallest workload that is reached by taking one thing away at a time."""
    replays = 0
    while True:
        for workload in smaller(finding.workload):
            replays += 1
            _, found = replay(adapter, workload)
            if found is not None and found.kind == finding.kind:
                finding = found
                break
            if replays >= MAX_REPLAYS:
                return finding
        else:
            return finding


def _size(finding: Finding) -> tuple[int, int, int]:
    return len(finding.workload.arrivals), finding.workload.num_tokens, len(finding.steps)
