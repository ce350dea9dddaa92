"""What attention through block tables costs on a CPU: ours, other ways to do it, and no paging at all.

One decode step of float32. The rows lie in blocks of 16 anywhere in the storage. All ways compute the same numbers and
take turns, and what is recorded is each one's CPU time, its minimum and its median. `minicache` is the default, numba's
kernel where numba is installed; `pytorch` is the other backend. `contiguous` has each sequence's rows side by side and
shows what the indirection costs. One thread: with two, a shared machine stalls. Of the first size there are the figures
of every way, of each of the others a line.

    python -m benchmarks.paged_attention
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor

from benchmarks._record import record
from minicache import kernels
from minicache.memory.blocks import BlockPool, BlockTable

BLOCK = 16
NUM_BUCKETS = 4


@dataclass(frozen=True)
class Size:
    """The size of a decode step.

    Attributes:
        name: what is special about it.
        batch_size: sequences.
        num_heads: query heads.
        num_kv_heads: key/value heads.
        head_dim: numbers of a head.
        shortest: tokens of the shortest sequence that may be drawn.
        longest: of the longest.
        repeats: turns of each way.
    """

    name: str
    batch_size: int = 32
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    shortest: int = 64
    longest: int = 1024
    repeats: int = 60


SIZES = [
    Size("32 sequences of 64–1,024, 8/2 heads of 64", repeats=200),
    Size("heads of 32", head_dim=32),
    Size("heads of 128", head_dim=128, repeats=40),
    Size("1 sequence", batch_size=1, repeats=400),
    Size("8 sequences", batch_size=8, repeats=100),
    Size("4 sequences of 4,096–8,192", batch_size=4, shortest=4096, longest=8192, repeats=40),
    Size("75–175 tokens, heads of 32", head_dim=32, shortest=75, longest=175, repeats=200),
    Size("8/8 heads", num_kv_heads=8, repeats=40),
    Size("7/1 heads", num_heads=7, num_kv_heads=1),
    Size("8/1 heads", num_kv_heads=1),
    Size("8 sequences, 64/8 heads of 128", batch_size=8, num_heads=64, num_kv_heads=8, head_dim=128, repeats=20),
]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    measured = []
    for size in track(SIZES, description="Attending"):
        with torch.inference_mode():
            step = Step(size)
            ways = contestants(step)
            for name, run in ways.items():
                torch.testing.assert_close(run(), ways["contiguous"](), msg=f"{name} computes something else")
            measured.append(results(step, measure(ways, size.repeats)))
    lines = [line(size, of_size) for size, of_size in zip(SIZES, measured, strict=True)]
    worst = max(of_size["ratio_to_best_other_way"] for of_size in measured)
    record("paged_attention", measured[0] | {"sizes": lines, "worst_ratio_to_best_other_way": worst})


class Step:
    """The workload: a storage with every sequence's blocks, and the queries of one decode step.

    Attributes:
        size: of the step.
        lengths: tokens of each sequence.
        k_cache: keys, `[num_blocks, block_size, H_kv, d]`.
        v_cache: values, alike.
        tables: `[B, max_blocks]` int64, each row's end filled up with 0.
        context_lens: `[B]` int64, `lengths` as a tensor.
        q: `[B, H, d]`.
    """

    def __init__(self, size: Size) -> None:
        rng = random.Random(0)
        self.size = size
        self.lengths = [rng.randint(size.shortest, size.longest) for _ in range(size.batch_size)]
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
        shape = (num_blocks, BLOCK, size.num_kv_heads, size.head_dim)
        self.k_cache, self.v_cache = (torch.randn(shape) for _ in range(2))
        self.q = torch.randn(size.batch_size, size.num_heads, size.head_dim)


def contestants(step: Step) -> dict[str, Callable[[], Tensor]]:
    """What is timed, by name: each gives `[B, H, d]`."""
    num_heads, num_kv_heads, head_dim = step.size.num_heads, step.size.num_kv_heads, step.size.head_dim
    group = num_heads // num_kv_heads
    by_sequence = list(zip(step.q, step.tables, step.lengths, strict=True))
    side_by_side = [
        tuple(kernels.gather_kv(cache, table, length) for cache in (step.k_cache, step.v_cache))
        for _, table, length in by_sequence
    ]
    paged = (step.q, step.k_cache, step.v_cache, step.tables, step.context_lens)

    def gathered(cache: Tensor, table: Tensor, length: int) -> Tensor:
        """One sequence's rows, `[1, H_kv, S, d]`."""
        blocks = cache.index_select(0, table[: -(-length // BLOCK)])
        return blocks.flatten(0, 1)[:length].transpose(0, 1)[None]

    def minicache() -> Tensor:
        return kernels.paged_decode_attention(*paged)

    def pytorch() -> Tensor:
        return kernels.paged_decode_attention(*paged, backend="torch")

    def folded() -> Tensor:
        out = torch.empty_like(step.q)
        for i, (q, table, length) in enumerate(by_sequence):
            k, v = gathered(step.k_cache, table, length), gathered(step.v_cache, table, length)
            rows = q.view(1, num_kv_heads, group, head_dim)
            out[i] = F.scaled_dot_product_attention(rows, k, v).view(num_heads, head_dim)
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
        rows = q.view(-1, num_kv_heads, group, head_dim)
        return F.scaled_dot_product_attention(rows, k, v, attn_mask=visible).view(-1, num_heads, head_dim)

    def buckets() -> Tensor:
        out = torch.empty_like(step.q)
        for members in step.context_lens.argsort().chunk(NUM_BUCKETS):
            out[members] = padded(members)
        return out

    def contiguous() -> Tensor:
        out = torch.empty_like(step.q)
        for i, (q, (k, v)) in enumerate(zip(step.q, side_by_side, strict=True)):
            rows = q.view(1, num_kv_heads, group, head_dim)
            k, v = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
            out[i] = F.scaled_dot_product_attention(rows, k, v).view(num_heads, head_dim)
        return out

    return {
        "minicache": minicache,
        "pytorch": pytorch,
        "folded": folded,
        "enable_gqa": enable_gqa,
        "buckets": buckets,
        "padded": padded,
        "contiguous": contiguous,
    }


def measure(ways: dict[str, Callable[[], Tensor]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of every run of each, taking turns in another order each round: who comes second finds rows warm."""
    milliseconds: dict[str, list[float]] = {name: [] for name in ways}
    rng = random.Random(0)
    for _ in range(repeats):
        for name in rng.sample(list(ways), len(ways)):
            start = time.thread_time()
            ways[name]()
            milliseconds[name].append((time.thread_time() - start) * 1e3)
    return milliseconds


def results(step: Step, milliseconds: dict[str, list[float]]) -> dict[str, Any]:
    """The times, and the ratios that the page states: of minima, from one run."""
    minimum = {name: min(values) for name, values in milliseconds.items()}
    others = {name: value for name, value in minimum.items() if name not in ("minicache", "pytorch", "contiguous")}
    best = min(others, key=lambda name: others[name])
    return {
        "threads": 1,
        "repeats": step.size.repeats,
        "batch_size": step.size.batch_size,
        "total_tokens": sum(step.lengths),
        "padded_tokens": step.size.batch_size * max(step.lengths),
        "minimum_ms": {name: round(value, 3) for name, value in minimum.items()},
        "median_ms": {name: round(statistics.median(values), 3) for name, values in milliseconds.items()},
        "best_other_way": best,
        "ratio_to_best_other_way": minimum["minicache"] / others[best],
        "ratio_to_contiguous": minimum["minicache"] / minimum["contiguous"],
        "pytorch_ratio_to_best_other_way": minimum["pytorch"] / others[best],
        "pytorch_ratio_to_contiguous": minimum["pytorch"] / minimum["contiguous"],
    }


def line(size: Size, of_size: dict[str, Any]) -> dict[str, str]:
    """One size as a page's table shows it."""
    minimum = of_size["minimum_ms"]
    return {
        "size": size.name,
        "minicache": f"{minimum['minicache']:.2f}",
        "best_other_way": f"{minimum[of_size['best_other_way']]:.2f} ({of_size['best_other_way']})",
        "contiguous": f"{minimum['contiguous']:.2f}",
        "ratio": f"{of_size['ratio_to_best_other_way']:.2f}",
    }


if __name__ == "__main__":
    main()
