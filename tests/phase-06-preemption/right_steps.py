"""The steps that a right paged scheduler takes in a few runs, recorded by running this file as a script.

They are recorded because the reference is not there to ask where a submission is graded.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from minicache.request import Request
from minicache.scheduler.paged import PagedScheduler

FILE = Path(__file__).with_suffix(".json.gz")

# name → the requests' (prompt, max_tokens), the scheduler's options
RUNS = {
    f"{name}-{preemption}": (
        sizes,
        {"num_blocks": num_blocks, "block_size": 4, "preemption": preemption, "num_host_blocks": 2},
    )
    for name, sizes, num_blocks in (
        ("2 requests", [(4, 9)] * 2, 3),
        ("4 requests", [(4, 9)] * 4, 4),
        ("4 of other sizes", [(6, 12), (9, 6), (3, 9), (1, 20)], 6),
    )
    for preemption in ("recompute", "swap")
}


def steps_of(cls, sizes, options):
    """What a scheduler returns and changes in each step of a run, as text, for comparing two runs."""
    scheduler = cls(**options)
    requests = [Request(n, [1] * num_prompt, max_tokens) for n, (num_prompt, max_tokens) in enumerate(sizes)]
    for request in requests:
        scheduler.add_request(request)
    steps = []
    while scheduler.has_unfinished and len(steps) < 200:
        if len(steps) == 12:
            scheduler.abort_request(1)
        output = scheduler.schedule()
        says = f"scheduled {output.num_scheduled_tokens}, preempted {output.preempted}, finished {output.finished}"
        copies = f"swapped out {output.swapped_out}, in {output.swapped_in}"
        holds = [(each.request_id, each.status.name, each.num_computed_tokens, each.block_ids) for each in requests]
        steps.append(f"{says}, {copies}; of each request id, status, computed tokens, blocks: {holds}")
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 0))
    return steps


def recorded():
    """Name of a run → its steps."""
    return json.loads(gzip.decompress(FILE.read_bytes()))


if __name__ == "__main__":
    steps = {name: steps_of(PagedScheduler, *run) for name, run in RUNS.items()}
    FILE.write_bytes(gzip.compress(json.dumps(steps).encode(), mtime=0))
