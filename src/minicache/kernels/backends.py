"""Which backend runs a call, and attention by the one that does. No phase builds this module.

CUDA tensors take Triton (phase 4). CPU tensors take numba (`cpu`) where it is installed, for float32 queries without
gradients, over a float32 or a quantized cache, and PyTorch otherwise: `tiles`, which cuts long prompts into tiles and
leaves the rest to `plain`, phase 3's. A backend is imported on first use.
"""

from __future__ import annotations

from os.path import dirname
from typing import Any, Literal

import torch
from torch import Tensor

from minicache.errors import KernelUnavailableError
from minicache.kernels.metadata import AttentionMetadata

Backend = Literal["torch", "triton", "numba"]


def choose(
    backend: Backend | None, rows: Tensor, *caches: Tensor, by_row: bool = False, numba_can: bool = True
) -> Backend:
    """The backend to use: the given one, or the default of the caches' device.

    Args:
        backend: as the caller got it.
        rows: the queries, or the rows to store.
        caches: what it must read or write.
        by_row: whether each row of the caches has a scale.
        numba_can: False if numba has no kernel for the call.

    Raises:
        ValueError: there is no such backend.
        KernelUnavailableError: it cannot run here, or not on these caches.
    """
    if backend not in (None, "torch", "triton", "numba"):
        raise ValueError(f'backend must be "torch", "triton", "numba" or None; got {backend!r}')
    device = caches[0].device
    if backend == "triton" or (backend is None and device.type == "cuda"):
        from minicache.kernels import configs, runtime

        runtime.require_triton(device)
        configs.require_storable(configs.architecture(device), caches[0].dtype)
        return "triton"
    needs_gradient = rows.requires_grad and torch.is_grad_enabled()
    if backend == "torch" or (backend is None and (not numba_can or needs_gradient or is_plain_replaced())):
        return "torch"
    from minicache.kernels import cpu

    reason = cpu.why_not(*caches, dtype=rows.dtype, by_row=by_row)
    if reason is None:
        return "numba"
    if backend == "numba":
        raise KernelUnavailableError(reason)
    return "torch"


def is_plain_replaced() -> bool:
    """Whether a learner's file replaces `minicache.kernels.plain`: a CPU then runs that file instead of numba."""
    from minicache.kernels import plain

    return dirname(str(plain.__file__)) != dirname(__file__)


def attend(
    chosen: Backend, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, **options: Any
) -> Tensor:
    """Attention with what all backends have: `scale`, `k_scale` and `v_scale` per row, `sliding_window`."""
    if chosen == "triton":
        from minicache.kernels import launch

        return launch.paged_attention(q, k_cache, v_cache, metadata, **options)
    if chosen == "numba":
        from minicache.kernels.cpu import steps

        return steps.paged_attention(q, k_cache, v_cache, metadata, **options)
    from minicache.kernels import tiles

    return tiles.paged_attention(q, k_cache, v_cache, metadata, **options)
