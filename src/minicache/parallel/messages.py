"""What rank 0 and the other ranks say to each other, over a socket pair: these tuples, pickled.

A step is one message to each rank: its integers, in one buffer (`minicache.cache.packed.pack`). Nobody answers it but
with what went wrong; the ranks meet in the all-reduces of the step. When the pair is closed, the rank ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from minicache.cache.packed import StepSize
from minicache.cache.swap import Pairs
from minicache.parallel.sharding import Config


class Start(NamedTuple):
    """The first message. The shard's parameters follow, one after the other as bytes.

    Attributes:
        rank: 1 … size − 1.
        size: the number of ranks.
        kind: "MiniGPT" or "Decoder".
        config: of the rank's shard.
        dtype: of its weights.
        device: where they go.
        is_fused: whether the ranks compute with `minicache.model.fused`.
        num_threads: of PyTorch.
        store: the path of the file through which the ranks find each other.
        timeout_seconds: how long a rank waits for the others in an all-reduce.
    """

    rank: int
    size: int
    kind: str
    config: Config
    dtype: torch.dtype
    device: torch.device
    is_fused: bool
    num_threads: int
    store: str
    timeout_seconds: float


class Begin(NamedTuple):
    """A new engine: make its storages. What older ones held is dropped. It is answered.

    Attributes:
        num_blocks: of the cache.
        block_size: tokens of a block.
        num_host_blocks: of the CPU swap space; 0: none.
        kv_cache_dtype: "int8" or "fp8_e4m3"; None: the weights' dtype.
    """

    num_blocks: int
    block_size: int
    num_host_blocks: int
    kv_cache_dtype: str | None


class Move(NamedTuple):
    """Blocks to copy before the next step, as `SchedulerOutput` names them."""

    swapped_out: Sequence[Pairs]
    swapped_in: Pairs
    copied: Pairs


class Step(NamedTuple):
    """Run a step. `numbers` are its integers, an int64 array that `size.views` takes apart."""

    size: StepSize
    numbers: Any


class Ready(NamedTuple):
    """The answer to `Start`, before the ranks look for each other, and to `Begin`."""


class Failed(NamedTuple):
    """Something was asked for, and an error was raised."""

    message: str


ToRank = Begin | Move | Step
FromRank = Ready | Failed
