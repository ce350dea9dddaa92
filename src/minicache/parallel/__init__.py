"""One model on several processes: tensor parallelism (Shoeybi et al. 2019, "Megatron-LM").

Each process is a *rank*. It holds a shard of every layer: some of the heads, some of the feed-forward block's columns,
and the keys and values of its heads only. The output of attention and of the feed-forward block is the sum of the
ranks' results, so each half of a layer ends with an all-reduce. Rank 0 is the engine's process, which schedules and
samples; the others execute its messages. No phase builds this package.

| module | owns |
|---|---|
| `sharding` | which rows and columns of each weight a rank holds |
| `group` | the ranks' all-reduce, and their synchronisation when one of them fails |
| `messages` | the messages of rank 0 to the others, and their answers |
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
