"""A model's steps on a CPU: the fused forward pass (`minicache.model.fused`). No phase builds this module."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from minicache.engine.kv import PagedMemory
from minicache.engine.sampling import TokenSampler, pick_tokens
from minicache.model import fused
from minicache.model.minigpt import Transformer
from minicache.scheduler import SchedulerOutput


class CPUModelRunner:
    """Runs an engine's steps on a CPU, as `minicache.engine.runners.find.ModelRunner`.

    Args:
        model: after `minicache.model.fused.fuse`.
        memory: where the requests' keys and values are.
    """

    def __init__(self, model: Transformer, memory: PagedMemory) -> None:
        self._model = model
        self._memory = memory
        self._caches = fused.layer_caches(memory.storage, memory.groups.places)

    def run_model(self, output: SchedulerOutput) -> Tensor:
        """As `ModelRunner.run_model`."""
        tensors = self._memory.begin(output).tensors()
        with torch.inference_mode():
            return fused.logits_at(self._model, self._caches, tensors)

    def pick_tokens(self, logits: Tensor, rows: Sequence[int], samplers: Sequence[TokenSampler]) -> list[int | None]:
        """As `ModelRunner.pick_tokens`."""
        return pick_tokens(logits if len(rows) == len(logits) else logits[rows], samplers)
