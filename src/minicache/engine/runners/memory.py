"""How much of a GPU's memory an engine's cache may take: what is free once everything else has its share.

Weights are loaded when it is asked. What the largest step needs besides is not computed but tried: the model runs once
over as many tokens as a step may have, and PyTorch's allocator keeps the memory that this took. No phase builds this
module.
"""

from __future__ import annotations

import torch

from minicache.engine.kv import DEFAULT_NBYTES, Model, kv_token_nbytes
from minicache.engine.runners.sampling import draw
from minicache.model.minigpt import Transformer
from minicache.parallel import ParallelModel


def cache_nbytes(
    model: Model,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    gpu_memory_utilization: float,
    kv_cache_dtype: str | None = None,
) -> int:
    """Bytes for the cache of an engine whose num_blocks is not given.

    On a CUDA device: after one forward pass of max_num_batched_tokens tokens, gpu_memory_utilization of the memory that
    no one has. Elsewhere, where memory is shared with other programs: DEFAULT_NBYTES.

    Args:
        model: its weights are on the device.
        max_num_batched_tokens: the most tokens of a step.
        max_num_seqs: the most requests of a batch.
        max_model_len: the most tokens of a request.
        gpu_memory_utilization: 0 < u ≤ 1.
        kv_cache_dtype: what the cache holds, as `LLM` takes it.

    Raises:
        TypeError: gpu_memory_utilization is no number.
        ValueError: it is out of its bounds; or the memory does not hold one request of max_model_len tokens.
    """
    if not isinstance(gpu_memory_utilization, float | int) or isinstance(gpu_memory_utilization, bool):
        raise TypeError(f"gpu_memory_utilization must be a number; got {gpu_memory_utilization!r}")
    if not 0 < gpu_memory_utilization <= 1:
        raise ValueError(f"gpu_memory_utilization must be more than 0 and at most 1; got {gpu_memory_utilization}")
    if isinstance(model, ParallelModel):
        model = model.shard  # what is free on its GPU is free on those of the other ranks
    weights = next(iter(model.parameters()))
    if weights.device.type != "cuda":
        return DEFAULT_NBYTES
    if isinstance(model, Transformer):
        run_largest_step(model, max_num_batched_tokens, max_num_seqs, max_model_len)
        torch.cuda.synchronize(weights.device)
    free, _ = torch.cuda.mem_get_info(weights.device)
    nbytes = int(free * gpu_memory_utilization)
    needed = kv_token_nbytes(model, kv_cache_dtype) * max_model_len
    if nbytes < needed:
        raise ValueError(
            f"{free / 2**30:.1f} GiB of {weights.device} are free for the cache, of which it may take "
            f"{gpu_memory_utilization:.0%}, and one request of max_model_len {max_model_len} tokens needs "
            f"{needed / 2**30:.1f} GiB: give a lower max_model_len or max_num_batched_tokens, or free memory"
        )
    return nbytes


def run_largest_step(model: Transformer, num_tokens: int, num_seqs: int, max_model_len: int) -> None:
    """Take the memory that the largest step takes: a forward pass of so many tokens, and a token for each sequence.

    Sorted rows take the most memory to draw from, so all of them are.
    """
    device = next(model.parameters()).device
    length = min(num_tokens, max_model_len)
    token_ids = torch.zeros(-(-num_tokens // length), length, dtype=torch.int64, device=device)
    with torch.inference_mode():
        hidden = model.hidden_states(token_ids).flatten(0, 1)
        logits = model.logits(hidden[:num_seqs])
        ones = torch.ones(len(logits), dtype=torch.float64, device=device)
        draw(logits, ones, (ones.long(), ones), ones)
