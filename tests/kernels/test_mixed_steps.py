"""A step of decodes and chunks, in any order: the result is the oracle's, and each kernel gets its own sequences."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minicache.kernels import AttentionMetadata, oracle, paged_attention
from minicache.kernels.launch import parts

SIZE, KV_HEADS, GROUP, DIM = 4, 2, 3, 16

MIXES = {
    "decodes first": [1, 1, 6, 4],
    "decodes last": [6, 4, 1, 1],
    "decodes between": [5, 1, 3, 1, 1, 2],
    "decodes only": [1, 1, 1],
    "chunks only": [3, 2],
    "no query at all": [0, 0],
    "sequences without queries": [0, 1, 0, 5, 0, 1, 0],
    "a decode next to sequences without queries": [0, 1, 0],
}


def step(counts, device, *, befores=None, given=True):
    """Queries, caches with NaN where no sequence has a row, and metadata of a step with these numbers of queries."""
    befores = befores or [3 * i % 7 for i in range(len(counts))]
    lengths = [count + before for count, before in zip(counts, befores, strict=True)]
    used = [-(-length // SIZE) for length in lengths]
    ids = torch.randperm(sum(used) + 1)[: sum(used)] + 1
    tables = torch.full((len(counts), max(used) + 1), 2**31 - 1)
    caches = [torch.full((sum(used) + 2, SIZE, KV_HEADS, DIM), float("nan")) for _ in range(2)]
    for table, own, length in zip(tables, ids.split(used), lengths, strict=True):
        table[: len(own)] = own
        for position in range(length):
            for cache in caches:
                cache[own[position // SIZE], position % SIZE] = torch.randn(KV_HEADS, DIM)
    q = torch.randn(sum(counts), KV_HEADS * GROUP, DIM, device=device)
    known = {"lengths": lengths, "num_new_tokens": counts} if given else {}
    starts = torch.tensor([0, *accumulate(counts)])
    metadata = AttentionMetadata(*(each.to(device) for each in (tables, torch.tensor(lengths), starts)), **known)
    return q, *(cache.to(device) for cache in caches), metadata


def check(q, k_cache, v_cache, metadata, window=None):
    got = paged_attention(q, k_cache, v_cache, metadata, sliding_window=window, backend="triton")
    tensors = (metadata.block_tables, metadata.context_lens, metadata.query_start_loc)
    expected = oracle.attention(q, k_cache, v_cache, *tensors, sliding_window=window)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("given", [True, False], ids=["lengths given", "lengths read"])
@pytest.mark.parametrize("mix", MIXES)
def test_any_mix(device, mix, given):
    torch.manual_seed(0)
    check(*step(MIXES[mix], device, given=given))


@settings(max_examples=12)
@given(
    sizes=st.lists(st.tuples(st.sampled_from([0, 1, 1, 2, 9]), st.integers(0, 9)), min_size=1, max_size=5),
    window=st.none() | st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_drawn_mixes(device, sizes, window, seed):
    torch.manual_seed(seed)
    counts, befores = map(list, zip(*sizes, strict=True))
    if any(map(sum, sizes)):  # else no sequence has a row
        check(*step(counts, device, befores=befores), window)


def test_layers_share_the_division(device):
    torch.manual_seed(0)
    q, k_cache, v_cache, metadata = step([1, 5], device)
    divided = parts(metadata)
    for window in (None, 2):
        check(q, k_cache, v_cache, metadata, window)
    assert parts(metadata) is divided


@pytest.mark.parametrize(
    ("mix", "kernels"),
    [
        ("decodes first", [[0, 1], range(2, 12)]),
        ("decodes last", [[10, 11], range(10)]),
        ("decodes between", [[5, 9, 10], [*range(5), *range(6, 9), 11, 12]]),
        ("decodes only", [[0, 1, 2]]),
        ("sequences without queries", [[0, 6], range(1, 6)]),
    ],
)
def test_decodes_and_chunks_have_their_own_queries(device, mix, kernels):
    """Decodes come first, as a step without `query_start_loc`: the decode kernel's."""
    _, _, _, metadata = step(MIXES[mix], device)
    rows = torch.arange(metadata.starts[-1])
    found = parts(metadata)
    assert [rows[part.rows].tolist() for part in found] == [list(each) for each in kernels]
    assert [part.metadata.query_start_loc is None for part in found] == [True, False][: len(kernels)]


def test_neighbours_are_not_copied(device):
    """Where decodes stand together, each kernel reads views of the step's tensors."""
    q, _, _, metadata = step(MIXES["decodes first"], device)
    for part in parts(metadata):
        assert q[part.rows].untyped_storage().data_ptr() == q.untyped_storage().data_ptr()
        tables = part.metadata.block_tables
        assert tables.untyped_storage().data_ptr() == metadata.block_tables.untyped_storage().data_ptr()


def test_no_length_is_read_that_was_given(device, monkeypatch):
    """Looking at a GPU's tensor would wait for it, in the middle of the model."""
    _, _, _, metadata = step(MIXES["decodes between"], device)

    def read(tensor):
        raise AssertionError("a tensor's values were read")

    for name in ("tolist", "item", "__bool__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, read)
    for part in parts(metadata):
        assert part.metadata.max_context_len == max(part.metadata.lengths)
        assert part.metadata.starts[0] == 0
