"""The auditor for a scheduler with several groups of layers: no window loses a token, and no block is kept behind it.

It adds a rule to those of `SharingAuditor`, and counts the blocks of all tables. Given, not built. Pure standard
library.
"""

from __future__ import annotations

from typing import cast

from minicache.memory.blocks import blocks_for
from minicache.memory.groups import NULL_BLOCK, without_null
from minicache.request import Request, RequestId
from minicache.scheduler.audit_sharing import SharingAuditor
from minicache.scheduler.base import Scheduler
from minicache.scheduler.grouped import GroupedScheduler
from minicache.scheduler.output import SchedulerOutput


class GroupedAuditor(SharingAuditor):
    """`SharingAuditor`, for a `GroupedScheduler`.

    | rule | after | holds |
    |---|---|---|
    | windows | every call | a table a group, all of one length, which has every block that the next token sees |
    | windows | `schedule` | blocks that no token of the step sees have gone back; none holds more than it is charged |
    """

    def __init__(self) -> None:
        super().__init__()
        self._num_null: dict[RequestId, int] = {}  # entries of a request's tables, after the last call
        self._num_returned = 0  # in this step, by windows, while its victims are checked

    def check_blocks(self, scheduler: Scheduler) -> None:
        """Rule "blocks", of the tables of all groups, without NULL_BLOCK."""
        requests = [*scheduler.running, *scheduler.waiting.values()]
        tables = [without_null(table) for request in requests for table in request.group_block_ids]
        self._check_pool("block", scheduler.pool, tables)

    def check_holdings(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Rule "holdings", of the first table; and rule "windows" of all.

        Raises:
            InvariantError: a request does not have the blocks that it should have.
        """
        super().check_holdings(scheduler, output)
        windows, block_size = cast(GroupedScheduler, scheduler).groups.windows, scheduler.pool.block_size
        for request in (*scheduler.running, *scheduler.waiting.values()):
            tables = request.group_block_ids
            if [len(table) for table in tables] != [len(request.block_ids)] * len(windows):
                self.fail("windows", f"{request!r} has tables {tables}, for windows {windows}")
            in_step = request.request_id in output.num_scheduled_tokens
            for window, table in zip(windows, tables, strict=True):
                unseen = 0 if window is None else max(0, request.num_computed_tokens + 1 - window) // block_size
                if NULL_BLOCK in table[unseen:]:
                    self.fail("windows", f"{request!r} needs the blocks from {unseen} on; its table is {table}")
                if in_step and without_null(table[:unseen]):
                    self.fail("windows", f"{request!r} does not see the first {unseen} blocks; its table is {table}")
            held = sum(len(without_null(table)) for table in tables)
            if in_step and held > self.blocks_needed(scheduler, request):
                self.fail("windows", f"{request!r} holds {held} blocks, more than it was charged")

    def check_victims(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Rule "victims"; blocks that have left a window in this step are free now, and perhaps were not."""
        now = {request.request_id: _num_null(request) for request in scheduler.running if self.was_running(request)}
        self._num_returned = sum(count - self._num_null[request_id] for request_id, count in now.items())
        super().check_victims(scheduler, output)
        self._num_returned = 0

    def check_end(self, scheduler: Scheduler, request: Request) -> None:
        """Rule "end", of the tables of all groups."""
        super().check_end(scheduler, request)
        if any(request.group_block_ids):
            self.fail("end", f"{request!r} keeps blocks {request.group_block_ids}")

    def check_copies(self, scheduler: Scheduler, output: SchedulerOutput) -> None:
        """Rule "writes", the copies: there are none, because no request is forked."""
        if output.blocks_to_copy:
            self.fail("writes", f"blocks_to_copy is {output.blocks_to_copy}, and no request was forked")

    def blocks_needed(self, scheduler: Scheduler, request: Request) -> int:
        """The most blocks that a request of so many tokens holds at a time, in all groups."""
        block_size, needed = scheduler.pool.block_size, 0
        for window in cast(GroupedScheduler, scheduler).groups.windows:
            blocks = blocks_for(request.num_tokens, block_size)
            if window is not None:  # those of a window and a step, and one more that both ends may share
                blocks = min(blocks, blocks_for(window - 1 + scheduler.max_num_batched_tokens, block_size) + 1)
            needed += blocks
        return needed + self._num_returned

    def _remember(self, scheduler: Scheduler) -> None:
        super()._remember(scheduler)
        self._num_null = {request.request_id: _num_null(request) for request in scheduler.running}


def _num_null(request: Request) -> int:
    return sum(table.count(NULL_BLOCK) for table in request.group_block_ids)
