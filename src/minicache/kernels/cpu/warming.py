"""Compiling before the first step: a model's kernels, made or loaded from the disk."""

from __future__ import annotations

from collections.abc import Callable


def warm_up(head_dim: int, group_size: int, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
    """Compile every kernel of a model, or load what an earlier process has compiled.

    Args:
        head_dim: numbers of a head.
        group_size: query heads of a key/value head.
        progress: called with how many kernels are ready, and how many there are, from (0, n) to (n, n).
    """
    from minicache.kernels.cpu import rows
    from minicache.kernels.cpu.attention import decode_kernel

    total = len(rows.SIGNATURES) + 1
    progress(0, total)
    for done, (kernel, signature) in enumerate(rows.SIGNATURES.items(), 1):
        kernel.compile(signature)
        progress(done, total)
    decode_kernel(head_dim, group_size)
    progress(total, total)
