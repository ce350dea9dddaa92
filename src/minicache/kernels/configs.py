"""Launch configurations of attention and linear layers: rows, tile, warps and pipeline stages, by architecture.

The launchers call `choose`; `benchmarks/compiled.py` and the tests compile exactly what it returns, for each
architecture, dtype and head size, and check that nothing spills. A launch without a configuration is refused with a
clear message, before Triton's compiler or the GPU fails. No phase builds this module.

**Decode** is memory-bound, so what counts is bytes in flight. A tile of keys and one of values take 32 KB together, 64
tokens of 128 half-precision numbers, and `num_stages` 5 gives two buffers for such tiles, not five: the compiler uses
one stage for computing, and two for each tile ahead, one of which waits for the block table. With 3 there is a single
buffer, and nothing is loaded while it is computed on. Two buffers are 72 KB of shared memory, so a multiprocessor of a
Hopper GPU, with 228 KB, holds three programs; with one tile each in flight that is 96 KB. By Little's law 4.8 TB/s at a
latency of 0.7 µs needs 3.4 MB, 26 KB on each of 132 multiprocessors. One-byte numbers are widened in registers, so
their tiles have as many tokens and half the bytes; where registers allow, there are three buffers. A desktop GPU has
100 KB per multiprocessor: half the tile.

**Prefill** is compute-bound: 128 rows give each loaded key 2 · 128 FLOPs per number, and 8 warps hold their scores
`[128, TILE]` and accumulators `[128, d]` in fp32. On Hopper and datacentre Blackwell the queries are read from shared
memory; on Ampere they stay in registers, and a tile has to be half as long. Tensor cores have no exact fp32: its
operands take registers too, so there are fewer rows. On a Turing GPU (sm_75) Triton neither uses tensor cores nor loads
ahead.

Over one byte per number every thread also holds the scales of the tokens whose scores it computes. On datacentre
Blackwell a thread has whole rows of scores, and so the scales of a whole tile: its prefill tiles are shorter.

**Linear layers** over quantized weights: few rows take 16, the least that tensor cores multiply, and many programs of
few outputs, each with 4 KB of weights per iteration. With many rows the weights that a program has dequantized are used
for 128 of them.

The numbers were chosen without a GPU, by this arithmetic and the compiler's output; their speed is not measured.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Literal

import torch

from minicache.errors import KernelUnavailableError

Kernel = Literal["decode", "prefill"]

SHARED_KB = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""Architecture → shared memory available to a program. Other GPUs use the next older one's configurations."""

FP8_FROM = 89
"""The first architecture with instructions for e4m3."""

INTERPRETER = 0
"""The architecture used without a GPU, which has no limits."""

MIN_ROWS = 16
"""The fewest rows that tensor cores multiply."""


@dataclass(frozen=True, slots=True)
class Config:
    """How a kernel is launched.

    Attributes:
        rows: query rows of a program: heads of a group, in prefill times query tokens.
        tile: tokens per tile of keys and values.
        num_warps: warps of a program.
        num_stages: pipeline stages of its loop.
    """

    rows: int
    tile: int
    num_warps: int
    num_stages: int


_Row = dict[int, Config]
"""The largest head size of a configuration → the configuration, in increasing order."""


def _row(*columns: tuple[int, int, int, int, int]) -> _Row:
    """A row of the tables below: (largest head size, rows, tile, warps, stages) for each configuration."""
    return {head_dim: Config(*numbers) for head_dim, *numbers in columns}


# "half": queries and cache in fp16 or bf16; "byte": the same queries over int8 or fp8; "single": both in fp32.
_INTERPRETED = {
    "decode": _row((32, 16, 128, 1, 1), (64, 16, 64, 1, 1), (128, 16, 32, 1, 1), (256, 16, 16, 1, 1)),
    "prefill": _row((32, 32, 128, 1, 1), (64, 32, 64, 1, 1), (128, 32, 32, 1, 1), (256, 32, 16, 1, 1)),
}
_TURING = {
    "decode half": _row((128, 16, 32, 4, 1), (256, 16, 16, 4, 1)),
    "decode byte": _row((128, 16, 32, 4, 1), (256, 16, 16, 4, 1)),
    "decode single": _row((128, 16, 32, 4, 1)),
    "prefill half": _row((128, 64, 16, 8, 1), (256, 32, 16, 8, 1)),
    "prefill byte": _row((64, 32, 16, 8, 1), (128, 16, 16, 8, 1), (256, 32, 16, 8, 1)),
    "prefill single": _row((64, 64, 16, 8, 1), (128, 32, 16, 8, 1)),
}
_DESKTOP = {
    "decode half": _row((64, 16, 64, 4, 5), (128, 16, 32, 4, 5), (256, 16, 16, 4, 5)),
    "decode byte": _row((64, 16, 64, 4, 7), (128, 16, 32, 4, 7), (256, 16, 32, 8, 5)),
    "decode single": _row((64, 16, 32, 4, 5), (128, 16, 16, 4, 5), (256, 16, 16, 4, 3)),
    "prefill half": _row((64, 128, 64, 8, 5), (128, 128, 32, 8, 5), (256, 64, 16, 8, 5)),
    "prefill byte": _row((64, 128, 32, 8, 5), (128, 64, 32, 8, 5), (256, 64, 16, 8, 5)),
    "prefill single": _row((64, 32, 32, 4, 5), (128, 32, 16, 8, 5), (256, 16, 16, 4, 5)),
}
_WIDE = _row((512, 16, 16, 8, 5))
_WIDE_PREFILL = _row((512, 32, 16, 8, 5))
_DECODE = {
    "decode half": _row((32, 16, 64, 4, 7), (64, 16, 128, 4, 5), (128, 16, 64, 4, 5), (256, 16, 32, 4, 5)) | _WIDE,
    "decode byte": _row((64, 16, 128, 4, 5), (128, 16, 64, 4, 7), (256, 16, 32, 8, 5)) | _WIDE,
    "decode single": _row((64, 16, 64, 4, 5), (128, 16, 32, 4, 5), (256, 16, 16, 4, 5), (512, 16, 16, 8, 5)),
}
_TABLE: dict[int, dict[str, _Row]] = {
    75: _TURING,
    80: _DECODE
    | {
        "prefill half": _row((64, 128, 64, 8, 5), (128, 128, 32, 8, 5), (256, 64, 16, 8, 5)) | _WIDE_PREFILL,
        "prefill byte": _row((32, 128, 64, 8, 5), (64, 128, 32, 8, 5), (128, 64, 32, 8, 5), (256, 64, 16, 8, 5))
        | _WIDE_PREFILL,
        "prefill single": _row((32, 32, 32, 8, 5), (64, 32, 32, 4, 5), (128, 32, 16, 8, 5), (512, 16, 16, 8, 5)),
    },
    86: _DESKTOP,
    89: _DESKTOP,
    90: _DECODE
    | {
        "prefill half": _row((64, 128, 64, 8, 7), (128, 128, 64, 8, 5), (256, 128, 32, 8, 5)) | _WIDE_PREFILL,
        "prefill byte": _row((128, 128, 64, 8, 5), (256, 128, 16, 8, 5)) | _WIDE_PREFILL,
        "prefill single": _row((64, 32, 32, 4, 5), (256, 32, 16, 8, 5), (512, 16, 16, 8, 5)),
    },
    100: _DECODE
    | {
        "decode byte": _row(
            (32, 16, 128, 4, 5), (64, 16, 128, 8, 5), (128, 16, 64, 4, 7), (256, 16, 32, 4, 5), (512, 16, 16, 4, 5)
        ),
        "prefill half": _row((32, 128, 64, 8, 5), (64, 128, 64, 8, 7), (128, 128, 64, 8, 5), (256, 128, 16, 8, 5))
        | _WIDE_PREFILL,
        "prefill byte": _row((32, 128, 32, 8, 3), (64, 64, 64, 8, 5), (128, 128, 32, 8, 5), (256, 64, 16, 8, 5))
        | _WIDE_PREFILL,
        "prefill single": _row((64, 32, 32, 4, 5), (256, 32, 16, 8, 5), (512, 16, 16, 8, 5)),
    },
    120: _DESKTOP,
}


def architecture(device: torch.device) -> int:
    """The architecture whose configurations a device uses: its own, or the next older one of the table.

    Raises:
        KernelUnavailableError: the GPU is older than all of them.
    """
    if device.type != "cuda":
        return INTERPRETER
    major, minor = torch.cuda.get_device_capability(device)
    older = [number for number in _TABLE if number <= 10 * major + minor]
    if not older:
        raise KernelUnavailableError(
            f"the kernels run on GPUs of compute capability 7.5 and later; this one has {major}.{minor}: "
            'take backend="torch"'
        )
    return max(older)


def require_storable(arch: int, dtype: torch.dtype) -> None:
    """Raise unless kernels can load and store numbers of this dtype.

    Raises:
        KernelUnavailableError: the architecture has no instructions for it.
    """
    if dtype == torch.float8_e4m3fn and INTERPRETER < arch < FP8_FROM:
        raise KernelUnavailableError(
            f"a float8_e4m3fn cache needs a GPU of compute capability 8.9 or later; this one is an sm_{arch}: "
            'store int8, or take backend="torch"'
        )


@functools.cache
def choose(
    kernel: Kernel, arch: int, q_dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, group: int
) -> Config:
    """The configuration of a launch.

    In decode, a group of more than 16 query heads uses prefill's configuration.

    Args:
        kernel: "decode", which `decode_kernel` and `split_kernel` share, or "prefill".
        arch: from `architecture`.
        q_dtype: of the queries.
        cache_dtype: of the cache: the same, int8 or float8_e4m3fn.
        head_dim: d.
        group: query heads per key/value head.

    Raises:
        KernelUnavailableError: no configuration fits; the message names the limit.
    """
    heads = max(MIN_ROWS, _power_of_2(group))
    if arch == INTERPRETER:
        row = _INTERPRETED[kernel]
        config = row[min((most for most in row if head_dim <= most), default=max(row))]
        return replace(config, rows=max(config.rows, heads))
    if kernel == "decode" and heads > MIN_ROWS:
        return replace(choose("prefill", arch, q_dtype, cache_dtype, head_dim, group), rows=heads)
    launch = f"the {kernel} kernel on sm_{arch}, {q_dtype} over {cache_dtype}"
    kinds = {(2, True): "half", (2, False): "byte", (4, True): "single"}
    kind = kinds.get((q_dtype.itemsize, q_dtype == cache_dtype))
    if kind is None:
        raise KernelUnavailableError(
            f"{launch}: no such launch is configured; queries are bfloat16 or float16 over the same, int8 or fp8, or "
            'float32 over the same. Convert them, or take backend="torch"'
        )
    row = _TABLE[arch][f"{kernel} {kind}"]
    if head_dim > max(row):
        config, padded = row[max(row)], _power_of_2(head_dim)
        buffers = 2 * max(1, (config.num_stages - 1) // 2)  # of keys, and of values
        least = padded * (config.rows * q_dtype.itemsize + buffers * config.tile * cache_dtype.itemsize) >> 10
        limit = "a larger one spills registers"
        if least > SHARED_KB[arch]:
            limit = f"its tiles take at least {least} KB of shared memory, and a program has {SHARED_KB[arch]} KB"
        raise KernelUnavailableError(
            f'{launch}: head_dim {head_dim} is too large, {max(row)} at most; {limit}. Take backend="torch"'
        )
    config = row[min(most for most in row if head_dim <= most)]
    if heads > config.rows:
        raise KernelUnavailableError(
            f"{launch}, head_dim {head_dim}: {group} query heads per key/value head are too many, {config.rows} at "
            'most: take backend="torch"'
        )
    return config


@dataclass(frozen=True, slots=True)
class LinearConfig:
    """How `quantized_linear_kernel` is launched.

    Attributes:
        rows: rows of a program.
        outputs: outputs of a program.
        groups: groups of inputs per iteration.
        num_warps: warps of a program.
        num_stages: pipeline stages of its loop.
    """

    rows: int
    outputs: int
    groups: int
    num_warps: int
    num_stages: int


_FEW, _SOME, _MANY = 16, 64, 128
_LINEAR = {
    "interpreted": {_FEW: LinearConfig(16, 32, 4, 1, 1)},
    "turing": {_FEW: LinearConfig(16, 32, 2, 4, 1), _MANY: LinearConfig(64, 64, 1, 8, 1)},
    "single": {_FEW: LinearConfig(16, 32, 2, 4, 3), _MANY: LinearConfig(64, 64, 1, 8, 3)},
    "half": {
        _FEW: LinearConfig(16, 32, 4, 4, 4),
        _SOME: LinearConfig(64, 64, 2, 4, 3),
        _MANY: LinearConfig(128, 128, 1, 8, 4),
    },
}
"""The rows up to which a launch takes a configuration; more take the last one."""


def choose_linear(arch: int, dtype: torch.dtype, num_rows: int) -> LinearConfig:
    """The configuration of a linear layer over quantized weights.

    Args:
        arch: from `architecture`.
        dtype: of the layer's inputs: float32, float16 or bfloat16.
        num_rows: of them, at least 1.
    """
    kind = {INTERPRETER: "interpreted", 75: "turing"}.get(arch, "half" if dtype.itemsize == 2 else "single")
    row = _LINEAR[kind]
    return row[min((most for most in row if num_rows <= most), default=max(row))]


def merge_warps(padded_splits: int, padded_head_dim: int) -> int:
    """Warps of `merge_kernel`: a program holds all its splits' accumulators, at most 128 numbers per thread."""
    return max(4, padded_splits * padded_head_dim // (32 * 128))


def _power_of_2(number: int) -> int:
    """The smallest power of two that is not below `number` ≥ 1."""
    return 1 << (number - 1).bit_length()
