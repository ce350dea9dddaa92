"""How an engine runs the models that it knows: on a GPU and on a CPU, each in its own way.

`EngineLoop.run_model` and `EngineLoop.sample` are how any model runs on any cache. For a model of this package over a
paged cache there is a runner that does the same in fewer calls, and `LLM` asks it instead. No phase builds this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from os.path import dirname
from typing import Protocol

from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from minicache.engine import loop
from minicache.engine.kv import DenseMemory, Memory, Model, PagedMemory
from minicache.engine.runners.gpu import CUDACapture, GPUModelRunner
from minicache.engine.runners.parallel import ParallelMemory, ParallelRunner, require_combination
from minicache.engine.sampling import TokenSampler
from minicache.kernels import cpu
from minicache.kernels.backends import is_plain_replaced
from minicache.parallel import ParallelModel
from minicache.scheduler import Scheduler, SchedulerOutput


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


def find_runner(model: Model, memory: Memory, max_num_seqs: int, *, enforce_eager: bool) -> ModelRunner | None:
    """The runner for a model, ready to run.

    On a CPU the model's weights are joined, and the kernels are compiled or loaded. Compiling takes some seconds, once
    on a machine; a terminal shows its progress.

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
    if device.type != "cpu" or not cpu.is_available() or is_plain_replaced():
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


def is_loop_replaced() -> bool:
    """Whether a learner's file stands in for `minicache.engine.loop`: then its `run_model` runs the model."""
    return dirname(str(loop.__file__)) != dirname(dirname(__file__))
