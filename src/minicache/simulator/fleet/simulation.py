"""The events of a simulated fleet, in the order of time. Given, not built. Pure standard library."""

from __future__ import annotations

import gc
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from enum import IntEnum
from heapq import heappop, heappush
from itertools import count
from typing import Any, ClassVar

from minicache.errors import InvariantError, NoReplicaError, require_count, require_positive
from minicache.fleet import FleetView, Membership, MovingCosts, RoutedRequest, Router, route_tokens
from minicache.fleet.views import ReplicaId
from minicache.memory.prefix import PrefixCacheStats
from minicache.request import Request, RequestId, RequestStatus
from minicache.scheduler.base import Scheduler
from minicache.scheduler.prefix_caching import PrefixCachingScheduler
from minicache.simulator.costs import StepCost
from minicache.simulator.fleet.job import Job, part_of
from minicache.simulator.fleet.options import Crash, Disaggregation, Scaling
from minicache.simulator.fleet.replica import Replica
from minicache.simulator.fleet.report import FleetReport, FleetSeries, ReplicaReport
from minicache.simulator.serving import Simulation
from minicache.simulator.workload import Arrival


class Kind(IntEnum):
    """What happens, in the order in which it happens at one moment: what has ended is known before what begins."""

    ENDED = 0
    PREFILLED = 1
    MOVED = 2
    CRASH = 3
    JOIN = 4
    SCALE = 5
    REPORT = 6
    ARRIVAL = 7
    STEP = 8


class FleetSimulation(Simulation):
    """One run of one workload on one fleet. Call `run()` once.

    A request is routed when it arrives; if all replicas are full, it waits for the first that is not, in the order of
    arrival. What a replica's step computes is known when the step ends, to clients and router alike. When a replica
    dies, what its clients have received stays theirs: the rest of each answer is asked elsewhere, as `FailoverStream`
    says, before any request that waits.

    Args:
        router: a new one.
        make_scheduler: makes a replica's scheduler.
        cost: how long a step takes.
        arrivals: in the order of their times, as for `ServingSimulation`; read one at a time.
        num_replicas: that take requests from the beginning, ≥ 1. They are named "replica-0", "replica-1", ….
        max_unfinished: how many unfinished requests a replica takes, ≥ 1.
        max_attempts: so many replicas at most are asked for an answer, one after the other, ≥ 1; as `FailoverStream`.
        crashes: replicas that die.
        scaling: the autoscaler, if there is one.
        disaggregation: prefill replicas in addition to the others, if there are any.
        report_interval: seconds between two reports of the replicas, > 0; None: they say nothing of themselves.

    Raises:
        TypeError: a number has the wrong type.
        ValueError: a number is out of its bounds; or prompts are to be moved between replicas without prefix caches.
    """

    def __init__(
        self,
        router: Router,
        make_scheduler: Callable[[], Scheduler],
        cost: StepCost,
        arrivals: Iterable[Arrival | Request],
        *,
        num_replicas: int,
        max_unfinished: int = 256,
        max_attempts: int = 3,
        crashes: Iterable[Crash] = (),
        scaling: Scaling | None = None,
        disaggregation: Disaggregation | None = None,
        report_interval: float | None = None,
    ) -> None:
        require_count("num_replicas", num_replicas)
        require_count("max_unfinished", max_unfinished)
        require_count("max_attempts", max_attempts)
        if report_interval is not None:
            require_positive("report_interval", report_interval)
        super().__init__(arrivals)
        self.router, self.membership = router, Membership()
        self._make_scheduler, self._cost = make_scheduler, cost
        self._max_unfinished, self._max_attempts = max_unfinished, max_attempts
        self._scaling, self._scaling_state = scaling, dict[str, Any]()
        self._disaggregation = disaggregation
        self._prefills = Membership()  # of the prefill replicas, with the prompts that they compute or send
        num_prefill = disaggregation.num_prefill if disaggregation else 0
        self._link_free_at = {f"prefill-{number}": 0.0 for number in range(num_prefill)}
        self._restarting: dict[ReplicaId, float] = {}  # prefill replicas → when they were asked for
        self._report_interval = report_interval
        self._replicas: dict[ReplicaId, Replica] = {}
        self._names = (f"replica-{number}" for number in count())
        self._jobs: dict[RequestId, Job] = {}
        self._waiting: deque[Job] = deque()
        self._starting: dict[ReplicaId, float] = {}  # → when it was asked for
        self._events: list[tuple[float, Kind, int, Any]] = []
        self._numbers = count()
        self._crashes_of: Counter[ReplicaId] = Counter()  # that are to come
        self._left: list[ReplicaReport] = []
        self._series = FleetSeries()
        self._num_requests = self._num_resent = self._num_moved = 0
        for _ in range(num_replicas):
            self._join(next(self._names), 0.0)
        for name in self._link_free_at:
            self._join_prefill(name, 0.0)
        for crash in crashes:
            self._at(crash.time, Kind.CRASH, crash)
            self._crashes_of[crash.replica_id] += 1
        if scaling is not None:
            self._at(0.0, Kind.SCALE, None)
        if report_interval is not None:
            self._at(0.0, Kind.REPORT, None)
        self._await_next()

    def run(self, progress: Callable[[int], object] | None = None) -> FleetReport:
        """Serve all requests.

        Args:
            progress: is called now and then, and at the end, with the number of requests that have finished or were
                refused.

        Raises:
            InvariantError: a scheduler schedules nothing although requests are unfinished; the router has chosen a
                replica that is full or not there; or an answer that went on after a crash has not the tokens that were
                asked for.
            NoReplicaError: requests wait, and no replica is there or to come.
            ValueError: an arrival is earlier than the one before.
        """
        is_collecting = gc.isenabled()
        gc.disable()  # nothing here refers to itself, and to look through a thousand pools again and again takes long
        try:
            self._run(progress)
        finally:
            if is_collecting:
                gc.enable()
        return self._report()

    def step(self) -> bool:
        """Let happen what happens next.

        Returns:
            False if all requests are done.

        Raises:
            InvariantError, NoReplicaError, ValueError: as `run`.
        """
        if self._next is None and not self._jobs:
            return False
        if not self._events:
            raise NoReplicaError(f"{len(self._waiting)} requests wait, and no replica is there or to come")
        self.now, kind, _, what = heappop(self._events)
        self._HANDLERS[kind](self, what)
        if self.now >= self._next_sample:
            num_ready, num_waiting = len(self.membership.views()), len(self._waiting)
            self._next_sample = self._series.add(self.now, num_ready, len(self._jobs) - num_waiting, num_waiting)
        return True

    # What happens

    def _on_arrival(self, request: Request) -> None:
        self._num_requests += 1
        job = self._jobs[request.request_id] = Job(request, request)
        self._waiting.append(job)
        self._await_next()
        self._dispatch()

    def _on_step(self, replica: Replica) -> None:
        if replica.is_gone or replica.is_idle or replica.next_at != self.now:
            return  # another event was made for it since
        if (end := replica.begin_stretch()) is not None:
            self._step_at(end, replica)
            return
        ended = replica.run_step(note=self._crashes_of[replica.replica_id] > 0)
        is_prefill = replica.replica_id in self._link_free_at
        for request, first_token in ended:
            job = self._jobs[request.request_id]
            if is_prefill:
                self._at(replica.now, Kind.PREFILLED, (job, job.prefill, request.num_cached_tokens))
            else:
                self._at(replica.now, Kind.ENDED, (job, job.number, first_token))
        if not replica.is_idle:
            self._step_at(replica.continues_at, replica)

    def _step_at(self, time: float, replica: Replica) -> None:
        """The replica's next step begins then, unless this is called again before."""
        replica.next_at = time
        self._at(time, Kind.STEP, replica)

    def _on_ended(self, what: tuple[Job, int, float]) -> None:
        job, number, first_token = what
        if job.number != number:  # its replica died before the step was over
            return
        self._end_attempt(job)
        if job.first_token is None:
            job.first_token = first_token
        if job.request.status is RequestStatus.FINISHED_CAPACITY:
            self._num_outgrown += 1
            del self._jobs[job.asked.request_id]
        else:
            self._complete(job, len(job.request.output_token_ids))
        self._dispatch()

    def _complete(self, job: Job, num_output: int) -> None:
        """The replica has generated all of the job's request, `num_output` tokens."""
        assert job.first_token is not None
        num_output = job.finish(num_output)
        self._num_prompt_tokens += job.asked.num_prompt_tokens
        self._num_output_tokens += num_output
        self._finished(job.asked, job.first_token, num_output)
        del self._jobs[job.asked.request_id]

    def _on_prefilled(self, what: tuple[Job, int, int]) -> None:
        """A prompt is computed, with the first token; its keys and values are on their way."""
        job, number, num_cached = what
        if job.prefill != number:  # one of its replicas died before
            return
        if job.first_token is None:
            job.first_token = self.now
        if job.request.max_tokens == 1 or (0 in job.asked.stop_token_ids and not job.asked.ignore_eos):
            self._end_prefill(job)
            self._end_attempt(job)
            self._complete(job, 1)
            self._dispatch()
            return
        assert self._disaggregation is not None
        costs, source = self._disaggregation.costs, self._prefills.replica_of[number]
        num_computed = job.request.num_prompt_tokens - num_cached
        left = costs.remote_seconds(num_computed, job.num_to_move) - costs.prefill_seconds(num_computed)
        sending = costs.link_seconds(job.num_to_move)
        link_free_at = max(self.now + left - costs.latency, self._link_free_at[source] + sending)
        self._link_free_at[source] = link_free_at
        job.num_to_move = 0
        job.has_prefilled()
        self._at(link_free_at + costs.latency, Kind.MOVED, (job, number))

    def _on_moved(self, what: tuple[Job, int]) -> None:
        job, number = what
        if job.prefill != number:
            return
        assert job.routed is not None
        self._num_moved += 1
        self._end_prefill(job)
        replica = self._replicas[self.membership.replica_of[job.number]]
        replica.receive(job.routed.block_hashes)
        self._begin(job, replica)

    def _on_crash(self, crash: Crash) -> None:
        self._crashes_of[crash.replica_id] -= 1
        replica = self._replicas.get(crash.replica_id)
        if replica is None:
            return
        replica.stop(self.now)
        if crash.replica_id in self._link_free_at:
            lost = [self._jobs[name] for name in self._prefills.leave(crash.replica_id)]
            starting = self._restarting
        else:
            lost = [self._jobs[name] for name in self.membership.leave(crash.replica_id)]
            starting = self._starting
        self._remove(replica, crashed=True)
        for job in reversed(lost):
            if self._lose(job, replica):
                self._waiting.appendleft(job)
        if crash.seconds is not None:
            starting[crash.replica_id] = self.now
            self._at(self.now + crash.seconds, Kind.JOIN, crash.replica_id)
        self._dispatch()

    def _on_join(self, replica_id: ReplicaId) -> None:
        if replica_id in self._starting:  # or it was not wanted any more
            self._join(replica_id, self._starting.pop(replica_id))
            self._dispatch()
        elif replica_id in self._restarting:
            self._join_prefill(replica_id, self._restarting.pop(replica_id))

    def _on_scale(self, what: None) -> None:
        scaling = self._scaling
        assert scaling is not None
        num_ready, num_waiting = len(self.membership.views()), len(self._waiting)
        num_unfinished = len(self._jobs) - num_waiting
        view = FleetView(self.now, num_ready, len(self._starting), num_unfinished, num_waiting)
        wanted, state = scaling.scaler.decide(view, self._scaling_state)
        self._scaling_state = dict(state)
        for _ in range(wanted - num_ready - len(self._starting)):
            name = next(self._names)
            self._starting[name] = self.now
            self._at(self.now + scaling.start_seconds, Kind.JOIN, name)
        too_many = max(0, num_ready + len(self._starting) - wanted)
        while too_many and self._starting:  # it costs nothing to give up one that has not begun
            self._left.append(self._not_joined(*self._starting.popitem()))
            too_many -= 1
        for name in scaling.scaler.leaving(self.membership.views(), too_many):
            self._drain(name)
        self._at(self.now + scaling.interval, Kind.SCALE, None)

    def _on_report(self, what: None) -> None:
        assert self._report_interval is not None
        for name in self.membership.members:
            scheduler = self._replicas[name].scheduler
            used = scheduler.pool.num_used / scheduler.pool.num_blocks
            stats = {
                "num_unfinished": float(len(self.membership.members[name].attempts)),
                "num_running": float(scheduler.num_running),
                "num_waiting": float(scheduler.num_waiting),
                "memory": used,
            }
            self.membership.on_report(self.membership.on_probed(name), stats)
        self._at(self.now + self._report_interval, Kind.REPORT, None)

    _HANDLERS: ClassVar[dict[Kind, Callable[[FleetSimulation, Any], None]]] = {
        Kind.ENDED: _on_ended,
        Kind.PREFILLED: _on_prefilled,
        Kind.MOVED: _on_moved,
        Kind.CRASH: _on_crash,
        Kind.JOIN: _on_join,
        Kind.SCALE: _on_scale,
        Kind.REPORT: _on_report,
        Kind.ARRIVAL: _on_arrival,
        Kind.STEP: _on_step,
    }

    # What is done about it

    def _at(self, time: float, kind: Kind, what: object) -> None:
        heappush(self._events, (time, kind, next(self._numbers), what))

    def _await_next(self) -> None:
        self._next = next(self._coming, None)
        if self._next is not None:
            self._at(self._next.arrival_time, Kind.ARRIVAL, self._next)

    def _dispatch(self) -> None:
        """Send those that wait, in their order, until all replicas are full."""
        while self._waiting:
            job = self._waiting[0]
            if job.routed is None:
                asked, block_size = job.asked, self._block_size
                job.routed = route_tokens(
                    asked.request_id, job.prompt_token_ids, block_size=block_size, cache_salt=asked.cache_salt
                )
                if asked.adapter is None:  # then they are the same as the scheduler's, which need not hash them again
                    job.request.block_hashes = list(job.routed.block_hashes)
            try:
                name = self.router.choose(job.routed, job.candidates(self.membership.views()))
            except NoReplicaError:
                return
            member = self.membership.members.get(name)
            if member is None or not member.takes_requests or member.num_unfinished >= member.max_unfinished:
                raise InvariantError(f"the router has chosen {name!r}, which is full or takes no requests")
            self._waiting.popleft()
            job.begin(name)
            here = self._replicas[name]
            job.number = self.membership.on_sent(job.routed.request_id, name)
            self.router.on_sent(job.routed, name)
            if not self._prefill_elsewhere(job, job.routed, here):
                self._begin(job, here)

    def _begin(self, job: Job, replica: Replica) -> None:
        """The replica gets the job's request."""
        if not self._hand_over(job.request, replica):
            self._num_refused += 1
            del self._jobs[job.asked.request_id]
            self._end_attempt(job)

    def _hand_over(self, request: Request, replica: Replica) -> bool:
        """The replica gets a request. False: it is too large."""
        waits = replica.is_idle or replica.is_in_stretch or replica.is_waiting
        is_taken = replica.send(request, self.now)
        if waits and not replica.is_idle:
            self._step_at(replica.now, replica)
        return is_taken

    def _prefill_elsewhere(self, job: Job, routed: RoutedRequest, here: Replica) -> bool:
        """Send the prompt to a prefill replica, if that pays. Whether it did."""
        if self._disaggregation is None:
            return False
        costs, hashes = self._disaggregation.costs, routed.block_hashes
        place = here.place(hashes, costs.seconds_per_token)
        others = []
        for view in self._prefills.views():
            if not view.is_full:
                other = self._replicas[view.replica_id].place(hashes, costs.seconds_per_token)
                others.append(replace(other, link_wait_seconds=self._link_wait(view.replica_id, costs)))
        chosen = costs.choose(routed.num_prompt_tokens, place, others)
        if chosen == here.replica_id:
            return False
        request = job.request
        if not self._hand_over(part_of(request, request.prompt_token_ids, 1), self._replicas[chosen]):
            return False
        job.prefill = self._prefills.on_sent(request.request_id, chosen)
        job.num_to_move = request.num_prompt_tokens - min(place.num_cached_tokens, request.num_prompt_tokens - 1)
        return True

    def _link_wait(self, name: ReplicaId, costs: MovingCosts) -> float:
        """Seconds until a prefill replica's link is free: of what it sends, and of the prompts yet to be computed."""
        num_to_move = sum(self._jobs[each].num_to_move for each in self._prefills.members[name].attempts.values())
        return max(0.0, self._link_free_at[name] - self.now) + costs.link_seconds(num_to_move)

    def _end_attempt(self, job: Job) -> None:
        """The job's attempt is over."""
        name = self.membership.replica_of[job.number]
        self.membership.on_finished(job.number)
        self.router.on_finished(job.asked.request_id, name)
        job.number = 0
        if self.membership.is_drained(name):
            self.membership.leave(name)
            self._remove(self._replicas[name])

    def _end_prefill(self, job: Job) -> None:
        """The prefill replica has nothing to do with the job any more."""
        self._prefills.on_finished(job.prefill)
        job.prefill = 0

    def _lose(self, job: Job, replica: Replica) -> bool:
        """One of the job's replicas has died. Whether what is left of the request is to be asked of another."""
        name, num_tokens = job.asked.request_id, 0
        if replica.replica_id in self._link_free_at:
            job.prefill = 0
            chosen = self.membership.replica_of[job.number]
            self._end_attempt(job)
        else:
            chosen = replica.replica_id
            self.router.on_finished(name, chosen)
            if job.prefill:
                self._replicas[self._prefills.replica_of[job.prefill]].abort(name)
                self._end_prefill(job)
            else:
                num_tokens = replica.had.get(name, 0)
                if num_tokens and job.first_token is None:
                    job.first_token = replica.first_token_at(name)
        if job.fail(chosen, num_tokens, self._max_attempts):
            self._num_resent += 1
            return True
        self._num_given_up += 1
        del self._jobs[name]
        return False

    def _join(self, name: ReplicaId, asked: float) -> None:
        replica = self._replicas[name] = Replica(name, self._make_scheduler(), self._cost, asked)
        self._block_size = replica.scheduler.pool.block_size
        self.membership.join(name, max_unfinished=self._max_unfinished)
        if self._disaggregation is not None:
            replica.require_cache()

    def _join_prefill(self, name: ReplicaId, asked: float) -> None:
        self._replicas[name] = Replica(name, self._make_scheduler(), self._cost, asked)
        self._prefills.join(name, max_unfinished=self._max_unfinished)

    def _drain(self, name: ReplicaId) -> None:
        self.membership.drain(name)
        if self.membership.is_drained(name):
            self.membership.leave(name)
            self._remove(self._replicas[name])

    def _remove(self, replica: Replica, *, crashed: bool = False) -> None:
        """The replica is gone."""
        del self._replicas[replica.replica_id]
        replica.is_gone = True
        if replica.replica_id not in self._link_free_at:
            self.router.on_left(replica.replica_id)
        self._left.append(self._told(replica, crashed=crashed))

    def _told(self, replica: Replica, *, crashed: bool = False) -> ReplicaReport:
        scheduler = replica.scheduler
        stats = scheduler.stats if isinstance(scheduler, PrefixCachingScheduler) else PrefixCacheStats()
        seconds, name = self.now - replica.started, replica.replica_id
        queried, hit = stats.num_queried_tokens, stats.num_hit_tokens
        computed, loaded = replica.num_computed_tokens, replica.tier_hit_tokens()
        busy = replica.busy_seconds
        return ReplicaReport(name, replica.num_sent, seconds, busy, queried, hit, computed, loaded, crashed)

    def _not_joined(self, name: ReplicaId, asked: float) -> ReplicaReport:
        return ReplicaReport(name, 0, self.now - asked, 0.0, 0, 0, 0, {}, crashed=False)

    def _report(self) -> FleetReport:
        replicas = self._left + [self._told(replica) for replica in self._replicas.values()]
        starting = self._starting | self._restarting
        replicas += [self._not_joined(name, asked) for name, asked in starting.items()]
        queried = sum(each.num_queried_tokens for each in replicas)
        loaded = Counter[str]()
        for each in replicas:
            loaded.update(each.tier_hit_tokens)
        return FleetReport(
            num_requests=self._num_requests,
            num_given_up=self._num_given_up,
            num_resent=self._num_resent,
            num_moved=self._num_moved,
            hit_rate=sum(each.num_hit_tokens for each in replicas) / queried if queried else 0.0,
            num_computed_tokens=sum(each.num_computed_tokens for each in replicas),
            tier_hit_tokens=dict(loaded),
            replica_seconds=sum(each.seconds for each in replicas),
            replicas=replicas,
            series=self._series,
            **self._account_of_requests(),
        )
