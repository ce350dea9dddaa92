"""The block tables that vLLM's hybrid manager gives its requests in a few runs, and how a run is repeated.

The runs are some of those in `tests/scheduler/golden/hybrid.json.gz`; the README there says what was recorded.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

from minicache.request import Request
from minicache.scheduler.grouped import GroupedScheduler
from minicache_course.checks import call, that

FILE = Path(__file__).with_suffix(".json.gz")
SEEDS = {
    False: (24, 52, 110, 112),  # without a prefix cache
    True: (9, 35, 53, 57, 67, 97, 107),
}
OPTIONS = ("num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "prefix_caching")


def cases(*, prefix_caching):
    """Each of the runs without a prefix cache, or with one, in each of the two modes of admission."""
    recorded = json.loads(gzip.decompress(FILE.read_bytes()))
    return [(each, mode) for each in recorded if each["prefix_caching"] == prefix_caching for mode in each["steps"]]


def replay(workload, mode):
    """Serve the requests of a workload: each step must be vLLM's, with every block of every group."""
    __tracebackhide__ = True
    scheduler = GroupedScheduler(
        windows=(None, workload["sliding_window"]),
        prefix_cache_retention=workload["prefix_cache_retention_interval"],
        reserve_full_prompt=mode == "full_prompt_must_fit",
        **{name: workload[name] for name in OPTIONS},
    )
    coming = sorted((row[3], number) for number, row in enumerate(workload["requests"]))
    for step, (tokens, preempted, finished, num_free, num_free_after, tables) in enumerate(workload["steps"][mode]):
        while coming and coming[0][0] <= step:
            scheduler.add_request(_request(workload, coming.pop(0)[1]))
        if not scheduler.has_unfinished:  # all that have come are served
            continue
        output = call(scheduler.schedule).value
        that(f"tokens of step {step}", dict(output.num_scheduled_tokens)).gives(tokens)
        that(f"preempted in step {step}", sorted(output.preempted)).gives(preempted)
        for request in output.scheduled:
            if theirs := tables.get(request.request_id):
                theirs = [[block_id - 1 for block_id in table] for table in theirs]  # vLLM's null block is 0
                that(f"tables of {request.request_id!r} in step {step}", request.group_block_ids).gives(theirs)
        that(f"free blocks in step {step}", scheduler.pool.num_free).gives(num_free)
        done = scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 7))
        that(f"finished by step {step}", [each.request_id for each in done]).gives(finished)
        that(f"free blocks after step {step}", scheduler.pool.num_free).gives(num_free_after)


def _request(workload, number):
    shared, length, max_tokens, step = workload["requests"][number]
    own = [(number * 7919 + position * 31 + 1) % 30000 + 500 for position in range(shared, length)]
    prompt = [*(position % 500 for position in range(min(shared, length))), *own]
    return Request(str(number), prompt, max_tokens, arrival_time=step + number * 1e-6)


def _record(source):
    """Take the runs from all that were recorded."""
    seeds = [seed for each in SEEDS.values() for seed in each]
    found = [each for each in json.loads(gzip.decompress(Path(source).read_bytes())) if each["seed"] in seeds]
    FILE.write_bytes(gzip.compress(json.dumps(found, separators=(",", ":")).encode(), mtime=0))


if __name__ == "__main__":  # with the path of hybrid.json.gz
    _record(sys.argv[1])
