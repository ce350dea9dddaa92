"""One model on several processes: tensor parallelism (Shoeybi et al. 2019, "Megatron-LM").

Each process is a *rank*. It holds a shard of every layer: some of the heads, some of the feed-forward block's columns,
and the keys and values of its heads only. What attention and the feed-forward block add to the residual stream is the
sum of what the ranks compute, so a layer ends each of its halves with an all-reduce. Rank 0 is the process of the
engine, which schedules and samples; the others do what it tells them. No phase builds this package.

| module | owns |
|---|---|
| `sharding` | which rows and columns of each weight a rank holds |
| `group` | the ranks' all-reduce, and how they stay in step when one of them fails |
| `messages` | what rank 0 sends to the others, and what they answer |
| `rank` | a step of one rank: its shard, over its blocks |
| `model` | `ParallelModel`: the ranks as rank 0 sees them |
| `__main__` | the process of another rank |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicache.lazy import lazily

if TYPE_CHECKING:
    from minicache.parallel.model import ParallelModel as ParallelModel

__getattr__, __dir__ = lazily(__name__, model="ParallelModel")
