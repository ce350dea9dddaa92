"""What a request costs at a thousand replicas, in bytecode instructions: it must not be a thousand times as much."""

from __future__ import annotations

from collections.abc import Callable

from minicache.fleet import Membership, create_router, route_tokens
from minicache_course.effort import effort

REQUEST = route_tokens("r", range(640))


def fleet(count: int) -> Membership:
    membership = Membership()
    for number in range(count):
        membership.join(f"r{number}", max_unfinished=64)
        membership.on_sent(f"before {number}", f"r{number}")
    return membership


def instructions(of: Callable[[Membership], Callable[[], object]], count: int) -> int:
    return effort(of(fleet(count)))


def test_the_account_of_a_request_does_not_depend_on_the_number_of_replicas() -> None:
    def a_request(membership: Membership) -> Callable[[], object]:
        def run() -> object:
            attempt = membership.on_sent("r", "r3")
            views = membership.views()
            membership.on_finished(attempt)
            membership.on_report(membership.on_probed("r4"), {"num_unfinished": 5})
            return views

        return run

    assert instructions(a_request, 1000) < 1.2 * instructions(a_request, 10)


def test_two_choices_do_not_look_at_all_replicas() -> None:
    def a_choice(membership: Membership) -> Callable[[], object]:
        router = create_router("power_of_two")
        return lambda: router.choose(REQUEST, membership.views())

    assert instructions(a_choice, 1000) < 2 * instructions(a_choice, 10)


def test_affinity_looks_at_a_replica_a_few_times() -> None:
    """Not once for each of the 30 blocks that are remembered of every replica: less than 200 instructions each."""

    def a_choice(membership: Membership) -> Callable[[], object]:
        router, before = create_router("prefix_affinity"), route_tokens("before", range(480))
        for view in membership.views():
            router.on_sent(before, view.replica_id)
        return lambda: router.choose(REQUEST, membership.views())

    assert instructions(a_choice, 1000) - instructions(a_choice, 10) < 200 * 990
