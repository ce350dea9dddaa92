"""Orca's baselines as schedulers: the same batches as phase 2's memory simulation, and a pool that keeps its books."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.grid import grid

from minicache.errors import OutOfBlocksError, RequestTooLargeError
from minicache.request import Request
from minicache.scheduler.audit import Auditor
from minicache.simulator.costs import FixedCost
from minicache.simulator.memory_use import MemorySimulation
from minicache.simulator.orca import OrcaScheduler, RunPool
from minicache.simulator.serving import ServingSimulation
from minicache.simulator.workload import SHAREGPT, LengthDistribution, generate

POLICIES = ["max", "pow2", "oracle"]


def arrivals(count, seed=1):
    """Short requests, all there from the start."""
    lengths = LengthDistribution.from_mean(20, 1.0)
    drawn = generate(replace(SHAREGPT, prompt=lengths, output=lengths, max_model_len=100), count, seed)
    return [replace(arrival, time=0.0) for arrival in drawn]


@grid({"policy": POLICIES, "num_slots": [1000, 336, 128]})
def test_the_batches_are_those_of_phase_2(policy, num_slots):
    """Step by step as many requests in the batch and in the line, and as many slots taken."""
    scheduler = OrcaScheduler(policy, num_slots=num_slots, max_model_len=100)
    steps = []
    ServingSimulation(scheduler, FixedCost(), arrivals(80), observers=[Auditor()], trace=steps.append).run()
    samples = list(MemorySimulation(arrivals(80), policy, num_slots, 100, seconds_per_step=1.0).run())
    assert [step.num_running for step in steps] == [sample.num_running for sample in samples]
    assert [step.num_waiting for step in steps] == [sample.num_waiting for sample in samples]
    taken = [sample.memory.used + sample.memory.reserved + sample.memory.internal for sample in samples]
    assert [step.num_used_blocks for step in steps] == taken


def test_free_and_too_scattered_is_not_free():
    """12 slots are runs of 8 and 4. The second request needs 8 too: it waits, and so does the third, which fits."""
    scheduler = OrcaScheduler("oracle", num_slots=12, max_model_len=12)
    for name in ("first", "second"):
        scheduler.add_request(Request(name, [1] * 4, 2))
    scheduler.add_request(Request("third", [1], 1))
    assert list(scheduler.schedule().num_scheduled_tokens) == ["first"]
    assert scheduler.pool.num_free == 4
    scheduler.check()


def test_limits():
    scheduler = OrcaScheduler("max", num_slots=48, max_model_len=40)
    with pytest.raises(RequestTooLargeError, match="a run of 40 slots, and the longest that there can be has 32"):
        scheduler.add_request(Request("a", [1], 1))
    with pytest.raises(ValueError, match="policy"):
        OrcaScheduler("min", num_slots=48, max_model_len=40)


@pytest.mark.parametrize(("policy", "slots"), [("max", 64), ("pow2", 10 + 32), ("oracle", 10 + 25)])
def test_what_a_request_reserves(policy, slots):
    scheduler = OrcaScheduler(policy, num_slots=256, max_model_len=64)
    assert scheduler.blocks_to_admit(Request("a", [1] * 10, 25)) == slots
    assert scheduler.blocks_to_admit(Request("b", [1] * 60, 1000)) == 64  # an answer ends at the model's limit


def test_a_pool_of_runs():
    pool = RunPool(22)  # runs of 16, 4 and 2
    first = pool.allocate(3)
    assert first == [16, 17, 18, 19]
    assert pool.allocate(9) == list(range(16))
    assert (pool.num_free, pool.num_used, pool.ref_count(17), pool.ref_count(21)) == (2, 20, 1, 0)
    assert pool.fits(2)
    assert not pool.fits(3)
    with pytest.raises(OutOfBlocksError):
        pool.allocate(3)
    with pytest.raises(ValueError, match="not a run"):
        pool.free([16, 17])
    pool.free(first[::-1])
    pool.check()
    assert (pool.num_free, pool.ref_count(17)) == (6, 0)
