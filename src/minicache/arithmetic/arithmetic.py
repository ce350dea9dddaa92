"""The cost of a token in bytes and FLOPs, and which of the two limits a step.

Phase 0 builds it: the size of the KV cache, what fits in a memory, and the roofline of prefill and decode. One small
model of a forward pass, `step_flops` and `step_bytes`, covers both; the docstrings list its simplifications.
Bytes and FLOPs are whole numbers (int) and exact; intensities, rates and seconds are floats.
"""

from __future__ import annotations

import math
from fractions import Fraction

from minicache.arithmetic.specs import Accelerator, Transformer
from minicache.errors import require_count, require_positive

_DTYPE_NBYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1, "int8": 1}


def dtype_nbytes(dtype: str) -> int:
    """The bytes of one number.

    float32: 4. bfloat16 and float16: 2. float8_e4m3 and int8: 1. Four-bit formats are not here: two numbers share a
    byte and a group of them shares a scale, so a number does not take a whole number of bytes.

    Args:
        dtype: one of the five names above, as PyTorch writes them except for the suffix of float8.

    Returns:
        Bytes, not bits.

    Raises:
        ValueError: an unknown name. The message repeats it and lists the known ones.
    """
    if dtype not in _DTYPE_NBYTES:
        raise ValueError(f"unknown dtype {dtype!r}: known are {', '.join(_DTYPE_NBYTES)}")
    return _DTYPE_NBYTES[dtype]


def kv_bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: str = "float16") -> int:
    """Bytes that one token takes in a cache of keys and values: 2 · L · H_kv · d numbers.

    A key and a value, each of `head_dim` numbers, for every KV head of every layer. It depends on the KV heads, not
    on the query heads: multi-head attention has one KV head per query head, grouped-query attention fewer, multi-query
    attention one in all.

    Args:
        num_layers: attention layers (L), ≥ 1.
        num_kv_heads: key/value heads per layer (H_kv), ≥ 1.
        head_dim: size of one head (d), ≥ 1.
        dtype: what the cache stores, see `dtype_nbytes`.

    Returns:
        Bytes per token of one sequence, all layers together.

    Raises:
        TypeError: a count is not an int.
        ValueError: a count is below 1, or the dtype is unknown.
    """
    require_count("num_layers", num_layers)
    require_count("num_kv_heads", num_kv_heads)
    require_count("head_dim", head_dim)
    return 2 * num_layers * num_kv_heads * head_dim * dtype_nbytes(dtype)


def mla_bytes_per_token(num_layers: int, kv_lora_rank: int, qk_rope_head_dim: int, dtype: str = "float16") -> int:
    """Bytes that one token takes in the cache of multi-head latent attention: L · (rank + rope) numbers.

    The latent is stored once per layer: the keys and values of all heads are made from it, so nothing is counted
    twice and the number of heads does not matter. The part of the key that carries RoPE cannot be made from the
    latent, so it is stored as well; all heads share it too (DeepSeek-V2, section 2.1).

    Args:
        num_layers: attention layers (L), ≥ 1.
        kv_lora_rank: size of the latent, ≥ 1; 512 in DeepSeek-V2 and -V3.
        qk_rope_head_dim: size of the RoPE part of the key, ≥ 0; 64 in DeepSeek-V2 and -V3.
        dtype: what the cache stores, see `dtype_nbytes`.

    Returns:
        Bytes per token of one sequence, all layers together.

    Raises:
        TypeError: a count is not an int.
        ValueError: a count is below its bound, or the dtype is unknown.
    """
    require_count("num_layers", num_layers)
    require_count("kv_lora_rank", kv_lora_rank)
    require_count("qk_rope_head_dim", qk_rope_head_dim, at_least=0)
    return num_layers * (kv_lora_rank + qk_rope_head_dim) * dtype_nbytes(dtype)


def cache_bytes_per_token(model: Transformer, dtype: str = "float16") -> int:
    """Bytes that one token takes in the cache of `model`, whichever kind of cache it has.

    A model whose `kv_latent_dim` is a number caches that many numbers per layer, latent and RoPE part together.
    If it is None, the model caches keys and values of its KV heads.

    Args:
        model: the transformer.
        dtype: what the cache stores, see `dtype_nbytes`.

    Returns:
        Bytes per token of one sequence, all layers together.

    Raises:
        ValueError: the dtype is unknown.
    """
    if model.kv_latent_dim is not None:
        return mla_bytes_per_token(model.num_layers, model.kv_latent_dim, 0, dtype)
    return kv_bytes_per_token(model.num_layers, model.num_kv_heads, model.head_dim, dtype)


def weight_bytes(num_parameters: int, dtype: str = "float16") -> int:
    """Bytes that the weights take.

    Args:
        num_parameters: all weights, embeddings included, ≥ 1.
        dtype: what they are stored in, see `dtype_nbytes`.

    Returns:
        Bytes.

    Raises:
        TypeError: `num_parameters` is not an int.
        ValueError: `num_parameters` is below 1, or the dtype is unknown.
    """
    require_count("num_parameters", num_parameters)
    return num_parameters * dtype_nbytes(dtype)


def cache_capacity_tokens(
    memory_bytes: int, weight_bytes: int, bytes_per_token: int, *, reserved_bytes: int = 0
) -> int:
    """How many tokens the cache can hold in what the weights and the reserve leave.

    Only whole tokens count: the result is rounded down. If the weights fill the memory to the last byte, the result is
    0 tokens. Weights that do not fit are an error, since such a model cannot even be loaded.

    Args:
        memory_bytes: the accelerator's memory, in bytes, ≥ 1.
        weight_bytes: what the weights take, in bytes, ≥ 0; 0 if `memory_bytes` is a budget for the cache alone.
        bytes_per_token: what one token takes in the cache, in bytes, ≥ 1.
        reserved_bytes: what else must stay free (activations, the framework, fragmentation), in bytes, ≥ 0.

    Returns:
        Tokens, over all sequences together.

    Raises:
        TypeError: an argument is not an int.
        ValueError: an argument is below its bound, or weights and reserve exceed the memory; the message then gives
            the excess in bytes.
    """
    require_count("memory_bytes", memory_bytes)
    require_count("weight_bytes", weight_bytes, at_least=0)
    require_count("bytes_per_token", bytes_per_token)
    require_count("reserved_bytes", reserved_bytes, at_least=0)
    left = memory_bytes - weight_bytes - reserved_bytes
    if left < 0:
        raise ValueError(f"weights and reserve do not fit: {-left} bytes too many for a memory of {memory_bytes} bytes")
    return left // bytes_per_token


def max_concurrent_sequences(capacity_tokens: int, tokens_per_sequence: int) -> int:
    """How many sequences fit at once if each reserves `tokens_per_sequence` tokens.

    Only whole sequences count: the result is rounded down, and is 0 if not even one fits.

    Args:
        capacity_tokens: tokens that the cache can hold, ≥ 0.
        tokens_per_sequence: prompt and answer of one sequence together, ≥ 1.

    Returns:
        Sequences.

    Raises:
        TypeError: an argument is not an int.
        ValueError: an argument is below its bound.
    """
    require_count("capacity_tokens", capacity_tokens, at_least=0)
    require_count("tokens_per_sequence", tokens_per_sequence)
    return capacity_tokens // tokens_per_sequence


def step_flops(model: Transformer, num_new_tokens: int, context_len: int = 0, batch_size: int = 1) -> int:
    """The FLOPs of one forward pass: a decode step (1 new token) or a prefill (many).

    Each of `batch_size` sequences has `context_len` tokens (C) in the cache and `num_new_tokens` new ones (T). A
    multiplication and an addition are two FLOPs. Two parts count:

    - Weights: 2 FLOPs per weight and new token, 2 · P · T a sequence.
    - Attention: a new token attends to the C cached ones, to the new ones before it and to itself. So the T tokens
      attend to C + 1, C + 2, …, C + T positions, T · C + T · (T + 1) / 2 in total. Each position costs a query head
      one dot product with a key and one scaled addition of a value, 2 · w FLOPs each, so 4 · L · H · w in the model. w
      is `head_dim`, or `kv_latent_dim` if that is a number: then all H query heads work on the shared latent.

    Neglected: softmax, norms, activation functions, the embedding look-up (its table counts as weights), and that MLA
    uses only the part of the latent without RoPE as a value. Positions hidden by the causal mask are not computed.
    After Kaplan et al. 2020, section 2.1, and Pope et al. 2022, section 2.

    Args:
        model: the transformer. Every token uses every weight: no mixture of experts.
        num_new_tokens: new tokens per sequence (T), ≥ 1.
        context_len: tokens per sequence that are in the cache before the step (C), ≥ 0.
        batch_size: sequences, ≥ 1.

    Returns:
        FLOPs of the whole batch.

    Raises:
        TypeError: a count is not an int.
        ValueError: a count is below its bound.
    """
    require_count("num_new_tokens", num_new_tokens)
    require_count("context_len", context_len, at_least=0)
    require_count("batch_size", batch_size)
    positions = num_new_tokens * context_len + num_new_tokens * (num_new_tokens + 1) // 2
    width = model.head_dim if model.kv_latent_dim is None else model.kv_latent_dim
    attention = 4 * model.num_layers * model.num_heads * width * positions
    return batch_size * (2 * model.num_parameters * num_new_tokens + attention)


def step_bytes(
    model: Transformer, num_new_tokens: int, context_len: int = 0, batch_size: int = 1, dtype: str = "float16"
) -> int:
    """The bytes that one forward pass moves between memory and processor.

    The step is that of `step_flops`, with T = `num_new_tokens` and C = `context_len`. Two parts count:

    - Weights: read once for the whole batch.
    - Cache: every sequence reads the KV entries of its C tokens and writes its T new ones: C + T entries of
      `cache_bytes_per_token` each.

    Neglected: activations, which are small in decode and mostly stay on the chip; and that attention over a long prompt
    reads an entry more than once.

    Args:
        model: the transformer.
        num_new_tokens: new tokens per sequence (T), ≥ 1.
        context_len: tokens per sequence that are in the cache before the step (C), ≥ 0.
        batch_size: sequences, ≥ 1.
        dtype: of weights and cache alike, see `dtype_nbytes`.

    Returns:
        Bytes of the whole batch.

    Raises:
        TypeError: a count is not an int.
        ValueError: a count is below its bound, or the dtype is unknown.
    """
    require_count("num_new_tokens", num_new_tokens)
    require_count("context_len", context_len, at_least=0)
    require_count("batch_size", batch_size)
    entries = batch_size * (context_len + num_new_tokens)
    return weight_bytes(model.num_parameters, dtype) + entries * cache_bytes_per_token(model, dtype)


def arithmetic_intensity(flops: float, nbytes: float) -> float:
    """How many FLOPs are done for each byte that is moved.

    Args:
        flops: FLOPs of the work, > 0.
        nbytes: bytes that it moves, > 0.

    Returns:
        FLOP/byte.

    Raises:
        TypeError: an argument is not a number.
        ValueError: an argument is 0, negative, infinite or NaN.
    """
    require_positive("flops", flops)
    require_positive("nbytes", nbytes)
    return flops / nbytes


def ridge_point(accelerator: Accelerator) -> float:
    """The intensity at which reading and computing take the same time: peak FLOP/s over bandwidth.

    The roofline's two lines meet there (Williams et al. 2009).

    Args:
        accelerator: the machine.

    Returns:
        FLOP/byte.
    """
    return accelerator.peak_flops / accelerator.bandwidth


def attainable_flops(accelerator: Accelerator, intensity: float) -> float:
    """The FLOP/s that work of this intensity can reach: the roofline.

    Left of the ridge the limit is the memory, bandwidth · intensity. Right of it the limit is the processor's peak.

    Args:
        accelerator: the machine.
        intensity: of the work, in FLOP/byte, > 0.

    Returns:
        FLOP/s, the lower of the two.

    Raises:
        TypeError: `intensity` is not a number.
        ValueError: `intensity` is 0, negative, infinite or NaN.
    """
    require_positive("intensity", intensity)
    return min(accelerator.peak_flops, accelerator.bandwidth * intensity)


def step_seconds(accelerator: Accelerator, flops: float, nbytes: float) -> float:
    """The least time that the work can take: the time of its FLOPs or of its bytes, whichever is longer.

    The model assumes that reading and computing overlap perfectly and that both run at peak. A real step takes longer.

    Args:
        accelerator: the machine.
        flops: FLOPs of the work, > 0.
        nbytes: bytes that it moves, > 0.

    Returns:
        Seconds.

    Raises:
        TypeError: an argument is not a number.
        ValueError: an argument is 0, negative, infinite or NaN.
    """
    require_positive("flops", flops)
    require_positive("nbytes", nbytes)
    return max(flops / accelerator.peak_flops, nbytes / accelerator.bandwidth)


def is_memory_bound(accelerator: Accelerator, intensity: float) -> bool:
    """Whether work of this intensity is memory-bound: it lies left of the ridge.

    Exactly at the ridge it is not, and the answer is False.

    Args:
        accelerator: the machine.
        intensity: of the work, in FLOP/byte, > 0.

    Raises:
        TypeError: `intensity` is not a number.
        ValueError: `intensity` is 0, negative, infinite or NaN.
    """
    require_positive("intensity", intensity)
    return intensity < ridge_point(accelerator)


def break_even_batch(
    model: Transformer, accelerator: Accelerator, context_len: int, dtype: str = "float16"
) -> int | None:
    """The smallest batch at which a decode step is no longer memory-bound.

    A decode step has one new token per sequence (`step_flops` and `step_bytes` with `num_new_tokens` = 1). A larger
    batch shares one read of the weights among more sequences, so the intensity rises. But each sequence also reads its
    own cache, which no other shares: for any batch size, the intensity stays below that of one sequence whose weights
    cost nothing to read. If that limit is not above the ridge, no batch is large enough.

    Whether so many sequences fit in the memory is another question: `max_concurrent_sequences` answers it.

    Args:
        model: the transformer.
        accelerator: the machine.
        context_len: tokens per sequence that are in the cache before the step, ≥ 0.
        dtype: of weights and cache alike, see `dtype_nbytes`.

    Returns:
        Sequences, ≥ 1: with one sequence fewer the step is still memory-bound. None if every batch is memory-bound.

    Raises:
        TypeError: `context_len` is not an int.
        ValueError: `context_len` is negative, or the dtype is unknown.
    """
    weights = weight_bytes(model.num_parameters, dtype)
    flops = step_flops(model, 1, context_len)
    cache = step_bytes(model, 1, context_len, dtype=dtype) - weights
    # Exact numbers: a rounding error in the ridge would move the answer by one where the two times are equal.
    ridge = Fraction(accelerator.peak_flops) / Fraction(accelerator.bandwidth)
    # With B sequences: B · flops ≥ ridge · (weights + B · cache). The FLOPs that a sequence adds beyond those needed to
    # cover its own cache go towards the weights.
    surplus = flops - ridge * cache
    return math.ceil(ridge * weights / surplus) if surplus > 0 else None
