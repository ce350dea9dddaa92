"""One batch, from prompt to tokens: the whole engine of phase 1.

Phase 1 builds it. Without a cache, every step computes all positions again. With one, the same loop computes the prompt
once (prefill) and one position in each later step (decode).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from minicache.cache.dense import KVCache
from minicache.engine.picking import Pick, greedy

Model = Callable[[Tensor, KVCache | None], Tensor]
"""Token ids `[B, T]` and a cache, or None → logits `[B, T, vocab]`. `minicache.model.MiniGPT` is one."""


def decode(
    model: Model, prompt: Tensor, max_new_tokens: int, *, cache: KVCache | None = None, pick: Pick = greedy
) -> Iterator[Tensor]:
    """Generate tokens one step at a time, and yield each as soon as it is picked.

    The tokens are the same with and without a cache. Only the number of computed positions differs: with a prompt of P
    tokens, step n (from 0) costs P + n positions without a cache; with one, P in step 0 and 1 in every later step. The
    token picked last is never an input, so N new tokens leave P + N − 1 tokens in the cache.

    Args:
        model: called as `model(token_ids, cache)`.
        prompt: token ids `[B, P]` int64, P ≥ 1; all sequences of the batch have one length.
        max_new_tokens: N, how many tokens to generate, ≥ 0. The caller stops earlier by leaving the loop.
        cache: an empty cache to use, or None to compute every position again in every step.
        pick: how a token is picked from the logits `[B, vocab]` of the last position.

    Yields:
        `[B]` int64, the next token of each sequence; N times.

    Raises:
        ValueError: at the first step: `prompt` is not `[B, P]` with P ≥ 1, N is negative, or the cache is not empty.
        CacheOverflowError: the cache is full. The tokens yielded before remain valid.
    """
    if prompt.ndim != 2 or prompt.shape[1] == 0:
        raise ValueError(f"prompt must be [B, P] with at least one token; got {list(prompt.shape)}")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be 0 or more; got {max_new_tokens}")
    if cache is not None and cache.num_tokens:
        raise ValueError(f"the cache already holds {cache.num_tokens} tokens: reset() it first")
    tokens = prompt  # the model's input in this step
    for _ in range(max_new_tokens):
        with torch.inference_mode():
            next_token = pick(model(tokens, cache)[:, -1])
        yield next_token
        newest = next_token[:, None]
        tokens = torch.cat([tokens, newest], dim=1) if cache is None else newest
