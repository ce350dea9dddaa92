"""Phase 4, task 6: decode attention's options: scale, ALiBi, scaled caches, a sliding window, a soft cap."""

from __future__ import annotations

import pytest
import torch


def slopes(num_heads, device):
    """ALiBi's slopes: 2^(−8 / H), 2^(−16 / H), …"""
    return torch.tensor([2 ** (-8 * (head + 1) / num_heads) for head in range(num_heads)], device=device)


def test_scale(batch, decode):
    """`scale` replaces 1 / √d."""
    decode(batch([16], 1, 16, 8), 1, scale=0.4)
    decode(batch([16], 1, 16, 8), 1, scale=1)


def test_alibi(batch, decode, device):
    """One query head adds its slope times (key position − query position): 0 for the newest token, negative before."""
    decode(batch([16], 1, 16, 8), 1, alibi_slopes=slopes(1, device))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(6, 2), (2, 2)], ids=str)
def test_a_slope_for_each_query_head(batch, decode, device, num_heads, num_kv_heads):
    """Each query head has its own slope, and so has each row of a group."""
    decode(batch([21], num_kv_heads, 16, 8), num_heads, alibi_slopes=slopes(num_heads, device))


def test_alibi_counts_from_each_rows_position(batch, attends_over, device):
    """attend_range with a slope for each row, and rows at different positions: row_max shows the difference."""
    attends_over(batch([30], 1, 16, 8), 5, 25, [9, 20, 29], slopes=torch.tensor([0.5, 0.25, 1.0], device=device))


def test_slopes_with_gaps(batch, decode, device, apart):
    """The slopes may be every second number of a wider tensor: the launcher makes them contiguous."""
    decode(batch([21], 2, 16, 8), 4, alibi_slopes=apart(slopes(4, device)))


def test_key_scale_and_value_scale(batch, decode):
    """Keys are the cache's numbers times k_scale, values times v_scale: two different numbers."""
    decode(batch([16], 1, 16, 8), 1, k_scale=0.5)
    decode(batch([16], 1, 16, 8), 1, v_scale=2.5)
    decode(batch([21], 1, 16, 8), 2, k_scale=1.7, v_scale=0.3)


def test_a_scale_for_each_head(batch, decode, device):
    """k_scale and v_scale may be [H_kv], one number per KV head."""
    k_scale = torch.tensor([0.5, 1.5, 2.5], device=device)
    v_scale = torch.tensor([3.0, 0.25, 1.0], device=device)
    decode(batch([21], 3, 16, 8), 6, k_scale=k_scale, v_scale=v_scale)


def test_an_int8_cache(batch, decode, device):
    """Eight-bit keys and values with a scale per head; the queries and all sums stay fp32."""
    k_scale, v_scale = torch.tensor([0.02, 0.03], device=device), torch.tensor([0.01, 0.04], device=device)
    decode(batch([21], 2, 16, 8, dtype=torch.int8), 4, k_scale=k_scale, v_scale=v_scale)


@pytest.mark.parametrize("window", [5, 1, 16, 100], ids=lambda what: f"a window of {what}")
def test_sliding_window(batch, decode, window):
    """A window of W is the query's own position and the W − 1 before it."""
    decode(batch([21, 7], 1, 16, 8), 2, sliding_window=window)


def test_rows_before_the_window_are_not_read(batch, decode, device):
    """Slots before the window may hold NaN: a weight of 0 does not help, since 0 · NaN is NaN."""
    some = batch([40], 1, 16, 8)
    for cache in (some.k_cache, some.v_cache):
        for block in some.block_tables[0, :4].tolist():
            cache[block] = float("nan")  # positions 0 … 31; the window begins at 32
    decode(some, 2, sliding_window=8)


def test_the_window_of_each_row(batch, attends_over):
    """attend_range masks each row: it sees its own position and the W − 1 before it, wherever the range begins."""
    attends_over(batch([60], 1, 16, 8), 20, 50, [18, 20, 29, 30, 40, 59], sliding_window=10)


def test_a_row_that_sees_nothing_in_the_first_tile(batch, attends_over):
    """A window of 10, tokens 2 … 49 in tiles of 16: some rows see nothing in the first tile, or in the first two."""
    attends_over(batch([60], 1, 16, 8), 2, 50, [20, 30, 45, 55], sliding_window=10)


def test_soft_cap(batch, decode):
    """Scores beyond the cap approach it but never exceed it: c · tanh(score / c). One full tile."""
    decode(batch([16], 1, 256, 8, at=6.0), 2, softcap=2.0)
    decode(batch([16], 1, 256, 8), 2, softcap=30.0)


def test_what_is_masked_stays_masked_under_a_soft_cap(batch, decode):
    """The mask comes after the cap: tanh(−∞) is −1, and a missing token would count."""
    decode(batch([7], 1, 16, 8, at=6.0), 2, softcap=2.0)


def test_soft_cap_of_huge_scores(batch, decode):
    """Scores in the thousands, of either sign: a tanh made of exponentials must not become inf / inf."""
    decode(batch([21], 1, 64, 8, at=500.0), 4, softcap=5.0)


def test_soft_cap_far_above_the_scores(batch, decode):
    """A cap of a million changes nothing: 1 − exp(−2x) has no digits left where x is a millionth."""
    decode(batch([21], 1, 16, 8, at=4.0), 4, softcap=1e6)


def test_the_soft_cap_comes_before_alibi_and_the_mask(batch, decode, device):
    """softcap bounds q · k alone: ALiBi is added to the capped score, and what is masked stays masked."""
    decode(batch([40], 1, 16, 8, at=4.0), 4, softcap=1.5, alibi_slopes=8 * slopes(4, device), sliding_window=30)


def test_the_soft_cap_comes_after_the_scale(batch, decode):
    """The cap applies to the scaled score, k_scale included."""
    decode(batch([21], 1, 16, 8, at=2.0), 4, softcap=1.5, scale=0.1, k_scale=3.0)


def test_all_at_once(batch, decode, device):
    """Every option together, on more than one tile and ragged lengths."""
    decode(
        batch([37, 0, 18], 2, 256, 16),
        4,
        scale=0.1,
        alibi_slopes=slopes(4, device),
        k_scale=0.7,
        v_scale=torch.tensor([1.3, 0.6], device=device),
        sliding_window=20,
        softcap=3.0,
    )


def test_half_precision_with_options(batch, decode, device):
    """In bfloat16 too, all options are computed in fp32."""
    decode(
        batch([37], 1, 64, 16, dtype=torch.bfloat16),
        4,
        alibi_slopes=slopes(4, device),
        sliding_window=20,
        softcap=3.0,
    )
