"""Block tables of several groups: what is kept, charged, found and cached. Phase 12 has the tests that grade."""

from __future__ import annotations

import pytest

from minicache.errors import OutOfBlocksError
from minicache.memory.groups import NULL_BLOCK, BlockGroups, GroupedBlockPool, without_null
from minicache.memory.prefix import block_hash, root_hash

HASHES = [root_hash()]
for number in range(40):
    HASHES.append(block_hash(HASHES[-1], [number]))
HASHES = HASHES[1:]


def groups_of(
    *windows: int | None, num_blocks: int = 60, block_size: int = 4, step: int = 8, **options: int | None
) -> BlockGroups:
    pool = GroupedBlockPool(num_blocks, block_size)
    return BlockGroups(pool, windows, max_step_tokens=step, **options)  # type: ignore[arg-type]


# Blocks outside the window


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 9])
def test_a_block_is_outside_once_the_next_token_does_not_see_it(window: int) -> None:
    groups = groups_of(window)
    for num_computed in range(40):
        sees = max(0, num_computed - (window - 1))  # the first position that the next token sees
        assert groups.num_outside(window, num_computed) == sees // 4
    assert groups.num_outside(None, 10**6) == 0


def test_a_window_slides_over_its_own_table_only() -> None:
    groups = groups_of(None, 6)
    tables = groups.empty()
    groups.grow(tables, 16)
    assert tables == [[0, 1, 2, 3], [4, 5, 6, 7]]
    groups.slide(tables, 12)  # the next token, at 12, sees 7 … 12
    assert tables == [[0, 1, 2, 3], [NULL_BLOCK, 5, 6, 7]]
    groups.slide(tables, 12)
    groups.slide(tables, 16)
    assert tables == [[0, 1, 2, 3], [NULL_BLOCK, NULL_BLOCK, 6, 7]]
    groups.release(tables)
    assert groups.pool.num_used == 0


def test_freed_blocks_are_next_and_the_last_one_first() -> None:
    groups = groups_of(4)
    tables = groups.empty()
    groups.grow(tables, 20)
    groups.slide(tables, 15)
    assert tables == [[NULL_BLOCK, NULL_BLOCK, NULL_BLOCK, 3, 4]]
    assert groups.pool.allocate(4) == [2, 1, 0, 5]


def test_growing_is_all_or_nothing_for_each_group() -> None:
    groups = groups_of(None, 6, num_blocks=3)
    tables = groups.empty()
    assert groups.blocks_missing(tables, 9) == 6
    with pytest.raises(OutOfBlocksError):
        groups.grow(tables, 16)
    assert tables == [[], []]


@pytest.mark.parametrize("step", [1, 3, 8])
@pytest.mark.parametrize("window", [None, 1, 2, 5, 9, 100])
def test_the_charge_is_never_less_than_what_a_request_holds(window: int | None, step: int) -> None:
    """In steps of any size up to the budget, however they fall on the blocks."""
    for size in range(1, step + 1):
        for limit in (None, 30):
            groups = groups_of(window, step=step, max_num_tokens=limit)
            tables, num_computed = groups.empty(), 0
            while num_computed < 30:
                num_tokens = min(30, num_computed + size)
                groups.slide(tables, num_computed)
                groups.grow(tables, num_tokens)
                assert groups.pool.num_used <= groups.most_blocks(window, 30)
                num_computed = num_tokens


def test_a_small_window_is_charged_a_bound_and_full_attention_everything() -> None:
    groups = groups_of(None, 9, step=8)
    assert [groups.most_blocks(None, n) for n in (0, 4, 100)] == [0, 1, 25]
    assert [groups.most_blocks(9, n) for n in (0, 4, 100)] == [0, 1, 5]  # ⌈(8 + 8) / 4⌉ + 1
    assert groups.blocks_to_admit(100) == 30


# Prefix hits, intersected


def cached(groups: BlockGroups, *blocks: range | list[int]) -> list[list[int]]:
    """Tables of 20 blocks a group, of which these are cached."""
    tables = groups.empty()
    groups.grow(tables, 20 * groups.pool.block_size)
    for group, (table, indices) in enumerate(zip(tables, blocks, strict=True)):
        suffix = group.to_bytes(2)
        groups.pool.cache([table[i] for i in indices], [HASHES[i] + suffix for i in indices])
    return tables


@pytest.mark.parametrize(
    ("windows", "blocks", "length", "junction"),
    [
        ((None,), [range(7)], 7, 0),
        ((None,), [[0, 1, 3]], 2, 0),
        ((6,), [[3, 4, 7, 9]], 5, 0),  # needs two blocks in a row: the last such run
        ((6,), [[0, 9]], 1, 0),  # or fewer, from the first token on
        ((6,), [[]], 0, 0),
        ((1,), [[]], 20, 0),  # a token that sees only itself needs no block
        ((None, 6), [range(10), range(10)], 10, 0),
        ((None, 6), [range(10), [3, 4, 11, 12]], 5, 10),  # a hit of one group alone is none
        ((None, 6), [range(2), range(20)], 2, 0),
        ((6, None), [[3, 4], range(10)], 5, 10),  # full attention is asked first, wherever it stands
        ((None, 6, 10), [range(20), [0, 1, 7, 8, 14, 15], [6, 7, 8, 13, 14]], 9, 20),
        ((None, 6, 10), [range(20), [7, 8, 14, 15], [5, 6, 7, 12, 13, 14]], 0, 20),  # 16, 15, none at 15, 8, none at 8
        ((5, 9), [[5, 9], [0, 1, 8, 9]], 10, 0),
    ],
)
def test_the_hit_is_what_every_group_can_continue_from(windows, blocks, length, junction):
    groups = groups_of(*windows, num_blocks=80)
    tables = cached(groups, *blocks)
    found, its_junction = groups.find(HASHES[:20])
    assert ([len(table) for table in found], its_junction) == ([length] * len(windows), junction)
    for window, table, theirs in zip(windows, found, tables, strict=True):
        unseen = 0 if window is None else max(0, length * 4 - window + 1) // 4
        assert table == [NULL_BLOCK] * unseen + theirs[unseen:length]


def test_the_groups_of_a_block_are_not_confused() -> None:
    groups = groups_of(None, None)
    cached(groups, range(5), [])
    assert groups.find(HASHES[:20])[0] == [[], []]


def test_what_a_hit_leaves_to_take() -> None:
    groups = groups_of(None, 6)
    tables = cached(groups, range(10), [8, 9])
    found, _ = groups.find(HASHES[:10])
    assert groups.blocks_to_take(found, [12, 12]) == 2 + 2  # all found ones are in use
    groups.release(tables)
    assert groups.blocks_to_take(found, [12, 12]) == 2 + 2 + 10 + 2
    assert groups.blocks_to_take(found, [12, 5]) == 2 + 0 + 10 + 2
    assert groups.blocks_to_take(groups.empty(), [12, 5]) == 17


@pytest.mark.parametrize(
    ("retention", "prefixes", "kept"),
    [
        (None, (), range(20)),
        (0, (), []),
        (0, (5,), [3, 4]),
        (0, (5, 0), [3, 4]),  # a junction of 0 is none
        (0, (1, 19), [0, 17, 18]),
        (16, (), [2, 3, 6, 7, 10, 11, 14, 15, 18, 19]),
        (16, (6,), [2, 3, 4, 5, 6, 7, 10, 11, 14, 15, 18, 19]),
        (4, (), range(20)),
    ],
)
def test_what_is_retained(retention, prefixes, kept):
    groups = groups_of(None, 6, retention=retention)
    assert [index for index in range(20) if groups.is_retained(6, index, prefixes)] == list(kept)
    assert all(groups.is_retained(None, index, prefixes) for index in range(20))
    tables = groups.empty()
    groups.grow(tables, 80)
    groups.cache(tables, HASHES, 0, 20, prefixes)
    assert groups.pool.num_cached == 20 + len(kept)


def test_a_prefix_that_is_retained_can_be_found() -> None:
    """Whatever the window: the blocks that end at a prefix are what a request needs to continue behind it."""
    for window in range(1, 30):
        groups = groups_of(None, window, retention=0)
        tables = groups.empty()
        groups.grow(tables, 80)
        groups.cache(tables, HASHES, 0, 20, (11,))
        found, junction = groups.find(HASHES[:20])
        expected = 20 if window == 1 else 11
        assert (len(found[1]), junction) == (expected, 0 if window == 1 else 20)


# The pool


def test_the_pool_skips_the_null_block() -> None:
    pool = GroupedBlockPool(4, 4)
    blocks = pool.allocate(3)
    pool.cache([1], [HASHES[0]])
    pool.share([NULL_BLOCK, 1])
    pool.free([2, NULL_BLOCK, 1, 0, 1])
    pool.check()
    assert (blocks, list(pool.free_list)) == ([0, 1, 2], [2, 0, 3, 1])
    assert without_null([NULL_BLOCK, 3, NULL_BLOCK]) == [3]


@pytest.mark.parametrize(
    ("error", "windows", "retention"),
    [
        (ValueError, (), 0),
        (ValueError, (0,), 0),
        (ValueError, (None, -3), 0),
        (TypeError, (None, 2.5), 0),
        (TypeError, (None, True), 0),
        (TypeError, 32, 0),
        (ValueError, (None, 32), -4),
        (ValueError, (None, 32), 6),
        (TypeError, (None, 32), 4.0),
    ],
)
def test_refused(error, windows, retention):
    with pytest.raises(error):
        BlockGroups(GroupedBlockPool(4, 4), windows, max_step_tokens=8, retention=retention)
