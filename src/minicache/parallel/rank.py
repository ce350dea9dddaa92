"""A step of one rank: its shard of the model, over its blocks. Rank 0 and the others run the same."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minicache.cache.packed import PackedStep, Places, StepSize
from minicache.cache.paged import PagedStorage
from minicache.model.decoder import Decoder
from minicache.model.minigpt import MiniGPT
from minicache.parallel.group import Group


class Rank:
    """A shard and its group.

    Args:
        model: the shard.
        group: of all ranks.
        is_fused: the shard went through `minicache.model.fused.fuse`, as on all ranks.
    """

    def __init__(self, model: MiniGPT | Decoder, group: Group, is_fused: bool) -> None:
        self.model = model
        self.group = group
        self.is_fused = is_fused
        self.storage: PagedStorage | None = None
        self._is_running = False
        if not is_fused:
            for name, module in model.named_modules():
                if name.endswith((".o_proj", ".down_proj")):
                    module.register_forward_hook(self._sum)

    def begin(self, storage: PagedStorage, places: Places | None) -> None:
        """Use this storage, in which the layers have these places, in the following steps."""
        self.storage, self._places = storage, places
        if self.is_fused:
            from minicache.model.fused import layer_caches  # imports numba

            self._caches = layer_caches(storage, places)

    def expect(self, size: StepSize) -> None:
        """Announce the all-reduces of the next step, which has this size."""
        num_layers = self.model.config.num_layers
        # In the fused pass, the last layer is computed only for the rows that are read.
        num_last = size.num_seqs + size.num_drafts if self.is_fused else size.num_tokens
        self.group.begin([size.num_tokens] * 2 * (num_layers - 1) + [num_last] * 2)

    def run(self, size: StepSize, numbers: Tensor) -> Tensor:
        """Run the shard over a step's tokens, with an all-reduce after each half of a layer.

        Args:
            size: of `expect`; without padding.
            numbers: the step's integers, on the CPU.

        Returns:
            Hidden states `[R, hidden_size]` of the rows that are read (`StepTensors.last`), the same on all ranks.

        Raises:
            Exception: what the model raises. The step may have all-reduces left (`Group.finish`).
            RuntimeError: another rank has exited or does not answer.
        """
        assert self.storage is not None
        with torch.inference_mode():
            if self.is_fused:
                from minicache.model.fused import hidden_at

                return hidden_at(self.model, self._caches, size.views(numbers), self.group.all_reduce)
            host = size.views(numbers)
            counts, lengths = host.query_start_loc.diff().tolist(), host.context_lens.tolist()
            step = size.views(numbers.to(self.storage.device, non_blocking=True))
            cache = PackedStep(self.storage, step, num_new_tokens=counts, lengths=lengths, places=self._places)
            self._is_running = True
            try:
                return self.model.hidden_states(step.token_ids[None], cache)[0, step.last]
            finally:
                self._is_running = False

    def _sum(self, module: nn.Module, args: object, out: Tensor) -> Tensor:
        """Sum a row-parallel layer's output over the ranks.

        Skipped outside a step, when a shard runs alone to measure its memory (`minicache.engine.runners.find`).
        """
        return self.group.all_reduce(out) if self._is_running else out
