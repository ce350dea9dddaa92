"""Eight schedulers with bugs from production, rebuilt: what each did, what shows it, which counter proves it.

Phase 7 comes with them. All are from one engine, mistral.rs, as its issues and pull requests #2024, #2033 and #2034 and
its scheduler's source show them. Each adds a few lines to an engine of `minicache_course.incidents.bases`. The
smallest workloads are in `minicache_course.incidents.table`, as data. Use none of these in a server.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from minicache.errors import LivelockError
from minicache.request import Request, RequestStatus
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.paged import AllocStatus, PagedScheduler
from minicache_course.incidents.bases import DequeScheduler, EngineScheduler, ForkingScheduler, PhasedScheduler

SPIN_LIMIT: Final = 1000
"""How often in one step `LivelockScheduler` defers requests before it is stopped. The real one was not."""


class CapScheduler(EngineScheduler):
    """Incident 1: a batch of at most N − 1.

    **What it did.** It stopped if one more request would make max_num_seqs: `max_num_seqs == running + 1`. This is one
    too early. With max_num_seqs = 1 no request was ever admitted.

    **Smallest workload.** max_num_seqs = 1, and one request. **Counter:** the largest batch: 0 where 1 is right; with 4
    batch slots and four requests, 3 where 4 is right.
    """

    def has_slot(self) -> bool:
        """Whether the batch may take one more request."""
        return self.max_num_seqs != len(self.running) + 1


class ReversedScheduler(DequeScheduler):
    """Incident 2: first come, last served.

    **What it did.** Before each step it sorted the batch by arrival, and then reversed it, which put the earliest last.
    But blocks were handed out from the front and taken away at the back: the newest request was served first, and the
    *oldest* was preempted.

    **Smallest workload.** 10 blocks of 16, two requests of 80 tokens: the batch is full, and the next token of each
    needs a block. **Counter:** the request that is preempted: 0 where 1 is right; so 1 finishes first.
    """

    def schedule_running(self, output: SchedulerOutput) -> None:
        """Schedule the batch in the order of arrival."""
        self.running.sort(key=lambda request: request.arrival_index)
        self.running.reverse()
        super().schedule_running(output)


class ThrashScheduler(PhasedScheduler):
    """Incident 3: bucket thrash.

    **What it did.** It sorted the requests that could compute into buckets of equal length, ran the shortest bucket
    only, and *preempted* all others, prompts and decodes alike: their blocks were freed though no request needed them.
    A longer request was computed from its first token on for every single token that it generated.

    **Smallest workload.** Two requests, prompts of 120 and 50 tokens, 100 new tokens each, memory for both.
    **Counters:** 17,000 prefill tokens where 170 are right, 100 preemptions where none is, 200 steps where 100 are,
    mean batch 1.
    """

    def choose(self, candidates: list[Request]) -> list[Request]:
        """Of `candidates`, those that compute in this step; the others are preempted."""
        shortest = min(request.num_tokens for request in candidates)
        return [request for request in candidates if request.num_tokens == shortest]


class VictimHeadScheduler(EngineScheduler):
    """Incident 4: the victim in the head's slot.

    **What it did.** Admission looked at the head of the queue. If it had waited too long, the newest of the batch was
    preempted for it, which put the victim at the head of the queue. The blocks then went to the request that admission
    had looked at, and the batch slot to the new head: the victim, whose blocks were gone.

    **Smallest workload.** 7 blocks of 16. A request of 10 tokens with 100 to generate, and one of 112 tokens, which
    needs all 7 blocks: passed over 64 times, it has the first evicted. **Counters:** tokens that are computed without a
    block, 74 where 0 is right; blocks of requests that wait, 7 where 0 is right.
    """

    def admit(self, request: Request, output: SchedulerOutput, found: Sequence[int] = ()) -> None:
        """Move `request` from the queue into the batch: it gets its blocks, and the step computes its tokens."""
        request.block_ids = self.pool.allocate(self.blocks_to_admit(request))
        first = self.waiting.first()
        assert first is not None
        self.waiting.remove(first)
        first.status = RequestStatus.RUNNING
        self.running.append(first)
        self.schedule_tokens(first, output)


class StickyIgnoreScheduler(EngineScheduler):
    """Incident 5: one ignored, all ignored.

    **What it did.** `did_ignore` means that the current request can never fit and gets no blocks. It was declared
    before the loop over the queue, not in it, and never reset. So a request that came after an impossible one in the
    same step got no blocks either, but still joined the batch.

    **Smallest workload.** 4 blocks of 16. A request of 100 tokens, which never fits, then one of 10. **Counter:**
    tokens that are computed without a block, 10 where 0 is right. (There they were computed one step later.)
    """

    def schedule_waiting(self, output: SchedulerOutput) -> None:
        """Admit requests from the head of the queue while there are a batch slot, token budget, and free blocks."""
        did_ignore = False
        while self.has_slot() and (request := self.head()):
            if self.can_allocate(request) is AllocStatus.NEVER:
                self.give_up(request, output)
                did_ignore = True
                continue
            if not self.has_budget(request, output) or not self.make_way(request, output):
                return
            if not did_ignore:
                self.admit(request, output)
            else:
                self.waiting.remove(request)
                request.status = RequestStatus.RUNNING
                self.running.append(request)
                self.schedule_tokens(request, output)
            if output.preempted:
                return


class LivelockScheduler(PagedScheduler):
    """Incident 6: a queue that is never empty.

    **What it did.** Requests with and without images could not share a batch. One that could not join the batch was put
    back onto the queue that the loop was draining, at the other end. When only such requests were left in it, the loop
    took them off and put them back forever, and occupied a core. (There the queue was that of the running requests;
    here it is that of the waiting ones. This one stops after SPIN_LIMIT iterations, with a `LivelockError` that a test
    can see.)

    **Smallest workload.** One request of the class "text", one of "image". **Counter:** requests deferred in one step:
    no end where at most 1 is right.
    """

    def schedule_waiting(self, output: SchedulerOutput) -> None:
        """Admit requests of the batch's class while there are a batch slot, token budget, and free blocks."""
        queue = deque(self.waiting.values())
        num_deferred = 0
        while queue and len(self.running) < self.max_num_seqs:
            request = queue.popleft()
            if self.running and self.running[0].group != request.group:
                queue.append(request)
                num_deferred += 1
                if num_deferred > SPIN_LIMIT:
                    raise LivelockError(f"{num_deferred} requests deferred in one step, of {len(self.waiting)} waiting")
                continue
            too_long = self.num_new_tokens(request) > self.token_budget
            if (too_long and self.running) or self.can_allocate(request) is not AllocStatus.OK:
                return
            self.admit(request, output)


class OneVictimScheduler(EngineScheduler):
    """Incident 7: given up after one victim.

    **What it did.** For a head of the queue that had waited too long it preempted *one* request. If that did not free
    enough blocks, it declared the head too large for the cache and finished it, though the pool was large enough.

    **Smallest workload.** 10 blocks of 16. Two requests of 10 tokens with 70 to generate, which hold 5 blocks each when
    the head has been passed over 64 times, and one of 150 tokens, which needs all 10. **Counter:** requests that fit
    into the pool and are finished for lack of capacity, 1 where 0 is right.
    """

    def make_way(self, request: Request, output: SchedulerOutput) -> bool:
        """Get the blocks for the head of the queue, by evicting others if it has waited too long."""
        if self.can_allocate(request) is AllocStatus.LATER and self.has_waited_too_long(request):
            self.evict_newest(output)
            if self.can_allocate(request) is AllocStatus.LATER:
                self.give_up(request, output)
        return self.can_allocate(request) is AllocStatus.OK


class UnbudgetedCopyScheduler(ForkingScheduler):
    """Incident 8: a copy that was not in the budget.

    **What it did.** Before a request got its next token, the free blocks were compared with those that it lacked. Its
    last block had a free slot, so it lacked none. But the block was shared with a child and had to be copied before it
    could be written: the copy took a block, none was free, and the engine panicked.

    **Smallest workload.** 2 blocks of 16, a request of 20 tokens, forked after its first token. **Counter:** blocks
    that the pool lacks in the middle of a step, 1 where 0 is right: the step ends in an `OutOfBlocksError`.
    """

    def blocks_missing(self, request: Request) -> int:
        """Blocks that a request needs before its next tokens can be computed."""
        return -(-request.num_tokens // self.pool.block_size) - len(request.block_ids)


class StarvingScheduler(ThrashScheduler, ReversedScheduler):
    """Incidents 2 and 3 at once, as they were in the engine when 24 of 40 requests starved (#2033, #2034)."""
