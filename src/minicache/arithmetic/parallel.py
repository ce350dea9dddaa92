"""What tensor parallelism costs and saves: bytes per rank, all-reduces, and when the second processor pays.

The model of a step is that of `minicache.arithmetic.arithmetic`, divided by the ranks, plus the all-reduces. No phase
builds this module.
"""

from __future__ import annotations

from dataclasses import dataclass

from minicache.arithmetic.arithmetic import dtype_nbytes, kv_bytes_per_token, step_bytes, step_flops, step_seconds
from minicache.arithmetic.specs import Accelerator, Transformer
from minicache.errors import require_count, require_positive


@dataclass(frozen=True, slots=True)
class Link:
    """The link between the ranks.

    Attributes:
        latency: seconds of an all-reduce of 0 bytes.
        bandwidth: bytes/s that a rank sends, while it receives as many.

    Raises:
        TypeError: one is not a number.
        ValueError: the bandwidth is 0, negative, infinite or NaN, or the latency is, and not 0.
    """

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if self.latency != 0:
            require_positive("latency", self.latency)
        require_positive("bandwidth", self.bandwidth)


def ring_factor(num_ranks: int) -> float:
    """How often each byte leaves each rank in a ring all-reduce: 2 · (p − 1) / p.

    A ring divides the bytes into p parts. In p − 1 rounds each rank sends a part on, to which the next adds its own.
    p − 1 more rounds distribute the sums (Patarasuk and Yuan 2009, who show that no algorithm sends fewer).

    Args:
        num_ranks: p, ≥ 1.

    Raises:
        TypeError: it is not an int.
        ValueError: it is below 1.
    """
    require_count("num_ranks", num_ranks)
    return 2 * (num_ranks - 1) / num_ranks


def allreduce_bytes(model: Transformer, num_tokens: int, dtype: str = "float16") -> int:
    """The bytes that all all-reduces of a step sum: 2 · L · N · hidden numbers.

    Each layer has two, after attention and after the feed-forward block, of a row for each of the step's N tokens.
    What a rank sends is `ring_factor` times as much.

    Args:
        model: the transformer.
        num_tokens: new tokens of all sequences together (N), ≥ 1.
        dtype: of what is summed.

    Raises:
        TypeError: `num_tokens` is not an int.
        ValueError: it is below 1, or the dtype is unknown.
    """
    require_count("num_tokens", num_tokens)
    return 2 * model.num_layers * num_tokens * model.hidden_size * dtype_nbytes(dtype)


def allreduce_seconds(link: Link, nbytes: int, num_ranks: int) -> float:
    """The time of one all-reduce: the link's latency, and what a rank sends over its bandwidth.

    Args:
        link: between the ranks.
        nbytes: bytes that are summed, ≥ 0.
        num_ranks: p, ≥ 1; one rank needs no all-reduce.

    Raises:
        TypeError: a count is not an int.
        ValueError: a count is below its bound.
    """
    require_count("nbytes", nbytes, at_least=0)
    factor = ring_factor(num_ranks)
    return link.latency + factor * nbytes / link.bandwidth if num_ranks > 1 else 0.0


def rank_weight_bytes(num_parameters: int, num_replicated: int, num_ranks: int, dtype: str = "float16") -> int:
    """The weights of one rank: what is replicated, and its part of the rest.

    Args:
        num_parameters: all weights of the model (P), ≥ 1.
        num_replicated: those of them that this rank holds whole, 0 … P: embedding and norms, and on rank 0 the output
            layer.
        num_ranks: p, ≥ 1.
        dtype: what they are stored in.

    Returns:
        Bytes; exact if p divides the rest, else rounded up.

    Raises:
        TypeError: a count is not an int.
        ValueError: a count is out of its bounds, or the dtype is unknown.
    """
    require_count("num_parameters", num_parameters)
    require_count("num_replicated", num_replicated, at_least=0)
    require_count("num_ranks", num_ranks)
    if num_replicated > num_parameters:
        raise ValueError(f"num_replicated {num_replicated}: there are {num_parameters} parameters")
    return (num_replicated - (num_replicated - num_parameters) // num_ranks) * dtype_nbytes(dtype)


def rank_kv_bytes_per_token(model: Transformer, num_ranks: int, dtype: str = "float16") -> int:
    """Bytes that one token takes in the cache of one rank: 2 · L · ⌈H_kv / p⌉ · d numbers.

    With more ranks than KV heads, ranks hold copies of a head, and further ranks save no memory.

    Args:
        model: the transformer; its cache is one of keys and values per head.
        num_ranks: p, ≥ 1: a divisor of the KV heads, or a multiple.
        dtype: what the cache stores.

    Raises:
        TypeError: `num_ranks` is not an int.
        ValueError: it is below 1, or neither divisor nor multiple; the model's cache has no heads (MLA); or the dtype
            is unknown.
    """
    require_count("num_ranks", num_ranks)
    if model.kv_latent_dim is not None:
        raise ValueError("the latent of MLA is shared by all heads: there is nothing in its cache to divide")
    if model.num_kv_heads % num_ranks and num_ranks % model.num_kv_heads:
        raise ValueError(f"{model.num_kv_heads} KV heads cannot be divided among {num_ranks} ranks")
    return kv_bytes_per_token(model.num_layers, max(1, model.num_kv_heads // num_ranks), model.head_dim, dtype)


def parallel_step_seconds(
    model: Transformer,
    accelerator: Accelerator,
    link: Link,
    num_ranks: int,
    num_new_tokens: int,
    context_len: int = 0,
    batch_size: int = 1,
    *,
    num_replicated: int = 0,
    dtype: str = "float16",
) -> float:
    """The least time of a step on p ranks: rank 0's share of the arithmetic or of the bytes, and all all-reduces.

    Nothing overlaps with an all-reduce: the next product needs its sums.

    Args:
        model: the transformer.
        accelerator: of each rank.
        link: between them.
        num_ranks: p, ≥ 1. With 1 this is `step_seconds` of `step_flops` and `step_bytes`.
        num_new_tokens: new tokens per sequence, ≥ 1.
        context_len: tokens per sequence that are in the cache before the step, ≥ 0.
        batch_size: sequences, ≥ 1.
        num_replicated: weights that rank 0 holds whole; as `step_bytes` does, the embedding counts as if it were read.
        dtype: of weights, cache and what is summed.

    Returns:
        Seconds.

    Raises:
        TypeError, ValueError: as `rank_weight_bytes`, `rank_kv_bytes_per_token`, `step_flops` and `step_bytes`.
    """
    num_tokens = batch_size * num_new_tokens
    flops = step_flops(model, num_new_tokens, context_len, batch_size)
    step_bytes(model, num_new_tokens, context_len, batch_size, dtype)  # checks the arguments
    replicated = 2 * num_replicated * num_tokens
    weights = rank_weight_bytes(model.num_parameters, num_replicated, num_ranks, dtype)
    cache = batch_size * (context_len + num_new_tokens) * rank_kv_bytes_per_token(model, num_ranks, dtype)
    alone = step_seconds(accelerator, (flops - replicated) / num_ranks + replicated, weights + cache)
    num_allreduces = 2 * model.num_layers
    nbytes = allreduce_bytes(model, num_tokens, dtype) // num_allreduces
    return alone + num_allreduces * allreduce_seconds(link, nbytes, num_ranks)


def break_even_latency(
    model: Transformer,
    accelerator: Accelerator,
    bandwidth: float,
    num_ranks: int,
    num_new_tokens: int,
    context_len: int = 0,
    batch_size: int = 1,
    *,
    num_replicated: int = 0,
    dtype: str = "float16",
) -> float:
    """The latency of an all-reduce at which p ranks are as fast as one. Below it the ranks pay.

    Args:
        model: as for `parallel_step_seconds`, and so are the others.
        accelerator: likewise.
        bandwidth: of the link, in bytes/s.
        num_ranks: ≥ 2.
        num_new_tokens: likewise.
        context_len: likewise.
        batch_size: likewise.
        num_replicated: likewise.
        dtype: likewise.

    Returns:
        Seconds. 0 or less: the bytes alone cost all the time saved, and p ranks are slower on any such link.

    Raises:
        TypeError, ValueError: as `parallel_step_seconds`.
    """
    require_count("num_ranks", num_ranks, at_least=2)
    instant = Link(0.0, bandwidth)
    seconds = [
        parallel_step_seconds(
            model,
            accelerator,
            instant,
            ranks,
            num_new_tokens,
            context_len,
            batch_size,
            num_replicated=num_replicated,
            dtype=dtype,
        )
        for ranks in (1, num_ranks)
    ]
    return (seconds[0] - seconds[1]) / (2 * model.num_layers)
