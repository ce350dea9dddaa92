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
        requests = [*scheduler.running, *scheduler.waiting.values()]
        self._check_pool("block", scheduler.pool, (request.block_ids for request in requests))
        host_pool: BlockPool | None = getattr(scheduler, "host_pool", None)
        if host_pool is not None:
            self._check_pool("host block", host_pool, (request.host_block_ids for request in requests))
        elif any(request.host_block_ids for request in requests):
            self.fail("blocks", "a request lists host blocks, and there is no host pool")

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
        block_size, reserves = scheduler.pool.block_size, not isinstance(scheduler, PagedScheduler)
        for request in scheduler.running:
            num_new = output.num_scheduled_tokens.get(request.request_id, 0)
            least = blocks_for(request.num_computed_tokens + num_new, block_size)
            most = blocks_for(request.num_tokens, block_size)
            held = len(request.block_ids)
            if held < least or (held > most and not reserves) or request.host_block_ids:
                hosted = len(request.host_block_ids)
                self.fail("holdings", f"{request!r} computes {num_new} with {held} blocks and {hosted} on the host")
        for request in scheduler.waiting.values():
            swapped = request.status is RequestStatus.SWAPPED
            hosted = blocks_for(request.num_computed_tokens, block_size) if swapped else 0
            wrong = bool(request.num_computed_tokens) != swapped or len(request.host_block_ids) != hosted
            if wrong or request.block_ids:
                blocks = f"{len(request.block_ids)} blocks and {len(request.host_block_ids)} on the host"
                self.fail("holdings", f"{request!r} waits with {blocks}")

    def check_order(self, scheduler: Scheduler) -> None:
        """Rule "order": who arrived earlier is ahead.

        In the batch, and behind it in the line, `arrival_index` grows: so nobody was admitted before somebody who
        arrived earlier, and nobody preempted before somebody who arrived later. A scheduler that is not `first_come`
        (phase 7) has an order of its own: it is let be.

        Raises:
            InvariantError: it does not. The message names two requests.
        """
        if not scheduler.first_come:
            return
        ahead = None
        for request in (*scheduler.running, *scheduler.waiting.values()):
            if ahead is not None and ahead.arrival_index >= request.arrival_index:
                self.fail("order", f"{ahead!r} is ahead of {request!r}, which arrived before it")
            ahead = request

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
        tokens, budget = output.num_scheduled_tokens, scheduler.max_num_batched_tokens
        total = sum(tokens.values())
        batch = {request.request_id: request for request in scheduler.running}
        if [request.request_id for request in output.scheduled] != list(tokens):
            self.fail("work", f"scheduled is {output.scheduled}, num_scheduled_tokens {tokens}")
        if len(batch) > scheduler.max_num_seqs:
            self.fail("work", f"{len(batch)} requests in the batch, max_num_seqs is {scheduler.max_num_seqs}")
        for request in output.scheduled:
            num_new = tokens[request.request_id]
            left = scheduler.largest_chunk(request.num_tokens - request.num_computed_tokens)
            if batch.get(request.request_id) is not request:
                self.fail("work", f"{request!r} is scheduled, and not in the batch")
            if not 1 <= num_new <= left or (num_new < left and total < budget):
                self.fail("work", f"{request!r} computes {num_new} tokens, and could compute {left}")
        if (idle := batch.keys() - tokens.keys()) and total < budget:
            self.fail("work", f"{sorted(map(repr, idle))} are in the batch, and the step has nothing for them")
        if total > budget and not self.has_outgrown_request(output, budget):
            self.fail("work", f"{total} tokens, max_num_batched_tokens is {budget}")
        if self.notes and not output.scheduled and not output.finished:
            self.fail("work", f"no progress: nothing is scheduled, and {len(self.notes)} requests have not ended")

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
        victims, still = output.preempted, {request.request_id for request in scheduler.running}
        batch = [request for request in self.batch if request.request_id not in output.finished]
        gone = [request for request in batch if request.request_id not in still]
        if victims != [request.request_id for request in reversed(gone)]:
            self.fail("victims", f"preempted is {victims}; {[each.request_id for each in gone]} have left the batch")
        if gone != batch[len(batch) - len(gone) :]:
            self.fail("victims", f"{victims} were preempted, and newer ones of the batch were not")
        if victims and (new := [request for request in output.scheduled if not self.was_running(request)]):
            self.fail("victims", f"{new} are admitted in a step that preempts {victims}")
        if gone and not output.finished:
            needed, free = blocks_for(gone[0].num_tokens, scheduler.pool.block_size), scheduler.pool.num_free
            if needed <= free:
                self.fail("victims", f"{gone[0]!r} needs {needed} blocks, and {free} are free without it")
        for request_id, note in self.notes.items():
            request, victim = note.request, request_id in victims
            kept = 0 if victim and request.status is RequestStatus.WAITING else note.num_computed_tokens
            expected = kept, note.num_output_tokens, note.num_preemptions + victim
            got = request.num_computed_tokens, len(request.output_token_ids), request.num_preemptions
            if got != expected:
                self.fail("victims", f"{request!r}: computed, generated, preemptions are {got}, should be {expected}")

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
        out, back = {}, {}
        for request_id, note in self.notes.items():
            request = note.request
            if note.status is RequestStatus.SWAPPED:
                if request.status is RequestStatus.RUNNING:
                    back[request_id] = list(zip(note.host_block_ids, request.block_ids, strict=False))
                elif (request.status, tuple(request.host_block_ids)) != (note.status, note.host_block_ids):
                    self.fail("swaps", f"{request!r} was swapped out in {note.host_block_ids}, and is no more")
            elif request.status is RequestStatus.SWAPPED:
                out[request_id] = list(zip(note.block_ids, request.host_block_ids, strict=False))
        for name, got, expected in (("out", output.swapped_out, out), ("in", output.swapped_in, back)):
            if got != expected:
                self.fail("swaps", f"swapped_{name} is {got}, should be {expected}")

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
        # By object: an id may have a new owner since the step was scheduled.
        work = dict(zip(map(id, output.scheduled), output.num_scheduled_tokens.values(), strict=True))
        for note in self.notes.values():
            request, num_new = note.request, work.get(id(note.request), 0)
            num_computed = note.num_computed_tokens + num_new
            caught_up = num_new > 0 and num_computed == note.num_tokens
            expected = num_computed, note.num_output_tokens + caught_up
            got = request.num_computed_tokens, len(request.output_token_ids)
            if got != expected:
                self.fail("tokens", f"{request!r}: computed and generated are {got}, should be {expected}")
            stopped = caught_up and not request.ignore_eos and request.output_token_ids[-1] in request.stop_token_ids
            done = caught_up and (stopped or _is_full(scheduler, request))
            if done != request.status.is_finished or (request.status is RequestStatus.FINISHED_STOPPED) > stopped:
                self.fail("tokens", f"{request!r} {'has' if done else 'has not'} reached an end, stop token: {stopped}")
        known = {id(note.request) for note in self.notes.values()}
        for request in output.scheduled:
            if id(request) not in known and not request.status.is_finished:
                self.fail("tokens", f"{request!r} is reported, and was never added")
        over = [request for request in output.scheduled if id(request) in known and request.status.is_finished]
        if list(map(id, ended)) != list(map(id, over)):
            self.fail("tokens", f"{ended} are returned, and {over} have ended")

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

    def _check_pool(self, name: str, pool: BlockPool, tables: Iterable[list[int]]) -> None:
        owners = Counter(block_id for table in tables for block_id in table)
        for block_id, count in owners.items():
            if not 0 <= block_id < pool.num_blocks:
                self.fail("blocks", f"{name} {block_id} is listed, and the pool has {pool.num_blocks}")
            if pool.ref_count(block_id) != count:
                self.fail("blocks", f"{name} {block_id} has {pool.ref_count(block_id)} owners, and {count} list it")
        if pool.num_used != len(owners) or pool.num_free + pool.num_used != pool.num_blocks:
            counts = f"{pool.num_free} free, {pool.num_used} used, {pool.num_blocks} in all"
            self.fail("blocks", f"{name}s: {counts}, and requests list {len(owners)}")


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
