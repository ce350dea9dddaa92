"""Phase 0, task 4: FLOPs and bytes of one forward pass, and their ratio."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicache.arithmetic import specs
from minicache.arithmetic.arithmetic import arithmetic_intensity, step_bytes, step_flops
from minicache.arithmetic.specs import Transformer
from minicache_course.checks import call, that
from minicache_course.seeds import one_of

NBYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1, "int8": 1}

TIMES = one_of(1, range(2, 10))  # under a secret seed, batches have so many times their sequences


@st.composite
def transformers(draw: st.DrawFn) -> Transformer:
    kv_heads = draw(st.integers(1, 4))
    return Transformer(
        num_layers=draw(st.integers(1, 5)),
        hidden_size=draw(st.integers(1, 64)),
        num_heads=kv_heads * draw(st.integers(1, 4)),
        num_kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 16)),
        num_parameters=draw(st.integers(1, 5000)),
        kv_latent_dim=draw(st.none() | st.integers(1, 40)),
    )


new_tokens, contexts, batches = st.integers(1, 12), st.integers(0, 30), st.integers(1, 6)
dtypes = st.sampled_from(sorted(NBYTES))


def flops_one_by_one(model: Transformer, num_new_tokens: int, context_len: int) -> int:
    """One sequence, counted token by token and position by position."""
    flops = 0
    for token in range(num_new_tokens):
        flops += 2 * model.num_parameters
        for _position in range(context_len + token + 1):
            width = model.kv_latent_dim or model.head_dim
            score, mix = 2 * width, 2 * width
            flops += model.num_layers * model.num_heads * (score + mix)
    return flops


def test_arguments_have_names_and_defaults() -> None:
    """2 layers, 4 query heads and 2 KV heads of 3 numbers, 100 weights: small steps, with arguments by name."""
    model = Transformer(2, 8, 4, 2, 3, num_parameters=100)
    call(step_flops, model, num_new_tokens=2, batch_size=3 * TIMES).gives(3 * TIMES * (400 + 4 * 2 * 4 * 3 * 3))
    call(step_bytes, model, num_new_tokens=2, context_len=5).gives(200 + 7 * 48)
    call(step_bytes, model, 2, dtype="int8", batch_size=3 * TIMES).gives(100 + 3 * TIMES * 2 * 24)


def test_one_token_of_llama_3_8b() -> None:
    """One token: 2 FLOPs per weight, 4 · 32 layers · 32 heads · 128 for itself; the weights read, one entry written."""
    # 2 FLOPs for each of 8,030,261,248 weights; attention to itself: 4 · 32 layers · 32 heads · 128.
    call(step_flops, specs.LLAMA_3_8B, 1).gives(16_060_522_496 + 524_288)
    # Weights in two bytes, and one KV entry of 131,072 bytes to write.
    call(step_bytes, specs.LLAMA_3_8B, 1).gives(16_060_522_496 + 131_072)


def test_a_decode_step_after_1000_tokens() -> None:
    """The 1,001st token attends to 1,001 positions: it reads 1,000 KV entries and writes one."""
    call(step_flops, specs.LLAMA_3_8B, 1, 1000).gives(16_060_522_496 + 1001 * 524_288)
    call(step_bytes, specs.LLAMA_3_8B, 1, 1000).gives(16_060_522_496 + 1001 * 131_072)


def test_a_prefill_of_four_tokens() -> None:
    """A new token attends to itself and to those before it: four new ones to 1 + 2 + 3 + 4 = 10 positions."""
    call(step_flops, specs.LLAMA_3_8B, 4).gives(4 * 16_060_522_496 + 10 * 524_288)
    call(step_bytes, specs.LLAMA_3_8B, 4).gives(16_060_522_496 + 4 * 131_072)


def test_a_batch_of_32() -> None:
    """A batch reads the weights once, but every sequence does its own FLOPs with them and has its own cache."""
    batch_size = 32 * TIMES
    call(step_flops, specs.LLAMA_3_8B, 1, 1000, batch_size).gives(batch_size * (16_060_522_496 + 1001 * 524_288))
    call(step_bytes, specs.LLAMA_3_8B, 1, 1000, batch_size).gives(16_060_522_496 + batch_size * 1001 * 131_072)


def test_latent_attention_reads_few_bytes_and_does_many_flops() -> None:
    """With a latent, all query heads work on kv_latent_dim numbers, stored once."""
    model = Transformer(2, 8, 4, 4, 3, num_parameters=100 * TIMES, kv_latent_dim=5)
    call(step_flops, model, 1, 9).gives(2 * 100 * TIMES + 4 * 2 * 4 * 5 * 10)
    call(step_bytes, model, 1, 9).gives(2 * 100 * TIMES + 10 * 2 * 5 * 2)


@given(model=transformers(), num_new_tokens=new_tokens, context_len=contexts, batch_size=batches)
def test_flops_counted_one_by_one(model: Transformer, num_new_tokens: int, context_len: int, batch_size: int) -> None:
    """Any step: the FLOPs, counted token by token and position by position."""
    expected = batch_size * flops_one_by_one(model, num_new_tokens, context_len)
    call(step_flops, model, num_new_tokens, context_len, batch_size).gives(expected)


@given(model=transformers(), num_new_tokens=new_tokens, context_len=contexts, batch_size=batches, dtype=dtypes)
def test_bytes_counted_one_by_one(
    model: Transformer, num_new_tokens: int, context_len: int, batch_size: int, dtype: str
) -> None:
    """Any step: the bytes of the weights and of each sequence's KV entries, counted one by one."""
    numbers = model.num_parameters
    for _sequence in range(batch_size):
        for _entry in range(context_len + num_new_tokens):
            numbers += model.num_layers * (model.kv_latent_dim or 2 * model.num_kv_heads * model.head_dim)
    call(step_bytes, model, num_new_tokens, context_len, batch_size, dtype).gives(numbers * NBYTES[dtype])


@given(model=transformers(), chunks=st.lists(new_tokens, min_size=2, max_size=4), context_len=contexts)
def test_a_prompt_in_chunks_costs_the_same_flops(model: Transformer, chunks: list[int], context_len: int) -> None:
    """A prompt costs as many FLOPs in chunks as at once."""
    whole = call(step_flops, model, sum(chunks), context_len).value
    starts = [context_len + sum(chunks[:i]) for i in range(len(chunks))]
    in_chunks = sum(call(step_flops, model, *chunk).value for chunk in zip(chunks, starts, strict=True))
    that(f"FLOPs of {sum(chunks)} new tokens in chunks of {chunks}", in_chunks).gives(whole)


@given(model=transformers(), context_len=contexts, batch_size=batches, dtype=dtypes)
def test_the_batch_shares_the_weights(model: Transformer, context_len: int, batch_size: int, dtype: str) -> None:
    """A batch of B reads the weights once, which saves B − 1 times their bytes."""
    one, many = (call(step_bytes, model, 1, context_len, batch, dtype).value for batch in (1, batch_size))
    saved = (batch_size - 1) * model.num_parameters * NBYTES[dtype]
    that(f"bytes that a batch of {batch_size} saves", batch_size * one - many).gives(saved)


@pytest.mark.parametrize(("flops", "nbytes", "intensity"), [(312, 1.5, 208.0), (10, 20, 0.5), (7, 7, 1.0)])
def test_intensity_is_flops_per_byte(flops: float, nbytes: float, intensity: float) -> None:
    """FLOPs divided by bytes."""
    call(arithmetic_intensity, TIMES * flops, TIMES * nbytes).is_close(intensity, rtol=1e-12, atol=0)


def test_intensity_of_one_sequence_is_about_its_new_tokens() -> None:
    """Llama-3-8B in 16 bits: about one FLOP a byte for each new token."""
    model = specs.LLAMA_3_8B
    for tokens in (1, 512):
        flops, nbytes = call(step_flops, model, tokens).value, call(step_bytes, model, tokens).value
        call(arithmetic_intensity, flops, nbytes).is_near(tokens, 0.01)


@pytest.mark.parametrize("count", [step_flops, step_bytes])
def test_impossible_counts_are_refused(count: object) -> None:
    """No new tokens, a negative context, an empty batch: ValueError; not an int: TypeError."""
    model = specs.MINIGPT
    call(count, model, 0).raises(ValueError)
    call(count, model, -1).raises(ValueError)
    call(count, model, 1, -1).raises(ValueError)
    call(count, model, 1, 0, 0).raises(ValueError)
    call(count, model, 1.0).raises(TypeError)
    call(count, model, 1, 2.5).raises(TypeError)
    call(count, model, 1, 2, "3").raises(TypeError)


def test_an_unknown_dtype_is_refused() -> None:
    """A step in an unknown dtype: ValueError that names it."""
    call(step_bytes, specs.MINIGPT, 1, dtype="half").raises(ValueError, saying="half")


@pytest.mark.parametrize("wrong", [0, -1, 0.0, float("nan"), float("inf")])
def test_intensity_of_nothing_is_refused(wrong: float) -> None:
    """FLOPs or bytes that are 0, negative, NaN or infinite: ValueError."""
    call(arithmetic_intensity, wrong, 10).raises(ValueError)
    call(arithmetic_intensity, 10, wrong).raises(ValueError)


def test_intensity_of_no_numbers_is_refused() -> None:
    """FLOPs or bytes that are not numbers: TypeError."""
    call(arithmetic_intensity, "10", 10).raises(TypeError)
    call(arithmetic_intensity, 10, None).raises(TypeError)
