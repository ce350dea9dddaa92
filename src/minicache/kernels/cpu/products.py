"""A linear layer on a CPU: rows times weights that lie in the order in which the processor wants them.

Of a weight `[out, in]`, PANEL outputs make a panel: for each input their PANEL numbers side by side, one register or
two. A tile, some rows times a panel, keeps its sums in registers from the first input to the last; so each number of
the weights is read once for up to TILE_ROWS rows, and of few rows the product costs what reading the weights costs.
Weights of one byte or of four bits make decoding faster, then: they become float32 in a register.

Each output is summed in the order of the inputs, whatever the other rows are: a row gives the same numbers, to the
last bit, in every batch.

The blocking is that of Goto and van de Geijn (2008), "Anatomy of High-Performance Matrix Multiplication".
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.extending import intrinsic

from minicache.kernels.cpu.vectors import INLINE, OPTIONS

PANEL: Final = 32
"""Outputs of a panel."""
GROUP: Final = 32
"""Inputs that share a scale, where weights are quantized (`minicache.kernels.group_quantize`)."""

# 32 registers of sixteen numbers, or 16 of eight: 24 or 12 sums, two weights, and an input.
_IS_WIDE: Final = bool(binding.get_host_cpu_features().get("avx512f"))
_LANES: Final = 16 if _IS_WIDE else 8
STRIP: Final = 2 * _LANES
STRIPS: Final = PANEL // STRIP
TILE_ROWS: Final = 12 if _IS_WIDE else 6
"""The most rows of a tile."""
_LINE_NBYTES: Final = 64
"""What a CPU fetches at a time."""
CHUNK_ROWS: Final = 240
"""Rows that go through all panels before the next do, so their inputs stay in the CPU's cache."""

_FLOAT, _INT, _SIZE, _BYTE = ir.FloatType(), ir.IntType(32), ir.IntType(64), ir.IntType(8)
_FLOATS, _INTS = ir.VectorType(_FLOAT, _LANES), ir.VectorType(_INT, _LANES)
_BYTES, _HALVES = ir.VectorType(_BYTE, _LANES), ir.VectorType(ir.IntType(16), _LANES)


def _size(number):
    return ir.Constant(_SIZE, number)


def _ints(number):
    return ir.Constant(_INTS, [number] * _LANES)


def _spread(builder, number):
    """A number in each lane."""
    undefined = ir.Constant(_FLOATS, ir.Undefined)
    one = builder.insert_element(undefined, number, ir.Constant(_INT, 0))
    return builder.shuffle_vector(one, undefined, ir.Constant(_INTS, [0] * _LANES))


def _multiply_add(builder, a, b, c):
    return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))


def _prefetch(builder, place):
    """Have the CPU fetch what lies at a place into its second-level cache. Any address will do."""
    kind = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), _INT, _INT, _INT])
    fetch = builder.module.declare_intrinsic("llvm.prefetch", [_BYTE.as_pointer()], kind)
    is_read, locality, is_data = (ir.Constant(_INT, number) for number in (0, 2, 1))
    builder.call(fetch, [place, is_read, locality, is_data])


def _widen(builder, halves):
    """float16, finite, as float32. Not LLVM's conversion: it calls a library where a processor has no instruction."""
    codes = builder.zext(halves, _INTS)
    # Sign, exponent and mantissa as float32 has them. Its exponent counts from 2**-127 instead of 2**-15, for numbers
    # below the smallest normal one too: what is missing is a factor of 2**112.
    bits = builder.or_(
        builder.shl(builder.and_(codes, _ints(0x7FFF)), _ints(13)),
        builder.shl(builder.and_(codes, _ints(0x8000)), _ints(16)),
    )
    return builder.fmul(builder.bitcast(bits, _FLOATS), ir.Constant(_FLOATS, [2.0**112] * _LANES))


def _repeat(builder, count, values, body):
    """`values = body(i, values)` for i from 0 to `count` − 1, at least once; the values stay in registers."""
    before, block = builder.basic_block, builder.append_basic_block("loop")
    builder.branch(block)
    builder.position_at_end(block)
    index, inside = builder.phi(_SIZE), [builder.phi(value.type) for value in values]
    after = body(index, inside)
    following = builder.add(index, _size(1))
    for phi, first, later in zip([index, *inside], [_size(0), *values], [following, *after], strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(later, builder.basic_block)
    end = builder.append_basic_block("end")
    builder.cbranch(builder.icmp_signed("<", following, count), block, end)
    builder.position_at_end(end)
    return after


def _tile_of(num_rows, strip):
    """The intrinsic of a tile: sums over `depth` inputs of `num_rows` rows times a strip of a panel.

    Input k of row r is x[x_at + k · stride + r]; its weights are row first + k of `numbers`, seen as `[…, PANEL]`. The
    row that is `ahead` of it is fetched into the CPU's cache. Results go to out[out_at + r · width + output].
    """
    outputs = [strip * STRIP, strip * STRIP + _LANES]  # of a panel, the first of each register

    @intrinsic
    def tile(typingctx, x, x_at, stride, depth, numbers, first, ahead, scale, minimum, out, out_at, width):
        def generate(context, builder, signature, args):
            def pointer(position, element, kind):
                data = context.make_array(signature.args[position])(context, builder, args[position]).data
                return builder.bitcast(builder.gep(data, [element]), kind.as_pointer())

            x_at, stride, depth, first, ahead, out_at, width = (args[i] for i in (1, 2, 3, 5, 6, 10, 11))
            kind = signature.args[4].dtype

            def input_of(k, row):
                at = builder.add(x_at, builder.add(builder.mul(k, stride), _size(row)))
                return _spread(builder, builder.load(pointer(0, at, _FLOAT)))

            def group_values(position, group):
                """The strip's scales or minimums of a group of inputs: float16 in memory."""
                at = builder.mul(builder.add(builder.sdiv(first, _size(GROUP)), group), _size(PANEL))
                places = [builder.add(at, _size(output)) for output in outputs]
                return [_widen(builder, builder.load(pointer(position, place, _HALVES), align=2)) for place in places]

            def weights_of(k, group):
                row = builder.add(first, k)
                row_nbytes = PANEL // 2 if kind == types.uint8 else PANEL * kind.bitwidth // 8
                for at in range(0, row_nbytes // STRIPS, _LINE_NBYTES):
                    place = builder.mul(builder.add(row, ahead), _size(row_nbytes))
                    at += strip * row_nbytes // STRIPS
                    data = builder.bitcast(pointer(4, _size(0), _BYTE), _BYTE.as_pointer())
                    _prefetch(builder, builder.gep(data, [builder.add(place, _size(at))]))
                if kind == types.uint8:
                    at = builder.mul(row, _size(PANEL // 2))
                    places = [builder.add(at, _size(output % (PANEL // 2))) for output in outputs]
                    codes = [builder.zext(builder.load(pointer(4, place, _BYTES), align=1), _INTS) for place in places]
                    # Output j is in the low half of byte j, output j + 16 in the high one.
                    halves = [4 * (output // (PANEL // 2)) for output in outputs]
                    codes = [
                        builder.and_(builder.lshr(code, _ints(half)), _ints(15))
                        for code, half in zip(codes, halves, strict=True)
                    ]
                    vectors = [builder.sitofp(code, _FLOATS) for code in codes]
                    return [_multiply_add(builder, *each) for each in zip(vectors, *group, strict=True)]
                at = builder.mul(row, _size(PANEL))
                places = [builder.add(at, _size(output)) for output in outputs]
                if kind == types.float32:
                    return [builder.load(pointer(4, place, _FLOATS), align=4) for place in places]
                codes = [builder.load(pointer(4, place, _BYTES), align=1) for place in places]
                return [builder.sitofp(builder.sext(code, _INTS), _FLOATS) for code in codes]

            def add_input(k, group, sums):
                weights = weights_of(k, group)
                inputs = [input_of(k, row) for row in range(num_rows)]
                return [
                    _multiply_add(builder, inputs[at // 2], weights[at % 2], total) for at, total in enumerate(sums)
                ]

            def add_group(group, sums):
                values = [group_values(position, group) for position in (7, 8) if signature.args[position] != none]
                start = builder.mul(group, _size(GROUP))

                def add(i, inside):
                    return add_input(builder.add(start, i), values, inside)

                if kind == types.uint8:
                    return _repeat(builder, _size(GROUP), sums, add)
                parts = _repeat(builder, _size(GROUP), zeros, add)  # in int8 the scale is a factor of the whole group
                [scales] = values
                return [
                    _multiply_add(builder, part, scales[at % 2], total)
                    for at, (part, total) in enumerate(zip(parts, sums, strict=True))
                ]

            none, zeros = types.none, [ir.Constant(_FLOATS, [0.0] * _LANES)] * (2 * num_rows)
            if kind == types.float32:
                sums = _repeat(builder, depth, zeros, lambda k, inside: add_input(k, None, inside))
            else:
                sums = _repeat(builder, builder.sdiv(depth, _size(GROUP)), zeros, add_group)
            for at, total in enumerate(sums):
                place = builder.add(out_at, builder.mul(width, _size(at // 2)))
                place = builder.add(place, _size(at % 2 * _LANES))
                builder.store(total, pointer(9, place, _FLOATS), align=4)
            return context.get_dummy_value()

        size = types.intp
        signature = types.none(x, size, size, size, numbers, size, size, scale, minimum, out, size, size)
        return signature, generate

    return tile


def _choose():
    """A function that calls a tile. Each is code of its own, so the choice is written out."""
    names = "x, x_at, stride, depth, numbers, first, ahead, scale, minimum, out, out_at, width"
    tiles = {(rows, strip): f"tile_{rows}_{strip}" for rows in range(1, TILE_ROWS + 1) for strip in range(STRIPS)}
    lines = [f"def choose(num_rows, strip, {names}):"]
    lines += [f"    if num_rows == {rows} and strip == {at}: {name}({names})" for (rows, at), name in tiles.items()]
    namespace: dict[str, Any] = {name: _tile_of(*shape) for shape, name in tiles.items()}
    exec("\n".join(lines), namespace)
    return njit(**INLINE)(namespace["choose"])


tile = _choose()


@njit(**OPTIONS)
def product(x, numbers, scale, minimum, columns, out, first, last):
    """Some panels of `out = x · weightᵀ`: x `[N, in]`, out `[N, width]`, each row contiguous.

    Args:
        x: float32.
        numbers: `[panels, in, PANEL]`, float32 or int8; or uint8 `[panels, in, PANEL / 2]`, two numbers of four bits in
            a byte, j and j + 16.
        scale: of each group, `[panels, in / GROUP, PANEL]` float16 as uint16; None for float32.
        minimum: likewise, what is added to a number of four bits times its scale; None otherwise.
        columns: of each panel its first column of out, and how many are its own, `[panels, 2]`.
        out: what is computed is written.
        first: the first panel to compute.
        last: the panel after the last.
    """
    num_rows, depth = x.shape
    width = out.shape[1]
    packed = np.empty(min(num_rows, CHUNK_ROWS) * depth, np.float32)
    part = np.empty((TILE_ROWS, PANEL), np.float32)
    for chunk in range(0, num_rows, CHUNK_ROWS):
        end = min(num_rows, chunk + CHUNK_ROWS)
        num_tiles = (end - chunk + TILE_ROWS - 1) // TILE_ROWS
        most = (end - chunk + num_tiles - 1) // num_tiles
        for row in range(chunk, end, most):  # of each tile the inputs side by side, in the order in which they are read
            count, at = min(most, end - row), (row - chunk) * depth
            for k in range(depth):
                for i in range(count):
                    packed[at + k * count + i] = x[row + i, k]
        for panel in range(first, last):
            column, own = columns[panel, 0], columns[panel, 1]
            begin = panel * depth
            for row in range(chunk, end, most):
                count, at = min(most, end - row), (row - chunk) * depth
                # The last panel may have fewer outputs than PANEL: of it all are computed, and its own are kept.
                into = out if own == PANEL else part
                to, wide = (row * width + column, width) if own == PANEL else (0, PANEL)
                for strip in range(STRIPS):
                    place = to + strip * STRIP
                    tile(
                        count, strip, packed, at, count, depth, numbers, begin, depth, scale, minimum, into, place, wide
                    )
                if own < PANEL:
                    for i in range(count):
                        for j in range(own):
                            out[row + i, column + j] = part[i, j]


_X, _CODES = "float32[:, ::1]", "uint16[:, :, ::1]"

SIGNATURES: Final = [
    f"void({_X}, {numbers}[:, :, ::1], {scale}, {minimum}, int64[:, ::1], {_X}, int64, int64)"
    for numbers, scale, minimum in (
        ("float32", "none", "none"),
        ("int8", _CODES, "none"),
        ("uint8", _CODES, _CODES),
    )
]
"""What `product` is compiled for."""
