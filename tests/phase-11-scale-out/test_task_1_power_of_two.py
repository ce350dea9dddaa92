"""Phase 11, task 1: of two replicas drawn at random, the one with fewer unfinished requests."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minicache.errors import NoReplicaError
from minicache.fleet.power_of_two import PowerOfTwoRouter
from minicache.fleet.views import ReplicaView, RoutedRequest
from minicache_course.checks import call, that
from minicache_course.seeds import fresh, one_of

REQUEST = RoutedRequest("r", (), 5)


@pytest.fixture
def router():
    return PowerOfTwoRouter(seed=fresh(1))


def shares(router, replicas, count):
    """Of `count` choices, the share of each replica."""
    chosen = Counter(router.choose(REQUEST, replicas) for _ in range(count))
    return {replica.replica_id: chosen[replica.replica_id] / count for replica in replicas}


# One, two, none


@pytest.mark.parametrize("load", [0, 5, 63])
def test_a_single_replica_is_chosen(router, fleet, load):
    """There is one replica, and it is not full: it is chosen, whatever it has."""
    call(router.choose, REQUEST, fleet(a=load)).gives("a")


def test_of_two_the_less_busy_is_chosen(router, fleet):
    """Two replicas are always the pair: the one with fewer unfinished requests, in either order."""
    few = one_of(3, range(1, 9))
    for _ in range(20):
        call(router.choose, REQUEST, fleet(a=few, b=few + 1)).gives("a")
        call(router.choose, REQUEST, fleet(a=few + 1, b=few)).gives("b")


def test_no_replica_is_an_error(router):
    """No replica takes requests: NoReplicaError."""
    call(router.choose, REQUEST, []).raises(NoReplicaError)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_all_full_is_an_error(router, fleet, count):
    """All replicas are full: NoReplicaError, and not one of them."""
    full = fleet(**dict.fromkeys("abcde"[:count], (8, 8)))
    call(router.choose, REQUEST, full).raises(NoReplicaError)


# Full replicas


def test_a_full_replica_is_never_chosen(router, fleet):
    """a has 2 of 2: it is full, though b has more unfinished requests."""
    for _ in range(20):
        call(router.choose, REQUEST, fleet(a=(2, 2), b=5)).gives("b")


def test_more_than_it_takes_is_full_too(router, fleet):
    """a has 9 of 8: a replica may have more than it takes, if another router sent to it at the same time."""
    for _ in range(20):
        call(router.choose, REQUEST, fleet(a=(9, 8), b=20)).gives("b")


def test_one_open_replica_among_full_ones(router, fleet):
    """Seven of eight are full: the eighth is chosen each time, as only replicas that are not full are drawn."""
    for _ in range(50):
        call(router.choose, REQUEST, fleet(**dict.fromkeys("abcdefg", (1, 1)), h=40)).gives("h")


def test_pairs_are_of_replicas_that_are_not_full(router, fleet):
    """a and b are full. Of c, d and e the busiest, e, is never the less busy of two, so it is never chosen."""
    got = shares(router, fleet(a=(1, 1), b=(4, 4), c=10, d=11, e=12), 2000)
    that("choices of e, of 2000", round(2000 * got["e"])).gives(0)
    that("the share of c, in two of three pairs, ± 0.07", got["c"]).is_close(2 / 3, rtol=0, atol=0.07)


# Two at random


def test_the_busiest_is_never_chosen(router, fleet):
    """Two different replicas are drawn: the busiest of four is always with one that is less busy."""
    got = shares(router, fleet(a=3, b=0, c=2, d=1), 2000)
    that("choices of a, the busiest, of 2000", round(2000 * got["a"])).gives(0)


def test_every_pair_is_equally_likely(router, fleet):
    """0, 1, 2 and 3 unfinished requests: chosen in 3, 2, 1 and 0 of the six pairs."""
    got = shares(router, fleet(a=0, b=1, c=2, d=3), 4000)
    for name, pairs in (("a", 3), ("b", 2), ("c", 1)):
        that(f"the share of {name}, in {pairs} of 6 pairs, ± 0.05", got[name]).is_close(pairs / 6, rtol=0, atol=0.05)


def test_every_pair_is_equally_likely_in_another_order(router, fleet):
    """The same four, listed otherwise: where a replica stands does not matter."""
    got = shares(router, fleet(c=2, a=0, d=3, b=1), 4000)
    for name, pairs in (("a", 3), ("b", 2), ("c", 1)):
        that(f"the share of {name}, in {pairs} of 6 pairs, ± 0.05", got[name]).is_close(pairs / 6, rtol=0, atol=0.05)


def test_every_pair_is_equally_likely_in_a_larger_fleet(router, fleet):
    """Twelve, with 0 to 11 unfinished requests, in no order: n is the fewer in 11 − n of the 66 pairs."""
    loads = random.Random(fresh(2)).sample(range(12), 12)
    replicas = fleet(**{f"r{load}": load for load in loads})
    got = shares(router, replicas, 8000)
    for load in range(12):
        what = f"the share of r{load}, in {11 - load} of 66 pairs, ± 0.025"
        that(what, got[f"r{load}"]).is_close((11 - load) / 66, rtol=0, atol=0.025)


@pytest.mark.parametrize("count", [2, 4])
def test_of_equals_each_is_equally_likely(router, fleet, count):
    """An idle fleet: each replica gets the same share, whatever its name or position."""
    got = shares(router, fleet(**dict.fromkeys("abcd"[:count], 0)), 3000)
    for name, share in got.items():
        that(f"the share of {name}, one of {count} idle replicas, ± 0.06", share).is_close(1 / count, rtol=0, atol=0.06)


def test_the_number_counts_and_not_the_share(router, fleet):
    """a has 4 of 5, b has 5 of 64: a has fewer."""
    for _ in range(20):
        call(router.choose, REQUEST, fleet(a=(4, 5), b=5)).gives("a")


def test_stats_are_not_looked_at(router):
    """A replica's report may be old: only `num_unfinished` counts."""
    busy = {"num_unfinished": 50.0, "num_running": 40.0, "num_waiting": 10.0, "memory": 1.0}
    replicas = [ReplicaView("a", 3, 64, busy), ReplicaView("b", 7, 64, dict.fromkeys(busy, 0.0))]
    for _ in range(20):
        call(router.choose, REQUEST, replicas).gives("a")


# Manners


def test_the_replicas_are_not_changed(router, fleet):
    """The list belongs to the caller: same replicas, same order afterwards."""
    replicas = fleet(a=9, b=(8, 8), c=0, d=4)
    before = list(replicas)
    for _ in range(10):
        call(router.choose, REQUEST, replicas)
    that("the replicas after ten choices", replicas).gives(before)


def test_any_sequence_will_do(router, fleet):
    """A tuple is a sequence too."""
    for _ in range(10):
        call(router.choose, REQUEST, tuple(fleet(a=9, b=(1, 1), c=2))).gives("c")


def test_the_list_may_change_between_two_calls(router, fleet):
    """The caller keeps one list up to date: each choice uses its current contents."""
    replicas = fleet(a=0, b=5)
    call(router.choose, REQUEST, replicas).gives("a")
    replicas[0] = fleet(a=9)[0]
    call(router.choose, REQUEST, replicas).gives("b")
    replicas[:] = fleet(c=1)
    call(router.choose, REQUEST, replicas).gives("c")


def test_the_same_seed_gives_the_same_choices(fleet):
    """All random numbers come from self.rng, and not from the module `random`, whose state others change."""
    replicas = fleet(**dict.fromkeys("abcdefgh", 2))
    runs = []
    for state in (1, 2):
        random.seed(state)
        router = PowerOfTwoRouter(seed=fresh(7))
        runs.append([call(router.choose, REQUEST, replicas).value for _ in range(12)])
    that("12 choices with the same seed", runs[1]).gives(runs[0])


def test_another_seed_gives_other_choices(fleet):
    """Two routers in front of the same replicas must not draw the same pairs."""
    replicas, seed = fleet(**dict.fromkeys("abcdefgh", 2)), fresh(7)
    routers = [PowerOfTwoRouter(seed=seed + n) for n in range(2)]
    one, other = ([router.choose(REQUEST, replicas) for _ in range(24)] for router in routers)
    that("whether 24 choices with another seed are the same", one == other).gives(False)


# Why two


def test_no_herd_on_an_idle_replica(router):
    """One of 50 is idle, and the numbers stay as they are for 400 requests. It is in 2 of 50 pairs."""
    replicas = [ReplicaView(f"r{number}", 0 if number == 17 else 6, 64) for number in range(50)]
    got = shares(router, replicas, 400)
    that("whether the share of the replica that was idle is below 0.15", got["r17"] < 0.15).gives(True)
    that("whether the share of the replica that was idle is above 0", got["r17"] > 0).gives(True)


def test_two_choices_are_nearly_even(router):
    """2,000 requests to 100 replicas, 20 each on average: none gets more than 25. One choice gives 34 or so."""
    replicas = [ReplicaView(f"r{number}", 0, 64) for number in range(100)]
    for _ in range(2000):
        number = int(router.choose(REQUEST, replicas)[1:])
        replicas[number] = ReplicaView(f"r{number}", replicas[number].num_unfinished + 1, 64)
    most = max(replica.num_unfinished for replica in replicas)
    that(f"the busiest of 100 replicas has {most} requests: whether that is at most 25", most <= 25).gives(True)


@settings(max_examples=80)
@given(
    loads=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 8)), max_size=8),
    seed=st.integers(0, 2**16),
)
def test_any_fleet(loads, seed):
    """One that is not full is chosen, and not one that is busier than all others that are not full."""
    replicas = [ReplicaView(f"r{number}", load, most) for number, (load, most) in enumerate(loads)]
    choice = call(PowerOfTwoRouter(seed=seed).choose, REQUEST, replicas)
    unfinished = {
        each.replica_id: each.num_unfinished for each in replicas if each.num_unfinished < each.max_unfinished
    }
    if not unfinished:
        return choice.raises(NoReplicaError)
    that(f"whether {choice.value!r} is one of {sorted(unfinished)}", choice.value in unfinished).gives(True)
    others = [load for name, load in unfinished.items() if name != choice.value]
    if others:
        fits = unfinished[choice.value] <= max(others)
        that(f"whether one of the others has at least as many as {choice.value!r}", fits).gives(True)
    return None
