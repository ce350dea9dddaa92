"""Tensors of more than 2³¹ numbers: a head or a slot times its stride passes what 32 bits hold."""

from __future__ import annotations

import subprocess
import sys

import pytest

from minicache.kernels.runtime import has_gpu

# A process of its own, since a kernel that computes a wrong address takes the process with it. Neighbours in one
# dimension are about 2³⁰ numbers apart, so the last is past 2³¹; only the pages in use are ever there.
SCRIPT = """
import torch
from minicache import kernels

HEADS, BLOCKS, SIZE, DIM = 3, 3, 4, 16
DENSE = (SIZE * HEADS * DIM, HEADS * DIM, DIM, 1)
LAYOUTS = {
    "head": (SIZE * DIM, DIM, 5 * 2**28, 1),
    "slot": (HEADS * DIM, 3 * 2**28, DIM, 1),
    "query head": (SIZE * HEADS * DIM, HEADS * DIM, DIM, 1),
}


def spread(shape, strides, dtype):
    reach = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides))
    return torch.empty(reach, dtype=dtype).as_strided(shape, strides)


for what, strides in LAYOUTS.items():
    print(what, flush=True)
    torch.manual_seed(0)
    far = spread((BLOCKS, SIZE, HEADS, DIM), strides, torch.int8)
    k = torch.randint(-127, 128, (7, HEADS, DIM), dtype=torch.int8)
    slots, table, lens = torch.tensor([8, 9, 10, 11, 0, 1, 2]), torch.tensor([[2, 0]]), torch.tensor([7])
    kernels.store_kv(k, k, far, far, slots, backend="triton")
    near = torch.zeros(BLOCKS, SIZE, HEADS, DIM, dtype=torch.int8)
    near.flatten(0, 1)[slots] = k
    assert kernels.gather_kv(far, table[0], 7, backend="triton").equal(k), "gather"
    options = {"k_scale": 0.01, "v_scale": 0.01}
    same = q = torch.randn(3, HEADS, DIM).half()
    if what == "query head":
        q = spread(q.shape, (DIM, 2**30 + 2**10, 1), q.dtype).copy_(q)
    for splits in (1, 2):
        given = (table, lens)
        got = kernels.paged_decode_attention(q[:1], far, far, *given, **options, num_splits=splits, backend="triton")
        want = kernels.paged_decode_attention(same[:1], near, near, *given, **options)
        torch.testing.assert_close(got, want)
    given = (table, lens, torch.tensor([0, 3]))
    got = kernels.paged_prefill_attention(q, far, far, *given, **options, backend="triton")
    torch.testing.assert_close(got, kernels.paged_prefill_attention(same, near, near, *given, **options))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    has_gpu(), reason="the interpreter's pages are only there when they are used; a GPU's are all there"
)
def test_what_is_far_apart(interpreter: None) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
