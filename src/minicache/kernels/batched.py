"""Decode attention of many sequences at once in PyTorch: what a CPU runs while an engine's batch is in decode.

`plain` goes from one sequence to the next. For 32 sequences of a hundred tokens, in each of six layers, those are
hundreds of calls a step, and making them takes longer than the arithmetic. Here sequences of about one length are
gathered into a rectangle and attend in one call, as long as the rectangle is small enough to be read again from the
processor's cache. Who fills a rectangle alone goes to `plain`, and so do prompts, which have arithmetic enough.

No phase builds this module. Its functions are those of `minicache.kernels`, with no option besides the scale. What is
not for them, one sequence alone, a cache that is not contiguous, another device, they pass on to `plain`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from minicache.kernels import plain

RECTANGLE_NBYTES = 1 << 20
"""The most that a rectangle's keys and values may take. With half as much there are more calls, and with more there is
more padding, and the copy falls out of the processor's cache. Measured from 256 KiB to 8 MiB, on 32 sequences of 75 to
175 tokens and on 32 of 64 to 1,024."""


def paged_decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    scale: float | None = None,
) -> Tensor:
    """`plain.paged_decode_attention`, quicker where several sequences are short."""
    paged = (k_cache, v_cache, block_tables, context_lens)
    if q.shape[0] == 1 or q.device.type != "cpu" or not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        return plain.paged_decode_attention(q, *paged, scale=scale)
    plan = _plan(q, k_cache, block_tables, context_lens)
    if not plan.rectangles:
        return plain.paged_decode_attention(q, *paged, scale=scale)
    *together, alone = torch.split(q.index_select(0, plan.order), plan.sizes)
    out = [
        _attend(rows, k_cache, v_cache, rectangle, scale)
        for rows, rectangle in zip(together, plan.rectangles, strict=True)
    ]
    if alone.shape[0]:
        lonely = plan.order[-alone.shape[0] :]
        paged = (k_cache, v_cache, block_tables[lonely], context_lens[lonely])
        out.append(plain.paged_decode_attention(alone, *paged, scale=scale))
    return torch.cat(out).index_select(0, plan.places)


def paged_prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_start_loc: Tensor,
    *,
    scale: float | None = None,
) -> Tensor:
    """`plain.paged_prefill_attention` of the prompts, and beside them the decode of sequences with one new token."""
    caches, num_new = (k_cache, v_cache), query_start_loc.diff()
    in_decode = num_new == 1
    if int(in_decode.sum()) < 2:
        return plain.paged_prefill_attention(q, *caches, block_tables, context_lens, query_start_loc, scale=scale)
    out, in_prompt = torch.empty_like(q), ~in_decode
    tokens = query_start_loc[:-1][in_decode]
    paged = (*caches, block_tables[in_decode], context_lens[in_decode])
    out[tokens] = paged_decode_attention(q[tokens], *paged, scale=scale)
    tokens = in_prompt.repeat_interleave(num_new)
    starts = F.pad(num_new[in_prompt].cumsum(0), (1, 0))
    paged = (*caches, block_tables[in_prompt], context_lens[in_prompt])
    out[tokens] = plain.paged_prefill_attention(q[tokens], *paged, starts, scale=scale)
    return out


@dataclass(frozen=True)
class _Rectangle:
    """Sequences that attend together, n of them, the longest with S rows.

    Attributes:
        slots: `[n · S]` int64, where each row lies. Behind a sequence's last row stands its first: it is masked, but
            not even a masked row may be NaN, and only a row of its own is sure to be none.
        bias: `[n, 1, 1, S]`, to be added to the scores: 0, and −inf behind a sequence's last row.
    """

    slots: Tensor
    bias: Tensor


def _attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, rectangle: _Rectangle, scale: float | None) -> Tensor:
    """One query of each of n sequences, `[n, H, d]`, over its rows."""
    num_kv_heads, head_dim = k_cache.shape[2:]
    num_seqs, longest = q.shape[0], rectangle.bias.shape[3]
    shape = (num_seqs, longest, num_kv_heads, head_dim)
    k, v = (
        cache.view(-1, num_kv_heads, head_dim).index_select(0, rectangle.slots).view(shape).transpose(1, 2)
        for cache in (k_cache, v_cache)
    )  # [n, H_kv, S, d]
    # As in `plain`: a group's query heads are one head's query rows, so that each key is read once.
    rows = q.view(num_seqs, num_kv_heads, -1, head_dim)
    return F.scaled_dot_product_attention(rows, k, v, attn_mask=rectangle.bias, scale=scale).reshape(q.shape)


# Who attends with whom


@dataclass(frozen=True)
class _Plan:
    """How a batch attends, and of which batch this is the plan.

    Attributes:
        block_tables: of the batch.
        context_lens: likewise.
        others: block size, bytes of a row, and dtype of the queries.
        order: `[B]` int64, the batch's sequences, rectangle after rectangle, and last those that are alone.
        places: `[B]` int64, where each sequence stands in `order`.
        sizes: how many sequences each rectangle has, and how many are alone.
        rectangles: the rectangles.
    """

    block_tables: Tensor
    context_lens: Tensor
    others: tuple[int, int, torch.dtype]
    order: Tensor
    places: Tensor
    sizes: list[int]
    rectangles: list[_Rectangle]


_last_plan: _Plan | None = None
"""The layers of a step all need the same plan, and making one costs a good part of a layer's attention: the last is
kept. It is compared by value, so it is never out of date."""


def _plan(q: Tensor, k_cache: Tensor, block_tables: Tensor, context_lens: Tensor) -> _Plan:
    """The plan of a batch: the last one, if it was made for the same values."""
    global _last_plan
    block_size, num_kv_heads, head_dim = k_cache.shape[1:]
    others, plan = (block_size, 2 * num_kv_heads * head_dim * k_cache.itemsize, q.dtype), _last_plan
    if (
        plan is None
        or plan.others != others
        or not plan.block_tables.equal(block_tables)
        or not plan.context_lens.equal(context_lens)
    ):
        plan = _last_plan = _make_plan(block_tables, context_lens, others)
    return plan


@torch.inference_mode(False)  # a plan may be made in inference mode, and used again where gradients are wanted
def _make_plan(block_tables: Tensor, context_lens: Tensor, others: tuple[int, int, torch.dtype]) -> _Plan:
    """Group a batch's sequences by length."""
    block_size, row_nbytes, dtype = others
    lengths = context_lens.tolist()
    groups, alone = _who_with_whom(lengths, RECTANGLE_NBYTES // row_nbytes)
    order = torch.tensor([*chain.from_iterable(groups), *alone])
    together = order[: len(order) - len(alone)]
    # One rectangle of them all, of which each group cuts its own: a dozen calls, and not a dozen for each group.
    positions = torch.arange(max((lengths[group[-1]] for group in groups), default=0))
    exists = positions < context_lens[together, None]
    slots = block_tables[together][:, positions // block_size] * block_size + positions % block_size
    slots = torch.where(exists, slots, slots[:, :1])
    bias = torch.zeros(exists.shape, dtype=dtype).masked_fill_(~exists, float("-inf"))[:, None, None]
    rectangles, start = [], 0
    for group in groups:
        end, longest = start + len(group), lengths[group[-1]]
        rectangles.append(_Rectangle(slots[start:end, :longest].flatten(), bias[start:end, ..., :longest]))
        start = end
    sizes = [*map(len, groups), len(alone)]
    return _Plan(block_tables.clone(), context_lens.clone(), others, order, order.argsort(), sizes, rectangles)


def _who_with_whom(lengths: list[int], max_rows: int) -> tuple[list[list[int]], list[int]]:
    """Sequences of about one length in groups whose rectangles have at most `max_rows` rows, and those left alone.

    Of a group the last is the longest.
    """
    groups: list[list[int]] = []
    for sequence in sorted(range(len(lengths)), key=lengths.__getitem__):
        # The newcomer is the longest so far, so the rectangle would be as wide as he is long.
        if groups and lengths[groups[-1][0]] and (len(groups[-1]) + 1) * lengths[sequence] <= max_rows:
            groups[-1].append(sequence)
        else:
            groups.append([sequence])
    return [group for group in groups if len(group) > 1], [group[0] for group in groups if len(group) == 1]
