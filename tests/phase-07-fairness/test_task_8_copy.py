"""Phase 7, task 8: incident 8, a copy that was not in the budget."""

from __future__ import annotations

import random

from minicache.request import RequestStatus
from minicache_course.checks import that
from minicache_course.incidents.broken import UnbudgetedCopyScheduler
from minicache_course.incidents.case_8_copy import FixedCopyScheduler, expose
from minicache_course.seeds import fresh


def step(scheduler):
    """One step, whose tokens are all 0. Its output."""
    output = scheduler.schedule()
    scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 0))
    scheduler.check()
    return output


def test_expose_fails_on_the_broken_one(room):
    """Your test fails on the scheduler that copies a block it has not counted."""
    room.exposes(expose, UnbudgetedCopyScheduler)


def test_expose_passes_on_right_ones(room):
    """Your test passes on schedulers that make room for a copy first, whatever else they do."""
    room.passes(expose, 8)


def test_blocks_missing_counts_growth_and_copies(room, request_of):
    """Fixed: a request lacks a block when its last one is full, and a copy's block when its last one is shared."""
    scheduler = room.fixed(expose, FixedCopyScheduler)(num_blocks=10, block_size=4)
    parent = request_of("parent", 5, 20)
    scheduler.add_request(parent)
    step(scheduler)
    that("blocks_missing, 6 tokens in 2 blocks", scheduler.blocks_missing(parent)).gives(0)
    child = scheduler.fork_request("parent", "child")
    that("blocks_missing of the parent, 6 tokens in 2 shared blocks", scheduler.blocks_missing(parent)).gives(1)
    that("blocks_missing of the child", scheduler.blocks_missing(child)).gives(1)
    that("blocks to copy in the next step", len(step(scheduler).blocks_to_copy)).gives(1)
    that("blocks_missing once each has its own", [scheduler.blocks_missing(each) for each in (parent, child)]).gives(
        [0, 0]
    )
    step(scheduler)
    step(scheduler)
    that("blocks_missing, 9 tokens in 2 blocks", [scheduler.blocks_missing(each) for each in (parent, child)]).gives(
        [1, 1]
    )


def test_a_full_last_block_is_not_copied(room, request_of):
    """Fixed: 8 computed tokens in two full blocks: neither writes into them, so a new block is missing and no copy."""
    scheduler = room.fixed(expose, FixedCopyScheduler)(num_blocks=10, block_size=4)
    parent = request_of("parent", 8, 20)
    scheduler.add_request(parent)
    step(scheduler)
    scheduler.fork_request("parent", "child")
    that("blocks_missing of the parent", scheduler.blocks_missing(parent)).gives(1)
    that("blocks to copy", step(scheduler).blocks_to_copy).gives([])


def test_with_no_block_to_spare_the_child_leaves(room, request_of):
    """Fixed: 2 blocks, and a parent and its child share both: the child is preempted, and then no copy is needed."""
    scheduler = room.fixed(expose, FixedCopyScheduler)(num_blocks=2)
    parent = request_of("parent", 20, 5)
    scheduler.add_request(parent)
    step(scheduler)
    child = scheduler.fork_request("parent", "child")
    output = step(scheduler)
    that("scheduled", output.num_scheduled_tokens).gives({"parent": 1})
    that("preempted", output.preempted).gives(["child"])
    that("blocks to copy", output.blocks_to_copy).gives([])
    room.run(scheduler)
    that("how they finish", [parent.status, child.status]).gives([RequestStatus.FINISHED_LENGTH] * 2)


def test_random_forks(room, request_of):
    """Fixed: requests forked at random in small pools: no step runs out of blocks, and every request is served."""
    create = room.fixed(expose, FixedCopyScheduler)
    for seed in range(25):
        rng = random.Random(fresh(seed))
        scheduler = create(num_blocks=rng.randint(6, 14), block_size=4, max_num_seqs=6)
        requests = [request_of(number, rng.randint(1, 10), rng.randint(2, 12)) for number in range(4)]
        for request in requests:
            scheduler.add_request(request)
        for turn in range(300):
            if not scheduler.has_unfinished:
                break
            step(scheduler)
            forkable = [each for each in scheduler.running if each.output_token_ids]
            if forkable and turn < 20 and scheduler.num_running < 6 and rng.random() < 0.4:
                requests.append(scheduler.fork_request(rng.choice(forkable).request_id, f"child {turn}"))
        that("how they finish", {request.status.name for request in requests}).gives({"FINISHED_LENGTH"})
