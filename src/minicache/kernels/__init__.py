"""Store, gather and attend through block tables, on three backends.

A model's step calls `store_kv` and `paged_attention`, which has only what models need: a sliding window, and scales of
a quantized cache; and `linear` where its weights are quantized. `paged_decode_attention` and `paged_prefill_attention`
(module `every_option`) are for learning and for calls from outside: they check a step's tables and lengths too, and
have the options of the literature.

The functions check their arguments once, for all backends (`checks`), choose one (`backends`) and pass them on. Kernels
are imported on first use, so the package works without Triton and numba. No phase builds this module.

Names in shapes: N tokens or query rows, B sequences, H query heads, H_kv key/value heads, d the head size. A cache is
`[num_blocks, block_size, H_kv, d]`, and its slot s is offset s % block_size of block s // block_size (Kwon et al. 2023,
§4.2).

No check reads the values of a GPU tensor, which would wait for the device. Slots, lengths and block ids are checked for
CPU tensors only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minicache.errors import KernelUnavailableError, require_count
from minicache.kernels import checks
from minicache.kernels.backends import Backend, attend, choose
from minicache.kernels.every_option import paged_decode_attention, paged_prefill_attention
from minicache.kernels.metadata import AttentionMetadata

if TYPE_CHECKING:
    from minicache.kernels.group_quantize import GroupQuantized

__all__ = [
    "AttentionMetadata",
    "gather_kv",
    "linear",
    "paged_attention",
    "paged_decode_attention",
    "paged_prefill_attention",
    "store_kv",
]


def store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    backend: Backend | None = None,
) -> None:
    """Write the keys and values of each token to its slot, in place.

    With scales the cache is quantized: each row (one token's key or value of one head) is rounded as in
    `minicache.kernels.quantize.quantize_rows`, and its scale is written too. No gradient flows through a cache. If two
    tokens have the same slot, it is undefined which is kept.

    Args:
        k: keys `[N, H_kv, d]`, in the cache's dtype, or any floating-point one with scales; any strides.
        v: values, the same shape and dtype.
        k_cache: `[num_blocks, block_size, H_kv, d]`; any strides on a GPU, contiguous on a CPU.
        v_cache: the same shape and dtype.
        slot_mapping: `[N]` int32 or int64, the slot of each token, 0 … num_blocks · block_size − 1, or −1 to skip it (a
            batch's padding).
        k_scale: `[num_blocks, block_size, H_kv]` float32, contiguous, written in place: the scales of the keys, for
            int8 and float8_e4m3fn caches. None: keys and values are stored unchanged.
        v_scale: likewise for the values; required with `k_scale`.
        backend: "torch", "triton", "numba", or None to choose: Triton on a GPU; on a CPU numba where it can run, which
            takes as long as PyTorch for a few tokens and half as long for prompts.

    Raises:
        TypeError: an argument is not a tensor, or has the wrong dtype.
        ValueError: shapes do not fit, tensors are on different devices, the backend is unknown, or a cache on a CPU is
            not contiguous.
        IndexError: a slot lies outside the cache (CPU tensors). Nothing was written.
        KernelUnavailableError: Triton or numba cannot run here, or not on a cache of this dtype.
    """
    checks.caches(k_cache, v_cache)
    checks.tensor("slot_mapping", slot_mapping, k_cache.device, ("N",), checks.INTEGERS)
    scales = {} if k_scale is None and v_scale is None else {"k_scale": k_scale, "v_scale": v_scale}
    if scales:
        checks.row_scales(k_cache, k_scale, v_scale)
    wanted = (slot_mapping.shape[0], *k_cache.shape[2:])
    for name, rows in (("k", k), ("v", v)):
        checks.tensor(name, rows, k_cache.device, wanted, checks.FLOATS if scales else (k_cache.dtype,))
    if k_cache.is_meta:
        return  # a tensor on "meta" has a shape but no values
    chosen = choose(backend, k, k_cache, v_cache, by_row=bool(scales))
    if chosen != "triton" and not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("on a CPU the caches must be contiguous: slots are used as row indices into their memory")
    store: Any
    if chosen == "numba":
        from minicache.kernels.cpu import steps as store
    elif chosen == "torch":
        from minicache.kernels import plain, quantize

        store = quantize if scales else plain
    else:
        if slot_mapping.device.type == "cpu":
            checks.in_range("slot", slot_mapping, -1, k_cache.shape[0] * k_cache.shape[1])
        if scales:
            from minicache.kernels import quantized_store as store
        else:
            from minicache.kernels import store
    store.store_kv(k, v, k_cache, v_cache, slot_mapping, **scales)


def gather_kv(cache: Tensor, block_table: Tensor, num_tokens: int, *, backend: Backend | None = None) -> Tensor:
    """Copy the KV entries of one sequence out of its blocks, in token order.

    Args:
        cache: keys or values, `[num_blocks, block_size, H_kv, d]`; any strides.
        block_table: `[max_blocks]` int32 or int64, the sequence's blocks in order. Entries past the last block in use
            may be anything.
        num_tokens: how many entries, 0 … max_blocks · block_size.
        backend: "torch", "triton", or None to choose by device; numba has no gather.

    Returns:
        `[num_tokens, H_kv, d]`, the cache's dtype. Read-only: it may be a view of the cache.

    Raises:
        TypeError: an argument is not a tensor or has the wrong dtype, or `num_tokens` is not an int.
        ValueError: shapes do not fit, tensors are on different devices, `num_tokens` is negative or more than the
            table's blocks hold, or the backend is unknown.
        IndexError: a block in use lies outside the cache (CPU tensors).
        KernelUnavailableError: Triton or numba cannot run here, or not on a cache of this dtype.
    """
    checks.caches(cache, cache)
    checks.tensor("block_table", block_table, cache.device, ("max_blocks",), checks.INTEGERS)
    require_count("num_tokens", num_tokens, at_least=0)
    room = block_table.shape[0] * cache.shape[1]
    if num_tokens > room:
        raise ValueError(f"num_tokens must be 0 … {room}, what {block_table.shape[0]} blocks hold; got {num_tokens}")
    if cache.is_meta:
        return cache.new_empty(num_tokens, *cache.shape[2:])
    if backend == "numba":
        raise KernelUnavailableError(
            'numba has no gather: its kernels read blocks in place. Use backend "torch" or None'
        )
    if choose(backend, cache, cache, numba_can=False) == "torch":
        from minicache.kernels import plain

        return plain.gather_kv(cache, block_table, num_tokens)
    from minicache.kernels import gather

    if block_table.device.type == "cpu":
        checks.in_range("block", block_table[: -(-num_tokens // cache.shape[1])], 0, cache.shape[0])
    return gather.gather_kv(cache, block_table, num_tokens)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    sliding_window: int | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Attention of one layer, of each sequence's newest tokens over all its KV entries: what a model's step calls.

    The result is the same as of `paged_decode_attention` or `paged_prefill_attention`. Unlike those, it does not check
    tables and lengths, plans a step once for all layers, and has no option that no model here uses.

    Args:
        q: queries `[N, H, d]` of all sequences, one sequence after the other, in the dtype of a float cache.
        k_cache: keys `[num_blocks, block_size, H_kv, d]`.
        v_cache: values, the same shape and dtype.
        metadata: of the step.
        k_scale: `[num_blocks, block_size, H_kv]` float32, contiguous: the scales of an int8 or float8_e4m3fn cache, as
            `store_kv` writes them. None for any other cache.
        v_scale: likewise for the values.
        sliding_window: W ≥ 1: a query sees itself and the W − 1 tokens before it. None is no limit.
        backend: "torch", "triton", "numba", or None to choose: Triton on a GPU; on a CPU numba where it can run on
            these caches (float32 queries without gradients).

    Returns:
        `[N, H, d]`, the dtype of `q`.

    Raises:
        TypeError: the dtypes of `q` and the cache differ, `sliding_window` is not an int, or scales have the wrong
            type.
        ValueError: `q` or scales do not fit the cache, `sliding_window` is below 1, or the backend is unknown.
        IndexError: a block in use lies outside the cache (CPU tensors, PyTorch).
        KernelUnavailableError: Triton or numba cannot run here, or not with these dtypes, head size and heads.
    """
    checks.queries(q, k_cache)
    checks.window(sliding_window)
    by_row = k_cache.dtype in checks.ONE_BYTE or k_scale is not None or v_scale is not None
    if by_row:
        checks.row_scales(k_cache, k_scale, v_scale)
    if q.is_meta:
        return torch.empty_like(q)
    chosen = choose(backend, q, k_cache, v_cache, by_row=by_row)
    options = {"k_scale": k_scale, "v_scale": v_scale, "sliding_window": sliding_window}
    return attend(chosen, q, k_cache, v_cache, metadata, **options)


def linear(hidden: Tensor, weight: GroupQuantized, *, backend: Backend | None = None) -> Tensor:
    """Rows times a weight of few bits: what a linear layer computes. No gradient flows.

    Args:
        hidden: `[N, in]`, float32, float16 or bfloat16; any strides.
        weight: `[out, in]`, as `minicache.kernels.group_quantize.quantize_groups` rounds it, contiguous.
        backend: "torch", which dequantizes the whole weight first; "triton"; or None to choose by device. numba's
            weights lie in another order, `minicache.model.panels`.

    Returns:
        `[N, out]`, the dtype of `hidden`.

    Raises:
        TypeError: an argument is not a tensor, or has the wrong dtype.
        ValueError: shapes do not fit, the weight is not contiguous, tensors are on different devices, or the backend is
            unknown.
        KernelUnavailableError: Triton cannot run here, or numba was asked for.
    """
    checks.group_quantized(hidden, weight)
    if hidden.is_meta:
        return hidden.new_empty(len(hidden), len(weight.scale))
    if backend == "numba":
        raise KernelUnavailableError(
            'numba multiplies by weights in panels, of minicache.model.panels. Use backend "torch" or None'
        )
    if choose(backend, hidden, weight.numbers, numba_can=False) == "torch":
        from minicache.kernels.group_quantize import dequantize_groups

        return torch.nn.functional.linear(hidden, dequantize_groups(weight).to(hidden.dtype))
    from minicache.kernels import quantized_linear

    return quantized_linear.linear(hidden, weight)
