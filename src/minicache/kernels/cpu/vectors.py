"""Eight float32 at a time, in Triton's vocabulary: load, store, full, fma, maximum, exp.

A value of the type `float32x8` is LLVM's vector `<8 x float>`: one register on a processor with AVX, two where
registers hold four numbers. Operations are lane by lane, without bounds checks.

Memory may also hold one byte per number: int8, or float8_e4m3fn, which numba lacks and which is passed as uint8. The
array's dtype decides at compile time: `load` converts its numbers to float32, and `store` rounds to them.

Numba caches compiled code until the kernel's own file changes, and ignores changes to this one. So each kernel's file
contains a hash of this one, and a test compares them.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

LANES = 8
OPTIONS = {"nogil": True, "cache": True, "error_model": "numpy", "boundscheck": False}
"""How kernels are compiled: without the interpreter's lock, kept on disk, without checks of bounds or divisors."""
INLINE = {"forceinline": True, "error_model": "numpy", "boundscheck": False}
"""How a part of a kernel is compiled: as if it were written there."""

_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
_FLOATS, _INTS = ir.VectorType(_FLOAT, LANES), ir.VectorType(_INT, LANES)
_BYTES = ir.VectorType(ir.IntType(8), LANES)


class Float32x8(types.Type):  # type: ignore[misc]
    """Numba's type of eight float32."""

    def __init__(self):
        super().__init__("float32x8")


float32x8 = Float32x8()


@register_model(Float32x8)
class _Float32x8Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, _FLOATS)


def _floats(*numbers):
    return ir.Constant(_FLOATS, list(numbers) * (LANES // len(numbers)))


def _ints(*numbers):
    return ir.Constant(_INTS, list(numbers) * (LANES // len(numbers)))


def _pointer(context, builder, array_type, vector, array, index):
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), vector.as_pointer())


def _magnitude(builder, vector):
    """The bits of |x|, which are ordered as the numbers are, with infinity and then NaN at the end."""
    return builder.and_(builder.bitcast(vector, _INTS), _ints(0x7FFFFFFF))


@intrinsic
def load(typingctx, array, index):
    """The eight numbers from element `index` of the memory that an array begins at, whatever its shape.

    Of float32, of int8, or of float8_e4m3fn as uint8, whose code 0x7F is NaN.
    """

    def generate(context, builder, signature, args):
        array_type = signature.args[0]
        if array_type.dtype == types.float32:
            return builder.load(_pointer(context, builder, array_type, _FLOATS, *args), align=4)
        codes = builder.load(_pointer(context, builder, array_type, _BYTES, *args), align=1)
        codes = builder.sext(codes, _INTS)
        if array_type.dtype == types.int8:
            return builder.sitofp(codes, _FLOATS)
        # Sign, exponent and mantissa as float32 has them. Its exponent counts from 2**-127 instead of 2**-7, for
        # numbers below the smallest normal one too: what is missing is a factor of 2**120.
        bits = builder.and_(builder.shl(codes, _ints(20)), _ints(0x87F00000 - 2**32))
        numbers = builder.fmul(builder.bitcast(bits, _FLOATS), _floats(2.0**120))
        is_nan = builder.icmp_signed("==", _magnitude(builder, numbers), _ints(0x43F00000))  # 480, what 0x7F would be
        return builder.select(is_nan, _floats(float("nan")), numbers)

    return float32x8(array, types.intp), generate


@intrinsic
def store(typingctx, array, index, vector):
    """Write eight numbers, from element `index` of the memory that an array begins at.

    In one byte per number it stores the nearest value, ties to even. The vector must be in range, and not NaN.
    """

    def generate(context, builder, signature, args):
        array_type, vector = signature.args[0], args[2]
        if array_type.dtype == types.float32:
            builder.store(vector, _pointer(context, builder, array_type, _FLOATS, *args[:2]), align=4)
            return context.get_dummy_value()
        if array_type.dtype == types.int8:
            # Where a float32 has no bits behind the point, the sum rounds: the integer is in its low bits.
            codes = builder.bitcast(builder.fadd(vector, _floats(1.5 * 2.0**23)), _INTS)
        else:
            codes = _e4m3(builder, vector)
        codes = builder.trunc(codes, _BYTES)
        builder.store(codes, _pointer(context, builder, array_type, _BYTES, *args[:2]), align=1)
        return context.get_dummy_value()

    return types.none(array, types.intp, float32x8), generate


def _e4m3(builder, vector):
    """The codes of the nearest numbers of float8_e4m3fn, |x| ≤ 448, in the low bits of integers."""
    size = _magnitude(builder, vector)
    # From 2**-6 on: round to 3 bits behind the point, to even where two are as near, and count exponents from 2**-7.
    is_odd = builder.and_(builder.lshr(size, _ints(20)), _ints(1))
    rounded = builder.add(size, builder.add(is_odd, _ints(0x7FFFF)))
    normal = builder.sub(builder.lshr(rounded, _ints(20)), _ints(120 << 3))
    # Below: multiples of 2**-9, which is what the last bit of a float32 from 2**14 on counts.
    sum_bits = builder.bitcast(builder.fadd(builder.bitcast(size, _FLOATS), _floats(2.0**14)), _INTS)
    small = builder.and_(sum_bits, _ints(0xF))
    code = builder.select(builder.icmp_signed("<", size, _ints(0x3C800000)), small, normal)  # 2**-6
    sign = builder.and_(builder.lshr(builder.bitcast(vector, _INTS), _ints(24)), _ints(0x80))
    return builder.or_(code, sign)


@intrinsic
def largest_number(typingctx, array):
    """The largest number used in an array of one byte per number: 127 for int8, 448 for float8_e4m3fn."""

    def generate(context, builder, signature, args):
        return ir.Constant(_FLOAT, 127.0 if signature.args[0].dtype == types.int8 else 448.0)

    return types.float32(array), generate


@intrinsic
def load_halves(typingctx, array, first, second):
    """Four numbers from element `first` of a float32 array, then four from element `second`."""

    def generate(context, builder, signature, args):
        four = ir.VectorType(_FLOAT, LANES // 2)
        halves = [
            builder.load(_pointer(context, builder, signature.args[0], four, args[0], index), align=4)
            for index in args[1:]
        ]
        return builder.shuffle_vector(*halves, ir.Constant(_INTS, list(range(LANES))))

    return float32x8(array, types.intp, types.intp), generate


@intrinsic
def full(typingctx, number):
    """A number in each lane."""

    def generate(context, builder, signature, args):
        undefined = ir.Constant(_FLOATS, ir.Undefined)
        one = builder.insert_element(undefined, args[0], ir.Constant(_INT, 0))
        return builder.shuffle_vector(one, undefined, ir.Constant(_INTS, [0] * LANES))

    return float32x8(types.float32), generate


@intrinsic
def fma(typingctx, a, b, c):
    """a · b + c, rounded once where the processor can."""

    def generate(context, builder, signature, args):
        product = builder.fmul(args[0], args[1], flags=("contract",))
        return builder.fadd(product, args[2], flags=("contract",))

    return float32x8(float32x8, float32x8, float32x8), generate


@intrinsic
def add(typingctx, a, b):
    """a + b."""

    def generate(context, builder, signature, args):
        return builder.fadd(*args)

    return float32x8(float32x8, float32x8), generate


@intrinsic
def sub(typingctx, a, b):
    """a − b."""

    def generate(context, builder, signature, args):
        return builder.fsub(*args)

    return float32x8(float32x8, float32x8), generate


@intrinsic
def mul(typingctx, a, b):
    """a · b."""

    def generate(context, builder, signature, args):
        return builder.fmul(*args)

    return float32x8(float32x8, float32x8), generate


@intrinsic
def div(typingctx, a, b):
    """a / b."""

    def generate(context, builder, signature, args):
        return builder.fdiv(*args)

    return float32x8(float32x8, float32x8), generate


@intrinsic
def maximum(typingctx, a, b):
    """The larger of a and b, and b where a is NaN."""

    def generate(context, builder, signature, args):
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return float32x8(float32x8, float32x8), generate


@intrinsic
def larger_magnitude(typingctx, a, b):
    """|a| or |b|, the larger one; NaN where either is."""

    def generate(context, builder, signature, args):
        sizes = [_magnitude(builder, each) for each in args]
        return builder.bitcast(builder.select(builder.icmp_signed(">", *sizes), *sizes), _FLOATS)

    return float32x8(float32x8, float32x8), generate


@intrinsic
def largest_magnitude(typingctx, vector):
    """The largest |x| of all lanes; NaN if one is NaN."""

    def generate(context, builder, signature, args):
        sizes = _magnitude(builder, args[0])
        for mask in ([4, 5, 6, 7, 0, 1, 2, 3], [2, 3, 0, 1, 6, 7, 4, 5], [1, 0, 3, 2, 5, 4, 7, 6]):
            others = builder.shuffle_vector(sizes, sizes, ir.Constant(_INTS, mask))
            sizes = builder.select(builder.icmp_signed(">", sizes, others), sizes, others)
        return builder.extract_element(builder.bitcast(sizes, _FLOATS), ir.Constant(_INT, 0))

    return types.float32(float32x8), generate


@intrinsic
def where_at_least(typingctx, x, bound, a, b):
    """a where x ≥ bound or x is NaN, else b."""

    def generate(context, builder, signature, args):
        return builder.select(builder.fcmp_unordered(">=", *args[:2]), *args[2:])

    return float32x8(float32x8, float32x8, float32x8, float32x8), generate


@intrinsic
def keep(typingctx, vector, count, other):
    """The first `count` lanes of each half, and a number in those after them: `tl.where(mask, …)` of a tail."""

    def generate(context, builder, signature, args):
        lanes = ir.Constant(_INTS, [lane % 4 for lane in range(LANES)])
        count = builder.trunc(args[1], _INT)
        one = builder.insert_element(ir.Constant(_INTS, ir.Undefined), count, ir.Constant(_INT, 0))
        counts = builder.shuffle_vector(one, one, ir.Constant(_INTS, [0] * LANES))
        other = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), args[2], ir.Constant(_INT, 0))
        others = builder.shuffle_vector(other, other, ir.Constant(_INTS, [0] * LANES))
        return builder.select(builder.icmp_signed("<", lanes, counts), args[0], others)

    return float32x8(float32x8, types.intp, types.float32), generate


@intrinsic
def largest_of_halves(typingctx, vector):
    """The largest of the first four lanes in these four, and of the last four in those; of a vector without NaN."""

    def generate(context, builder, signature, args):
        tops = args[0]
        for mask in ([1, 0, 3, 2, 5, 4, 7, 6], [2, 3, 0, 1, 6, 7, 4, 5]):
            others = builder.shuffle_vector(tops, tops, ir.Constant(_INTS, mask))
            tops = builder.select(builder.fcmp_ordered(">", tops, others), tops, others)
        return tops

    return float32x8(float32x8), generate


_PAIRS = ([0, 9, 2, 11, 4, 13, 6, 15], [1, 8, 3, 10, 5, 12, 7, 14])
_QUADS = ([0, 1, 10, 11, 4, 5, 14, 15], [2, 3, 8, 9, 6, 7, 12, 13])
_HALVES = ([0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11])


@intrinsic
def totals(typingctx, a, b, c, d, e, f, g, h):
    """The sums of eight vectors, in the lanes of one."""

    def generate(context, builder, signature, args):
        def combine(x, y, masks):
            parts = [builder.shuffle_vector(x, y, ir.Constant(_INTS, mask)) for mask in masks]
            return builder.fadd(*parts)

        vectors = list(args)
        for masks in (_PAIRS, _QUADS, _HALVES):
            vectors = [combine(x, y, masks) for x, y in zip(vectors[::2], vectors[1::2], strict=True)]
        return vectors[0]

    return float32x8(*[float32x8] * LANES), generate


@intrinsic
def _times_power_of_two(typingctx, p, shifted):
    """p · 2**n, where `shifted` is 1.5 · 2**23 + n: n, in the low bits of `shifted`, is added to p's exponent."""

    def generate(context, builder, signature, args):
        exponent = builder.shl(builder.bitcast(args[1], _INTS), ir.Constant(_INTS, [23] * LANES))
        return builder.bitcast(builder.add(builder.bitcast(args[0], _INTS), exponent), _FLOATS)

    return float32x8(float32x8, float32x8), generate


_F = np.float32
_ZERO, _ONE, _LOW, _HIGH = _F(0.0), _F(1.0), _F(-87.0), _F(88.0)
_SHIFT, _LOG2_E = _F(1.5 * 2**23), _F(1.44269504088896341)
_LN_2_HIGH, _LN_2_LOW = _F(-0.693359375), _F(2.12194440e-4)
_C0, _C1, _C2 = _F(1.9875691500e-4), _F(1.3981999507e-3), _F(8.3334519073e-3)
_C3, _C4, _C5 = _F(4.1665795894e-2), _F(1.6666665459e-1), _F(5.0000001201e-1)


@njit(**INLINE)
def exp(x):
    """e**x in each lane, to 1e-7 of it (Cephes' polynomial); 0 below −87, e**88 above 88, NaN for NaN."""
    capped = where_at_least(full(_HIGH), x, x, full(_HIGH))
    shifted = fma(capped, full(_LOG2_E), full(_SHIFT))  # the integer part, in the low bits
    n = sub(shifted, full(_SHIFT))
    r = fma(n, full(_LN_2_LOW), fma(n, full(_LN_2_HIGH), capped))
    p = fma(full(_C0), r, full(_C1))
    p = fma(p, r, full(_C2))
    p = fma(p, r, full(_C3))
    p = fma(p, r, full(_C4))
    p = fma(p, r, full(_C5))
    p = fma(mul(p, r), r, add(r, full(_ONE)))
    return where_at_least(x, full(_LOW), _times_power_of_two(p, shifted), full(_ZERO))
