"""A matrix of 64 rows spread over the registers of a warpgroup, 128 threads: an accumulator of wgmma.

Warp w holds rows 16w to 16w + 15. Of these, a thread holds two rows, eight apart, and of every eight columns two
neighbours ("Register Fragments" of wgmma in the ISA)::

                 columns  0 1   2 3   4 5   6 7  | 8 9  ...
    row 16w           lane 0     1     2     3   |  0
    row 16w + 1       lane 4     5     6     7   |  4            lane % 4: a quad of lanes shares its two rows
    ...                                                          lane // 4: which rows
    row 16w + 8       lane 0     1     2     3   |  0

A thread's part is a tuple of ``columns / 2`` floats, a *fragment*. Element ``4j + e`` is in the thread's row ``e // 2``
(0, or 1 for the row eight below) and in column ``8j + e % 2`` from the thread's first, ``2 * (lane % 4)``. A number for
each of the two rows (m, l, alpha) is a *pair*.

`elementwise` and `rowwise` turn a scalar function into one of fragments or pairs, so that kernels read as formulas.
They are written out for each element: no loop, no index that might force the tuple into memory.
"""

import inspect
from functools import lru_cache

from llvmlite import ir
from numba.cuda import types
from numba.cuda.typing import signature as numba_signature

from ...problem import FLOAT16
from .assembly import emit, float32, int32, pack, registers, uint32, unpack, with_arity

ROWS = 64       # of a warpgroup's matrix
QUAD = 1, 2     # xor of lanes that share their rows


def first_row(thread):
    """The first of the two rows of this thread of the warpgroup; the other is eight below."""
    return (thread >> 5) * 16 + ((thread & 31) >> 2)


def first_column(thread):
    """The first column of this thread."""
    return (thread & 3) * 2


def _row(element):
    return element // 2 % 2


def _column(element):
    return element // 4 * 8 + element % 2


def elementwise(function):
    """Turn ``f(x, ...) -> float32`` into ``f(fragment, ...) -> fragment``.

    A further argument that is a pair gives each element the value of its row; any other is the same for all elements.
    If the function's second parameter is called ``column``, the thread's first column is to be passed for it, and each
    element gets its own.
    """
    return _mapped(function, _row, list(inspect.signature(function).parameters)[1:2] == ["column"])


def rowwise(function):
    """Turn ``f(x, ...) -> float32`` into ``f(pair, ...) -> pair``, further arguments as for `elementwise`."""
    return _mapped(function, lambda element: element, False)


def _mapped(function, row, with_column):
    def mapped(typing_context, fragment, *args):
        def codegen(context, builder, signature, values):
            compiled = context.compile_subroutine(builder, function, scalar)
            results = []
            for element, x in enumerate(unpack(builder, values[0], fragment.count)):
                its_args = [builder.extract_value(value, row(element)) if pair else value
                            for value, pair in zip(values[1:], is_pair)]
                if with_column:
                    its_args[0] = builder.add(its_args[0], ir.Constant(ir.IntType(32), _column(element)))
                _, result = context.call_internal_no_propagate(builder, compiled.fndesc, scalar, [x, *its_args])
                results.append(result)
            return pack(builder, results)

        is_pair = [isinstance(arg, types.UniTuple) for arg in args]
        arg_types = [int32, *args[1:]] if with_column else list(args)
        scalar_types = [arg.dtype if pair else arg for arg, pair in zip(arg_types, is_pair)]
        scalar = numba_signature(float32, fragment.dtype, *scalar_types)
        return numba_signature(registers(float32, fragment.count), fragment, *arg_types), codegen

    return with_arity(mapped, inspect.signature(function).parameters)


def make_fold_rows(function):
    """Build ``fold_rows(fragment, pair) -> pair``: this thread's elements of each row, folded into the pair's numbers.

    ``function(x, y)`` is associative and commutative. Two chains a row halve the time that each waits for the last.
    """
    def fold(typing_context, fragment, start):
        def codegen(context, builder, signature, values):
            compiled = context.compile_subroutine(builder, function, scalar)

            def call(x, y):
                return context.call_internal_no_propagate(builder, compiled.fndesc, scalar, [x, y])[1]

            chains = {}
            for element, x in enumerate(unpack(builder, values[0], fragment.count)):
                key = _row(element), element % 2
                chains[key] = call(chains[key], x) if key in chains else x
            return pack(builder, [call(call(chains[row, 0], chains[row, 1]), builder.extract_value(values[1], row))
                                  for row in range(2)])

        scalar = numba_signature(float32, float32, float32)
        return numba_signature(registers(float32, 2), fragment, start), codegen

    return with_arity(fold, ("fragment", "start"))


def make_across_quad(function):
    """Build ``across_quad(pair) -> pair``: the four lanes that share rows fold their pairs, and all get the result.

    ``shfl.sync.bfly``, ISA: "Data Movement and Conversion Instructions: shfl.sync".
    """
    def across(typing_context, values):
        def codegen(context, builder, signature, args):
            compiled = context.compile_subroutine(builder, function, scalar)
            results = []
            for x in unpack(builder, args[0], 2):
                for mask in QUAD:
                    other = emit(builder, f"shfl.sync.bfly.b32 $0, $1, {mask}, 31, -1;", ir.FloatType(), ["=f"], [x],
                                 ["f"])
                    x = context.call_internal_no_propagate(builder, compiled.fndesc, scalar, [x, other])[1]
                results.append(x)
            return pack(builder, results)

        scalar = numba_signature(float32, float32, float32)
        return numba_signature(values, values), codegen

    return with_arity(across, ("pair",))


@lru_cache(maxsize=None)
def make_filled(columns, value):
    """Build ``filled()``: a fragment whose elements are all `value`; None leaves them undefined."""
    def filled(typing_context):
        def codegen(context, builder, signature, args):
            element = ir.Constant(ir.FloatType(), ir.Undefined if value is None else value)
            return pack(builder, [element] * (columns // 2))

        return numba_signature(registers(float32, columns // 2)), codegen

    return with_arity(filled, ())


@lru_cache(maxsize=None)
def make_pack16(dtype):
    """Build ``pack16(fragment)``: rounded to float16 or bfloat16, two neighbours in a register.

    ``cvt.rn.f16x2.f32``, ISA: "Data Movement and Conversion Instructions: cvt". In this form a fragment is what wgmma
    takes for A: the product of one matrix product is an operand of the next without a move.
    """
    name = "f16x2" if dtype == FLOAT16 else "bf16x2"

    def pack16(typing_context, fragment):
        def codegen(context, builder, signature, args):
            x = unpack(builder, args[0], fragment.count)
            return pack(builder, [
                emit(builder, f"cvt.rn.{name}.f32 $0, $1, $2;", ir.IntType(32), ["=r"], [high, low], ["f", "f"],
                     pure=True) for low, high in zip(x[::2], x[1::2])])

        return numba_signature(registers(uint32, fragment.count // 2), fragment), codegen

    return with_arity(pack16, ("fragment",))


def _store_fragment(typing_context, packed, address):
    """Write a packed fragment of this warp's 16 rows into boxes of 64 swizzled columns and 64 rows.

    ``stmatrix.x4``, ISA: "Warp-level matrix store instruction: stmatrix": 16 rows by 16 columns at once. `address`:
    `swizzled` for the warp's row ``lane % 16`` and unit ``lane // 16``.
    """
    def codegen(context, builder, signature, args):
        values = unpack(builder, args[0], packed.count)
        for step in range(packed.count // 4):
            box, within = divmod(step, 4)
            text = (f"{{ .reg .b32 at; xor.b32 at, $0, {32 * within}; "
                    f"stmatrix.sync.aligned.m8n8.x4.shared.b16 [at + {box * ROWS * 128}], {{$1, $2, $3, $4}}; }}")
            emit(builder, text, ir.VoidType(), [], [args[1], *values[4 * step:4 * step + 4]], ["r"] * 5)
        return context.get_dummy_value()

    return numba_signature(types.void, packed, uint32), codegen


store_fragment = with_arity(_store_fragment, ("packed", "address"))
