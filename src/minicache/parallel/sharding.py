"""Which part of each weight a rank holds.

Queries, keys, values, gate and up are *column parallel*: a rank computes some of their outputs, in whole heads for the
first three. The output projection of attention and `down_proj` are *row parallel*: a rank multiplies the inputs that it
has, and the sum over the ranks is the layer's output. So nothing is exchanged between the two products of a half, which
ends with one all-reduce. Embedding and norms are on every rank; the output layer is on rank 0, which samples.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from minicache.model.assembling import without_memory
from minicache.model.config import MiniGPTConfig
from minicache.model.decoder import Decoder, DecoderConfig
from minicache.model.minigpt import MiniGPT, rotary_tables

Config = MiniGPTConfig | DecoderConfig


def require_shardable(model: object, size: int) -> None:
    """Refuse a model that cannot be divided among `size` ranks.

    Raises:
        TypeError: it is neither a `MiniGPT` nor a `Decoder`, so how to shard its weights is unknown.
        ValueError: its heads or the columns of its feed-forward block are not a multiple of the ranks; or neither of
            the numbers of KV heads and ranks is a multiple of the other.
    """
    if type(model) not in (MiniGPT, Decoder):
        raise TypeError(
            f"tensor parallelism divides the models of minicache.model, MiniGPT and Decoder; got {type(model).__name__}"
        )
    require_divisible(cast(MiniGPT | Decoder, model).config, size)


def require_divisible(config: Config, size: int) -> None:
    """Refuse a model of a shape that cannot be divided among `size` ranks.

    Raises:
        ValueError: as `require_shardable`.
    """
    for name in ("num_heads", "intermediate_size"):
        if getattr(config, name) % size:
            raise ValueError(
                f"tensor_parallel_size {size} does not divide the model's {name}, {getattr(config, name)}: "
                "use a size that does"
            )
    num_kv_heads = config.num_kv_heads
    if num_kv_heads % size and size % num_kv_heads:
        raise ValueError(
            f"{num_kv_heads} KV heads cannot be divided among {size} ranks, nor {size} ranks share {num_kv_heads} KV "
            f"heads evenly: use a tensor_parallel_size that divides {num_kv_heads}, or a multiple of it"
        )


def shard_config(config: Config, rank: int, size: int) -> Config:
    """The configuration of a rank's shard: the same model with fewer heads and columns.

    With more ranks than KV heads, each rank has one, shared by adjacent ranks. Only the first rank, which samples, has
    an output layer.
    """
    shard = replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=max(1, config.num_kv_heads // size),
        intermediate_size=config.intermediate_size // size,
    )
    if isinstance(shard, DecoderConfig) and rank > 0:
        return replace(shard, tie_word_embeddings=True)
    return shard


def shard_of(name: str, weight: Tensor, config: Config, rank: int, size: int) -> Tensor:
    """A rank's part of a parameter.

    Args:
        name: of the parameter, as in `state_dict`.
        weight: the whole parameter.
        config: of the whole model.
        rank: 0 … size − 1.
        size: the number of ranks.

    Returns:
        A view; for a row-parallel layer's bias, which is added once, zeros on all ranks but the first.
    """
    layer, _, kind = name.rpartition(".")
    match layer.rpartition(".")[2]:
        case "q_proj" | "gate_proj" | "up_proj":
            return _part(weight, 0, rank, size)
        case "k_proj" | "v_proj":
            count, first = max(1, config.num_kv_heads // size), rank * config.num_kv_heads // size
            return weight.narrow(0, first * config.head_dim, count * config.head_dim)
        case "o_proj" | "down_proj":
            if kind == "weight":
                return _part(weight, 1, rank, size)
            return weight if rank == 0 else torch.zeros_like(weight)
    return weight


def empty_shard(kind: str, config: Config, dtype: torch.dtype) -> MiniGPT | Decoder:
    """A shard without weights: its parameters have shapes and no memory, until `load_state_dict(…, assign=True)`.

    Args:
        kind: "MiniGPT" or "Decoder".
        config: of `shard_config`.
        dtype: of the weights to come.
    """
    with without_memory():
        shard = MiniGPT(cast(MiniGPTConfig, config)) if kind == "MiniGPT" else Decoder(cast(DecoderConfig, config))
    if isinstance(shard, MiniGPT):  # its tables are not in the state_dict
        shard.cos, shard.sin = (table.to(dtype) for table in rotary_tables(shard.config))
    return shard.eval()


def _part(weight: Tensor, axis: int, rank: int, size: int) -> Tensor:
    """One of `size` equal parts along an axis."""
    length = weight.shape[axis] // size
    return weight.narrow(axis, rank * length, length)
