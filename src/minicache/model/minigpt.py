"""MiniGPT: a small Llama.

RMSNorm, rotary positions, grouped-query attention, SwiGLU, tied embeddings, no biases: the architecture of Llama 3
(Dubey et al. 2024) to the letter, and with its parameter names, so `transformers`' Llama can check it. The cache
is an argument of `forward`, not a second model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minicache.cache import attention
from minicache.model.config import MiniGPTConfig

Rotation = tuple[Tensor, Tensor]
"""Cosine and sine of positions' angles, as `rotate` wants them."""


class Cache(Protocol):
    """What the model asks of a KV cache: what attention asks, and where the next tokens stand.

    Spelled out here, because `minicache.cache.attention` may be a learner's file, and its `Cache` may be gone.
    """

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store `k`, `v` `[B, H_kv, T, d]` as the newest T tokens of `layer`."""

    def attend(self, layer: int, q: Tensor, *, window: int | None = None) -> Tensor:
        """Causal attention of `q` `[B, H, T, d]` over everything that `layer` holds, `[B, H, T, d]`.

        With a window W a token sees itself and the W − 1 before it. A model without windows never passes one.
        """

    def positions(self, num_new_tokens: int, /) -> Tensor:
        """Positions of the next T tokens: `[T]`, or `[B, T]` where sequences differ. int64."""


class Shape(Protocol):
    """What a `Transformer` must know of its config."""

    @property
    def vocab_size(self) -> int:
        """Tokens in the vocabulary."""

    @property
    def max_seq_len(self) -> int:
        """Positions the model can stand at, 0 … max_seq_len − 1."""


class Transformer(nn.Module):
    """What every decoder-only transformer here does, whatever its parts: token ids in, the next token's logits out.

    A subclass makes the parts, `MiniGPT` below, and `minicache.model.decoder.Decoder` for published weights.

    Attributes:
        config: the model's shape.
        embed_tokens: token ids → `[…, hidden_size]`.
        layers: one `Block` after the other.
        rotation_kinds: of each layer the index of its angles among the `rotations`.
        norm: after the last of them.
        lm_head: the output layer; None if it is the embedding.
    """

    config: Shape
    embed_tokens: nn.Embedding
    layers: nn.ModuleList
    rotation_kinds: Sequence[int]
    norm: nn.Module
    lm_head: nn.Module | None

    def forward(self, token_ids: Tensor, cache: Cache | None = None) -> Tensor:
        """Compute the logits of the token after each position.

        Args:
            token_ids: the T newest tokens of B sequences, `[B, T]` int64, T ≥ 1.
            cache: None, and the T tokens are all there is; or a cache, which holds the tokens before them and receives
                their keys and values.

        Returns:
            `[B, T, vocab_size]` in the parameters' dtype.

        Raises:
            TypeError: `token_ids` is not an int64 tensor.
            ValueError: it is not `[B, T]` with T ≥ 1, or a token would stand past `max_seq_len` (CPU tensors).
            IndexError: a token id lies outside the vocabulary (CPU tensors).
            CacheOverflowError: the cache has no room for T more tokens. Nothing was written.
        """
        return self.logits(self.hidden_states(token_ids, cache))

    def hidden_states(self, token_ids: Tensor, cache: Cache | None = None) -> Tensor:
        """The first half of `forward`: what the last norm gives at each position, before the vocabulary.

        An engine reads one token's logits of a prompt, the last one's, so it wants the two halves apart: of the shipped
        sizes the head is a fifth of the arithmetic.

        Args:
            token_ids: as for `forward`, and refused alike.
            cache: likewise.

        Returns:
            `[B, T, hidden_size]`.
        """
        self._check_token_ids(token_ids)
        num_new = token_ids.shape[1]
        positions = torch.arange(num_new, device=token_ids.device) if cache is None else cache.positions(num_new)
        self._check_positions(positions)
        # One axis for the heads, after T: [T, 1, d] or [B, T, 1, d], either broadcasts against [B, T, H, d].
        rotations = [(cos.unsqueeze(-2), sin.unsqueeze(-2)) for cos, sin in self.rotations(positions)]
        hidden = self.embed(token_ids)
        for layer, kind in zip(self.layers, self.rotation_kinds, strict=True):
            hidden = layer(hidden, rotations[kind], cache)
        return cast(Tensor, self.norm(hidden))

    def logits(self, hidden: Tensor) -> Tensor:
        """The second half of `forward`: logits `[…, vocab_size]` of the positions `[…, hidden_size]` that are given."""
        if self.lm_head is None:
            return F.linear(hidden, self.embed_tokens.weight)
        return cast(Tensor, self.lm_head(hidden))

    def embed(self, token_ids: Tensor) -> Tensor:
        """What the first layer gets: `[…]` → `[…, hidden_size]`."""
        return cast(Tensor, self.embed_tokens(token_ids))

    def rotations(self, positions: Tensor) -> list[Rotation]:
        """Cosine and sine of the angles at `positions` `[…, T]`, each `[…, T, head_dim]`, as `rotate` wants them.

        One pair for all layers; or several, where layers turn differently (`rotation_kinds`).
        """
        raise NotImplementedError

    def num_parameters(self) -> int:
        """The number of trained values, packed ones too (`minicache.model.linear`); a tied embedding counts once."""
        packed = sum(getattr(module, "num_packed", 0) for module in self.modules())
        return packed + sum(parameter.numel() for parameter in self.parameters())

    def _check_token_ids(self, token_ids: Tensor) -> None:
        if not isinstance(token_ids, Tensor) or token_ids.dtype != torch.int64:
            got = token_ids.dtype if isinstance(token_ids, Tensor) else type(token_ids).__name__
            raise TypeError(f"token_ids must be an int64 tensor [B, T]; got {got}")
        if token_ids.ndim != 2 or 0 in token_ids.shape:
            raise ValueError(f"token_ids must be [B, T] with at least one token; got {list(token_ids.shape)}")
        if token_ids.device.type != "cpu":  # reading a value would wait for the device
            return
        lowest, highest = (int(bound) for bound in token_ids.aminmax())
        if lowest < 0 or highest >= self.config.vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise IndexError(f"token id {wrong} is outside the vocabulary, 0 … {self.config.vocab_size - 1}")

    def _check_positions(self, positions: Tensor) -> None:
        if positions.device.type != "cpu":
            return
        last = int(positions.max())
        if last >= self.config.max_seq_len:
            raise ValueError(
                f"a token would stand at position {last}; the model's last is {self.config.max_seq_len - 1}"
            )


class MiniGPT(Transformer):
    """A decoder-only transformer: token ids in, the next token's logits out.

    Args:
        config: the model's shape.

    Attributes:
        config: as given.
    """

    config: MiniGPTConfig

    def __init__(self, config: MiniGPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Block(
                nn.RMSNorm(config.hidden_size, eps=config.norm_eps),
                Attention(config, index),
                nn.RMSNorm(config.hidden_size, eps=config.norm_eps),
                FeedForward(config.hidden_size, config.intermediate_size),
            )
            for index in range(config.num_layers)
        )
        self.rotation_kinds = [0] * config.num_layers
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.lm_head = None
        cos, sin = rotary_tables(config)
        # Derived from the config, so not part of a checkpoint.
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def rotations(self, positions: Tensor) -> list[Rotation]:
        """As `Transformer.rotations`, from a table."""
        return [(cast(Tensor, self.cos)[positions], cast(Tensor, self.sin)[positions])]


class Block(nn.Module):
    """One transformer block: attention and feed-forward, each after a norm and added to the residual stream."""

    def __init__(
        self, input_layernorm: nn.Module, self_attn: nn.Module, post_attention_layernorm: nn.Module, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.input_layernorm = input_layernorm
        self.self_attn = self_attn
        self.post_attention_layernorm = post_attention_layernorm
        self.mlp = mlp

    def forward(self, hidden: Tensor, rotation: Rotation, cache: Cache | None) -> Tensor:
        """`[B, T, hidden_size]` → the same shape."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, cache)
        return cast(Tensor, hidden + self.mlp(self.post_attention_layernorm(hidden)))


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023) with rotary positions (Su et al. 2021)."""

    def __init__(self, config: MiniGPTConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.num_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, config.num_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, config.num_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor, rotation: Rotation, cache: Cache | None) -> Tensor:
        """`[B, T, hidden_size]` → the same shape. Keys enter the cache already rotated."""
        q, k, v = (self._heads(project(hidden)) for project in (self.q_proj, self.k_proj, self.v_proj))
        # Rotated as [B, T, heads, d], where a token's numbers lie side by side, and only then seen as [B, heads, T, d].
        q, k, v = (heads.transpose(1, 2) for heads in (rotate(q, *rotation), rotate(k, *rotation), v))
        out = attention.attention_with_cache(q, k, v, self.index, cache)
        return cast(Tensor, self.o_proj(out.transpose(1, 2).flatten(2)))

    def _heads(self, projected: Tensor) -> Tensor:
        """`[B, T, heads · d]` → `[B, T, heads, d]`."""
        return projected.view(*projected.shape[:-1], -1, self.head_dim)


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020): a gated hidden layer."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[B, T, hidden_size]` → the same shape."""
        # In place: a prompt's activations are megabytes, and memory that is fresh costs more than the product.
        return cast(Tensor, self.down_proj(F.silu(self.gate_proj(hidden)).mul_(self.up_proj(hidden))))


def rotary_tables(config: MiniGPTConfig) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles, each `[max_seq_len, head_dim]`, as `rotate` wants them."""
    positions = torch.arange(config.max_seq_len)
    return turns(positions, rotary_frequencies(config.rope_theta, config.head_dim))


def rotary_frequencies(theta: float, head_dim: int) -> Tensor:
    """By how much each pair of dimensions turns from one position to the next, theta^(−2i/d): `[head_dim / 2]` fp32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / theta**exponents


def turns(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles at `positions` `[…, T]`, each `[…, T, head_dim]` float32.

    Dimension i turns together with dimension i + d/2, by position · frequency i: "by halves", as Llama's published
    weights expect (Su et al. 2021 pair neighbours; the two differ by a permutation of the dimensions). Turning takes
    the sine from the first of a pair and adds it to the second, so its first half is negative here.
    """
    angles = positions[..., None].float() * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn queries or keys `[B, T, heads, d]` by their positions' angles, `[…, T, 1, d]` each."""
    partners = heads.roll(heads.shape[-1] // 2, dims=-1)
    # Not addcmul_: it rounds once less, and a training run would end in other weights than the shipped ones.
    return (heads * cos).add_(partners * sin)
