"""What attention through block tables costs on a CPU: ours, other ways to do it, and no paging at all.

One decode step: 32 sequences of 64 to 1,024 tokens, drawn uniformly, 8 query heads over 2 KV heads of 64, float32. The
rows lie in blocks of 16 anywhere in the storage. All ways compute the same numbers; they take turns, and what is
recorded is each one's minimum and median. `contiguous` has each sequence's rows side by side and shows what the
indirection costs. One thread: with two, a shared machine stalls.

    python -m benchmarks.paged_attention
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor

from benchmarks._record import record
from minicache import kernels
from minicache.memory.blocks import BlockPool, BlockTable

BATCH, HEADS, KV_HEADS, HEAD_DIM, BLOCK = 32, 8, 2, 64, 16
SHORTEST, LONGEST = 64, 1024
NUM_BUCKETS = 4
REPEATS = 200


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.inference_mode():
        step = Step()
        ways = contestants(step)
        for name, run in ways.items():
            torch.testing.assert_close(run(), ways["contiguous"](), msg=f"{name} computes something else")
        milliseconds = measure(ways)
    record("paged_attention", results(step, milliseconds))


class Step:
    """The workload: a storage with every sequence's blocks, and the queries of one decode step.

    Attributes:
        lengths: tokens of each sequence.
        k_cache: keys, `[num_blocks, block_size, H_kv, d]`.
        v_cache: values, alike.
        tables: `[B, max_blocks]` int64, each row's end filled up with 0.
        context_lens: `[B]` int64, `lengths` as a tensor.
        q: `[B, H, d]`.
    """

    def __init__(self) -> None:
        rng = random.Random(0)
        self.lengths = [rng.randint(SHORTEST, LONGEST) for _ in range(BATCH)]
        num_blocks = sum(-(-length // BLOCK) for length in self.lengths)
        pool = BlockPool(num_blocks, BLOCK)
        order = pool.allocate(num_blocks)
        rng.shuffle(order)
        pool.free(order)  # first in, first out: now blocks come in this order
        tables = [BlockTable(pool) for _ in self.lengths]
        for table, length in zip(tables, self.lengths, strict=True):
            table.append(length)
        width = max(len(table.block_ids) for table in tables)
        self.tables = torch.tensor([table.block_ids + [0] * (width - len(table.block_ids)) for table in tables])
        self.context_lens = torch.tensor(self.lengths)
        self.k_cache, self.v_cache = (torch.randn(num_blocks, BLOCK, KV_HEADS, HEAD_DIM) for _ in range(2))
        self.q = torch.randn(BATCH, HEADS, HEAD_DIM)


def contestants(step: Step) -> dict[str, Callable[[], Tensor]]:
    """What is timed, by name: each gives `[B, H, d]`."""
    group = HEADS // KV_HEADS
    by_sequence = list(zip(step.q, step.tables, step.lengths, strict=True))
    side_by_side = [
        tuple(kernels.gather_kv(cache, table, length) for cache in (step.k_cache, step.v_cache))
        for _, table, length in by_sequence
    ]

    def gathered(cache: Tensor, table: Tensor, length: int) -> Tensor:
        """One sequence's rows, `[1, H_kv, S, d]`."""
        blocks = cache.index_select(0, table[: -(-length // BLOCK)])
        return blocks.flatten(0, 1)[:length].transpose(0, 1)[None]

    def minicache() -> Tensor:
        return kernels.paged_decode_attention(step.q, step.k_cache, step.v_cache, step.tables, step.context_lens)

    def folded() -> Tensor:
        out = torch.empty_like(step.q)
        for i, (q, table, length) in enumerate(by_sequence):
            k, v = gathered(step.k_cache, table, length), gathered(step.v_cache, table, length)
            rows = q.view(1, KV_HEADS, group, HEAD_DIM)
            out[i] = F.scaled_dot_product_attention(rows, k, v).view(HEADS, HEAD_DIM)
        return out

    def enable_gqa() -> Tensor:
        out = torch.empty_like(step.q)
        for i, (q, table, length) in enumerate(by_sequence):
            k, v = gathered(step.k_cache, table, length), gathered(step.v_cache, table, length)
            out[i] = F.scaled_dot_product_attention(q[None, :, None], k, v, enable_gqa=True)[0, :, 0]
        return out

    def padded(members: Tensor | None = None) -> Tensor:
        """All sequences, or those of a bucket, as one rectangle, masked behind each one's end."""
        q, tables, lengths = (x if members is None else x[members] for x in (step.q, step.tables, step.context_lens))
        longest = int(lengths.max())
        width = -(-longest // BLOCK)
        k, v = (
            cache[tables[:, :width]].flatten(1, 2)[:, :longest].transpose(1, 2)
            for cache in (step.k_cache, step.v_cache)
        )
        visible = (torch.arange(longest) < lengths[:, None])[:, None, None]
        rows = q.view(-1, KV_HEADS, group, HEAD_DIM)
        return F.scaled_dot_product_attention(rows, k, v, attn_mask=visible).view(-1, HEADS, HEAD_DIM)

    def buckets() -> Tensor:
        out = torch.empty_like(step.q)
        for members in step.context_lens.argsort().chunk(NUM_BUCKETS):
            out[members] = padded(members)
        return out

    def contiguous() -> Tensor:
        out = torch.empty_like(step.q)
        for i, (q, (k, v)) in enumerate(zip(step.q, side_by_side, strict=True)):
            rows = q.view(1, KV_HEADS, group, HEAD_DIM)
            k, v = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
            out[i] = F.scaled_dot_product_attention(rows, k, v).view(HEADS, HEAD_DIM)
        return out

    return {
        "minicache": minicache,
        "folded": folded,
        "enable_gqa": enable_gqa,
        "buckets": buckets,
        "padded": padded,
        "contiguous": contiguous,
    }


def measure(ways: dict[str, Callable[[], Tensor]]) -> dict[str, list[float]]:
    """Milliseconds of every run of each, taking turns in another order each round: who comes second finds rows warm."""
    milliseconds: dict[str, list[float]] = {name: [] for name in ways}
    rng = random.Random(0)
    for _ in track(range(REPEATS), description="Attending"):
        for name in rng.sample(list(ways), len(ways)):
            start = time.perf_counter()
            ways[name]()
            milliseconds[name].append((time.perf_counter() - start) * 1e3)
    return milliseconds


def results(step: Step, milliseconds: dict[str, list[float]]) -> dict[str, Any]:
    """The times, and the ratios that the page states: of minima, from one run."""
    minimum = {name: min(values) for name, values in milliseconds.items()}
    others = {name: value for name, value in minimum.items() if name not in ("minicache", "contiguous")}
    best = min(others, key=lambda name: others[name])
    return {
        "threads": 1,
        "repeats": REPEATS,
        "batch_size": BATCH,
        "total_tokens": sum(step.lengths),
        "padded_tokens": BATCH * max(step.lengths),
        "minimum_ms": {name: round(value, 3) for name, value in minimum.items()},
        "median_ms": {name: round(statistics.median(values), 3) for name, values in milliseconds.items()},
        "best_other_way": best,
        "ratio_to_best_other_way": minimum["minicache"] / others[best],
        "ratio_to_contiguous": minimum["minicache"] / minimum["contiguous"],
    }


if __name__ == "__main__":
    main()
