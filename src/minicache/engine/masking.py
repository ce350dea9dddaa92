"""Masks applied to a batch in which most requests are free.

Phase 12 builds it. The engine calls it once a step, between the model and the choice of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def mask_rows(logits: Tensor, rows: Sequence[int], allowed: Tensor) -> Tensor:
    """Rule out the tokens that constrained requests may not have; the rows of the others stay as they are.

    Forty constrained rows take as many tensor operations as two: on a GPU, each is a launch.

    Args:
        logits: `[B, vocab]`, of any floating dtype, on any device. Not changed.
        rows: R rows of it, in ascending order; none if no request is constrained.
        allowed: `[R, vocab]` bool, on any device: which tokens each of `rows` may have.

    Returns:
        `[B, vocab]` of the same dtype: −inf in `rows` where a token is not allowed, whatever logit it had; the given
        logits elsewhere. A row without an allowed token is −inf throughout: no token can be picked from it.

    Raises:
        ValueError: `allowed` is not `[R, vocab]`.
    """
    if allowed.shape != (len(rows), logits.shape[-1]):
        raise ValueError(f"{len(rows)} rows of {logits.shape[-1]} tokens need a mask each: got {list(allowed.shape)}")
    ruled_out = ~allowed.to(logits.device)
    if len(rows) == len(logits):
        return logits.masked_fill(ruled_out, -torch.inf)
    at = torch.tensor(rows, dtype=torch.int64, device=logits.device)
    return logits.index_copy(0, at, logits[at].masked_fill(ruled_out, -torch.inf))
