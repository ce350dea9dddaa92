"""Caches of more than 2³¹ numbers: a head times its stride passes what 32 bits hold."""

from __future__ import annotations

import subprocess
import sys

import pytest

from minicache.kernels.runtime import has_gpu

# A process of its own, since a kernel that computes a wrong address takes the process with it. The cache is int8, each
# head 1.25 · 2³⁰ numbers after the one before, and of its 2.5 GiB only the pages in use are ever there.
SCRIPT = """
import torch
from minicache import kernels

torch.manual_seed(0)
HEADS, BLOCKS, SIZE, DIM, STRIDE = 3, 3, 4, 16, 5 * 2**28
far = torch.empty((HEADS - 1) * STRIDE + BLOCKS * SIZE * DIM, dtype=torch.int8)
far = far.as_strided((BLOCKS, SIZE, HEADS, DIM), (SIZE * DIM, DIM, STRIDE, 1))
k = torch.randint(-127, 128, (7, HEADS, DIM), dtype=torch.int8)
slots, table, lens = torch.tensor([8, 9, 10, 11, 0, 1, 2]), torch.tensor([[2, 0]]), torch.tensor([7])
kernels.store_kv(k, k, far, far, slots, backend="triton")
near = torch.zeros(BLOCKS, SIZE, HEADS, DIM, dtype=torch.int8)
near.flatten(0, 1)[slots] = k
assert kernels.gather_kv(far, table[0], 7, backend="triton").equal(k), "gather"
options = {"k_scale": 0.01, "v_scale": 0.01}
q = torch.randn(1, HEADS, DIM)
for splits in (1, 2):
    got = kernels.paged_decode_attention(q, far, far, table, lens, **options, num_splits=splits, backend="triton")
    want = kernels.paged_decode_attention(q, near, near, table, lens, **options)
    torch.testing.assert_close(got, want)
q, starts = torch.randn(3, HEADS, DIM), torch.tensor([0, 3])
got = kernels.paged_prefill_attention(q, far, far, table, lens, starts, **options, backend="triton")
torch.testing.assert_close(got, kernels.paged_prefill_attention(q, near, near, table, lens, starts, **options))
"""


@pytest.mark.skipif(
    has_gpu(), reason="the interpreter's pages are only there when they are used; a GPU's are all there"
)
def test_a_head_far_behind_the_first(interpreter: None) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
