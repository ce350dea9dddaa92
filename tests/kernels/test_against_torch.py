"""All kernels on drawn shapes, layouts and options, against PyTorch's own attention in float64 over dense rows.

Unused rows hold NaN, the tails of block tables hold no one's blocks, and under the interpreter the tracer forbids both.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from minicache.kernels import gather_kv, paged_decode_attention, paged_prefill_attention, runtime, store_kv
from minicache.kernels.quantize import dequantize_rows, quantize_rows
from minicache_course.kernels.tracer import Log, trace, unused_entries, unused_rows

NOBODY = 2**31 - 1
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass
class Case:
    """One call: sizes, what lies where, and options."""

    lengths: list[int]
    num_new: list[int]
    num_kv_heads: int
    group: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    index: torch.dtype
    seed: int
    options: dict[str, Any] = field(default_factory=dict)

    def rows(self, *shape: int) -> Tensor:
        """Random numbers in this case's dtype."""
        return torch.randn(shape, generator=self.random).to(self.dtype)

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(self.seed)
        self.keys, self.values = (
            [self.rows(length, self.num_kv_heads, self.head_dim) for length in self.lengths] for _ in range(2)
        )

    def stored(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Caches filled by `store_kv`, tables and lengths."""
        counts = [-(-length // self.block_size) for length in self.lengths]
        ids = torch.randperm(sum(counts) + 1, generator=self.random)[: sum(counts)] + 1  # block 0 is no one's
        tables = torch.full((len(counts), max(counts) + 1), NOBODY)
        slots = []
        for i, (own, length) in enumerate(zip(ids.split(counts), self.lengths, strict=True)):
            tables[i, : len(own)] = own
            slots.append((own[:, None] * self.block_size + torch.arange(self.block_size)).flatten()[:length])
        shape = (sum(counts) + 2, self.block_size, self.num_kv_heads, self.head_dim)
        k_cache, v_cache = (torch.full(shape, float("nan"), dtype=self.dtype, device=device) for _ in range(2))
        k, v, slot_mapping = torch.cat(self.keys), torch.cat(self.values), torch.cat(slots).to(self.index)
        order = torch.randperm(len(k), generator=self.random)
        store_kv(*(each[order].to(device) for each in (k, v)), k_cache, v_cache, slot_mapping[order].to(device))
        lengths = torch.tensor(self.lengths)
        return k_cache, v_cache, tables.to(self.index).to(device), lengths.to(self.index).to(device)

    def expected(self, q: Tensor, i: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """Attention of sequence i's last tokens q `[n, H, d]`, by PyTorch in `dtype`; a soft cap by hand."""
        k, v = (
            each.to(dtype).repeat_interleave(self.group, 1).transpose(0, 1) for each in (self.keys[i], self.values[i])
        )
        distance = torch.arange(len(self.keys[i]))[None] - torch.arange(len(self.keys[i]))[-len(q) :, None]
        bias = torch.zeros(len(q), len(self.keys[i]), dtype=dtype)
        bias = bias.masked_fill((distance > 0) | (distance <= -self.options.get("sliding_window", 2**30)), -torch.inf)
        if (slopes := self.options.get("alibi_slopes")) is not None:
            bias = bias + slopes.cpu().to(dtype)[:, None, None] * distance
        rows = q.to(dtype).transpose(0, 1)
        scale = self.options.get("scale", self.head_dim**-0.5)
        cap = self.options.get("softcap")
        if cap is None:
            return F.scaled_dot_product_attention(
                rows, k, v, attn_mask=bias.expand(len(k), -1, -1), scale=scale
            ).transpose(0, 1)
        scores = cap * torch.tanh(rows @ k.transpose(1, 2) * scale / cap) + bias
        return (scores.softmax(-1) @ v).transpose(0, 1)

    def check(self, got: Tensor, q: Tensor) -> None:
        """Every sequence's rows of `got`: error at most 3 times that of PyTorch in the same dtype, + 1e-5."""
        assert got.dtype == self.dtype
        assert got.shape == q.shape
        for i, (mine, rows) in enumerate(zip(got.cpu().split(self.num_new), q.cpu().split(self.num_new), strict=True)):
            if not len(rows):
                continue
            right = self.expected(rows, i)
            allowed = 3 * (self.expected(rows, i, self.dtype).double() - right).abs().max() + 1e-5
            torch.testing.assert_close(mine.double(), right, rtol=0, atol=float(allowed), msg=f"sequence {i} is off")


def watching(k_cache: Tensor, v_cache: Tensor, tables: Tensor, lengths: Tensor) -> AbstractContextManager[Log | None]:
    """The tracer, where there is an interpreter to trace."""
    if not runtime.interpreting():
        return nullcontext()
    rows, tail = unused_rows(k_cache, tables, lengths), unused_entries(tables, lengths, k_cache.shape[1])
    forbid = {"k_cache": rows, "v_cache": rows, "tables": tail}
    return trace(k_cache=k_cache, v_cache=v_cache, tables=tables, forbid=forbid)


@st.composite
def cases(draw: st.DrawFn, *, prefill: bool = False) -> Case:
    """Ragged batches of up to three sequences, each of the grid's sizes as likely as the others."""
    block_size = draw(st.sampled_from([8, 16, 32, 5]))
    around = [1, block_size - 1, block_size, block_size + 1, 2 * block_size]
    lengths = draw(st.lists(st.sampled_from(around) | st.integers(1, 75), min_size=1, max_size=3))
    num_new = [draw(st.integers(0, min(length, 20))) for length in lengths] if prefill else [1] * len(lengths)
    num_kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (2, 3), (1, 5), (1, 7), (2, 8), (3, 2)]))
    options: dict[str, Any] = {}
    if draw(st.booleans()):
        options["sliding_window"] = draw(st.integers(1, 40))
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([0.5, 5.0, 50.0]))
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([0.05, 0.5]))
    if draw(st.booleans()):
        options["alibi_slopes"] = 0.5 ** torch.arange(1.0, num_kv_heads * group + 1)
    return Case(
        lengths,
        num_new,
        num_kv_heads,
        group,
        draw(st.sampled_from([64, 80, 128, 256, 20])),
        block_size,
        draw(st.sampled_from(DTYPES)),
        draw(st.sampled_from([torch.int32, torch.int64])),
        draw(st.integers(0, 99)),
        options,
    )


def placed(options: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Options with their tensors on the device."""
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}


few = settings(max_examples=12)


@few
@given(case=cases())
def test_what_is_stored_is_gathered(device: torch.device, case: Case) -> None:
    k_cache, v_cache, tables, lengths = case.stored(device)
    with watching(k_cache, v_cache, tables, lengths):
        for i, length in enumerate(case.lengths):
            assert torch.equal(gather_kv(k_cache, tables[i], length, backend="triton").cpu(), case.keys[i])
            assert torch.equal(gather_kv(v_cache, tables[i], length, backend="triton").cpu(), case.values[i])


@few
@given(case=cases())
def test_storing_writes_what_pytorch_writes(device: torch.device, case: Case) -> None:
    rows = sum(case.lengths)
    slots = torch.randperm(rows + 5, generator=case.random)[:rows].to(case.index) - 2
    slots[slots < 0] = -1
    k, v = torch.cat(case.keys).to(device), torch.cat(case.values).to(device)
    shape = (rows // case.block_size + 2, case.block_size, case.num_kv_heads, case.head_dim)
    written = {}
    for backend in ("torch", "triton"):
        caches = [torch.zeros(shape, dtype=case.dtype, device=device) for _ in range(2)]
        store_kv(k, v, *caches, slots.to(device), backend=backend)
        written[backend] = torch.stack(caches)
    assert torch.equal(written["torch"], written["triton"])


@few
@given(case=cases(), num_splits=st.sampled_from([None, 1, 2, 5]))
def test_decode(device: torch.device, case: Case, num_splits: int | None) -> None:
    paged = case.stored(device)
    q = case.rows(len(case.lengths), case.num_kv_heads * case.group, case.head_dim).to(device)
    options = placed(case.options, device)
    with watching(*paged):
        got = paged_decode_attention(q, *paged, **options, num_splits=num_splits, backend="triton")
    case.check(got, q)


@few
@given(case=cases(prefill=True))
def test_prefill(device: torch.device, case: Case) -> None:
    paged = case.stored(device)
    q = case.rows(sum(case.num_new), case.num_kv_heads * case.group, case.head_dim).to(device)
    starts = torch.tensor([0, *case.num_new]).cumsum(0).to(case.index).to(device)
    with watching(*paged):
        got = paged_prefill_attention(q, *paged, starts, **placed(case.options, device), backend="triton")
    case.check(got, q)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_prefill_of_one_token_each_is_a_decode(device: torch.device, num_splits: int) -> None:
    case = Case([40, 7, 16], [1, 1, 1], 2, 2, 64, 8, torch.float32, torch.int32, 0)
    paged = case.stored(device)
    q = case.rows(3, 4, 64).to(device)
    one = paged_decode_attention(q, *paged, num_splits=num_splits, backend="triton")
    other = paged_prefill_attention(q, *paged, torch.arange(4, device=device), backend="triton")
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("quantized", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_quantized_cache_reads_as_its_numbers_times_its_scales(device: torch.device, quantized: torch.dtype) -> None:
    case = Case([21, 8], [1, 1], 2, 2, 64, 8, torch.float32, torch.int32, 0)
    k_cache, v_cache, tables, lengths = case.stored(device)
    scales = [torch.tensor([0.05, 0.1], device=device), torch.tensor([0.2, 0.025], device=device)]
    caches = []
    for cache, dense, scale in ((k_cache, case.keys, scales[0]), (v_cache, case.values, scales[1])):
        numbers = (torch.nan_to_num(cache) / scale[:, None]).clamp(-127, 127)
        caches.append((numbers.round() if quantized == torch.int8 else numbers).to(quantized))
        for i, length in enumerate(case.lengths):
            restored = gather_kv(caches[-1].float() * scale[:, None], tables[i], length, backend="torch")
            dense[i] = restored.cpu()
    q = case.rows(2, 4, 64).to(device)
    with watching(*caches, tables, lengths):
        got = paged_decode_attention(
            q, *caches, tables, lengths, k_scale=scales[0], v_scale=scales[1], num_splits=1, backend="triton"
        )
    case.check(got, q)


each_byte = pytest.mark.parametrize("quantized", [torch.int8, torch.float8_e4m3fn], ids=str)


@each_byte
@settings(max_examples=5)
@given(case=cases())
def test_quantizing_writes_what_pytorch_writes(device: torch.device, quantized: torch.dtype, case: Case) -> None:
    """To the bit: rows of any size, of zeros, with NaN and infinities in them."""
    k, v = torch.cat(case.keys)[:12], torch.cat(case.values)[:12]
    rows = len(k)
    slots = torch.randperm(rows + 5, generator=case.random)[:rows].to(case.index) - 2
    slots[slots < 0] = -1
    smallest = -145 if case.dtype == torch.float32 else -110  # the interpreter reads bf16's subnormal numbers wrongly
    sizes = 2.0 ** torch.randint(smallest, 120, (rows, case.num_kv_heads, 1), generator=case.random)
    k, v = (k * sizes).to(case.dtype), (v * sizes.flip(0)).to(case.dtype)
    k[0, 0], v[0, -1, -1], k[-1, -1, 0] = 0.0, torch.nan, -torch.inf
    shape = (rows // case.block_size + 2, case.block_size, case.num_kv_heads, case.head_dim)
    written = {}
    for backend in ("torch", "triton"):
        caches = torch.zeros(2, *shape).to(quantized).to(device)
        scales = torch.zeros(2, *shape[:3], device=device)
        store_kv(
            *(each.to(device) for each in (k, v, *caches, slots)), k_scale=scales[0], v_scale=scales[1], backend=backend
        )
        written[backend] = caches.float(), scales
    for one, other in zip(*written.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def with_scales(case: Case, paged: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The same rows in one byte a number, a scale for each; `case` then expects attention over what they read as."""
    (k_cache, k_scale), (v_cache, v_scale) = (quantize_rows(cache, dtype) for cache in paged[:2])
    for dense in (case.keys, case.values):
        dense[:] = [dequantize_rows(*quantize_rows(rows, dtype)) for rows in dense]
    return [k_cache, v_cache, *paged[2:]], {"k_scale": k_scale, "v_scale": v_scale}


@each_byte
@settings(max_examples=5)
@given(case=cases(), num_splits=st.sampled_from([1, 2, 5]))
def test_decode_over_rows_with_scales(
    device: torch.device, quantized: torch.dtype, case: Case, num_splits: int
) -> None:
    paged, scales = with_scales(case, case.stored(device), quantized)
    q = case.rows(len(case.lengths), case.num_kv_heads * case.group, case.head_dim).to(device)
    options = placed(case.options, device) | scales
    with watching(*paged):
        got = paged_decode_attention(q, *paged, **options, num_splits=num_splits, backend="triton")
    case.check(got, q)


@each_byte
@settings(max_examples=5)
@given(case=cases(prefill=True))
def test_prefill_over_rows_with_scales(device: torch.device, quantized: torch.dtype, case: Case) -> None:
    paged, scales = with_scales(case, case.stored(device), quantized)
    q = case.rows(sum(case.num_new), case.num_kv_heads * case.group, case.head_dim).to(device)
    starts = torch.tensor([0, *case.num_new]).cumsum(0).to(case.index).to(device)
    options = placed(case.options, device) | scales
    with watching(*paged):
        got = paged_prefill_attention(q, *paged, starts, **options, backend="triton")
    case.check(got, q)
