"""What happens in an engine, as changes of counters, gauges and histograms.

`SchedulerStats` observes a scheduler. `minicache.serving.http.metrics` keeps the numbers and exports them to
Prometheus; if the engine is a separate process, a step's changes are sent with its tokens. Names are those of
`minicache.serving.http.metrics.METRICS`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from minicache.errors import RequestTooLargeError
from minicache.request import Request
from minicache.scheduler.base import Scheduler
from minicache.scheduler.observe import Observer
from minicache.scheduler.output import SchedulerOutput
from minicache.serving.replica.messages import CacheInfo, Update
from minicache.tiers.stack import TierStack

DEATH: Final[list[Update]] = [
    ("vllm:num_requests_running", 0, 1),
    ("vllm:num_requests_waiting", 0, 1),
    ("vllm:kv_cache_usage_perc", 0, 1),
    ("minicache:engine_deaths", 1, ""),
]
"""What has changed in the numbers of an engine that has died, besides its requests."""


@dataclass(slots=True)
class Life:
    """What is remembered of an unfinished request. Times are in seconds, on the clock of `SchedulerStats`.

    Attributes:
        arrival: when it arrived.
        num_prompt: tokens to count as prompt tokens when its first token comes: 0 for a fork, whose parent did that.
        admitted: when it was scheduled first; None before.
        first_token: when its first token came; None before.
        last_token: when its newest came.
        num_outputs: tokens of output that it had then.
        num_given: of these, the tokens that a fork has got from its parent.
    """

    arrival: float
    num_prompt: int
    admitted: float | None = None
    first_token: float | None = None
    last_token: float = 0.0
    num_outputs: int = 0
    num_given: int = 0


class SchedulerStats(Observer):
    """Notes what a scheduler does, and passes the changes on, once for each thing that it does.

    Of requests that were there before, it notes nothing. Every request that was added or forked ends once: as many
    observations of end-to-end latency as requests in `vllm:request_success`. A prompt counts once, however often a
    preemption has it computed again. A failed step (scheduled, never committed) yields no tokens and counts
    nothing, but the effects of its `schedule()` stay: preemptions, first admissions, requests finished for capacity.

    Args:
        scheduler: whose state is noted first; observed or not.
        pass_on: is called with the changes, in the thread that runs the scheduler.
        clock: seconds; the one that requests' arrival_time is from. A request whose arrival_time is 0 arrives when it
            is added.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        pass_on: Callable[[list[Update]], object],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._pass_on = pass_on
        self._prefix_caching = scheduler.prefix_caching
        self._num_blocks = scheduler.pool.num_blocks
        self._tiers: TierStack | None = getattr(scheduler, "tiers", None)
        self._lives: dict[Request, Life] = {}
        self._unadmitted: set[Request] = set()  # of these, the ones that no step has had yet
        self._updates: list[Update] = []
        self._state = (-1, -1, -1)  # running, waiting, blocks in use: as told last
        self._note_state(scheduler)

    def on_add(self, scheduler: Scheduler, request: Request) -> None:
        """A request has arrived."""
        self._lives[request] = Life(request.arrival_time or self._clock(), request.num_prompt_tokens)
        self._unadmitted.add(request)
        self._note_state(scheduler)

    def on_refuse(self, scheduler: Scheduler, request: Request, error: RequestTooLargeError) -> None:
        """A request can never be served."""
        self._updates.append(("minicache:requests_refused", 1, "too_large"))
        self._note_state(scheduler)

    def on_fork(self, scheduler: Scheduler, parent: Request, child: Request) -> None:
        """A fork has its parent's past: its arrival, its admission, and the tokens that it was given."""
        now = self._clock()
        past = self._lives.get(parent) or Life(child.arrival_time or now, 0, now, now, now)
        num_given = len(child.output_token_ids)
        life = Life(past.arrival, 0, past.admitted, num_outputs=num_given, num_given=num_given)
        if num_given:
            life.first_token, life.last_token = past.first_token, past.last_token
        self._lives[child] = life
        self._note_state(scheduler)

    def on_schedule(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """A step was ordered. What was preempted, admitted or ended is so even if its tokens never come."""
        now = self._clock()
        self._add("vllm:num_preemptions", len(output.preempted))
        if self._unadmitted:
            for request in output.scheduled:
                if request in self._unadmitted:
                    self._admit(request, now)
        if output.finished:  # seldom
            ended = set(output.finished)
            for request in [each for each in self._lives if each.request_id in ended]:
                self._end(request, now)
        self._note_state(scheduler)

    def on_update(self, scheduler: Scheduler, output: SchedulerOutput, ended: list[Request]) -> None:
        """A step was committed: requests with more tokens than before got one now."""
        now = self._clock()
        lives, num_generated, num_prompt = self._lives, 0, 0
        last_tokens: dict[float, int] = {}  # who had a token in one step has one time, so there are few of these
        for request in output.scheduled:  # this loop is what a token costs
            life = lives.get(request)
            if life is None:  # ended from outside since it was scheduled
                continue
            num_new = len(request.output_token_ids) - life.num_outputs
            if not num_new:  # still in its prompt
                continue
            num_generated += num_new
            life.num_outputs += num_new
            if life.first_token is None:
                life.first_token = now
                num_prompt += life.num_prompt
                self._observe("vllm:time_to_first_token_seconds", now - life.arrival)
            else:
                last_tokens[life.last_token] = last_tokens.get(life.last_token, 0) + 1
            life.last_token = now
        for last_token, times in last_tokens.items():
            self._observe("vllm:inter_token_latency_seconds", now - last_token, times)
        self._add("vllm:generation_tokens", num_generated)
        self._add("vllm:prompt_tokens", num_prompt)
        for request_id, drafts in output.draft_token_ids.items():
            num_accepted = output.num_scheduled_tokens[request_id] - 1
            self._add("vllm:spec_decode_num_drafts")
            self._add("vllm:spec_decode_num_draft_tokens", len(drafts))
            self._add("vllm:spec_decode_num_accepted_tokens", num_accepted)
            for position in range(num_accepted):
                self._add("vllm:spec_decode_num_accepted_tokens_per_pos", 1, str(position))
        if output.scheduled:
            self._observe("vllm:iteration_tokens_total", output.total_num_scheduled_tokens)
        for request in ended:
            self._end(request, now)
        self._note_state(scheduler)

    def on_recover(self, scheduler: Scheduler) -> None:
        """A step failed, and nothing runs. Its requests do not count as preempted: that would mean lack of memory."""
        self._note_state(scheduler)

    def on_finish(self, scheduler: Scheduler, request: Request) -> None:
        """A request was ended from outside."""
        self._end(request, self._clock())
        self._note_state(scheduler)

    def _admit(self, request: Request, now: float) -> None:
        """A request is scheduled for the first time."""
        self._unadmitted.remove(request)
        self._lives[request].admitted = now
        if self._prefix_caching:  # as vLLM, only now: that a victim finds its own blocks again is no merit of the cache
            self._add("vllm:prefix_cache_queries", request.num_prompt_tokens)
            self._add("vllm:prefix_cache_hits", request.num_cached_tokens)

    def _end(self, request: Request, now: float) -> None:
        """A request finished: record its times and lengths, and forget it. Unknown requests are skipped."""
        life = self._lives.pop(request, None)
        if life is None:
            return
        self._unadmitted.discard(request)
        self._add("vllm:request_success", 1, str(request.finish_reason))
        self._observe("vllm:e2e_request_latency_seconds", now - life.arrival)
        admitted = now if life.admitted is None else life.admitted
        self._observe("vllm:request_queue_time_seconds", admitted - life.arrival)
        if life.first_token is not None:
            decode = life.last_token - life.first_token
            self._observe("vllm:request_prefill_time_seconds", life.first_token - admitted)
            self._observe("vllm:request_decode_time_seconds", decode)
            if life.num_outputs > 1:
                self._observe("vllm:request_time_per_output_token_seconds", decode / (life.num_outputs - 1))
        self._observe("vllm:request_prompt_tokens", request.num_prompt_tokens)
        self._observe("vllm:request_generation_tokens", life.num_outputs - life.num_given)

    def _note_state(self, scheduler: Scheduler) -> None:
        """Note what is so now, as far as it has changed, and pass everything on."""
        state = (scheduler.num_running, scheduler.num_waiting, scheduler.pool.num_used)
        if state != self._state:
            self._state = num_running, num_waiting, num_used = state
            self._updates += (
                ("vllm:num_requests_running", num_running, 1),
                ("vllm:num_requests_waiting", num_waiting, 1),
                ("vllm:kv_cache_usage_perc", num_used / self._num_blocks, 1),
            )
        if self._tiers is not None:  # their threads count, whenever they are done
            self._updates += [(f"minicache:kv_tier_{what}", num, name) for what, num, name in self._tiers.take_counts()]
        if self._updates:
            self._pass_on(self._updates)
            self._updates = []

    def _add(self, name: str, amount: int = 1, label: str = "") -> None:
        if amount:
            self._updates.append((name, amount, label))

    def _observe(self, name: str, value: float, times: int = 1) -> None:
        self._updates.append((name, value, times))


def cache_info(scheduler: Scheduler, cache_dtype: str = "auto") -> CacheInfo:
    """A scheduler's cache, and what it holds."""
    pool, host_pool = scheduler.pool, scheduler.host_pool
    return CacheInfo(
        block_size=pool.block_size,
        num_blocks=pool.num_blocks,
        num_host_blocks=0 if host_pool is None else host_pool.num_blocks,
        prefix_caching=scheduler.prefix_caching,
        max_model_len=scheduler.max_model_len or pool.num_blocks * pool.block_size,
        cache_dtype=cache_dtype,
    )
