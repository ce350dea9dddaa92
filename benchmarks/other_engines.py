"""What `minicache audit` finds in nano-vllm and Mini-SGLang, before a fix and after it.

The folder has a checkout for each name in `CHECKOUTS`, such as `nano-vllm-8d63a98`: the commit's scheduler, block
manager and what they import is enough, nothing of it is in this repository. Every one is audited over the same seeds. A
pair is a commit with a bug and the one that fixes it: counted are the workloads that end with that finding, before and
after, and the smallest one of before is run on both. `overlooked` is Mini-SGLang with an adapter that does
not show which pages are free too early: so the runs go on, to what comes of it. All figures are counts; none depends on
the machine.

    python -m benchmarks.other_engines FOLDER
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks._record import record
from minicache.foreign.adapter import Adapter, State
from minicache.foreign.checkout import find_adapter
from minicache.foreign.mini_sglang import MiniSglang
from minicache.foreign.rules import replay
from minicache.foreign.search import Report, audit

SEEDS, NUM_REQUESTS = 1000, 6
CHECKOUTS = {
    "nano-vllm-2f21442": "before chunked prefill, November 2025",
    "nano-vllm-8d63a98": "chunked prefill, April 2026",
    "nano-vllm-77dd709": "pull request 207",
    "nano-vllm-f64d821": "pull request 218",
    "nano-vllm-9fa256a": "a cache hit keeps its hash",
    "mini-sglang-9a91cfa": "main, May 2026",
    "mini-sglang-0a300b2": "a fork's page table after a duplicate prefix",
}
PAIRS = (
    ("nano-vllm-2f21442", "nano-vllm-f64d821", "work"),
    ("nano-vllm-8d63a98", "nano-vllm-77dd709", "work"),
    ("nano-vllm-77dd709", "nano-vllm-f64d821", "raises AssertionError in may_append"),
    ("nano-vllm-77dd709", "nano-vllm-f64d821", "raises AssertionError in schedule"),
    ("nano-vllm-f64d821", "nano-vllm-9fa256a", "contents"),
    ("mini-sglang-9a91cfa", "mini-sglang-0a300b2", "blocks"),
)


class Overlooking(MiniSglang):
    """Mini-SGLang's scheduler, where a page that a request lists never looks free."""

    def state(self) -> State:
        """As `Adapter.state`, without those pages."""
        state = super().state()
        listed = {block_id for each in state.requests for block_id in each.block_ids}
        return replace(state, free_block_ids=[each for each in state.free_block_ids if each not in listed])


def main() -> None:
    folder = Path(sys.argv[1])
    reports = {name: audit(find_adapter(folder / name), NUM_REQUESTS, range(SEEDS)) for name in track(CHECKOUTS)}
    pairs = [pair(folder, reports, *each) for each in PAIRS]
    overlooked = figures(audit(Overlooking(folder / "mini-sglang-9a91cfa"), NUM_REQUESTS, range(SEEDS)))
    show(reports, pairs)
    audits = {name: {"what": CHECKOUTS[name]} | figures(report) for name, report in reports.items()}
    found = {"audits": audits, "pairs": pairs, "overlooked": overlooked}
    record("other_engines", {"seeds": SEEDS, "num_requests": NUM_REQUESTS} | found)


def figures(report: Report) -> dict[str, Any]:
    """What is kept of a report: counts, and of each finding its words and its size."""
    return {
        "num_steps": report.num_steps,
        "num_preemptions": report.num_preemptions,
        "num_broken": sum(report.counts.values()),
        "findings": [
            {
                "kind": each.kind,
                "message": each.message,
                "count": report.counts[each.kind],
                "num_requests": len(each.workload.arrivals),
                "num_tokens": each.workload.num_tokens,
            }
            for each in report.findings
        ],
    }


def pair(folder: Path, reports: dict[str, Report], before: str, after: str, kind: str) -> dict[str, Any]:
    """A finding of one commit, and whether the other has it."""
    finding = next(each for each in reports[before].findings if each.kind == kind)

    def kind_of(adapter: Adapter) -> str | None:
        found = replay(adapter, finding.workload)[1]
        return None if found is None else found.kind

    return {
        "before": before,
        "after": after,
        "kind": kind,
        "message": finding.message,
        "num_requests": len(finding.workload.arrivals),
        "count_before": reports[before].counts[kind],
        "count_after": reports[after].counts.get(kind, 0),
        "replayed_before": kind_of(find_adapter(folder / before)),
        "replayed_after": kind_of(find_adapter(folder / after)),
    }


def show(reports: dict[str, Report], pairs: list[dict[str, Any]]) -> None:
    """A row for each commit, and one for each pair."""
    console = Console(highlight=False)
    table = Table("commit", "steps", "preemptions", "broken", "findings")
    for name, report in reports.items():
        counts = ", ".join(f"{kind}: {count}" for kind, count in report.counts.items())
        numbers = (report.num_steps, report.num_preemptions, sum(report.counts.values()))
        table.add_row(name, *map(str, numbers), counts)
    console.print(table)
    table = Table("before", "after", "finding", "workloads before", "after", "the smallest, before", "after")
    for each in pairs:
        table.add_row(
            *(str(each[key]) for key in ("before", "after", "kind", "count_before", "count_after")),
            str(each["replayed_before"]),
            str(each["replayed_after"]),
        )
    console.print(table)


if __name__ == "__main__":
    main()
