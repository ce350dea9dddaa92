"""Phase 3, task 9: one step of an engine, over sequences of any lengths with any numbers of new tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minicache.cache.paged import PagedStorage, RaggedStep
from minicache.errors import OutOfBlocksError, SharedBlockError
from minicache.memory.blocks import BlockPool, BlockTable
from minicache.model import MiniGPT, MiniGPTConfig
from minicache_course.checks import call, that

repeatable = settings(max_examples=40, deadline=None, derandomize=True, database=None, report_multiple_bugs=False)

LAYERS, HEADS, HEAD_DIM = 2, 2, 4


def a_storage(num_blocks, block_size=4, layers=LAYERS):
    """A pool, and a storage over it with NaN in every slot, to reveal reads of unwritten slots."""
    pool = BlockPool(num_blocks, block_size)
    storage = PagedStorage(pool, layers, HEADS, HEAD_DIM)
    for layer in range(layers):
        storage.k(layer).fill_(float("nan"))
        storage.v(layer).fill_(float("nan"))
    return pool, storage


def rows(num_new):
    return torch.randn(1, HEADS, num_new, HEAD_DIM)


def fill(storage, tables, lengths):
    """Fill the tables to these lengths, with one step each; returns every sequence's keys `[1, H_kv, S, d]`."""
    held = []
    for table, length in zip(tables, lengths, strict=True):
        k = rows(length)
        if length:
            run_pass(RaggedStep(storage, [table], [length]), k)
        held.append(k)
    return held


def run_pass(step, k):
    """One forward pass: in layer n the keys are k + n and the values −k − n."""
    for layer in range(LAYERS):
        call(step.append, layer, k + layer, -k - layer).gives(None)


# The tensors of a step


def test_two_sequences_worked_by_hand():
    """4 tokens and 3 new, 9 tokens and 1 new, blocks of 4: slots, lengths, starts, positions and tables."""
    _, storage = a_storage(8)
    tables = [BlockTable(storage.pool), BlockTable(storage.pool)]
    fill(storage, tables, [4, 9])  # blocks 0, and 1, 2, 3
    step = call(RaggedStep, storage, tables, [3, 1]).value  # block 4, and none: 9 tokens leave space in block 3
    that("slot_mapping", step.slot_mapping).gives(torch.tensor([16, 17, 18, 13]))
    that("context_lens", step.context_lens).gives(torch.tensor([7, 10]))
    that("query_start_loc", step.query_start_loc).gives(torch.tensor([0, 3, 4]))
    call(step.positions, 4).gives(torch.tensor([4, 5, 6, 9]))
    that("block_tables, −1 after a sequence's last block", step.block_tables).gives(
        torch.tensor([[0, 4, -1], [1, 2, 3]])
    )


@repeatable
@given(
    block_size=st.integers(1, 5),
    counts=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6)), min_size=1, max_size=5),
)
def test_any_step_tells_where_its_tokens_are(block_size, counts):
    """For any lengths: token t of a sequence is at position old length + t, and its slot is its table's."""
    pool, storage = a_storage(100, block_size)
    tables = [BlockTable(pool) for _ in counts]
    for table, (before, _) in zip(tables, counts, strict=True):
        table.append(before)
    new = [n for _, n in counts]
    step = call(RaggedStep, storage, tables, new).value
    positions = [before + t for before, n in counts for t in range(n)]
    call(step.positions, sum(new)).gives(torch.tensor(positions))
    slots = [table.slot(before + t) for table, (before, n) in zip(tables, counts, strict=True) for t in range(n)]
    that("slot_mapping", step.slot_mapping.tolist()).gives(slots)
    that("context_lens", step.context_lens.tolist()).gives([before + n for before, n in counts])
    starts = [sum(new[:i]) for i in range(len(new) + 1)]
    that("query_start_loc", step.query_start_loc.tolist()).gives(starts)
    for i, table in enumerate(tables):
        blocks = step.block_tables[i, : len(table.block_ids)].tolist()
        that(f"the blocks of sequence {i}", blocks).gives(table.block_ids)
    dtypes = step.block_tables.dtype, step.slot_mapping.dtype
    that("whether the step's tensors are int64", dtypes == (torch.int64, torch.int64)).gives(True)


def test_positions_of_another_number_of_tokens():
    """positions for a number of tokens other than the step's is a ValueError."""
    pool, storage = a_storage(8)
    step = RaggedStep(storage, [BlockTable(pool), BlockTable(pool)], [3, 1])
    for count in (0, 3, 5):
        call(step.positions, count).raises(ValueError)


# Keys and values


@repeatable
@given(
    block_size=st.integers(1, 5),
    counts=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6)), min_size=1, max_size=4),
)
def test_each_sequence_reads_its_own_tokens(block_size, counts):
    """After a forward pass read(layer) gives all tokens of all sequences, one sequence after the other, old and new."""
    pool, storage = a_storage(100, block_size)
    tables = [BlockTable(pool) for _ in counts]
    held = fill(storage, tables, [before for before, _ in counts])
    new = [rows(n) for _, n in counts]
    step = call(RaggedStep, storage, tables, [n for _, n in counts]).value
    run_pass(step, torch.cat(new, dim=2))
    expected = torch.cat([torch.cat(pair, dim=2) for pair in zip(held, new, strict=True)], dim=2)
    for layer in range(LAYERS):
        call(step.read, layer).gives((expected + layer, -expected - layer))


@repeatable
@given(
    block_size=st.integers(1, 5),
    group=st.sampled_from([1, 2, 3, 5, 8]),
    counts=st.lists(st.tuples(st.integers(0, 6), st.sampled_from([1, 1, 2, 5])), min_size=1, max_size=4),
    windows=st.lists(st.sampled_from([None, None, 1, 3, 20]), min_size=LAYERS, max_size=LAYERS),
)
def test_each_token_attends_to_its_own_sequence(by_hand, block_size, group, counts, windows):
    """Prompts, chunks and single tokens in one step: each gets causal attention over its sequence.

    Through the window that a layer has, which may be another than the layer's before.
    """
    pool, storage = a_storage(100, block_size)
    tables = [BlockTable(pool) for _ in counts]
    held = fill(storage, tables, [before for before, _ in counts])
    new = [rows(n) for _, n in counts]
    q = [torch.randn(1, HEADS * group, n, HEAD_DIM) for _, n in counts]
    step = call(RaggedStep, storage, tables, [n for _, n in counts]).value
    everything = [torch.cat(pair, dim=2) for pair in zip(held, new, strict=True)]
    for layer in range(LAYERS):
        k = torch.cat(new, dim=2) + layer
        call(step.append, layer, k, -k).gives(None)
        window = windows[layer]
        expected = [by_hand(q[i], k + layer, -k - layer, window) for i, k in enumerate(everything)]
        options = {} if window is None else {"window": window}
        got = call(step.attend, layer, torch.cat(q, dim=2), **options).value
        that(f"attend({layer}, q) with new tokens {[n for _, n in counts]}", got).is_close(torch.cat(expected, dim=2))


# MiniGPT, through a step


def minigpt(num_heads=4):
    """A small MiniGPT with random weights."""
    config = MiniGPTConfig(
        vocab_size=50,
        hidden_size=32,
        num_layers=3,
        num_heads=num_heads,
        num_kv_heads=HEADS,
        head_dim=HEAD_DIM,
        intermediate_size=48,
        max_seq_len=64,
        rope_theta=10_000.0,
        norm_eps=1e-5,
    )
    return MiniGPT(config).eval()


def stepping(model, storage):
    """A function that makes one step of the model: ids for each sequence in, logits `[n, vocab]` of each out."""

    def model_step(tables, tokens):
        step = RaggedStep(storage, tables, [len(ids) for ids in tokens])
        with torch.inference_mode():
            logits = model(torch.tensor([token for ids in tokens for token in ids])[None], step)
        return list(logits[0].split([len(ids) for ids in tokens]))

    return model_step


def recomputed(model, tokens):
    """Logits `[n, vocab]` of one sequence, without a cache."""
    with torch.inference_mode():
        return model(torch.tensor([tokens]))[0]


def alone(model, prompt, num_new):
    """Greedy decoding of one sequence without a cache: its `num_new` tokens."""
    tokens = list(prompt)
    for _ in range(num_new):
        tokens.append(int(recomputed(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def test_minigpt_reads_several_prompts_at_once():
    """Three prompts of 5, 1 and 9 tokens in one forward pass: the logits are those of each prompt alone."""
    model = minigpt()
    pool, storage = a_storage(16, layers=3)
    prompts = [torch.randint(50, (n,)).tolist() for n in (5, 1, 9)]
    got = call(stepping(model, storage), [BlockTable(pool) for _ in prompts], prompts).value
    for prompt, logits in zip(prompts, got, strict=True):
        that(f"logits of the prompt of {len(prompt)} tokens", logits).is_close(
            recomputed(model, prompt), rtol=0, atol=1e-4
        )


@pytest.mark.parametrize("block_size", [1, 3, 16], ids=lambda what: f"block_size {what}")
def test_mixed_steps_give_each_sequence_its_tokens(block_size):
    """Sequences arrive and finish, prompts and single tokens in one step: each gets the same tokens as alone.

    A sequence's blocks go back when it is done, and later ones use them.
    """
    model = minigpt(num_heads=6)
    pool, storage = a_storage({1: 48, 3: 18, 16: 6}[block_size], block_size, layers=3)
    model_step = stepping(model, storage)
    arrivals = {0: [7], 1: [1, 4], 3: [12], 5: [2], 8: [5, 3]}  # step → lengths of the prompts that arrive
    running, finished = [], []
    for now in range(24):
        for length in arrivals.get(now, []):
            prompt = torch.randint(50, (length,)).tolist()
            running.append({"prompt": prompt, "next": prompt, "out": [], "table": BlockTable(pool)})
        if not running:
            break
        got = call(model_step, [each["table"] for each in running], [each["next"] for each in running])
        for each, logits in zip(running, got.value, strict=True):
            each["out"].append(int(logits[-1].argmax()))
            each["next"] = each["out"][-1:]
        for each in [each for each in running if len(each["out"]) == 6]:
            running.remove(each)
            finished.append(each)
            each["table"].release()
    that("sequences that were finished", len(finished)).gives(7)
    for each in finished:
        told = f"the tokens that follow the prompt of {len(each['prompt'])} tokens"
        that(told, each["out"]).gives(alone(model, each["prompt"], 6))
    that("free blocks at the end", pool.num_free).gives(pool.num_blocks)
    pool.check()


def test_a_prompt_in_chunks_beside_a_decode():
    """A prompt of 11 in chunks of 4, 4 and 3, while another sequence decodes: the same logits as without chunks."""
    model = minigpt()
    pool, storage = a_storage(16, 3, layers=3)
    long, short = torch.randint(50, (11,)).tolist(), torch.randint(50, (5,)).tolist()
    tables = [BlockTable(pool), BlockTable(pool)]
    chunks = []
    for start, end, fed in ((0, 4, short[:3]), (4, 8, short[3:4]), (8, 11, short[4:])):
        chunks.append(call(stepping(model, storage), tables, [long[start:end], fed]).value)
    for i, tokens in enumerate((long, short)):
        got = torch.cat([logits[i] for logits in chunks])
        that(f"logits of sequence {i}", got).is_close(recomputed(model, tokens), rtol=0, atol=1e-4)


# Refusals


@pytest.mark.parametrize(
    ("free", "counts"),
    [
        pytest.param(0, [1, 1], id="none free"),
        pytest.param(1, [1, 1], id="enough for the first alone"),
        pytest.param(2, [5, 5], id="enough for either"),
        pytest.param(2, [1, 1, 9], id="the third needs too many"),
    ],
)
def test_blocks_for_all_or_for_none(free, counts):
    """Too few free blocks: OutOfBlocksError. No table has grown and no block is allocated, not for those that fit."""
    pool, storage = a_storage(len(counts) + free)
    tables = [BlockTable(pool) for _ in counts]
    fill(storage, tables, [4] * len(counts))
    call(RaggedStep, storage, tables, counts).raises(OutOfBlocksError)
    that("tokens of the tables after the refusal", [table.num_tokens for table in tables]).gives([4] * len(counts))
    that("free blocks after the refusal", pool.num_free).gives(free)
    pool.check()


def test_exactly_enough_blocks():
    """A step may use the last free block: one that needs all free blocks is made."""
    pool, storage = a_storage(4)
    tables = [BlockTable(pool), BlockTable(pool)]
    fill(storage, tables, [3, 4])
    call(RaggedStep, storage, tables, [2, 1]).value.positions(3)
    that("free blocks", pool.num_free).gives(0)


def test_a_shared_unfinished_block_is_not_written():
    """A sequence whose unfinished block is shared cannot grow: SharedBlockError, and no table has changed."""
    pool, storage = a_storage(8)
    tables = [BlockTable(pool), BlockTable(pool)]
    fill(storage, tables, [4, 6])
    fork = tables[1].fork()
    for named in ([tables[0], tables[1]], [tables[0], fork], [fork]):
        call(RaggedStep, storage, named, [1] * len(named)).raises(SharedBlockError)
        that("tokens of the tables", [table.num_tokens for table in (*tables, fork)]).gives([4, 6, 6])
        that("free blocks", pool.num_free).gives(5)
    fork.release()
    call(RaggedStep, storage, tables, [1, 1]).value.positions(2)


@pytest.mark.parametrize(
    ("counts", "error"),
    [
        pytest.param(counts, error, id=str(counts))
        for counts, error in (
            ([1], ValueError),
            ([1, 1, 1], ValueError),
            ([1, 0], ValueError),
            ([-1, 1], ValueError),
            ([1, 2.0], TypeError),
            ([True, 1], TypeError),
            ([1, "1"], TypeError),
        )
    ],
)
def test_counts_that_are_refused(counts, error):
    """One count for each table, each an int of 1 or more: else ValueError or TypeError, and nothing is allocated."""
    pool, storage = a_storage(8)
    call(RaggedStep, storage, [BlockTable(pool), BlockTable(pool)], counts).raises(error)
    that("free blocks", pool.num_free).gives(8)


def test_tables_that_are_refused():
    """No table at all, a table twice, or one over another pool: ValueError, and nothing is allocated."""
    pool, storage = a_storage(8)
    table, elsewhere = BlockTable(pool), BlockTable(BlockPool(8, 4))
    call(RaggedStep, storage, [], []).raises(ValueError)
    call(RaggedStep, storage, [table, table], [1, 1]).raises(ValueError)
    call(RaggedStep, storage, [table, elsewhere], [1, 1]).raises(ValueError)
    that("tokens of the tables", [table.num_tokens, elsewhere.num_tokens]).gives([0, 0])


@pytest.mark.parametrize(
    ("layer", "bad", "error"),
    [
        pytest.param(0, rows(3), ValueError, id="3 tokens instead of 4"),
        pytest.param(0, rows(4).expand(2, -1, -1, -1), ValueError, id="a batch of 2"),
        pytest.param(0, rows(4)[:, :1], ValueError, id="1 head"),
        pytest.param(0, rows(4).double(), TypeError, id="float64"),
        pytest.param(0, None, TypeError, id="None"),
        pytest.param(1, rows(4), ValueError, id="layer 1 first"),
        pytest.param(2, rows(4), IndexError, id="no such layer"),
        pytest.param(-1, rows(4), IndexError, id="layer −1"),
    ],
)
def test_rows_that_do_not_fit(layer, bad, error):
    """Anything but the step's N rows for the next layer is refused, and nothing is written."""
    pool, storage = a_storage(8)
    step = RaggedStep(storage, [BlockTable(pool), BlockTable(pool)], [3, 1])
    call(step.append, layer, bad, bad).raises(error)
    that("whether every row of layer 0 has a NaN, as before", bool(storage.k(0).isnan().all())).gives(True)
    k = rows(4)
    run_pass(step, k)
    call(step.read, 1).gives((k + 1, -k - 1))


def test_a_layer_without_rows_has_nothing_to_show():
    """Attending to or reading a layer without rows in this step: ValueError. No such layer: IndexError."""
    pool, storage = a_storage(8)
    step, k, q = RaggedStep(storage, [BlockTable(pool)], [3]), rows(3), torch.randn(1, 4, 3, HEAD_DIM)
    call(step.attend, 0, q).raises(ValueError)
    call(step.append, 0, k, k).gives(None)
    call(step.read, 0).gives((k, k))
    call(step.read, 1).raises(ValueError)
    call(step.attend, 1, q).raises(ValueError)
    call(step.attend, 2, q).raises(IndexError)


def test_a_step_reads_what_it_was_made_for():
    """The table grows in the next step, by a token in the same block: the older step still reads its own 3."""
    pool, storage = a_storage(8)
    table, k = BlockTable(pool), rows(3)
    step = RaggedStep(storage, [table], [3])
    run_pass(step, k)
    run_pass(RaggedStep(storage, [table], [1]), rows(1))
    call(step.read, 1).gives((k + 1, -k - 1))


def test_a_step_serves_one_pass():
    """When every layer has its rows, another append is a ValueError: it would overwrite them. Reading still works."""
    pool, storage = a_storage(8)
    step, k = RaggedStep(storage, [BlockTable(pool)], [3]), rows(3)
    run_pass(step, k)
    call(step.append, 0, rows(3), rows(3)).raises(ValueError)
    call(step.read, 0).gives((k, -k))


@pytest.mark.parametrize(
    "shape", [(1, 4, 3, 4), (2, 4, 4, 4), (1, 3, 4, 4), (1, 4, 4, 8), (4, 4, 4)], ids="q {}".format
)
def test_queries_that_do_not_fit(shape):
    """Another number of tokens, a batch of 2, 3 query heads on 2, another head size, three dimensions: ValueError."""
    pool, storage = a_storage(8)
    step = RaggedStep(storage, [BlockTable(pool), BlockTable(pool)], [3, 1])
    run_pass(step, rows(4))
    call(step.attend, 0, torch.randn(shape)).raises(ValueError)
