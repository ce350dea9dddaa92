# Phase 12, production-defaults: your file. It stands in for minicache.engine.masking.
# Write what raises NotImplementedError. `minicache grade 12` grades it, `minicache hint 12.K` helps with task K.
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
    raise NotImplementedError(
        "phase 12, task 12: A mask in the batch; read docs/en/phase-12-production-defaults/lab/04-only-what-is-allowed.md"
    )
