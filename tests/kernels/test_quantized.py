"""8-bit caches with a scale per row: what a store rounds to, and attention over what it stored."""

from __future__ import annotations

import pytest
import torch
from tests.grid import grid
from torch import Tensor

from minicache import kernels
from minicache.errors import KernelUnavailableError
from minicache.kernels import cpu
from minicache.kernels.quantize import LARGEST, quantize_rows

EACH_DTYPE = pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
BACKENDS = [
    "torch",
    pytest.param("numba", marks=pytest.mark.skipif(not cpu.is_available(), reason=str(cpu.why_unavailable()))),
]
EACH_BACKEND = pytest.mark.parametrize("backend", BACKENDS)
BLOCK = 16


def codes(dtype: torch.dtype) -> Tensor:
    """All numbers of a dtype, `[256]`, code by code."""
    return torch.arange(256).to(torch.uint8).view(dtype)


def numbers(dtype: torch.dtype) -> Tensor:
    """Its finite numbers that are used, rising, in float64."""
    every = codes(dtype).double()
    return every[every.abs() <= LARGEST[dtype]].unique()


def empty_cache(num_blocks: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Arguments of the kernels, full of what must never be read."""
    k_cache, v_cache = (
        torch.full((num_blocks, BLOCK, num_kv_heads, head_dim), 0x7F, dtype=torch.uint8).view(dtype) for _ in range(2)
    )
    k_scale, v_scale = torch.full((2, num_blocks, BLOCK, num_kv_heads), torch.nan)
    return {"k_cache": k_cache, "v_cache": v_cache, "k_scale": k_scale, "v_scale": v_scale}


def stored(k: Tensor, v: Tensor, dtype: torch.dtype, backend: str, slots: Tensor | None = None) -> dict[str, Tensor]:
    """A cache of just enough blocks with these rows `[N, H_kv, d]`."""
    cache = empty_cache(-(-len(k) // BLOCK), *k.shape[1:], dtype)
    kernels.store_kv(k, v, slot_mapping=torch.arange(len(k)) if slots is None else slots, backend=backend, **cache)
    return cache


def a_batch(
    lengths: list[int], num_kv_heads: int, head_dim: int, dtype: torch.dtype, backend: str
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[tuple[Tensor, Tensor]]]:
    """Sequences in blocks that lie anywhere: cache; tables and lengths; the rows that were stored of each."""
    needed = [-(-length // BLOCK) for length in lengths]
    cache = empty_cache(sum(needed) + 1, num_kv_heads, head_dim, dtype)
    free, rows = torch.randperm(sum(needed) + 1), []
    tables = torch.full((len(lengths), max(needed) + 1), 10**6)
    for i, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        tables[i, :count], free = free[:count], free[count:]
        slots = (tables[i, :count, None] * BLOCK + torch.arange(BLOCK)).flatten()[:length]
        k, v = torch.randn(2, length, num_kv_heads, head_dim) * torch.rand(2, length, num_kv_heads, 1) * 2
        kernels.store_kv(k, v, slot_mapping=slots, backend=backend, **cache)
        rows.append((k, v))
    return cache, {"block_tables": tables, "context_lens": torch.tensor(lengths)}, rows


def attention(
    q: Tensor, rows: list[tuple[Tensor, Tensor]], counts: list[int], window: int | None = None, scale: float = 1.0
) -> Tensor:
    """Attention by its definition, in float64: each sequence's last counts[i] tokens over its rows `[S, H_kv, d]`."""
    out, row = [], 0
    for (k, v), count in zip(rows, counts, strict=True):
        k, v = (each.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        for t in range(count):
            end = len(k) - count + t + 1
            seen = slice(max(0, end - window) if window else 0, end)
            if not end:
                out.append(torch.zeros(q.shape[1:], dtype=torch.float64))
                continue
            weights = (torch.einsum("hd,shd->hs", q[row + t].double(), k[seen]) * scale).softmax(1)
            out.append(torch.einsum("hs,shd->hd", weights, v[seen]))
        row += count
    return torch.stack(out)


def as_read(rows: list[tuple[Tensor, Tensor]], dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """The rows that a cache gives back, in float64: numbers times scales."""

    def read(each: Tensor) -> Tensor:
        small, scale = quantize_rows(each, dtype)
        return small.double() * scale.double()[..., None]

    return [(read(k), read(v)) for k, v in rows]


# What is stored


@EACH_DTYPE
@EACH_BACKEND
def test_every_code_is_read_as_its_number(dtype: torch.dtype, backend: str) -> None:
    """A query that sees one token gets its values. 256 of them are every code that a byte can be, NaN included."""
    cache = empty_cache(1, 1, 256, dtype)
    cache["k_cache"][0, 0], cache["v_cache"][0, 0, 0] = torch.zeros(1, 256).to(dtype), codes(dtype)
    cache["k_scale"][0, 0], cache["v_scale"][0, 0] = 1.0, 2.0
    sequence = {"block_tables": torch.tensor([[0]]), "context_lens": torch.tensor([1])}
    got = kernels.paged_decode_attention(torch.randn(1, 1, 256), **cache, **sequence, backend=backend)
    torch.testing.assert_close(got[0, 0], 2 * codes(dtype).float(), rtol=0, atol=0, equal_nan=True)


@EACH_DTYPE
@EACH_BACKEND
def test_rows_are_rounded_to_the_nearest_number_of_two_to_the_even_one(dtype: torch.dtype, backend: str) -> None:
    """At scale 1: every number, the middle between every two, and what is a little more or less than that."""
    exact = numbers(dtype)
    middles = (exact[1:] + exact[:-1]) / 2
    values = torch.cat([exact, middles, middles * (1 + 2**-20), middles * (1 - 2**-20)])
    distance = (values[:, None] - exact).abs()
    nearest = distance == distance.min(dim=1, keepdim=True).values
    is_even = torch.tensor([int(code.view(torch.uint8)) % 2 == 0 for code in exact.to(dtype)])
    expected = exact[(nearest * (1 + is_even)).argmax(dim=1)]
    assert (nearest.sum(dim=1) == 2).sum() == len(middles)
    head_dim = 8 * (-(-len(values) // 7) // 8 + 1)
    rows = torch.zeros(7, head_dim, dtype=torch.float64)
    rows[:, 0] = LARGEST[dtype]  # makes the scale 1
    mine = rows[:, 1:].reshape(-1)
    mine[: len(values)] = values
    rows[:, 1:] = mine.view(7, -1)
    k = rows.float()[:, None]
    cache = stored(k, -k, dtype, backend)
    assert cache["k_scale"][0, :7].eq(1).all()
    for name, sign in (("k_cache", 1), ("v_cache", -1)):
        got = cache[name][0, :7, 0, 1:].double().reshape(-1)[: len(values)]
        assert (sign * got).equal(expected)


@EACH_DTYPE
def test_both_backends_store_the_same_bits(dtype: torch.dtype) -> None:
    """Also of rows so small that their scale is no normal number, and of rows without a scale."""
    pytest.importorskip("numba")
    k, v = torch.randn(2, 200, 3, 40) * 2.0 ** torch.randint(-140, 100, (2, 200, 1, 1))
    k[3], v[4, 1], k[5, 2, 7], v[6, 0, 0] = 0, -0.0, torch.nan, -torch.inf
    strided = [torch.cat([rows, rows], dim=2)[..., :40].transpose(0, 1).contiguous().transpose(0, 1) for rows in (k, v)]
    slots = torch.randperm(208)[:200]
    slots[10:13] = -1
    expected = stored(k, v, dtype, "torch", slots)
    got = stored(*strided, dtype, "numba", slots)
    for name, tensor in expected.items():
        torch.testing.assert_close(tensor.float(), got[name].float(), rtol=0, atol=0, equal_nan=True)


@EACH_DTYPE
@EACH_BACKEND
def test_what_is_stored_of_a_token_depends_on_no_other(dtype: torch.dtype, backend: str) -> None:
    """One at a time or all at once, after others or not: the same bits."""
    k, v = torch.randn(2, 32, 2, 16) * 10.0 ** torch.randint(-3, 3, (2, 32, 1, 1))
    together, apart = stored(k, v, dtype, backend), stored(k.flip(0) * 100, v.flip(0), dtype, backend)
    for token in torch.randperm(32).tolist():
        one = slice(token, token + 1)
        kernels.store_kv(k[one], v[one], slot_mapping=torch.tensor([token]), backend=backend, **apart)
    for name, tensor in together.items():
        assert tensor.view(torch.uint8).equal(apart[name].view(torch.uint8))


@EACH_DTYPE
@EACH_BACKEND
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["k", "v"])
def test_a_row_that_is_not_finite_shows_in_its_own_sequence(
    dtype: torch.dtype, backend: str, value: float, where: str
) -> None:
    rows = {name: torch.randn(64, 2, 32) for name in ("k", "v")}
    rows[where][5, 1, 3] = value
    cache = stored(rows["k"], rows["v"], dtype, backend)
    tables = {"block_tables": torch.tensor([[0, 1], [2, 3]]), "context_lens": torch.tensor([20, 32])}
    out = kernels.paged_decode_attention(torch.randn(2, 4, 32), **cache, **tables, backend=backend)
    assert out[0, 2:].isnan().all()
    assert not out[0, :2].isnan().any()  # the other key/value head's
    assert not out[1].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_rows_and_queries_of_other_dtypes(dtype: torch.dtype) -> None:
    """PyTorch takes them: rows are rounded from fp32, and results have the queries' dtype."""
    k, v = torch.randn(2, 16, 2, 8, dtype=dtype)
    cache = empty_cache(1, 2, 8, torch.int8)
    kernels.store_kv(k, v, slot_mapping=torch.arange(16), **cache)
    assert cache["k_cache"][0].equal(quantize_rows(k.float(), torch.int8)[0])
    tables = {"block_tables": torch.tensor([[0]]), "context_lens": torch.tensor([16])}
    q = torch.randn(1, 4, 8, dtype=dtype)
    out = kernels.paged_decode_attention(q, **cache, **tables)
    assert out.dtype == dtype
    expected = attention(q, as_read([(k, v)], torch.int8), [1], scale=8**-0.5)
    torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=1e-2)
    with pytest.raises(KernelUnavailableError):
        kernels.paged_decode_attention(q, **cache, **tables, backend="numba")


# What is attended to


@EACH_DTYPE
@EACH_BACKEND
@grid(
    {
        "num_heads,num_kv_heads,head_dim": [
            (8, 2, 32), (5, 1, 64), (6, 2, 80), (7, 7, 128), (3, 3, 256), (64, 8, 8), (12, 4, 40)
        ],
        "window": [None, 1, 20],
    }
)  # fmt: skip
def test_decode(
    dtype: torch.dtype, backend: str, num_heads: int, num_kv_heads: int, head_dim: int, window: int | None
) -> None:
    lengths = [0, 1, 15, 16, 17, 130]
    cache, tables, rows = a_batch(lengths, num_kv_heads, head_dim, dtype, backend)
    q = torch.randn(len(lengths), num_heads, head_dim)
    out = kernels.paged_decode_attention(q, **cache, **tables, sliding_window=window, backend=backend)
    expected = attention(q, as_read(rows, dtype), [1] * len(lengths), window, head_dim**-0.5)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=4e-6)


@EACH_DTYPE
@EACH_BACKEND
@pytest.mark.parametrize("window", [None, 9, 300])
def test_prefill(dtype: torch.dtype, backend: str, window: int | None) -> None:
    """Whole prompts short and long, chunks, decodes and a sequence without queries, in one step."""
    lengths, counts = [40, 120, 300, 70, 33, 290], [40, 120, 5, 1, 0, 280]
    cache, tables, rows = a_batch(lengths, 2, 32, dtype, backend)
    q, starts = torch.randn(sum(counts), 6, 32), torch.tensor([0, *counts]).cumsum(0)
    options = {"sliding_window": window, "backend": backend}
    out = kernels.paged_prefill_attention(q, **cache, **tables, query_start_loc=starts, **options)
    expected = attention(q, as_read(rows, dtype), counts, window, 32**-0.5)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=4e-6)
    k_cache, v_cache = cache.pop("k_cache"), cache.pop("v_cache")
    metadata = kernels.AttentionMetadata(**tables, query_start_loc=starts)
    assert kernels.paged_attention(q, k_cache, v_cache, metadata, **cache, **options).equal(out)


@EACH_DTYPE
def test_options_that_only_the_oracle_has(dtype: torch.dtype) -> None:
    """A soft cap that does not bind and slopes of 0 change nothing; nor does a scale that is alike for all rows."""
    cache, tables, _ = a_batch([50, 9], 2, 32, dtype, "torch")
    q = torch.randn(2, 4, 32)
    plain = kernels.paged_decode_attention(q, **cache, **tables)
    for options in ({"softcap": 1e6}, {"alibi_slopes": torch.zeros(4)}):
        torch.testing.assert_close(kernels.paged_decode_attention(q, **cache, **tables, **options), plain)
    for name in ("k_scale", "v_scale"):
        cache[name] = torch.full_like(cache[name], 0.01)
    one = cache | {"k_scale": 0.01, "v_scale": torch.tensor([0.01, 0.01])}
    torch.testing.assert_close(
        kernels.paged_decode_attention(q, **cache, **tables), kernels.paged_decode_attention(q, **one, **tables)
    )


# What is refused


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"k_scale": None}, TypeError, "k_scale must be a float32 tensor"),
        ({"v_scale": None}, TypeError, "v_scale must be a float32 tensor"),
        ({"v_scale": torch.zeros(2, BLOCK, 2).double()}, TypeError, "float32"),
        ({"k_scale": 0.5}, TypeError, "float32"),
        ({"k_scale": torch.zeros(2, BLOCK, 1)}, ValueError, r"k_scale must be \[2, 16, 2\]"),
        ({"k_scale": torch.zeros(2, 2, BLOCK).transpose(1, 2)}, ValueError, "contiguous"),
        ({"k_scale": torch.zeros(2, BLOCK, 2, device="meta")}, ValueError, "is on meta"),
        ({"k_cache": torch.zeros(2, BLOCK, 2, 8), "v_cache": torch.zeros(2, BLOCK, 2, 8)}, TypeError, "int8 or float8"),
        ({"k": torch.zeros(3, 2, 8).to(torch.int8)}, TypeError, "k must be float16"),
        ({"v": torch.zeros(3, 2, 9)}, ValueError, r"v must be \[3, 2, 8\]"),
        ({"slot_mapping": torch.tensor([0, 1, 32])}, IndexError, "no slot 32"),
        ({"slot_mapping": torch.tensor([0, -2, 3])}, IndexError, "no slot -2"),
    ],
    ids=lambda each: str(each)[:50],
)
@EACH_BACKEND
def test_store_refuses(changes: dict, error: type, says: str, backend: str) -> None:
    cache = empty_cache(2, 2, 8, torch.int8)
    before = {name: tensor.clone() for name, tensor in cache.items()}
    given = {"k": torch.ones(3, 2, 8), "v": torch.ones(3, 2, 8), "slot_mapping": torch.tensor([0, 1, 2]), **cache}
    with pytest.raises(error, match=says):
        kernels.store_kv(**given | changes, backend=backend)
    for name, tensor in cache.items():
        assert tensor.view(torch.uint8).equal(before[name].view(torch.uint8))


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"k_scale": None}, (ValueError, TypeError), "both must have a scale per row|k_scale must be a float32 tensor"),
        ({"v_scale": 1.0}, (ValueError, TypeError), "both must have a scale per row|v_scale must be a float32 tensor"),
        ({"k_scale": torch.ones(3, BLOCK, 2)}, ValueError, r"k_scale must be \[2, 16, 2\]"),
        ({"k_scale": torch.ones(2, BLOCK, 2).half()}, TypeError, "float32"),
        ({"k_cache": torch.zeros(2, BLOCK, 2, 8), "v_cache": torch.zeros(2, BLOCK, 2, 8)}, TypeError, "int8 or float8"),
    ],
    ids=lambda each: str(each)[:50],
)
@EACH_BACKEND
def test_attention_refuses(changes: dict, error: type | tuple[type, ...], says: str, backend: str) -> None:
    cache = stored(*torch.randn(2, 32, 2, 8), torch.int8, "torch") | changes
    tables = {"block_tables": torch.tensor([[0, 1]]), "context_lens": torch.tensor([32])}
    with pytest.raises(error, match=says):
        kernels.paged_decode_attention(torch.randn(1, 4, 8), **cache, **tables, backend=backend)
    metadata = kernels.AttentionMetadata(**tables)
    k_cache, v_cache = cache.pop("k_cache"), cache.pop("v_cache")
    with pytest.raises(error, match=says):
        kernels.paged_attention(torch.randn(1, 4, 8), k_cache, v_cache, metadata, **cache, backend=backend)
