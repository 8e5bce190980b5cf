"""A matrix of 64 rows spread over the registers of a warpgroup, 128 threads: an accumulator of wgmma.

Warp w holds rows 16w to 16w + 15. Of these, a thread holds two rows, eight apart, and of every eight columns two
neighbours ("Register Fragments" of wgmma in the ISA)::

                 columns  0 1   2 3   4 5   6 7  | 8 9  ...
    row 16w           lane 0     1     2     3   |  0
    row 16w + 1       lane 4     5     6     7   |  4            lane % 4: a quad of lanes shares its two rows
    ...                                                          lane // 4: which rows
    row 16w + 8       lane 0     1     2     3   |  0

A thread's part is a tuple of ``columns / 2`` numbers, a *fragment*. Element ``4j + e`` is in the thread's row
``e // 2`` (0, or 1 for the row eight below) and in column ``8j + e % 2`` from the thread's first, ``2 * (lane % 4)``. A
number for each of the two rows (m, l, alpha) is a *pair*.

A warp alone holds 16 rows in the same way: an accumulator of ``mma.sync``. Or it holds 32, as a fragment of two *parts*
behind one another, the second for the lower 16 rows. A thread has four rows then, and a "pair" four numbers.

`elementwise` and `rowwise` turn a scalar function into one of fragments or pairs, so that kernels read as formulas.
They are written out for each element: no loop, no index that might force the tuple into memory.
"""

import inspect
from functools import lru_cache
from itertools import product

from llvmlite import ir
from numba.cuda import types
from numba.cuda.typing import signature as numba_signature

from ...problem import FLOAT16
from .assembly import (CONSTRAINTS, LLVM_TYPES, REALS, emit, float32, float64, int32, int64, pack, registers, uint32,
                       uint64, unpack, with_arity)

ROWS = 64       # of a warpgroup's matrix
QUAD = 1, 2     # xor of lanes that share their rows


def first_row(thread):
    """The first of the two rows of this thread of the warpgroup; the other is eight below."""
    return (thread >> 5) * 16 + ((thread & 31) >> 2)


def first_column(thread):
    """The first column of this thread."""
    return (thread & 3) * 2


def _is_pair(type_, fragment):
    return isinstance(type_, types.UniTuple) and type_.count in (2, 4) and type_.count < fragment.count


def _row(element, part):
    """Which of the thread's rows an element is in; `part`: elements of a part."""
    return element // part * 2 + element // 2 % 2


def _column(element, part):
    return element % part // 4 * 8 + element % 2


def _part_size(fragment, args):
    """Elements of one part, as told by a pair among the arguments."""
    return fragment.count * 2 // next((arg.count for arg in args if _is_pair(arg, fragment)), 2)


def elementwise(function):
    """Turn ``f(x, ...) -> number`` into ``f(fragment, ...) -> fragment``; numbers are float32, or float64.

    A further argument that is a pair gives each element the value of its row, one that is a fragment its own value; any
    other is the same for all elements.
    If the function's second parameter is called ``column``, the thread's first column is to be passed for it, as int32
    or a number like x, and each element gets its own.
    """
    return _mapped(function, _row, list(inspect.signature(function).parameters)[1:2] == ["column"])


def fourwise(function):
    """Turn ``f(four, ...) -> four`` into ``f(fragment, ...) -> fragment``: always four elements of one row.

    Further arguments are the same for all. The rows must have a multiple of 16 columns.
    """
    def mapped(typing_context, fragment, *args):
        def codegen(context, builder, signature, values):
            compiled = context.compile_subroutine(builder, function, scalar)
            x = unpack(builder, values[0], fragment.count)
            for first in range(0, fragment.count, 8):
                for row in range(2):
                    places = [first + 2 * row + element for element in (0, 1, 4, 5)]
                    _, four = context.call_internal_no_propagate(
                        builder, compiled.fndesc, scalar, [pack(builder, [x[place] for place in places]), *values[1:]])
                    for place, result in zip(places, unpack(builder, four, 4)):
                        x[place] = result
            return pack(builder, x)

        four = registers(fragment.dtype, 4)
        scalar = numba_signature(four, four, *args)
        return numba_signature(fragment, fragment, *args), codegen

    return with_arity(mapped, inspect.signature(function).parameters)


def columnwise(function, parts=1):
    """Turn ``f(x, ..., number) -> number`` into ``f(fragment, ..., address) -> fragment``, else like `elementwise`.

    Each element gets the number of its column from shared memory, where those of neighbouring columns are
    neighbours; `address` is that of the thread's first.
    """
    return _mapped(function, _row, False, numbers=parts)


def rowwise(function):
    """Turn ``f(x, ...) -> number`` into ``f(pair, ...) -> pair``, further arguments as for `elementwise`."""
    return _mapped(function, lambda element, part: element, False)


def _mapped(function, row, with_column, numbers=0):
    def mapped(typing_context, fragment, *args):
        def codegen(context, builder, signature, values):
            compiled = context.compile_subroutine(builder, function, scalar)
            results = []
            for element, x in enumerate(unpack(builder, values[0], fragment.count)):
                its_args = [value if index is None else builder.extract_value(value, index(element, part))
                            for value, index in zip(values[1:], indices)]
                if numbers:
                    if element % 4 == 0:        # only now: to have all at hand takes registers
                        bits = fragment.dtype.bitwidth
                        place = bits // 8 * _column(element, fragment.count // numbers)
                        loaded = emit(builder, f"ld.shared.v2.f{bits} {{$0, $1}}, [$2 + {place}];",
                                      ir.LiteralStructType([LLVM_TYPES[fragment.dtype]] * 2),
                                      ["=" + CONSTRAINTS[fragment.dtype]] * 2, values[-1:], ["r"])
                    its_args[-1] = builder.extract_value(loaded, element % 2)
                if with_column:
                    its_args[0] = add(builder, its_args[0], ir.Constant(its_args[0].type, _column(element, part)))
                _, result = context.call_internal_no_propagate(builder, compiled.fndesc, scalar, [x, *its_args])
                results.append(result)
            return pack(builder, results)

        def index_of(arg):
            if isinstance(arg, types.UniTuple):
                return row if _is_pair(arg, fragment) else lambda element, part: element

        part = _part_size(fragment, args)
        indices = list(map(index_of, args))
        arg_types = list(args)
        if with_column and args[0] not in REALS:
            arg_types[0] = int32
        add = ir.IRBuilder.fadd if with_column and args[0] in REALS else ir.IRBuilder.add
        scalar_types = [arg if index is None else arg.dtype for arg, index in zip(arg_types, indices)]
        if numbers:
            arg_types[-1], scalar_types[-1] = uint32, fragment.dtype
        scalar = numba_signature(fragment.dtype, fragment.dtype, *scalar_types)
        return numba_signature(registers(fragment.dtype, fragment.count), fragment, *arg_types), codegen

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
                key = _row(element, fragment.count * 2 // start.count), element % 2
                chains[key] = call(chains[key], x) if key in chains else x
            return pack(builder, [call(call(chains[row, 0], chains[row, 1]), builder.extract_value(values[1], row))
                                  for row in range(start.count)])

        scalar = numba_signature(*[fragment.dtype] * 3)
        return numba_signature(start, fragment, start), codegen

    return with_arity(fold, ("fragment", "start"))


def _sum(typing_context, fragment):
    """The sum of a fragment's elements, in up to four chains."""
    def codegen(context, builder, signature, values):
        x = unpack(builder, values[0], fragment.count)
        chains = x[:4]
        for element in range(4, fragment.count):
            chains[element % 4] = builder.fadd(chains[element % 4], x[element])
        while len(chains) > 1:
            chains = [builder.fadd(*pair) for pair in zip(chains[::2], chains[1::2])]
        return chains[0]

    return numba_signature(fragment.dtype, fragment), codegen


sum_of_elements = with_arity(_sum, ("fragment",))


# What each lane of a warp gets of the lane whose number differs by `mask`, in PTX.
SHUFFLE = {float32: "shfl.sync.bfly.b32 $0, $1, {mask}, 31, -1;",
           float64: "{{ .reg .b32 low, high; mov.b64 {{low, high}}, $1; shfl.sync.bfly.b32 low, low, {mask}, 31, -1; "
                    "shfl.sync.bfly.b32 high, high, {mask}, 31, -1; mov.b64 $0, {{low, high}}; }}"}


def make_across_quad(function):
    """Build ``across_quad(pair) -> pair``: the four lanes that share rows fold their pairs, and all get the result.

    ``shfl.sync.bfly``, ISA: "Data Movement and Conversion Instructions: shfl.sync".
    """
    def across(typing_context, values):
        def codegen(context, builder, signature, args):
            compiled = context.compile_subroutine(builder, function, scalar)
            results = []
            for x in unpack(builder, args[0], values.count):
                for mask in QUAD:
                    constraint = CONSTRAINTS[values.dtype]
                    other = emit(builder, SHUFFLE[values.dtype].format(mask=mask), LLVM_TYPES[values.dtype],
                                 ["=" + constraint], [x], [constraint])
                    x = context.call_internal_no_propagate(builder, compiled.fndesc, scalar, [x, other])[1]
                results.append(x)
            return pack(builder, results)

        scalar = numba_signature(*[values.dtype] * 3)
        return numba_signature(values, values), codegen

    return with_arity(across, ("pair",))


@lru_cache(maxsize=None)
def make_filled(columns, value, real=float32):
    """Build ``filled()``: a fragment whose elements are all `value`; None leaves them undefined."""
    def filled(typing_context):
        def codegen(context, builder, signature, args):
            element = ir.Constant(LLVM_TYPES[real], ir.Undefined if value is None else value)
            return pack(builder, [element] * (columns // 2))

        return numba_signature(registers(real, columns // 2)), codegen

    return with_arity(filled, ())


@lru_cache(maxsize=None)
def make_rows_down(parts):
    """Build ``rows_down(x)``: a number that grows by one from row to row, for each of the thread's rows, x the first's.
    """
    def rows_down(typing_context, x):
        def codegen(context, builder, signature, args):
            add = ir.IRBuilder.fadd if x in REALS else ir.IRBuilder.add
            return pack(builder, [args[0], *(add(builder, args[0], ir.Constant(args[0].type, 8 * row))
                                             for row in range(1, 2 * parts))])

        return numba_signature(registers(x, 2 * parts), x), codegen

    return with_arity(rows_down, ("x",))


@lru_cache(maxsize=None)
def make_part(parts, index):
    """Build ``part(values)``: one part of a fragment, packed or not, or of a pair."""
    def part(typing_context, values):
        size = values.count // parts

        def codegen(context, builder, signature, args):
            return pack(builder, unpack(builder, args[0], values.count)[index * size:(index + 1) * size])

        return numba_signature(registers(values.dtype, size), values), codegen

    return with_arity(part, ("values",))


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


@lru_cache(maxsize=None)
def make_unpack16(dtype):
    """Build ``unpack16(packed)``, the inverse of `make_pack16`."""
    if dtype == FLOAT16:
        text = ("{ .reg .b16 x; mov.b32 {x, _}, $1; cvt.f32.f16 $0, x; }",
                "{ .reg .b16 x; mov.b32 {_, x}, $1; cvt.f32.f16 $0, x; }")
    else:               # bfloat16 is the upper half of a float32
        text = "shl.b32 $0, $1, 16;", "and.b32 $0, $1, 0xffff0000;"

    def unpack16(typing_context, packed):
        def codegen(context, builder, signature, args):
            return pack(builder, [emit(builder, line, ir.FloatType(), ["=f"], [word], ["r"], pure=True)
                                  for word in unpack(builder, args[0], packed.count) for line in text])

        return numba_signature(registers(float32, 2 * packed.count), packed), codegen

    return with_arity(unpack16, ("packed",))


@lru_cache(maxsize=None)
def make_load_fragment(columns, rows=ROWS, parts=1):
    """Build ``load_fragment(address)``: a packed fragment from boxes of 64 swizzled columns and so many rows.

    ``ldmatrix.x4``, ISA: "Warp-level matrix load instruction: ldmatrix": 16 rows by 16 columns at once. `address`:
    `swizzled` for the warp's row ``lane % 16`` and unit ``lane // 16``.
    """
    def load_fragment(typing_context, address):
        def codegen(context, builder, signature, args):
            words = []
            for part, step in product(range(parts), range(columns // 16)):
                box, within = divmod(step, 4)
                text = (f"{{ .reg .b32 at; xor.b32 at, $4, {32 * within}; ldmatrix.sync.aligned.m8n8.x4.shared.b16 "
                        f"{{$0, $1, $2, $3}}, [at + {(box * rows + 16 * part) * 128}]; }}")
                out = emit(builder, text, ir.LiteralStructType([ir.IntType(32)] * 4), ["=r"] * 4, args, ["r"])
                words += unpack(builder, out, 4)
            return pack(builder, words)

        return numba_signature(registers(uint32, parts * columns // 4), uint32), codegen

    return with_arity(load_fragment, ("address",))


def _swap(builder, low, high, bit, mask):
    """The quad's lanes whose `bit` is 0 give `high` for the `low` of the lane across; what each lane then has."""
    sent = builder.select(bit, low, high)
    received = emit(builder, f"shfl.sync.bfly.b32 $0, $1, {mask}, 31, -1;", ir.IntType(32), ["=r"], [sent], ["r"])
    return builder.select(bit, received, low), builder.select(bit, high, received)


def _store_rows(typing_context, packed, address, row_bytes, rows, columns):
    """Write a packed fragment to global memory: this lane's two rows, of so many `columns`, if `rows` are left.

    A lane has two neighbours of each eight columns; the four lanes of a quad first exchange them, so that each has
    eight neighbours of every fourth eight columns, and writes 16 bytes at once::

        lane 0   a0 b0 c0 d0           a0 a1 a2 a3
        lane 1   a1 b1 c1 d1    -->    b0 b1 b2 b3         a, b, c, d: the eight columns 0..7, 8..15, ...
        lane 2   a2 b2 c2 d2           c0 c1 c2 c3
        lane 3   a3 b3 c3 d3           d0 d1 d2 d3

    `address` is that of the first row, `row_bytes` the stride of rows, `rows` how many there are from the first on.
    """
    def codegen(context, builder, signature, args):
        words, (_, address, row_bytes, rows, columns) = unpack(builder, args[0], packed.count), args
        int32_, int64_ = ir.IntType(32), ir.IntType(64)
        lane = emit(builder, "mov.u32 $0, %tid.x;", int32_, ["=r"], [], [], pure=True)
        quad_lane = builder.and_(lane, int32_(3))
        odd, upper = (builder.icmp_unsigned("!=", builder.and_(quad_lane, int32_(bit)), int32_(0)) for bit in QUAD)
        first = builder.mul(quad_lane, int32_(8))
        address = builder.add(address, builder.zext(builder.mul(first, int32_(2)), int64_))
        for half in range(2):
            at = builder.add(address, builder.mul(row_bytes, int64_(8 * half)))
            left = builder.select(builder.icmp_signed(">", rows, int32_(8 * half)), columns, int32_(0))
            mine = words[half::2]
            mine += [ir.Constant(int32_, ir.Undefined)] * (-len(mine) % 4)
            for group in range(len(mine) // 4):
                a, b, c, d = mine[4 * group:4 * group + 4]
                (a, b), (c, d) = _swap(builder, a, b, odd, 1), _swap(builder, c, d, odd, 1)
                (a, c), (b, d) = _swap(builder, a, c, upper, 2), _swap(builder, b, d, upper, 2)
                inside = builder.icmp_signed("<", builder.add(first, int32_(32 * group)), left)
                emit(builder, f"{{ .reg .pred inside; setp.ne.u32 inside, $0, 0; "
                     f"@inside st.global.v4.b32 [$1 + {64 * group}], {{$2, $3, $4, $5}}; }}", ir.VoidType(), [],
                     [builder.zext(inside, int32_), at, a, b, c, d], ["r", "l", "r", "r", "r", "r"])
        return context.get_dummy_value()

    return numba_signature(types.void, packed, uint64, int64, int32, int32), codegen


store_rows = with_arity(_store_rows, ("packed", "address", "row_bytes", "rows", "columns"))


def _store_transposed(typing_context, packed, address):
    """Write a packed fragment of this warp's 16 rows, transposed, into a box of 64 swizzled columns, the rows.

    ``stmatrix.x4.trans``, ISA: "Warp-level matrix store instruction: stmatrix": 16 rows by 16 columns at once.
    `address`: `swizzled` for the box's row ``lane % 8 + lane // 16 * 8`` and unit ``2 * warp + lane // 8 % 2``.
    """
    def codegen(context, builder, signature, args):
        values = unpack(builder, args[0], packed.count)
        for step in range(packed.count // 4):
            text = f"stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0 + {step * 16 * 128}], {{$1, $2, $3, $4}};"
            emit(builder, text, ir.VoidType(), [], [args[1], *values[4 * step:4 * step + 4]], ["r"] * 5)
        return context.get_dummy_value()

    return numba_signature(types.void, packed, uint32), codegen


store_transposed = with_arity(_store_transposed, ("packed", "address"))


@lru_cache(maxsize=None)
def make_store_packed(parts):
    """Build ``store_packed(packed, address)``: a packed fragment into a box of 64 swizzled columns.

    `address`: `swizzled` for the thread's first row and unit 0, and 4 bytes for each lane of the quad before.
    """
    def store_packed(typing_context, packed, address):
        def codegen(context, builder, signature, args):
            for word, value in enumerate(unpack(builder, args[0], packed.count)):
                part, within = divmod(word, packed.count // parts)
                column, half = divmod(within, 2)
                text = (f"{{ .reg .b32 at; xor.b32 at, $0, {16 * column}; "
                        f"st.shared.b32 [at + {(16 * part + 8 * half) * 128}], $1; }}")
                emit(builder, text, ir.VoidType(), [], [args[1], value], ["r", "r"])
            return context.get_dummy_value()

        return numba_signature(types.void, packed, uint32), codegen

    return with_arity(store_packed, ("packed", "address"))
