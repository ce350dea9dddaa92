"""Every rung of the ladder computes the same attention, and asks for the bytes that it says."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from minicache.kernels import runtime

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)
runtime.interpret_without_gpu()
ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # benchmarks/ is no part of the package

from benchmarks.ladder import RUNGS, Workload, make_workload  # noqa: E402

DEVICE = str(runtime.usual_device())


def attention(work: Workload) -> torch.Tensor:
    """Row by row, in float64."""
    out = torch.zeros(work.q.shape, dtype=torch.float64)
    block_size = work.k_cache.shape[1]
    for i, length in enumerate(work.context_lens.tolist()):
        for head in range(work.q.shape[1]):
            slots = [(int(work.block_tables[i, t // block_size]), t % block_size) for t in range(length)]
            k = torch.stack([work.k_cache[block, slot, head // work.group] for block, slot in slots]).double()
            v = torch.stack([work.v_cache[block, slot, head // work.group] for block, slot in slots]).double()
            scores = k.cpu() @ work.q[i, head].double().cpu() * work.q.shape[2] ** -0.5
            out[i, head] = scores.softmax(0) @ v.cpu()
    return out


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=str)
def work(request: pytest.FixtureRequest) -> Workload:
    """Two sequences, one of several tiles, four query heads over two; two splits are worth it."""
    torch.manual_seed(0)
    return make_workload([37, 600], 4, 2, 16, dtype=request.param, device=DEVICE, num_processors=4)


@pytest.mark.parametrize("rung", RUNGS[1:], ids=lambda rung: rung.name)
def test_a_rung_computes_attention(rung, work) -> None:
    got, expected = rung.run(work), attention(work)
    assert got.dtype == work.q.dtype
    rounding = 1e-5 if work.q.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.double().cpu(), expected, rtol=0, atol=rounding)


def test_the_first_rung_computes_attention() -> None:
    """A loop over tokens: a shorter context, or the interpreter takes its time."""
    work = make_workload([1, 19], 2, 1, 16, dtype=torch.float32, device=DEVICE)
    torch.testing.assert_close(RUNGS[0].run(work).double().cpu(), attention(work), rtol=0, atol=1e-5)


def test_bytes_of_the_goal() -> None:
    """64 sequences of 4,096 tokens, 8 query heads over 1 of 128 numbers, bf16: worked by hand."""
    rows = 64 * 4096
    work = Workload(
        torch.empty(64, 8, 128, dtype=torch.bfloat16, device="meta"),
        *torch.empty(2, rows // 16, 16, 1, 128, dtype=torch.bfloat16, device="meta"),
        torch.empty(64, 256, dtype=torch.int32, device="meta"),
        torch.empty(64, dtype=torch.int32, device="meta"),
        rows,
        132,
    )
    queries_and_output = 2 * 64 * 8 * 128 * 2
    once = rows * (2 * 128 * 2 + 4) + queries_and_output
    eight_times = 8 * rows * (2 * 128 * 2 + 4) + queries_and_output
    splits = 2 * 64 * 8 * 4 * (128 + 2) * 4
    assert work.num_splits == 4
    assert [rung.nbytes(work) for rung in RUNGS] == [eight_times, eight_times, once, once, once, once + splits]


@pytest.mark.slow
def test_all_contestants_of_the_benchmark_agree() -> None:
    """In a process of its own, as one would start it."""
    command = [sys.executable, "-m", "benchmarks.kernels", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("right") == len(RUNGS) + 5
    assert "WRONG" not in done.stdout
