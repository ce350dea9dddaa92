"""Phase 3, task 6: a paged cache allocates memory as tokens arrive, and shares it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minicache.cache import paged
from minicache.cache.dense import KVCache
from minicache.cache.paged import PagedKVCache, PagedStorage
from minicache.errors import CacheOverflowError, OutOfBlocksError, SharedBlockError
from minicache.memory.blocks import BlockPool, BlockTable
from minicache_course.checks import CheckFailed, call, short, that

repeatable = settings(max_examples=40, deadline=None, derandomize=True, database=None, report_multiple_bugs=False)

LAYERS, HEADS, HEAD_DIM = 2, 2, 3
ROW = 2 * LAYERS * HEADS * HEAD_DIM * 4
"""Bytes of one token: keys and values, all layers, float32."""


def shared(num_blocks, block_size=4):
    """A pool, and a storage over it."""
    pool = BlockPool(num_blocks, block_size)
    return pool, PagedStorage(pool, LAYERS, HEADS, HEAD_DIM)


def over(storage, batch_size=1, max_seq_len=64):
    """A cache over a shared storage."""
    return PagedKVCache(LAYERS, batch_size, HEADS, max_seq_len, HEAD_DIM, storage=storage)


def rows(num_new, batch=1):
    return torch.randn(batch, HEADS, num_new, HEAD_DIM)


def run_pass(cache, k, v=None, layers=LAYERS):
    """One forward pass: in layer n the keys are k + n, the values v + n, or −k − n."""
    for layer in range(layers):
        call(cache.append, layer, k + layer, (-k if v is None else v) - layer).gives(None)


def forked(cache):
    """What `cache.fork()` gives, once it is known to be a paged cache."""
    outcome = call(cache.fork)
    if not isinstance(outcome.value, PagedKVCache):
        raise CheckFailed(outcome.called, short(outcome.returned), "a PagedKVCache", num_done=outcome.num_done)
    return outcome.value


def check_reads(cache, k, when):
    """Every layer reads as `run_pass(cache, k)` left it."""
    for layer in range(LAYERS):
        replace(call(cache.read, layer), called=f"read({layer}) {when}").gives((k + layer, -k - layer))


def contents(storage):
    """A copy of all keys and values, of all layers."""
    return [torch.stack([storage.k(layer), storage.v(layer)]) for layer in range(LAYERS)]


# The storage


@pytest.mark.parametrize(
    ("dtype", "nbytes"),
    [(torch.float32, 4), (torch.bfloat16, 2), (torch.float64, 8)],
    ids=["float32", "bfloat16", "float64"],
)
def test_bytes_of_a_storage(dtype, nbytes):
    """5 blocks of 4 tokens; a token has keys and values, 2 layers, 2 heads of 3: 24 numbers, in any dtype."""
    storage = PagedStorage(BlockPool(5, 4), LAYERS, HEADS, HEAD_DIM, dtype=dtype)
    that("token_nbytes", storage.token_nbytes).gives(24 * nbytes)
    that("nbytes", storage.nbytes).gives(5 * 4 * 24 * nbytes)
    that("the dtype of k(0) and v(1)", [storage.k(0).dtype, storage.v(1).dtype]).gives([dtype, dtype])


@pytest.mark.parametrize("layer", [-1, LAYERS])
def test_layers_that_a_storage_has_not(layer):
    """Layers are 0 … num_layers − 1, for keys and for values; −1 is not the last one."""
    _, storage = shared(2)
    call(storage.k, layer).raises(IndexError)
    call(storage.v, layer).raises(IndexError)


# Blocks are allocated with tokens


def test_it_is_a_kv_cache():
    """PagedKVCache is a subclass of KVCache, so code that accepts one accepts the other."""
    cache = call(PagedKVCache, LAYERS, 1, HEADS, 8, HEAD_DIM).value
    that("isinstance(cache, KVCache)", isinstance(cache, KVCache)).gives(True)
    that("tables of a batch of 1", len(cache.block_tables)).gives(1)


def test_a_block_is_taken_when_the_last_one_is_full():
    """Blocks of 4, two sequences: tokens 1, 5 and 9 of each allocate a block, and no other token does."""
    cache = PagedKVCache(LAYERS, 2, HEADS, 16, HEAD_DIM, block_size=4)
    that("nbytes_allocated of an empty cache", cache.nbytes_allocated).gives(0)
    for num_tokens, blocks in enumerate((1, 1, 1, 1, 2, 2, 2, 2, 3), start=1):
        run_pass(cache, rows(1, batch=2))
        that(f"blocks in use after token {num_tokens}", cache.storage.pool.num_used).gives(2 * blocks)
        that(f"nbytes_allocated after token {num_tokens}", cache.nbytes_allocated).gives(2 * blocks * 4 * ROW)
        that(f"nbytes_used after token {num_tokens}", cache.nbytes_used).gives(2 * num_tokens * ROW)


@repeatable
@given(
    block_size=st.integers(1, 7),
    batch=st.integers(1, 3),
    chunks=st.lists(st.integers(1, 9), min_size=1, max_size=5),
)
def test_at_most_one_unfinished_block_a_sequence(block_size, batch, chunks):
    """For any chunks, allocated − used is less than one block for each sequence, and 0 for whole blocks."""
    cache = PagedKVCache(LAYERS, batch, HEADS, sum(chunks), HEAD_DIM, block_size=block_size)
    done = 0
    for chunk in chunks:
        run_pass(cache, rows(chunk, batch))
        done += chunk
        wasted = call(lambda: (cache.nbytes_allocated - cache.nbytes_used) // (batch * ROW)).value
        that(f"empty slots of a sequence, {done} tokens in blocks of {block_size}", wasted).gives(-done % block_size)
    cache.storage.pool.check()


def test_nbytes_with_and_without_a_storage_of_its_own():
    """nbytes: max_seq_len tokens with its own storage; over a shared storage only the blocks it holds."""
    own = PagedKVCache(LAYERS, 2, HEADS, 10, HEAD_DIM, block_size=4)
    that("nbytes of an empty cache with its own storage", own.nbytes).gives(2 * 10 * ROW)
    pool, storage = shared(8)
    cache = call(over, storage, batch_size=2, max_seq_len=10**9).value  # a dense cache could not
    that("nbytes of an empty cache over a shared storage", cache.nbytes).gives(0)
    run_pass(cache, rows(5, batch=2))
    that("nbytes with 5 tokens in blocks of 4, batch of 2", cache.nbytes).gives(2 * 8 * ROW)
    that("nbytes_used", cache.nbytes_used).gives(2 * 5 * ROW)
    that("blocks in use", pool.num_used).gives(4)


def test_blocks_of_others_are_not_counted():
    """Two caches and a table over one storage: the bytes of each cache are those of its blocks, not the pool's."""
    pool, storage = shared(8)
    one, other = over(storage), over(storage)
    pool.allocate(1)
    run_pass(one, rows(5))
    run_pass(other, rows(9))
    that("nbytes_allocated with 5 tokens in blocks of 4", one.nbytes_allocated).gives(2 * 4 * ROW)
    that("nbytes_allocated with 9 tokens in blocks of 4", other.nbytes_allocated).gives(3 * 4 * ROW)


def test_slots_are_computed_at_layer_0(monkeypatch):
    """One block table serves all layers: after layer 0 no method of a table is called, and none grows."""

    class Counting(BlockTable):
        asked = 0

        def __getattribute__(self, name):
            Counting.asked += name in ("append", "blocks_needed", "slot", "block_ids")
            return super().__getattribute__(name)

    monkeypatch.setattr(paged, "BlockTable", Counting)
    cache = PagedKVCache(5, 2, HEADS, 16, HEAD_DIM, block_size=4)
    for num_new in (6, 1):
        new = rows(num_new, batch=2)
        call(cache.append, 0, new, new).gives(None)
        before = Counting.asked
        for layer in range(1, 5):
            call(cache.append, layer, new, new).gives(None)
        asked = Counting.asked - before
        that(f"calls of 4 more layers to the tables, in a forward pass of {num_new} tokens", asked).gives(0)


def test_rows_lie_where_the_tables_say(numbered):
    """Token p of sequence b is in slot block_tables[b].slot(p), the same in every layer, keys and values."""
    pool, storage = shared(6)
    pool.allocate(1)
    cache = over(storage, batch_size=2)
    k, v = numbered(2, HEADS, 5, HEAD_DIM), numbered(2, HEADS, 5, HEAD_DIM, start=1000)
    run_pass(cache, k[:, :, :3], v[:, :, :3])
    run_pass(cache, k[:, :, 3:], v[:, :, 3:])
    for layer in range(LAYERS):
        for b, table in enumerate(cache.block_tables):
            for p in range(5):
                block, offset = divmod(table.slot(p), 4)
                told = f"layer {layer}, sequence {b}, token {p}"
                that(f"the key of {told}", storage.k(layer)[block, offset]).gives(k[b, :, p] + layer)
                that(f"the value of {told}", storage.v(layer)[block, offset]).gives(v[b, :, p] - layer)


def test_max_seq_len_counts_tokens_and_not_blocks():
    """5 tokens in blocks of 4 leave 3 slots, but max_seq_len is 5: CacheOverflowError, and no block is allocated."""
    pool, storage = shared(8)
    cache = over(storage, max_seq_len=5)
    run_pass(cache, rows(5))
    for num_new in (1, 4):
        call(cache.append, 0, rows(num_new), rows(num_new)).raises(CacheOverflowError)
    that("blocks in use", pool.num_used).gives(2)
    that("num_tokens", cache.num_tokens).gives(5)


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        pytest.param(torch.randn(1, HEADS, 9, HEAD_DIM + 1), ValueError, id="another head size"),
        pytest.param(torch.randn(1, HEADS, 9, HEAD_DIM).double(), TypeError, id="float64"),
        pytest.param(None, TypeError, id="None"),
    ],
)
def test_a_refused_append_takes_no_block(bad, error):
    """k and v are checked before blocks are allocated: after an error the pool is unchanged."""
    pool, storage = shared(8)
    cache = over(storage)
    call(cache.append, 0, rows(9), bad).raises(error)
    call(cache.append, 0, bad, rows(9)).raises(error)
    call(cache.append, 1, rows(9), rows(9)).raises(ValueError)
    that("free blocks after refused appends", pool.num_free).gives(8)
    that("tokens of the table", cache.block_tables[0].num_tokens).gives(0)


# Freeing blocks


def test_reset_gives_every_block_back():
    """After each reset all blocks are free, those of every sequence, and nbytes_allocated is 0."""
    pool, storage = shared(8)
    cache = over(storage, batch_size=3)
    for num_tokens in (5, 8, 1):
        run_pass(cache, rows(num_tokens, batch=3))
        call(cache.reset).gives(None)
        that(f"free blocks after {num_tokens} tokens and a reset", pool.num_free).gives(8)
        that("nbytes_allocated after a reset", cache.nbytes_allocated).gives(0)
    pool.check()


def test_reset_in_the_middle_of_a_pass_gives_every_block_back():
    """A forward pass that stopped after layer 0 has allocated blocks: reset frees them too."""
    pool, storage = shared(8)
    cache = over(storage)
    run_pass(cache, rows(3))
    run_pass(cache, rows(6), layers=1)
    that("blocks in use in the middle of the pass", pool.num_used).gives(3)
    call(cache.reset).gives(None)
    that("free blocks after the reset", pool.num_free).gives(8)
    that("num_tokens after the reset", cache.num_tokens).gives(0)


@pytest.mark.parametrize("kept", [9, 8, 5, 4, 3, 0], ids=lambda what: f"keep {what}")
def test_truncate_keeps_the_beginning(kept):
    """The first n tokens stay, blocks without a token are freed, and the next append starts at position n."""
    pool, storage = shared(12)
    cache = over(storage, batch_size=2)
    k = rows(9, batch=2)
    run_pass(cache, k)
    call(cache.truncate, kept).gives(None)
    that(f"num_tokens when {kept} of 9 are kept", cache.num_tokens).gives(kept)
    that("blocks in use", pool.num_used).gives(2 * -(-kept // 4))
    that("positions(2)", cache.positions(2)).gives(torch.tensor([kept, kept + 1]))
    check_reads(cache, k[:, :, :kept], f"when {kept} of 9 are kept")
    more = rows(2, batch=2)
    run_pass(cache, more)
    check_reads(cache, torch.cat([k[:, :, :kept], more], dim=2), f"when {kept} of 9 were kept and 2 appended")


def test_truncate_ends_a_pass():
    """During a forward pass truncate(num_tokens) undoes it: its blocks are free again and layer 0 is next."""
    pool, storage = shared(8)
    cache, k = over(storage), rows(3)
    run_pass(cache, k)
    run_pass(cache, rows(6), layers=1)
    call(cache.truncate, 3).gives(None)
    that("num_tokens after truncate(3), in the middle of a pass of 6 tokens behind 3", cache.num_tokens).gives(3)
    that("blocks in use", pool.num_used).gives(1)
    check_reads(cache, k, "after the forward pass was undone")
    new = rows(1)
    run_pass(cache, new)
    check_reads(cache, torch.cat([k, new], dim=2), "after another forward pass")


@pytest.mark.parametrize(
    ("count", "error"), [(-1, ValueError), (4, ValueError), (2.0, TypeError)], ids=["−1", "4 of 3", "2.0"]
)
def test_truncate_to_an_impossible_length(count, error):
    """Negative, or more than num_tokens: ValueError. Not an int: TypeError. An unfinished forward pass stays."""
    pool, storage = shared(8)
    cache, k, new = over(storage), rows(3), rows(2)
    run_pass(cache, k)
    run_pass(cache, new, layers=1)
    call(cache.truncate, count).raises(error)
    that("blocks in use", pool.num_used).gives(2)
    call(cache.append, 1, new + 1, -new - 1).gives(None)
    check_reads(cache, torch.cat([k, new], dim=2), "when the forward pass was finished")


# One storage, several caches


@repeatable
@given(
    block_size=st.integers(1, 5),
    turns=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6)), min_size=1, max_size=10),
)
def test_caches_over_one_storage_do_not_meet(block_size, turns):
    """Three caches append to one storage alternately: each reads its tokens in order, and the blocks add up."""
    pool, storage = shared(200, block_size)
    caches = [over(storage, batch_size=batch) for batch in (1, 2, 3)]
    held = [rows(0, batch) for batch in (1, 2, 3)]
    for who, num_new in turns:
        new = rows(num_new, who + 1)
        run_pass(caches[who], new)
        held[who] = torch.cat([held[who], new], dim=2)
        for n, cache in enumerate(caches):
            check_reads(cache, held[n], f"of cache {n} after cache {who} got {num_new} tokens")
    expected = sum(k.shape[0] * -(-k.shape[2] // block_size) for k in held)
    that("blocks in use", pool.num_used).gives(expected)
    pool.check()


@pytest.mark.parametrize("free", [0, 1, 2], ids=lambda what: f"{what} blocks free")
def test_a_pool_that_is_short_writes_nothing(free):
    """Three sequences need a block each and 0, 1 or 2 are free: OutOfBlocksError, and nothing has changed."""
    pool, storage = shared(3 + free)
    cache, k = over(storage, batch_size=3), rows(4, batch=3)
    run_pass(cache, k)
    before = contents(storage)
    new = rows(1, batch=3)
    call(cache.append, 0, new, new).raises(OutOfBlocksError)
    that("free blocks after the refusal", pool.num_free).gives(free)
    that("tokens of the tables", [table.num_tokens for table in cache.block_tables]).gives([4, 4, 4])
    that("num_tokens", cache.num_tokens).gives(4)
    that("the storage's rows, layer by layer", contents(storage)).gives(before)
    call(cache.append, 1, new, new).raises(ValueError)  # the forward pass has not begun: layer 0 is next
    check_reads(cache, k, "after the refusal")


def test_freed_blocks_serve_whoever_was_refused():
    """An append that did not fit succeeds after another cache is reset, and reads none of its entries."""
    pool, storage = shared(4)
    first, second, k = over(storage), over(storage), rows(9)
    run_pass(first, rows(8))
    call(second.append, 0, k, k).raises(OutOfBlocksError)
    call(first.reset).gives(None)
    run_pass(second, k)
    check_reads(second, k, "of the cache that did not fit before")
    that("free blocks", pool.num_free).gives(1)


@pytest.mark.parametrize(
    ("sizes", "options", "error"),
    [
        pytest.param((3, HEADS, HEAD_DIM), {}, ValueError, id="other layers"),
        pytest.param((LAYERS, 1, HEAD_DIM), {}, ValueError, id="other heads"),
        pytest.param((LAYERS, HEADS, 4), {}, ValueError, id="another head size"),
        pytest.param((LAYERS, HEADS, HEAD_DIM), {"dtype": torch.float16}, TypeError, id="another dtype"),
        pytest.param((LAYERS, HEADS, HEAD_DIM), {"device": "meta"}, ValueError, id="another device"),
    ],
)
def test_a_storage_that_does_not_fit(sizes, options, error):
    """A shared storage must have the cache's layers, heads, head size, dtype and device."""
    _, storage = shared(4)
    num_layers, num_kv_heads, head_dim = sizes
    call(PagedKVCache, num_layers, 1, num_kv_heads, 8, head_dim, storage=storage, **options).raises(error)


@pytest.mark.parametrize(
    ("size", "error"),
    [(0, ValueError), (-4, ValueError), (2.0, TypeError), (True, TypeError)],
    ids=["0", "−4", "2.0", "True"],
)
def test_block_sizes_that_are_none(size, error):
    """A block holds at least one token: 0 is a ValueError, and 2.0 or True a TypeError."""
    call(PagedKVCache, LAYERS, 1, HEADS, 8, HEAD_DIM, block_size=size).raises(error)


# Forks


def test_a_fork_reads_the_same_and_takes_nothing():
    """A fork has the same tokens in the same blocks: it reads the same, and no block was allocated."""
    pool, storage = shared(8)
    cache, k = over(storage, batch_size=2), rows(6, batch=2)
    run_pass(cache, k)
    fork = forked(cache)
    check_reads(fork, k, "of the fork")
    that("num_tokens of the fork", fork.num_tokens).gives(6)
    that("blocks in use by both", pool.num_used).gives(4)
    that("the fork's blocks are the cache's", [table.block_ids for table in fork.block_tables]).gives(
        [table.block_ids for table in cache.block_tables]
    )


def test_whole_blocks_shared_each_goes_its_own_way():
    """After 8 tokens in blocks of 4 both may append, to separate blocks, and share the first two."""
    pool, storage = shared(8)
    cache, k = over(storage), rows(8)
    run_pass(cache, k)
    fork = forked(cache)
    for each, new in ((cache, rows(3)), (fork, rows(2))):
        run_pass(each, new)
        check_reads(each, torch.cat([k, new], dim=2), "of the cache" if each is cache else "of its fork")
    that("blocks in use: 2 shared, 1 each", pool.num_used).gives(4)


@pytest.mark.parametrize("batch", [1, 2], ids=lambda what: f"batch of {what}")
def test_an_unfinished_shared_block_is_not_written(batch):
    """6 tokens in blocks of 4, shared: append raises SharedBlockError in both, and nothing is written or allocated."""
    pool, storage = shared(12)
    cache, k = over(storage, batch_size=batch), rows(6, batch)
    run_pass(cache, k)
    fork = forked(cache)
    before, used = contents(storage), pool.num_used
    for name, each in (("cache", cache), ("fork", fork)):
        call(each.append, 0, rows(3, batch), rows(3, batch)).raises(SharedBlockError)
        check_reads(each, k, f"of the {name} after the refusal")
    that("the storage's rows, layer by layer", contents(storage)).gives(before)
    that("blocks in use", pool.num_used).gives(used)


def test_one_shared_block_of_several_sequences():
    """In a batch of 2 only the second has a shared unfinished block: the first does not grow either."""
    pool, storage = shared(12)
    cache, k = over(storage, batch_size=2), rows(6, batch=2)
    run_pass(cache, k)
    other = cache.block_tables[1].fork()
    before, new = contents(storage), rows(3, batch=2)
    call(cache.append, 0, new, new).raises(SharedBlockError)
    that("tokens of the two tables after the refusal", [each.num_tokens for each in cache.block_tables]).gives([6, 6])
    that("num_tokens after the refusal", cache.num_tokens).gives(6)
    that("blocks in use after the refusal", pool.num_used).gives(4)
    that("the storage's rows, layer by layer", contents(storage)).gives(before)
    other.release()
    run_pass(cache, new)
    check_reads(cache, torch.cat([k, new], dim=2), "when the block was no longer shared")


def test_when_one_lets_go_the_other_goes_on():
    """After the fork's reset, or truncation to whole blocks, the unfinished block is not shared: append works."""
    for freed_by in ("reset", "truncate"):
        pool, storage = shared(8)
        cache, k = over(storage), rows(6)
        run_pass(cache, k)
        fork = forked(cache)
        if freed_by == "reset":
            call(fork.reset).gives(None)
        else:
            call(fork.truncate, 4).gives(None)
        new = rows(3)
        run_pass(cache, new)
        check_reads(cache, torch.cat([k, new], dim=2), f"after its fork's {freed_by}")
        check_reads(fork, k[:, :, : fork.num_tokens], f"of the fork after its {freed_by}")
        pool.check()


def test_a_reset_leaves_the_forks_tokens():
    """The cache is reset and others allocate blocks: the fork still reads its tokens. At the end all are free."""
    pool, storage = shared(5)
    cache, k = over(storage), rows(6)
    run_pass(cache, k)
    fork = forked(cache)
    call(cache.reset).gives(None)
    other = over(storage)
    run_pass(other, rows(12))
    check_reads(fork, k, "of the fork when the blocks around it are in use")
    other.reset()
    call(fork.reset).gives(None)
    that("free blocks when all three are reset", pool.num_free).gives(5)


def test_a_fork_of_a_cache_with_its_own_storage():
    """The fork shares the storage and reserves nothing: its nbytes are the blocks that it holds."""
    cache, k = PagedKVCache(LAYERS, 1, HEADS, 12, HEAD_DIM, block_size=4), rows(5)
    run_pass(cache, k)
    fork = forked(cache)
    check_reads(fork, k, "of the fork")
    that("nbytes of the fork", fork.nbytes).gives(8 * ROW)
    that("nbytes of the cache", cache.nbytes).gives(12 * ROW)


def test_no_fork_in_the_middle_of_a_pass():
    """fork during a forward pass: ValueError, and the pass can be finished."""
    _, storage = shared(8)
    cache, k = over(storage), rows(3)
    run_pass(cache, k, layers=1)
    call(cache.fork).raises(ValueError)
    call(cache.append, 1, k + 1, -k - 1).gives(None)
    check_reads(cache, k, "when the forward pass was finished")
