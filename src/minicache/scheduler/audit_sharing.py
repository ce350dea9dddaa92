"""The auditor for schedulers that share blocks: who may read what, and who may write where.

It adds three rules to those of phase 6's `Auditor`, and knows forks. It trusts no hash: it keeps a book of its own
about what every block holds, token by token, and compares. Given, not built. Pure standard library.
"""

from __future__ import annotations

from dataclasses import replace

from minicache.request import Request, RequestId, RequestStatus
from minicache.scheduler.audit import Auditor, Note
from minicache.scheduler.base import Scheduler
from minicache.scheduler.output import SchedulerOutput

Contents = tuple[str | None, str | None, tuple[int, ...]]
"""What a full block holds: salt, adapter, and all tokens from the first of the sequence to the last of the block."""


class SharingAuditor(Auditor):
    """`Auditor`, for a scheduler with a prefix cache or forks.

    | rule | after | holds |
    |---|---|---|
    | found | `schedule` | whose tokens were found has them in blocks that hold these very tokens, and not all of them |
    | lost | `schedule` | nobody relies on a block that a step was to fill whose report never came |
    | writes | `schedule` | nobody writes into a block that another request has; copies go where they are needed |

    One block may be written and read in the same step, by two requests: who joins the batch in that step may find what
    the step computes. If that step's report never comes, its tokens may be taken back: they then count as computed no
    more, from the first block on that was lost. And all of them may be computed in one step, whatever its budget.

    The time that it takes grows with the tokens of unfinished requests.

    Attributes:
        contents: block → what it holds, for full blocks that were computed while the auditor watched.
        fresh: ids of those that have joined the batch since the last report.
        unreported: block → who was to fill it in the last step, until that is reported.
        lost: blocks that were to be filled in steps that were not, and have not been filled since.
        taken_back: ids of those who count fewer tokens as computed for it, until the next report.
    """

    def __init__(self) -> None:
        super().__init__()
        self.contents: dict[int, Contents] = {}
        self.fresh: set[RequestId] = set()
        self.unreported: dict[int, RequestId] = {}
        self.lost: set[int] = set()
        self.taken_back: set[RequestId] = set()

    def on_fork(self, scheduler: Scheduler, parent: Request, child: Request) -> None:
        """Know the twin from now on; it must have what its parent has, or nothing."""
        shared = child.block_ids == parent.block_ids[: len(child.block_ids)]
        if not shared or child.num_computed_tokens > parent.num_computed_tokens:
            self.fail("found", f"{child!r} is forked from {parent!r}, and has other blocks or more tokens")
        both = child.num_computed_tokens
        if child.token_ids(0, both) != parent.token_ids(0, both):
            self.fail("found", f"{child!r} counts tokens as computed that {parent!r} does not have")
        self.notes[child.request_id] = Note(
            child,
            child.status,
            child.num_computed_tokens,
            len(child.output_token_ids),
            child.num_preemptions,
            tuple(child.block_ids),
            tuple(child.host_block_ids),
        )
        self.batch = list(scheduler.running)
        self.check_places(scheduler)
        self.check_blocks(scheduler)

    def on_finish(self, scheduler: Scheduler, request: Request) -> None:
        """Audit an end from outside. What a step was to compute for the request may never be computed."""
        self._lose({block_id for block_id, writer in self.unreported.items() if writer == request.request_id})
        super().on_finish(scheduler, request)
        self._take_back(scheduler)

    def on_schedule(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Audit the step: first what was found and lost, then all else, then what it writes."""
        known = {request.request_id for request in self.batch} - self.fresh
        self._lose(set(self.unreported))
        if self.step >= 0 or self.notes:
            self._take_back(scheduler)
            self.check_found(scheduler)
            self.check_copies(scheduler, output)
        super().on_schedule(scheduler, output)
        self.fresh = {request.request_id for request in scheduler.running} - known
        self.check_writes(scheduler, output)
        for request_id, pairs in output.swapped_out.items():  # before the model runs
            self.check_lost(scheduler, scheduler.waiting[request_id], [block_id for block_id, _ in pairs])
        self._write(scheduler, output)
        for request in output.scheduled:
            self.check_lost(scheduler, request, request.block_ids)

    def on_update(self, scheduler: Scheduler, output: SchedulerOutput, ended: list[Request]) -> None:
        """Audit the report: what was found has been computed by now."""
        super().on_update(scheduler, output, ended)
        self.fresh, self.unreported, self.taken_back = set(), {}, set()

    def check_order(self, scheduler: Scheduler) -> None:
        """Rule "order", where families arrive together: those with one `arrival_index` may stand in any order.

        Raises:
            InvariantError: somebody is ahead of one that arrived earlier.
        """
        ahead = None
        for request in (*scheduler.running, *scheduler.waiting.values()) if scheduler.first_come else ():
            if ahead is not None and ahead.arrival_index > request.arrival_index:
                self.fail("order", f"{ahead!r} is ahead of {request!r}, which arrived before it")
            ahead = request

    def check_found(self, scheduler: Scheduler) -> None:
        """Rule "found": what an admitted request need not compute lies in its blocks, and is not all that it has.

        The notes are brought up to date: for the other rules the tokens that were found were computed before.

        Raises:
            InvariantError: it does not.
        """
        block_size = scheduler.pool.block_size
        for request in scheduler.running:
            note = self.notes.get(request.request_id)
            if note is None or note.status is not RequestStatus.WAITING:
                continue
            num_found = request.num_computed_tokens
            if num_found % block_size or num_found >= request.num_tokens:
                self.fail("found", f"{request!r} has {num_found} tokens found: whole blocks, and one left to compute")
            for place in range(num_found // block_size):
                got, block_id = self.contents.get(request.block_ids[place]), request.block_ids[place]
                if got != _contents(request, (place + 1) * block_size) and not self._is_due(scheduler, request, place):
                    self.fail("found", f"block {block_id} does not hold what {request!r} reads in it: {got}")
            self.notes[request.request_id] = replace(note, num_computed_tokens=num_found)

    def check_lost(self, scheduler: Scheduler, request: Request, block_ids: list[int]) -> None:
        """Rule "lost": the full blocks of what a request counts as computed have been filled.

        Args:
            scheduler: the one that is watched.
            request: who counts on them.
            block_ids: where its tokens are, or were until they were swapped out.

        Raises:
            InvariantError: a step was to fill one of them, its report never came, and no step has filled it since.
        """
        num_full = request.num_computed_tokens // scheduler.pool.block_size
        if self.lost and (lost := self.lost.intersection(block_ids[:num_full])):
            self.fail("lost", f"{request!r} counts on blocks {sorted(lost)}, which a lost step was to fill")

    def check_copies(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Rule "writes", the copies: each goes from a block that a request had to the one that it has in its place.

        Raises:
            InvariantError: one does not.
        """
        moved = set()
        for request in scheduler.running:
            note = self.notes.get(request.request_id)
            if note is not None and note.status is RequestStatus.RUNNING:
                pairs = zip(note.block_ids, request.block_ids, strict=False)
                moved |= {(old, new) for old, new in pairs if old != new}
        if set(output.blocks_to_copy) != moved or len(output.blocks_to_copy) != len(moved):
            self.fail("writes", f"blocks_to_copy is {output.blocks_to_copy}, and {sorted(moved)} were replaced")

    def check_writes(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Rule "writes": nobody writes into a block that another request has, unless that one has just found it.

        Raises:
            InvariantError: somebody does.
        """
        block_size = scheduler.pool.block_size
        owners: dict[int, list[tuple[Request, int]]] = {}
        for request in scheduler.running:
            for place, block_id in enumerate(request.block_ids):
                owners.setdefault(block_id, []).append((request, place))
        for request, num_new in zip(output.scheduled, output.num_scheduled_tokens.values(), strict=True):
            first, end = request.num_computed_tokens, request.num_computed_tokens + num_new
            for block_id in request.block_ids[first // block_size : -(-end // block_size)]:
                for other, place in owners[block_id]:
                    reads = (place + 1) * block_size <= other.num_computed_tokens
                    if other is not request and not (other.request_id in self.fresh and reads):
                        self.fail("writes", f"{request!r} writes into block {block_id}, which {other!r} has too")

    def has_outgrown_request(self, output: SchedulerOutput, budget: int) -> bool:
        """As `Auditor.has_outgrown_request`; or tokens were taken back, and nobody is admitted beside."""
        taken_back = self.taken_back.intersection(output.num_scheduled_tokens)
        if taken_back and all(map(self.was_running, output.scheduled)):
            return True
        return super().has_outgrown_request(output, budget)

    def _lose(self, block_ids: set[int]) -> None:
        """Strike out what a step was to fill, and may never fill."""
        self.lost |= block_ids
        for block_id in block_ids:
            del self.unreported[block_id]
            self.contents.pop(block_id, None)

    def _take_back(self, scheduler: Scheduler) -> None:
        """Bring the notes of those up to date who count fewer tokens as computed, if they had cause to.

        They count none any more from a block on that was lost. Who counts fewer for another reason fails other rules.
        """
        for note in list(self.notes.values()):
            request, block_size = note.request, scheduler.pool.block_size
            place, rest = divmod(request.num_computed_tokens, block_size)
            fewer = note.status is RequestStatus.RUNNING and request.num_computed_tokens < note.num_computed_tokens
            if fewer and not rest and note.block_ids[place] in self.lost:
                self.notes[request.request_id] = replace(note, num_computed_tokens=request.num_computed_tokens)
                self.taken_back.add(request.request_id)

    def _is_due(self, scheduler: Scheduler, reader: Request, place: int) -> bool:
        """Whether another request of the batch, which has the same tokens so far, has yet to fill this block."""
        end = (place + 1) * scheduler.pool.block_size
        block_id, wanted = reader.block_ids[place], _contents(reader, end)
        return any(
            other is not reader
            and other.num_tokens >= end > other.num_computed_tokens
            and other.block_ids[place : place + 1] == [block_id]
            and _contents(other, end) == wanted
            for other in scheduler.running
        )

    def _write(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Note what the blocks hold when the step has been computed."""
        block_size = scheduler.pool.block_size
        for source, target in output.blocks_to_copy:
            self.contents.pop(target, None)
            self.lost.discard(target)
            if source in self.contents:
                self.contents[target] = self.contents[source]
            elif source in self.lost:
                self.lost.add(target)
        for request in scheduler.running:
            if request.request_id in output.swapped_in:
                for place in range(request.num_computed_tokens // block_size):
                    self.contents[request.block_ids[place]] = _contents(request, (place + 1) * block_size)
                    self.lost.discard(request.block_ids[place])
        for request, num_new in zip(output.scheduled, output.num_scheduled_tokens.values(), strict=True):
            first, end = request.num_computed_tokens, request.num_computed_tokens + num_new
            for place in range(first // block_size, -(-end // block_size)):
                block_id, filled = request.block_ids[place], (place + 1) * block_size
                self.contents.pop(block_id, None)
                if filled <= end:
                    self.unreported[block_id] = request.request_id
                    self.contents[block_id] = _contents(request, filled)
                    self.lost.discard(block_id)


def _contents(request: Request, end: int) -> Contents:
    return request.cache_salt, request.adapter, tuple(request.token_ids(0, end))
