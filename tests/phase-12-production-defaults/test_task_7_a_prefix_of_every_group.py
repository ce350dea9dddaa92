"""Phase 12, task 7: the longest prefix behind which every group can continue, and which blocks are kept for it."""

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
def _scenario():
    """A failure shows the groups, the schedulers and requests, and the calls so far."""
    with (
        scenario.telling(),
        following_schedulers(),
        following(CachingBlockPool, "__init__"),
        following(BlockGroups, "__init__", cache=_cached),
    ):
        yield


def _cached(result, tables, hashes, first, end, prefixes=()):
    return f"cache(…, first={first}, end={end}, prefixes={prefixes}) of tables {tables}", ""


def groups_of(*windows, num_blocks=80, block_size=4, **options):
    """The groups, over a pool of so many blocks; all full blocks are cached, unless `retention` says otherwise."""
    pool = GroupedBlockPool(num_blocks, block_size)
    return BlockGroups(pool, windows, max_step_tokens=8, **{"retention": None} | options)


def hashes_of(count):
    """The hashes of so many blocks of one request."""
    hashes = [block_hash(root_hash(), [one_of(0, range(1, 9))])]
    while len(hashes) < count:
        hashes.append(block_hash(hashes[-1], [len(hashes)]))
    return hashes[:count]


HASHES = hashes_of(20)


def cached(groups, *kept, hashes=HASHES):
    """Tables of a block for each hash, all cached; then each group loses the hashes of all blocks but those `kept`."""
    tables = groups.empty()
    groups.grow(tables, len(hashes) * groups.pool.block_size)
    groups.cache(tables, hashes, 0, len(hashes))
    for table, window, indices in zip(tables, groups.windows, kept, strict=True):
        groups.pool.uncache([block_id for index, block_id in enumerate(table) if index not in indices])
        scenario.done(f"of {len(hashes)} blocks, the group with window {window} keeps {sorted(indices)} cached")
    return tables


def prefix_of(tables, windows, length, block_size):
    """The tables of a prefix of so many blocks, without what the token behind it does not see."""
    found = []
    for table, window in zip(tables, windows, strict=True):
        sees = 0 if window is None else max(0, length * block_size - window + 1)
        found.append([NULL_BLOCK if (i + 1) * block_size <= sees else table[i] for i in range(length)])
    return found


# The longest prefix

FOUND = [
    ((None,), [range(7)], 7, 0),
    ((None,), [[0, 1, 3]], 2, 0),
    ((None,), [[]], 0, 0),
    ((6,), [[3, 4, 7, 9]], 5, 0),  # needs two blocks in a row: the last such pair
    ((6,), [range(20)], 20, 0),
    ((6,), [[18, 19]], 20, 0),
    ((6,), [[0, 9]], 1, 0),  # or fewer, from the first token on
    ((6,), [[1, 9]], 0, 0),
    ((5,), [[9]], 10, 0),  # four tokens before its own, and those are one block
    ((1,), [[]], 20, 0),  # a token that sees only itself needs no block
    ((100,), [range(12)], 12, 0),
    ((None, 6), [range(10), range(10)], 10, 0),
    ((None, 6), [range(10), [3, 4, 11, 12]], 5, 10),  # what one group alone has is no hit
    ((None, 6), [range(2), range(20)], 2, 0),
    ((None, 6), [range(10), []], 0, 10),
    ((None, 6), [range(10), [8]], 0, 10),
    ((None, 6), [range(10), [8, 9, 10]], 10, 0),
    ((6, None), [[3, 4], range(10)], 5, 10),  # the group without a window stands second
    ((None, None), [range(9), range(6)], 6, 9),
    ((None, None), [range(6), range(9)], 6, 0),
    ((6, 10), [[3, 4, 8, 9], [2, 3, 4]], 5, 10),  # no group without a window: the first
    ((6, 10), [[3, 4], [2, 3, 4, 7, 8, 9]], 5, 0),
    ((None, 6, 10), [range(20), [0, 1, 7, 8, 14, 15], [6, 7, 8, 13, 14]], 9, 20),
    ((None, 6, 10), [range(20), [7, 8, 14, 15], [5, 6, 7, 12, 13, 14]], 0, 20),
]


@pytest.mark.parametrize(
    ("windows", "kept", "length", "junction"),
    FOUND,
    ids=[f"{windows}, {[[*indices] for indices in kept]}" for windows, kept, _, _ in FOUND],
)
def test_the_longest_prefix_of_all_groups(windows, kept, length, junction):
    """Blocks of 4 tokens, 20 hashes. The length is that of every table; the junction what the first group could do."""
    groups = groups_of(*windows)
    tables = cached(groups, *kept)
    found, its_junction = call(groups.find, HASHES).value
    that("the lengths of the tables that find gives", [len(table) for table in found]).gives([length] * len(windows))
    that("the tables that find gives", found).gives(prefix_of(tables, windows, length, 4))
    that("the junction that find gives", its_junction).gives(junction)


@pytest.mark.parametrize("seed", range(60))
def test_any_blocks_by_trying_all_prefixes(seed):
    """Random groups, and random runs of cached blocks in each; a prefix counts if each group has what is seen of it."""
    rng = random.Random(fresh(seed))
    block_size, num_groups = rng.choice([1, 3, 4]), rng.randint(1, 4)
    windows = [rng.choice([None, rng.randint(1, 20)]) for _ in range(num_groups)]
    kept = [_runs(rng, 16) for _ in windows]
    groups = groups_of(*windows, block_size=block_size)
    tables = cached(groups, *kept, hashes=HASHES[:16])

    def enough(group, length):
        sees = 0 if windows[group] is None else max(0, length * block_size - windows[group] + 1)
        return all(position // block_size in kept[group] for position in range(sees, length * block_size))

    first = windows.index(None) if None in windows else 0
    length = max(n for n in range(17) if all(enough(group, n) for group in range(num_groups)))
    alone = max(n for n in range(17) if enough(first, n))
    found = prefix_of(tables, windows, length, block_size), alone if alone > length else 0
    that(f"find of 16 hashes, with windows {windows} and blocks of {block_size}", groups.find(HASHES[:16])).gives(found)


def _runs(rng, num_blocks):
    kept, there, often = [], rng.random() < 0.6, rng.choice([0.1, 0.3])
    for index in range(num_blocks):
        kept += [index] * there
        there ^= rng.random() < often
    return kept


def test_a_part_of_the_hashes():
    """Only the blocks of the given hashes count, in any number."""
    groups = groups_of(None, 6)
    tables = cached(groups, range(10), range(10))
    for length in (0, 1, 2, 3, 7, 10):
        call(groups.find, HASHES[:length]).gives((prefix_of(tables, (None, 6), length, 4), 0))


def test_find_changes_nothing():
    """It takes no reference and drops no hash; free blocks are found as used ones are."""
    groups = groups_of(None, 6)
    tables = cached(groups, range(10), [4, 5, 8, 9])
    groups.release(tables)
    before = list(groups.pool.free_list), groups.pool.num_cached
    for _ in range(2):
        call(groups.find, HASHES).gives((prefix_of(tables, (None, 6), 10, 4), 0))
    that("the free list, and how many blocks are cached", (list(groups.pool.free_list), groups.pool.num_cached)).gives(
        before
    )


def test_a_block_that_was_evicted_is_not_found():
    """The pool has handed out cached blocks for other tokens: they hold the first ones no more."""
    groups = groups_of(None, 6, num_blocks=20)
    tables = groups.empty()
    groups.grow(tables, 40)
    groups.cache(tables, HASHES, 0, 10)
    groups.release(tables)
    groups.pool.allocate(12)
    call(groups.find, HASHES).gives(([[], []], 0))


def test_groups_are_not_confused():
    """Two groups see all tokens. Only one has cached them: its blocks are not the other's."""
    for kept in ([range(20), []], [[], range(20)]):
        groups = groups_of(None, None)
        cached(groups, *kept)
        call(groups.find, HASHES).gives(([[], []], 20 if kept[0] else 0))


def test_many_groups():
    """Twelve groups, a block of each: each finds its own."""
    groups = groups_of(*[None, 9] * 6)
    tables = cached(groups, *[range(5)] * 12, hashes=HASHES[:5])
    call(groups.find, HASHES).gives((prefix_of(tables, [None, 9] * 6, 5, 4), 0))


def test_another_prompt_is_not_found():
    """Blocks behind other tokens have other hashes."""
    groups = groups_of(None, 6)
    cached(groups, range(10), range(10))
    call(groups.find, [block_hash(each, [99]) for each in HASHES]).gives(([[], []], 0))


LOST = {
    "every block is cached": lambda index, half: True,
    "a block in the middle is lost": lambda index, half: index != half,
    "every third block is lost": lambda index, half: index % 3,
    "no block is cached": lambda index, half: False,
}


@pytest.mark.parametrize("lost", LOST)
def test_a_long_prefix_costs_in_proportion(lost):
    """Eight times the hashes may cost 16 times the work, and not 64 times: a group has a window larger than all."""
    costs = []
    with scenario.telling():  # what the calls were says nothing
        for count in (30, 240):
            groups, hashes = groups_of(None, 4 * 400, num_blocks=2 * count), hashes_of(count)
            there = [index for index in range(count) if LOST[lost](index, count // 2)]
            cached(groups, range(count), there, hashes=hashes)
            costs.append(effort(unwrap(BlockGroups.find), groups, hashes))
    factor = costs[1] / costs[0]
    that(
        f"{lost} in the window's group: 8 times the hashes, {factor:.0f} times the work: at most 16", factor <= 16
    ).gives(True)


# What is left to take


def test_what_a_hit_leaves_to_take():
    """Each group counts what is missing behind its found entries, and of the found blocks those that are free."""
    groups = groups_of(None, 6)
    tables = cached(groups, range(10), [8, 9])
    found, _ = groups.find(HASHES[:10])
    call(groups.blocks_to_take, found, [12, 12]).gives(2 + 2)  # all found ones are in use
    call(groups.blocks_to_take, found, [10, 10]).gives(0)
    call(groups.blocks_to_take, found, [12, 5]).gives(2)  # a window that is charged less than the hit is long
    groups.release(tables)
    call(groups.blocks_to_take, found, [12, 12]).gives(2 + 2 + 10 + 2)
    call(groups.blocks_to_take, found, [12, 5]).gives(2 + 0 + 10 + 2)
    groups.pool.share(found[0][:4])
    call(groups.blocks_to_take, found, [12, 5]).gives(2 + 0 + 6 + 2)
    call(groups.blocks_to_take, groups.empty(), [12, 5]).gives(17)


# What is kept

KEPT = [
    (6, None, (), range(20)),
    (6, 0, (), []),
    (6, 0, (5,), [3, 4]),
    (6, 0, (5, 0), [3, 4]),
    (6, 0, (1, 19), [0, 17, 18]),
    (6, 0, (7, 8), [5, 6, 7]),
    (5, 0, (7,), [6]),
    (1, 0, (7,), []),
    (6, 16, (), [2, 3, 6, 7, 10, 11, 14, 15, 18, 19]),
    (6, 16, (5,), [2, 3, 4, 6, 7, 10, 11, 14, 15, 18, 19]),
    (6, 32, (6,), [4, 5, 6, 7, 14, 15]),
    (6, 4, (), range(20)),
    (14, 8, (), range(20)),
    (None, 0, (), range(20)),
    (None, 32, (5,), range(20)),
]


@pytest.mark.parametrize(
    ("window", "retention", "prefixes", "kept"),
    KEPT,
    ids=[f"window {window}, retention {retention}, {prefixes}" for window, retention, prefixes, _ in KEPT],
)
def test_what_is_retained(window, retention, prefixes, kept):
    """Blocks of 4 tokens; of 20 blocks the last ones of some prefixes are cached, as many as a window sees."""
    groups = groups_of(window, retention=retention)
    for index in range(20):
        call(groups.is_retained, window, index, prefixes).gives(index in kept)
    tables = groups.empty()
    groups.grow(tables, 80)
    call(groups.cache, tables, HASHES, 0, 20, prefixes).gives(None)
    that("how many blocks are cached", groups.pool.num_cached).gives(len(kept))


def test_retained_is_what_the_prefixes_need():
    """By trying all: the blocks that the first token behind a prefix sees, of any window."""
    for window in range(1, 30):
        groups = groups_of(window, block_size=one_of(4, (2, 3, 5)), retention=0)
        size = groups.pool.block_size
        seen = {position // size for end in (3, 11) for position in range(max(0, end * size - window + 1), end * size)}
        for index in range(20):
            call(groups.is_retained, window, index, (3, 11)).gives(index in seen)


def test_caching_goes_on_block_by_block():
    """As a request computes chunk by chunk: only the blocks first … end − 1 are cached in each call, in each group."""
    groups = groups_of(None, 6, retention=0)
    tables = groups.empty()
    groups.grow(tables, 40)
    for first, end, cached_blocks, length in [(0, 3, 3, 0), (3, 3, 3, 0), (3, 6, 7, 0), (6, 7, 9, 7), (7, 10, 12, 7)]:
        call(groups.cache, tables, HASHES[:end], first, end, (7,)).gives(None)
        that("how many blocks are cached", groups.pool.num_cached).gives(cached_blocks)
        that("how many blocks find gives", len(groups.find(HASHES)[0][0])).gives(length)


def test_each_window_keeps_what_it_needs():
    """Windows of 6 and of 14 tokens need 2 and 4 blocks before a prefix of 11."""
    groups = groups_of(6, None, 14, retention=0)
    tables = groups.empty()
    groups.grow(tables, 80)
    call(groups.cache, tables, HASHES, 0, 20, (11,)).gives(None)
    that("how many blocks are cached", groups.pool.num_cached).gives(2 + 20 + 4)
    call(groups.find, HASHES).gives((prefix_of(tables, (6, None, 14), 11, 4), 20))


@pytest.mark.parametrize("window", [2, 5, 6, 13, 50])
def test_what_is_kept_is_found(window):
    """A prefix of 11 blocks is kept, whatever the window: it is found, and behind it full attention has more."""
    groups = groups_of(None, window, retention=0)
    tables = groups.empty()
    groups.grow(tables, 80)
    call(groups.cache, tables, HASHES, 0, 20, (11,)).gives(None)
    call(groups.find, HASHES).gives((prefix_of(tables, (None, window), 11, 4), 20))


# In a scheduler


def first_chunks(scheduler, *prompts):
    """Serve requests one after the other; the tokens that each computes in its first step."""
    chunks = []
    for number, prompt in enumerate(prompts):
        request = Request(number, prompt, 2)
        scheduler.add_request(request)
        output = call(scheduler.schedule).value
        chunks.append(output.num_scheduled_tokens[number])
        while not request.status.is_finished:
            scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, 7))
            output = scheduler.schedule() if not request.status.is_finished else output
    return chunks


@pytest.mark.parametrize(
    ("retention", "chunks"),
    [(0, [60, 60, 20, 1]), (None, [60, 20, 20, 1]), (16, [60, 28, 20, 1]), (32, [60, 28, 20, 1])],
)
def test_the_third_request_finds_what_the_second_has_kept(retention, chunks):
    """Three prompts with 40 tokens in common, blocks of 4; the third's comes again.

    With a retention of 0 the first leaves a window only what its own prompt needs. The second notes the junction.
    """
    scheduler = GroupedScheduler(
        windows=(None, 8), num_blocks=200, block_size=4, prefix_caching=True, prefix_cache_retention=retention
    )
    prompts = [[*range(40), *range(100 * number, 100 * number + 20)] for number in (1, 2, 3)]
    prompts = [*prompts, prompts[2][:57]]
    that("tokens that each computes", first_chunks(scheduler, *prompts)).gives(chunks)


@pytest.mark.parametrize(
    ("workload", "mode"),
    [pytest.param(*case, id=f"{case[0]['seed']}, {case[1]}") for case in recorded.cases(prefix_caching=True)],
)
def test_every_block_is_the_one_that_vllm_takes(workload, mode):
    """Each step schedules what vLLM 0.33 schedules, with its blocks in each group: see recorded_tables.py."""
    recorded.replay(workload, mode)


@pytest.mark.parametrize("seed", range(6))
def test_random_runs(seed):
    """Prompts that begin alike, small pools, several windows: each token sees in each group what its window has."""
    contents.random_run(random.Random(fresh(seed)), prefix_caching=True)
