"""Models that people use: the transformer of the Llama, Qwen2, Qwen3, Mistral and Gemma 3 families.

It is MiniGPT with what published models add to it: biases, a norm of queries and keys, an output layer of its own,
rotary positions stretched to longer texts, sliding windows, and sixteen-bit weights, for which norms and angles are
computed in float32. Gemma 3 adds norms behind attention and feed-forward, gains that are stored less 1, GELU, a scaled
embedding, and other rotary positions in layers with a window. What a model of a family is made of, its folder says:
`minicache.model.folder` reads it. No phase builds this module.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minicache.cache import attention
from minicache.model.config import check_shape
from minicache.model.minigpt import Block, Cache, FeedForward, Rotation, Transformer, rotary_frequencies, rotate, turns


@dataclass(frozen=True)
class LinearScaling:
    """Positions closer together, so more of them fit into what was trained (Chen et al. 2023).

    Attributes:
        factor: all frequencies are divided by it, > 0.
    """

    factor: float

    def scale(self, frequencies: Tensor) -> Tensor:
        """The frequencies to turn by."""
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3Scaling:
    """Only slow turns are slowed down: of those that go round a few times in a trained text, nothing is lost.

    A dimension whose wavelength is over original_max_seq_len / low_freq_factor is slowed by `factor`, one that is under
    original_max_seq_len / high_freq_factor stays, and between the two it is blended (Llama 3.1's published code).

    Attributes:
        factor: positive.
        low_freq_factor: positive.
        high_freq_factor: more than low_freq_factor.
        original_max_seq_len: positions that the model was trained on before it was stretched.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_seq_len: int

    def scale(self, frequencies: Tensor) -> Tensor:
        """The frequencies to turn by."""
        rounds = self.original_max_seq_len * frequencies / (2 * math.pi)
        kept = (rounds - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = kept.clamp(0, 1)
        return (1 - kept) * frequencies / self.factor + kept * frequencies


@dataclass(frozen=True)
class FactorScaling:
    """A divisor for each frequency: how GGUF files have Llama 3's scaling.

    Attributes:
        factors: `[head_dim / 2]`, > 0.
    """

    factors: tuple[float, ...]

    def scale(self, frequencies: Tensor) -> Tensor:
        """The frequencies to turn by."""
        return frequencies / torch.tensor(self.factors)


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The shape of a `Decoder`.

    Attributes:
        vocab_size: tokens in the vocabulary.
        hidden_size: width of the residual stream.
        intermediate_size: width of the feed-forward block.
        num_layers: transformer blocks (L).
        num_heads: query heads (H), a multiple of num_kv_heads.
        num_kv_heads: key/value heads (H_kv).
        head_dim: size of one head (d), even.
        max_seq_len: positions the model can stand at, 0 … max_seq_len − 1.
        norm_eps: what RMSNorm adds under its root.
        rope_theta: base of the rotary frequencies.
        rope_scaling: how they are stretched; None: not.
        attention_bias: queries, keys and values have a bias.
        output_bias: attention's output projection has one.
        mlp_bias: the feed-forward block's three matrices have one.
        qk_norm: queries and keys are normed, head by head, before they are turned (Qwen3).
        tie_word_embeddings: the output layer is the embedding.
        activation: of the feed-forward block: "silu", or "gelu_tanh", GELU with its tanh approximation.
        centered_norms: a norm's gain is 1 + its weight, and what is normed is rounded after it.
        post_norms: what attention and feed-forward give is normed before it is added to the residual stream.
        scaled_embedding: embeddings are multiplied by √hidden_size.
        query_scale: what scores are multiplied by, with `qk_norm` and `centered_norms` only; None: 1/√head_dim.
        local_rope_theta: base of the rotary frequencies in layers with a window, which are not stretched; None: the
            others' positions.
        sliding_windows: of each layer the most tokens that a token sees, itself included; None: all. Of no layers: none
            has a window.
        end_token_ids: the tokens with which the model ends its text.

    Raises:
        TypeError: a size is not an int, or another number is none.
        ValueError: a number is not positive, num_heads is no multiple of num_kv_heads, head_dim is odd, there is not
            one window for each layer, there is no such activation, or no gain for query_scale.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_seq_len: int
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: LinearScaling | Llama3Scaling | FactorScaling | None = None
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    activation: str = "silu"
    centered_norms: bool = False
    post_norms: bool = False
    scaled_embedding: bool = False
    query_scale: float | None = None
    local_rope_theta: float | None = None
    sliding_windows: tuple[int | None, ...] = ()
    end_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_shape(self)
        if self.activation not in ("silu", "gelu_tanh"):
            raise ValueError(f'activation must be "silu" or "gelu_tanh"; got {self.activation!r}')
        if self.query_scale is not None and not (self.qk_norm and self.centered_norms):
            raise ValueError("query_scale is a part of the queries' gain: it needs qk_norm and centered_norms")
        windows = tuple(self.sliding_windows) or (None,) * self.num_layers
        object.__setattr__(self, "sliding_windows", windows)  # a list's config could not be hashed
        if len(self.sliding_windows) != self.num_layers:
            raise ValueError(f"{len(self.sliding_windows)} windows for {self.num_layers} layers: give one for each")
        for window in self.sliding_windows:
            if window is not None and (type(window) is not int or window < 1):
                raise ValueError(f"a sliding window must be 1 token or more, or None; got {window!r}")


class Decoder(Transformer):
    """A decoder-only transformer with the parameter names of `transformers`' Llama, Qwen2, Qwen3, Mistral and Gemma 3.

    Theirs begin with "model.", but for `lm_head.weight`; here they do not.

    Args:
        config: the model's shape.

    Attributes:
        config: as given.
        lm_head: the output layer; None if it is the embedding.
    """

    config: DecoderConfig

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_block(config, index) for index in range(config.num_layers))
        self.norm = _norm(config, config.hidden_size)
        self._embedding_scale = config.hidden_size**0.5 if config.scaled_embedding else None
        self.rotation_kinds = [0] * config.num_layers
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        # Half a head's numbers, and no buffer: a buffer would be rounded when the model is converted to 16 bits.
        with torch.device("cpu"):
            frequencies = rotary_frequencies(config.rope_theta, config.head_dim)
            self.frequencies = frequencies if config.rope_scaling is None else config.rope_scaling.scale(frequencies)
            self._frequencies = [self.frequencies]
            if config.local_rope_theta is not None:
                self._frequencies.append(rotary_frequencies(config.local_rope_theta, config.head_dim))
                self.rotation_kinds = [int(window is not None) for window in config.sliding_windows]
        self._frequencies_on: dict[torch.device, list[Tensor]] = {}

    def embed(self, token_ids: Tensor) -> Tensor:
        """As `Transformer.embed`; scaled, by a factor that is rounded to the weights' dtype as in `transformers`."""
        hidden = super().embed(token_ids)
        if self._embedding_scale is not None:
            hidden = hidden * torch.tensor(self._embedding_scale, dtype=hidden.dtype).item()
        return hidden

    def rotations(self, positions: Tensor) -> list[Rotation]:
        """As `Transformer.rotations`: of layers without a window, and of those with one if they turn by another base.

        There is no table: for 131,072 positions it would be larger than a layer. Rounded to the weights' dtype only
        after cosine and sine, as in `transformers`.
        """
        device = positions.device
        if device not in self._frequencies_on:  # copied once: a copy waits for the device
            self._frequencies_on[device] = [each.to(device) for each in self._frequencies]
        dtype = cast(RMSNorm, self.norm).weight.dtype
        pairs = [turns(positions, frequencies) for frequencies in self._frequencies_on[device]]
        return [(cos.to(dtype), sin.to(dtype)) for cos, sin in pairs]


class RMSNorm(nn.Module):
    """Root mean square norm (Zhang and Sennrich 2019), in float32 whatever the dtype of what is normed.

    Rounded before the gain and not after it: `nn.RMSNorm` does it the other way round, and in 16 bits `transformers`'
    models, and so the published ones, can tell the difference.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, hidden: Tensor) -> Tensor:
        """`[…, size]` → the same shape and dtype."""
        wide = hidden if hidden.dtype == torch.float64 else hidden.float()
        return self.weight * F.rms_norm(wide, self.weight.shape, eps=self.eps).to(hidden.dtype)


class CenteredRMSNorm(RMSNorm):
    """The norm of Gemma: its gain is 1 + its weight, and is computed and multiplied in float32.

    Args:
        size: of what is normed.
        eps: added under the root.
        factor: the gain is multiplied by it.
    """

    def __init__(self, size: int, eps: float, factor: float = 1.0) -> None:
        super().__init__(size, eps)
        self.factor = factor

    @property
    def gain(self) -> Tensor:
        """What is normed is multiplied by, `[size]` float32 (or float64, as the weight)."""
        weight = self.weight if self.weight.dtype == torch.float64 else self.weight.float()
        return (1 + weight) * self.factor

    def forward(self, hidden: Tensor) -> Tensor:
        """`[…, size]` → the same shape and dtype."""
        wide = hidden if hidden.dtype == torch.float64 else hidden.float()
        return (self.gain * F.rms_norm(wide, self.weight.shape, eps=self.eps)).to(hidden.dtype)


def _norm(config: DecoderConfig, size: int, factor: float = 1.0) -> RMSNorm:
    """A norm as a config asks for it."""
    if config.centered_norms:
        return CenteredRMSNorm(size, config.norm_eps, factor)
    return RMSNorm(size, config.norm_eps)


def _block(config: DecoderConfig, index: int) -> nn.Module:
    """A layer as a config asks for it."""
    silu = config.activation == "silu"
    mlp = (FeedForward if silu else GeluFeedForward)(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
    first, second = _norm(config, config.hidden_size), _norm(config, config.hidden_size)
    if not config.post_norms:
        return Block(first, Attention(config, index), second, mlp)
    post_norms = _norm(config, config.hidden_size), _norm(config, config.hidden_size)
    return PostNormBlock(first, Attention(config, index), second, mlp, *post_norms)


class PostNormBlock(nn.Module):
    """A block whose halves are normed before they are added to the residual stream too, with Gemma's names."""

    def __init__(
        self,
        input_layernorm: nn.Module,
        self_attn: nn.Module,
        pre_feedforward_layernorm: nn.Module,
        mlp: nn.Module,
        post_attention_layernorm: nn.Module,
        post_feedforward_layernorm: nn.Module,
    ) -> None:
        super().__init__()
        self.input_layernorm = input_layernorm
        self.self_attn = self_attn
        self.post_attention_layernorm = post_attention_layernorm
        self.pre_feedforward_layernorm = pre_feedforward_layernorm
        self.mlp = mlp
        self.post_feedforward_layernorm = post_feedforward_layernorm

    def forward(self, hidden: Tensor, rotation: Rotation, cache: Cache | None) -> Tensor:
        """`[B, T, hidden_size]` → the same shape."""
        attended = self.self_attn(self.input_layernorm(hidden), rotation, cache)
        hidden = hidden + self.post_attention_layernorm(attended)
        added = self.mlp(self.pre_feedforward_layernorm(hidden))
        return cast(Tensor, hidden + self.post_feedforward_layernorm(added))


class GeluFeedForward(FeedForward):
    """As `FeedForward`, gated by GELU in its tanh approximation (Shazeer 2020; Hendrycks and Gimpel 2016)."""

    def forward(self, hidden: Tensor) -> Tensor:
        """`[B, T, hidden_size]` → the same shape."""
        gate = F.gelu(self.gate_proj(hidden), approximate="tanh")
        return cast(Tensor, self.down_proj(gate.mul_(self.up_proj(hidden))))


class Attention(nn.Module):
    """Grouped-query attention with what a config asks for: biases, normed queries and keys, a sliding window."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.head_dim = config.head_dim
        self.window = config.sliding_windows[index]
        kv_size, bias = config.num_kv_heads * config.head_dim, config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, config.num_heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=bias)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=config.output_bias)
        # The kernels multiply scores by 1 / √d. What another factor differs by goes into the queries' gain.
        factor = 1.0 if config.query_scale is None else config.query_scale * config.head_dim**0.5
        self.q_norm = _norm(config, config.head_dim, factor) if config.qk_norm else nn.Identity()
        self.k_norm = _norm(config, config.head_dim) if config.qk_norm else nn.Identity()

    def forward(self, hidden: Tensor, rotation: Rotation, cache: Cache | None) -> Tensor:
        """`[B, T, hidden_size]` → the same shape. Keys enter the cache already normed and rotated."""
        shape = (*hidden.shape[:-1], -1, self.head_dim)  # [B, T, heads, d]
        q = rotate(self.q_norm(self.q_proj(hidden).view(shape)), *rotation)
        k = rotate(self.k_norm(self.k_proj(hidden).view(shape)), *rotation)
        v = self.v_proj(hidden).view(shape)
        out = self._attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), cache)
        return cast(Tensor, self.o_proj(out.transpose(1, 2).flatten(2)))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, cache: Cache | None) -> Tensor:
        """Attention of the new tokens, through this layer's window."""
        if self.window is None:
            return attention.attention_with_cache(q, k, v, self.index, cache)
        if cache is None:
            return attention.causal_attention(q, k, v, window=self.window)
        cache.append(self.index, k, v)
        return cache.attend(self.index, q, window=self.window)
