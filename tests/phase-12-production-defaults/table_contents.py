"""What lies in every block of several groups of layers, token by token: who reads finds what it should, or does not."""

from __future__ import annotations

from minicache.errors import InvariantError, RequestTooLargeError
from minicache.memory.groups import NULL_BLOCK
from minicache.request import Request
from minicache.scheduler.audit_grouped import GroupedAuditor
from minicache.scheduler.grouped import GroupedScheduler
from minicache.scheduler.observe import observe
from minicache_course.checks import CheckFailed, call, that


class Contents:
    """The memory of a device. No hash and no table is trusted.

    A group's keys and values of a token depend on all tokens before it. So a slot holds the group and the tokens up to
    this one.
    """

    def __init__(self, scheduler):
        self.windows, self.block_size = scheduler.groups.windows, scheduler.pool.block_size
        self.slots = {}

    def run(self, output):
        """Write what a step computes. Then each of its tokens must see its own, as far as each group's window goes."""
        __tracebackhide__ = True
        for request in output.scheduled:
            for position in self._new(request, output):
                for group, table in enumerate(request.group_block_ids):
                    self.slots[self._slot(request, group, table, position)] = group, request.token_ids(0, position + 1)
        for request in output.scheduled:
            for group, (table, window) in enumerate(zip(request.group_block_ids, self.windows, strict=True)):
                self._sees(request, group, table, window, self._new(request, output))

    def _new(self, request, output):
        first = request.num_computed_tokens
        return range(first, first + output.num_scheduled_tokens[request.request_id])

    def _sees(self, request, group, table, window, new):
        __tracebackhide__ = True
        oldest = 0 if window is None else max(0, new[0] - window + 1)
        for position in range(oldest, new[-1] + 1):
            held = self.slots.get(self._slot(request, group, table, position))
            wanted = group, request.token_ids(0, position + 1)
            if held != wanted:  # told only then: this is looked at often
                where = f"at position {position}, in block {table[position // self.block_size]} of {table}"
                that(
                    f"(group, tokens so far) of what group {group} of {request.request_id!r} sees {where}", held
                ).gives(wanted)

    def _slot(self, request, group, table, position):
        __tracebackhide__ = True
        index, offset = divmod(position, self.block_size)
        if index >= len(table) or table[index] == NULL_BLOCK:
            what = f"the table of group {group} of {request.request_id!r}, which sees position {position}"
            raise CheckFailed(what, repr(table), f"a block as entry {index}, for {self.block_size} tokens each")
        return table[index], offset


def random_run(rng, *, prefix_caching):
    """Serves random requests in a small pool: the auditor must pass every step, and each token see what it should."""
    __tracebackhide__ = True
    windows = rng.choice([(8,), (None, 8), (7, None), (None, 5, 17), (None, 9, 9), (6, 30), (1, None)])
    plain = GroupedScheduler(
        windows=windows,
        num_blocks=rng.choice([16, 24, 40]),
        block_size=4,
        max_num_seqs=rng.randint(2, 6),
        max_num_batched_tokens=rng.choice([3, 8, 20, 100]),
        prefix_caching=prefix_caching,
        prefix_cache_retention=rng.choice([0, 0, None, 4, 12]),
        reserve_full_prompt=rng.random() < 0.5,
    )
    scheduler, contents, added = observe(plain, GroupedAuditor()), Contents(plain), []
    try:
        for step in range(600):
            if step < 30 and rng.random() < 0.4:
                added += _add(scheduler, rng, len(added))
            if added and rng.random() < 0.03:
                scheduler.abort_request(rng.choice(added).request_id)
            if not scheduler.has_unfinished:
                continue
            output = call(scheduler.schedule).value
            contents.run(output)
            scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 0))
            scheduler.check()
    except InvariantError as error:
        that("the auditor", f"InvariantError: {error}").gives("no error")
    that("requests that have not finished", [each for each in added if not each.status.is_finished]).gives([])
    that("used blocks", plain.pool.num_used).gives(0)


def _add(scheduler, rng, number):
    """A request whose prompt begins as others do; none if it does not fit into the pool."""
    shared, length = rng.choice([0, 5, 8, 17, 24, 40]), rng.randint(1, 44)
    prompt = [position if position < shared else 100 * number + position for position in range(length)]
    request = Request(number, prompt, rng.randint(1, 20))
    try:
        scheduler.add_request(request)
    except RequestTooLargeError:
        return []
    return [request]
