"""Transformers and accelerators as the few numbers that decode arithmetic needs, and the published ones by name.

`minicache.arithmetic.arithmetic`, built in phase 0, computes with these. They are given: a learner's file imports
them. Memory sizes are in bytes throughout; `GIB` is 2^30 bytes, and a gigabyte on a data sheet may be either that or
10^9 (docs/en/phase-00-decode-arithmetic/theory/02-what-fits.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from minicache.errors import require_count, require_positive

GIB: Final = 2**30
"""Bytes in a gibibyte."""

_MIB: Final = 2**20


@dataclass(frozen=True, slots=True)
class Transformer:
    """A decoder-only transformer, as far as memory traffic and arithmetic are concerned.

    Attributes:
        num_layers: attention layers (L).
        hidden_size: width of the residual stream. It need not be `num_heads * head_dim`.
        num_heads: query heads per layer (H).
        num_kv_heads: key/value heads per layer (H_kv). H means multi-head attention, 1 multi-query, between them
            grouped-query: `num_heads` must be a multiple of it.
        head_dim: size of one head (d).
        num_parameters: all weights, embeddings included (P).
        kv_latent_dim: None for a cache of keys and values per head. For multi-head latent attention (MLA), the values
            that one token leaves in one layer's cache: latent plus the key part that carries RoPE, 512 + 64 in
            DeepSeek-V2 and -V3. All query heads share them, and `num_kv_heads` does not affect the cache.

    Raises:
        TypeError: a field is not an int.
        ValueError: a field is below 1, or `num_heads` is not a multiple of `num_kv_heads`.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_parameters: int
    kv_latent_dim: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "num_parameters"):
            require_count(name, getattr(self, name))
        if self.kv_latent_dim is not None:
            require_count("kv_latent_dim", self.kv_latent_dim)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {self.num_heads}, {self.num_kv_heads}")


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A machine as the roofline model describes it: memory size, memory bandwidth, peak FLOP/s.

    Attributes:
        name: its usual name.
        memory_bytes: size of its memory, in bytes.
        bandwidth: how fast that memory is read or written at best, in bytes/s.
        peak_flops: multiplications and additions at best, in FLOP/s, at one given precision, without sparsity.

    Raises:
        TypeError: `memory_bytes` is not an int, or a rate is not a number.
        ValueError: a number is 0 or negative, or a rate is infinite or NaN.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    peak_flops: float

    def __post_init__(self) -> None:
        require_count("memory_bytes", self.memory_bytes)
        require_positive("bandwidth", self.bandwidth)
        require_positive("peak_flops", self.peak_flops)


# Published models. Shapes are those of each model's config.json. Parameters are counted, not rounded:
# tests/arithmetic/test_specs.py builds each one without its weights and counts them again.

OPT_13B: Final = Transformer(40, 5120, 40, 40, 128, num_parameters=12_853_473_280)
"""Multi-head attention (Zhang et al. 2022, table 1): the example of the PagedAttention paper."""

LLAMA_3_8B: Final = Transformer(32, 4096, 32, 8, 128, num_parameters=8_030_261_248)
"""Grouped-query attention, 4 query heads to a KV head (Dubey et al. 2024, table 3)."""

LLAMA_3_70B: Final = Transformer(80, 8192, 64, 8, 128, num_parameters=70_553_706_496)
"""Grouped-query attention, 8 query heads to a KV head (Dubey et al. 2024, table 3)."""

QWEN3_8B: Final = Transformer(36, 4096, 32, 8, 128, num_parameters=8_190_735_360)
"""Grouped-query attention, 4 to 1 (Yang et al. 2025, table 1)."""

QWEN3_32B: Final = Transformer(64, 5120, 64, 8, 128, num_parameters=32_762_123_264)
"""Grouped-query attention, 8 to 1; its heads together are wider than its hidden size (Yang et al. 2025, table 1)."""

DEEPSEEK_V3: Final = Transformer(61, 7168, 128, 128, 128, num_parameters=671_000_000_000, kv_latent_dim=576)
"""Multi-head latent attention (DeepSeek-AI 2024). A mixture of experts: a token uses 37 of these 671 billion weights.
The sizes are right, but the FLOPs of its steps are not, since they count every weight."""

MINIGPT: Final = Transformer(4, 128, 4, 2, 32, num_parameters=782_720)
"""The course's own model, `minicache.model`."""

# Accelerators. Bandwidth and dense 16-bit peak are from NVIDIA's data sheets; where a sheet gives the peak "with
# sparsity", half of it. Memory is what the driver reports, which is what a program can allocate.

A100_40GB: Final = Accelerator("A100-40GB", 40_960 * _MIB, bandwidth=1.555e12, peak_flops=312e12)
"""NVIDIA A100 40 GB: the PagedAttention paper's GPU for OPT-13B."""

A100_80GB: Final = Accelerator("A100-80GB", 81_920 * _MIB, bandwidth=2.039e12, peak_flops=312e12)
"""NVIDIA A100 80 GB SXM."""

H100: Final = Accelerator("H100", 81_559 * _MIB, bandwidth=3.35e12, peak_flops=989e12)
"""NVIDIA H100 80 GB SXM."""

H200: Final = Accelerator("H200", 143_771 * _MIB, bandwidth=4.8e12, peak_flops=989e12)
"""NVIDIA H200 141 GB SXM: the H100's arithmetic with faster memory."""

L4: Final = Accelerator("L4", 23_034 * _MIB, bandwidth=300e9, peak_flops=121e12)
"""NVIDIA L4 24 GB."""

LAPTOP_CPU: Final = Accelerator("laptop CPU", 16 * GIB, bandwidth=89.6e9, peak_flops=896e9)
"""A laptop's processor, computed from its parts: two channels of DDR5-5600 move 2 · 8 · 5.6e9 bytes/s; 8 cores at
3.5 GHz with two AVX2 multiply-add units do 8 · 3.5e9 · 32 FLOP/s in float32."""
