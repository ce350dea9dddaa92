"""Phase 4, task 2: gather a sequence's KV entries through its block table."""

from __future__ import annotations

import pytest
import torch

from minicache.kernels import gather_kv
from minicache_course.checks import call, that


@pytest.fixture(scope="session")
def gathers(watched):
    """`gathers(batch)`: gather keys and values of every sequence, and compare with what was stored."""

    def run(batch):
        __tracebackhide__ = True
        for i, length in enumerate(batch.lengths):
            for cache, dense in ((batch.k_cache, batch.keys), (batch.v_cache, batch.values)):
                got = call(watched(gather_kv), cache, batch.block_tables[i], length).value
                that(f"gather_kv of sequence {i}, {length} tokens", got.cpu()).gives(dense[i])

    return run


def test_one_block(batch, gathers):
    """Four tokens, all of one block of 4: the block's id is the table's first entry."""
    gathers(batch([4], 1, 16, 4))


def test_two_blocks(batch, gathers):
    """Eight tokens in two blocks of 4: each token's block is looked up, in one tile."""
    gathers(batch([8], 1, 16, 4))


@pytest.mark.parametrize(
    ("num_kv_heads", "head_dim", "block_size"),
    [
        pytest.param(*sizes, id=f"{sizes[0]} KV heads, d {sizes[1]}, blocks of {sizes[2]}")
        for sizes in ((2, 64, 16), (3, 5, 4))
    ],
)
def test_the_rows_in_the_order_of_the_tokens(batch, gathers, num_kv_heads, head_dim, block_size):
    """Whatever blocks a sequence has, its entries come back in order. Unused slots hold NaN."""
    gathers(batch([3 * block_size + 2, block_size + 1], num_kv_heads, head_dim, block_size))


@pytest.mark.parametrize("length", [1, 7, 9], ids=lambda what: f"{what} tokens")
def test_around_a_blocks_end(batch, gathers, length):
    """One token, one less than a block holds, all of it, one more. The table's tail is not read."""
    gathers(batch([length], 2, 16, 8))


@pytest.mark.parametrize("length", [64, 65, 130], ids=lambda what: f"{what} tokens")
def test_around_a_tiles_end(batch, gathers, length):
    """More tokens than one program copies: each tile begins where the previous one ends."""
    gathers(batch([length], 1, 8, 16))


def test_a_table_without_a_tail(device, watched):
    """Every entry of the table is in use, and the last tile reaches past it: nothing there may be read."""
    cache = torch.randn(5, 4, 2, 8, device=device)
    longer = torch.tensor([3, 1, 2**31 - 1, 2**31 - 1], device=device)
    got = call(watched(gather_kv), cache, longer[:2], 7).value
    that("gather_kv of 7 tokens in blocks 3 and 1", got).gives(torch.cat([cache[3], cache[1, :3]]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
def test_every_number_arrives_bit_for_bit(batch, gathers, dtype):
    """Gathering copies: no number changes, in any dtype."""
    gathers(batch([11], 2, 16, 8, dtype=dtype))


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_block_tables_of_both_integers(batch, gathers, index):
    """Block ids may be int32 or int64."""
    gathers(batch([11, 20], 2, 16, 8, index=index))


def test_a_table_that_is_a_column(device, watched):
    """A block table may be a column of a larger tensor: its entries need not be contiguous."""
    cache = torch.randn(6, 4, 2, 8, device=device)
    tables = torch.tensor([[5, 0], [1, 0], [4, 0]], device=device)
    got = call(watched(gather_kv), cache, tables[:, 0], 10).value
    that("gather_kv of 10 tokens in blocks 5, 1, 4", got).gives(torch.cat([cache[5], cache[1], cache[4, :2]]))


def test_caches_with_strides_of_their_own(batch, gathers):
    """A cache may be a view of a larger tensor: use each given stride, and derive none from another."""
    gathers(batch([11, 6], 2, 16, 4).strided())


def test_other_blocks_same_rows(batch, gathers):
    """The same entries in other blocks give the same result, bit for bit."""
    one = batch([21, 9], 2, 16, 8)
    gathers(one.moved(1))


def test_shared_blocks(batch, gathers):
    """Two sequences may share their first blocks."""
    gathers(batch([20, 19], 2, 16, 8, shared=2))


def test_no_tokens(device, watched):
    """Nothing to gather: an empty tensor; nothing is launched, and no table entry is read."""
    cache = torch.randn(3, 4, 2, 8, device=device)
    table = torch.tensor([2**31 - 1], device=device)
    call(watched(gather_kv), cache, table, 0).gives(cache.new_empty(0, 2, 8))


@pytest.mark.parametrize(
    "dim", [pytest.param(d, id=n) for d, n in enumerate(("blocks", "slots in the block", "heads"))]
)
def test_a_cache_of_more_than_two_billion_numbers(batch, gathers, far_apart, dim):
    """A block, a slot in it or a head times its stride may exceed 2³¹ − 1: in 32 bits that is a negative address."""
    some = batch([6], 3, 4, 3, dtype=torch.int8)
    some.k_cache, some.v_cache = far_apart(some.k_cache[:3], dim), far_apart(some.v_cache[:3], dim)
    gathers(some)
