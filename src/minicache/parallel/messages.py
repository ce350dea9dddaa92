"""The messages between rank 0 and the other ranks, pickled over a socket pair.

A step is one message to each rank: its integers, in one buffer (`minicache.cache.packed.pack`). A rank answers it only
with an error; otherwise the ranks synchronise in the step's all-reduces. When the pair is closed, the rank exits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from minicache.cache.packed import Places, StepSize
from minicache.cache.swap import Pairs
from minicache.parallel.sharding import Config


class Start(NamedTuple):
    """The first message. The shard's parameters follow as bytes, one after the other.

    Attributes:
        rank: 1 … size − 1.
        size: the number of ranks.
        kind: "MiniGPT" or "Decoder".
        config: of the rank's shard.
        dtype: of its weights.
        device: of its weights.
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
    """A new engine: allocate its storages and drop older ones. The rank answers.

    Attributes:
        num_blocks: of the cache.
        block_size: tokens of a block.
        num_host_blocks: of the CPU swap space; 0: none.
        kv_cache_dtype: "int8" or "fp8_e4m3"; None: the weights' dtype.
        places: of the model's layers in the storage; None: as many are in it, all in one group.
    """

    num_blocks: int
    block_size: int
    num_host_blocks: int
    kv_cache_dtype: str | None
    places: Places | None = None


class Move(NamedTuple):
    """Blocks to copy before the next step, as `SchedulerOutput` names them."""

    swapped_out: Sequence[Pairs]
    swapped_in: Pairs
    copied: Pairs


class Step(NamedTuple):
    """Run a step. `numbers` are its integers, an int64 array that `size.views` unpacks."""

    size: StepSize
    numbers: Any


class Ready(NamedTuple):
    """The answer to `Start`, before the ranks connect to each other, and to `Begin`."""


class Failed(NamedTuple):
    """The answer to any message that raised an error."""

    message: str


ToRank = Begin | Move | Step
FromRank = Ready | Failed
