"""Tiers in simulated time: what a load takes can be followed by hand, and whatever happens, no request is lost."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import Any

import pytest

from minicache.fleet import create_router
from minicache.request import Request
from minicache.scheduler import Scheduler, create_scheduler
from minicache.scheduler.audit_sharing import SharingAuditor
from minicache.scheduler.observe import observe
from minicache.simulator.costs import FixedCost
from minicache.simulator.fleet import Crash, FleetReport, FleetSimulation
from minicache.simulator.report import ServingReport
from minicache.simulator.serving import ServingSimulation
from minicache.simulator.tiers import SimulatedTier, SimulatedTiers, simulated_tiers

NBYTES = 100
"""Of a block, which has four tokens."""

A, B = list(range(10, 23)), list(range(50, 66))
"""Three full blocks and a token; four full blocks, which evict the others from a cache of four."""


def tier(seconds: float = 0.25, max_blocks: int = 100, name: str = "disk") -> SimulatedTier:
    """A tier that takes so long for a block."""
    return SimulatedTier(name, max_blocks * NBYTES, NBYTES, NBYTES / seconds if seconds else float("inf"))


def scheduler(*tiers: SimulatedTier, **options: Any) -> Scheduler:
    options = {"num_blocks": 4, "block_size": 4} | options
    return observe(create_scheduler("chunked", tiers=SimulatedTiers(tiers), **options), SharingAuditor())


def request(name: Any, time: float, prompt: list[int], num_output: int = 1) -> Request:
    return Request(name, prompt, num_output, ignore_eos=True, arrival_time=time)


def serve(its_scheduler: Scheduler, *requests: Request) -> ServingReport:
    """In steps of a second."""
    return ServingSimulation(its_scheduler, FixedCost(1.0), requests).run()


# By hand


def test_a_load_takes_its_bytes_over_the_bandwidth() -> None:
    report = serve(scheduler(tier()), request(0, 0.0, A), request(1, 10.0, B), request(2, 20.0, A))
    assert list(report.times.first_token) == [1.0, 1.0, pytest.approx(0.75 + 1.0)]
    assert report.num_computed_tokens == 13 + 16 + 1
    assert report.tier_hit_tokens == {"disk": 12}
    assert report.busy_seconds == 3.0


def test_memory_of_the_host_takes_the_time_of_a_swap() -> None:
    class Swapping(FixedCost):
        def swap_seconds(self, num_tokens: int) -> float:
            return num_tokens / 16

    its_scheduler = scheduler(tier(seconds=0, name="cpu"))
    arrivals = [request(0, 0.0, A), request(1, 10.0, B), request(2, 20.0, A)]
    report = ServingSimulation(its_scheduler, Swapping(1.0), arrivals).run()
    assert list(report.times.first_token) == [1.0, 1.0, 1.0 + 12 / 16]
    assert report.tier_hit_tokens == {"cpu": 12}


def test_another_request_goes_on_while_one_loads() -> None:
    short = request(3, 20.1, [1])
    report = serve(scheduler(tier()), request(0, 0.0, A), request(1, 10.0, B), request(2, 20.0, A), short)
    assert list(report.times.first_token)[2:] == [pytest.approx(1.0), pytest.approx(2.1)]
    assert report.times.arrival[2] == 20.1


def test_without_tiers_it_is_computed() -> None:
    its_scheduler = create_scheduler("chunked", num_blocks=4, block_size=4, prefix_caching=True)
    report = serve(its_scheduler, request(0, 0.0, A), request(1, 10.0, B), request(2, 20.0, A))
    assert (report.num_computed_tokens, report.tier_hit_tokens) == (13 + 16 + 13, {})


def test_a_block_is_there_when_it_is_written() -> None:
    """Four blocks are written one after the other, by 1.0, 2.0, …; and two of them are found at 2.5."""
    tiers = SimulatedTiers([tier(seconds=1.0)])
    hashes = [b"a", b"b", b"c", b"d"]
    tiers.store(hashes)
    assert len(tiers.fetch(hashes).blocks) == 0
    tiers.now = 2.5
    load = tiers.fetch(hashes)
    assert tiers.next_end() == 4.5
    assert (load.is_done, load.blocks) == (False, [])
    tiers.now = 4.5
    assert (load.is_done, load.blocks, tiers.next_end()) == (True, [b"", b""], None)


def test_loads_share_a_link_and_end_after_three_seconds() -> None:
    tiers = SimulatedTiers([tier(seconds=0.5)])
    hashes = [bytes([number]) for number in range(8)]
    tiers.store(hashes)
    tiers.now = 10.0
    first, second = tiers.fetch(hashes[:5]), tiers.fetch(hashes[5:])
    tiers.now = 12.5
    assert (len(first.blocks), second.is_done) == (5, False)
    tiers.now = 13.0
    assert len(second.blocks) == 1


def test_what_a_slower_tier_had_is_in_the_faster_one_afterwards() -> None:
    fast, slow = tier(seconds=0, name="cpu"), tier()
    SimulatedTiers([slow]).store([b"a", b"b"])
    tiers = SimulatedTiers([fast, slow])
    tiers.now = 5.0
    tiers.fetch([b"a", b"b", b"c"])
    assert tiers.next_end() == 5.5
    tiers.now = 6.0
    assert tiers.fetch([b"a", b"b", b"c"]).blocks == [b"", b""]
    assert tiers.num_hits == {"cpu": 2, "disk": 2}


def test_a_tier_keeps_its_bound_and_drops_what_is_discarded() -> None:
    tiers = SimulatedTiers([tier(seconds=0, max_blocks=2)])
    tiers.store([b"a", b"b", b"c"])
    assert [len(tiers.fetch([each]).blocks) for each in (b"a", b"b", b"c")] == [0, 1, 1]
    tiers.discard([b"b"])
    assert not tiers.fetch([b"b"]).blocks


def test_too_much_is_not_written() -> None:
    """Beyond 256 MiB that wait, blocks are dropped, as in an engine."""
    half = 130 * 2**20
    tiers = SimulatedTiers([SimulatedTier("disk", 10 * half, half, half)])
    hashes = [bytes([number]) for number in range(8)]
    tiers.store(hashes)
    assert tiers.tiers[0].lookup(hashes, 100.0) == 2


def test_a_tier_without_room_for_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="a block has 100 bytes, and the tier 'cpu' only 99"):
        SimulatedTier("cpu", 99, NBYTES, 1.0)
    with pytest.raises(ValueError, match="no tier"):
        simulated_tiers(["tape:1GB"], NBYTES)


# Fleets


def fleet(specs: list[str], arrivals: Iterable[Request], crashes: Iterable[Crash] = (), **options: Any) -> FleetReport:
    make_tiers = simulated_tiers(specs, NBYTES)
    options = {"num_blocks": 4, "block_size": 4} | options

    def make() -> Scheduler:
        return observe(create_scheduler("chunked", tiers=make_tiers(), **options), SharingAuditor())

    router = create_router("round_robin")
    return FleetSimulation(router, make, FixedCost(1.0), arrivals, num_replicas=2, crashes=crashes).run()


@pytest.mark.parametrize(
    ("spec", "num_computed", "hits"), [("cpu:1MB", 26, 0), ("disk:/kv", 14, 12), ("redis://host", 14, 12)]
)
def test_replicas_share_folders_and_stores_and_have_memory_of_their_own(
    spec: str, num_computed: int, hits: int
) -> None:
    report = fleet([spec], [request(0, 0.0, A), request(1, 10.0, A)])
    assert [each.num_sent for each in report.replicas] == [1, 1]
    assert report.num_computed_tokens == num_computed
    assert report.tier_hit_tokens == {spec.partition(":")[0]: hits}
    assert report.replicas[1].tier_hit_tokens == report.tier_hit_tokens


def test_a_store_outlives_a_replica() -> None:
    arrivals = [request(0, 0.0, A), request(1, 20.0, A)]
    report = fleet(
        ["cpu:1MB", "redis://host"], arrivals, [Crash(10.0, "replica-0", 1.0), Crash(10.0, "replica-1", 1.0)]
    )
    assert report.tier_hit_tokens == {"cpu": 0, "redis": 12}


def random_requests(seed: int, count: int = 120) -> list[Request]:
    choose, time, made = Random(seed), 0.0, []
    prompts = [[choose.randrange(50) for _ in range(choose.randrange(4, 40))] for _ in range(12)]
    for number in range(count):
        time += choose.expovariate(0.7)
        made.append(request(number, time, [*choose.choice(prompts), choose.randrange(50)], choose.randrange(1, 8)))
    return made


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tier_policy", ["write_through", "write_back"])
def test_every_request_is_served_and_audited(seed: int, tier_policy: str) -> None:
    options: dict[str, Any] = {"num_blocks": 24, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    tiers = tier(seconds=0, max_blocks=20, name="cpu"), tier(seconds=0.3)
    report = serve(scheduler(*tiers, tier_policy=tier_policy, **options), *random_requests(seed))
    alone = create_scheduler("chunked", block_size=4, prefix_caching=True, **options)
    without = serve(alone, *random_requests(seed))
    assert report.num_finished == without.num_finished == 120
    assert report.num_output_tokens == without.num_output_tokens
    assert report.num_computed_tokens < without.num_computed_tokens
    assert all(report.tier_hit_tokens.values())
    again = tier(seconds=0, max_blocks=20, name="cpu"), tier(seconds=0.3)
    assert serve(scheduler(*again, tier_policy=tier_policy, **options), *random_requests(seed)) == report


def test_a_fleet_whose_replicas_die_serves_every_request() -> None:
    crashes = [Crash(20.0 + 11 * number, f"replica-{number % 2}", 3.0) for number in range(8)]
    options: dict[str, Any] = {"num_blocks": 24, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    report = fleet(["cpu:2KB", "disk:/kv?max=1MB"], random_requests(7), crashes, **options)
    assert report.num_finished + report.num_given_up == 120
    assert report.num_given_up < 5
    assert all(report.tier_hit_tokens.values())
