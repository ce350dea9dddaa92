"""Keys and values in one byte per number: int8 or fp8, with a scale. No phase builds this module.

A quantized KV cache has a scale per token and head, stored in the token's slot next to its numbers (`quantize_rows`). A
block fills token by token, so a scale per block would have to grow and its contents be rounded again, and what a
request reads would depend on how its prompt was chunked. With a scale per row, what is stored for a token depends on
that token alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minicache.kernels import plain

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest number used of each dtype. int8 leaves −128 out, which makes the range symmetric."""


def quantize_rows(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round each row to numbers of `dtype`, with a scale per row: max |row| becomes the largest number.

    A row with infinity or NaN gets the scale NaN, and so reads as NaN. A row of zeros gets the scale 0.

    Args:
        rows: keys or values `[…, H_kv, d]`, floating point.
        dtype: torch.int8 or torch.float8_e4m3fn.

    Returns:
        The numbers, of the shape of `rows`, and the scales `[…, H_kv]` in fp32. numbers · scale is `rows` again, up to
        half a scale for int8, and for fp8 up to 1/16 of the number or 2⁻¹⁰ scales.
    """
    rows = rows.detach().float()
    largest = rows.abs().amax(dim=-1)
    scale = torch.where(largest.isfinite(), largest / LARGEST[dtype], torch.nan)
    return nearest(torch.where(scale[..., None] > 0, rows / scale[..., None], 0.0), dtype), scale


def dequantize_rows(numbers: Tensor, scale: Tensor) -> Tensor:
    """The rows that `quantize_rows` rounded: numbers `[…, H_kv, d]` times scales `[…, H_kv]`, in fp32."""
    return numbers.float() * scale[..., None]


def store_kv(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, *, k_scale: Tensor, v_scale: Tensor
) -> None:
    """`minicache.kernels.store_kv` into a quantized cache, in PyTorch: rounds the rows and stores the scales too.

    Raises:
        IndexError: a slot lies outside the cache. Nothing was written.
    """
    (k, k_rows), (v, v_rows) = (quantize_rows(rows, k_cache.dtype) for rows in (k, v))
    plain.store_kv(k, v, k_cache, v_cache, slot_mapping)
    # A scale is stored as a row of one number.
    plain.store_kv(k_rows[..., None], v_rows[..., None], k_scale[..., None], v_scale[..., None], slot_mapping)


def nearest(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest numbers of `dtype`, saturating at the largest."""
    numbers = numbers.clamp(-LARGEST[dtype], LARGEST[dtype])
    # A cast to an integer truncates; a cast to fp8 rounds to nearest.
    return (numbers.round() if dtype == torch.int8 else numbers).to(dtype)
