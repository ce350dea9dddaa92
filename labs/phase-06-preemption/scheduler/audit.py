# Phase 6, preemption: your file. It stands in for minicache.scheduler.audit.
# Write what raises NotImplementedError. `minicache grade 6` grades it, `minicache hint 6.K` helps with task K.
"""An auditor for any scheduler: after every step, do the books agree with each other, and with the step before?

Phase 6 builds it. `observe(scheduler, Auditor())`, or `LLM(observers=[Auditor()])`, and the first step that breaks a
rule raises an `InvariantError` that names the step, the rule, and a request or a block. `Scheduler.check()` is what a
stage says of itself; an auditor asks no stage. It looks at public state only, keeps notes of its own, and compares.
`minicache.scheduler.audit_trace` does for a trace on disk what can be done of it. Pure standard library.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

from minicache.errors import InvariantError
from minicache.memory.blocks import BlockPool, blocks_for
from minicache.request import Request, RequestId, RequestStatus
from minicache.scheduler.base import Scheduler
from minicache.scheduler.observe import Observer
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.paged import PagedScheduler


@dataclass(frozen=True, slots=True)
class Note:
    """What a request was when the auditor last looked at it.

    Attributes:
        request: the request itself, which has moved on since. The other fields are copies of its own, of then.
        num_output_tokens: how many tokens it had generated.
    """

    request: Request
    status: RequestStatus
    num_computed_tokens: int
    num_output_tokens: int
    num_preemptions: int
    block_ids: tuple[int, ...]
    host_block_ids: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that it had, prompt and output."""
        return self.request.num_prompt_tokens + self.num_output_tokens


class Auditor(Observer):
    """Raises at the first step that breaks a rule.

    | rule | after | holds |
    |---|---|---|
    | places | every call | each unfinished request is in the batch or in the line, once, with the status that fits |
    | blocks | every call | free + used = all, and a block has as many owners as requests list it; the host's likewise |
    | holdings | every call | who runs has the blocks that it needs, who waits none, who is swapped out host blocks |
    | order | every call | nobody in the line arrived before anybody in the batch (stages that are `first_come`) |
    | work | `schedule` | something is done, by at most so many requests and tokens as allowed |
    | victims | `schedule` | preempted are the newest, for want of memory, and nobody is admitted beside |
    | swaps | `schedule` | the pairs to copy are the blocks that moved |
    | tokens | the report | what was scheduled is computed, and one token is appended where all are |
    | end | an end | who ends had cause to, and gives everything back |

    Every `check_…` method looks after one rule. It returns None, or calls `fail` with the rule's name and what it saw.
    It takes time in proportion to the unfinished requests and their blocks, and changes nothing.

    All calls must go through the observed scheduler. An auditor may begin in the middle of a run: then its first call
    is compared with nothing before it.

    Attributes:
        step: the number of the last step that was scheduled, from 0; −1 before the first.
        notes: id → what each unfinished request was after the last call. While `schedule` is audited: before it; while
            a report is: between the two.
        batch: the batch, in order, at that same time, without those that have ended since.
    """

    def __init__(self) -> None:
        self.step = -1
        self.notes: dict[RequestId, Note] = {}
        self.batch: list[Request] = []
        self._watched: Scheduler | None = None

    # What happened: keep the notes, and call the checks.

    def on_add(self, scheduler: Scheduler, request: Request) -> None:
        """Know the request from now on."""
        self._begin(scheduler)
        if scheduler.waiting.get(request.request_id) is not request:
            self.fail("places", f"{request!r} was added and is not in the line")
        self.notes[request.request_id] = _note(request)

    def on_schedule(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Audit the step that was just scheduled."""
        known = self._begin(scheduler)
        self.step += 1
        if known and (strangers := [each for each in output.finished if each not in self.notes]):
            self.fail("end", f"{strangers} are said to have ended, and were not unfinished")
        ended = [self.notes[request_id].request for request_id in output.finished if known]
        self._check_state(scheduler, ended, output)
        if known:
            self.check_work(scheduler, output)
            self.check_victims(scheduler, output)
            self.check_swaps(scheduler, output)
        self._remember(scheduler)

    def on_update(self, scheduler: Scheduler, output: SchedulerOutput, ended: list[Request]) -> None:
        """Audit the report of the step."""
        if self._begin(scheduler):
            self.check_tokens(scheduler, output, ended)
        self._check_state(scheduler, ended, SchedulerOutput())
        self._remember(scheduler)

    def on_finish(self, scheduler: Scheduler, request: Request) -> None:
        """Audit an end from outside."""
        self._begin(scheduler)
        self.check_end(scheduler, request)
        self.notes.pop(request.request_id, None)
        self.batch = [each for each in self.batch if each is not request]

    # The rules.

    def fail(self, rule: str, message: str) -> NoReturn:
        """Say that a rule is broken.

        Raises:
            InvariantError: always; "step 3, blocks: …".
        """
        raise InvariantError(f"step {max(self.step, 0)}, {rule}: {message}")

    def check_places(self, scheduler: Scheduler) -> None:
        """Rule "places": every unfinished request that was added has one place, and the counts say so.

        `running` and `waiting` together hold the requests of `notes`, each once, and nobody else. In the batch all are
        RUNNING, in the line WAITING or SWAPPED. num_running, num_waiting and has_unfinished agree with that.

        Raises:
            InvariantError: they do not.
        """
        running, waiting = scheduler.running, scheduler.waiting
        for request in (*running, *waiting.values()):
            note = self.notes.get(request.request_id)
            if note is None or note.request is not request:
                self.fail("places", f"{request!r} is in a queue, and was never added or has ended")
        for request in running:
            if request.status is not RequestStatus.RUNNING:
                self.fail("places", f"{request!r} is in the batch")
        for request_id, request in waiting.items():
            if request.status not in (RequestStatus.WAITING, RequestStatus.SWAPPED) or request.request_id != request_id:
                self.fail("places", f"{request!r} is in the line, as {request_id!r}")
        places = Counter([request.request_id for request in running] + list(waiting))
        for request_id, note in self.notes.items():
            if places[request_id] != 1:
                self.fail("places", f"{note.request!r} is {places[request_id]} times in batch and line")
        counts = scheduler.num_running, scheduler.num_waiting, scheduler.has_unfinished
        if counts != (len(running), len(waiting), bool(self.notes)):
            self.fail("places", f"num_running, num_waiting and has_unfinished are {counts}: {places} are there")

    def check_end(self, scheduler: Scheduler, request: Request) -> None:
        """Rule "end": a request that ends has left both queues, holds nothing, and had cause to end.

        The cause of FINISHED_CAPACITY is that its tokens need more blocks than the whole pool has; that of
        FINISHED_LENGTH, that it has max_tokens of output, or max_model_len tokens. Of the others nothing is asked here:
        they may come from outside.

        Raises:
            InvariantError: it has not, or it does.
        """
        status, needed = request.status, blocks_for(request.num_tokens, scheduler.pool.block_size)
        if not status.is_finished:
            self.fail("end", f"{request!r} is said to have ended")
        queued = any(each is request for each in scheduler.running)
        if queued or scheduler.waiting.get(request.request_id) is request:
            self.fail("end", f"{request!r} is still in the batch or in the line")
        if request.block_ids or request.host_block_ids:
            self.fail("end", f"{request!r} keeps blocks {request.block_ids}, host blocks {request.host_block_ids}")
        if status is RequestStatus.FINISHED_CAPACITY and needed <= scheduler.pool.num_blocks:
            self.fail("end", f"{request!r} needs {needed} blocks, and the pool has {scheduler.pool.num_blocks}")
        if status is RequestStatus.FINISHED_LENGTH and not _is_full(scheduler, request):
            self.fail("end", f"{request!r} has not all its tokens")

    def check_blocks(self, scheduler: Scheduler) -> None:
        """Rule "blocks": no block is lost, and none is counted wrong.

        num_free + num_used = num_blocks. Every id in the `block_ids` of a request in the batch or in the line is one of
        the pool; it stands there as often as the block has owners (`ref_count`), over all requests together; and
        num_used is the number of different blocks that stand there. The same of `host_block_ids` and the scheduler's
        `host_pool`, if it has one; where there is none, nobody lists a host block.

        Raises:
            InvariantError: they do not. The message names a block, or the counts.
        """
        raise NotImplementedError(
            "phase 6, task 7: The auditor; read docs/en/phase-06-preemption/lab/02-the-auditor.md"
        )

    def check_holdings(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Rule "holdings": each request has the blocks that its status asks for.

        RUNNING: at least for its computed tokens and those that `output` has it compute; from `PagedScheduler` on, at
        most for all its tokens (earlier stages reserve more). No host blocks. WAITING: nothing at all, and none of its
        tokens counts as computed. SWAPPED: no blocks, and host blocks for just its computed tokens, of which there are
        some.

        Args:
            scheduler: the one that is watched.
            output: the step that was just scheduled; an empty one after a report.

        Raises:
            InvariantError: one has more, or fewer.
        """
        raise NotImplementedError(
            "phase 6, task 7: The auditor; read docs/en/phase-06-preemption/lab/02-the-auditor.md"
        )

    def check_order(self, scheduler: Scheduler) -> None:
        """Rule "order": who arrived earlier is ahead.

        In the batch, and behind it in the line, `arrival_index` grows: so nobody was admitted before somebody who
        arrived earlier, and nobody preempted before somebody who arrived later. A scheduler that is not `first_come`
        (phase 7) has an order of its own: it is let be.

        Raises:
            InvariantError: it does not. The message names two requests.
        """
        raise NotImplementedError(
            "phase 6, task 7: The auditor; read docs/en/phase-06-preemption/lab/02-the-auditor.md"
        )

    def check_work(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Rule "work": the step is one that can be carried out, keeps to the limits, and gets somewhere.

        - `scheduled` and the keys of `num_scheduled_tokens` are the same requests in the same order, all of them in the
          batch. The batch has at most max_num_seqs.
        - Each computes at least one token, and no more than the scheduler's `largest_chunk` of those that it has left
          to compute: all of them, for a scheduler that sets no limit. It computes no fewer, and everybody in the batch
          is scheduled, unless the step has reached max_num_batched_tokens.
        - The step has at most max_num_batched_tokens, unless it `has_outgrown_request`.
        - Progress: if `notes` has anybody, a token is scheduled, or a request has ended.

        Raises:
            InvariantError: one of these is not so.
        """
        raise NotImplementedError(
            "phase 6, task 7: The auditor; read docs/en/phase-06-preemption/lab/02-the-auditor.md"
        )

    def check_victims(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Rule "victims": who lost its place is said to have, had to, and lost nothing else.

        - `preempted` are the requests of `batch` that are not in the scheduler's batch any more and have not ended
          (`output.finished`), each once. They were the last of `batch`, and the last is named first.
        - If anybody is preempted, nobody is admitted: all that is scheduled `was_running`.
        - The victim named last had to go: its tokens need more blocks than are free now. (Unless a request has ended in
          this step: its blocks are free now, and were not.)
        - In `notes`, a victim has one preemption fewer; everybody else has as many. All have as many output tokens, and
          as many computed tokens; a victim that is WAITING has none computed now.

        Raises:
            InvariantError: one of these is not so.
        """
        raise NotImplementedError(
            "phase 6, task 7: The auditor; read docs/en/phase-06-preemption/lab/02-the-auditor.md"
        )

    def check_swaps(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Rule "swaps": what is copied is what moved.

        - `swapped_out` has those that are SWAPPED and in `notes` were not, and nobody else. Its pairs (block, host
          block) are the first of the blocks that the request had in `notes`, one for each of its `host_block_ids`, in
          order.
        - `swapped_in` has those that were SWAPPED in `notes` and are RUNNING, and nobody else. Its pairs (host block,
          block) are the host blocks that the request had in `notes`, and the first of its `block_ids`, in order.
        - Who was SWAPPED and is not RUNNING is SWAPPED still, with the same host blocks.

        Raises:
            InvariantError: one of these is not so.
        """
        raise NotImplementedError(
            "phase 6, task 7: The auditor; read docs/en/phase-06-preemption/lab/02-the-auditor.md"
        )

    def check_tokens(self, scheduler: Scheduler, output: SchedulerOutput, ended: list[Request]) -> None:
        """Rule "tokens": the report moved each request by what was scheduled, and ended those that are done.

        - A request of the step has as many computed tokens more than in `notes` as were scheduled. If these are all the
          tokens that it had, it has one token of output more; else, and if it was not scheduled, as many as before.
        - All of `scheduled` are requests of `notes`, the same objects, but for those that were ended from outside in
          between: these are not in `notes` any more.
        - Who got a token has ended if that is one of its stop tokens, and it does not ignore them, or if it has
          max_tokens of output, or max_model_len tokens. Nobody else has ended. FINISHED_STOPPED are only those with a
          stop token.
        - `ended` are those of `scheduled` that have ended, in that order.

        Args:
            scheduler: the one that is watched.
            output: the step that was reported.
            ended: what the report returned.

        Raises:
            InvariantError: one of these is not so.
        """
        raise NotImplementedError(
            "phase 6, task 7: The auditor; read docs/en/phase-06-preemption/lab/02-the-auditor.md"
        )

    # What the rules share.

    def was_running(self, request: Request) -> bool:
        """Whether the request is RUNNING in `notes`: it has not just been admitted."""
        note = self.notes.get(request.request_id)
        return note is not None and note.status is RequestStatus.RUNNING

    def has_outgrown_request(self, output: SchedulerOutput, budget: int) -> bool:
        """Whether a step of more than `budget` tokens has the one excuse that there is.

        It has a request that was preempted and has more than `budget` tokens to compute, so that no step would be large
        enough. It is the only one, all the others together have fewer than `budget`, and none of them has just been
        admitted.
        """
        tokens = output.num_scheduled_tokens
        large = [request for request in output.scheduled if tokens[request.request_id] > budget]
        if len(large) != 1 or not large[0].num_preemptions:
            return False
        others = [request for request in output.scheduled if request is not large[0]]
        return sum(tokens[each.request_id] for each in others) < budget and all(map(self.was_running, others))

    def _begin(self, scheduler: Scheduler) -> bool:
        """Take note of what is there, if this scheduler has not been watched yet. Whether it has."""
        if self._watched is scheduler:
            return True
        self._watched, self.step = scheduler, -1
        self._remember(scheduler)
        return False

    def _remember(self, scheduler: Scheduler) -> None:
        """Write the notes anew."""
        self.batch = list(scheduler.running)
        self.notes = {request.request_id: _note(request) for request in (*self.batch, *scheduler.waiting.values())}

    def _check_state(self, scheduler: Scheduler, ended: Iterable[Request], output: SchedulerOutput) -> None:
        """The rules that hold after every call, once `ended` have ended."""
        for request in ended:
            self.check_end(scheduler, request)
            self.notes.pop(request.request_id, None)
        self.check_places(scheduler)
        self.check_blocks(scheduler)
        self.check_holdings(scheduler, output)
        self.check_order(scheduler)


def _note(request: Request) -> Note:
    return Note(
        request,
        request.status,
        request.num_computed_tokens,
        len(request.output_token_ids),
        request.num_preemptions,
        tuple(request.block_ids),
        tuple(request.host_block_ids),
    )


def _is_full(scheduler: Scheduler, request: Request) -> bool:
    """Whether the request has all the tokens that it may have."""
    return len(request.output_token_ids) >= request.max_tokens or request.num_tokens == scheduler.max_model_len
