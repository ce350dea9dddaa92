"""Phase 0, task 2: bytes per token, for heads and for latents."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minicache.arithmetic import specs
from minicache.arithmetic.arithmetic import cache_bytes_per_token, dtype_nbytes, kv_bytes_per_token, mla_bytes_per_token
from minicache_course.checks import call
from minicache_course.seeds import one_of

NBYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1, "int8": 1}

counts = st.integers(1, 200)
dtypes = st.sampled_from(sorted(NBYTES))

TIMES = one_of(1, range(2, 10))  # under a secret seed, the published models have so many times their layers


@pytest.mark.parametrize(("dtype", "nbytes"), NBYTES.items())
def test_dtype_nbytes(dtype: str, nbytes: int) -> None:
    """Bytes, not bits, of one number of each dtype."""
    call(dtype_nbytes, dtype).gives(nbytes)


@pytest.mark.parametrize("dtype", ["int4", "float64", "", "Float16", "torch.float16"])
def test_an_unknown_dtype_is_refused_and_the_known_ones_listed(dtype: str) -> None:
    """An unknown dtype: ValueError, whose message has the dtype and all known ones."""
    for known in NBYTES:
        call(dtype_nbytes, dtype).raises(ValueError, saying=known)
    call(dtype_nbytes, dtype).raises(ValueError, saying=dtype)


# 800 KB a token is the PagedAttention paper's own figure for OPT-13B (section 3).
@pytest.mark.parametrize(
    ("model", "heads", "nbytes"),
    [
        ("OPT-13B", (40, 40, 128), 800 * 1024),
        ("Llama-3-8B", (32, 8, 128), 128 * 1024),
        ("Llama-3-70B", (80, 8, 128), 320 * 1024),
        ("Qwen3-8B", (36, 8, 128), 144 * 1024),
        ("one layer, multi-query", (1, 1, 64), 256),
    ],
    ids=["opt-13b", "llama-3-8b", "llama-3-70b", "qwen3-8b", "one layer, multi-query"],
)
def test_published_models_in_float16(model: str, heads: tuple[int, int, int], nbytes: int) -> None:
    """A key and a value per layer and KV head, of head_dim numbers each, in two bytes."""
    num_layers, num_kv_heads, head_dim = heads
    call(kv_bytes_per_token, TIMES * num_layers, num_kv_heads, head_dim).gives(TIMES * nbytes)


@given(num_layers=st.integers(1, 5), num_kv_heads=st.integers(1, 5), head_dim=st.integers(1, 9), dtype=dtypes)
def test_every_number_in_the_cache_is_counted_once(
    num_layers: int, num_kv_heads: int, head_dim: int, dtype: str
) -> None:
    """Layers, KV heads, key and value, head_dim: the bytes of all numbers, counted one by one."""
    stored = [
        (layer, head, kind, index)
        for layer in range(num_layers)
        for head in range(num_kv_heads)
        for kind in ("key", "value")
        for index in range(head_dim)
    ]
    call(kv_bytes_per_token, num_layers, num_kv_heads, head_dim, dtype).gives(len(stored) * NBYTES[dtype])


@given(num_layers=counts, num_kv_heads=counts, head_dim=counts, factor=st.integers(2, 9))
def test_it_grows_in_proportion_to_each_count(num_layers: int, num_kv_heads: int, head_dim: int, factor: int) -> None:
    """n times the layers, the KV heads or the head_dim: n times the bytes."""
    once = call(kv_bytes_per_token, num_layers, num_kv_heads, head_dim).value
    call(kv_bytes_per_token, factor * num_layers, num_kv_heads, head_dim).gives(factor * once)
    call(kv_bytes_per_token, num_layers, factor * num_kv_heads, head_dim).gives(factor * once)
    call(kv_bytes_per_token, num_layers, num_kv_heads, factor * head_dim).gives(factor * once)


@pytest.mark.parametrize(
    ("case", "layers", "rank", "rope", "dtype", "nbytes"),
    [
        ("DeepSeek-V2", 60, 512, 64, "bfloat16", 69_120),
        ("DeepSeek-V3", 61, 512, 64, "bfloat16", 70_272),
        ("DeepSeek-V3 in float8", 61, 512, 64, "float8_e4m3", 35_136),
        ("no RoPE part", 2, 16, 0, "float32", 128),
    ],
    ids=["deepseek-v2", "deepseek-v3", "deepseek-v3 in float8", "no rope part"],
)
def test_latent_attention(case: str, layers: int, rank: int, rope: int, dtype: str, nbytes: int) -> None:
    """A latent and a RoPE key per layer, once for keys and values together, in the dtype's bytes."""
    call(mla_bytes_per_token, TIMES * layers, rank, rope, dtype).gives(TIMES * nbytes)


@given(num_layers=counts, rank=counts, rope=st.integers(0, 200), dtype=dtypes)
def test_a_latent_row_is_latent_and_rope_key_side_by_side(num_layers: int, rank: int, rope: int, dtype: str) -> None:
    """Any latent: (rank + rope) numbers per layer, counted one by one."""
    row = [0] * rank + [0] * rope
    call(mla_bytes_per_token, num_layers, rank, rope, dtype).gives(
        sum(len(row) for _ in range(num_layers)) * NBYTES[dtype]
    )


def test_the_default_is_float16() -> None:
    """Without a dtype, a number takes two bytes."""
    call(kv_bytes_per_token, 3 * TIMES, 5, 7).gives(420 * TIMES)
    call(mla_bytes_per_token, 3 * TIMES, 5, 7).gives(72 * TIMES)
    call(cache_bytes_per_token, specs.LLAMA_3_8B).gives(131_072)


@pytest.mark.parametrize(
    ("model", "dtype", "nbytes"),
    [
        (specs.OPT_13B, "float16", 819_200),
        (specs.LLAMA_3_8B, "bfloat16", 131_072),
        (specs.LLAMA_3_8B, "int8", 65_536),
        (specs.QWEN3_32B, "bfloat16", 262_144),
        (specs.MINIGPT, "float32", 2_048),
        (specs.DEEPSEEK_V3, "bfloat16", 70_272),
    ],
    ids=["opt-13b", "llama-3-8b", "llama-3-8b in int8", "qwen3-32b", "minigpt in float32", "deepseek-v3"],
)
def test_a_model_has_one_cache_or_the_other(model: specs.Transformer, dtype: str, nbytes: int) -> None:
    """A model with a latent stores that; any other stores keys and values of its KV heads."""
    call(cache_bytes_per_token, replace(model, num_layers=TIMES * model.num_layers), dtype).gives(TIMES * nbytes)


def test_query_heads_leave_nothing_in_the_cache() -> None:
    """Query heads are not cached: only the KV heads count."""
    few = specs.Transformer(4 * TIMES, 128, 2, 2, 32, num_parameters=1000)
    many = specs.Transformer(4 * TIMES, 128, 16, 2, 32, num_parameters=1000)
    call(cache_bytes_per_token, few).gives(1024 * TIMES)
    call(cache_bytes_per_token, many).gives(1024 * TIMES)


@pytest.mark.parametrize("wrong", [0, -1])
def test_a_count_below_one_is_refused(wrong: int) -> None:
    """No layers, no heads, no numbers, or fewer: ValueError."""
    call(kv_bytes_per_token, wrong, 2, 3).raises(ValueError)
    call(kv_bytes_per_token, 2, wrong, 3).raises(ValueError)
    call(kv_bytes_per_token, 2, 3, wrong).raises(ValueError)
    call(mla_bytes_per_token, wrong, 2, 3).raises(ValueError)
    call(mla_bytes_per_token, 2, wrong, 3).raises(ValueError)
    call(mla_bytes_per_token, 2, 3, -1).raises(ValueError)


@pytest.mark.parametrize("wrong", [1.5, 2.0, "2", None])
def test_a_count_that_is_no_int_is_refused(wrong: object) -> None:
    """A float, a string or None for a count: TypeError."""
    call(kv_bytes_per_token, wrong, 2, 3).raises(TypeError)
    call(kv_bytes_per_token, 2, wrong, 3).raises(TypeError)
    call(kv_bytes_per_token, 2, 3, wrong).raises(TypeError)
    call(mla_bytes_per_token, wrong, 2, 3).raises(TypeError)
    call(mla_bytes_per_token, 2, wrong, 3).raises(TypeError)
    call(mla_bytes_per_token, 2, 3, wrong).raises(TypeError)


def test_an_unknown_dtype_is_refused_everywhere() -> None:
    """Every function that takes a dtype refuses an unknown one: ValueError."""
    call(kv_bytes_per_token, 2, 2, 2, "int4").raises(ValueError, saying="int4")
    call(mla_bytes_per_token, 2, 2, 2, "int4").raises(ValueError, saying="int4")
    call(cache_bytes_per_token, specs.OPT_13B, "int4").raises(ValueError, saying="int4")
    call(cache_bytes_per_token, specs.DEEPSEEK_V3, "int4").raises(ValueError, saying="int4")
