"""The arithmetic of tensor parallelism, against small cases counted by hand."""

from __future__ import annotations

import pytest

from minicache.arithmetic import step_bytes, step_flops, step_seconds
from minicache.arithmetic.parallel import (
    Link,
    allreduce_bytes,
    allreduce_seconds,
    break_even_latency,
    parallel_step_seconds,
    rank_kv_bytes_per_token,
    rank_weight_bytes,
    ring_factor,
)
from minicache.arithmetic.specs import DEEPSEEK_V3, H100, LLAMA_3_8B, MINIGPT

NVLINK = Link(10e-6, 450e9)


def ring_allreduce_sends(num_ranks: int, num_parts: int) -> int:
    """How many parts a rank sends, by running the two rounds of a ring."""
    sent = 0
    held = [[1 << rank] * num_parts for rank in range(num_ranks)]  # which ranks' numbers are in each part's sum
    for phase in ("sum", "copy"):
        for turn in range(num_ranks - 1):
            shift = turn if phase == "sum" else turn - 1
            moves = [(rank, (rank - shift) % num_ranks) for rank in range(num_ranks)]
            values = [held[rank][part] for rank, part in moves]
            for (rank, part), value in zip(moves, values, strict=True):
                after = (rank + 1) % num_ranks
                held[after][part] = held[after][part] | value if phase == "sum" else value
            sent += 1
    assert all(part == (1 << num_ranks) - 1 for rank in held for part in rank)
    return sent


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_a_ring_sends_its_factor(num_ranks):
    assert ring_factor(num_ranks) == pytest.approx(ring_allreduce_sends(num_ranks, num_ranks) / num_ranks)


def test_bytes_of_a_step():
    # MiniGPT: 4 layers, rows of 128 numbers. Two all-reduces a layer, of 3 tokens each.
    assert allreduce_bytes(MINIGPT, 3, "float32") == 8 * 3 * 128 * 4
    # 64 all-reduces of 8 KiB.
    assert allreduce_bytes(LLAMA_3_8B, 1) == 64 * 8192


def test_an_allreduce():
    assert allreduce_seconds(NVLINK, 450_000_000, 2) == pytest.approx(10e-6 + 1e-3)
    assert allreduce_seconds(NVLINK, 450_000_000, 4) == pytest.approx(10e-6 + 1.5e-3)
    assert allreduce_seconds(NVLINK, 450_000_000, 1) == 0


def test_bytes_of_a_rank():
    embedding = 128_256 * 4096
    rank_0 = rank_weight_bytes(LLAMA_3_8B.num_parameters, 2 * embedding, 2)
    rank_1 = rank_weight_bytes(LLAMA_3_8B.num_parameters - embedding, embedding, 2)
    assert (rank_0, rank_1) == (9_080_934_400, 8_030_261_248)
    assert rank_0 + rank_1 == 2 * (LLAMA_3_8B.num_parameters + embedding)  # nothing but the embedding is twice there
    assert rank_weight_bytes(7, 0, 2, "int8") == 4  # rounded up
    assert [rank_kv_bytes_per_token(LLAMA_3_8B, ranks) for ranks in (1, 2, 8, 16)] == [131072, 65536, 16384, 16384]


def test_one_rank_is_the_step_of_phase_0():
    for step in ((1, 1000, 1), (1, 0, 64), (512, 0, 2)):
        alone = step_seconds(H100, step_flops(LLAMA_3_8B, *step), step_bytes(LLAMA_3_8B, *step))
        assert parallel_step_seconds(LLAMA_3_8B, H100, NVLINK, 1, *step) == pytest.approx(alone)


def test_two_ranks_of_a_decode_step():
    replicated = 2 * 128_256 * 4096
    seconds = parallel_step_seconds(LLAMA_3_8B, H100, NVLINK, 2, 1, 999, num_replicated=replicated)
    read = (9_080_934_400 + 1000 * 65_536) / 3.35e12
    assert seconds == pytest.approx(read + 64 * (10e-6 + 8192 / 450e9))


@pytest.mark.parametrize("step", [(1, 1000, 1), (1, 1000, 64), (2048, 0, 1)])
def test_at_the_break_even_latency_two_are_as_fast_as_one(step):
    latency = break_even_latency(LLAMA_3_8B, H100, 450e9, 2, *step)
    one, two = (parallel_step_seconds(LLAMA_3_8B, H100, Link(latency, 450e9), p, *step) for p in (1, 2))
    assert one == pytest.approx(two)


def test_a_slow_link_never_pays():
    assert (
        break_even_latency(LLAMA_3_8B, H100, 32e9, 2, 8192) < 0 < break_even_latency(LLAMA_3_8B, H100, 450e9, 2, 8192)
    )


@pytest.mark.parametrize(
    ("call", "saying"),
    [
        (lambda: rank_kv_bytes_per_token(LLAMA_3_8B, 3), "8 KV heads cannot be divided among 3"),
        (lambda: rank_kv_bytes_per_token(DEEPSEEK_V3, 2), "latent"),
        (lambda: rank_weight_bytes(5, 6, 2), "there are 5"),
        (lambda: ring_factor(0), "num_ranks must be at least 1"),
        (lambda: break_even_latency(LLAMA_3_8B, H100, 450e9, 1, 1), "at least 2"),
        (lambda: Link(-1e-6, 450e9), "latency"),
        (lambda: Link(0.0, 0.0), "bandwidth"),
    ],
)
def test_refusals(call, saying):
    with pytest.raises(ValueError, match=saying):
        call()
