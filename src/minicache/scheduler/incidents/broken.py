"""Eight schedulers that went wrong in production, rebuilt: what each did, what shows it, which counter proves it.

Phase 7 comes with them. All are from one engine, mistral.rs, as its issues and pull requests #2024, #2033 and #2034 and
its scheduler's source show them. Each is a few lines on an engine of `minicache.scheduler.incidents.bases`. The
smallest workloads are in `minicache.scheduler.incidents.table`, as data. Use none of these to serve anybody.
"""

from __future__ import annotations

from typing import Final

from minicache.errors import LivelockError
from minicache.request import Request, RequestStatus
from minicache.scheduler.incidents.bases import EngineScheduler, ForkingScheduler, PhasedScheduler
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.paged import AllocStatus, PagedScheduler

SPIN_LIMIT: Final = 1000
"""How often in one pass `LivelockScheduler` defers requests before it is stopped. The real one was not."""


class CapScheduler(EngineScheduler):
    """Incident 1: a batch of at most N − 1.

    **What it did.** It asked whether one request more would make max_num_seqs, and stopped if so: `max_num_seqs ==
    running + 1`. That is one too early. With max_num_seqs = 1 nobody was ever admitted.

    **Smallest workload.** max_num_seqs = 1, and one request. **Counter:** requests in the batch, at most: 0 where 1 is
    right; with 4 seats and four requests, 3 where 4 is right.
    """

    def has_seat(self) -> bool:
        """Whether the batch may take one request more."""
        return self.max_num_seqs != len(self.running) + 1


class ReversedScheduler(PagedScheduler):
    """Incident 2: first come, last served.

    **What it did.** Before each step it sorted the batch by arrival, and then reversed it "so that the earliest come
    last". But blocks were handed out from the front and taken away at the back: the newest request was served first,
    and the *oldest* was preempted.

    **Smallest workload.** 10 blocks of 16, two requests of 80 tokens: the batch is full, and the next token of each
    needs a block. **Counter:** who is preempted: request 0 where 1 is right; so 1 ends first.
    """

    def grow_batch(self, output: SchedulerOutput) -> None:
        """Serve the batch in the order of arrival."""
        self.running.sort(key=lambda request: request.arrival_index)
        self.running.reverse()
        super().grow_batch(output)


class ThrashScheduler(PhasedScheduler):
    """Incident 3: bucket thrash.

    **What it did.** It sorted the requests that could compute into buckets of equal length, ran the shortest bucket
    only, and *preempted* all others: their blocks were freed though nobody needed them. Prompts and decodes alike. A
    longer request was computed from its first token on for every single token that it generated.

    **Smallest workload.** Two requests, prompts of 120 and 50 tokens, 100 new tokens each, memory for both.
    **Counters:** 17,000 prefill tokens where 170 are right, 100 preemptions where none is, 200 steps where 100 are,
    mean batch 1.
    """

    def choose(self, candidates: list[Request]) -> list[Request]:
        """Of `candidates`, those that compute in this step; the others are preempted."""
        shortest = min(request.num_tokens for request in candidates)
        return [request for request in candidates if request.num_tokens == shortest]


class VictimHeadScheduler(EngineScheduler):
    """Incident 4: the victim in the head's seat.

    **What it did.** Admission looked at the head of the line. When that had waited too long, the newest of the batch
    was preempted for it, which put the victim at the head of the line. The blocks then went to the request that had
    been looked at, and the seat to whoever was at the head now: the victim, whose blocks were gone.

    **Smallest workload.** 7 blocks of 16. A request of 10 tokens with 100 to generate, and one of 112 tokens, which
    needs all 7 blocks: after 64 passes the first is evicted for it. **Counters:** tokens that are computed without a
    block, 74 where 0 is right; blocks of requests that wait, 7 where 0 is right.
    """

    def seat(self, request: Request, output: SchedulerOutput) -> None:
        """Move `request` from the line into the batch: its blocks are taken, and the step computes its tokens."""
        request.block_ids = self.pool.allocate(self.blocks_to_admit(request))
        _, first = self.waiting.popitem(last=False)
        first.status = RequestStatus.RUNNING
        self.running.append(first)
        self.order(first, output)


class StickyIgnoreScheduler(EngineScheduler):
    """Incident 5: one ignored, all ignored.

    **What it did.** `did_ignore` says that the request at hand can never fit and gets no blocks. It was declared
    before the loop over the line, not in it, and never set back. So whoever came after an impossible request in the
    same pass got no blocks either, and joined the batch all the same.

    **Smallest workload.** 4 blocks of 16. A request of 100 tokens, which never fits, then one of 10. **Counter:**
    tokens that are computed without a block, 10 where 0 is right. (There they were computed one step later.)
    """

    def admit(self, output: SchedulerOutput) -> None:
        """Take requests from the head of the line while there are a seat, tokens in the step, and free blocks."""
        did_ignore = False
        while self.has_seat() and (request := self.head()):
            if self.can_allocate(request) is AllocStatus.NEVER:
                self.give_up(request, output)
                did_ignore = True
                continue
            if not self.has_budget(request, output) or not self.make_way(request, output):
                return
            if not did_ignore:
                self.seat(request, output)
            else:
                del self.waiting[request.request_id]
                request.status = RequestStatus.RUNNING
                self.running.append(request)
                self.order(request, output)
            if output.preempted:
                return


class LivelockScheduler(PagedScheduler):
    """Incident 6: a queue that is never empty.

    **What it did.** Requests with and without images could not share a batch. One that did not fit the batch was put
    back onto the queue that the loop was draining, at the other end. When only such requests were left in it, the loop
    took them off and put them back for ever, on a core of its own. (There the queue was that of the running requests;
    here it is the line. This one gives up after SPIN_LIMIT turns, with a `LivelockError`, so that a test can see it.)

    **Smallest workload.** One request of group "text", one of group "image". **Counter:** requests deferred in one
    pass: without end where at most 1 is right.
    """

    def admit(self, output: SchedulerOutput) -> None:
        """Admit those of the batch's group while there are a seat, tokens in the step, and free blocks."""
        num_deferred = 0
        while len(self.running) < self.max_num_seqs and (request := self.head()):
            if self.running and self.running[0].group != request.group:
                self.waiting.move_to_end(request.request_id)
                num_deferred += 1
                if num_deferred > SPIN_LIMIT:
                    raise LivelockError(f"{num_deferred} requests deferred in one pass over {len(self.waiting)}")
                continue
            num_new = request.num_tokens - request.num_computed_tokens
            budget = self.max_num_batched_tokens - output.total_num_scheduled_tokens
            if (num_new > budget and self.running) or self.can_allocate(request) is not AllocStatus.OK:
                return
            del self.waiting[request.request_id]
            self.enter(request, output)


class OneVictimScheduler(EngineScheduler):
    """Incident 7: given up after one victim.

    **What it did.** For the head of the line that had waited too long it preempted *one* request. If that did not free
    enough blocks, it declared the head too large for the cache and ended it, though the pool was large enough.

    **Smallest workload.** 10 blocks of 16. Two requests of 10 tokens with 70 to generate, which hold 5 blocks each when
    64 passes are over, and one of 150 tokens, which needs all 10. **Counter:** requests that fit into the pool and end
    for want of capacity, 1 where 0 is right.
    """

    def make_way(self, request: Request, output: SchedulerOutput) -> bool:
        """Have the blocks for the head of the line, by force if it has waited too long."""
        if self.can_allocate(request) is AllocStatus.LATER and self.has_waited_too_long(request):
            self.evict_newest(output)
            if self.can_allocate(request) is AllocStatus.LATER:
                self.give_up(request, output)
        return self.can_allocate(request) is AllocStatus.OK


class UnbudgetedCopyScheduler(ForkingScheduler):
    """Incident 8: a copy that nobody had budgeted.

    **What it did.** Before a request got its next token, the free blocks were compared with those that it lacked. Its
    last block had room, so that was 0. But the block was shared with a twin and had to be copied before it could be
    written: the copy took a block, none was free, and the engine panicked.

    **Smallest workload.** 2 blocks of 16, a request of 20 tokens, forked after its first token. **Counter:** blocks
    that the pool lacks in the middle of a step, 1 where 0 is right: the step ends in an `OutOfBlocksError`.
    """

    def blocks_missing(self, request: Request) -> int:
        """Blocks that a request in the batch must get before its next tokens are computed."""
        return -(-request.num_tokens // self.pool.block_size) - len(request.block_ids)


class StarvingScheduler(ReversedScheduler, ThrashScheduler):
    """Incidents 2 and 3 at once, as they were in the engine when 24 of 40 requests starved (#2033, #2034)."""
