"""Memory under load: does the simulator lose a request or a slot, and is it right where a hand can follow it?"""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest

from minicache.errors import OutOfBlocksError, OutOfSlotsError
from minicache.memory.reservation import MemoryUse
from minicache.simulator.memory_use import MemorySimulation, PagedMemory
from minicache.simulator.workload import SHAREGPT, Arrival, LengthDistribution, generate

POLICIES = ["max", "pow2", "oracle", "paged"]


def use(used, reserved, internal, external, free):
    return MemoryUse(used, reserved, internal, external, free)


def simulation(policy, num_slots, arrivals, **options):
    requests = [Arrival(number, *arrival) for number, arrival in enumerate(arrivals)]
    return MemorySimulation(requests, policy, num_slots, 16, **{"seconds_per_step": 1.0, "block_size": 4} | options)


def small_workload(rate=2.0):
    """Short requests on a small memory: hundreds come and go in a second of the test's time."""
    lengths = LengthDistribution.from_mean(20, 1.0)
    return replace(SHAREGPT, prompt=lengths, output=lengths, rate=rate, max_model_len=100)


# By hand


def test_two_requests_under_oracle():
    """8 slots. A: prompt 3, output 2, so a run of 8. B: prompt 1, output 1, comes at 0.5 s and waits for A to leave."""
    samples = list(simulation("oracle", 8, [(0.0, 3, 2), (0.5, 1, 1)]).run())
    assert [sample.memory for sample in samples] == [
        use(3, 2, 3, 0, 0),
        use(4, 1, 3, 0, 0),
        use(1, 1, 0, 0, 6),
    ]
    assert [sample.time for sample in samples] == [0.0, 1.0, 2.0]
    assert [sample.num_running for sample in samples] == [1, 1, 1]
    assert [sample.num_waiting for sample in samples] == [0, 1, 0]
    assert [sample.num_finished for sample in samples] == [0, 0, 1]


def test_surplus_and_rounding_under_max_and_pow2():
    """Prompt 2, output 3, limit 16, 32 slots. Max: 16 reserved, surplus 11. Pow2: 6 reserved, surplus 1, rounding 2."""
    max_sample = simulation("max", 32, [(0.0, 2, 3)]).step()
    assert (max_sample.memory, max_sample.surplus) == (use(2, 3, 11, 0, 16), 11)
    pow2_sample = simulation("pow2", 32, [(0.0, 2, 3)]).step()
    assert (pow2_sample.memory, pow2_sample.surplus) == (use(2, 3, 3, 0, 24), 1)


def test_what_waits_makes_free_slots_external():
    """12 slots: runs of 8 and 4. The first request takes the 8, the second needs 8 too: the 4 are external to it."""
    samples = list(simulation("oracle", 12, [(0.0, 4, 1), (0.0, 4, 1)]).run())
    assert [sample.memory for sample in samples] == [use(4, 1, 3, 4, 0), use(4, 1, 3, 0, 4)]


def test_nobody_overtakes():
    """The third request would fit next to the first. The second does not, and came before it."""
    samples = list(simulation("oracle", 12, [(0.0, 6, 2), (0.0, 6, 2), (0.0, 1, 1)]).run())
    assert [(sample.num_running, sample.num_waiting) for sample in samples] == [(1, 2), (1, 2), (2, 0), (1, 0)]


def test_paged_by_hand():
    """Blocks of 4. A prompt of 3 and an output of 3: a block, then two; what the last block still gets is reserved."""
    samples = list(simulation("paged", 16, [(0.0, 3, 3)]).run())
    assert [sample.memory for sample in samples] == [use(3, 1, 0, 0, 12), use(4, 0, 0, 0, 12), use(5, 1, 2, 0, 8)]
    assert {sample.surplus for sample in samples} == {0}


def test_the_newest_is_preempted_and_comes_back():
    """Two blocks of 4, two requests of 3 + 3 tokens. Both run until a third block is needed; then the second gives way.

    It has 4 tokens by then. When the first has left it is admitted with these 4, and makes its last 2.
    """
    run = simulation("paged", 8, [(0.0, 3, 3), (0.0, 3, 3)])
    samples = list(run.run())
    assert [(sample.num_running, sample.num_waiting, sample.memory.used) for sample in samples] == [
        (2, 0, 6),  # 3 and 3
        (2, 0, 8),  # 4 and 4; the first needs a second block now
        (1, 1, 5),  # 5
        (1, 0, 4),  # the first has left with 6; the second is back with its 4
        (1, 0, 5),
    ]
    assert [sample.num_preempted for sample in samples] == [0, 0, 1, 1, 1]
    assert [sample.num_finished for sample in samples] == [0, 0, 0, 1, 1]


def test_an_idle_server_waits_and_says_so():
    samples = list(simulation("max", 16, [(2.5, 1, 1)]).run())
    assert [sample.num_running for sample in samples] == [0, 0, 0, 1]
    assert samples[0].memory == use(0, 0, 0, 0, 16)


# Conservation


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rate", [0.5, 20.0])
def test_no_slot_and_no_request_is_lost(policy, rate):
    """Slow or in a rush: at every step the parts are all slots and the requests are all that came."""
    arrivals = generate(small_workload(rate), 150, seed=1)
    run = MemorySimulation(arrivals, policy, 336, 100, seconds_per_step=0.05)
    sample = None
    for sample in run.run():
        memory = sample.memory
        assert memory.total == 336
        assert min(memory.used, memory.reserved, memory.internal, memory.external, memory.free) >= 0
        assert 0 <= sample.surplus <= memory.internal
        arrived = sum(arrival.time <= sample.time for arrival in arrivals)
        assert sample.num_running + sample.num_waiting + sample.num_finished == arrived
    assert run.is_done
    assert sample.num_finished + sample.num_running == 150  # the last ones left in that very step
    assert run.memory.memory_use() == use(0, 0, 0, 0, 336)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_gets_all_of_its_tokens(policy):
    """A token a step for each running request, none twice and none too few, preempted or not."""
    arrivals = generate(small_workload(20.0), 100, seed=2)
    samples = list(MemorySimulation(arrivals, policy, 336, 100, seconds_per_step=0.05).run())
    tokens = sum(sample.num_running for sample in samples)
    lost_turns = samples[-1].num_preempted  # who is preempted gets no token in that step
    assert tokens - lost_turns <= sum(arrival.num_output_tokens for arrival in arrivals) <= tokens


def test_oracle_has_no_surplus_and_paged_no_more_than_a_block_a_request():
    arrivals = generate(small_workload(20.0), 150, seed=3)
    for sample in MemorySimulation(arrivals, "oracle", 336, 100, seconds_per_step=0.05).run():
        assert sample.surplus == 0
        # A power of two is less than twice what it was rounded up from.
        assert sample.memory.internal < max(1, sample.memory.used + sample.memory.reserved)
    for sample in MemorySimulation(arrivals, "paged", 336, 100, seconds_per_step=0.05).run():
        assert sample.memory.internal + sample.memory.reserved <= 15 * sample.num_running
        assert sample.memory.external == 0


def test_every_other_step_is_the_same_run():
    arrivals = generate(small_workload(), 60, seed=4)
    each = list(MemorySimulation(arrivals, "paged", 128, 100, seconds_per_step=0.05).run())
    some = list(MemorySimulation(arrivals, "paged", 128, 100, seconds_per_step=0.05).run(every=3))
    assert some == each[::3]


# The papers' ordering, and closed forms


def test_max_serves_as_many_as_there_are_runs():
    """OPT-13B: 15,728 slots, limit 2,048, more requests than can be served: 7 in the batch, whatever they say."""
    arrivals = generate(replace(SHAREGPT, rate=10.0), 400, seed=5)
    samples = list(MemorySimulation(arrivals, "max", 15_728, 2048, seconds_per_step=0.05).run(every=5))
    busy = [sample for sample in samples if sample.num_waiting]
    assert {sample.num_running for sample in busy} == {7}
    assert {sample.memory.external for sample in busy} == {15_728 - 7 * 2048}


def test_the_better_a_policy_knows_the_future_the_more_it_serves():
    arrivals = generate(replace(SHAREGPT, rate=10.0), 400, seed=6)
    used, batched = {}, {}
    for policy in POLICIES:
        samples = list(MemorySimulation(arrivals, policy, 15_728, 2048, seconds_per_step=0.05).run(every=5))
        busy = [sample for sample in samples if sample.num_waiting]
        used[policy] = fmean(sample.memory.used for sample in busy) / 15_728
        batched[policy] = fmean(sample.num_running for sample in busy)
    assert used["max"] < used["pow2"] < used["oracle"] < used["paged"]
    assert batched["max"] < batched["pow2"] < batched["oracle"] < batched["paged"]
    assert used["max"] < 0.3
    assert used["paged"] > 0.9


def test_littles_law():
    """Where no one waits, the batch is rate · output · seconds a step on average."""
    arrivals = generate(replace(SHAREGPT, rate=4.0), 300, seed=7)
    samples = list(MemorySimulation(arrivals, "paged", 100_000, 2048, seconds_per_step=0.02).run())
    seconds = samples[-1].time
    tokens = sum(arrival.num_output_tokens for arrival in arrivals)
    assert not any(sample.num_waiting for sample in samples)
    assert fmean(sample.num_running for sample in samples) == pytest.approx(tokens * 0.02 / seconds, rel=1e-2)


# Misuse


def test_a_request_that_no_memory_can_hold_is_an_error_and_no_endless_loop():
    with pytest.raises(OutOfSlotsError):
        list(simulation("max", 15, [(0.0, 1, 1)]).run())
    with pytest.raises(OutOfBlocksError):
        list(simulation("paged", 8, [(0.0, 12, 1)]).run())
    with pytest.raises(OutOfBlocksError):
        list(simulation("paged", 8, [(0.0, 4, 12)]).run())


@pytest.mark.parametrize(
    ("policy", "options"),
    [("best", {}), ("max", {"seconds_per_step": 0}), ("paged", {"block_size": 0}), ("paged", {"block_size": 17})],
)
def test_numbers_that_cannot_be_are_refused(policy, options):
    with pytest.raises(ValueError):  # noqa: PT011, four different messages
        simulation(policy, 16, [], **options)


def test_looking_at_no_step_is_refused():
    with pytest.raises(ValueError, match="every"):
        next(simulation("max", 16, [(0.0, 1, 1)]).run(every=0))


def test_a_paged_memory_admits_whoever_can_go_on():
    """A prompt that fills all blocks has no room for its first token: refused, and nothing was taken."""
    memory = PagedMemory(8, 4)
    with pytest.raises(OutOfBlocksError):
        memory.admit("a", 8, 1)
    assert memory.pool.num_free == 2
    memory.admit("a", 7, 1)
    memory.grow("a")
    with pytest.raises(OutOfBlocksError):
        memory.grow("a")
    assert memory.memory_use() == use(8, 0, 0, 0, 0)
    memory.release("a")
    assert memory.pool.num_free == 2
