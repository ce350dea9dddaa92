"""Attention through block tables with every option, in PyTorch and fp32: the slow, readable reference.

Phase 4's Triton kernels are compared with it, and `every_option` calls it where a CPU's fast kernels lack an option.
Each sequence's scores are one matrix, and each option is one line on it. No phase builds this module.

`every_option` documents the arguments, and has checked them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_start_loc: Tensor | None = None,
    *,
    scale: float | None = None,
    alibi_slopes: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention of each sequence's newest tokens; without `query_start_loc` of one token each (decode).

    Returns:
        `[N, H, d]`, the dtype of `q`. Zeros for a sequence with context_lens 0.
    """
    out = torch.empty_like(q)
    starts = range(len(q) + 1) if query_start_loc is None else query_start_loc.tolist()
    for i, num_tokens in enumerate(context_lens.tolist()):
        start, end = starts[i], starts[i + 1]
        # Positions before every query's window are read too, and masked below.
        k = _rows(k_cache, block_tables[i], num_tokens, k_scale, q.shape[1])
        v = _rows(v_cache, block_tables[i], num_tokens, v_scale, q.shape[1])
        scores = q[start:end].float().transpose(0, 1) @ k.transpose(1, 2)
        scores = scores * (q.shape[2] ** -0.5 if scale is None else scale)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        # How far a key is behind its query: 0 is the query's position, negative is the future.
        behind = torch.arange(num_tokens - (end - start), num_tokens, device=q.device)[:, None]
        behind = behind - torch.arange(num_tokens, device=q.device)
        if alibi_slopes is not None:
            scores = scores - alibi_slopes.float()[:, None, None] * behind
        hidden = behind < 0
        if sliding_window is not None:
            hidden = hidden | (behind >= sliding_window)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        out[start:end] = (weights @ v).transpose(0, 1).to(q.dtype)
    return out


def _rows(cache: Tensor, block_table: Tensor, num_tokens: int, scale: float | Tensor | None, num_heads: int) -> Tensor:
    """One sequence's keys or values in fp32, scaled, a copy for each query head: `[H, num_tokens, d]`."""
    blocks = block_table[: -(-num_tokens // cache.shape[1])]
    rows = cache.index_select(0, blocks).flatten(0, 1)[:num_tokens].float().transpose(0, 1)
    if isinstance(scale, Tensor) and scale.ndim == 3:  # one per row
        rows = rows * scale.index_select(0, blocks).flatten(0, 1)[:num_tokens].t()[..., None]
    elif scale is not None:
        rows = rows * torch.as_tensor(scale, dtype=torch.float32, device=rows.device).reshape(-1, 1, 1)
    return rows.repeat_interleave(num_heads // cache.shape[2], dim=0)
