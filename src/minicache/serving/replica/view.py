"""What the engine is doing right now: pictures of it while it runs, for the live page (`minicache.serving.http.live`).

`LiveView` is an observer of the scheduler, and lives where the engine does. Pure standard library.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice
from statistics import median
from time import perf_counter
from typing import Any, Final

from minicache.memory.prefix import CachingBlockPool
from minicache.request import Request, RequestId
from minicache.scheduler import Scheduler, SchedulerOutput
from minicache.scheduler.observe import ObservedScheduler, Observer

NUM_STEPS: Final = 60
"""Steps that a picture shows."""
NUM_LATENCIES: Final = 100
"""Requests whose latencies make the medians."""
MAX_WAITING: Final = 100
"""Waiting requests that a picture lists; of the rest it has the number."""
PICTURE_SECONDS: Final = 0.1
"""No picture is younger than this when the next is made."""
MAX_SHARE: Final = 0.05
"""Of the engine's time, pictures take at most this part: after one that was long to make, the next is later."""
INTEREST_SECONDS: Final = 1.0
"""So long after a picture was asked for, new ones are made."""


@dataclass(slots=True)
class Life:
    """What the view knows of an unfinished request, besides the request.

    Attributes:
        number: 1, 2, 3, … in the order of arrival: what the page calls it, and colours it by.
        added: when the scheduler got it, in seconds of `perf_counter`.
        first: when its first token came; None before.
        is_timed: whether its times are known: not if it came before the view did.
    """

    number: int
    added: float
    first: float | None = None
    is_timed: bool = True


@dataclass(slots=True)
class Step:
    """One step of the engine.

    Attributes:
        number: from 0.
        begun: when it had been scheduled, in seconds of `perf_counter`.
        num_prefill: tokens of prompts that it computed, and those computed again after a preemption.
        num_decode: newest tokens that it computed, one a request, and draft tokens.
        preempted: who lost their place in it.
        output: what was scheduled; None when the step is over.
        prefilling: the requests whose tokens are counted in num_prefill, and how many tokens of output each had;
            emptied when the step is over.
        num_dropped: of num_decode, those whose requests had finished with the step before.
        ended: when its tokens had been recorded.
        num_tokens: tokens that came of it.
    """

    number: int
    begun: float
    num_prefill: int
    num_decode: int
    preempted: list[int]
    output: SchedulerOutput | None
    prefilling: list[tuple[Request, int]]
    num_dropped: int = 0
    ended: float = 0.0
    num_tokens: int = 0


class LiveView(Observer):
    """Keeps what a picture of the engine needs, and makes one every 100 ms while there are viewers.

    Its methods are called in the engine's thread, and the pictures are made there: between two of the scheduler's
    calls, so each is consistent. A finished picture is never changed; `snapshot` may be called in any thread.
    It reads only public attributes of scheduler, pool and requests, so it works with any.

    Args:
        scheduler: what it will observe, shown as it is until something happens.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._lives: dict[RequestId, Life] = {}
        self._num_requests = 0
        self._swapped: set[RequestId] = set()
        self._num_steps = 0
        self._num_preemptions = 0
        self._open: list[Step] = []  # scheduled, and not reported yet: one, or two that overlap
        self._steps: deque[Step] = deque(maxlen=NUM_STEPS)
        self._ttfts: deque[float] = deque(maxlen=NUM_LATENCIES)
        self._tpots: deque[float] = deque(maxlen=NUM_LATENCIES)
        self._names: dict[int, bytes] = {}  # block → the name under which the prefix cache had it when it was freed
        self._idle = True
        self._busy_since = 0  # the number of the first step since the engine was last idle
        self._asked = 0.0  # when a picture was last asked for
        self._next = 0.0  # no picture is made before
        self._num_pictures = 0
        self._picture: dict[str, Any] = {}
        self._draw(scheduler)

    def snapshot(self) -> dict[str, Any]:
        """The last picture. Do not modify it: it is shared.

        It fits into JSON. `pool` has the numbers of the block pool, and the ids of the blocks that are `shared`,
        `cached` (free, and found by the prefix cache) or `lost` (allocated, in no running request's table). `running`
        and `waiting` list requests, each with its `blocks`, in order; of the waiting queue, swapped-out ones included,
        the first 100. `steps` are the last 60. `ttft` and `tpot` are in milliseconds, of the last 100 requests. A
        request's `number` is 1, 2, 3, … in the order of arrival.

        A call keeps the pictures coming for a second. So a caller that asks ten times a second sees the engine as it
        was at most 100 ms ago, or when its last step began; the first picture may be older. When the engine becomes
        idle, a picture is always made.
        """
        self._asked = perf_counter()
        return self._picture

    # What happens in the engine

    def on_add(self, scheduler: Scheduler, request: Request) -> None:
        """Number the request, and start its clock."""
        self._wake()
        self._lives[request.request_id] = self._new_life(perf_counter())

    def on_fork(self, scheduler: Scheduler, parent: Request, child: Request) -> None:
        """Number the child. It answers the same prompt, so its clock started with its parent's."""
        life = self._lives.get(parent.request_id)
        child_life = self._new_life(life.added if life else perf_counter())
        if child.output_token_ids:  # its first token is its parent's
            child_life.first = life.first if life else None
            child_life.is_timed = child_life.first is not None
        self._lives[child.request_id] = child_life

    def on_schedule(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Begin a step. One that was begun and never reported is forgotten, unless the two overlap."""
        now = perf_counter()
        if output.scheduled:
            self._wake()
        num_decode, num_prefill = 0, 0
        prefilling: list[tuple[Request, int]] = []
        for request, num_new in zip(output.scheduled, output.num_scheduled_tokens.values(), strict=False):
            outputs = len(request.output_token_ids) + request.num_placeholders
            num_drafts = len(output.draft_token_ids.get(request.request_id, ()))
            is_newest = num_new - num_drafts == 1
            if outputs and is_newest and request.num_computed_tokens + 1 == request.num_prompt_tokens + outputs:
                num_decode += num_new
            else:
                num_prefill += num_new
                prefilling.append((request, outputs))
        preempted = [self._number(request_id) for request_id in output.preempted]
        self._num_preemptions += len(preempted)
        if output.swapped_out or output.swapped_in:
            self._swapped = (self._swapped | output.swapped_out.keys()) - output.swapped_in.keys()
        for request_id in output.finished:
            self._forget(request_id)
        if not scheduler.overlaps:
            self._open.clear()
        number = self._num_steps + len(self._open)
        self._open.append(Step(number, now, num_prefill, num_decode, preempted, output, prefilling))
        if now - self._asked < INTEREST_SECONDS and now >= self._next:
            self._draw(scheduler, output)

    def on_update(self, scheduler: Scheduler, output: SchedulerOutput, ended: list[Request]) -> None:
        """The step is over: note its times, and those of the requests that had their first or their last token."""
        now = perf_counter()
        step = self._open.pop(0) if self._open and self._open[0].output is output else None
        if step is not None and (output.num_scheduled_tokens or output.preempted):
            step.number, step.output, step.ended = self._num_steps, None, now
            if self._steps:
                step.begun = max(step.begun, self._steps[-1].ended)
            num_left = sum(output.num_scheduled_tokens[each] - 1 for each in output.draft_token_ids)
            num_rejected = sum(map(len, output.draft_token_ids.values())) - num_left
            step.num_tokens = step.num_decode - num_rejected - step.num_dropped
            for request, num_outputs in step.prefilling:
                if len(request.output_token_ids) > num_outputs:
                    step.num_tokens += 1
                    self._note_first(request, now)
            step.prefilling = []
            self._steps.append(step)
            self._num_steps += 1
        for request in ended:
            self._note_end(scheduler, request, now)
            for ahead in self._open:
                assert ahead.output is not None
                ahead.num_dropped += request.request_id in ahead.output.num_scheduled_tokens
        self._draw_if_idle(scheduler)

    def on_recover(self, scheduler: Scheduler) -> None:
        """A step failed: it is none of those that are shown, and nothing is swapped out any more."""
        self._open.clear()
        self._swapped = set()

    def on_finish(self, scheduler: Scheduler, request: Request) -> None:
        """A stop string ended it, or its client left."""
        self._note_end(scheduler, request, perf_counter())
        self._draw_if_idle(scheduler)

    # Notes

    def _wake(self) -> None:
        if self._idle:
            self._idle = False
            self._busy_since = self._num_steps

    def _new_life(self, added: float) -> Life:
        self._num_requests += 1
        return Life(self._num_requests, added)

    def _number(self, request_id: RequestId) -> int:
        """What the page calls a request. One that was added before anybody watched is new now."""
        life = self._lives.get(request_id)
        if life is None:
            life = self._lives[request_id] = self._new_life(perf_counter())
            life.is_timed = False
        return life.number

    def _note_first(self, request: Request, now: float) -> None:
        life = self._lives.get(request.request_id)
        if life is not None and life.first is None and life.is_timed:
            life.first = now
            self._ttfts.append(now - life.added)

    def _note_end(self, scheduler: Scheduler, request: Request, now: float) -> None:
        life = self._forget(request.request_id)
        num_later = len(request.output_token_ids) - 1
        if life is not None and life.first is not None and num_later > 0 and request.finish_reason != "abort":
            self._tpots.append((now - life.first) / num_later)
        if request.block_hashes and isinstance(scheduler.pool, CachingBlockPool):
            hashes = request.block_hashes
            self._names.update(zip(scheduler.pool.find(hashes), hashes, strict=False))

    def _forget(self, request_id: RequestId) -> Life | None:
        self._swapped.discard(request_id)
        return self._lives.pop(request_id, None)

    # Pictures

    def _draw_if_idle(self, scheduler: Scheduler) -> None:
        """The final picture: no later event would trigger another one."""
        if not self._idle and not scheduler.running and not scheduler.waiting:
            self._idle = True
            self._draw(scheduler)

    def _draw(self, scheduler: Scheduler, output: SchedulerOutput | None = None) -> None:
        """Make a picture, and put it in the place of the last one."""
        begun = perf_counter()
        self._num_pictures += 1
        counts = {} if output is None else output.num_scheduled_tokens
        self._picture = {
            "version": self._num_pictures,
            "scheduler": _name(scheduler),
            "pool": self._pool(scheduler),
            "running": [self._row(request, counts.get(request.request_id, 0)) for request in scheduler.running],
            "num_waiting": len(scheduler.waiting) - len(self._swapped),
            "num_swapped": len(self._swapped),
            "waiting": [self._row(request, 0) for request in islice(scheduler.waiting.values(), MAX_WAITING)],
            "steps": [_bar(step) for step in self._steps],
            "num_steps": self._num_steps,
            "num_requests": self._num_requests,
            "num_preemptions": self._num_preemptions,
            "tokens_per_second": self._tokens_per_second(),
            "ttft": _latency(self._ttfts),
            "tpot": _latency(self._tpots),
        }
        end = perf_counter()
        self._next = end + max(PICTURE_SECONDS, (end - begun) / MAX_SHARE)

    def _row(self, request: Request, num_new: int) -> dict[str, Any]:
        """One unfinished request, and how many of its tokens the step computes."""
        return {
            "number": self._number(request.request_id),
            "id": str(request.request_id),
            "status": request.status.value,
            "blocks": [block_id for table in request.group_block_ids for block_id in table],
            "num_tables": len(request.group_block_ids),
            "num_host_blocks": len(request.host_block_ids),
            "num_prompt": request.num_prompt_tokens,
            "num_cached": request.num_cached_tokens,
            "num_output": len(request.output_token_ids),
            "max_tokens": request.max_tokens,
            "num_computed": request.num_computed_tokens,
            "num_new": num_new,
            "num_preemptions": request.num_preemptions,
        }

    def _pool(self, scheduler: Scheduler) -> dict[str, Any]:
        """The blocks that are shared, free and cached, or allocated but in no table; the rest is in the tables.

        Finding blocks in no table needs a check of every block, so it is done only if the counts do not add up.
        """
        pool = scheduler.pool
        tables = (table for request in scheduler.running for table in request.group_block_ids)
        owned = {block_id for table in tables for block_id in table if block_id >= 0}
        lost = []
        if pool.num_blocks - pool.num_free != len(owned):
            lost = [each for each in range(pool.num_blocks) if each not in owned and pool.ref_count(each)]
        return {
            "num_blocks": pool.num_blocks,
            "block_size": pool.block_size,
            "num_free": pool.num_free,
            "shared": [block_id for block_id in owned if pool.ref_count(block_id) > 1],
            "cached": self._cached(pool) if isinstance(pool, CachingBlockPool) else [],
            "lost": lost,
        }

    def _cached(self, pool: CachingBlockPool) -> list[int]:
        """Free blocks that the prefix cache would find, as far as they held what a request has left behind."""
        known = self._names = {block: name for block, name in self._names.items() if pool.find([name]) == [block]}
        return [block_id for block_id in known if not pool.ref_count(block_id)]

    def _tokens_per_second(self) -> float | None:
        """Of the steps shown since the engine was last idle, from the first's begin to the last's end."""
        steps = [step for step in self._steps if step.number >= self._busy_since]
        if not steps:
            return None
        return sum(step.num_tokens for step in steps) / max(steps[-1].ended - steps[0].begun, 1e-9)


def _name(scheduler: Scheduler) -> str:
    """Its class, without observing wrappers."""
    while isinstance(scheduler, ObservedScheduler):
        scheduler = scheduler.scheduler
    return type(scheduler).__name__


def _bar(step: Step) -> dict[str, Any]:
    return {
        "number": step.number,
        "prefill": step.num_prefill,
        "decode": step.num_decode,
        "ms": round(1000 * (step.ended - step.begun), 3),
        "preempted": step.preempted,
    }


def _latency(seconds: deque[float]) -> dict[str, float] | None:
    """The last and the median, in milliseconds."""
    if not seconds:
        return None
    return {"last": round(1000 * seconds[-1], 3), "median": round(1000 * median(seconds), 3), "count": len(seconds)}
