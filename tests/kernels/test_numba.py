"""The numba kernels against PyTorch in float64: attention at every shape, the rows' kernels, and what is refused."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from tests.grid import grid
from torch import Tensor

pytest.importorskip("numba")

import numpy as np

from minicache import kernels
from minicache.errors import KernelUnavailableError
from minicache.kernels import backends, cpu
from minicache.kernels.cpu import attention, products, prompts, rows, steps, vectors, warming
from minicache.model.minigpt import rotary_frequencies, rotate, turns


def a_batch(
    lengths: list[int],
    num_kv_heads: int = 2,
    head_dim: int = 32,
    block_size: int = 16,
    index: torch.dtype = torch.int64,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Caches, tables and lengths. NaN is in every row that is no sequence's; tails of tables are no blocks."""
    needed = [-(-length // block_size) for length in lengths]
    num_blocks = sum(needed) + 2
    k_cache, v_cache = (torch.randn(num_blocks, block_size, num_kv_heads, head_dim) for _ in range(2))
    free = torch.randperm(num_blocks).tolist()
    tables = torch.full((len(lengths), max(needed) + 1), 10**6, dtype=index)
    unused = torch.ones(num_blocks, block_size, dtype=torch.bool)
    for i, (length, count) in enumerate(zip(lengths, needed, strict=True)):
        blocks = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int64)
        tables[i, :count] = blocks
        unused[blocks] = torch.arange(count * block_size).view(count, block_size) >= length
    k_cache[unused], v_cache[unused] = torch.nan, torch.nan
    return k_cache, v_cache, tables, torch.tensor(lengths, dtype=index)


def expected(q: Tensor, paged: tuple[Tensor, ...], starts: Tensor | None = None, **options: object) -> Tensor:
    """Attention by its definition in float64: softmax of the scores of one query row over what it sees."""
    k_cache, v_cache, tables, lengths = paged
    window, scale = options.get("sliding_window"), options.get("scale") or q.shape[2] ** -0.5
    ends = range(len(lengths) + 1) if starts is None else starts.tolist()
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[1] // k_cache.shape[2]
    for i, length in enumerate(lengths.tolist()):
        blocks = tables[i, : -(-length // k_cache.shape[1])].long()
        k, v = (
            cache[blocks].flatten(0, 1)[:length].double().repeat_interleave(group, 1) for cache in (k_cache, v_cache)
        )
        for row in range(ends[i], ends[i + 1]):
            end = length - ends[i + 1] + row + 1
            begin = 0 if window is None else max(0, end - window)
            if begin < end:
                scores = torch.einsum("hd,thd->ht", q[row].double(), k[begin:end]) * scale
                out[row] = torch.einsum("ht,thd->hd", scores.softmax(1), v[begin:end])
    return out


def assert_decodes(paged: tuple[Tensor, ...], q: Tensor, **options: object) -> None:
    got = kernels.paged_decode_attention(q, *paged, **options, backend="numba")
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected(q, paged, **options), rtol=1e-5, atol=2e-6)


AROUND_A_BLOCK = [0, 1, 15, 16, 17, 100]


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"), [(4, 4), (8, 2), (5, 1), (6, 2), (7, 1), (6, 1), (16, 2), (64, 8)]
)
def test_groups(num_heads: int, num_kv_heads: int) -> None:
    paged = a_batch(AROUND_A_BLOCK, num_kv_heads)
    assert_decodes(paged, torch.randn(len(AROUND_A_BLOCK), num_heads, 32))


@grid({"head_dim": [8, 24, 32, 64, 80, 96, 128, 256, 576], "window": [None, 1, 13]})
def test_head_sizes(head_dim: int, window: int | None) -> None:
    """A tile is 4,096 / d tokens or 8, and these contexts are longer, shorter and as long."""
    lengths = [*AROUND_A_BLOCK, 7, 8, 9, 4096 // head_dim // 8 * 8, 600]
    paged = a_batch(lengths, head_dim=head_dim)
    assert_decodes(paged, torch.randn(len(lengths), 4, head_dim), sliding_window=window)


@pytest.mark.parametrize("block_size", [1, 2, 3, 8, 16, 31, 32])
def test_block_sizes(block_size: int) -> None:
    lengths = [0, 1, max(0, block_size - 1), block_size, block_size + 1, 333]
    for index in (torch.int32, torch.int64):
        paged = a_batch(lengths, block_size=block_size, index=index)
        for window in (None, 1, block_size, 200, 1000):
            assert_decodes(paged, torch.randn(len(lengths), 8, 32), sliding_window=window, scale=0.3)


def test_where_blocks_lie_changes_no_bit() -> None:
    k_cache, v_cache, tables, lengths = a_batch([77, 300])
    q = torch.randn(2, 8, 32)
    order = torch.randperm(len(k_cache))
    moved = tables.clone()
    moved[tables < len(k_cache)] = order.argsort()[tables[tables < len(k_cache)]]
    once = kernels.paged_decode_attention(q, k_cache, v_cache, tables, lengths, backend="numba")
    again = kernels.paged_decode_attention(q, k_cache[order], v_cache[order], moved, lengths, backend="numba")
    alone = kernels.paged_decode_attention(q[1:], k_cache, v_cache, tables[1:], lengths[1:], backend="numba")
    assert once.equal(again)
    assert once[1:].equal(alone), "who else is in the batch changes a result"


@pytest.mark.parametrize("cache", ["k_cache", "v_cache"])
def test_nan_in_a_row_in_use_reaches_its_sequence_alone(cache: str) -> None:
    for position in (0, 5, 7, 40, 98, 99):
        paged = dict(zip(("k_cache", "v_cache", "block_tables", "context_lens"), a_batch([100, 100]), strict=True))
        paged[cache][paged["block_tables"][0, position // 16], position % 16, 1, 3] = torch.nan
        out = kernels.paged_decode_attention(torch.randn(2, 4, 32), **paged, backend="numba")
        assert not out[:, :2].isnan().any()  # the query heads of the other key/value head
        assert not out[1].isnan().any()
        assert out[0, 2:].isnan().any(dim=1).all()


@pytest.mark.parametrize("size", [1e4, -1e4, 2.0**60])
def test_extreme_scores_do_not_overflow(size: float) -> None:
    k_cache, v_cache, tables, lengths = a_batch([100, 3, 17])
    paged = (k_cache.sign() * abs(size) ** 0.5, v_cache, tables, lengths)
    q = torch.randn(3, 4, 32).sign() * size / abs(size) ** 0.5
    got = kernels.paged_decode_attention(q, *paged, scale=1.0, backend="numba")
    torch.testing.assert_close(got.double(), expected(q, paged, scale=1.0), rtol=1e-4, atol=1e-4)


def test_queries_and_caches_may_be_strided() -> None:
    k_cache, v_cache, tables, lengths = a_batch([50, 9])
    both = torch.stack([k_cache, v_cache], dim=1)
    paged = (both[:, 0], both[:, 1], tables, lengths)
    assert_decodes(paged, torch.randn(2, 12, 32)[:, :8])
    assert_decodes(paged, torch.randn(8, 2, 32).transpose(0, 1))
    assert_decodes(paged, torch.randn(2, 32, 8).transpose(1, 2))


MIXED = [(0, 5), (30, 1), (0, 150), (10, 0), (3, 2), (100, 40), (7, 8), (0, 96), (0, 1), (300, 9)]


@pytest.mark.parametrize("window", [None, 20])
def test_prompts_and_decodes_in_one_step(window: int | None) -> None:
    """Prompts of both kinds, and the short ones before, between and after the long ones."""
    paged = a_batch([before + new for before, new in MIXED])
    starts = torch.tensor([0, *(new for _, new in MIXED)]).cumsum(0)
    q = torch.randn(int(starts[-1]), 4, 32)
    got = kernels.paged_prefill_attention(q, *paged, starts, sliding_window=window, backend="numba")
    torch.testing.assert_close(got.double(), expected(q, paged, starts, sliding_window=window), rtol=1e-5, atol=2e-6)


def test_the_queries_of_short_prompts_are_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    attended: list[int] = []
    monkeypatch.setattr(steps, "attend_prompt", lambda q, *_: attended.append(len(q)))
    paged = a_batch([before + new for before, new in MIXED])
    starts = torch.tensor([0, *(new for _, new in MIXED)]).cumsum(0)
    kernels.paged_prefill_attention(torch.randn(int(starts[-1]), 4, 32), *paged, starts, backend="numba")
    assert attended == [150, 40, 96]


def test_a_plan_attends_for_a_model() -> None:
    """numpy arrays in, q the rows of q, k and v together, the result written to an array of the model's."""
    paged = a_batch([50, 9, 20])
    k_cache, v_cache, tables, lengths = paged
    qkv, out = torch.randn(3, 8 + 2 * 2, 32), np.full((3, 8, 32), np.nan, np.float32)
    plan = steps.plan_step(kernels.AttentionMetadata(tables, lengths), *k_cache.shape[:2])
    caches = steps.CacheArrays.of(k_cache, v_cache, None, None)
    plan.attend(qkv.numpy(), caches, 32**-0.5, 10, out)
    torch.testing.assert_close(
        torch.from_numpy(out).double(), expected(qkv[:, :8], paged, sliding_window=10), rtol=1e-5, atol=2e-6
    )
    for wrong in (out[:2], np.concatenate([out, out])):
        with pytest.raises(ValueError, match="3 queries"):
            plan.attend(qkv.numpy(), caches, 1.0, 0, wrong)


def test_what_a_plan_refuses() -> None:
    k_cache, _, tables, lengths = a_batch([50, 9])

    def plan(tables: Tensor = tables, lengths: Tensor = lengths, starts: list[int] | None = None) -> None:
        metadata = kernels.AttentionMetadata(tables, lengths, None if starts is None else torch.tensor(starts))
        steps.plan_step(metadata, *k_cache.shape[:2])

    for wrong in (-1, len(k_cache)):
        other = tables.clone()
        other[1, 0] = wrong
        with pytest.raises(IndexError, match=f"no block {wrong}"):
            plan(other)
    for too_long in (-1, tables.shape[1] * 16 + 1):
        with pytest.raises(ValueError, match="context_len"):
            plan(lengths=torch.tensor([50, too_long]))
    with pytest.raises(ValueError, match="sequence 1 has 9 tokens"):
        plan(starts=[0, 3, 13])


def test_store() -> None:
    k_cache, v_cache, _, _ = a_batch([100])
    k, v = torch.randn(5, 2, 32), torch.randn(2, 5, 32).transpose(0, 1)
    for slots in (torch.tensor([3, -1, 70, 0, 17]), torch.tensor([3, -1, 70, 0, 17], dtype=torch.int32)):
        wanted = k_cache.clone(), v_cache.clone()
        kernels.store_kv(k, v, *wanted, slots, backend="torch")
        kernels.store_kv(k, v, k_cache, v_cache, slots, backend="numba")
        torch.testing.assert_close((k_cache, v_cache), wanted, rtol=0, atol=0, equal_nan=True)
    for wrong in (-2, 16 * len(k_cache)):
        before = k_cache.clone()
        with pytest.raises(IndexError, match=f"no slot {wrong}"):
            kernels.store_kv(k + 1, v, k_cache, v_cache, torch.tensor([3, 4, 5, 6, wrong]), backend="numba")
        torch.testing.assert_close(k_cache, before, rtol=0, atol=0, equal_nan=True)


# What runs where


def ran_in_numba(monkeypatch: pytest.MonkeyPatch, **changes: object) -> bool:
    ran = []
    attend = steps.paged_attention
    monkeypatch.setattr(steps, "paged_attention", lambda *args, **options: ran.append(1) or attend(*args, **options))
    k_cache, v_cache, tables, lengths = a_batch([20, 3], head_dim=changes.pop("head_dim", 32))
    dtype = changes.pop("dtype", torch.float32)
    q = torch.randn(2, 4, k_cache.shape[3], dtype=dtype, requires_grad=changes.pop("requires_grad", False))
    kernels.paged_decode_attention(q, k_cache.to(dtype), v_cache.to(dtype), tables, lengths, **changes)
    return bool(ran)


def test_numba_is_the_default_for_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ran_in_numba(monkeypatch)
    assert ran_in_numba(monkeypatch, scale=0.5, sliding_window=3, num_splits=2)
    assert not ran_in_numba(monkeypatch, softcap=5.0)
    assert not ran_in_numba(monkeypatch, backend="torch")
    assert not ran_in_numba(monkeypatch, dtype=torch.bfloat16)
    assert not ran_in_numba(monkeypatch, dtype=torch.float64)
    assert not ran_in_numba(monkeypatch, head_dim=12)
    assert not ran_in_numba(monkeypatch, requires_grad=True), "the result would have no gradient"
    with torch.no_grad():
        assert ran_in_numba(monkeypatch, requires_grad=True)
    monkeypatch.setattr(backends, "is_plain_replaced", lambda: True)
    assert not ran_in_numba(monkeypatch), "a learner's kernels would not be called"


def test_pytorch_runs_where_numba_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "why_unavailable", lambda: "no numba here: pip install numba")
    assert not ran_in_numba(monkeypatch)
    with pytest.raises(KernelUnavailableError, match="pip install numba"):
        ran_in_numba(monkeypatch, backend="numba")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": torch.bfloat16}, "float32"),
        ({"head_dim": 12}, "multiple of 8"),
        ({"softcap": 5.0}, "no softcap"),
        ({"alibi_slopes": torch.ones(4)}, "no alibi_slopes"),
    ],
)
def test_what_numba_cannot_do_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, changes: dict, said: str) -> None:
    with pytest.raises(KernelUnavailableError, match=said):
        ran_in_numba(monkeypatch, **changes, backend="numba")


def test_numba_gathers_nothing() -> None:
    k_cache, _, tables, _ = a_batch([20])
    with pytest.raises(KernelUnavailableError, match="has no gather"):
        kernels.gather_kv(k_cache, tables[0], 20, backend="numba")


# The kernels of a transformer's rows


def test_norms() -> None:
    x, y, weight, eps = torch.randn(5, 75), torch.randn(5, 75), torch.randn(75), np.float32(1e-5)
    out = torch.empty(5, 75)
    rows.rms_norm(x.numpy(), weight.numpy(), eps, out.numpy())
    torch.testing.assert_close(out, F.rms_norm(x, (75,), weight, 1e-5))
    summed = x.clone()
    rows.add_rms_norm(summed.numpy(), y.numpy(), weight.numpy(), eps, out.numpy())
    torch.testing.assert_close(summed, x + y)
    torch.testing.assert_close(out, F.rms_norm(x + y, (75,), weight, 1e-5))


@pytest.mark.parametrize("width", [8, 9, 45, 64])
def test_silu_mul(width: int) -> None:
    gate_up, out = torch.randn(3, 2 * width) * 40, torch.empty(3, width)
    rows.silu_mul(gate_up.numpy(), out.numpy())
    torch.testing.assert_close(out, F.silu(gate_up[:, :width]) * gate_up[:, width:])


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(8, 2, 32), (3, 1, 80)])
def test_rope_store_and_norm_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    qkv, slots = torch.randn(6, num_heads + 2 * num_kv_heads, head_dim), torch.randperm(40)[:6]
    slots[2] = -1
    stored = slots >= 0
    k_cache, v_cache = torch.zeros(2, 40, num_kv_heads, head_dim)
    cos, sin = turns(torch.tensor([0, 7, 100, 3, 5000, 1]), rotary_frequencies(1e4, head_dim))
    q, k, v = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    q_weight, k_weight = torch.randn(2, head_dim)
    q, k = F.rms_norm(q, (head_dim,), q_weight, 1e-6), F.rms_norm(k, (head_dim,), k_weight, 1e-6)
    q, k = (rotate(heads, cos[:, None], sin[:, None]) for heads in (q, k))
    got = qkv.clone()
    rows.norm_heads(got.numpy(), q_weight.numpy(), k_weight.numpy(), np.float32(1e-6), num_heads)
    turning = [each.numpy() for each in (got, cos, sin, slots, k_cache, v_cache)]
    rows.rope_store(*turning, None, None, num_heads)
    torch.testing.assert_close(got, torch.cat([q, k, v], dim=1))
    torch.testing.assert_close(k_cache[slots[stored]], k[stored])
    torch.testing.assert_close(v_cache[slots[stored]], v[stored])
    assert k_cache.count_nonzero() == k[stored].numel()


# Compiling


def test_a_layout_that_was_not_compiled_is_refused() -> None:
    """Compiling another one would take a second, in the middle of a step."""
    x = np.zeros((4, 16), np.float32)
    with pytest.raises(TypeError):
        rows.silu_mul(x.astype(np.float64), x)
    numbers = {"float32", "int8", "uint8"}
    for module in (rows, attention):
        for kernel in module.signatures("float32"):
            compiled_for = {module.signatures(each)[kernel] for each in numbers}
            assert 1 <= len(kernel.signatures) <= len(compiled_for)


def test_progress_is_told() -> None:
    told: list[tuple[int, int]] = []
    warming.warm_up(lambda done, total: told.append((done, total)))
    assert told == [(done, len(told) - 1) for done in range(len(told))]
    assert len(told) > 2


COMPUTE = """
import torch
from minicache import kernels
torch.manual_seed(0)
k, v = torch.randn(2, 9, 16, 2, 32)
tables, lengths = torch.randperm(9)[:8].view(2, 4), torch.tensor([50, 64])
got = kernels.paged_decode_attention(torch.randn(2, 8, 32), k, v, tables, lengths, backend="numba")
print(round(got.double().sum().item(), 4))
"""

WARM_UP_WHILE_ATTENDING = (
    COMPUTE
    + """
import threading
from minicache.kernels.cpu import warming
stopped, errors = threading.Event(), []
def attend():
    while not stopped.is_set():
        try:
            kernels.paged_decode_attention(torch.randn(2, 8, 32), k, v, tables, lengths, backend="numba")
        except Exception as error:
            errors.append(repr(error))
thread = threading.Thread(target=attend)
thread.start()
for dtype in (torch.float32, torch.int8, torch.float8_e4m3fn):
    warming.warm_up(dtype=dtype)
stopped.set()
thread.join()
print(errors[:1])
"""
)


@pytest.mark.slow
def test_an_engine_computes_while_another_is_warmed_up() -> None:
    """Two engines in one process: no kernel of the first may be open for another layout while the second's load."""
    done = subprocess.run(
        [sys.executable, "-c", WARM_UP_WHILE_ATTENDING], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("module", "inlined"), [(attention, vectors), (rows, vectors), (prompts, vectors), (prompts, products)]
)
def test_kernels_name_what_is_compiled_into_them(module: ModuleType, inlined: ModuleType) -> None:
    """Numba looks at a kernel's own file only: where `vectors` changes and that does not, old code would run."""
    name, code = inlined.__name__.split(".")[-1], Path(str(inlined.__file__)).read_bytes()
    line = f"{name}.py as compiled code knows it, sha256: {hashlib.sha256(code).hexdigest()[:16]}"
    assert line in Path(str(module.__file__)).read_text(encoding="utf-8"), f"write into {module.__file__}: {line}"


@pytest.mark.slow
def test_processes_may_compile_at_once(tmp_path: Path) -> None:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    running = [
        subprocess.Popen([sys.executable, "-c", COMPUTE], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    printed = {process.communicate()[0] for process in running}
    assert [process.returncode for process in running] == [0, 0, 0]
    assert len(printed) == 1
    again = subprocess.run([sys.executable, "-c", COMPUTE], env=environment, capture_output=True, text=True, check=True)
    assert {again.stdout} == printed
