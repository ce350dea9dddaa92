"""Phase 4, task 3: the online softmax, over the keys and values of one head."""

from __future__ import annotations

import math

import pytest
import torch

from minicache_course.checks import call, that


@pytest.fixture(scope="session")
def attends(device, watching):
    """`attends(q, k, v)`: run the kernel under the tracer, and compare with PyTorch's softmax in float64."""

    def run(q, k, v, **options):
        __tracebackhide__ = True
        from minicache_course.kernels.online_softmax import attention  # only now, when Triton is known to run here

        def traced(q, k, v, **options):
            if device.type == "cuda":
                return attention(q.to(device), k.to(device), v.to(device), **options)
            with watching({}, {"q": q, "k": k, "v": v}, "online_softmax_kernel"):
                return attention(q, k, v, **options)

        traced.__qualname__ = "attention"
        got = call(traced, q, k, v, **options).value
        scores = q.double() @ k.double().T * options.get("scale", q.shape[1] ** -0.5)
        what = f"attention of {len(q)} queries to {len(k)} keys in tiles of {options.get('tile', 16)}"
        atol = 1e-5 + 3e-7 * float(scores.abs().max())  # a score's rounding error grows with it, and is exp's exponent
        that(what, got.cpu()).is_close((scores.softmax(1) @ v.double()).float(), rtol=1e-4, atol=atol)

    return run


def random(num_queries, num_keys, head_dim, *, at=1.0):
    """q, k and v; keys `at` times as large as usual."""
    return torch.randn(num_queries, head_dim), at * torch.randn(num_keys, head_dim), torch.randn(num_keys, head_dim)


def scored(scores, head_dim=16):
    """One query, and keys whose scores with it, times 1 / √d, are `scores`; values 0, 1, 2, … in each place."""
    q, k = torch.zeros(1, head_dim), torch.zeros(len(scores), head_dim)
    q[0, 0], k[:, 0] = math.sqrt(head_dim), torch.tensor(scores)
    return q, k, torch.arange(float(len(scores)))[:, None].expand(-1, head_dim).contiguous()


def test_one_full_tile(attends):
    """16 queries, 32 keys, 64 numbers: one tile without a mask. Scores times 1 / √d, softmax, the weighted sum."""
    attends(*random(16, 32, 64), tile=32)  # three sizes: an axis that is taken for another does not fit


def test_one_tile_that_is_not_full(attends):
    """3 keys in a tile of 16: the missing ones are not loaded, and have score −∞ and weight 0."""
    attends(*random(16, 3, 16))


def test_two_tiles_with_equal_scores(attends):
    """32 keys with score 0: all weights are 1 / 32, the maximum never changes, and sums carry over."""
    attends(*scored([0.0] * 32))


def test_a_later_tile_brings_a_larger_score(attends):
    """16 scores of 0, then 16 of ln 4: the sums under the old maximum are divided by 4."""
    attends(*scored([0.0] * 16 + [math.log(4)] * 16))


def test_an_earlier_tile_has_the_largest_score(attends):
    """16 scores of ln 4, then 32 of 0: the maximum stays, and the later tiles have a quarter of the weight."""
    attends(*scored([math.log(4)] * 16 + [0.0] * 32))


@pytest.mark.parametrize("num_keys", [17, 40], ids=lambda what: f"{what} keys")
def test_more_than_one_tile(attends, num_keys):
    """Each query has a separate maximum, sum and accumulator, carried from tile to tile."""
    attends(*random(16, num_keys, 16))


def test_scores_far_below_zero(attends):
    """All scores at −40,000: under an initial maximum of 0, or −10,000 for a missing key, all exponentials are 0."""
    q, k, v = scored([-40_000.0, -40_001.0, -40_002.0])
    attends(q.expand(16, -1).contiguous(), k, v)


def test_each_query_has_its_own_maximum(attends):
    """Scores near 400 and near −400: under one maximum for both, the second query's exponentials are all 0."""
    q, k, v = random(2, 16, 16)
    q[:, 0], k[:, 0] = torch.tensor([40.0, -40.0]), 40.0
    attends(q, k, v)


def test_large_scores_do_not_overflow(attends):
    """Scores in the hundreds, of either sign: exp is taken of score − maximum, never of a score."""
    attends(*random(16, 33, 16, at=100.0))


@pytest.mark.parametrize("num_queries", [1, 3, 17], ids=lambda what: f"{what} queries")
def test_any_number_of_queries(attends, num_queries):
    """A program has 16 queries. Those past the last one are not loaded, and their outputs are not stored."""
    attends(*random(num_queries, 20, 16))


@pytest.mark.parametrize("head_dim", [5, 80], ids="d {}".format)
def test_head_sizes_that_are_no_power_of_two(attends, head_dim):
    """The tile is wider than a key: the numbers past its end belong to the next key."""
    attends(*random(3, 20, head_dim))


def test_scale(attends):
    """`scale` replaces 1 / √d."""
    attends(*random(4, 20, 16), scale=0.5)


def test_tiles_of_another_size(attends):
    """The result does not depend on how the keys are cut into tiles."""
    attends(*random(4, 70, 16), tile=32)
