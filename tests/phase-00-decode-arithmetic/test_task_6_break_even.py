"""Phase 0, task 6: the batch at which decode is no longer memory-bound, if there is one."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from minicache.arithmetic import specs
from minicache.arithmetic.arithmetic import break_even_batch
from minicache.arithmetic.specs import Accelerator, Transformer
from minicache_course.checks import call, that
from minicache_course.seeds import one_of

NBYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1, "int8": 1}

TIMES = one_of(1, [2, 4, 8, 16])  # under a secret seed, the accelerators are so many times as fast


def on(accelerator: Accelerator) -> Accelerator:
    """The accelerator, or under a secret seed a faster one with the same ridge."""
    bandwidth, peak_flops = TIMES * accelerator.bandwidth, TIMES * accelerator.peak_flops
    return replace(accelerator, bandwidth=bandwidth, peak_flops=peak_flops)


def one_sequence(model: Transformer, context_len: int, dtype: str) -> tuple[int, int]:
    """FLOPs of one sequence's decode step and the bytes of its own cache, written out in full."""
    length = context_len + 1
    width = model.kv_latent_dim or model.head_dim
    row = model.kv_latent_dim or 2 * model.num_kv_heads * model.head_dim
    flops = 2 * model.num_parameters + 4 * model.num_layers * model.num_heads * width * length
    return flops, length * model.num_layers * row * NBYTES[dtype]


def intensity(model: Transformer, context_len: int, batch_size: int, dtype: str) -> Fraction:
    """FLOP/byte of a decode step, exactly."""
    flops, cache = one_sequence(model, context_len, dtype)
    return Fraction(batch_size * flops, model.num_parameters * NBYTES[dtype] + batch_size * cache)


def ridge(accelerator: Accelerator) -> Fraction:
    return Fraction(accelerator.peak_flops) / Fraction(accelerator.bandwidth)


def first_batch(model: Transformer, accelerator: Accelerator, context_len: int, dtype: str, limit: int) -> int | None:
    """The first batch up to `limit` that is not memory-bound, by trying them in order."""
    goal = ridge(accelerator)
    return next((b for b in range(1, limit + 1) if intensity(model, context_len, b, dtype) >= goal), None)


PUBLISHED = [
    (specs.LLAMA_3_8B, specs.A100_40GB, 0, "float16"),
    (specs.LLAMA_3_8B, specs.A100_40GB, 256, "float16"),
    (specs.LLAMA_3_8B, specs.H100, 256, "bfloat16"),
    (specs.LLAMA_3_8B, specs.H100, 512, "int8"),
    (specs.LLAMA_3_70B, specs.A100_80GB, 2048, "float16"),
    (specs.OPT_13B, specs.A100_40GB, 0, "float16"),
    (specs.QWEN3_8B, specs.H200, 0, "bfloat16"),
    (specs.QWEN3_32B, specs.L4, 100, "float8_e4m3"),
    (specs.MINIGPT, specs.LAPTOP_CPU, 10, "float32"),
]


PUBLISHED_IDS = [
    "llama-3-8b on a100-40gb, context 0",
    "llama-3-8b on a100-40gb, context 256",
    "llama-3-8b on h100, context 256",
    "llama-3-8b in int8 on h100, context 512",
    "llama-3-70b on a100-80gb, context 2048",
    "opt-13b on a100-40gb, context 0",
    "qwen3-8b on h200, context 0",
    "qwen3-32b in float8 on l4, context 100",
    "minigpt in float32 on a laptop, context 10",
]


@pytest.mark.parametrize(("model", "accelerator", "context_len", "dtype"), PUBLISHED, ids=PUBLISHED_IDS)
def test_it_is_the_first_batch_that_reaches_the_ridge(
    model: Transformer, accelerator: Accelerator, context_len: int, dtype: str
) -> None:
    """The smallest batch whose decode step is not memory-bound, as found by trying 1, 2, 3, …"""
    expected = first_batch(model, accelerator, context_len, dtype, limit=1000)
    call(break_even_batch, model, on(accelerator), context_len, dtype).gives(expected)


def test_llama_3_8b_on_an_a100_by_context() -> None:
    """A longer context needs a larger batch, until none is large enough: None."""
    call(break_even_batch, specs.LLAMA_3_8B, on(specs.A100_40GB), 0).gives(201)
    call(break_even_batch, specs.LLAMA_3_8B, on(specs.A100_40GB), 256).gives(342)
    call(break_even_batch, specs.LLAMA_3_8B, on(specs.A100_40GB), 1024).gives(None)


@pytest.mark.parametrize(
    ("model", "accelerator", "context_len"),
    [
        (specs.OPT_13B, specs.A100_40GB, 512),
        (specs.LLAMA_3_8B, specs.H100, 4096),
        (specs.LLAMA_3_70B, specs.H200, 65_536),
    ],
    ids=["opt-13b on a100-40gb, context 512", "llama-3-8b on h100, context 4096", "llama-3-70b on h200, context 65536"],
)
def test_a_long_context_keeps_decode_memory_bound_for_ever(
    model: Transformer, accelerator: Accelerator, context_len: int
) -> None:
    """If a sequence's FLOPs per byte of cache are below the ridge, no batch is large enough: None."""
    call(break_even_batch, model, on(accelerator), context_len).gives(None)


def test_a_single_sequence_can_be_enough() -> None:
    """A slow processor with a fast memory is compute-bound at batch 1."""
    slow = Accelerator("slow processor", 1024, bandwidth=100.0, peak_flops=10.0)
    call(break_even_batch, specs.LLAMA_3_8B, on(slow), 0).gives(1)


@pytest.mark.parametrize("context_len", [0, 1, 100, 1_000_000])
def test_a_step_exactly_at_the_ridge_is_not_memory_bound(context_len: int) -> None:
    """Eight query heads to a KV head, ridge 8: a batch of 8 lies exactly on the ridge, and is the answer."""
    # Eight query heads to one KV head: attention alone lies on this machine's ridge, 8, whatever the context. So do
    # the weights at a batch of 8.
    model = Transformer(3, 16, 8, 1, 2, num_parameters=1000)
    machine = Accelerator("toy", 1024, bandwidth=4.0, peak_flops=32.0)
    call(break_even_batch, model, on(machine), context_len).gives(8)


@pytest.mark.parametrize(("num_parameters", "peak_flops", "batch"), [(4, 7.0, 7), (11, 14.0, 14), (8, 14.0, 56)])
def test_a_batch_exactly_at_the_ridge_is_not_missed_by_rounding(
    num_parameters: int, peak_flops: float, batch: int
) -> None:
    """A ridge of 7/3 or 14/3, which no float can represent: the batch exactly on it is the answer."""
    # Ties whose ridge is a third of a whole number, which a float cannot hold. The first: 7 sequences of 12 FLOPs each
    # over 8 + 7 · 4 bytes are 7/3 FLOP/byte, exactly the ridge; the formula computed in floats gives 8.
    model = Transformer(1, 1, 1, 1, 1, num_parameters=num_parameters)
    machine = Accelerator("toy", 1024, bandwidth=3.0, peak_flops=peak_flops)
    tie = intensity(model, 0, batch, "float16") == ridge(machine)
    that(f"whether a batch of {batch} lies exactly on the ridge", tie).gives(True)
    call(break_even_batch, model, on(machine), 0).gives(batch)


def test_a_limit_that_is_only_the_ridge_is_never_reached() -> None:
    """With free weights the ridge would just be reached: with weights to read, no batch reaches it."""
    # A sequence does 2 · 20 + 4 · 5 = 60 FLOPs for the 20 bytes of its cache: exactly the ridge of 3 with free weights.
    model = Transformer(1, 1, 1, 1, 1, num_parameters=20)
    machine = Accelerator("toy", 1024, bandwidth=1.0, peak_flops=3.0)
    call(break_even_batch, model, on(machine), 4).gives(None)
    call(break_even_batch, model, on(machine), 5).gives(None)
    call(break_even_batch, model, machine, 3).gives(first_batch(model, machine, 3, "float16", limit=1000))


def test_latent_attention_can_pass_the_ridge_at_any_context() -> None:
    """128 heads share a latent, 256 FLOP/byte: some batch reaches the ridge at any context."""
    # 128 heads share each latent: 4 · 128 FLOPs for every number of 2 bytes, 256 FLOP/byte.
    model = Transformer(8, 4096, 128, 128, 128, num_parameters=8_000_000_000, kv_latent_dim=576)
    expected = first_batch(model, specs.A100_40GB, 65_536, "float16", limit=1000)
    that("whether such a batch exists, by trying", expected is not None).gives(True)
    call(break_even_batch, model, specs.A100_40GB, 65_536).gives(expected)


@st.composite
def transformers(draw: st.DrawFn) -> Transformer:
    kv_heads = draw(st.integers(1, 3))
    return Transformer(
        num_layers=draw(st.integers(1, 4)),
        hidden_size=16,
        num_heads=kv_heads * draw(st.integers(1, 4)),
        num_kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 8)),
        num_parameters=draw(st.integers(1, 2000)),
        kv_latent_dim=draw(st.none() | st.integers(1, 20)),
    )


# Bandwidths are powers of two: every ridge is exact as a float, so these tests judge the formula alone.
machines = st.builds(
    Accelerator, st.just("any"), st.just(1), bandwidth=st.sampled_from([1.0, 2.0, 4.0]), peak_flops=st.integers(1, 90)
)


@given(
    model=transformers(), accelerator=machines, context_len=st.integers(0, 60), dtype=st.sampled_from(sorted(NBYTES))
)
def test_one_sequence_fewer_is_still_memory_bound(
    model: Transformer, accelerator: Accelerator, context_len: int, dtype: str
) -> None:
    """Any model: the answer reaches the ridge, and one sequence fewer does not."""
    goal = ridge(accelerator)
    if Fraction(*one_sequence(model, context_len, dtype)) <= goal:  # even if reading the weights cost nothing
        call(break_even_batch, model, accelerator, context_len, dtype).gives(None)
        return
    assume(intensity(model, context_len, 3000, dtype) >= goal)  # trying will find an answer
    answer = call(break_even_batch, model, accelerator, context_len, dtype)
    batch = answer.value
    that(f"the type of {answer.called}", type(batch)).gives(int)
    reached = intensity(model, context_len, batch, dtype) >= goal
    that(f"whether a batch of {batch} reaches the ridge, from {answer.called}", reached).gives(True)
    if batch > 1:
        too_early = intensity(model, context_len, batch - 1, dtype) >= goal
        that(f"whether {batch - 1} would already reach the ridge, from {answer.called}", too_early).gives(False)


def test_bad_input_is_refused() -> None:
    """A negative context or an unknown dtype: ValueError; not an int: TypeError."""
    call(break_even_batch, specs.OPT_13B, specs.H100, -1).raises(ValueError)
    call(break_even_batch, specs.OPT_13B, specs.H100, 10.5).raises(TypeError)
    call(break_even_batch, specs.OPT_13B, specs.H100, 10, "fp8").raises(ValueError, saying="fp8")
