"""An engine's steps on a model of several ranks (`minicache.parallel`): memory and runner of rank 0.

The scheduler's blocks are the same on all ranks; each rank has its own heads' keys and values in them. So rank 0 tells
the others which blocks move, and sends them a step's integers. No phase builds this module.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minicache.cache.packed import StepSize, aligned, pack
from minicache.engine.kv import Model, PagedMemory
from minicache.engine.runners.sampling import GPUSampler
from minicache.engine.sampling import TokenSampler, pick_tokens
from minicache.errors import InvariantError
from minicache.model.minigpt import Cache
from minicache.parallel import ParallelModel
from minicache.scheduler import Scheduler, SchedulerOutput


def parallelize(model: Model, size: int, dtype: torch.dtype | None, device: torch.device | str | None) -> ParallelModel:
    """Divide an engine's model among ranks.

    A model in the CPU's memory that goes to GPUs becomes 16 bits, as `minicache.engine.loading.half_on_gpu` makes it,
    unless a dtype is asked for.

    Args:
        model: the whole model.
        size: the number of ranks.
        dtype: that was asked for.
        device: that was asked for; None: where the model is.

    Raises:
        TypeError, ValueError, RankDiedError: as `ParallelModel`.
    """
    weights = next(iter(model.parameters()))
    if dtype is None and weights.device.type == "cpu" and device is not None and torch.device(device).type == "cuda":
        has_bfloat16 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
        dtype = torch.bfloat16 if has_bfloat16 else torch.float16
    return ParallelModel(model, size, device=device, dtype=dtype)


def require_combination(size: int, cache: str) -> None:
    """Refuse an engine's options that do not go together with several ranks.

    Args:
        size: the number of ranks.
        cache: "paged" or "dense".

    Raises:
        ValueError: which, and what to do.
    """
    if size > 1 and cache != "paged":
        raise ValueError(f'cache={cache!r} keeps no blocks that ranks could divide: take cache="paged"')


class ParallelMemory(PagedMemory):
    """Rank 0's blocks; the other ranks make theirs, and move the same ones.

    Args:
        model: on several ranks.
        scheduler: its pools are those of all ranks' storages.
        kv_cache_dtype: as `PagedMemory` takes it.
    """

    def __init__(self, model: ParallelModel, scheduler: Scheduler, kv_cache_dtype: str | None) -> None:
        super().__init__(model, scheduler, kv_cache_dtype)
        self.model = model
        num_host_blocks = 0 if self.host_storage is None else self.host_storage.num_host_blocks
        model.begin(self.storage, num_host_blocks, kv_cache_dtype, self.groups.places)

    def move_blocks(self, output: SchedulerOutput) -> None:
        """As `Memory.move_blocks`, on all ranks."""
        swapped_out = list(output.swapped_out.values())
        swapped_in = [pair for pairs in output.swapped_in.values() for pair in pairs]
        if swapped_out or swapped_in or output.blocks_to_copy:
            self.model.move(self.storage, swapped_out, swapped_in, output.blocks_to_copy)
        super().move_blocks(output)

    def make_step(self, output: SchedulerOutput) -> Cache:
        """Refused: a step's cache would be rank 0's alone.

        Raises:
            InvariantError: always.
        """
        raise InvariantError(
            "a model on several ranks is run by the engine's runner: a run_model of your own must ask it, as the "
            "reference does, or take tensor_parallel_size=1"
        )


class ParallelRunner:
    """Runs an engine's steps on all ranks, as `minicache.engine.runners.find.ModelRunner`.

    Args:
        memory: rank 0's; its model is what is run.
    """

    def __init__(self, memory: ParallelMemory) -> None:
        self._memory = memory
        self._gpu_sampler = GPUSampler() if memory.storage.device.type == "cuda" else None

    def run_model(self, output: SchedulerOutput) -> Tensor:
        """As `ModelRunner.run_model`.

        Raises:
            Exception: as `ParallelModel.run`.
        """
        memory = self._memory
        step = memory.begin(output)
        requests, counts = step.requests, step.counts
        num_drafts = sum(len(each.draft_token_ids) for each in requests)
        size = StepSize(sum(counts), len(requests), aligned(step.width), num_drafts, step.blocks.num_groups)
        return memory.model.run(memory.storage, size, pack(requests, counts, step.blocks, size))

    def pick_tokens(self, logits: Tensor, rows: Sequence[int], samplers: Sequence[TokenSampler]) -> list[int | None]:
        """As `ModelRunner.pick_tokens`: rank 0 alone samples."""
        if self._gpu_sampler is not None:
            return self._gpu_sampler.pick_tokens(logits, rows, samplers)
        return pick_tokens(logits if len(rows) == len(logits) else logits[rows], samplers)
