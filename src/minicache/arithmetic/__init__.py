"""Bytes, FLOPs and rooflines: what decoding costs, before a line of an engine is written.

| module | owns |
|---|---|
| `arithmetic` | the formulas (phase 0) |
| `paper` | the same answers, worked on paper (phase 0) |
| `parallel` | tensor parallelism: bytes per rank, all-reduces, when it pays |
| `specs` | published models and accelerators, as data |

Pure standard library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minicache.lazy import lazily

if TYPE_CHECKING:
    from minicache.arithmetic.arithmetic import (
        arithmetic_intensity as arithmetic_intensity,
    )
    from minicache.arithmetic.arithmetic import (
        attainable_flops as attainable_flops,
    )
    from minicache.arithmetic.arithmetic import (
        break_even_batch as break_even_batch,
    )
    from minicache.arithmetic.arithmetic import (
        cache_bytes_per_token as cache_bytes_per_token,
    )
    from minicache.arithmetic.arithmetic import (
        cache_capacity_tokens as cache_capacity_tokens,
    )
    from minicache.arithmetic.arithmetic import (
        dtype_nbytes as dtype_nbytes,
    )
    from minicache.arithmetic.arithmetic import (
        is_memory_bound as is_memory_bound,
    )
    from minicache.arithmetic.arithmetic import (
        kv_bytes_per_token as kv_bytes_per_token,
    )
    from minicache.arithmetic.arithmetic import (
        max_concurrent_sequences as max_concurrent_sequences,
    )
    from minicache.arithmetic.arithmetic import (
        mla_bytes_per_token as mla_bytes_per_token,
    )
    from minicache.arithmetic.arithmetic import (
        ridge_point as ridge_point,
    )
    from minicache.arithmetic.arithmetic import (
        step_bytes as step_bytes,
    )
    from minicache.arithmetic.arithmetic import (
        step_flops as step_flops,
    )
    from minicache.arithmetic.arithmetic import (
        step_seconds as step_seconds,
    )
    from minicache.arithmetic.arithmetic import (
        weight_bytes as weight_bytes,
    )
    from minicache.arithmetic.specs import Accelerator as Accelerator
    from minicache.arithmetic.specs import Transformer as Transformer

__getattr__, __dir__ = lazily(
    __name__,
    arithmetic="dtype_nbytes kv_bytes_per_token mla_bytes_per_token cache_bytes_per_token weight_bytes "
    "cache_capacity_tokens max_concurrent_sequences step_flops step_bytes arithmetic_intensity ridge_point "
    "attainable_flops step_seconds is_memory_bound break_even_batch",
    specs="Accelerator Transformer",
)
