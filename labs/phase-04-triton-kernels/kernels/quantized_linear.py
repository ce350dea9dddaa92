# Phase 4, triton-kernels: your file. It stands in for minicache.kernels.quantized_linear.
# Write what raises NotImplementedError. `minicache grade 4` grades it, `minicache hint 4.K` helps with task K.
"""A linear layer that reads weights of a byte or of four bits, and dequantizes them in registers. Phase 4 builds it.

Decode reads every weight for a few rows, so its time is that of reading them. Writing the dequantized weights to
memory, for another kernel to multiply by, would move more bytes than weights of half precision; so one kernel does
both. Few programs share a small layer: a tile is wide, so each has kilobytes of weights in flight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minicache.kernels import configs, runtime
from minicache.kernels.decode import dot_dtype
from minicache.kernels.group_quantize import GROUP as GROUP_SIZE
from minicache.kernels.group_quantize import GroupQuantized


@triton.jit
def dequantize_tile(numbers, scale, minimum):
    """Weights in fp32: each number times its group's scale, plus its group's minimum if there is one.

    Not a kernel but a function that kernels call. `tl.reshape(x, [a, b, c])` keeps the order of the elements; its sizes
    are constants, as a tile's `x.shape[0]` is.

    Tiles:
        numbers: `[OUTPUTS, n · GROUPS]` integers: n consecutive ones of each group.
        scale: `[OUTPUTS, GROUPS]` fp32.
        minimum: likewise, or None.

    Result:
        `[OUTPUTS, n · GROUPS]` fp32.
    """
    raise NotImplementedError(
        "phase 4, task 11: A linear layer over few bits; read docs/en/phase-04-triton-kernels/lab/07-weights-of-few-bits.md"
    )


@triton.jit
def quantized_linear_kernel(
    hidden_ptr,
    numbers_ptr,
    scale_ptr,
    minimum_ptr,
    out_ptr,
    num_rows,
    num_outputs,
    num_groups,
    hidden_strides,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_BYTES: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    """One program computes a tile of the output, ROWS rows of hidden times OUTPUTS outputs of the weight.

    Grid (⌈num_outputs / OUTPUTS⌉, ⌈num_rows / ROWS⌉). A program loops over the groups, GROUPS at a time: it loads their
    bytes, scales and minimums, and the inputs of its rows, and adds the product to fp32 sums. Each byte is
    loaded once. The last tile of rows, of outputs and of groups may be incomplete.

    A group of a row of the weight has NUM_BYTES bytes. With one for each input (int8), byte i is the number of input i
    of the group. With one for two inputs (four bits), its low half is the number of input i, its high half that of
    input i + GROUP / 2; both are 0 … 15. Load the inputs of the low halves and those of the high halves apart.

    Pointers:
        hidden_ptr: `[num_rows, num_groups · GROUP]`, fp32, fp16 or bf16; convert to DOT_DTYPE right after the load.
        numbers_ptr: `[num_outputs, num_groups · NUM_BYTES]`, contiguous, int8; or uint8 for four bits.
        scale_ptr: `[num_outputs, num_groups]` fp16, contiguous. Convert to fp32 before any arithmetic.
        minimum_ptr: likewise; None for int8.
        out_ptr: `[num_rows, num_outputs]`, contiguous, of the dtype `out_ptr.dtype.element_ty`.

    Numbers: num_rows, num_outputs, num_groups, any ≥ 1. hidden_strides: a tuple, of rows and of inputs, in elements,
    arbitrary. Multiply rows and outputs in int64.

    Constants:
        ROWS: a power of two of at least 16, which tensor cores need.
        OUTPUTS: a power of two of at least 16.
        GROUPS: a power of two.
        GROUP: inputs that share a scale, 32.
        NUM_BYTES: GROUP for int8, GROUP / 2 for four bits.
        DOT_DTYPE: the dtype of `tl.dot`'s operands.
    """
    raise NotImplementedError(
        "phase 4, task 11: A linear layer over few bits; read docs/en/phase-04-triton-kernels/lab/07-weights-of-few-bits.md"
    )


def linear(hidden: Tensor, weight: GroupQuantized) -> Tensor:
    """Launch `quantized_linear_kernel`: one program per tile. `minicache.kernels.linear` checked the arguments.

    Without rows nothing is launched.

    Args:
        hidden: `[N, in]`, float32, float16 or bfloat16; any strides.
        weight: `[out, in]`, contiguous.

    Returns:
        `[N, out]`, the dtype of `hidden`.
    """
    num_rows, (num_outputs, num_groups) = len(hidden), weight.scale.shape
    # Under the interpreter a store to bf16 truncates, so the launcher converts.
    dtype = torch.float32 if runtime.interpreting() else hidden.dtype
    out = torch.empty(num_rows, num_outputs, dtype=dtype, device=hidden.device)
    if num_rows == 0:
        return out.to(hidden.dtype)
    config = configs.choose_linear(configs.architecture(hidden.device), hidden.dtype, num_rows)
    quantized_linear_kernel[(triton.cdiv(num_outputs, config.outputs), triton.cdiv(num_rows, config.rows))](
        hidden,
        weight.numbers,
        weight.scale,
        weight.minimum,
        out,
        num_rows,
        num_outputs,
        num_groups,
        hidden.stride(),
        ROWS=config.rows,
        OUTPUTS=config.outputs,
        GROUPS=config.groups,
        GROUP=GROUP_SIZE,
        NUM_BYTES=weight.numbers.shape[1] // num_groups,
        DOT_DTYPE=dot_dtype(hidden),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out.to(hidden.dtype)
