"""Vectors and register blocks as Numba types: what plain Numba loops cannot promise about the machine code.

A `Block` is a value of ROWS x VECTORS vector registers (or one row of them). A matrix multiply that keeps its sums in
a block from the first product to the last reaches the peak of a core; LLVM does not find this in a triple loop.

All matrices here are *tiles*: two-dimensional arrays (layout "A") whose rows are contiguous. Blocks are loaded and
stored `width` columns at a time; nothing checks bounds.
"""

import math
import operator

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic, models, overload, register_model
from numba.np.arrayobj import make_array


def _host():
    """Bytes of a vector register and rows of a block, for the CPU that Numba compiles for."""
    triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    if "+avx512f" in features:
        return 64, 8
    if "+avx" in features:
        return 32, 4
    return 16, 4 if triple.startswith(("x86", "i")) else 8


# A block is ROWS x VECTORS registers of sums; beside them a multiply needs VECTORS + 1 more. 8 x 2 fills the two FMA
# units for the four cycles that a sum takes, and 64 and 128, the usual head sizes, are multiples of both its sides.
# On one AVX-512 core 8 x 2 reaches 165-195 GFLOP/s, 12 x 2 175-188, 6 x 4 120-200 (it overflows L1), 4 x 4 120-160.
# With 16 registers (AVX2, SSE) there is room for 4 rows.
VECTOR_BYTES, ROWS = _host()
VECTORS = 2

_INT64, _INT32 = ir.IntType(64), ir.IntType(32)


class Block(types.Type):
    """`rows` x VECTORS vectors of `dtype` in registers."""

    def __init__(self, dtype, rows):
        self.dtype, self.rows = dtype, rows
        self.lanes = VECTOR_BYTES * 8 // dtype.bitwidth
        self.element = ir.FloatType() if dtype == types.float32 else ir.DoubleType()
        self.vector = ir.VectorType(self.element, self.lanes)
        self.array = ir.ArrayType(self.vector, rows * VECTORS)
        super().__init__(f"Block({dtype}, {rows})")


@register_model(Block)
class _BlockModel(models.PrimitiveModel):
    def __init__(self, manager, block):
        super().__init__(manager, block, block.array)


def lanes(tile):
    """Elements of one vector register, for the dtype of a tile."""


def width(tile):
    """Columns of one block, for the dtype of a tile: what the columns of every tile are padded to."""


@overload(lanes)
def _lanes(tile):
    n = VECTOR_BYTES * 8 // tile.dtype.bitwidth
    return lambda tile: n


@overload(width)
def _width(tile):
    n = VECTORS * VECTOR_BYTES * 8 // tile.dtype.bitwidth
    return lambda tile: n


# ---- addresses

def _address(context, builder, array_type, value, row, column):
    """Pointer to element (row, column) of a two-dimensional array, and its two strides in bytes."""
    array = make_array(array_type)(context, builder, value)
    strides = cgutils.unpack_tuple(builder, array.strides)
    offset = builder.add(builder.mul(row, strides[0]), builder.mul(column, strides[1]))
    base = builder.bitcast(array.data, ir.IntType(8).as_pointer())
    return builder.gep(base, [offset]), strides


def _vector_addresses(context, builder, array_type, value, row, column, block):
    """Pointers to the vectors of `block` at (row, column) of a tile, in the order in which a Block holds them."""
    pointer, strides = _address(context, builder, array_type, value, row, column)
    for r in range(block.rows):
        for v in range(VECTORS):
            p = builder.gep(pointer, [ir.Constant(_INT64, v * VECTOR_BYTES)])
            yield builder.bitcast(p, block.vector.as_pointer())
        pointer = builder.gep(pointer, [strides[0]])


def _load(builder, pointer, block):
    loaded = builder.load(pointer)
    loaded.align = block.dtype.bitwidth // 8
    return loaded


def _splat(builder, scalar, block):
    """The vector that holds `scalar` in every lane."""
    undefined = ir.Constant(block.vector, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_INT32, 0))
    zeros = ir.Constant(ir.VectorType(_INT32, block.lanes), [0] * block.lanes)
    return builder.shuffle_vector(first, undefined, zeros)


def _pack(builder, block, vectors):
    value = ir.Constant(block.array, ir.Undefined)
    for i, vector in enumerate(vectors):
        value = builder.insert_value(value, vector, i)
    return value


# ---- loads, stores, and the update that a multiply is made of

def _make_load(rows):
    @intrinsic
    def load(typing, tile, row, column):
        block = Block(tile.dtype, rows)

        def codegen(context, builder, sig, args):
            addresses = _vector_addresses(context, builder, sig.args[0], *args, block)
            return _pack(builder, block, [_load(builder, p, block) for p in addresses])

        return block(tile, types.intp, types.intp), codegen

    return load


load_row = _make_load(1)
load_block = _make_load(ROWS)


def _make_zeros(rows):
    @intrinsic
    def zeros(typing, tile):
        block = Block(tile.dtype, rows)

        def codegen(context, builder, sig, args):
            return ir.Constant(block.array, None)

        return block(tile), codegen

    return zeros


zero_row = _make_zeros(1)
zero_block = _make_zeros(ROWS)


@intrinsic
def store(typing, block, tile, row, column):
    """Write a block, or a row, at (row, column) of a tile."""

    def codegen(context, builder, sig, args):
        value, tile_value, row, column = args
        addresses = _vector_addresses(context, builder, sig.args[1], tile_value, row, column, block)
        for i, pointer in enumerate(addresses):
            stored = builder.store(builder.extract_value(value, i), pointer)
            stored.align = block.dtype.bitwidth // 8
        return context.get_dummy_value()

    return types.void(block, tile, types.intp, types.intp), codegen


@intrinsic
def rank1(typing, block, a, row, k, b, column):
    """``block + a[row:row + ROWS, k] * b[k, column:column + width]``, the outer product; `a` may have any strides."""

    def codegen(context, builder, sig, args):
        value, a_value, row, k, b_value, column = args
        pointer, (row_stride, _) = _address(context, builder, sig.args[1], a_value, row, k)
        b_row = Block(block.dtype, 1)
        addresses = _vector_addresses(context, builder, sig.args[4], b_value, k, column, b_row)
        b_vectors = [_load(builder, p, b_row) for p in addresses]
        vectors = []
        for r in range(block.rows):
            scalar = builder.load(builder.bitcast(pointer, block.element.as_pointer()))
            factor = _splat(builder, scalar, block)
            for v in range(VECTORS):
                total = builder.extract_value(value, r * VECTORS + v)
                vectors.append(_fused(builder, factor, b_vectors[v], total))
            pointer = builder.gep(pointer, [row_stride])
        return _pack(builder, block, vectors)

    return block(block, a, types.intp, types.intp, b, types.intp), codegen


# ---- arithmetic, element by element; a scalar or a single row goes with every row

def _fused(builder, x, y, z):
    function_type = ir.FunctionType(x.type, [x.type] * 3)
    element = "f32" if isinstance(x.type.element, ir.FloatType) else "f64"
    name = f"llvm.fmuladd.v{x.type.count}{element}"
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), [x, y, z])


def _shape(*operands):
    """The Block that an elementwise operation on these types returns."""
    return max((t for t in operands if isinstance(t, Block)), key=lambda t: t.rows)


def _elementwise(context, builder, sig, args, emit):
    block = sig.return_type
    operands = []
    for kind, value in zip(sig.args, args):
        if isinstance(kind, Block):
            vectors = [builder.extract_value(value, i) for i in range(kind.rows * VECTORS)]
        else:
            vectors = [_splat(builder, context.cast(builder, value, kind, block.dtype), block)]
        operands.append(vectors * (block.rows * VECTORS // len(vectors)))
    return _pack(builder, block, [emit(builder, *vectors) for vectors in zip(*operands)])


def _binary(emit):
    @intrinsic
    def operation(typing, x, y):
        def codegen(context, builder, sig, args):
            return _elementwise(context, builder, sig, args, emit)

        return _shape(x, y)(x, y), codegen

    return operation


# x86 has these as one instruction each, and a NaN in the second operand comes out.
maximum = _binary(lambda b, x, y: b.select(b.fcmp_ordered(">", x, y), x, y))
minimum = _binary(lambda b, x, y: b.select(b.fcmp_ordered("<", x, y), x, y))

# y, and 0 where x is 0 whatever y is: NaN times a weight of nothing is nothing.
unless_zero = _binary(lambda b, x, y: b.select(b.fcmp_ordered("==", x, ir.Constant(x.type, None)),
                                               ir.Constant(x.type, None), y))


@intrinsic
def fma(typing, x, y, z):
    """``x * y + z``, rounded once where the CPU can."""

    def codegen(context, builder, sig, args):
        return _elementwise(context, builder, sig, args, _fused)

    return _shape(x, y, z)(x, y, z), codegen


def _overload_operator(function, emit):
    operation = _binary(emit)

    @overload(function)
    def implementation(x, y):
        if isinstance(x, Block) or isinstance(y, Block):
            return lambda x, y: operation(x, y)


_overload_operator(operator.add, lambda b, x, y: b.fadd(x, y))
_overload_operator(operator.sub, lambda b, x, y: b.fsub(x, y))
_overload_operator(operator.mul, lambda b, x, y: b.fmul(x, y))
_overload_operator(operator.truediv, lambda b, x, y: b.fdiv(x, y))


@intrinsic
def sum_of(typing, row):
    """The sum of all elements of a row, in a fixed order."""

    def codegen(context, builder, sig, args):
        vectors = [builder.extract_value(args[0], v) for v in range(VECTORS)]
        total = vectors[0]
        for vector in vectors[1:]:
            total = builder.fadd(total, vector)
        elements = [builder.extract_element(total, ir.Constant(_INT32, i)) for i in range(row.lanes)]
        while len(elements) > 1:
            elements = [builder.fadd(x, y) for x, y in zip(elements[::2], elements[1::2])]
        return elements[0]

    return row.dtype(row), codegen


# ---- exp and tanh

class _ExpConstants:
    """What `exp` needs to know about a floating format: `bits` of mantissa, `bias` of the exponent, and

    - log2(e) in two parts,
    - a polynomial c with ``2**f = 1 + f * c(f)`` on [-0.5, 0.5], fitted for the least largest relative error (1.9e-8
      and 3.5e-17: a third of the last bit),
    - `rounder`: adding it rounds to an integer, which then stands, with the bias, in the lowest bits of the sum.
    """

    def __init__(self, bits, bias, integer, log2_e, polynomial):
        self.bits, self.bias, self.integer, self.log2_e, self.polynomial = bits, bias, integer, log2_e, polynomial
        self.rounder = 1.5 * 2.0**bits + bias
        # From here down 2**n is 0, and from here up it is Inf.
        self.lowest, self.highest = -bias * math.log(2), (bias + 1.01) * math.log(2)


_EXP = {
    types.float32: _ExpConstants(23, 127, _INT32, (1.44269502162933349609375, 1.9259630335009437e-8), (
        0.693147302437823693, 0.240226960894706857, 0.0555020471418650956, 0.00961265614106463591,
        0.00134354506270453805, 0.000169436932495755562)),
    types.float64: _ExpConstants(52, 1023, _INT64, (1.4426950408889634, 2.0355273740931033e-17), (
        0.693147180559945623, 0.24022650695910093, 0.055504108664794905, 0.00961812910761006349,
        0.00133335581527077867, 0.000154035304366843036, 1.52527278223540722e-5, 1.32154455179640001e-6,
        1.01805581173453492e-7, 7.07202616287080177e-9, 4.07963683838535983e-10)),
}


@intrinsic
def _power_of_two(typing, z):
    """The power of two whose exponent, bias included, stands in the lowest bits of z."""
    constants = _EXP[z.dtype]

    def emit(builder, z):
        integers = ir.VectorType(constants.integer, z.type.count)
        shift = ir.Constant(integers, [constants.bits] * z.type.count)
        return builder.bitcast(builder.shl(builder.bitcast(z, integers), shift), z.type)

    def codegen(context, builder, sig, args):
        return _elementwise(context, builder, sig, args, emit)

    return z(z), codegen


@intrinsic
def _polynomial(typing, f):
    """c(f)."""
    constants = _EXP[f.dtype]

    def emit(builder, f):
        total = None
        for coefficient in reversed(constants.polynomial):
            constant = ir.Constant(f.type, [coefficient] * f.type.count)
            total = constant if total is None else _fused(builder, total, f, constant)
        return total

    def codegen(context, builder, sig, args):
        return _elementwise(context, builder, sig, args, emit)

    return f(f), codegen


def _split(x):
    """(2**n, f), with e**x = 2**(n + f) and f in [-0.5, 0.5]."""


@overload(_split)
def _split_block(x):
    constants = _EXP[x.dtype]
    rounder, lowest, highest = constants.rounder, constants.lowest, constants.highest
    log2_e, log2_e_rest = constants.log2_e

    def implementation(x):
        x = maximum(lowest, minimum(highest, x))
        z = fma(x, log2_e, rounder)
        f = fma(x, log2_e_rest, fma(x, log2_e, rounder - z))
        return _power_of_two(z), f

    return implementation


def exp(x):
    """e**x of a block: exactly 1 at 0, exactly 0 from about -88 (-709) down, NaN for NaN."""


@overload(exp)
def _exp(x):
    def implementation(x):
        power, f = _split(x)
        return fma(_polynomial(f), f, 1) * power

    return implementation


@overload(math.tanh)
def _tanh(x):
    if isinstance(x, Block):
        def implementation(x):
            # With m = e**(-2x) - 1, tanh is -m / (2 + m); near 0, m keeps the digits that e**(-2x) loses.
            power, f = _split(maximum(-44, minimum(44, x * -2)))
            m = fma(_polynomial(f) * f, power, power - 1)
            return (0 - m) / (2 + m)

        return implementation
