"""What the fleet gives: the contract of routers, round robin, requests as routers see them, routers by name."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from minicache.errors import MinicacheError, NoReplicaError
from minicache.fleet import (
    ROUTERS,
    PowerOfTwoRouter,
    PrefixAffinityRouter,
    ReplicaView,
    RoundRobinRouter,
    RoutedRequest,
    Router,
    create_router,
    route_tokens,
)
from minicache.memory.prefix import block_hash, root_hash

REQUEST = RoutedRequest("r", (), 5)


def views(**loads: tuple[int, int]) -> list[ReplicaView]:
    return [ReplicaView(name, *load) for name, load in loads.items()]


def choices(router: Router, replicas: Sequence[ReplicaView], count: int) -> str:
    return "".join(router.choose(REQUEST, replicas) for _ in range(count))


# The contract


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_takes_every_call(name: str) -> None:
    router, request = create_router(name), route_tokens("r", range(40))
    assert router.choose(request, views(a=(0, 1))) == "a"
    router.on_sent(request, "a")
    router.on_finished("r", "a")
    router.on_left("a")
    router.on_left("never seen")
    assert router.choose(request, views(b=(3, 8))) == "b"


@pytest.mark.parametrize("name", ROUTERS)
def test_no_replica_and_only_full_ones(name: str) -> None:
    router = create_router(name)
    with pytest.raises(NoReplicaError, match="no replica takes requests"):
        router.choose(REQUEST, [])
    with pytest.raises(NoReplicaError, match="all 2 replicas are full"):
        router.choose(REQUEST, views(a=(3, 3), b=(5, 4)))
    assert issubclass(NoReplicaError, MinicacheError)


def test_a_view_is_full_from_its_bound_on() -> None:
    assert [ReplicaView("a", count, 2).is_full for count in (0, 1, 2, 3)] == [False, False, True, True]


# Round robin


def test_each_in_turn_by_name() -> None:
    assert choices(RoundRobinRouter(), views(c=(9, 64), a=(0, 64), b=(0, 64)), 7) == "abcabca"


def test_full_ones_are_passed_over() -> None:
    router = RoundRobinRouter()
    assert choices(router, views(a=(0, 64), b=(1, 1), c=(0, 64)), 3) == "aca"
    assert choices(router, views(a=(0, 64), b=(0, 1), c=(0, 64)), 2) == "bc"


def test_replicas_may_come_and_go_between_two_turns() -> None:
    router = RoundRobinRouter()
    assert choices(router, views(a=(0, 64), b=(0, 64), d=(0, 64)), 2) == "ab"
    assert choices(router, views(a=(0, 64), c=(0, 64), d=(0, 64)), 3) == "cda"
    assert choices(router, views(a=(0, 64)), 2) == "aa"


# Requests


def test_hashes_are_the_chain_that_a_prefix_cache_uses() -> None:
    request = route_tokens("r", [5, 6, 7, 8, 9], block_size=2)
    first = block_hash(root_hash(None, None), [5, 6])
    assert request == RoutedRequest("r", (first, block_hash(first, [7, 8])), 5)


def test_a_salt_parts_them() -> None:
    plain, salted = route_tokens("r", [1] * 16), route_tokens("r", [1] * 16, cache_salt="mine")
    assert plain.block_hashes != salted.block_hashes


@pytest.mark.parametrize(("count", "blocks"), [(0, 0), (15, 0), (16, 1), (31, 1), (32, 2)])
def test_only_full_blocks(count: int, blocks: int) -> None:
    request = route_tokens("r", [3] * count)
    assert (len(request.block_hashes), request.num_prompt_tokens) == (blocks, count)


@pytest.mark.parametrize(("size", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), ("16", TypeError)])
def test_a_block_has_a_size(size: int, error: type[Exception]) -> None:
    with pytest.raises(error, match="block_size"):
        route_tokens("r", [1], block_size=size)


# By name


def test_routers_by_name() -> None:
    classes = [type(create_router(name)) for name in ROUTERS]
    assert classes == [RoundRobinRouter, PowerOfTwoRouter, PrefixAffinityRouter]


def test_options_reach_the_router() -> None:
    router = create_router("prefix_affinity", max_imbalance=3, capacity_blocks=2)
    assert isinstance(router, PrefixAffinityRouter)
    request = route_tokens("r", range(64))
    router.on_sent(request, "a")
    assert router.num_remembered(request, "a") == 2
    assert choices(router, views(a=(3, 64), b=(0, 64)), 1) == "b"
    replicas = views(**dict.fromkeys("abcdefgh", (0, 64)))
    runs = [choices(create_router("power_of_two", seed=seed), replicas, 20) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="no router 'random': there are round_robin, power_of_two, prefix_affinity"):
        create_router("random")


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("seed", -1, ValueError),
        ("seed", 1.0, TypeError),
        ("max_imbalance", -1, ValueError),
        ("max_imbalance", "8", TypeError),
        ("capacity_blocks", 0, ValueError),
        ("capacity_blocks", None, TypeError),
    ],
)
def test_options_out_of_bounds_are_refused(name: str, option: str, value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=option):
        create_router(name, **{option: value})  # type: ignore[arg-type]
