"""Phase 0, task 3: weights and cache against a memory."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicache.arithmetic import specs
from minicache.arithmetic.arithmetic import cache_capacity_tokens, max_concurrent_sequences, weight_bytes
from minicache.arithmetic.specs import GIB
from minicache_course.checks import call, that
from minicache_course.seeds import one_of

NBYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1, "int8": 1}

TIMES = one_of(1, range(2, 10))  # under a secret seed, everything is so many times as large


def test_weights_of_published_models() -> None:
    """Parameters times the bytes of the dtype they are in."""
    call(weight_bytes, TIMES * specs.LLAMA_3_8B.num_parameters, "bfloat16").gives(TIMES * 16_060_522_496)
    call(weight_bytes, TIMES * specs.OPT_13B.num_parameters).gives(TIMES * 25_706_946_560)
    call(weight_bytes, TIMES * specs.LLAMA_3_70B.num_parameters, "int8").gives(TIMES * 70_553_706_496)


@given(num_parameters=st.integers(1, 10**13), dtype=st.sampled_from(sorted(NBYTES)))
def test_weights_take_their_dtype_each(num_parameters: int, dtype: str) -> None:
    """Any number of parameters in any dtype: so many times its bytes."""
    call(weight_bytes, num_parameters, dtype).gives(num_parameters * NBYTES[dtype])


# The PagedAttention paper, table 1: memory for the cache and the slots in it. Its "GB" are GiB, as these two rows show.
@pytest.mark.parametrize(
    ("model", "cache_gib", "bytes_per_token", "slots"),
    [("OPT-13B", 12, 2 * 40 * 5120 * 2, 15_728), ("OPT-175B", 264, 2 * 96 * 12_288 * 2, 60_074)],
    ids=["opt-13b", "opt-175b"],
)
def test_slots_of_the_pagedattention_paper(model: str, cache_gib: int, bytes_per_token: int, slots: int) -> None:
    """12 GiB for OPT-13B and 264 GiB for OPT-175B: the slots of the paper's table, rounded down."""
    call(cache_capacity_tokens, TIMES * cache_gib * GIB, 0, TIMES * bytes_per_token).gives(slots)


def test_opt_13b_on_an_a100() -> None:
    """OPT-13B on an A100-40GB: both weights and reserve are subtracted from the memory."""
    memory, weights, row = TIMES * 40 * GIB, TIMES * 25_706_946_560, TIMES * 819_200
    call(cache_capacity_tokens, memory, weights, row).gives(21_048)
    call(cache_capacity_tokens, memory, weights, row, reserved_bytes=TIMES * 4 * GIB).gives(15_805)


@given(
    weights=st.integers(0, 10**6),
    reserved=st.integers(0, 10**6),
    bytes_per_token=st.integers(1, 5000),
    left=st.integers(0, 10**6),
)
def test_one_token_more_would_not_fit(weights: int, reserved: int, bytes_per_token: int, left: int) -> None:
    """Weights, reserve and the tokens fit into the memory, and one token more would not."""
    memory = weights + reserved + left or 1
    answer = call(cache_capacity_tokens, memory, weights, bytes_per_token, reserved_bytes=reserved)
    tokens = answer.value
    that(f"the type of {answer.called}", type(tokens)).gives(int)
    taken = weights + reserved + tokens * bytes_per_token
    that(f"whether {tokens} tokens fit, from {answer.called}", taken <= memory).gives(True)
    that(f"whether {tokens + 1} tokens fit, from {answer.called}", taken + bytes_per_token <= memory).gives(False)


def test_big_numbers_are_exact() -> None:
    """3 · 2⁶⁰ − 1 bytes, 3 a token: 2⁶⁰ − 1 tokens, which only integer division gives."""
    call(cache_capacity_tokens, 3 * 2**60 - 1, 0, 3).gives(2**60 - 1)
    call(max_concurrent_sequences, 3 * 2**60 - 1, 3).gives(2**60 - 1)


def test_a_memory_full_of_weights_holds_no_token() -> None:
    """Weights and reserve that fill the memory exactly leave 0 tokens, without an error."""
    call(cache_capacity_tokens, 1000 * TIMES, 1000 * TIMES, 10).gives(0)
    call(cache_capacity_tokens, 1000 * TIMES, 600 * TIMES, 10, reserved_bytes=400 * TIMES).gives(0)
    call(cache_capacity_tokens, 1000 * TIMES, 1000 * TIMES - 9, 10).gives(0)


def test_weights_that_do_not_fit_are_an_error() -> None:
    """Weights and reserve larger than the memory: ValueError, with the missing bytes."""
    call(cache_capacity_tokens, 1000, 1001, 10).raises(ValueError)
    call(cache_capacity_tokens, 1000, 800, 10, reserved_bytes=201).raises(ValueError)
    call(cache_capacity_tokens, 1000, 0, 10, reserved_bytes=1001).raises(ValueError)
    call(cache_capacity_tokens, 1000, 1237, 10).raises(ValueError, saying="237")
    call(cache_capacity_tokens, 24 * GIB, 25_706_946_560, 819_200, reserved_bytes=GIB).raises(ValueError)


def test_reserved_bytes_goes_by_name_only() -> None:
    """reserved_bytes=100 is accepted; a fifth positional argument is a TypeError."""
    call(cache_capacity_tokens, 1000, 100, 10, reserved_bytes=100).gives(80)
    call(cache_capacity_tokens, 1000, 100, 10, 100).raises(TypeError)


@pytest.mark.parametrize(
    ("capacity", "each", "sequences"),
    [(15_728, 2048, 7), (16_384, 2048, 8), (16_383, 2048, 7), (100, 101, 0), (0, 5, 0), (5, 1, 5)],
    ids=["opt-13b", "just full", "one token short", "none fits", "no room", "one token each"],
)
def test_concurrent_sequences(capacity: int, each: int, sequences: int) -> None:
    """As many whole sequences as the tokens allow, rounded down."""
    call(max_concurrent_sequences, TIMES * capacity, TIMES * each).gives(sequences)


@given(capacity=st.integers(0, 10**6), each=st.integers(1, 3000))
def test_one_sequence_more_would_not_fit(capacity: int, each: int) -> None:
    """The sequences fit, and one more would not."""
    sequences = call(max_concurrent_sequences, capacity, each).value
    fits = sequences * each <= capacity < (sequences + 1) * each
    that(f"whether {sequences} sequences of {each} tokens are the most that fit into {capacity}", fits).gives(True)


@pytest.mark.parametrize("wrong", [0, -5])
def test_sizes_below_one_are_refused(wrong: int) -> None:
    """A size below 1: ValueError."""
    call(weight_bytes, wrong).raises(ValueError)
    call(cache_capacity_tokens, wrong, 0, 10).raises(ValueError)
    call(cache_capacity_tokens, 1000, 0, wrong).raises(ValueError)
    call(max_concurrent_sequences, 100, wrong).raises(ValueError)


def test_negative_sizes_are_refused() -> None:
    """Negative weights, reserve or tokens: ValueError."""
    call(cache_capacity_tokens, 1000, -1, 10).raises(ValueError)
    call(cache_capacity_tokens, 1000, 0, 10, reserved_bytes=-1).raises(ValueError)
    call(max_concurrent_sequences, -1, 10).raises(ValueError)


@pytest.mark.parametrize("wrong", [1.5, 26e9, "7"])
def test_sizes_that_are_no_int_are_refused(wrong: object) -> None:
    """A float or a string for a size: TypeError."""
    call(weight_bytes, wrong).raises(TypeError)
    call(cache_capacity_tokens, wrong, 0, 10).raises(TypeError)
    call(cache_capacity_tokens, 10**12, wrong, 10).raises(TypeError)
    call(cache_capacity_tokens, 10**12, 0, wrong).raises(TypeError)
    call(cache_capacity_tokens, 10**12, 0, 10, reserved_bytes=wrong).raises(TypeError)
    call(max_concurrent_sequences, wrong, 10).raises(TypeError)
    call(max_concurrent_sequences, 100, wrong).raises(TypeError)


def test_an_unknown_dtype_is_refused() -> None:
    """Weights in an unknown dtype: ValueError that names it."""
    call(weight_bytes, 10, "fp16").raises(ValueError, saying="fp16")
