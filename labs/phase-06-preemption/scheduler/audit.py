# Phase 6, preemption: your file. It stands in for minicache.scheduler.audit.
# Write what raises NotImplementedError. `minicache grade 6` grades it, `minicache hint 6.K` helps with task K.
"""An auditor for any scheduler: after every step, do the books agree with each other, and with the step before?

Phase 6 builds it. `observe(scheduler, Auditor())`, or `LLM(observers=[Auditor()])`, and the first step that breaks a
rule raises an `InvariantError` that names the step, the rule, and a request or a block. `Scheduler.check()` is a
stage's own account; an auditor does not call it. It reads public state only, keeps notes, and compares.
`minicache.scheduler.audit_trace` checks a trace on disk for as much as a trace can show. Pure standard library.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
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
    """The state of a request when the auditor last looked at it.

    Attributes:
        request: the request itself, which has changed since. The other fields are copies of what it had then.
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
    | places | every call | each unfinished request is in the batch or in the queue, once, with a status that fits |
    | blocks | every call | free + used = all; a block has as many references as requests list it; CPU blocks too |
    | holdings | every call | a running request has the blocks it needs, a waiting one none, a swapped one CPU blocks |
    | order | every call | requests stand in the order of arrival, the batch before the queue (`first_come` stages) |
    | work | `schedule` | the step computes something, within the limits on requests and tokens |
    | victims | `schedule` | the newest are preempted, for lack of memory, and no request is admitted in that step |
    | swaps | `schedule` | the pairs to copy are the blocks that moved |
    | tokens | the commit | what was scheduled is computed, and one token is appended where all are |
    | end | a finish | a finished request had cause to finish, and holds nothing |
    | recovery | `recover` | every request waits with nothing computed, and keeps what it has generated |

    Every `check_…` method checks one rule. It returns None, or calls `fail` with the rule's name and what it saw. It
    takes time proportional to the unfinished requests and their blocks, and changes nothing.

    All calls must go through the observed scheduler. An auditor may begin in the middle of a run: then its first call
    is compared with nothing before it.

    Attributes:
        step: the number of the last step that was scheduled, from 0; −1 before the first.
        notes: id → what each unfinished request was after the last call: while `schedule` is audited, before it; while
            a commit is, between the two.
        batch: the batch, in order, at that same time, without requests that have finished since.
    """

    def __init__(self) -> None:
        self.step = -1
        self.notes: dict[RequestId, Note] = {}
        self.batch: list[Request] = []
        self._watched: Scheduler | None = None

    # What happened: keep the notes, and call the checks.

    def on_add(self, scheduler: Scheduler, request: Request) -> None:
        """Take a note of the request."""
        self.begin(scheduler)
        if scheduler.waiting.get(request.request_id) is not request:
            self.fail("places", f"{request!r} was added and is not in the queue")
        self.notes[request.request_id] = _note(request)

    def on_schedule(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Audit the step that was just scheduled."""
        known = self.begin(scheduler)
        self.step += 1
        if known and (strangers := [each for each in output.finished if each not in self.notes]):
            self.fail("end", f"{strangers} are listed as finished, and were not unfinished")
        finished = [self.notes[request_id].request for request_id in output.finished if known]
        self._check_state(scheduler, finished, output)
        if known:
            self.check_work(scheduler, output)
            self.check_victims(scheduler, output)
            self.check_swaps(scheduler, output)
        self._remember(scheduler)

    def on_update(self, scheduler: Scheduler, output: SchedulerOutput, finished: list[Request]) -> None:
        """Audit the commit of the step."""
        if self.begin(scheduler):
            self.check_tokens(scheduler, output, finished)
        self._check_state(scheduler, finished, SchedulerOutput())
        self._remember(scheduler)

    def on_recover(self, scheduler: Scheduler) -> None:
        """Audit the recovery from a step that failed."""
        if self.begin(scheduler):
            self.check_recovery(scheduler)
        self._check_state(scheduler, (), SchedulerOutput())
        self._remember(scheduler)

    def on_finish(self, scheduler: Scheduler, request: Request) -> None:
        """Audit a finish from outside."""
        self.begin(scheduler)
        self.check_end(scheduler, request)
        self.notes.pop(request.request_id, None)
        self.batch = [each for each in self.batch if each is not request]

    # The rules.

    def fail(self, rule: str, message: str) -> NoReturn:
        """Report that a rule is broken.

        Raises:
            InvariantError: always; "step 3, blocks: …".
        """
        raise InvariantError(f"step {max(self.step, 0)}, {rule}: {message}")

    def check_places(self, scheduler: Scheduler) -> None:
        """Rule "places": every unfinished request that was added has one place, and the counts agree.

        `running` and `waiting` together hold the requests of `notes`, each once, and no others. In the batch all are
        RUNNING, in the queue WAITING or SWAPPED. num_running, num_waiting and has_unfinished agree with that.

        Raises:
            InvariantError: they do not.
        """
        running, waiting = scheduler.running, scheduler.waiting
        for request in (*running, *waiting.values()):
            note = self.notes.get(request.request_id)
            if note is None or note.request is not request:
                self.fail("places", f"{request!r} is in batch or queue, and was never added or has finished")
        for request in running:
            if request.status is not RequestStatus.RUNNING:
                self.fail("places", f"{request!r} is in the batch")
        for request_id, request in waiting.items():
            if request.status not in (RequestStatus.WAITING, RequestStatus.SWAPPED) or request.request_id != request_id:
                self.fail("places", f"{request!r} is in the queue, as {request_id!r}")
        places = Counter([request.request_id for request in running] + list(waiting))
        for request_id, note in self.notes.items():
            if places[request_id] != 1:
                self.fail("places", f"{note.request!r} is {places[request_id]} times in batch and queue")
        counts = scheduler.num_running, scheduler.num_waiting, scheduler.has_unfinished
        if counts != (len(running), len(waiting), bool(self.notes)):
            self.fail("places", f"num_running, num_waiting and has_unfinished are {counts}: {places} are there")

    def check_end(self, scheduler: Scheduler, request: Request) -> None:
        """Rule "end": a finished request is in neither batch nor queue, holds nothing, and had cause to finish.

        The cause of FINISHED_CAPACITY is that its tokens need more blocks than the whole pool has; that of
        FINISHED_LENGTH, that it has max_tokens of output, or max_model_len tokens. The other statuses may come from
        outside and are not checked here.

        Raises:
            InvariantError: it has not, or it does.
        """
        status, needed = request.status, self.blocks_needed(scheduler, request)
        if not status.is_finished:
            self.fail("end", f"{request!r} has finished without a FINISHED status")
        queued = any(each is request for each in scheduler.running)
        if queued or scheduler.waiting.get(request.request_id) is request:
            self.fail("end", f"{request!r} is still in the batch or in the queue")
        if request.block_ids or request.host_block_ids:
            self.fail("end", f"{request!r} keeps blocks {request.block_ids}, CPU blocks {request.host_block_ids}")
        if status is RequestStatus.FINISHED_CAPACITY and needed <= scheduler.pool.num_blocks:
            self.fail("end", f"{request!r} needs {needed} blocks, and the pool has {scheduler.pool.num_blocks}")
        if status is RequestStatus.FINISHED_LENGTH and not _is_full(scheduler, request):
            self.fail("end", f"{request!r} has not all its tokens")

    def check_blocks(self, scheduler: Scheduler) -> None:
        """Rule "blocks": no block is lost, and none is counted wrong.

        num_free + num_used = num_blocks. Every id in the `block_ids` of a request in the batch or in the queue is one
        of the pool; over all these requests together it is listed as often as the block has references (`ref_count`);
        and num_used is the number of different blocks that are listed. The same holds for `host_block_ids` and the
        scheduler's `host_pool`, if it has one; without one, no request lists a CPU block.

        Raises:
            InvariantError: they do not. The message names a block, or the counts.
        """
        raise NotImplementedError(
            "phase 6, task 7: The auditor; read docs/en/phase-06-preemption/lab/02-the-auditor.md"
        )

    def check_holdings(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Rule "holdings": each request has the blocks that its status asks for.

        RUNNING: at least for its computed tokens and those that `output` has it compute; from `PagedScheduler` on, at
        most for all its tokens (earlier stages reserve more). No CPU blocks. WAITING: no blocks, no CPU blocks, and
        no computed tokens. SWAPPED: no blocks, at least one computed token, and CPU blocks for exactly those.

        Args:
            scheduler: the one that is watched.
            output: the step that was just scheduled; an empty one after a commit.

        Raises:
            InvariantError: one has more, or fewer.
        """
        raise NotImplementedError(
            "phase 6, task 7: The auditor; read docs/en/phase-06-preemption/lab/02-the-auditor.md"
        )

    def check_order(self, scheduler: Scheduler) -> None:
        """Rule "order": requests stand in the order of arrival.

        Through the batch, and on through the waiting queue, `arrival_index` grows from each request to the next; no two
        have the same. So no request was admitted before one that arrived earlier, and none was preempted before one
        that arrived later. A scheduler that is not `first_come` (phase 7) has another order, and nothing is checked.

        Raises:
            InvariantError: it does not. The message names two requests.
        """
        raise NotImplementedError(
            "phase 6, task 7: The auditor; read docs/en/phase-06-preemption/lab/02-the-auditor.md"
        )

    def check_work(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Rule "work": the step can be carried out, keeps to the limits, and makes progress.

        - `scheduled` and the keys of `num_scheduled_tokens` are the same requests in the same order, all of them in the
          batch. The batch has at most max_num_seqs.
        - Each computes at least one token, and at most the scheduler's `largest_chunk` of those that it has left to
          compute: all of them, for a scheduler that sets no limit. Unless the step has reached max_num_batched_tokens,
          each computes no fewer than that, and every request of the batch is scheduled.
        - The step has at most max_num_batched_tokens, unless it `has_outgrown_request`.
        - Progress: if `notes` has any request, a token is scheduled, or a request has finished.

        Raises:
            InvariantError: one of these is not so.
        """
        raise NotImplementedError(
            "phase 6, task 7: The auditor; read docs/en/phase-06-preemption/lab/02-the-auditor.md"
        )

    def check_victims(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Rule "victims": a preempted request is listed, had to be preempted, and lost nothing else.

        - Of `batch`, without the requests that have finished in this step (`output.finished`): `preempted` are those
          that are no longer in the scheduler's batch, each once. They were its last, and the last is named first.
        - If any request is preempted, none is admitted: all that is scheduled `was_running`.
        - The victim named last had to be preempted: its tokens need more blocks than are free now. (Unless a request
          has finished in this step: its blocks are free now, and were not.)
        - A victim has one preemption more than in `notes`, every other request as many. All have as many output tokens,
          and as many computed tokens; but a victim that is WAITING has none computed.

        Raises:
            InvariantError: one of these is not so.
        """
        raise NotImplementedError(
            "phase 6, task 7: The auditor; read docs/en/phase-06-preemption/lab/02-the-auditor.md"
        )

    def check_swaps(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Rule "swaps": the pairs to copy are the blocks that moved.

        - `swapped_out` has the requests that are SWAPPED, and were not SWAPPED in `notes`, and no others. Its pairs
          (block, CPU block) are the first of the blocks that the request had in `notes`, one for each of its
          `host_block_ids`, in order.
        - `swapped_in` has the requests that were SWAPPED in `notes` and are RUNNING, and no others. Its pairs (CPU
          block, block) are the CPU blocks that the request had in `notes`, and the first of its `block_ids`, in order.
        - A request that was SWAPPED and is not RUNNING is still SWAPPED, with the same CPU blocks.

        Raises:
            InvariantError: one of these is not so.
        """
        raise NotImplementedError(
            "phase 6, task 7: The auditor; read docs/en/phase-06-preemption/lab/02-the-auditor.md"
        )

    def check_tokens(self, scheduler: Scheduler, output: SchedulerOutput, finished: list[Request]) -> None:
        """Rule "tokens": the commit moved each request by what was scheduled, and finished those that are done.

        - A request of the step has as many computed tokens more than in `notes` as were scheduled. If these are all the
          tokens that it had, it has one token of output more; else, and if it was not scheduled, as many as before.
        - All of `scheduled` are requests of `notes`, the same objects, except those that were finished from outside in
          between: these are no longer in `notes`.
        - A request that got a token has finished if that is one of its stop tokens, and it does not ignore them, or if
          it has max_tokens of output, or max_model_len tokens. No other has finished. FINISHED_STOPPED are only those
          with a stop token.
        - `finished` are the requests of `scheduled` that have finished, in that order.

        Args:
            scheduler: the one that is watched.
            output: the step that was committed.
            finished: what `update_from_output` returned.

        Raises:
            InvariantError: one of these is not so.
        """
        raise NotImplementedError(
            "phase 6, task 7: The auditor; read docs/en/phase-06-preemption/lab/02-the-auditor.md"
        )

    def check_recovery(self, scheduler: Scheduler) -> None:
        """Rule "recovery": after a step that failed, every unfinished request waits, and starts again.

        The batch is empty. Every request of `notes` is WAITING, with no computed tokens and as many output tokens as in
        `notes`. It has one preemption more if it was RUNNING there, and else as many. With the rules "blocks" and
        "holdings" it follows that all blocks and CPU blocks are free.

        Raises:
            InvariantError: one of these is not so.
        """
        if scheduler.running:
            self.fail("recovery", f"{scheduler.running} are in the batch")
        for note in self.notes.values():
            request = note.request
            expected = 0, note.num_output_tokens, note.num_preemptions + (note.status is RequestStatus.RUNNING)
            got = request.num_computed_tokens, len(request.output_token_ids), request.num_preemptions
            if request.status is not RequestStatus.WAITING or got != expected:
                self.fail("recovery", f"{request!r}: computed, generated, preemptions are {got}, should be {expected}")

    # What the rules share.

    def blocks_needed(self, scheduler: Scheduler, request: Request) -> int:
        """Blocks that hold all tokens of a request."""
        return blocks_for(request.num_tokens, scheduler.pool.block_size)

    def was_running(self, request: Request) -> bool:
        """Whether the request is RUNNING in `notes`: it has not just been admitted."""
        note = self.notes.get(request.request_id)
        return note is not None and note.status is RequestStatus.RUNNING

    def has_outgrown_request(self, output: SchedulerOutput, budget: int) -> bool:
        """Whether a step of more than `budget` tokens is the one exception that may be so large.

        It has exactly one preempted request with more than `budget` tokens to compute, for which no step would be large
        enough. All the others together have fewer than `budget`, and none of them has just been admitted.
        """
        tokens = output.num_scheduled_tokens
        large = [request for request in output.scheduled if tokens[request.request_id] > budget]
        if len(large) != 1 or not large[0].num_preemptions:
            return False
        others = [request for request in output.scheduled if request is not large[0]]
        return sum(tokens[each.request_id] for each in others) < budget and all(map(self.was_running, others))

    def begin(self, scheduler: Scheduler) -> bool:
        """Note the state, if this scheduler has not been watched yet. Returns whether it has."""
        if self._watched is scheduler:
            return True
        self._watched, self.step = scheduler, -1
        self._remember(scheduler)
        return False

    def _remember(self, scheduler: Scheduler) -> None:
        """Rewrite the notes."""
        self.batch = list(scheduler.running)
        self.notes = {request.request_id: _note(request) for request in (*self.batch, *scheduler.waiting.values())}

    def _check_state(self, scheduler: Scheduler, finished: Iterable[Request], output: SchedulerOutput) -> None:
        """The rules that hold after every call, once `finished` have finished."""
        for request in finished:
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
