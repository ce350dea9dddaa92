"""The shape of a MiniGPT."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Protocol, cast


@dataclass(frozen=True)
class MiniGPTConfig:
    """The sizes that define a MiniGPT. The defaults are the shipped model's: 0.8 M parameters.

    Attributes:
        vocab_size: tokens in the vocabulary.
        hidden_size: width of the residual stream.
        num_layers: transformer blocks (L).
        num_heads: query heads (H), a multiple of num_kv_heads.
        num_kv_heads: key/value heads (H_kv).
        head_dim: size of one head (d), even, because rotary embeddings turn pairs.
        intermediate_size: width of the feed-forward block.
        max_seq_len: positions the model can stand at, 0 … max_seq_len − 1.
        rope_theta: base of the rotary frequencies.
        norm_eps: what RMSNorm adds under its root.

    Raises:
        TypeError: a size is not an int, or another number is none.
        ValueError: a number is not positive, num_heads is no multiple of num_kv_heads, or head_dim is odd.
    """

    vocab_size: int
    hidden_size: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 352
    max_seq_len: int = 512
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        check_shape(self)


class HeadSizes(Protocol):
    """What `check_shape` reads of a config by name."""

    @property
    def num_heads(self) -> int:
        """Query heads."""

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads."""

    @property
    def head_dim(self) -> int:
        """Size of one head."""


def check_shape(config: HeadSizes) -> None:
    """Raise unless all numbers of a config, which is a dataclass, can be those of a model.

    Raises:
        TypeError: a size is not an int, or another number is none.
        ValueError: a number is not positive, num_heads is no multiple of num_kv_heads, or head_dim is odd.
    """
    for field in fields(cast(Any, config)):
        if field.type not in ("int", "float"):
            continue
        value = getattr(config, field.name)
        kind = int if field.type == "int" else (int, float)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise TypeError(f"{field.name} must be of type {field.type}; got {value!r}")
        if not 0 < value < float("inf"):
            raise ValueError(f"{field.name} must be a positive number; got {value!r}")
    if config.num_heads % config.num_kv_heads:
        raise ValueError(f"{config.num_heads} query heads cannot share {config.num_kv_heads} key/value heads evenly")
    if config.head_dim % 2:
        raise ValueError(f"head_dim must be even, rotary embeddings turn pairs; got {config.head_dim}")
