"""How an engine runs the models that it knows: on a GPU and on a CPU, each in its own way, and in what memory.

`EngineLoop.run_model` and `EngineLoop.sample` are how any model runs on any cache. For a model of this package over a
paged cache there is a runner that does the same in fewer calls, and `LLM` asks it instead.

Of a GPU's memory the cache takes a part of what is free once everything else has its share. Weights are loaded when it
is asked. What the largest step needs besides is not computed but tried: the model runs once over as many tokens as a
step may have, and PyTorch's allocator keeps the memory that this took. No phase builds this module.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from os.path import dirname
from typing import Protocol

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from minicache.engine import loop
from minicache.engine.kv import DenseMemory, Memory, Model, PagedMemory, default_nbytes
from minicache.engine.runners.gpu import CUDACapture, GPUModelRunner
from minicache.engine.runners.parallel import ParallelMemory, ParallelRunner, require_combination
from minicache.engine.runners.sampling import draw
from minicache.engine.sampling import TokenSampler
from minicache.kernels import cpu
from minicache.kernels.backends import is_plain_replaced
from minicache.model.minigpt import Transformer
from minicache.parallel import ParallelModel
from minicache.scheduler import Scheduler, SchedulerOutput

logger = logging.getLogger("minicache")


class ModelRunner(Protocol):
    """What an engine asks of a runner."""

    def run_model(self, output: SchedulerOutput) -> Tensor:
        """As `LLM.run_model`: `[B, vocab]`.

        If requests of the step have draft tokens (`Request.draft_token_ids`): `[B + their number, vocab]`. Of each
        request, the logits after its newest token, and after each draft token.

        Raises:
            InvariantError: the scheduler has given a request fewer blocks than its tokens need.
        """

    def pick_tokens(self, logits: Tensor, rows: Sequence[int], samplers: Sequence[TokenSampler]) -> list[int | None]:
        """Pick tokens from some rows of what `run_model` gave, each by its sampler; None where a row gives none."""


def make_memory(model: Model, scheduler: Scheduler, cache: str, kv_cache_dtype: str | None) -> Memory:
    """The memory for a model's keys and values.

    Args:
        model: what is to be run.
        scheduler: counts the blocks.
        cache: "paged" or "dense".
        kv_cache_dtype: "int8", "fp8_e4m3", or None for the weights' dtype.

    Raises:
        ValueError: the cache is dense, and the model on several processes.
        RankFailedError, RankDiedError: a rank of a model on several processes has no memory for it, or has ended.
    """
    if isinstance(model, ParallelModel):
        require_combination(model.size, cache)
        return ParallelMemory(model, scheduler, kv_cache_dtype)
    return PagedMemory(model, scheduler, kv_cache_dtype) if cache == "paged" else DenseMemory(model, scheduler)


def cache_nbytes(
    model: Model,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    gpu_memory_utilization: float,
    needed: int,
    kv_cache_dtype: str | None = None,
) -> int:
    """Bytes for the cache of an engine whose num_blocks is not given.

    On a CUDA device: after one forward pass of max_num_batched_tokens tokens, gpu_memory_utilization of the memory that
    no one has. Elsewhere, where memory is shared with other programs: `default_nbytes`.

    Args:
        model: its weights are on the device.
        max_num_batched_tokens: the most tokens of a step.
        max_num_seqs: the most requests of a batch.
        max_model_len: the most tokens of a request.
        gpu_memory_utilization: 0 < u ≤ 1.
        needed: bytes for one request of max_model_len tokens.
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
        return default_nbytes(model, kv_cache_dtype)
    if isinstance(model, Transformer):
        run_largest_step(model, max_num_batched_tokens, max_num_seqs, max_model_len)
        torch.cuda.synchronize(weights.device)
    free, _ = torch.cuda.mem_get_info(weights.device)
    nbytes = int(free * gpu_memory_utilization)
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


def find_runner(model: Model, memory: Memory, max_num_seqs: int, *, enforce_eager: bool) -> ModelRunner | None:
    """The runner for a model, ready to run.

    On a CPU the model's weights are joined, and the kernels are compiled or loaded. Compiling takes some seconds, once
    on a machine; a terminal shows its progress. Where numba is missing, a warning says so, once in a process.

    Args:
        model: what is to be run.
        memory: where the requests' keys and values are.
        max_num_seqs: the most requests of a batch.
        enforce_eager: on a GPU, no CUDA graphs.

    Returns:
        None: the engine's loop runs this model itself, as it is written, and through the kernels that a learner has
        written if there are any.
    """
    if isinstance(memory, ParallelMemory):
        return ParallelRunner(memory)
    if not isinstance(memory, PagedMemory) or is_loop_replaced():
        return None
    device = memory.storage.device
    if device.type == "cuda":
        return GPUModelRunner(model, memory, max_num_seqs, None if enforce_eager else CUDACapture(device))
    if device.type != "cpu" or is_plain_replaced():
        return None
    if reason := cpu.why_unavailable():
        _warn_of_slow_steps(reason)
        return None
    from minicache.engine.runners.cpu import CPUModelRunner  # these import numba
    from minicache.kernels.cpu.warming import warm_up
    from minicache.model.fused import fuse

    fused = fuse(model)
    if fused is None:
        return None
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("Compiling kernels")
        warm_up(lambda done, total: progress.update(task, completed=done, total=total), dtype=memory.storage.dtype)
    return CPUModelRunner(fused, memory)


@functools.cache
def _warn_of_slow_steps(reason: str) -> None:
    """Say, once in a process, that its engines compute in PyTorch alone, and why."""
    logger.warning("the engine runs without its CPU kernels, several times slower: %s", reason)


def is_loop_replaced() -> bool:
    """Whether a learner's file stands in for `minicache.engine.loop`: then its `run_model` runs the model."""
    return dirname(str(loop.__file__)) != dirname(dirname(__file__))
