"""Store, gather and attend through block tables: four functions, three backends.

The functions here check their arguments once, for all backends, and pass them on: CUDA tensors to Triton (`store`,
`gather`, `decode`, `split_kv`, `prefill`, phase 4), CPU tensors to numba (`cpu`) or PyTorch. numba computes attention
where it is installed, for float32 queries without gradients, over a float32 or a quantized cache. In PyTorch attention
uses `tiles`, which cuts long prompts into tiles and leaves the rest to `plain`, phase 3's; `oracle` has the options
that few models need. A backend is imported on first use, so the package works without Triton and numba. No phase builds
this module.

Names in shapes: N tokens or query rows, B sequences, H query heads, H_kv key/value heads, d the head size. A cache is
`[num_blocks, block_size, H_kv, d]`, and its slot s is offset s % block_size of block s // block_size (Kwon et al. 2023,
§4.2).

No check reads the values of a GPU tensor, which would wait for the device. Slots, lengths and block ids are checked for
CPU tensors only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from os.path import dirname
from typing import Any, Literal

import torch
from torch import Tensor

from minicache.errors import KernelUnavailableError, require_count

Backend = Literal["torch", "triton", "numba"]

_STORABLE = (torch.int8, torch.float8_e4m3fn)
"""Cache dtypes that may differ from the queries': quantized numbers, which a scale converts to keys and values."""


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
    _check_caches(k_cache, v_cache)
    _check_tensor("slot_mapping", slot_mapping, k_cache.device)
    _check_ints("slot_mapping", slot_mapping, ndim=1)
    scales: dict[str, Any] = {}
    if k_scale is not None or v_scale is not None:
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        for name, scale in scales.items():
            _check_row_scales(name, scale, k_cache)
    for name, rows in (("k", k), ("v", v)):
        _check_tensor(name, rows, k_cache.device)
        if rows.shape != (slot_mapping.shape[0], *k_cache.shape[2:]):
            wanted = [slot_mapping.shape[0], *k_cache.shape[2:]]
            raise ValueError(f"{name} must be {wanted}, one row per slot; got {list(rows.shape)}")
        if not scales and rows.dtype != k_cache.dtype:
            raise TypeError(f"{name} is {rows.dtype}, the cache stores {k_cache.dtype}: convert it first")
        if scales and not rows.dtype.is_floating_point:
            raise TypeError(f"{name} is {rows.dtype}: rows to quantize must be floating point")
    if k_cache.is_meta:
        return  # a tensor on "meta" has a shape but no values
    chosen = _choose(backend, k_cache, v_cache, dtype=k.dtype, by_row=bool(scales))
    if chosen != "triton":
        if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
            raise ValueError("on a CPU the caches must be contiguous: slots are used as row indices into their memory")
        if chosen == "numba":
            from minicache.kernels.cpu import steps

            steps.store_kv(k, v, k_cache, v_cache, slot_mapping, **scales)
            return
        from minicache.kernels import plain, quantize

        store_rows = quantize.store_kv if scales else plain.store_kv
        store_rows(k, v, k_cache, v_cache, slot_mapping, **scales)
        return
    if slot_mapping.device.type == "cpu":
        _check_range("slot", slot_mapping, -1, k_cache.shape[0] * k_cache.shape[1])
    if scales:
        from minicache.kernels import quantized_store

        quantized_store.store_kv(k, v, k_cache, v_cache, slot_mapping, **scales)
        return
    from minicache.kernels import store

    store.store_kv(k, v, k_cache, v_cache, slot_mapping)


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
    _check_caches(cache, cache)
    _check_tensor("block_table", block_table, cache.device)
    _check_ints("block_table", block_table, ndim=1)
    if not isinstance(num_tokens, int) or isinstance(num_tokens, bool):
        raise TypeError(f"num_tokens must be an int; got {num_tokens!r}")
    room = block_table.shape[0] * cache.shape[1]
    if not 0 <= num_tokens <= room:
        raise ValueError(f"num_tokens must be 0 … {room}, what {block_table.shape[0]} blocks hold; got {num_tokens}")
    if cache.is_meta:
        return cache.new_empty(num_tokens, *cache.shape[2:])
    if backend == "numba":
        raise KernelUnavailableError(
            'numba has no gather: its kernels read blocks in place. Use backend "torch" or None'
        )
    if _choose(backend, cache, dtype=cache.dtype, numba_can=False) == "torch":
        from minicache.kernels import plain

        return plain.gather_kv(cache, block_table, num_tokens)
    from minicache.kernels import gather

    if block_table.device.type == "cpu":
        _check_range("block", block_table[: -(-num_tokens // cache.shape[1])], 0, cache.shape[0])
    return gather.gather_kv(cache, block_table, num_tokens)


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
    _check_attention(q, k_cache, v_cache, block_tables, context_lens)
    options = _options(q, k_cache, scale, alibi_slopes, k_scale, v_scale, sliding_window, softcap)
    if q.shape[0] != block_tables.shape[0]:
        raise ValueError(f"one query per sequence: q has {q.shape[0]}, block_tables {block_tables.shape[0]}")
    if num_splits is not None:
        require_count("num_splits", num_splits)
    metadata = AttentionMetadata(block_tables, context_lens)
    return _attend(q, k_cache, v_cache, metadata, scale, options, num_splits, backend)


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
    _check_attention(q, k_cache, v_cache, block_tables, context_lens)
    options = _options(q, k_cache, scale, alibi_slopes, k_scale, v_scale, sliding_window, softcap)
    _check_query_start_loc(q, context_lens, query_start_loc)
    metadata = AttentionMetadata(block_tables, context_lens, query_start_loc)
    return _attend(q, k_cache, v_cache, metadata, scale, options, None, backend)


class AttentionMetadata:
    """Which tokens attend to which in one step of a model, shared by all its layers.

    A backend caches in it what it derives from it (which sequences attend together, how a prompt is cut into tiles),
    once per step instead of once per layer. The tensors must not change afterwards.

    On a GPU pass `lengths` and `num_new_tokens` too. The host knows them when it builds a step; without them the first
    layer of any step but a decode step waits for the device to read them.

    Args:
        block_tables: `[B, max_blocks]` int32 or int64, as in `paged_decode_attention`.
        context_lens: `[B]` int32 or int64, likewise.
        query_start_loc: `[B + 1]` int32 or int64, as in `paged_prefill_attention`. None: a decode step, in which each
            sequence has one query.
        lengths: the values of `context_lens`. None: read them from it when needed.
        num_new_tokens: the number of queries of each sequence. None: read it from `query_start_loc`.

    Attributes:
        block_tables: as given.
        context_lens: as given.
        query_start_loc: as given.
        known_lengths: `lengths` as given.
        plans: what backends have derived, keyed by what else it depends on.
    """

    def __init__(
        self,
        block_tables: Tensor,
        context_lens: Tensor,
        query_start_loc: Tensor | None = None,
        *,
        lengths: Sequence[int] | None = None,
        num_new_tokens: Sequence[int] | None = None,
    ) -> None:
        self.block_tables = block_tables
        self.context_lens = context_lens
        self.query_start_loc = query_start_loc
        self.known_lengths = lengths
        self.plans: dict[object, Any] = {}
        self._num_new_tokens = num_new_tokens

    @cached_property
    def lengths(self) -> list[int]:
        """`context_lens` as a list. On a GPU this waits for the device, unless the lengths were given."""
        return self.context_lens.tolist() if self.known_lengths is None else list(self.known_lengths)

    @cached_property
    def starts(self) -> list[int]:
        """`query_start_loc` as a list. On a GPU this waits for the device, unless `num_new_tokens` was given."""
        if self.query_start_loc is None:
            return list(range(self.context_lens.shape[0] + 1))
        if self._num_new_tokens is None:
            return self.query_start_loc.tolist()
        return [0, *accumulate(self._num_new_tokens)]

    @cached_property
    def max_context_len(self) -> int | None:
        """The longest of the lengths if they were given, else None: never waits for the device."""
        return None if self.known_lengths is None else max(self.known_lengths)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    *,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    sliding_window: int | None = None,
    backend: Backend | None = None,
) -> Tensor:
    """Decode or prefill attention of one layer, with metadata shared by all layers of the step.

    The result is the same as of `paged_decode_attention` or `paged_prefill_attention`. Unlike those, it does not check
    tables and lengths.

    Args:
        q: queries `[N, H, d]` of all sequences, one sequence after the other, in the dtype of a float cache.
        k_cache: keys `[num_blocks, block_size, H_kv, d]`.
        v_cache: values, the same shape and dtype.
        metadata: of the step.
        k_scale: as in `paged_decode_attention`.
        v_scale: likewise for the values.
        sliding_window: W ≥ 1: a query sees itself and the W − 1 tokens before it. None is no limit.
        backend: "torch", "triton", "numba", or None to choose: Triton on a GPU; on a CPU numba where it can run on
            these caches and options (float32 queries without gradients, no options but `scale`, `sliding_window` and
            per-row scales).

    Returns:
        `[N, H, d]`, the dtype of `q`.

    Raises:
        TypeError: the dtypes of `q` and the cache differ, `sliding_window` is not an int, or scales have the wrong
            type.
        ValueError: `q` or scales do not fit the cache, `sliding_window` is below 1, or the backend is unknown.
        IndexError: a block in use lies outside the cache (CPU tensors, PyTorch).
        KernelUnavailableError: Triton or numba cannot run here, or not with these dtypes, head size and heads.
    """
    _check_queries(q, k_cache)
    options = _options(q, k_cache, None, None, k_scale, v_scale, sliding_window, None)
    if q.is_meta or _choose(backend, k_cache, v_cache, dtype=q.dtype, by_row=_is_by_row(k_scale)) != "triton":
        return _attend(q, k_cache, v_cache, metadata, None, options, None, backend)
    from minicache.kernels import mixed

    parts = mixed.parts(metadata)
    if len(parts) == 1:  # it has all queries
        return _attend(q, k_cache, v_cache, parts[0].metadata, None, options, None, "triton")
    out = torch.empty_like(q)
    for part in parts:
        out[part.rows] = _attend(q[part.rows], k_cache, v_cache, part.metadata, None, options, None, "triton")
    return out


def _attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float | None,
    options: dict[str, Any],
    num_splits: int | None,
    backend: Backend | None,
) -> Tensor:
    """Attention by the backend that runs, once the arguments have been checked."""
    if q.is_meta:
        return torch.empty_like(q)
    starts = () if metadata.query_start_loc is None else (metadata.query_start_loc,)
    paged = (q, k_cache, v_cache, metadata.block_tables, metadata.context_lens)
    by_row = {name: options[name] for name in ("k_scale", "v_scale") if _is_by_row(options[name])}
    extra = [name for name in options if options[name] is not None and name not in ("sliding_window", *by_row)]
    if backend == "numba" and extra:
        raise KernelUnavailableError(f'numba\'s attention has no {extra[0]}: use backend "torch" or None')
    wants_gradient = q.requires_grad and torch.is_grad_enabled()
    numba_can = not extra and not wants_gradient
    chosen = _choose(backend, k_cache, v_cache, dtype=q.dtype, by_row=bool(by_row), numba_can=numba_can)
    if chosen == "numba":
        from minicache.kernels.cpu import steps

        return steps.paged_attention(
            q, k_cache, v_cache, metadata, scale=scale, sliding_window=options["sliding_window"], **by_row
        )
    if chosen == "torch":
        if not extra and (k_cache.dtype == q.dtype or by_row):
            from minicache.kernels import tiles

            return tiles.paged_attention(
                q, k_cache, v_cache, metadata, scale=scale, sliding_window=options["sliding_window"], **by_row
            )
        from minicache.kernels import oracle

        attend = oracle.paged_prefill_attention if starts else oracle.paged_decode_attention
        return attend(*paged, *starts, scale=scale, **options)
    if q.device.type == "cpu":
        _check_blocks_in_use(k_cache, metadata.block_tables, metadata.context_lens)
    options["scale"] = q.shape[2] ** -0.5 if scale is None else scale
    if starts:
        from minicache.kernels import prefill

        return prefill.paged_prefill_attention(*paged, *starts, **options)
    from minicache.kernels import split_kv

    if num_splits is None:
        longest = metadata.max_context_len or metadata.block_tables.shape[1] * k_cache.shape[1]  # what the tables hold
        if options["sliding_window"] is not None:
            longest = min(longest, options["sliding_window"])
        num_splits = split_kv.choose_num_splits(q.shape[0], k_cache.shape[2], longest, _num_processors(q.device))
    if num_splits > split_kv.MAX_SPLITS:
        raise ValueError(f"num_splits must be 1 … {split_kv.MAX_SPLITS}: the merge holds all of them; got {num_splits}")
    if num_splits > 1:
        return split_kv.paged_decode_attention(*paged, **options, num_splits=num_splits)
    from minicache.kernels import decode

    return decode.paged_decode_attention(*paged, **options)


# Which backend


def _choose(
    backend: Backend | None, *caches: Tensor, dtype: torch.dtype, by_row: bool = False, numba_can: bool = True
) -> Backend:
    """The backend to use: the given one, or the default of the caches' device. Raise if it cannot run on them.

    Unless requested by name, numba runs only where it can: `numba_can`, these caches, with or without scales `by_row`,
    and queries or rows of `dtype`.
    """
    if backend not in (None, "torch", "triton", "numba"):
        raise ValueError(f'backend must be "torch", "triton", "numba" or None; got {backend!r}')
    device = caches[0].device
    if backend == "triton" or (backend is None and device.type == "cuda"):
        from minicache.kernels import configs, runtime

        runtime.require_triton(device)
        configs.require_storable(configs.architecture(device), caches[0].dtype)
        return "triton"
    if backend == "torch" or (backend is None and (not numba_can or is_plain_replaced())):
        return "torch"
    from minicache.kernels import cpu

    reason = cpu.why_not(*caches, dtype=dtype, by_row=by_row)
    if reason is None:
        return "numba"
    if backend == "numba":
        raise KernelUnavailableError(reason)
    return "torch"


def is_plain_replaced() -> bool:
    """Whether a learner's file replaces `minicache.kernels.plain`: a CPU then runs that file instead of numba."""
    from minicache.kernels import plain

    return dirname(str(plain.__file__)) != dirname(__file__)


def _num_processors(device: torch.device) -> int:
    """A GPU's multiprocessors; 1 under the interpreter."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


# Checks


def _check_tensor(name: str, value: Tensor, device: torch.device) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor; got {type(value).__name__}")
    if value.device != device:
        raise ValueError(f"{name} is on {value.device}, the cache on {device}: move it first")


def _check_ints(name: str, value: Tensor, ndim: int) -> None:
    if value.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64; got {value.dtype}")
    if value.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimension{'s' if ndim > 1 else ''}; got {list(value.shape)}")


def _check_range(name: str, values: Tensor, low: int, end: int) -> None:
    """Raise IndexError unless every value of a CPU tensor is in low … end − 1."""
    if bool(((values < low) | (values >= end)).any()):
        wrong = int(values[(values < low) | (values >= end)][0])
        raise IndexError(f"no {name} {wrong}: this cache has {name}s 0 … {end - 1}")


def _check_caches(k_cache: Tensor, v_cache: Tensor) -> None:
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if not isinstance(cache, Tensor):
            raise TypeError(f"{name} must be a tensor; got {type(cache).__name__}")
        _check_tensor(name, cache, k_cache.device)
        if cache.ndim != 4 or 0 in cache.shape or cache.shape != k_cache.shape:
            raise ValueError(
                f"a cache is [num_blocks, block_size, H_kv, d], keys and values alike; {name} is {list(cache.shape)}"
            )
        if cache.dtype != k_cache.dtype or not (cache.dtype.is_floating_point or cache.dtype in _STORABLE):
            raise TypeError(f"a cache holds floats or int8, keys and values alike; {name} is {cache.dtype}")


def _check_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, context_lens: Tensor) -> None:
    """Raise unless `q` `[…, H, d]` can attend to the cache through the tables; on a CPU, check the lengths too."""
    _check_caches(k_cache, v_cache)
    for name, value in (("q", q), ("block_tables", block_tables), ("context_lens", context_lens)):
        _check_tensor(name, value, k_cache.device)
    _check_ints("block_tables", block_tables, ndim=2)
    _check_ints("context_lens", context_lens, ndim=1)
    _check_queries(q, k_cache)
    if context_lens.shape[0] != block_tables.shape[0] or not context_lens.shape[0]:
        raise ValueError(f"one length per table, B ≥ 1; got {context_lens.shape[0]} and {block_tables.shape[0]}")
    room = block_tables.shape[1] * k_cache.shape[1]
    if context_lens.device.type == "cpu":
        shortest, longest = (int(bound) for bound in context_lens.aminmax())
        if shortest < 0 or longest > room:
            wrong = shortest if shortest < 0 else longest
            raise ValueError(f"a context_len must be 0 … {room}, what {block_tables.shape[1]} blocks hold; got {wrong}")


def _check_queries(q: Tensor, k_cache: Tensor) -> None:
    """Raise unless `q` is `[…, H, d]` with heads and numbers that can attend to the cache."""
    num_kv_heads, head_dim = k_cache.shape[2:]
    if q.ndim != 3 or q.shape[2] != head_dim or q.shape[1] == 0 or q.shape[1] % num_kv_heads:
        raise ValueError(
            f"q must have three dimensions, a multiple of {num_kv_heads} heads and head_dim {head_dim}; "
            f"got {list(q.shape)}"
        )
    if not q.dtype.is_floating_point or k_cache.dtype not in (q.dtype, *_STORABLE):
        raise TypeError(f"q is {q.dtype}, the cache holds {k_cache.dtype}: only int8 and float8_e4m3fn may differ")


def _check_query_start_loc(q: Tensor, context_lens: Tensor, query_start_loc: Tensor) -> None:
    """Raise unless the queries can be the newest tokens of each sequence; checks the values on a CPU only."""
    _check_tensor("query_start_loc", query_start_loc, q.device)
    _check_ints("query_start_loc", query_start_loc, ndim=1)
    if query_start_loc.shape[0] != context_lens.shape[0] + 1:
        raise ValueError(
            f"query_start_loc needs {context_lens.shape[0] + 1} entries, one more than there are sequences; "
            f"got {query_start_loc.shape[0]}"
        )
    if query_start_loc.device.type != "cpu":
        return
    starts = query_start_loc.tolist()
    if starts[0] != 0 or starts[-1] != q.shape[0] or starts != sorted(starts):
        raise ValueError(f"query_start_loc must rise from 0 to {q.shape[0]}; got {starts}")
    for sequence, (start, end, num_tokens) in enumerate(zip(starts, starts[1:], context_lens.tolist(), strict=False)):
        if num_tokens < end - start:
            raise ValueError(f"sequence {sequence} has {num_tokens} tokens, fewer than its {end - start} queries")


def _check_blocks_in_use(k_cache: Tensor, block_tables: Tensor, context_lens: Tensor) -> None:
    """Raise IndexError unless every block in use exists: the interpreter would read outside the cache, and crash."""
    blocks_in_use = (context_lens + k_cache.shape[1] - 1) // k_cache.shape[1]
    in_use = torch.arange(block_tables.shape[1]) < blocks_in_use[:, None]
    _check_range("block", block_tables[in_use], 0, k_cache.shape[0])


def _options(
    q: Tensor,
    k_cache: Tensor,
    scale: float | None,
    alibi_slopes: Tensor | None,
    k_scale: float | Tensor | None,
    v_scale: float | Tensor | None,
    sliding_window: int | None,
    softcap: float | None,
) -> dict[str, Any]:
    """The checked options by name, without the scale."""
    if scale is not None and not isinstance(scale, float | int):
        raise TypeError(f"scale must be a float; got {type(scale).__name__}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be more than 0; got {softcap}")
    if sliding_window is not None:
        require_count("sliding_window", sliding_window)
    if alibi_slopes is not None:
        _check_per_head("alibi_slopes", alibi_slopes, q.shape[1], q.device)
    for name, value in (("k_scale", k_scale), ("v_scale", v_scale)):
        if _is_by_row(value):
            _check_row_scales(name, value, k_cache)
        elif isinstance(value, Tensor):
            one_for_all = value.ndim <= 1 and value.numel() == 1
            _check_per_head(name, value, 1 if one_for_all else k_cache.shape[2], q.device)
        elif value is not None and not isinstance(value, float | int):
            raise TypeError(f"{name} must be a float or a tensor [{k_cache.shape[2]}]; got {type(value).__name__}")
    if _is_by_row(k_scale) != _is_by_row(v_scale):
        raise ValueError("k_scale and v_scale: both must have a scale per row, or neither")
    return {
        "alibi_slopes": alibi_slopes,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "sliding_window": sliding_window,
        "softcap": softcap,
    }


def _is_by_row(scale: object) -> bool:
    """Whether these are per-row scales, not one number or one per head."""
    return isinstance(scale, Tensor) and scale.ndim == 3


def _check_row_scales(name: str, scale: object, k_cache: Tensor) -> None:
    """Raise unless these are the per-row scales of a quantized cache."""
    if not isinstance(scale, Tensor) or scale.dtype != torch.float32:
        kind = scale.dtype if isinstance(scale, Tensor) else type(scale).__name__
        raise TypeError(f"{name} must be a float32 tensor, for keys and for values; got {kind}")
    _check_tensor(name, scale, k_cache.device)
    if k_cache.dtype not in _STORABLE:
        raise TypeError(f"{name}: row scales need an int8 or float8_e4m3fn cache; this one holds {k_cache.dtype}")
    if scale.shape != k_cache.shape[:3] or not scale.is_contiguous():
        raise ValueError(
            f"{name} must be {list(k_cache.shape[:3])}, a scale per row, contiguous; got {list(scale.shape)}"
        )


def _check_per_head(name: str, value: Tensor, num_heads: int, device: torch.device) -> None:
    _check_tensor(name, value, device)
    if not value.dtype.is_floating_point:
        raise TypeError(f"{name} must be floating point; got {value.dtype}")
    if value.shape != (num_heads,) and not (num_heads == 1 and value.ndim == 0):
        raise ValueError(f"{name} must be [{num_heads}], one per head; got {list(value.shape)}")
