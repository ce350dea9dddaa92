"""The auditor for schedulers that speculate: draft tokens cost no other request anything, and leave nothing behind.

It adds a rule to those of `SharingAuditor`, and shows the other rules a step without speculation: when it is scheduled,
copies of the requests that have generated their draft tokens; when it is committed, the accepted ones. Given, not
built. Pure standard library.
"""

from __future__ import annotations

from dataclasses import replace

from minicache.memory.blocks import blocks_for
from minicache.request import Request
from minicache.scheduler.audit_sharing import SharingAuditor, contents_of
from minicache.scheduler.base import Scheduler
from minicache.scheduler.output import SchedulerOutput


class SpeculationAuditor(SharingAuditor):
    """`SharingAuditor`, for a `SpeculativeScheduler`.

    | rule | after | holds |
    |---|---|---|
    | drafts | `schedule` | only requests in decode have some, no more than can be output; none was preempted for them |
    | drafts | the commit | no more are accepted than there were, and no request continues after a stop token |
    """

    def __init__(self) -> None:
        super().__init__()
        self._drafting: list[tuple[Request, int, int, list[int]]] = []  # with num_tokens, draft tokens, blocks

    def on_schedule(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Audit the step that was just scheduled."""
        drafts = output.draft_token_ids
        self._drafting = [
            (request, request.num_tokens, len(drafts[request.request_id]), list(request.block_ids))
            for request in output.scheduled
            if request.request_id in drafts
        ]
        self.check_drafts(scheduler, output)
        self.audit_as_if(scheduler, output, drafts)
        block_size = scheduler.pool.block_size
        for _, num_tokens, _, block_ids in self._drafting:
            for block_id in block_ids[num_tokens // block_size :]:  # its contents are unknown until the commit
                self.contents.pop(block_id, None)

    def on_update(self, scheduler: Scheduler, output: SchedulerOutput, finished: list[Request]) -> None:
        """Audit the commit. Blocks that accepted tokens have filled are tracked from now on."""
        block_size, scheduled = scheduler.pool.block_size, output.num_scheduled_tokens
        for request, num_tokens, num_drafts, block_ids in self._drafting:
            note = self.notes.get(request.request_id)
            if note is None or note.request is not request:  # finished from outside
                continue
            num_accepted = scheduled[request.request_id] - 1
            accepted = request.token_ids(num_tokens, num_tokens + num_accepted)
            if not 0 <= num_accepted <= num_drafts:
                self.fail("drafts", f"{request!r}: {num_accepted} of {num_drafts} draft tokens were accepted")
            if not request.ignore_eos and request.stop_token_ids.intersection(accepted):
                self.fail("drafts", f"{request!r} continues after a stop token among {accepted}")
            self.notes[request.request_id] = replace(note, num_output_tokens=note.num_output_tokens + num_accepted)
            for place in range(num_tokens // block_size, (num_tokens + num_accepted) // block_size):
                self.contents[block_ids[place]] = contents_of(request, 0, (place + 1) * block_size)
        self._drafting = []
        super().on_update(scheduler, output, finished)

    def on_recover(self, scheduler: Scheduler) -> None:
        """Audit the recovery."""
        self._drafting = []
        super().on_recover(scheduler)

    def check_drafts(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Rule "drafts", of a step that was just scheduled.

        Raises:
            InvariantError: a request has draft tokens and was not in decode, with a token that it has generated since
                its admission, or more of them than leave room for one more token within max_tokens and max_model_len;
                or the last victim's blocks would have been free without draft tokens.
        """
        longest = scheduler.max_model_len
        num_blocks = 0
        for request, num_tokens, num_drafts, block_ids in self._drafting:
            gained = num_tokens - request.num_prompt_tokens > request.num_outputs_at_admission
            in_decode = self.was_running(request) and gained and num_tokens - request.num_computed_tokens == 1
            too_many = len(request.output_token_ids) + num_drafts + 1 > request.max_tokens
            if not in_decode or too_many or (longest is not None and num_tokens + num_drafts + 1 > longest):
                self.fail("drafts", f"{request!r} has {num_drafts} draft tokens; in decode: {in_decode}")
            num_blocks += len(block_ids) - blocks_for(num_tokens, scheduler.pool.block_size)
        if output.preempted and not output.finished and output.preempted[-1] in self.notes:
            victim = self.notes[output.preempted[-1]].request
            needed = blocks_for(victim.num_tokens, scheduler.pool.block_size)
            if needed <= scheduler.pool.num_free + num_blocks:
                self.fail("drafts", f"{victim!r} is preempted, and draft tokens have {num_blocks} blocks")
