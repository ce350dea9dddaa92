"""The auditor for a scheduler that overlaps: what is on its way is counted once, and every token reaches its request.

It keeps its own account of the step in flight, adds one rule to those of `SharingAuditor`, and shows the other rules a
step without overlap: copies of the requests in which each placeholder is a token. Given, not built. Pure standard
library.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from typing import Final

from minicache.request import Request, RequestId, RequestStatus
from minicache.scheduler.audit_sharing import SharingAuditor
from minicache.scheduler.base import Scheduler
from minicache.scheduler.output import SchedulerOutput

UNKNOWN: Final = -1
"""The token that stands for a placeholder in the copies."""


class AsyncAuditor(SharingAuditor):
    """`SharingAuditor`, for an `AsyncChunkedScheduler`. It must watch from the first step on.

    | rule | after | holds |
    |---|---|---|
    | flight | every call | a running request whose token is on its way has a placeholder, and no other has one |
    | flight | the commit | each token goes to the request that it was generated for, and moves no other counter |
    """

    def __init__(self) -> None:
        super().__init__()
        self._last: SchedulerOutput | None = None  # the step scheduled last, if it is outstanding and not counted
        self._awaited: dict[RequestId, Request] = {}  # those that get a token from the step before that
        self._token_ids: Mapping[RequestId, int] = {}  # what the commit was given
        self._unknown: list[tuple[Request, int]] = []  # blocks, by their index, that the last step fills: with what?

    def on_schedule(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Audit the step that was just scheduled: the notes count the one before, if it is outstanding."""
        self._count()
        running = [each for each in scheduler.running if self._awaited.get(each.request_id) is each]
        victims = [each for each in scheduler.waiting.values() if self._awaited.get(each.request_id) is each]
        self.check_flight(scheduler)
        self.audit_as_if(scheduler, output, {each.request_id: [UNKNOWN] for each in running + victims})
        self._last, self._unknown = output, []
        block_size = scheduler.pool.block_size
        for request in running:
            place = request.num_tokens // block_size  # of the placeholder
            if request.request_id in output.num_scheduled_tokens:
                self.contents.pop(request.block_ids[place], None)
                if (request.num_tokens + 1) % block_size == 0:
                    self._unknown.append((request, place))

    def on_tokens(self, scheduler: Scheduler, output: SchedulerOutput, token_ids: Mapping[RequestId, int]) -> None:
        """Note what the commit is given."""
        self._token_ids = token_ids

    def on_update(self, scheduler: Scheduler, output: SchedulerOutput, finished: list[Request]) -> None:
        """Audit the commit. Blocks whose last token was unknown are tracked from now on."""
        if output is self._last:  # no step was scheduled since
            self._count()
        for request, place in self._unknown:
            if self.was_running(request) and not request.status.is_finished:
                tokens = tuple(request.token_ids(0, (place + 1) * scheduler.pool.block_size))
                self.contents[request.block_ids[place]] = 0, request.cache_salt, request.adapter, tokens
        self._unknown = []
        super().on_update(scheduler, output, finished)
        self._awaited = {}
        self.check_flight(scheduler)

    def on_recover(self, scheduler: Scheduler) -> None:
        """Audit the recovery: nothing is on its way."""
        self._last, self._awaited, self._unknown = None, {}, []
        super().on_recover(scheduler)
        self.check_flight(scheduler)

    def check_flight(self, scheduler: Scheduler) -> None:
        """Rule "flight": a running request has a placeholder if its token is on its way; no other request has one.

        Raises:
            InvariantError: it has none, or too many.
        """
        for request in (*scheduler.running, *scheduler.waiting.values()):
            running = request.status is RequestStatus.RUNNING
            if request.num_placeholders != (running and self._awaited.get(request.request_id) is request):
                self.fail("flight", f"{request!r} has {request.num_placeholders} placeholders")

    def check_work(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Rule "work"; but a request whose last token is on its way computes nothing, and may be all that is left."""
        capacity = scheduler.pool.num_blocks * scheduler.pool.block_size
        longest = min(scheduler.max_model_len or capacity + 1, capacity + 1)
        over = [
            request
            for request in scheduler.running
            if request.output_token_ids[-1:] == [UNKNOWN]
            and (len(request.output_token_ids) >= request.max_tokens or request.num_tokens >= longest)
        ]
        if beyond := [each for each in over if each.request_id in output.num_scheduled_tokens]:
            self.fail("work", f"{beyond} compute a token, and their last one is on its way")
        if len(scheduler.running) > scheduler.max_num_seqs:
            self.fail(
                "work", f"{len(scheduler.running)} requests in the batch, max_num_seqs is {scheduler.max_num_seqs}"
            )
        if over and not output.scheduled:
            return
        seen = copy(scheduler)
        seen.running = [request for request in scheduler.running if request not in over]
        super().check_work(seen, output)

    def check_tokens(self, scheduler: Scheduler, output: SchedulerOutput, finished: list[Request]) -> None:
        """Rules "tokens" and "flight", of a step that was counted before.

        Each of its requests that is owed a token has this one more than in `notes`: the one that the commit was given
        for it. Nothing else has changed. It has finished if that is its last.

        Raises:
            InvariantError: one of these is not so.
        """
        over = []
        for note in self.notes.values():
            request, owed = note.request, self._awaited.get(note.request.request_id) is note.request
            expected = note.num_computed_tokens, note.num_output_tokens + owed, note.num_preemptions
            got = request.num_computed_tokens, len(request.output_token_ids), request.num_preemptions
            if got != expected:
                self.fail("flight", f"{request!r}: computed, generated, preemptions are {got}, should be {expected}")
            token = request.output_token_ids[-1] if owed else None
            if owed and token != self._token_ids.get(request.request_id):
                self.fail("flight", f"{request!r} has got {token}, which was not generated for it")
            stopped = token in request.stop_token_ids and not request.ignore_eos
            full = len(request.output_token_ids) >= request.max_tokens or request.num_tokens == scheduler.max_model_len
            outgrown = (
                self._last is not None and request.num_tokens > scheduler.pool.num_blocks * scheduler.pool.block_size
            )
            causes = (
                (stopped, RequestStatus.FINISHED_STOPPED),
                (full, RequestStatus.FINISHED_LENGTH),
                (outgrown, RequestStatus.FINISHED_CAPACITY),
            )
            expected_status = next((status for cause, status in causes if cause and owed), note.status)
            if request.status is not expected_status:
                self.fail("tokens", f"{request!r} should be {expected_status.name}")
            if request.status.is_finished:
                over.append(request)
        if sorted(map(id, finished)) != sorted(map(id, over)):
            self.fail("tokens", f"{finished} are returned, and {over} have finished")

    def _count(self) -> None:
        """Count the step that was scheduled last, in the notes: its tokens are computed, and its requests owed one."""
        if self._last is None:
            return
        self._awaited = {}
        for request, num_new in zip(self._last.scheduled, self._last.num_scheduled_tokens.values(), strict=True):
            note = self.notes.get(request.request_id)
            if note is None or note.request is not request:  # finished since
                continue
            num_computed = note.num_computed_tokens + num_new
            self.notes[request.request_id] = replace(note, num_computed_tokens=num_computed)
            if num_computed == note.num_tokens:
                self._awaited[request.request_id] = request
        self._last = None
