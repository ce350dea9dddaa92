"""What must hold after every step, whatever the policy: the auditors' rules without those of one order or another.

Pure standard library.
"""

from __future__ import annotations

from typing import Final

from minicache.request import Request, RequestStatus
from minicache.scheduler.audit_sharing import SharingAuditor
from minicache.scheduler.base import Scheduler
from minicache.scheduler.output import SchedulerOutput

EVERY: Final = 64
"""Calls after which the references of all blocks are counted again, though the batch is the same."""


class PolicyAuditor(SharingAuditor):
    """`SharingAuditor`, for a scheduler that may order, chunk and preempt as it likes.

    | rule | after | holds |
    |---|---|---|
    | order | | nothing |
    | work | `schedule` | the step computes something, within the limits on requests and tokens |
    | victims | `schedule` | those that have left the batch are listed as preempted, and keep what they generated |

    All other rules are the same: they say whether the step can be computed, and whether a request is lost. Two of them
    are quicker: "writes" looks at blocks with several references only, and "blocks", whose breaches stay, is checked
    after calls that change who is in the batch, and otherwise every `EVERY` calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self._num_unchecked = 0
        self._batch_then: list[Request] = []

    def check_blocks(self, scheduler: Scheduler) -> None:
        """Rule "blocks", as `Auditor.check_blocks`, when there is something to find.

        Raises:
            InvariantError: a block is lost, or counted wrong.
        """
        self._num_unchecked += 1
        if self._num_unchecked >= EVERY or scheduler.running != self._batch_then:
            super().check_blocks(scheduler)
            self._num_unchecked, self._batch_then = 0, list(scheduler.running)

    def check_copies(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Rule "writes", the copies, as `SharingAuditor.check_copies`, if any block was copied or replaced.

        Raises:
            InvariantError: a block was replaced without a copy, or copied elsewhere.
        """
        tables = ((self.notes.get(request.request_id), request.block_ids) for request in scheduler.running)
        kept = all(note is None or note.block_ids == tuple(ids[: len(note.block_ids)]) for note, ids in tables)
        if output.blocks_to_copy or not kept:
            super().check_copies(scheduler, output)

    def check_writes(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Rule "writes", as `SharingAuditor.check_writes`, if a block is written that has several references.

        Raises:
            InvariantError: a request writes into a block that another one has.
        """
        block_size, ref_count = scheduler.pool.block_size, scheduler.pool.ref_count
        for request, num_new in zip(output.scheduled, output.num_scheduled_tokens.values(), strict=True):
            first, end = request.num_computed_tokens, request.num_computed_tokens + num_new
            written = request.block_ids[first // block_size : -(-end // block_size)]
            if any(ref_count(block_id) != 1 for block_id in written):
                super().check_writes(scheduler, output)
                return

    def check_order(self, scheduler: Scheduler) -> None:
        """Any order will do."""

    def check_work(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Rule "work": the step can be carried out, keeps to the limits, and makes progress.

        Raises:
            InvariantError: one of these is not so.
        """
        tokens, budget = output.num_scheduled_tokens, scheduler.max_num_batched_tokens
        if [request.request_id for request in output.scheduled] != list(tokens):
            self.fail("work", f"scheduled is {output.scheduled}, num_scheduled_tokens {tokens}")
        batch = {request.request_id: request for request in scheduler.running}
        if len(batch) > scheduler.max_num_seqs:
            self.fail("work", f"{len(batch)} requests in the batch, max_num_seqs is {scheduler.max_num_seqs}")
        for request in output.scheduled:
            num_new, left = tokens[request.request_id], request.num_tokens - request.num_computed_tokens
            if batch.get(request.request_id) is not request:
                self.fail("work", f"{request!r} is scheduled, and not in the batch")
            if not 1 <= num_new <= left:
                self.fail("work", f"{request!r} computes {num_new} tokens, and has {left} left to compute")
        total = sum(tokens.values())
        if total > budget and not self.has_outgrown_request(output, budget):
            self.fail("work", f"{total} tokens, max_num_batched_tokens is {budget}")
        if self.notes and not output.scheduled and not output.finished:
            self.fail("work", f"no progress: nothing is scheduled, and {len(self.notes)} requests are unfinished")

    def check_victims(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Rule "victims": a preempted request is listed, once, and lost nothing but its memory.

        Raises:
            InvariantError: one did, or is not.
        """
        still = {request.request_id for request in scheduler.running}
        gone = [request.request_id for request in self.batch if request.request_id not in still]
        gone = [request_id for request_id in gone if request_id not in output.finished]
        if len(set(output.preempted)) != len(output.preempted) or set(gone) != set(output.preempted):
            self.fail("victims", f"preempted is {output.preempted}; {gone} have left the batch")
        for request_id, note in self.notes.items():
            request, victim = note.request, request_id in output.preempted
            kept = 0 if victim and request.status is RequestStatus.WAITING else note.num_computed_tokens
            expected = kept, note.num_output_tokens, note.num_preemptions + victim
            got = request.num_computed_tokens, len(request.output_token_ids), request.num_preemptions
            if got != expected:
                self.fail("victims", f"{request!r}: computed, generated, preemptions are {got}, should be {expected}")
