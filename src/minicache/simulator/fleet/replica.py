"""A server of a simulated fleet: it is sent requests while it runs. Given, not built. Pure standard library."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Final

from minicache.fleet import Place
from minicache.fleet.views import ReplicaId
from minicache.memory.prefix import BlockHash, CachingBlockPool
from minicache.request import Request, RequestId
from minicache.scheduler import PrefixCachingScheduler
from minicache.scheduler.base import Scheduler
from minicache.simulator.costs import StepCost, decode_ends
from minicache.simulator.serving import FEWEST_QUIET_STEPS, ServingSimulation
from minicache.simulator.stretch import most_quiet_steps, num_cached_tokens, settle

MOST_AT_ONCE: Final = 64
"""Quiet steps whose ends are computed beforehand: most stretches are cut short by a request."""


class Replica(ServingSimulation):
    """A server that is sent requests while it runs.

    Args:
        replica_id: its name.
        scheduler: a new one.
        cost: how long a step takes.
        started: when it was asked for, in seconds of the fleet's clock.

    Attributes:
        num_sent: requests that it was sent.
        is_gone: it has left the fleet.
        next_at: when its next step begins, or its stretch ends, if nothing comes before; for the fleet to set.
        had: tokens that each request had when the last step began, if `run_step` was asked to note them; or at `stop`.
    """

    def __init__(self, replica_id: ReplicaId, scheduler: Scheduler, cost: StepCost, started: float) -> None:
        super().__init__(scheduler, cost, (), skip_quiet=True)
        self.replica_id, self.started = replica_id, started
        self.num_sent, self.is_gone, self.next_at = 0, False, started
        self.had: dict[RequestId, int] = {}
        self._ended: list[tuple[Request, float]] = []
        self._ends: list[float] = []  # of the steps of a stretch that is under way
        self._is_last_of_stretch = False  # the step that ends at `now` is the one with which a request cut a stretch

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to compute."""
        return not self._unfinished

    @property
    def is_waiting(self) -> bool:
        """Whether all of its requests wait for their load."""
        return self._resumes_at > self.now

    @property
    def continues_at(self) -> float:
        """When its next step begins, if nothing comes before."""
        return max(self.now, self._resumes_at)

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that its model ran on."""
        return self._num_computed

    @property
    def is_in_stretch(self) -> bool:
        """Whether quiet steps are under way."""
        return bool(self._ends)

    def send(self, request: Request, now: float) -> bool:
        """Take a request: the step that begins next may compute it. False: it is too large, and refused.

        A stretch ends with the step that is under way at `now`.
        """
        if self._ends:
            self._settle(bisect_left(self._ends, now) + 1)
            self._is_last_of_stretch = True
        if not self._unfinished or self.is_waiting:
            self.now = max(self.now, now)
        self._is_quiet = False
        self.num_sent += 1
        return self._add(request)

    def begin_stretch(self) -> float | None:
        """Look for quiet steps to come, from `now` on, or from the end of the stretch that is under way.

        Returns:
            When the last of them ends, if a request does not come before. There may be more of them. None: the next
            step must be scheduled.
        """
        if self._ends:
            self._settle(len(self._ends))
        if not self._is_quiet or self._num_steps < self._look_again:
            return None
        most = most_quiet_steps(self.scheduler)
        if most < FEWEST_QUIET_STEPS:
            self._look_again = self._num_steps + most
            return None
        self._num_cached = cached = num_cached_tokens(self.scheduler)
        num_steps = min(most, MOST_AT_ONCE)
        self._ends = decode_ends(self._cost, self.now, len(self.scheduler.running), cached, num_steps)
        return self._ends[-1]

    def run_step(self, *, note: bool = False) -> list[tuple[Request, float]]:
        """Serve one step, from `now` on.

        Args:
            note: keep in `had` how many tokens each request had before.

        Returns:
            The requests that end with the step, at what is `now` then, each with when it had its first token.
        """
        if note:
            self.had = {name: len(request.output_token_ids) for name, request in self._unfinished.items()}
        self._ended, self._is_last_of_stretch = [], False
        self.now = max(self.now, self.next_at)  # all its requests have waited for their load until now
        self._serve()
        return self._ended

    def stop(self, now: float) -> None:
        """Take back what would have been computed after `now`: `had` has the tokens of each request then."""
        if self._ends:
            self._settle(bisect_right(self._ends, now))
        elif self.now > now and not self._is_last_of_stretch:
            return  # in the middle of a step, before which they were noted
        in_step = {request.request_id for request in self.scheduler.running} if self.now > now else ()
        self.had = {name: len(each.output_token_ids) - (name in in_step) for name, each in self._unfinished.items()}

    def _settle(self, num_steps: int) -> None:
        """Compute the first steps of the stretch, and forget the others."""
        if num_steps:
            num, end = len(self.scheduler.running), self._ends[num_steps - 1]
            self._busy += end - self.now
            self.now = end
            self._num_steps += num_steps
            self._num_computed += num_steps * num
            self._num_cached += num_steps * num
            settle(self.scheduler, num_steps)
        self._ends = []

    def place(self, hashes: Sequence[BlockHash], seconds_per_token: float) -> Place:
        """What `MovingCosts.choose` gets about it, for a prompt of these blocks, as of the current step."""
        decoding = self._first_token
        num_queued = sum(
            request.num_tokens - request.num_computed_tokens
            for name, request in self._unfinished.items()
            if name not in decoding
        )
        cache = self.require_cache()
        if isinstance(self.scheduler, PrefixCachingScheduler):
            self.scheduler.cache_filled()
        num_cached = len(cache.find(hashes)) * cache.block_size
        return Place(self.replica_id, num_queued * seconds_per_token, num_cached, len(decoding))

    def receive(self, hashes: Sequence[BlockHash]) -> None:
        """Take over the keys and values of a prompt's blocks, as many as are free: requests find them in the cache."""
        cache = self.require_cache()
        block_ids = cache.find(hashes)
        cache.share(block_ids)  # before anything is allocated, or they could be handed out
        missing = hashes[len(block_ids) : len(block_ids) + cache.num_free]
        new = cache.allocate(len(missing))
        cache.cache(new, missing)
        cache.free((block_ids + new)[::-1])

    def abort(self, request_id: RequestId) -> None:
        """Forget a request, if it has not finished: its client has left."""
        if self.scheduler.abort_request(request_id):
            del self._unfinished[request_id]
            self._first_token.pop(request_id, None)
            self._num_cached = -1

    def require_cache(self) -> CachingBlockPool:
        """The scheduler's pool, a prefix cache.

        Raises:
            ValueError: it is none.
        """
        pool = self.scheduler.pool
        if not isinstance(pool, CachingBlockPool):
            raise ValueError("a prompt's keys and values are moved into a prefix cache: schedulers need one")
        return pool

    def first_token_at(self, request_id: RequestId) -> float | None:
        """When an unfinished request had its first token; None: it has none."""
        return self._first_token.get(request_id)

    def _finish(self, request: Request, *, outgrown: bool = False) -> None:
        self._ended.append((request, self._first_token[request.request_id]))
        super()._finish(request, outgrown=outgrown)
