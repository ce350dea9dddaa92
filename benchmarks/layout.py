"""What the order of a cache's dimensions costs, and what a view saves.

One layer of a cache as large as Llama-3-8B's (8 KV heads of 128, 4,096 rows, float32) is laid out head by head,
[H_kv, S_max, d], and token by token, [S_max, H_kv, d]. Measured in each: streaming through the rows of one head, which
is what one head's attention does with keys and values, and writing one token's rows. Then the same rows as a view, and
gathered from blocks of 16 that lie in any order. The contestants take turns; the time is the minimum. One thread.

    python -m benchmarks.layout
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

from benchmarks._record import record

HEADS, ROWS, HEAD_DIM, BLOCK = 8, 4096, 128, 16
REPEATS = 400


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    microseconds = minimum(contestants())
    record("layout", results(microseconds))


def contestants() -> dict[str, Callable[[], Any]]:
    """What is timed, by name. Each reads or writes the same numbers."""
    by_head = torch.randn(HEADS, ROWS, HEAD_DIM)
    by_token = by_head.transpose(0, 1).contiguous()
    blocks = by_token.reshape(ROWS // BLOCK, BLOCK, HEADS, HEAD_DIM)
    block_table = torch.randperm(ROWS // BLOCK)
    new_rows = torch.randn(HEADS, HEAD_DIM)

    def write_by_head() -> None:
        by_head[:, ROWS - 1] = new_rows

    def write_by_token() -> None:
        by_token[ROWS - 1] = new_rows

    def view() -> Tensor:
        return by_head[:, :ROWS]

    def gather() -> Tensor:
        return blocks.index_select(0, block_table).flatten(0, 1)

    return {
        "stream_by_head": lambda: by_head[3].sum(),
        "stream_by_token": lambda: by_token[:, 3].sum(),
        "append_by_head": write_by_head,
        "append_by_token": write_by_token,
        "view": view,
        "gather": gather,
    }


def minimum(contestants: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Microseconds of each, the minimum over the repeats, taking turns."""
    best = dict.fromkeys(contestants, float("inf"))
    for _ in track(range(REPEATS), description="Reading and writing"):
        for name, run in contestants.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], (time.perf_counter() - start) * 1e6)
    return best


def results(microseconds: dict[str, float]) -> dict[str, Any]:
    """The times, and the ratios that the page states."""
    row = HEAD_DIM * 4
    return {
        "threads": 1,
        "repeats": REPEATS,
        "microseconds": {name: round(value, 2) for name, value in microseconds.items()},
        "stream_ratio": microseconds["stream_by_token"] / microseconds["stream_by_head"],
        "gather_over_view": microseconds["gather"] / microseconds["view"],
        "bytes_of_one_head": ROWS * row,
        "bytes_gathered": HEADS * ROWS * row,
    }


if __name__ == "__main__":
    main()
