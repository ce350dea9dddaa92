"""A simulated fleet: what one server does it does too, nothing is lost, and the same seed gives the same run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from minicache.arithmetic.specs import LLAMA_3_8B
from minicache.errors import InvariantError, NoReplicaError
from minicache.fleet import (
    ROUTERS,
    Autoscaler,
    FailoverStream,
    FleetView,
    MovingCosts,
    Place,
    ReplicaView,
    RoutedRequest,
    Router,
    create_router,
)
from minicache.fleet.failover import Attempt
from minicache.request import Request
from minicache.scheduler import Scheduler, create_scheduler
from minicache.scheduler.audit_sharing import SharingAuditor
from minicache.scheduler.observe import Observer, observe
from minicache.simulator.costs import FixedCost
from minicache.simulator.fleet import Crash, Disaggregation, FleetReport, FleetSimulation, Scaling
from minicache.simulator.serving import ServingSimulation

COST = FixedCost(0.1)


def make_scheduler() -> Scheduler:
    return create_scheduler("chunked", num_blocks=40, max_num_seqs=8, max_num_batched_tokens=64, prefix_caching=True)


def audited() -> Scheduler:
    return observe(make_scheduler(), SharingAuditor())


def requests(count: int, seed: int, *, rate: float = 4.0) -> list[Request]:
    """Short prompts, a quarter of which begin alike."""
    rng, time, made = Random(seed), 0.0, []
    for number in range(count):
        time += rng.expovariate(rate)
        prompt = [1] * 40 if rng.random() < 0.25 else []
        prompt = prompt + [rng.randrange(2, 100) for _ in range(rng.randint(1, 60))]
        made.append(Request(number, prompt, rng.randint(1, 30), ignore_eos=True, arrival_time=time))
    return made


def run(arrivals: list[Request], **options: Any) -> FleetReport:
    options = {"num_replicas": 3, "max_unfinished": 16, "make_scheduler": audited, "policy": "power_of_two"} | options
    router, make = create_router(options.pop("policy")), options.pop("make_scheduler")
    return FleetSimulation(router, make, COST, arrivals, **options).run()


def test_a_fleet_of_one_is_one_server() -> None:
    alone = ServingSimulation(make_scheduler(), COST, requests(120, 0)).run()
    fleet = run(requests(120, 0), num_replicas=1, max_unfinished=1000, make_scheduler=make_scheduler)
    assert fleet.times == alone.times
    assert (fleet.makespan, fleet.num_output_tokens) == (alone.makespan, alone.num_output_tokens)
    (replica,) = fleet.replicas
    assert replica.busy_seconds == pytest.approx(alone.busy_seconds)


@pytest.mark.parametrize("policy", ROUTERS)
def test_every_request_gets_its_tokens(policy: str) -> None:
    arrivals = requests(150, 1)
    report = run(arrivals, policy=policy)
    assert report.num_finished == report.num_requests == sum(each.num_sent for each in report.replicas) == 150
    assert report.num_output_tokens == sum(each.max_tokens for each in arrivals)
    assert all(each.num_sent for each in report.replicas)


def test_a_full_fleet_lets_requests_wait_and_loses_none() -> None:
    report = run(requests(60, 3, rate=1000.0), num_replicas=2, max_unfinished=2)
    assert report.num_finished == 60
    assert max(report.series.num_unfinished) <= 4
    assert max(report.series.num_waiting) >= 50


def test_a_client_keeps_what_it_has_when_its_replica_dies() -> None:
    """Ten steps of 0.1 s: at 0.55 s the client has 5 tokens, and the step that is under way is lost."""
    request = Request("a", [1, 2, 3], 10, ignore_eos=True)
    report = run([request], num_replicas=2, policy="round_robin", crashes=[Crash(0.55, "replica-0")])
    assert report.num_resent == 1
    assert report.num_output_tokens == 10
    assert report.times.first_token[0] == pytest.approx(0.1)
    assert report.times.latency[0] == pytest.approx(0.55 + 5 * 0.1)
    assert [each.crashed for each in report.replicas] == [True, False]


def test_a_client_keeps_its_tokens_when_a_request_came_in_the_step_that_is_lost() -> None:
    """c cuts a stretch of quiet steps at 0.95, and the replica dies at 0.97: a has nine tokens of 30."""
    asked = (("a", 30, 0.0), ("b", 1, 0.5), ("c", 2, 0.95))
    arrivals = [Request(name, [1], length, ignore_eos=True, arrival_time=time) for name, length, time in asked]
    report = run(
        arrivals,
        num_replicas=2,
        policy="round_robin",
        make_scheduler=make_scheduler,
        crashes=[Crash(0.97, "replica-0")],
    )
    assert report.num_resent == 2
    assert max(report.times.latency) == pytest.approx(0.97 + 21 * 0.1)


@pytest.mark.parametrize("seed", range(4))
def test_crashes_are_the_same_if_no_step_is_skipped(seed: int) -> None:
    """A scheduler that is watched is called at every step."""
    rng, arrivals = Random(seed), requests(100, seed)
    times = [rng.uniform(0, arrivals[-1].arrival_time) for _ in range(8)]
    crashes = [Crash(time, f"replica-{rng.randrange(3)}", seconds=0.5) for time in times]

    def plain() -> Scheduler:
        return create_scheduler("chunked", num_blocks=60, max_num_seqs=8, max_num_batched_tokens=64)

    def watched() -> Scheduler:
        return observe(plain(), Observer())

    skipped, called = (
        run(requests(100, seed), crashes=crashes, max_attempts=9, make_scheduler=make) for make in (plain, watched)
    )
    assert list(skipped.times.latency) == pytest.approx(list(called.times.latency))
    assert (skipped.num_resent, skipped.num_output_tokens) == (called.num_resent, called.num_output_tokens)


def test_what_has_ended_in_the_step_that_is_lost_has_not_ended() -> None:
    report = run([Request("a", [1], 1)], num_replicas=2, policy="round_robin", crashes=[Crash(0.05, "replica-0")])
    assert report.times.latency[0] == pytest.approx(0.15)


def test_a_request_is_not_sent_to_a_replica_on_which_it_has_failed() -> None:
    """The replica is back at once, and the least busy of the two: the rest is asked of the other."""
    crashes = [Crash(0.55, "replica-0", seconds=0.0)]
    arrivals = [Request(name, [1], 10, ignore_eos=True) for name in "ab"]
    report = run(arrivals, num_replicas=2, crashes=crashes)
    before, *after = report.replicas
    assert (before.replica_id, before.crashed, before.num_sent) == ("replica-0", True, 1)
    assert {each.replica_id: each.num_sent for each in after} == {"replica-0": 0, "replica-1": 2}


def test_a_request_that_kills_its_replicas_is_given_up() -> None:
    """Three replicas die over it; the other request has died with the first of them only."""
    crashes = [Crash(0.25 + number, f"replica-{number}") for number in range(3)]
    arrivals = [Request("a", [1], 100, ignore_eos=True), Request("b", [1], 4, ignore_eos=True, arrival_time=9.0)]
    report = run(arrivals, num_replicas=4, policy="round_robin", crashes=crashes)
    assert (report.num_requests, report.num_finished, report.num_given_up, report.num_resent) == (2, 1, 1, 2)
    assert report.num_output_tokens == 4


class _ForgetsTokens(FailoverStream):
    def begin(self, replica_id: str) -> Attempt:
        self.attempt = replace(super().begin(replica_id), prompt_token_ids=self.prompt_token_ids)
        return self.attempt


class _AsksForAllAgain(FailoverStream):
    def begin(self, replica_id: str) -> Attempt:
        self.attempt = replace(super().begin(replica_id), max_tokens=self.max_tokens)
        return self.attempt


class _AsksForTooFew(FailoverStream):
    def begin(self, replica_id: str) -> Attempt:
        attempt = super().begin(replica_id)
        self.attempt = replace(attempt, max_tokens=attempt.max_tokens - (attempt.num_received > 0))
        return self.attempt


class _CountsInTheStream(FailoverStream):
    def receive(self, attempt: Attempt, start: int, token_ids: Sequence[int]) -> list[int]:
        return super().receive(attempt, start, token_ids[attempt.num_received :])


@pytest.mark.parametrize("kind", [_ForgetsTokens, _AsksForAllAgain, _AsksForTooFew, _CountsInTheStream])
def test_a_learners_mistake_shows(kind: type[FailoverStream], monkeypatch: pytest.MonkeyPatch) -> None:
    """The fleet goes by `FailoverStream`, whose ever it is, and says if the client has not what it has asked for."""
    monkeypatch.setattr("minicache.simulator.fleet.job.FailoverStream", kind)
    arrivals = [Request("a", [1, 2, 3], 10, ignore_eos=True)]
    with pytest.raises(InvariantError, match="request 'a' went on wrongly after a crash"):
        run(arrivals, num_replicas=2, policy="round_robin", crashes=[Crash(0.55, "replica-0")])


@pytest.mark.parametrize("name", ["replica-0", "replica-7"])
def test_a_router_that_chooses_what_it_must_not_is_noticed(name: str) -> None:
    """A learner's: replica-0 is full with its second request, and there is no replica-7."""

    class Obstinate(Router):
        def choose(self, request: RoutedRequest, replicas: Sequence[ReplicaView]) -> str:
            return name

    simulation = FleetSimulation(
        Obstinate(), make_scheduler, COST, requests(3, 0, rate=1000.0), num_replicas=2, max_unfinished=1
    )
    with pytest.raises(InvariantError, match=f"the router has chosen '{name}'"):
        simulation.run()


def test_nobody_is_left() -> None:
    with pytest.raises(NoReplicaError, match="1 requests wait"):
        run([Request("a", [1], 9)], num_replicas=1, crashes=[Crash(0.2, "replica-0")])


def test_a_request_that_is_too_large_is_refused() -> None:
    report = run([Request("a", [1] * 1000, 9), Request("b", [1], 1, ignore_eos=True)])
    assert (report.num_refused, report.num_finished) == (1, 1)


class Wanted(Autoscaler):
    """As many replicas as a list says, by the time; and what it was shown."""

    def __init__(self, **wanted: int) -> None:
        super().__init__(target_unfinished=1)
        self.numbers = {int(time[1:]): number for time, number in wanted.items()}
        self.views: list[FleetView] = []

    def decide(self, view: FleetView, state: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        assert state.get("asked", 0) == len(self.views)
        self.views.append(view)
        return self.numbers[max(time for time in self.numbers if time <= view.now)], {"asked": len(self.views)}


def test_replicas_start_late_and_drain_before_they_leave() -> None:
    scaler, arrivals = Wanted(t0=1, t10=3, t40=1), requests(200, 5)
    report = run(arrivals, num_replicas=1, scaling=Scaling(scaler, interval=5, start_seconds=7), max_unfinished=100)
    assert report.num_finished == 200
    assert report.num_resent == 0
    by_time = {view.now: view for view in scaler.views}
    assert (by_time[10].num_ready, by_time[10].num_starting) == (1, 0)
    assert (by_time[15].num_ready, by_time[15].num_starting) == (1, 2)
    assert (by_time[20].num_ready, by_time[20].num_starting) == (3, 0)
    assert by_time[45].num_ready == 1
    assert report.replica_seconds == pytest.approx(sum(each.seconds for each in report.replicas))
    # One that was there all the time and two for some 30 s; or another of the three was the last one.
    assert report.makespan + 60 < report.replica_seconds < report.makespan + 70


def test_reports_are_as_old_as_their_interval() -> None:
    class Reader:
        def __init__(self) -> None:
            self.inner, self.told = create_router("round_robin"), list[float]()

        def choose(self, request: Any, replicas: Any) -> str:
            self.told += [view.stats["num_unfinished"] for view in replicas]
            return self.inner.choose(request, replicas)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    router = Reader()
    arrivals = [replace_arrival(each, 0.5) for each in requests(4, 6)]
    FleetSimulation(router, make_scheduler, COST, arrivals, num_replicas=1, report_interval=1.0).run()  # type: ignore[arg-type]
    assert router.told == [0.0] * 4


def replace_arrival(request: Request, time: float) -> Request:
    return Request(request.request_id, request.prompt_token_ids, request.max_tokens, arrival_time=time)


def test_a_request_that_outgrows_the_memory_has_not_finished() -> None:
    report = run([Request("a", [1] * 600, 100, ignore_eos=True), Request("b", [1], 1)], num_replicas=1)
    assert (report.num_requests, report.num_finished, report.num_outgrown) == (2, 1, 1)
    assert report.num_output_tokens == 1


# Prefill and decode apart


class Elsewhere(MovingCosts):
    """Every prompt is computed on a prefill replica, if one takes it."""

    def choose(self, num_prompt_tokens: int, here: Place, others: Any) -> str:
        return str((*others, here)[0].replica_id)


def costs(kind: type[MovingCosts] = Elsewhere, **options: Any) -> MovingCosts:
    """A millisecond for a token, to compute and to send it."""
    return kind(LLAMA_3_8B, 0.001, 131_072 * 1000, **options)


def apart(arrivals: list[Request], *, kind: type[MovingCosts] = Elsewhere, latency: float = 0.0, **options: Any) -> Any:
    """A run with prefill replicas. No auditor watches: it has not seen how moved blocks were filled."""
    disaggregation = Disaggregation(costs(kind, latency=latency), options.pop("num_prefill", 1))
    return run(arrivals, **{"make_scheduler": make_scheduler, "disaggregation": disaggregation} | options)


def test_a_prompt_is_computed_on_one_replica_and_its_answer_on_another() -> None:
    """The prompt's step ends at 0.1, the last of 32 layers comes 0.002 later, then the latency; 9 tokens are left."""
    arrivals = [Request("a", list(range(64)), 10, ignore_eos=True)]
    report = apart(arrivals, num_replicas=1, latency=0.05)
    assert report.times.first_token[0] == pytest.approx(0.1)
    assert report.times.latency[0] == pytest.approx(0.1 + 0.002 + 0.05 + 9 * 0.1)
    assert (report.num_finished, report.num_output_tokens, report.num_moved) == (1, 10, 1)
    decoding, prefilling = report.replicas
    assert (prefilling.replica_id, prefilling.num_sent, prefilling.busy_seconds) == ("prefill-0", 1, 0.1)
    assert (decoding.num_hit_tokens, decoding.num_queried_tokens) == (64, 65)  # all but the token that came along


def test_a_link_sends_one_prompt_at_a_time() -> None:
    """Both are computed in one step. The second is sent when the first is over: 64 tokens of 0.001 s later."""
    arrivals = [Request(name, [seed] * 32, 2, ignore_eos=True) for seed, name in enumerate("ab")]
    report = apart(arrivals, num_replicas=2, policy="round_robin")
    assert list(report.times.first_token) == pytest.approx([0.1, 0.1])
    assert list(report.times.latency) == pytest.approx([0.1 + 0.001 + 0.1, 0.1 + 0.001 + 0.032 + 0.1])


def test_an_answer_of_one_token_moves_nothing() -> None:
    report = apart([Request("a", [1], 1)])
    assert (report.num_finished, report.num_output_tokens, report.num_moved) == (1, 1, 0)


def test_what_costs_say_is_asked_with_what_the_replicas_have() -> None:
    asked: list[tuple[Place, ...]] = []

    class Asked(MovingCosts):
        def choose(self, num_prompt_tokens: int, here: Place, others: Any) -> str:
            asked.append((here, *others))
            return here.replica_id

    prompt = list(range(100))
    arrivals = [Request(name, prompt, 20, ignore_eos=True, arrival_time=time) for name, time in (("a", 0), ("b", 1.05))]
    apart(arrivals, num_replicas=1, kind=Asked)
    assert asked == [
        (Place("replica-0", 0.0, 0, 0), Place("prefill-0", 0.0, 0, 0)),
        (Place("replica-0", 0.0, 96, 1), Place("prefill-0", 0.0, 0, 0)),
    ]


def test_what_waits_for_a_link_is_told() -> None:
    """When the second comes, the first is yet to be computed: 32 ms of link. Both are computed at 0.1, and a layer of
    the first takes 1 ms more: the link is free at 0.133, and the third comes at 0.11."""
    told: list[float] = []

    class Asked(Elsewhere):
        def choose(self, num_prompt_tokens: int, here: Place, others: Any) -> str:
            told.extend(each.link_wait_seconds for each in others)
            return super().choose(num_prompt_tokens, here, others)

    prompts = [(0.0, 32), (0.0, 32), (0.11, 1)]
    arrivals = [
        Request(number, [number] * length, 2, ignore_eos=True, arrival_time=time)
        for number, (time, length) in enumerate(prompts)
    ]
    apart(arrivals, num_replicas=1, kind=Asked)
    assert told == pytest.approx([0.0, 0.032, 0.023])


def test_prompts_are_moved_into_prefix_caches_only() -> None:
    with pytest.raises(ValueError, match="schedulers need one"):
        apart([], make_scheduler=lambda: create_scheduler("chunked", num_blocks=40))


@pytest.mark.parametrize("seed", range(5))
def test_no_token_is_lost_when_replicas_of_both_kinds_die(seed: int) -> None:
    rng, arrivals = Random(seed), requests(150, seed)
    end = arrivals[-1].arrival_time
    names = ("replica-0", "replica-1", "replica-2", "prefill-0", "prefill-1")
    crashes = [Crash(rng.uniform(0, end), rng.choice(names), seconds=rng.choice((0.01, 1.0, 5.0))) for _ in range(40)]
    kept: list[Scheduler] = []

    def keep() -> Scheduler:
        kept.append(make_scheduler())
        return kept[-1]

    kind = rng.choice((Elsewhere, MovingCosts))
    report = apart(
        arrivals,
        kind=kind,
        latency=0.03,
        num_prefill=2,
        crashes=crashes,
        max_attempts=41,
        make_scheduler=keep,
        max_unfinished=8,
    )
    assert report.num_finished == 150
    assert report.num_output_tokens == sum(each.max_tokens for each in arrivals)
    assert report.num_resent > 0
    assert report.num_moved > 0
    for scheduler in kept:
        scheduler.check()
