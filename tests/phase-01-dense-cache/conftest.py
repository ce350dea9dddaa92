"""What the tests of phase 1 share: rows to store, and an attention that is slow and obvious."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from minicache.cache.dense import KVCache
from minicache.course.follow import following

Rows = Callable[..., Tensor]
Attention = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def _one_thread_and_a_seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _scenario() -> Iterator[None]:
    """A failure tells the cache and what was stored in it."""
    with following(KVCache, "__init__", "append", "reset"):
        yield


@pytest.fixture(scope="session")
def numbered() -> Rows:
    """`numbered(B, H, T, d, start=n)`: a tensor in which every number is another whole number, from n on."""

    def rows(*shape: int, start: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.arange(start, start + math.prod(shape), dtype=dtype).reshape(shape)

    return rows


@pytest.fixture(scope="session")
def by_hand() -> Attention:
    """Causal attention one head, one query and one key at a time, in double precision, through a window if asked."""

    def attention(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        batch, num_heads, num_new, head_dim = q.shape
        group, num_tokens = num_heads // k.shape[1], k.shape[2]
        out = torch.zeros(batch, num_heads, num_new, head_dim, dtype=torch.float64)
        for b in range(batch):
            for h in range(num_heads):
                keys, values = k[b, h // group].double(), v[b, h // group].double()
                for t in range(num_new):
                    end = num_tokens - num_new + t + 1
                    seen = range(0 if window is None else max(0, end - window), end)
                    scores = [float(q[b, h, t].double() @ keys[s]) / math.sqrt(head_dim) for s in seen]
                    weights = [math.exp(score - max(scores)) for score in scores]
                    for s, weight in zip(seen, weights, strict=True):
                        out[b, h, t] += weight / sum(weights) * values[s]
        return out.to(q.dtype)

    return attention
