"""A server in simulated time: the scheduler is real, the model is a formula that moves the clock.

The same scheduler objects that the engine uses schedule the same steps. What would have been computed only takes its
time (`minicache.simulator.costs`), and every token is a 0. So an hour of a server on a GPU that one does not have takes
seconds. Given, not built; used from phase 6 on. Pure standard library.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, cast

from minicache.errors import InvariantError, RequestTooLargeError
from minicache.request import Request, RequestId
from minicache.scheduler.base import Scheduler
from minicache.scheduler.observe import Observer, Recorder, observe
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.tiered import TieredScheduler
from minicache.simulator.costs import StepCost, StepLoad
from minicache.simulator.report import RequestTimes, Series, ServingReport, Summary
from minicache.simulator.stretch import blocks_taken, most_quiet_steps, num_cached_tokens, settle
from minicache.simulator.tiers import SimulatedTiers
from minicache.simulator.workload import Arrival
from minicache.trace import TraceStep

TELL_EVERY: Final = 256
"""Requests that finish between two calls of `progress`."""

FEWEST_QUIET_STEPS: Final = 4
"""To find out how long a stretch is takes as long as scheduling two or three steps."""


class Simulation(ABC):
    """What a simulated server and a simulated fleet have in common: a clock, and an account of the requests.

    Args:
        arrivals: in the order of their times; read one at a time.

    Attributes:
        now: the clock, in seconds.
    """

    def __init__(self, arrivals: Iterable[Arrival | Request]) -> None:
        self.now = 0.0
        self._coming = in_order(arrivals)
        self._times = RequestTimes()
        self._next_sample = 0.0
        self._num_refused = self._num_outgrown = self._num_given_up = 0
        self._num_prompt_tokens = self._num_output_tokens = 0

    @property
    def num_done(self) -> int:
        """Requests that have finished, for any reason, or were refused."""
        return len(self._times) + self._num_refused + self._num_outgrown + self._num_given_up

    @abstractmethod
    def step(self) -> bool:
        """Let happen what happens next. False if there is nothing left to do."""

    def _run(self, progress: Callable[[int], object] | None) -> None:
        """Step until the end; `progress` is called now and then, and at the end, with `num_done`."""
        num_told = 0
        while self.step():
            if progress is not None and self.num_done >= num_told + TELL_EVERY:
                num_told = self.num_done
                progress(num_told)
        if progress is not None:
            progress(self.num_done)

    def _finished(self, request: Request, first_token: float, num_output: int) -> None:
        """A request has all of its tokens now."""
        arrival = request.arrival_time
        self._times.add(arrival, first_token - arrival, self.now - arrival, num_output)

    def _account_of_requests(self) -> dict[str, Any]:
        """The fields of a `Report`, but for the number of requests."""
        times = self._times
        return {
            "num_finished": len(times),
            "num_refused": self._num_refused,
            "num_outgrown": self._num_outgrown,
            "num_prompt_tokens": self._num_prompt_tokens,
            "num_output_tokens": self._num_output_tokens,
            "makespan": self.now,
            "ttft": Summary.of(times.first_token),
            "tpot": Summary.of(times.per_output_token()),
            "latency": Summary.of(times.latency),
            "times": times,
        }


class ServingSimulation(Simulation):
    """One run of one workload on one scheduler. Call `run()` once; or `step()` until it is False, then `report()`.

    A step begins as soon as the one before is over and there is anything to do; every request that has arrived by then
    is in the waiting queue. It takes the seconds of `cost`, and what it swaps, loads or stores is copied before the
    model runs. While there is no request, or all wait for their load, the clock jumps to what comes next. A request
    is made when it arrives and dropped when it has finished, so memory depends on how many are in the server at once,
    and very little on how many there are.

    Args:
        scheduler: a new one, of any stage. If it has tiers, they are `minicache.simulator.tiers.SimulatedTiers`.
        cost: how long a step takes.
        arrivals: in the order of their times; read one at a time. An `Arrival` becomes a request that generates exactly
            `num_output_tokens`, its `max_tokens`. A `Request` is taken as it is, its `arrival_time` included.
        observers: watch the scheduler, as `minicache.scheduler.observe.observe` does.
        trace: is called with a `TraceStep` after each step, in simulated time.
        skip_quiet: do not call a reference scheduler at steps in which it has nothing to decide
            (`minicache.simulator.stretch`). The report is the same, and several times as quick for small batches. A
            scheduler that is watched or traced, or is not a reference one, is called at every step anyway.

    Attributes:
        scheduler: as given, observed.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cost: StepCost,
        arrivals: Iterable[Arrival | Request],
        *,
        observers: Iterable[Observer] = (),
        trace: Callable[[TraceStep], object] | None = None,
        skip_quiet: bool = False,
    ) -> None:
        recorders = () if trace is None else (Recorder(trace, clock=lambda: self.now),)
        super().__init__(arrivals)
        self.scheduler = observe(scheduler, *observers, *recorders)
        self._cost = cost
        self._next = next(self._coming, None)
        self._unfinished: dict[RequestId, Request] = {}
        self._first_token: dict[RequestId, float] = {}  # when it was generated, of unfinished requests
        self._in_prefill = False  # a request of the batch is still without a first token
        self._tiers: SimulatedTiers | None = getattr(scheduler, "tiers", None)
        self._resumes_at = 0.0  # when a load ends for which all requests wait
        self._skip_quiet = skip_quiet
        self._look_again = 0  # the number of steps before which there is no stretch worth skipping
        self._is_quiet = False  # the next step may be quiet: no request can be admitted in it
        self._num_cached = -1  # what the batch has in the cache; below 0: not known, it has to be counted
        self._series = Series()
        self._refusal: str | None = None
        self._num_computed = self._num_computed_once = 0
        self._num_preemptions = self._num_swapped_blocks = 0
        self._num_steps = self._max_batch = self._max_blocks = 0
        self._busy = self._batch_seconds = self._block_seconds = 0.0

    def run(self, progress: Callable[[int], object] | None = None) -> ServingReport:
        """Serve all requests.

        Args:
            progress: is called now and then, and at the end, with the number of requests that have finished or were
                refused.

        Raises:
            InvariantError: the scheduler schedules nothing although requests are unfinished.
            ValueError: an arrival is earlier than the one before.
        """
        self._run(progress)
        return self.report()

    @property
    def busy_seconds(self) -> float:
        """During which a step ran."""
        return self._busy

    def step(self) -> bool:
        """Queue what has arrived, and serve one step; or a stretch of quiet ones, if they are skipped.

        Returns:
            False if there is nothing left to do.

        Raises:
            InvariantError, ValueError: as `run`.
        """
        arrives_at = float("inf") if self._next is None else self._next.arrival_time
        if self._unfinished:
            self.now = max(self.now, min(arrives_at, self._resumes_at))
        elif self._next is not None:
            self.now = max(self.now, arrives_at)
        if self._receive():
            self._is_quiet = False
        if not self._unfinished:
            return self._next is not None
        if not (self._is_quiet and self._num_steps >= self._look_again and self._skip()):
            self._serve()
        return True

    def _serve(self) -> None:
        """Serve one step of what is queued."""
        scheduler, tiers = self.scheduler, self._tiers
        if tiers is not None:
            tiers.now = self.now
        num_waiting = scheduler.num_waiting
        output = scheduler.schedule()
        self._resumes_at = 0.0
        if output.scheduled or output.finished:
            pass
        elif tiers is not None and (next_end := tiers.next_end()) is not None:
            self._resumes_at = next_end
        else:
            raise InvariantError(
                f"nothing was scheduled at {self.now:.3f} s, with {scheduler.num_running} requests in the batch and "
                f"{scheduler.num_waiting} waiting: they would never finish"
            )
        changed = output.preempted or output.finished or self._in_prefill or scheduler.num_waiting != num_waiting
        if changed:
            self._num_cached = -1
        newcomers: list[Request] = []
        seconds = self._swap_seconds(output) if output.preempted or output.swapped_in else 0.0
        if tiers is not None:
            seconds += self._tier_seconds(output, tiers)
        if output.scheduled:
            seconds += self._cost.step_seconds(self._load(output, newcomers))
        self._account(seconds, len(output.scheduled), scheduler.pool.num_used)
        for request in newcomers:
            self._first_token[request.request_id] = self.now
        finished = scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 0))
        for request in finished:
            self._num_cached -= request.num_computed_tokens
            self._finish(request)
        if self._skip_quiet and not self._in_prefill:
            as_before = not changed and not finished  # what was not admitted in this step will not be in the next
            nothing_to_admit = not scheduler.num_waiting or scheduler.num_running >= scheduler.max_num_seqs
            self._is_quiet = as_before or nothing_to_admit
        else:
            self._is_quiet = False
        for request_id in output.finished:
            self._finish(self._unfinished[request_id], outgrown=True)
        if tiers is not None and not scheduler.has_unfinished:
            tiers.now = self.now
            tiers.store([each for _, each in cast(TieredScheduler, scheduler).take_filled()])

    def report(self) -> ServingReport:
        """The results so far."""
        num_blocks, busy = self.scheduler.pool.num_blocks, self._busy or 1.0
        return ServingReport(
            num_requests=self.num_done + len(self._unfinished),
            refusal=self._refusal,
            num_computed_tokens=self._num_computed,
            tier_hit_tokens=self.tier_hit_tokens(),
            num_recomputed_tokens=self._num_computed - self._num_computed_once,
            num_preemptions=self._num_preemptions,
            num_swapped_blocks=self._num_swapped_blocks,
            num_steps=self._num_steps,
            busy_seconds=self._busy,
            normalized_latency=Summary.of(self._times.normalized()),
            mean_batch_size=self._batch_seconds / busy,
            max_batch_size=self._max_batch,
            mean_memory=self._block_seconds / busy / num_blocks,
            max_memory=self._max_blocks / num_blocks,
            series=self._series,
            **self._account_of_requests(),
        )

    def tier_hit_tokens(self) -> dict[str, int]:
        """Tokens that were loaded from each kind of tier so far, by its name; {} without tiers."""
        tiers, block_size = self._tiers, self.scheduler.pool.block_size
        if tiers is None:
            return {}
        return {each.name: tiers.num_hits[each.name] * block_size for each in tiers.tiers}

    def _skip(self) -> bool:
        """Serve the quiet steps to come, until a request arrives; whether there were enough to be worth it."""
        num_sequences, num_blocks = len(self.scheduler.running), self.scheduler.pool.num_used
        self._num_cached = num_cached_tokens(self.scheduler)
        load = StepLoad(num_sequences, num_sequences, self._num_cached, self._num_cached + num_sequences, 0)
        soon = self.now + FEWEST_QUIET_STEPS * self._cost.step_seconds(load)
        if self._next is not None and self._next.arrival_time < soon:
            return False
        most = most_quiet_steps(self.scheduler)
        if most < FEWEST_QUIET_STEPS:
            self._look_again = self._num_steps + most  # a request finishes or runs short then
            return False
        num_steps = 0
        for num_taken in blocks_taken(self.scheduler, most):
            num_blocks += num_taken
            load = StepLoad(num_sequences, num_sequences, self._num_cached, self._num_cached + num_sequences, 0)
            self._account(self._cost.step_seconds(load), num_sequences, num_blocks)
            self._num_cached += num_sequences
            num_steps += 1
            if self._next is not None and self._next.arrival_time <= self.now:
                break
        self._num_computed += num_steps * num_sequences
        settle(self.scheduler, num_steps)
        return True

    def _receive(self) -> bool:
        """Every request that has arrived by now is queued, or refused; whether there was any."""
        before = self._next
        while self._next is not None and self._next.arrival_time <= self.now:
            self._add(self._next)
            self._next = next(self._coming, None)
        return self._next is not before

    def _add(self, request: Request) -> bool:
        """Queue a request; False if it is refused, as too large."""
        if self._tiers is not None:
            self._tiers.now = self.now  # its load begins
        try:
            self.scheduler.add_request(request)
        except RequestTooLargeError as error:
            self._num_refused += 1
            self._refusal = self._refusal or str(error)
            return False
        self._unfinished[request.request_id] = request
        return True

    def _load(self, output: SchedulerOutput, newcomers: list[Request]) -> StepLoad:
        """What is in the step's batch. Requests that generate their first token are added to `newcomers`.

        Nearly every step consists of decodes, by the batch of the step before less the finished requests: what it reads
        is known without a look at its requests one by one.
        """
        num_sequences, num_new = len(output.scheduled), output.total_num_scheduled_tokens
        if self._num_cached < 0 or num_new != num_sequences or num_sequences != self.scheduler.num_running:
            load = self._look_closely(output, newcomers)
        else:
            load = StepLoad(num_sequences, num_new, self._num_cached, self._num_cached + num_sequences, 0)
        is_all = num_sequences == self.scheduler.num_running  # a long prompt may have left no budget for the others
        self._num_cached = load.num_cached_tokens + num_new if is_all else -1
        self._num_computed += num_new
        return load

    def _look_closely(self, output: SchedulerOutput, newcomers: list[Request]) -> StepLoad:
        """As `_load`, request by request."""
        pairs = []
        self._in_prefill = False
        for request, new in zip(output.scheduled, output.num_scheduled_tokens.values(), strict=True):
            computed = request.num_computed_tokens
            pairs.append((new, computed))
            if not request.output_token_ids:
                if computed + new == request.num_prompt_tokens:
                    newcomers.append(request)
                else:
                    self._in_prefill = True
        return StepLoad.of(pairs)

    def _swap_seconds(self, output: SchedulerOutput) -> float:
        self._num_preemptions += len(output.preempted)
        num_blocks = sum(map(len, output.swapped_out.values())) + sum(map(len, output.swapped_in.values()))
        self._num_swapped_blocks += num_blocks
        return self._cost.swap_seconds(num_blocks * self.scheduler.pool.block_size) if num_blocks else 0.0

    def _tier_seconds(self, output: SchedulerOutput, tiers: SimulatedTiers) -> float:
        """Store what is to be stored. How long it takes to copy that to the host, and what was loaded from there."""
        tiers.store([each for _, each in output.blocks_to_store])
        num_blocks = len(output.blocks_to_store) + len(output.blocks_to_load)
        return self._cost.swap_seconds(num_blocks * self.scheduler.pool.block_size) if num_blocks else 0.0

    def _account(self, seconds: float, batch_size: int, num_blocks: int) -> None:
        """Let the step's time pass, and note what the server looked like meanwhile."""
        self.now += seconds
        self._num_steps += batch_size > 0
        self._busy += seconds
        self._batch_seconds += seconds * batch_size
        self._block_seconds += seconds * num_blocks
        if batch_size > self._max_batch:
            self._max_batch = batch_size
        if num_blocks > self._max_blocks:
            self._max_blocks = num_blocks
        if self.now >= self._next_sample:
            memory = num_blocks / self.scheduler.pool.num_blocks
            self._next_sample = self._series.add(self.now, batch_size, self.scheduler.num_waiting, memory)

    def _finish(self, request: Request, *, outgrown: bool = False) -> None:
        """A request has left the server with this step."""
        del self._unfinished[request.request_id]
        first_token = self._first_token.pop(request.request_id)
        num_output = len(request.output_token_ids)
        self._num_prompt_tokens += request.num_prompt_tokens
        self._num_output_tokens += num_output
        # Its newest token was never computed, nor what it found in a cache.
        self._num_computed_once += request.num_tokens - 1 - request.num_cached_tokens
        if outgrown:
            self._num_outgrown += 1
        else:
            self._finished(request, first_token, num_output)


def in_order(arrivals: Iterable[Arrival | Request]) -> Iterator[Request]:
    """The requests of the arrivals, one at a time.

    Raises:
        ValueError: one is earlier than the one before.
    """
    last = float("-inf")
    for arrival in arrivals:
        request = arrival
        if isinstance(request, Arrival):
            prompt, num_output = [0] * request.num_prompt_tokens, request.num_output_tokens
            request = Request(request.request_id, prompt, num_output, ignore_eos=True, arrival_time=request.time)
        if request.arrival_time < last:
            raise ValueError(f"{request!r} arrives at {request.arrival_time}, after one that came at {last}")
        last = request.arrival_time
        yield request
