"""What the tests of phase 1 share: KV entries to store, and an attention that is slow and obvious."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from minicache.cache.dense import KVCache
from minicache_course.follow import following
from minicache_course.seeds import fresh

Rows = Callable[..., Tensor]
Attention = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def _one_thread_and_a_seed() -> None:
    torch.set_num_threads(1)
    torch.default_generator.manual_seed(fresh(0))  # torch.manual_seed looks for GPUs too, longer than most tests take


@pytest.fixture(autouse=True)
def _scenario() -> Iterator[None]:
    """A failure shows the cache and what was stored in it."""
    with following(KVCache, "__init__", "append", "reset"):
        yield


@pytest.fixture(scope="session")
def numbered() -> Rows:
    """`numbered(B, H, T, d, start=n)`: a tensor of distinct whole numbers, from n on."""

    def rows(*shape: int, start: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.arange(start, start + math.prod(shape), dtype=dtype).reshape(shape)

    return rows


@pytest.fixture(scope="session")
def by_hand() -> Attention:
    """Causal attention one head and one query at a time, in double precision, through a window if asked."""

    def attention(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        num_heads, num_new, head_dim = q.shape[1:]
        group, num_tokens = num_heads // k.shape[1], k.shape[2]
        queries, keys, values = (x.double() for x in (q, k, v))
        out = torch.zeros(q.shape, dtype=torch.float64)
        for h in range(num_heads):
            for t in range(num_new):
                end = num_tokens - num_new + t + 1
                seen = slice(0 if window is None else max(0, end - window), end)
                scores = keys[:, h // group, seen] @ queries[:, h, t, :, None] / math.sqrt(head_dim)  # [B, S, 1]
                weights = (scores - scores.amax(dim=1, keepdim=True)).exp()
                out[:, h, t] = (weights * values[:, h // group, seen]).sum(dim=1) / weights.sum(dim=1)
        return out.to(q.dtype)

    return attention
