"""The auditor for schedulers that share blocks: which request may read a block, and which may write into it.

It adds three rules to those of phase 6's `Auditor`, and supports forks. It trusts no hash that a scheduler has noted:
it keeps a separate record of every block's contents, token by token, and compares. Of a block that came from a tier,
the hash is all there is to know: the auditor hashes the reader's tokens itself. Given, not built. Pure standard
library.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from itertools import pairwise
from typing import Any

from minicache.memory.groups import NULL_BLOCK
from minicache.memory.prefix import BlockHash, block_hash, root_hash
from minicache.request import Request, RequestId, RequestStatus
from minicache.scheduler.audit import Auditor, Note
from minicache.scheduler.base import Scheduler
from minicache.scheduler.output import SchedulerOutput
from minicache.scheduler.tiered import LoadingQueue

Contents = tuple[int, str | None, str | None, tuple[int, ...]]
"""The contents of a full block: of which group of layers, salt, adapter, and all tokens up to the block's last."""


class SharingAuditor(Auditor):
    """`Auditor`, for a scheduler with a prefix cache, tiers below it, or forks.

    | rule | after | holds |
    |---|---|---|
    | found | `schedule` | found tokens lie in blocks that hold exactly these tokens; at least one token is computed |
    | writes | `schedule` | no request writes into a block that another one has; copies go where they are needed |
    | tiers | `schedule` | a block that is stored has been computed, and holds the tokens that its hash stands for |
    | work | `schedule` | as before; but nothing is to do if all unfinished requests wait for their load |

    One block may be written and read in the same step, by two requests: a request that joins the batch in that step may
    find what the step computes. If that step fails, the recovery drops the record of all blocks.

    The time that it takes grows with the tokens of unfinished requests.

    Attributes:
        contents: block → its contents, for full blocks that were computed while the auditor watched; or the hash of
            its contents, for blocks that were loaded from a tier.
        fresh: ids of the requests that joined the batch in the last step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.contents: dict[int, Contents | BlockHash] = {}
        self.fresh: set[RequestId] = set()

    def on_fork(self, scheduler: Scheduler, parent: Request, child: Request) -> None:
        """Track the child from now on; its blocks and computed tokens must be its parent's."""
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

    def on_schedule(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Audit the step: first what was found and copied, then all else, then what it writes."""
        before = {request.request_id for request in self.batch}
        if self.step >= 0 or self.notes:
            self.check_tiers(scheduler, output)
            self.check_found(scheduler)
            self.check_copies(scheduler, output)
        super().on_schedule(scheduler, output)
        self.fresh = {request.request_id for request in scheduler.running} - before
        self.check_writes(scheduler, output)
        self._write(scheduler, output)

    def on_recover(self, scheduler: Scheduler) -> None:
        """Audit the recovery: the contents of all blocks are unknown."""
        super().on_recover(scheduler)
        self.contents.clear()

    def audit_as_if(self, scheduler: Scheduler, output: SchedulerOutput, tokens: Mapping[RequestId, list[int]]) -> None:
        """Audit a step that was just scheduled as if these requests had generated these tokens before.

        The rules see copies of scheduler and requests. The notes are of the requests themselves again afterwards.
        """
        copies: dict[RequestId, Request] = {}
        for request in (*scheduler.running, *scheduler.waiting.values()):
            if more := tokens.get(request.request_id):
                twin = copies[request.request_id] = copy(request)
                twin.output_token_ids, twin.draft_token_ids = request.output_token_ids + more, []
                note = self.notes.get(request.request_id)
                if note is not None and note.request is request:
                    num_outputs = note.num_output_tokens + len(more)
                    self.notes[request.request_id] = replace(note, request=twin, num_output_tokens=num_outputs)
        seen: Any = copy(scheduler)
        seen.running = [copies.get(request.request_id, request) for request in scheduler.running]
        if not copies.keys().isdisjoint(scheduler.waiting):
            seen.waiting = {each: copies.get(each, request) for each, request in scheduler.waiting.items()}
        step = replace(output, scheduled=[copies.get(each.request_id, each) for each in output.scheduled])
        self.batch = [copies.get(request.request_id, request) for request in self.batch]
        if self._watched is scheduler:
            self._watched = seen
        SharingAuditor.on_schedule(self, seen, step)
        self._watched = scheduler
        self._remember(scheduler)

    def check_order(self, scheduler: Scheduler) -> None:
        """Rule "order", with forks: siblings have one `arrival_index`, and may be in any order.

        Raises:
            InvariantError: a request is ahead of one that arrived earlier.
        """
        for ahead, request in pairwise((*scheduler.running, *scheduler.waiting.values())):
            if scheduler.first_come and ahead.arrival_index > request.arrival_index:
                self.fail("order", f"{ahead!r} is ahead of {request!r}, which arrived before it")

    def check_work(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Rule "work"; requests that wait for their load are no work. If there are no others, the step may be empty.

        Raises:
            InvariantError: a part of it does not hold.
        """
        waiting = scheduler.waiting
        is_loading = isinstance(waiting, LoadingQueue) and len(waiting) == waiting.num_loading > 0
        if output.scheduled or scheduler.running or not is_loading:
            super().check_work(scheduler, output)

    def check_tiers(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Rule "tiers": what is stored are the contents of its hash. What is loaded counts as computed from now on.

        A block is stored before the step writes, so its contents are those of the step before.

        Raises:
            InvariantError: a stored block was not computed, or has other contents.
        """
        for block_id, its_hash in output.blocks_to_store:
            held = self.contents.get(block_id)
            if held is None or _hash_of(held, scheduler.pool.block_size) != its_hash:
                self.fail("tiers", f"block {block_id} is stored under a hash that is not of what it holds: {held!r}")
        for block_id, its_hash, _ in output.blocks_to_load:
            self.contents[block_id] = its_hash

    def check_found(self, scheduler: Scheduler) -> None:
        """Rule "found": the found tokens of an admitted request lie in its blocks, and are not all of its tokens.

        The notes are updated: for the other rules, the found tokens count as computed before.

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
            for group, place, block_id in _blocks(request, 0, num_found // block_size):
                got, wanted = self.contents.get(block_id), contents_of(request, group, (place + 1) * block_size)
                is_right = got == (_hash_of(wanted, block_size) if isinstance(got, BlockHash) else wanted)
                if not is_right and not self._is_filled_now(scheduler, request, group, place):
                    self.fail("found", f"block {block_id} does not hold what {request!r} reads in it: {got!r}")
            self.notes[request.request_id] = replace(note, num_computed_tokens=num_found)

    def check_copies(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Rule "writes", the copies: each goes from a block that a request had to the block that replaced it.

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
        """Rule "writes": no request writes into a block that another one has, unless that one has just found it.

        Raises:
            InvariantError: one does.
        """
        block_size = scheduler.pool.block_size
        users: dict[int, list[tuple[Request, int]]] = {}
        for request in scheduler.running:
            for _, place, block_id in _blocks(request):
                users.setdefault(block_id, []).append((request, place))
        for request, num_new in zip(output.scheduled, output.num_scheduled_tokens.values(), strict=True):
            first, end = request.num_computed_tokens, request.num_computed_tokens + num_new
            for _, _, block_id in _blocks(request, first // block_size, -(-end // block_size)):
                for other, place in users[block_id]:
                    reads = (place + 1) * block_size <= other.num_computed_tokens
                    if other is not request and not (other.request_id in self.fresh and reads):
                        self.fail("writes", f"{request!r} writes into block {block_id}, which {other!r} has too")

    def _is_filled_now(self, scheduler: Scheduler, reader: Request, group: int, place: int) -> bool:
        """Whether another request of the batch with the same tokens so far will fill this block."""
        end = (place + 1) * scheduler.pool.block_size
        block_id, wanted = reader.group_block_ids[group][place], contents_of(reader, group, end)
        return any(
            other is not reader
            and other.num_tokens >= end > other.num_computed_tokens
            and other.group_block_ids[group][place : place + 1] == [block_id]
            and contents_of(other, group, end) == wanted
            for other in scheduler.running
        )

    def _write(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Record the blocks' contents after the step."""
        block_size = scheduler.pool.block_size
        for source, target in output.blocks_to_copy:
            self.contents.pop(target, None)
            if source in self.contents:
                self.contents[target] = self.contents[source]
        for request in scheduler.running:
            if request.request_id in output.swapped_in:
                for group, place, block_id in _blocks(request, 0, request.num_computed_tokens // block_size):
                    self.contents[block_id] = contents_of(request, group, (place + 1) * block_size)
        for request, num_new in zip(output.scheduled, output.num_scheduled_tokens.values(), strict=True):
            first, end = request.num_computed_tokens, request.num_computed_tokens + num_new
            for group, place, block_id in _blocks(request, first // block_size, -(-end // block_size)):
                filled = (place + 1) * block_size
                self.contents.pop(block_id, None)
                if filled <= end:
                    self.contents[block_id] = contents_of(request, group, filled)


def _blocks(request: Request, first: int = 0, end: int | None = None) -> list[tuple[int, int, int]]:
    """The entries first … end − 1 of a request's block tables: (group, place, block), without the null block."""
    return [
        (group, place, each)
        for group, table in enumerate(request.group_block_ids)
        for place, each in enumerate(table[first:end], first)
        if each != NULL_BLOCK
    ]


def contents_of(request: Request, group: int, end: int) -> Contents:
    """The contents of a request's block of a group whose last token is the request's token `end` − 1."""
    return group, request.cache_salt, request.adapter, tuple(request.token_ids(0, end))


def _hash_of(contents: Contents | BlockHash, block_size: int) -> BlockHash:
    """The hash under which a block with these contents is cached."""
    if isinstance(contents, BlockHash):
        return contents
    _, salt, adapter, tokens = contents
    found = root_hash(salt, adapter)
    for start in range(0, len(tokens), block_size):
        found = block_hash(found, tokens[start : start + block_size])
    return found
