"""Shared by the tests of phase 4: a paged batch with poison in its unused memory, and a simple reference attention.

Without a GPU every kernel runs in Triton's interpreter and under the tracer, so an invalid access fails with a tensor's
name and a line.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from minicache.errors import MemoryAccessError
from minicache.kernels import paged_decode_attention, paged_prefill_attention, runtime
from minicache_course.checks import call, short, that
from minicache_course.kernels.tracer import Access, Forbidden, Log, Program, trace, unused_entries, unused_rows
from minicache_course.seeds import fresh

NO_BLOCK = 2**31 - 1
"""The tail of a block table holds this invalid block id."""


@pytest.fixture(autouse=True)
def _one_thread_and_a_seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(fresh(0))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU, or the CPU and its interpreter."""
    return runtime.usual_device()


@pytest.fixture(scope="session")
def watched(device) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`watched(f)`: f with Triton, and under the tracer if the interpreter runs it."""

    def wrap(fn):
        @functools.wraps(fn)
        def run(*args, **kwargs):
            if device.type == "cuda":
                return fn(*args, **kwargs, backend="triton")
            given = inspect.signature(fn).bind(*args, **kwargs).arguments
            kernel = _kernel_of(fn.__name__, given)
            with _watching(_forbidden(**given), given, kernel) as log:
                got = fn(*args, **kwargs, backend="triton")
            _check_that_all_is_stored(log, given, got, kernel)
            _check_that_caches_are_read_in_place(log, given, kernel)
            if "query_start_loc" in given:
                _check_that_tiles_load_what_they_see(log, **given)
            elif "context_lens" in given:
                _check_that_groups_share_their_loads(log, **given)
                if given["num_splits"] > 1:
                    from minicache.kernels.decode import launch_options

                    tile = launch_options(given["q"], given["k_cache"])["TILE"]
                    _check_that_splits_are_even(log, tile, **given)
            return got

        return run

    return wrap


def _kernel_of(function: str, given: Mapping[str, Any]) -> str | None:
    """The kernel that stores what a call returns or writes; None if there is nothing to store."""
    if function == "store_kv":
        kernel = "quantized_store_kernel" if "k_scale" in given else "store_kernel"
        return kernel if bool((given["slot_mapping"] >= 0).any()) else None
    if function == "gather_kv":
        return "gather_kernel" if given["num_tokens"] else None
    if not given["q"].numel():
        return None
    if function == "paged_prefill_attention":
        return "prefill_kernel"
    return "merge_kernel" if given["num_splits"] > 1 else "decode_kernel"


@contextmanager
def _watching(forbid: Mapping[str, Forbidden], given: Mapping[str, Any], kernel: str | None = None) -> Iterator[Log]:
    """Trace what runs inside, and check its loads and stores afterwards: `kernel` has stored, if one is named."""
    from triton.language.semantic import TritonSemantic
    from triton.runtime.interpreter import interpreter_builder

    multiply, convert = interpreter_builder.create_dot, TritonSemantic.cast

    def cast(self: Any, given: Any, dtype: Any, *args: Any, **kwargs: Any) -> Any:
        if given.type.scalar.is_int() and dtype.scalar.is_fp8():
            raise AssertionError(
                "an integer is converted to fp8, which a GPU's compiler refuses: other=0 in a load? a cast to int8?"
            )
        return convert(self, given, dtype, *args, **kwargs)

    def create_dot(a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        if a.dtype.is_fp32() and input_precision.name != "IEEE":
            raise AssertionError('tl.dot of fp32 tiles without input_precision="ieee": a GPU rounds them to 10 bits')
        return multiply(a, b, d, input_precision, max_num_imprecise_acc)

    with ExitStack() as stack:
        stack.enter_context(patch.object(interpreter_builder, "create_dot", create_dot))
        stack.enter_context(patch.object(TritonSemantic, "cast", cast))
        log = stack.enter_context(trace(forbid=forbid, **given))
        yield log
    if kernel is not None and all((each.kernel, each.kind) != (kernel, "store") for each in log.accesses):
        raise AssertionError(f"{kernel} has stored nothing: the result has to come out of this kernel, not of PyTorch")
    _check_stores(log, given)
    _check_that_a_program_loads_once(log)


@pytest.fixture(scope="session")
def watching() -> Callable[..., Any]:
    """`with watching(forbid, given, kernel): …`, for tests that call a kernel of their own."""
    return _watching


def _elements(access: Access, shape: tuple[int, ...]) -> Any:
    """The flat indices of the elements that an access touches."""
    return np.ravel_multi_index(tuple(access.indices[~access.masked].T), shape)


def _told(access: Access, shape: tuple[int, ...], number: int) -> str:
    """An access in words: kernel, program, line and element."""
    index = [int(each) for each in np.unravel_index(number, shape)]
    where, what = f"{access.kernel}, program {access.program}, line {access.line}", f"{access.tensor}{index}"
    return f"{where}, stores to {what}" if access.kind == "store" else f"{where}, loads {what}"


def _check_stores(log: Log, given: Mapping[str, Any]) -> None:
    """Raise if two programs store the same element, or if one is loaded that no kernel has stored yet.

    On a GPU, the order of two programs changes from run to run.
    """
    stored = {access.tensor for access in log.accesses if access.kind == "store"}
    owners: dict[tuple[str, str], Any] = {}
    numbers: dict[Program, int] = {}
    written = {name: np.zeros(math.prod(log.shapes[name]), dtype=bool) for name in stored}
    for access in log.accesses:
        name, shape = access.tensor, log.shapes[access.tensor]
        if name not in stored:
            continue
        touched = _elements(access, shape)
        if access.kind == "load":
            if name not in given and (early := touched[~written[name][touched]]).size:
                raise MemoryAccessError(
                    f"{_told(access, shape, early[0])}, which nothing has stored: it is uninitialised"
                )
            continue
        program = numbers.setdefault(access.program, len(numbers))
        owner = owners.setdefault((access.kernel, name), np.full(math.prod(shape), -1))
        others = (owner[touched] >= 0) & (owner[touched] != program)
        if others.any():
            other = list(numbers)[owner[touched[others][0]]]
            raise MemoryAccessError(
                f"{_told(access, shape, touched[others][0])}, which program {other} has stored: "
                "no element may be stored by two programs"
            )
        owner[touched], written[name][touched] = program, True


def _check_that_a_program_loads_once(log: Log) -> None:
    """Raise if a program loads a number of a cache, of dense keys or values, or of a weight, more than once."""
    loaded: dict[tuple[str, Program, str], list[Access]] = {}
    for access in log.accesses:
        if access.kind == "load" and access.tensor in ("cache", "k_cache", "v_cache", "k", "v", "numbers"):
            loaded.setdefault((access.kernel, access.program, access.tensor), []).append(access)
    for accesses in loaded.values():
        shape = log.shapes[accesses[0].tensor]
        found, counts = np.unique(np.concatenate([_elements(each, shape) for each in accesses]), return_counts=True)
        if (more := found[counts > 1]).size:
            raise MemoryAccessError(f"{_told(accesses[-1], shape, more[0])} twice: once is enough")


def _check_that_all_is_stored(log: Log, given: Mapping[str, Any], got: Any, kernel: str | None) -> None:
    """Raise if `kernel` leaves a part of the output unwritten, because the output is uninitialised."""
    if got is None or kernel is None:
        return
    outputs = {each.tensor for each in log.accesses if (each.kernel, each.kind) == (kernel, "store")}
    if all(log.shapes[name] != tuple(got.shape) for name in outputs):
        raise AssertionError(f"{kernel} stores no tensor {list(got.shape)}, the output's shape")
    for name, shape in log.shapes.items():
        stores = [each for each in log.accesses if (each.tensor, each.kind) == (name, "store")]
        if name in given or not stores or shape != tuple(got.shape):
            continue
        missing = np.ones(math.prod(shape), dtype=bool)
        for access in stores:
            missing[_elements(access, shape)] = False
        if missing.any():
            index = [int(each) for each in np.unravel_index(np.argmax(missing), shape)]
            raise MemoryAccessError(f"no program stores {name}{index}: it stays uninitialised")


def _check_that_caches_are_read_in_place(log: Log, given: Mapping[str, Any], kernel: str | None) -> None:
    """Raise if the launcher has given its kernels copies of the caches."""
    for name in ("cache", "k_cache", "v_cache"):
        if kernel is not None and name in given and name not in log.in_place:
            raise MemoryAccessError(
                f"{name} is copied before the launch, by contiguous() or to(): a cache is gigabytes, so a kernel reads "
                "it where it is, with its strides and in its dtype"
            )


def _check_that_groups_share_their_loads(log: Log, **given: Any) -> None:
    """Raise if decode attention loads more numbers than each sequence's keys and values have."""
    lengths = given["context_lens"].clamp(max=given.get("sliding_window") or 2**31 - 1)
    enough = int(lengths.sum()) * math.prod(given["k_cache"].shape[2:])
    for name in ("k_cache", "v_cache"):
        count = sum(int((~each.masked).sum()) for each in log.accesses if each.tensor == name)
        if count > enough:
            raise MemoryAccessError(
                f"{count:,} numbers of {name} are loaded where {enough:,} are enough: "
                "a key or a value is loaded once for all query heads of its group"
            )


def _check_that_splits_are_even(log: Log, tile: int, num_splits: int, **given: Any) -> None:
    """Raise if a split does not load its share of its sequence's visible tokens, in whole tiles."""
    visible = given["context_lens"].clamp(max=given.get("sliding_window") or 2**31 - 1).tolist()
    for program, rows in log.rows("k_cache", "load").items():
        _, seq, split = program
        size = math.ceil(math.ceil(visible[seq] / tile) / num_splits) * tile
        share = min(max(visible[seq] - split * size, 0), size)
        if len(rows) != share:
            raise MemoryAccessError(
                f"split_kernel, program {program}, loads {len(rows)} slots of k_cache, and not {share}: {visible[seq]} "
                f"visible tokens in {num_splits} splits of whole tiles of {tile} are {size} per split"
            )


def _check_that_tiles_load_what_they_see(log: Log, **given: Any) -> None:
    """Raise if a program of prefill loads a key or value that none of the queries it has loaded may see."""
    tables, size = given["block_tables"].tolist(), given["k_cache"].shape[1]
    lengths, starts = given["context_lens"].tolist(), given["query_start_loc"].tolist()
    window = given.get("sliding_window") or max(lengths, default=0)
    seq_of = [i for i, (start, end) in enumerate(itertools.pairwise(starts)) for _ in range(start, end)]
    for program, queries in log.rows("q", "load").items():
        visible = set()
        for (token,) in queries:
            i = seq_of[token]
            position = lengths[i] - starts[i + 1] + token
            seen = range(max(0, position - window + 1), position + 1)
            visible.update((tables[i][place // size], place % size) for place in seen)
        for name in ("k_cache", "v_cache"):
            if more := [row for row in log.rows(name, "load").get(program, []) if row not in visible]:
                if not queries:
                    raise MemoryAccessError(
                        f"prefill_kernel, program {program}, loads {name}{list(more[0])} and no query: its tile begins "
                        "past its sequence's last query, so it has to return"
                    )
                first, last = queries[0][0], queries[-1][0]
                raise MemoryAccessError(
                    f"prefill_kernel, program {program}, loads {name}{list(more[0])}, which none of its queries sees "
                    f"(they are rows {first} … {last} of q), and {len(more) - 1} more such slots"
                )


def _forbidden(**given: Any) -> dict[str, Forbidden]:
    """The elements that a call with these arguments must not access."""
    if "slot_mapping" in given:
        where = torch.ones(given["k_cache"].shape[:2], dtype=torch.bool)
        where.view(-1)[given["slot_mapping"][given["slot_mapping"] >= 0].long()] = False
        row = Forbidden(where, "a slot that is not in the slot mapping")
        padding = Forbidden(given["slot_mapping"] < 0, "a row whose slot is negative")
        return {"k_cache": row, "v_cache": row, "k": padding, "v": padding} | dict.fromkeys(_token_scales(given), row)
    if "num_tokens" in given:
        table, length = given["block_table"][None], torch.tensor([given["num_tokens"]])
        tail = unused_entries(table, length, given["cache"].shape[1])
        return {
            "cache": unused_rows(given["cache"], table, length),
            "block_table": Forbidden(tail.where[0], tail.because),
        }
    tables, lengths, cache = given["block_tables"], given["context_lens"], given["k_cache"]
    rows = unused_rows(cache, tables, lengths)
    if window := given.get("sliding_window"):
        num_new = given["query_start_loc"].diff() if "query_start_loc" in given else torch.ones_like(lengths)
        rows = _rows_in_no_window(cache, tables, lengths, lengths - num_new - window + 1)
    entries = unused_entries(tables, lengths, cache.shape[1])
    return {"k_cache": rows, "v_cache": rows, "block_tables": entries} | dict.fromkeys(_token_scales(given), rows)


def _token_scales(given: dict[str, Any]) -> list[str]:
    """The names of a call's per-token scales."""
    return [name for name in ("k_scale", "v_scale") if getattr(given.get(name), "ndim", 0) == 3]


def _rows_in_no_window(cache: Tensor, tables: Tensor, lengths: Tensor, firsts: Tensor) -> Forbidden:
    """The slots that no sequence uses, and those before the first position that a query of their sequence sees."""
    where = torch.ones(cache.shape[:2], dtype=torch.bool)
    for table, length, first in zip(tables.tolist(), lengths.tolist(), firsts.tolist(), strict=True):
        for position in range(max(first, 0), length):
            where[table[position // cache.shape[1]], position % cache.shape[1]] = False
    return Forbidden(where, "a slot that no sequence uses, or one before its sequence's window")


@dataclass
class Batch:
    """Sequences in a paged cache, and the same keys and values as dense tensors.

    Attributes:
        lengths: the tokens of each.
        keys: of each sequence, `[length, H_kv, d]`, as stored.
        values: the same.
        k_cache: `[num_blocks, block_size, H_kv, d]`; NaN (127 in int8) in slots that no sequence uses, as in block 0.
        v_cache: the same.
        block_tables: `[B, max_blocks]`, two entries more than the longest needs; the tails are invalid block ids.
        context_lens: `[B]`.
        token_scales: of a quantized cache, k_scale and v_scale `[num_blocks, block_size, H_kv]`, NaN in unused slots;
            `keys` and `values` are then the dequantized numbers.
    """

    lengths: list[int]
    keys: list[Tensor]
    values: list[Tensor]
    k_cache: Tensor
    v_cache: Tensor
    block_tables: Tensor
    context_lens: Tensor
    extra: dict[str, Any] = field(default_factory=dict)
    token_scales: dict[str, Tensor] = field(default_factory=dict)

    @property
    def paged(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The arguments of the attention functions after q."""
        return self.k_cache, self.v_cache, self.block_tables, self.context_lens

    def moved(self, seed: int) -> Batch:
        """The same keys and values in other blocks."""
        return _lay_out(self.keys, self.values, **(self.extra | {"seed": seed}))

    def strided(self) -> Batch:
        """The same keys and values in caches with the strides of `with_strides`."""
        k_cache, v_cache = with_strides(self.k_cache, self.v_cache)
        return replace(self, k_cache=k_cache, v_cache=v_cache)


def with_strides(k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Copies with unrelated strides: no stride follows from another one, or from the other cache's.

    Every second block and number of a wider tensor of NaN holds the keys; the values' heads are outermost, blocks
    innermost.
    """
    num_blocks, *row = k_cache.shape
    wide = torch.full((num_blocks, 2, *row, 2), float("nan"), dtype=k_cache.dtype, device=k_cache.device)
    wide[:, 0, ..., 0] = k_cache
    return wide[:, 0, ..., 0], v_cache.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1)


def every_other(values: Tensor) -> Tensor:
    """The same numbers, in every second place of a wider tensor: `values` no longer lie next to each other."""
    wide = torch.full((*values.shape, 2), NO_BLOCK, device=values.device).to(values.dtype)
    wide[..., 0] = values
    return wide[..., 0]


@pytest.fixture(scope="session")
def apart() -> Callable[[Tensor], Tensor]:
    """`every_other`, for tests."""
    return every_other


@pytest.fixture(scope="session")
def far_apart(device) -> Callable[..., Tensor]:
    """`far_apart(tensor, dim)`: a copy with a stride of about 2³⁰ along `dim`: the third element is past 2³¹.

    Only the memory pages that hold its numbers are allocated. A system without overcommit may refuse it, and so may a
    GPU: the strides then stay as they were, and 32-bit overflow is not graded.
    """

    def make(tensor: Tensor, dim: int) -> Tensor:
        strides = list(tensor.stride())
        strides[dim] = 2**30 + 2**10
        reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
        try:
            memory = torch.empty(reach, dtype=tensor.dtype, device=device)
        except RuntimeError:
            return tensor.clone()
        return memory.as_strided(tensor.shape, strides).copy_(tensor)

    return make


@pytest.fixture(scope="session")
def strided() -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """`with_strides`, for tests that have no `Batch`."""
    return with_strides


@pytest.fixture(scope="session")
def batch(device) -> Callable[..., Batch]:
    """`batch([5, 40], H_kv, d, block_size)`: a `Batch` of random rows.

    With `shared=n`, the first n blocks of all sequences are the same. `at=` makes values of that size instead of 1.
    """

    def make(
        lengths: Sequence[int],
        num_kv_heads: int = 2,
        head_dim: int = 32,
        block_size: int = 16,
        *,
        dtype: torch.dtype = torch.float32,
        index: torch.dtype = torch.int32,
        shared: int = 0,
        at: float = 1.0,
        seed: int = 0,
    ) -> Batch:
        # With that of the queries, they would be the first keys.
        random = torch.Generator().manual_seed(fresh(1000 + seed))

        def rows(length: int) -> Tensor:
            drawn = torch.randn(length, num_kv_heads, head_dim, generator=random) * at
            return (drawn * 40).clamp(-127, 127).round().to(dtype) if dtype == torch.int8 else drawn.to(dtype)

        keys, values = [[rows(length) for length in lengths] for _ in range(2)]
        for dense in (keys, values):
            for each in dense[1:]:
                each[: shared * block_size] = dense[0][: shared * block_size]
        return _lay_out(keys, values, device=device, block_size=block_size, index=index, shared=shared, seed=seed)

    return make


@pytest.fixture(scope="session")
def quantized(batch) -> Callable[..., Batch]:
    """`quantized([5, 40], H_kv, d, block_size, dtype=torch.int8)`: an 8-bit `Batch` with a scale per token.

    Rows differ in size by a factor of up to a hundred, so each needs its own scale.
    """

    def make(*sizes: Any, dtype: torch.dtype = torch.int8, **options: Any) -> Batch:
        some = batch(*sizes, **options)
        numbers, scales = [], []
        for rows in (*some.keys, *some.values):
            rows *= 10 ** torch.empty(*rows.shape[:2], 1).uniform_(-1.5, 0.5)
            found = by_row(rows, dtype)
            numbers.append(found[0])
            scales.append(found[1][..., None])
            rows.copy_(numbers[-1].float() * scales[-1])
        half = len(some.keys)
        shared = {name: some.extra[name] for name in ("device", "block_size", "index", "shared", "seed")}
        laid = _lay_out(numbers[:half], numbers[half:], **shared)
        of_tokens = _lay_out(scales[:half], scales[half:], **shared)
        token_scales = {"k_scale": of_tokens.k_cache[..., 0], "v_scale": of_tokens.v_cache[..., 0]}
        return replace(laid, keys=some.keys, values=some.values, token_scales=token_scales)

    return make


def by_row(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Numbers `[…, d]` and scales `[…]` of rows `[…, d]`, in PyTorch."""
    largest = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}[dtype]
    scales = rows.abs().amax(-1) / largest
    numbers = (rows / scales.where(scales > 0, 1.0)[..., None]).clamp(-largest, largest)
    return (numbers.round() if dtype == torch.int8 else numbers).to(dtype), scales


def _lay_out(
    keys: list[Tensor],
    values: list[Tensor],
    *,
    device: torch.device,
    block_size: int,
    index: torch.dtype,
    shared: int,
    seed: int,
) -> Batch:
    """Put rows into blocks in random order, leaving block 0 and the last unused."""
    lengths = [len(rows) for rows in keys]
    counts = [-(-length // block_size) for length in lengths]
    num_blocks = sum(counts) + 2
    ids = (torch.randperm(num_blocks - 2, generator=torch.Generator().manual_seed(fresh(seed))) + 1).tolist()
    tables = torch.full((len(lengths), max(counts) + 2), NO_BLOCK)
    caches = []
    for dense in (keys, values):
        poison = 127 if dense[0].dtype == torch.int8 else float("nan")
        # A block of poison before the cache and after it, too: what a stray pointer finds there is no number.
        shape = (num_blocks + 2, block_size, *dense[0].shape[1:])
        cache = torch.full(shape, poison, dtype=dense[0].dtype, device=device)[1:-1]
        unused = iter(ids)
        for i, (rows, count) in enumerate(zip(dense, counts, strict=True)):
            own = shared if i else 0
            table = [*tables[0, :own].tolist(), *itertools.islice(unused, count - own)]
            tables[i, :count] = torch.tensor(table, dtype=torch.int64)
            for start, block in zip(range(0, len(rows), block_size), table, strict=True):
                piece = rows[start : start + block_size]
                cache[block, : len(piece)] = piece.to(device)
        caches.append(cache)
    extra = {"device": device, "block_size": block_size, "index": index, "shared": shared, "seed": seed}
    context_lens = torch.tensor(lengths, dtype=index, device=device)
    return Batch(lengths, keys, values, *caches, tables.to(index).to(device), context_lens, extra)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dtype: torch.dtype = torch.float64,
    scale: float | None = None,
    alibi_slopes: Tensor | None = None,
    k_scale: float | Tensor = 1.0,
    v_scale: float | Tensor = 1.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention of the last n tokens of a sequence, computed in `dtype`: q [n, H, d], k and v [S, H_kv, d]."""
    num_new, num_heads, head_dim = q.shape
    group = num_heads // k.shape[1]
    k, v = k.to(dtype) * _per_head(k_scale, dtype), v.to(dtype) * _per_head(v_scale, dtype)
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("nhd,shd->hns", q.to(dtype), k) * (head_dim**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    keys, queries = torch.arange(len(k)), torch.arange(len(k) - num_new, len(k))
    distance = keys[None, :] - queries[:, None]
    if alibi_slopes is not None:
        scores = scores + alibi_slopes.cpu().to(dtype)[:, None, None] * distance
    visible = distance <= 0
    if sliding_window is not None:
        visible &= distance > -sliding_window
    scores = scores.masked_fill(~visible, float("-inf"))
    return torch.einsum("hns,shd->nhd", scores.softmax(dim=-1), v)


def _per_head(scale: float | Tensor, dtype: torch.dtype) -> Tensor:
    """One scale, or one per head, to multiply rows `[S, H_kv, d]` with."""
    return torch.as_tensor(scale).cpu().to(dtype).reshape(-1, 1)


def _check(
    what: str,
    got: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: dict[str, Any],
    tolerance: float | None = None,
) -> None:
    """`got` is attention to `tolerance`, or to 3 times the error that PyTorch makes in the same dtype, + 1e-5."""
    __tracebackhide__ = True
    q = q.cpu()
    expected = attend(q, k, v, **options)
    error = (attend(q, k, v, dtype=q.dtype, **options).double() - expected).abs().max().item()
    # Compared in fp32: rounding the expected output to half precision would add an error.
    dtype = str(got.dtype).removeprefix("torch.")
    what = what if got.dtype == torch.float32 else f"{what}, in {dtype} and shown in float32"
    that(what, got.cpu().float()).is_close(
        expected.float(), rtol=0, atol=3 * error + 1e-5 if tolerance is None else tolerance
    )


@pytest.fixture(scope="session")
def decode(watched, device) -> Callable[..., Tensor]:
    """`decode(batch, H, **options)`: run and check `paged_decode_attention` with random queries; the output.

    `tolerance=` is the allowed error, if not that of PyTorch in the same dtype.
    """

    def run(
        batch: Batch,
        num_heads: int,
        *,
        q: Tensor | None = None,
        num_splits: int = 1,
        tolerance: float | None = None,
        **options: Any,
    ) -> Tensor:
        __tracebackhide__ = True
        dtype = torch.float32 if batch.k_cache.itemsize == 1 else batch.k_cache.dtype
        if q is None:
            q = torch.randn(len(batch.lengths), num_heads, batch.k_cache.shape[3]).to(dtype).to(device)
        attention = watched(paged_decode_attention)
        got = call(attention, q, *batch.paged, num_splits=num_splits, **batch.token_scales, **options).value
        with_options = "".join(f", {name}={short(value)}" for name, value in options.items())
        that("the output's shape and dtype", (list(got.shape), got.dtype)).gives((list(q.shape), q.dtype))
        for i, length in enumerate(batch.lengths):
            what = f"the output of sequence {i}, {length} tokens{with_options}"
            if length == 0:
                that(what, got[i].cpu()).gives(torch.zeros_like(got[i].cpu()))
            else:
                _check(what, got[i][None], q[i][None], batch.keys[i], batch.values[i], options, tolerance)
        return got

    return run


@pytest.fixture(scope="session")
def store_rows(device) -> Callable[..., None]:
    """The launcher of task 1, or of task 9 with scales, without the checks of `minicache.kernels.store_kv`; traced."""

    def store_kv(
        k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, **scales: Tensor
    ) -> None:
        from minicache.kernels import quantized_store, store  # imported only when Triton is known to run here

        launch = quantized_store.store_kv if scales else store.store_kv
        given = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, "slot_mapping": slot_mapping, **scales}
        if device.type == "cuda":
            return launch(**given)
        with trace(**given):
            return launch(**given)

    return store_kv


@pytest.fixture(scope="session")
def last_of_thousands(batch, device) -> Callable[..., None]:
    """`last_of_thousands(num_sequences=…, …)`: split-KV of a large batch, of which the last sequence is computed.

    Its buffers take nine gigabytes of address space, and physical memory only where they are touched. If the system
    refuses them, and on a GPU, where they would be allocated in full, nothing is graded.
    """

    def run(num_sequences: int, num_heads: int, num_splits: int, head_dim: int) -> None:
        __tracebackhide__ = True
        if device.type == "cuda":
            return
        try:
            torch.empty(num_sequences, num_heads, num_splits, head_dim)
        except RuntimeError:
            return
        some = batch([20], 1, head_dim, 16)
        q = torch.randn(1, num_heads, head_dim)
        given = [each.expand(num_sequences, *each.shape[1:]) for each in (q, some.block_tables, some.context_lens)]

        def paged_decode_attention(q: Tensor, block_tables: Tensor, context_lens: Tensor) -> Tensor:
            from minicache.kernels.split_kv import paged_decode_attention as launch

            last = num_sequences - 1
            programs = [*((0, last, split) for split in range(num_splits)), (num_heads - 1, last, 0)]
            with trace(only=programs):
                options = {"scale": head_dim**-0.5, "num_splits": num_splits}
                return launch(q, some.k_cache, some.v_cache, block_tables, context_lens, **options)

        got = call(paged_decode_attention, *given).value[-1:, [0, -1]]
        what = f"the first and the last head of sequence {num_sequences - 1}"
        _check(what, got, q[:, [0, -1]], some.keys[0], some.values[0], {})

    return run


@pytest.fixture(scope="session")
def reads_no_values(device) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`reads_no_values(launcher)`: the launcher, failing if it reads a tensor's values."""

    def wrap(launcher: Callable[..., Any]) -> Callable[..., Any]:
        """Traced, if the interpreter runs it: a bad access is then an error, and does not end the process."""

        def refuse(self: Tensor, *_: Any) -> Any:
            raise AssertionError("the launcher reads a tensor's values: on a GPU it waits for them")

        @functools.wraps(launcher)
        def run(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as stack:
                for name in ("item", "tolist", "numpy", "__int__", "__index__", "__float__", "__bool__"):
                    stack.enter_context(patch.object(Tensor, name, refuse))
                if device.type == "cpu":
                    stack.enter_context(trace())
                return launcher(*args, **kwargs)

        return run

    return wrap


@pytest.fixture(scope="session")
def launches_nothing(device) -> Callable[..., None]:
    """`launches_nothing(launcher, batch, **options)`: a decode launcher with no sequence; it gives an empty output."""

    def run(launcher: Callable[..., Tensor], some: Batch, **options: Any) -> None:
        __tracebackhide__ = True

        def traced(*args: Any, **kwargs: Any) -> Tensor:
            if device.type == "cuda":
                return launcher(*args, **kwargs)
            with trace():
                return launcher(*args, **kwargs)

        traced.__qualname__ = launcher.__qualname__
        given = some.k_cache, some.v_cache, some.block_tables[:0], some.context_lens[:0]
        q = torch.zeros(0, 2, some.k_cache.shape[3], device=device)
        call(traced, q, *given, scale=1.0, **options).gives(q)

    return run


@contextmanager
def _storing_fp32() -> Iterator[None]:
    """Refuse a store that converts from half precision: `attend_range` returns fp32 for any q."""
    from triton.language.semantic import TritonSemantic

    store = TritonSemantic.store

    def refuse(self: Any, pointer: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if value.type.scalar.is_floating() and not value.type.scalar.is_fp32():
            raise AssertionError(
                f"attend_range returns a result in {value.type.scalar}, not fp32: initialise row_max, row_sum and acc "
                "in fp32, the dtype that the loop gives them, or a GPU's compiler refuses the loop"
            )
        return store(self, pointer, value, *args, **kwargs)

    with patch.object(TritonSemantic, "store", refuse):
        yield


@pytest.fixture(scope="session")
def attends_over(device) -> Callable[..., None]:
    """`attends_over(one, start, end, positions)`: run `attend_range` for queries at those positions; check its results.

    `one` is a `Batch` of a single sequence and KV head. Nothing outside the range may be loaded: no keys, no values, no
    block table entries.
    """

    def run(
        one: Batch,
        start: int,
        end: int,
        positions: Sequence[int],
        *,
        q: Tensor | None = None,
        tolerance: float = 1e-4,
        **options: Any,
    ) -> None:
        __tracebackhide__ = True
        from minicache_course.kernels.one_head import attend_one_head  # imported only when Triton is known to run here

        if q is None:
            q = torch.randn(len(positions), one.k_cache.shape[3]).to(device)

        def attend_range(q: Tensor, query_positions: Tensor, start: int, end: int, **options: Any) -> Any:
            table = one.block_tables[0]
            rows = one.k_cache[:, :, 0], one.v_cache[:, :, 0]
            given = q, query_positions.to(device), *rows, table, start, end
            if device.type == "cuda":
                return attend_one_head(*given, **options)
            outside = _rows_in_no_window(one.k_cache, table[None], torch.tensor([end]), torch.tensor([start]))
            row = Forbidden(outside.where, f"a token outside start … end − 1 = {start} … {end - 1}")
            size, entries = one.k_cache.shape[1], torch.arange(len(table))
            unneeded = (entries < start // size) | (entries * size >= max(start, end))
            entry = Forbidden(unneeded, f"an entry for no token of {start} … {end - 1}")
            named = {"k_cache": one.k_cache, "v_cache": one.v_cache, "block_table": table}
            with _storing_fp32(), _watching({"k_cache": row, "v_cache": row, "block_table": entry}, named):
                return attend_one_head(*given, **options)

        got = call(attend_range, q, torch.tensor(positions, dtype=torch.int32), start=start, end=end, **options).value
        keys, values = one.keys[0][start:end, 0].double(), one.values[0][start:end, 0].double()
        distance = torch.arange(start, max(start, end)) - torch.tensor(positions)[:, None]
        hidden = (distance > 0) | (distance <= -(options.get("sliding_window") or len(one.keys[0]) + 1))
        scores = q.cpu().double() @ keys.T * keys.shape[1] ** -0.5
        if (cap := options.get("softcap")) is not None:
            scores = cap * torch.tanh(scores / cap)
        if (slopes := options.get("slopes")) is not None:
            scores = scores + slopes.cpu().double()[:, None] * distance
        scores = scores.masked_fill(hidden, float("-inf"))
        row_max = scores.amax(1) if scores.numel() else torch.full((len(positions),), float("-inf")).double()
        weights = (scores - row_max.nan_to_num(neginf=0.0)[:, None]).exp()
        size = one.k_cache.shape[1]
        blocks = one.block_tables[0, : -(-len(one.keys[0]) // size)].tolist()
        given = "".join(f", {name}={short(value)}" for name, value in options.items())
        where = (
            f"attend_range, tokens {start} … {end - 1} of blocks {short(blocks)} of {size}, "
            f"{len(positions)} queries at positions {positions[0]} … {positions[-1]}{given}"
        )
        for name, mine, right in zip(
            ("row_max", "row_sum", "acc"), got, (row_max, weights.sum(1), weights @ values), strict=True
        ):
            that(f"{name} of {where}", mine.cpu()).is_close(right.float(), rtol=tolerance, atol=tolerance)

    return run


@pytest.fixture(scope="session")
def prefill(watched, device) -> Callable[..., Tensor]:
    """`prefill(batch, [3, 1], H, **options)`: run and check `paged_prefill_attention` of the last 3 and 1 tokens.

    `spread=` gives query_start_loc another layout.
    """

    def run(
        batch: Batch,
        num_new: Sequence[int],
        num_heads: int,
        *,
        q: Tensor | None = None,
        spread: Callable[[Tensor], Tensor] = torch.Tensor.contiguous,
        **options: Any,
    ) -> Tensor:
        __tracebackhide__ = True
        dtype = torch.float32 if batch.k_cache.itemsize == 1 else batch.k_cache.dtype
        if q is None:
            q = torch.randn(sum(num_new), num_heads, batch.k_cache.shape[3]).to(dtype).to(device)
        starts = [0, *itertools.accumulate(num_new)]
        query_start_loc = spread(torch.tensor(starts, dtype=batch.context_lens.dtype, device=device))
        attention = watched(paged_prefill_attention)
        got = call(attention, q, *batch.paged, query_start_loc, **batch.token_scales, **options).value
        that("the output's shape and dtype", (list(got.shape), got.dtype)).gives((list(q.shape), q.dtype))
        for i, (count, start) in enumerate(zip(num_new, starts, strict=False)):
            if count:
                mine = slice(start, start + count)
                what = f"the output of sequence {i}, the last {count} of {batch.lengths[i]} tokens"
                _check(what, got[mine], q[mine], batch.keys[i], batch.values[i], options)
        return got

    return run
