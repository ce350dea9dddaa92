"""What it costs to hand out a block and take it back.

`BlockPool` against two simple allocators without references or errors: one scans a list of flags for the first
free block, one pops from a set. All of them have 16,384 blocks of 16 tokens, 32 GiB of Llama-3-8B's cache in bfloat16,
and three quarters are in use. A pair is one block allocated and freed. It is timed with 1 block a call, as decoding
takes them, and with 64, a prompt of 1,024 tokens. Then one sequence grows by `BlockTable.append(1)`, block after block.
The contestants take turns; the time is the minimum. One thread.

    python -m benchmarks.block_pool
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from rich.progress import track

from benchmarks._record import record
from minicache.memory.blocks import BlockPool, BlockTable

BLOCKS, BLOCK_SIZE, USED = 16384, 16, 12288
PER_CALL = (1, 64)
PAIRS, TOKENS = 256, 1024  # in one turn
REPEATS = 100


class Allocator(Protocol):
    """What is compared."""

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks."""
        ...

    def free(self, block_ids: list[int]) -> None:
        """Give them back."""
        ...


class ListScan:
    """A flag a block, and a search for the first that is free."""

    def __init__(self, num_blocks: int) -> None:
        self.used = [False] * num_blocks

    def allocate(self, count: int) -> list[int]:
        """The free blocks with the lowest numbers."""
        block_ids = []
        for _ in range(count):
            block_id = self.used.index(False)
            self.used[block_id] = True
            block_ids.append(block_id)
        return block_ids

    def free(self, block_ids: list[int]) -> None:
        """Clear their flags."""
        for block_id in block_ids:
            self.used[block_id] = False


class FreeSet:
    """The free blocks in a set, in no order."""

    def __init__(self, num_blocks: int) -> None:
        self.unused = set(range(num_blocks))

    def allocate(self, count: int) -> list[int]:
        """Some free blocks."""
        return [self.unused.pop() for _ in range(count)]

    def free(self, block_ids: list[int]) -> None:
        """Put them back."""
        self.unused.update(block_ids)


def main() -> None:
    nanoseconds = minimum(contestants())
    record("block_pool", results(nanoseconds))


def contestants() -> dict[str, tuple[Callable[[], Any], int]]:
    """What is timed, by name, and how many pairs or tokens one turn is."""
    allocators: dict[str, Allocator] = {
        "block_pool": BlockPool(BLOCKS, BLOCK_SIZE),
        "list_scan": ListScan(BLOCKS),
        "free_set": FreeSet(BLOCKS),
    }
    turns: dict[str, tuple[Callable[[], Any], int]] = {}
    for name, allocator in allocators.items():
        allocator.allocate(USED)
        for per_call in PER_CALL:
            turns[f"{name}_{per_call}"] = pairs(allocator, per_call), PAIRS
    turns["append"] = grow(BlockTable(BlockPool(BLOCKS, BLOCK_SIZE))), TOKENS
    return turns


def pairs(allocator: Allocator, per_call: int) -> Callable[[], None]:
    """A turn of PAIRS blocks, each allocated and freed, `per_call` at a time."""

    def turn() -> None:
        allocate, free = allocator.allocate, allocator.free
        for _ in range(PAIRS // per_call):
            free(allocate(per_call))

    return turn


def grow(table: BlockTable) -> Callable[[], None]:
    """A turn of TOKENS tokens, appended one by one, and the release that makes room for the next turn."""

    def turn() -> None:
        append = table.append
        for _ in range(TOKENS):
            append(1)
        table.release()

    return turn


def minimum(turns: dict[str, tuple[Callable[[], Any], int]]) -> dict[str, float]:
    """Nanoseconds of one pair or token of each, the minimum over the repeats, taking turns."""
    best = dict.fromkeys(turns, float("inf"))
    for _ in track(range(REPEATS), description="Allocating and freeing"):
        for name, (turn, size) in turns.items():
            start = time.perf_counter_ns()
            turn()
            best[name] = min(best[name], (time.perf_counter_ns() - start) / size)
    return best


def results(nanoseconds: dict[str, float]) -> dict[str, Any]:
    """Pairs and tokens a second, and the ratios that the page states."""
    per_second = {name: round(1e9 / value) for name, value in nanoseconds.items()}
    ratios = {
        f"{peer}_over_block_pool_{per_call}": nanoseconds[f"{peer}_{per_call}"] / nanoseconds[f"block_pool_{per_call}"]
        for peer in ("list_scan", "free_set")
        for per_call in PER_CALL
    }
    return {
        "blocks": BLOCKS,
        "blocks_used": USED,
        "block_size": BLOCK_SIZE,
        "repeats": REPEATS,
        "pairs_per_second": {name: rate for name, rate in per_second.items() if name != "append"},
        "appends_per_second": per_second["append"],
        **ratios,
    }


if __name__ == "__main__":
    main()
