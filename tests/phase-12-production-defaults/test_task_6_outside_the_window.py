"""Phase 12, task 6: blocks that have left a window go back to the pool; a window is charged what it can hold."""

from __future__ import annotations

import random
from inspect import unwrap
from pathlib import Path

import pytest

from minicache.memory.groups import NULL_BLOCK, BlockGroups, GroupedBlockPool
from minicache.memory.prefix import CachingBlockPool, block_hash, root_hash
from minicache.request import Request
from minicache.scheduler.grouped import GroupedScheduler
from minicache_course import scenario
from minicache_course.checks import call, that
from minicache_course.effort import effort
from minicache_course.follow import following, following_schedulers
from minicache_course.seeds import fresh, one_of
from minicache_course.templates import load

contents = load(Path(__file__).with_name("table_contents.py"))
recorded = load(Path(__file__).with_name("recorded_tables.py"))


@pytest.fixture(autouse=True)
def _scenario(monkeypatch):
    """A failure shows the groups, the schedulers and requests, and the calls so far. Task 7 is not needed."""
    monkeypatch.setattr(BlockGroups, "blocks_to_take", _without_hits)
    with (
        scenario.telling(),
        following_schedulers(),
        following(CachingBlockPool, "__init__"),
        following(BlockGroups, "__init__", "grow", "slide"),
    ):
        yield


def _without_hits(self, found, blocks):
    return sum(blocks) - sum(map(len, found))


def groups_of(*windows, num_blocks=60, block_size=4, step=8, longest=None):
    """The groups, over a pool of so many blocks; a step computes at most `step` tokens of a request."""
    pool = GroupedBlockPool(num_blocks, block_size)
    return BlockGroups(pool, windows, max_step_tokens=step, max_num_tokens=longest)


# What no later token sees


def test_a_window_of_512():
    """Blocks of 16: the token at 8,191 sees 7,680 … 8,191, so 480 blocks are outside; one more every 16 tokens."""
    groups = groups_of(None, 512, block_size=16)
    for num_computed, outside in [
        (511, 0),
        (512, 0),
        (526, 0),
        (527, 1),
        (528, 1),
        (8191, 480),
        (8206, 480),
        (8207, 481),
    ]:
        call(groups.num_outside, 512, num_computed).gives(outside)
    call(groups.num_outside, None, 8191).gives(0)


@pytest.mark.parametrize("window", [None, 1, 2, 3, 4, 5, 8, 9, 17, 1000])
def test_outside_is_what_no_later_token_sees(window):
    """By trying all: the blocks from the first on of which no token is seen from any later position."""
    block_size = one_of(4, (3, 5, 7, 16))
    groups = groups_of(window, block_size=block_size)
    for num_computed in range(3 * block_size + 20):
        seen = set()
        for position in range(num_computed, num_computed + 40):
            seen.update(range(0 if window is None else max(0, position - window + 1), position + 1))
        outside = 0
        while seen.isdisjoint(range(outside * block_size, (outside + 1) * block_size)):
            outside += 1
        call(groups.num_outside, window, num_computed).gives(outside)


# They go back


def test_only_the_windows_own_table_slides():
    """Full attention and a window of 6 tokens, blocks of 4: 12 computed, the token at 12 sees 7 … 12."""
    groups = groups_of(None, 6)
    tables = groups.empty()
    groups.grow(tables, 16)
    that("the tables", tables).gives([[0, 1, 2, 3], [4, 5, 6, 7]])
    for num_computed, window_table in [(8, [4, 5, 6, 7]), (9, [NULL_BLOCK, 5, 6, 7]), (12, [NULL_BLOCK, 5, 6, 7])]:
        call(groups.slide, tables, num_computed).gives(None)
        that("the tables", tables).gives([[0, 1, 2, 3], window_table])
    call(groups.slide, tables, 16).gives(None)
    that("the tables", tables).gives([[0, 1, 2, 3], [NULL_BLOCK, NULL_BLOCK, 6, 7]])
    that("used blocks", groups.pool.num_used).gives(6)


def test_every_group_slides_by_its_own_window():
    """Windows of 4, of 9 and of all tokens: 14 tokens are computed."""
    groups = groups_of(4, 9, None)
    tables = groups.empty()
    groups.grow(tables, 16)
    call(groups.slide, tables, 14).gives(None)
    that("the tables", tables).gives([[NULL_BLOCK] * 2 + [2, 3], [NULL_BLOCK, 5, 6, 7], [8, 9, 10, 11]])


def test_the_lists_of_the_tables_change():
    """A request gives `tables` anew for each call; the lists in it are its own, and those have to change."""
    groups = groups_of(None, 4)
    tables = groups.empty()
    groups.grow(tables, 16)
    call(groups.slide, [*tables], 12).gives(None)
    that("the window's table", tables[1]).gives([NULL_BLOCK, NULL_BLOCK, 6, 7])


def test_the_last_freed_block_is_the_first_of_them():
    """Blocks 0, 1 and 2 leave the window in one step: the pool hands out 2, then 1, then 0, then a new one."""
    groups = groups_of(4)
    tables = groups.empty()
    groups.grow(tables, 20)
    call(groups.slide, tables, 15).gives(None)
    that("the tables", tables).gives([[NULL_BLOCK] * 3 + [3, 4]])
    call(groups.pool.allocate, 4).gives([2, 1, 0, 5])


def test_two_windows_free_one_after_the_other():
    """A call of `free` a group: what the second group frees is handed out before what the first has freed."""
    groups = groups_of(4, 4)
    tables = groups.empty()
    groups.grow(tables, 16)
    call(groups.slide, tables, 12).gives(None)
    that("the tables", tables).gives([[NULL_BLOCK, NULL_BLOCK, 2, 3], [NULL_BLOCK, NULL_BLOCK, 6, 7]])
    call(groups.pool.allocate, 5).gives([5, 4, 1, 0, 8])


def test_other_requests_keep_a_block():
    """Another request has block 0 too: it loses one reference, and is not free. Cached blocks can still be found."""
    groups = groups_of(4)
    tables = groups.empty()
    groups.grow(tables, 12)
    its_hash = block_hash(root_hash(), [1, 2, 3, 4])
    groups.pool.cache([1], [its_hash])
    groups.pool.share([0])
    call(groups.slide, tables, 11).gives(None)
    that("the tables", tables).gives([[NULL_BLOCK, NULL_BLOCK, 2]])
    that("references of blocks 0, 1 and 2", [groups.pool.ref_count(block) for block in range(3)]).gives([1, 0, 1])
    that("the block that is found by the hash of block 1", groups.pool.find([its_hash])).gives([1])


def test_a_found_prefix_begins_with_null_blocks():
    """A hit gives a window a table that begins with null blocks: only what lies behind them goes back."""
    groups = groups_of(4, num_blocks=6)
    tables = [[NULL_BLOCK, NULL_BLOCK, *groups.pool.allocate(3)]]
    call(groups.slide, tables, 11).gives(None)
    that("the tables", tables).gives([[NULL_BLOCK, NULL_BLOCK, 0, 1, 2]])
    call(groups.slide, tables, 16).gives(None)
    that("the tables", tables).gives([[NULL_BLOCK, NULL_BLOCK, NULL_BLOCK, 1, 2]])
    that("used blocks", groups.pool.num_used).gives(2)


def work(num_blocks):
    """The effort of a call that frees nothing, and of one that frees one block, with tables of so many blocks."""
    groups = groups_of(None, 8, num_blocks=2 * num_blocks)
    tables = groups.empty()
    groups.grow(tables, 4 * num_blocks)
    groups.slide(tables, 4 * num_blocks - 8)
    slide = unwrap(BlockGroups.slide)  # telling the call would be most of the work
    return [effort(slide, groups, tables, 4 * num_blocks - less) for less in (8, 4)]


def test_a_long_table_costs_no_more():
    """A token of a long request costs as much as one of a short request: what went back before is not looked at."""
    with scenario.telling():  # what the calls were says nothing
        short, long = work(50), work(5_000)
    for what, few, many in zip(("nothing goes back", "one block goes back"), short, long, strict=True):
        told = f"{what}: {many - few} instructions more in a table of 5,000 blocks than in one of 50: whether below 300"
        that(told, many - few < 300).gives(True)


# What a request is charged

CHARGES = [
    (None, 0, 0),
    (None, 1, 1),
    (None, 100, 25),
    (9, 0, 0),
    (9, 4, 1),
    (9, 17, 5),
    (9, 20, 5),
    (9, 21, 5),
    (9, 10_000, 5),
    (10, 100, 6),
    (1, 100, 3),
    (1000, 100, 25),
]


@pytest.mark.parametrize(
    ("window", "num_tokens", "most"),
    CHARGES,
    ids=[f"{tokens} tokens, window {window}" for window, tokens, _ in CHARGES],
)
def test_the_most_that_a_group_holds(window, num_tokens, most):
    """Blocks of 4, 8 tokens a step. A window of 9: 8 tokens before a step and its 8 are 4 blocks, and one more."""
    groups = groups_of(None, 9, step=8)
    call(groups.most_blocks, window, num_tokens).gives(most)


def test_no_request_is_longer_than_it_may_be():
    """A window and a step together have at most max_num_tokens tokens: here 12, in blocks of 4."""
    groups = groups_of(None, 9, step=8, longest=12)
    call(groups.most_blocks, 9, 8).gives(2)
    call(groups.most_blocks, 9, 100).gives(4)
    call(groups.most_blocks, None, 100).gives(25)
    call(groups.most_blocks, 3, 100).gives(4)


@pytest.mark.parametrize("window", [1, 2, 5, 9, 16, 100])
def test_the_charge_is_never_too_small(window):
    """By trying all: where a step may begin, how many tokens it may have. And it is too large by two at most."""
    rng = random.Random(fresh(window))
    for _ in range(3):
        block_size, step, num_tokens = rng.choice([1, 3, 4, 16]), rng.randint(1, 20), rng.randint(1, 80)
        groups = groups_of(window, block_size=block_size, step=step, longest=rng.choice([None, 80]))
        held = 0
        for begin in range(num_tokens):
            first = max(0, begin - window + 1) // block_size
            end = min(num_tokens, begin + step)
            held = max(held, -(-end // block_size) - first)
        charged = call(groups.most_blocks, window, num_tokens).value
        told = f"most_blocks({window}, {num_tokens}) is {charged}, and the most held is {held}: the difference"
        that(f"{told} is 0, 1 or 2", charged - held in (0, 1, 2)).gives(True)


def test_a_request_is_charged_for_all_groups():
    """Full attention, and two windows of 9: 25 + 5 + 5 blocks for 100 tokens."""
    groups = groups_of(None, 9, 9, step=8)
    call(groups.blocks_to_admit, 100).gives(35)
    call(groups.blocks_to_admit, 5).gives(6)
    call(groups.blocks_to_admit, 0).gives(0)
    call(groups_of(9).blocks_to_admit, 100).gives(5)


# In a scheduler


def test_a_window_holds_as_much_after_ten_tokens_as_after_thousands():
    """Groups with windows None and 32, blocks of 16: the second holds 3 blocks at most, and the first all."""
    scheduler = GroupedScheduler(windows=(None, 32), num_blocks=200, max_num_batched_tokens=16)
    scheduler.add_request(Request("r", [1] * 800, 400))
    most = 0
    while scheduler.has_unfinished:
        output = scheduler.schedule()
        for request in output.scheduled:
            most = max(most, sum(block_id != NULL_BLOCK for block_id in request.group_block_ids[1]))
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 7))
    that("blocks that the window's group held at most", most).gives(3)


def test_a_request_longer_than_the_pool():
    """A window of 32 tokens alone, and 6 blocks of 16: a request of 500 tokens is served, and all blocks come back."""
    scheduler = GroupedScheduler(windows=(32,), num_blocks=6, max_num_batched_tokens=16)
    request = Request("r", [1] * 400, 100)
    call(scheduler.add_request, request).gives(None)
    for _ in range(200):
        if scheduler.has_unfinished:
            output = call(scheduler.schedule).value
            scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 7))
    that("tokens of its answer", len(request.output_token_ids)).gives(100)
    that("free blocks", scheduler.pool.num_free).gives(6)


@pytest.mark.parametrize(
    ("workload", "mode"),
    [pytest.param(*case, id=f"{case[0]['seed']}, {case[1]}") for case in recorded.cases(prefix_caching=False)],
)
def test_every_block_is_the_one_that_vllm_takes(workload, mode):
    """Each step schedules what vLLM 0.33 schedules, with its blocks in each group: see recorded_tables.py."""
    recorded.replay(workload, mode)


@pytest.mark.parametrize("seed", range(5))
def test_random_runs(seed):
    """Small pools, several windows, preemption, aborts: each token sees in each group what its window has."""
    contents.random_run(random.Random(fresh(seed)), prefix_caching=False)
