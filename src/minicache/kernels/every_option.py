"""Attention with every option, as phase 4 teaches it: what its labs, notebooks and tests call, and others from outside.

No model of this repository uses ALiBi, a soft cap, or keys and values with one scale for all tokens. So the engine
calls `minicache.kernels.paged_attention`, which has none of them, and the numba kernels and `tiles` lack them: here a
CPU computes them with the `oracle`. Phase 4's Triton kernels have them all, and a call here is one launch, of decode or
of prefill. No phase builds this module.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from minicache.errors import KernelUnavailableError, require_count
from minicache.kernels import checks
from minicache.kernels.backends import Backend, attend, choose
from minicache.kernels.metadata import AttentionMetadata


def paged_decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    scale: float | None = None,
    alibi_slopes: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    num_splits: int | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Attention of one query token per sequence over that sequence's KV entries, read in place.

    Sequence i's query is at position context_lens[i] − 1 and sees the tokens 0 … context_lens[i] − 1. Query head h
    reads key/value head h // (H / H_kv). Slots at or after context_lens[i] and block table entries past the last block
    in use are never read: they may hold anything, NaN included. Follows PagedAttention (Kwon et al. 2023, §4.1);
    `num_splits` > 1 follows Flash-Decoding (Dao et al. 2023).

    Args:
        q: queries `[B, H, d]`, floating point; H is a multiple of H_kv.
        k_cache: keys `[num_blocks, block_size, H_kv, d]`, any strides, in the dtype of `q`, or int8 or float8_e4m3fn.
        v_cache: values, the same shape and dtype.
        block_tables: `[B, max_blocks]` int32 or int64, B ≥ 1, each sequence's blocks in order, the tail undefined.
        context_lens: `[B]` int32 or int64, tokens of each sequence, 0 … max_blocks · block_size. 0 is padding.
        scale: the factor of the scores; None is 1 / √d.
        alibi_slopes: `[H]` floating point: score += slope · (key position − query position) (Press et al. 2022).
        k_scale: a float, a tensor of one number or `[H_kv]`: the keys are the cache's numbers times this. None is 1. Or
            `[num_blocks, block_size, H_kv]` float32, contiguous: a scale per row, as `store_kv` writes them, for int8
            and float8_e4m3fn caches; `v_scale` must then have them too.
        v_scale: likewise for the values.
        sliding_window: W ≥ 1: a query sees itself and the W − 1 tokens before it. None is no limit.
        softcap: c > 0: score = c · tanh(score / c), after the scale, before ALiBi and the mask. None is no cap.
        num_splits: how many splits the Triton kernel cuts each sequence into, 1 … 64; None chooses by the sizes of the
            batch and the block tables. PyTorch does not split.
        backend: "torch", "triton", "numba", or None to choose: Triton on a GPU; on a CPU numba where it can run on
            these caches and options (float32 queries without gradients, no options but `scale`, `sliding_window` and
            per-row scales).

    Returns:
        `[B, H, d]`, the dtype of `q`. Zeros for a sequence with context_lens 0.

    Raises:
        TypeError: an argument is not a tensor, or has the wrong dtype or type.
        ValueError: shapes do not fit, tensors are on different devices, a length is more than its table's blocks hold
            (CPU tensors), an option has an invalid value, or the backend is unknown.
        IndexError: a block in use lies outside the cache (CPU tensors).
        KernelUnavailableError: Triton or numba cannot run here, or not with these dtypes, head size and heads.
    """
    checks.caches(k_cache, v_cache)
    checks.step(k_cache, block_tables, context_lens)
    checks.queries(q, k_cache)
    if q.shape[0] != block_tables.shape[0]:
        raise ValueError(f"one query per sequence: q has {q.shape[0]}, block_tables {block_tables.shape[0]}")
    if num_splits is not None:
        require_count("num_splits", num_splits)
    options = Options(scale, alibi_slopes, k_scale, v_scale, sliding_window, softcap)
    return _attend(q, k_cache, v_cache, AttentionMetadata(block_tables, context_lens), options, backend, num_splits)


def paged_prefill_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    query_start_loc: Tensor,
    *,
    scale: float | None = None,
    alibi_slopes: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Causal attention of each sequence's newest tokens over all its KV entries, read in place.

    Sequence i has the n query rows query_start_loc[i] : query_start_loc[i + 1]. They are its last n tokens, and
    context_lens[i] includes them: query t is at position context_lens[i] − n + t and sees the tokens 0 …
    context_lens[i] − n + t. Sequences with n = 1 (decode) or n = 0 (no query) may be mixed in. Heads, slots that are
    never read, and options are as in `paged_decode_attention`.

    Args:
        q: queries `[N, H, d]` of all sequences, one sequence after the other; floating point, H a multiple of H_kv.
        k_cache: keys `[num_blocks, block_size, H_kv, d]`, any strides, in the dtype of `q`, or int8 or float8_e4m3fn.
        v_cache: values, the same shape and dtype.
        block_tables: `[B, max_blocks]` int32 or int64, B ≥ 1, each sequence's blocks in order, the tail undefined.
        context_lens: `[B]` int32 or int64, tokens of each sequence including the new ones, at least n.
        query_start_loc: `[B + 1]` int32 or int64, from 0 to N, non-decreasing.
        scale: the factor of the scores; None is 1 / √d.
        alibi_slopes: `[H]` floating point, as in `paged_decode_attention`.
        k_scale: a float, a tensor of one number, `[H_kv]` or `[num_blocks, block_size, H_kv]`, as there.
        v_scale: likewise for the values.
        sliding_window: W ≥ 1, as there.
        softcap: c > 0, as there.
        backend: "torch", "triton", "numba", or None to choose: Triton on a GPU; on a CPU numba where it can run on
            these caches and options (float32 queries without gradients, no options but `scale`, `sliding_window` and
            per-row scales).

    Returns:
        `[N, H, d]`, the dtype of `q`.

    Raises:
        TypeError: an argument is not a tensor, or has the wrong dtype or type.
        ValueError: shapes do not fit, tensors are on different devices, an option has an invalid value, or the backend
            is unknown. For CPU tensors also: a length is more than its table's blocks hold or less than its number of
            queries, or query_start_loc does not rise from 0 to N.
        IndexError: a block in use lies outside the cache (CPU tensors).
        KernelUnavailableError: Triton or numba cannot run here, or not with these dtypes, head size and heads.
    """
    checks.caches(k_cache, v_cache)
    checks.step(k_cache, block_tables, context_lens)
    checks.queries(q, k_cache)
    checks.query_start_loc(query_start_loc, context_lens, q.shape[0])
    metadata = AttentionMetadata(block_tables, context_lens, query_start_loc)
    options = Options(scale, alibi_slopes, k_scale, v_scale, sliding_window, softcap)
    return _attend(q, k_cache, v_cache, metadata, options, backend)


class Options(NamedTuple):
    """The options of both functions."""

    scale: float | None
    alibi_slopes: Tensor | None
    k_scale: float | Tensor | None
    v_scale: float | Tensor | None
    sliding_window: int | None
    softcap: float | None


def _attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    options: Options,
    backend: Backend | None,
    num_splits: int | None = None,
) -> Tensor:
    """Attention by a backend that has these options, which are checked first."""
    by_row = _check(options, q, k_cache)
    if q.is_meta:
        return torch.empty_like(q)
    given = {name: value for name, value in options._asdict().items() if value is not None}
    taught = [name for name in given if name not in ("scale", "sliding_window") and not (by_row and "scale" in name)]
    if backend == "numba" and taught:
        raise KernelUnavailableError(f'numba\'s attention has no {taught[0]}: use backend "torch" or None')
    chosen = choose(backend, q, k_cache, v_cache, by_row=by_row, numba_can=not taught)
    if chosen == "triton":
        from minicache.kernels import launch

        return launch.launch(q, k_cache, v_cache, metadata, **given, num_splits=num_splits)
    if taught or (k_cache.dtype != q.dtype and not by_row):
        from minicache.kernels import oracle

        starts = metadata.query_start_loc
        return oracle.attention(q, k_cache, v_cache, metadata.block_tables, metadata.context_lens, starts, **given)
    return attend(chosen, q, k_cache, v_cache, metadata, **given)


def _check(options: Options, q: Tensor, k_cache: Tensor) -> bool:
    """Raise unless these options fit the queries and the cache. Whether keys and values have a scale per row."""
    checks.window(options.sliding_window)
    if options.scale is not None:
        checks.number("scale", options.scale)
    if options.softcap is not None and not options.softcap > 0:
        raise ValueError(f"softcap must be more than 0; got {options.softcap}")
    if options.alibi_slopes is not None:
        checks.tensor("alibi_slopes", options.alibi_slopes, q.device, (q.shape[1],), checks.FLOATS)
    scales = {"k_scale": options.k_scale, "v_scale": options.v_scale}
    by_row = [isinstance(scale, Tensor) and scale.ndim == 3 for scale in scales.values()]
    if all(by_row):
        checks.row_scales(k_cache, options.k_scale, options.v_scale)
    elif any(by_row):
        raise ValueError("k_scale and v_scale: both must have a scale per row, or neither")
    else:
        for name, scale in scales.items():
            if scale is not None:
                checks.head_scale(name, scale, k_cache)
    return all(by_row)
