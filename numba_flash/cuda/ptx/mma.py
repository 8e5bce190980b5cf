"""Whole matrix products of a warp: ``mma.sync``, and the loads of its operands from shared memory.

One instruction multiplies 16 x 16 by 16 x 8 numbers of 16 bits (``m16n8k16``), or 16 x 8 by 8 x 8 of float64, or of
float32, of which it takes the 11 leading bits, a TF32 number (``m16n8k8``). A product is as many of them as it takes,
in one block of PTX, with the loads of its operands between them; the assembler moves the loads ahead of what waits for
them.

An accumulator is a fragment (see `fragments`) of one part, 16 rows, or of two: what is loaded of B then serves twice.

``ldmatrix.x4`` reads four matrices of 8 rows of 16 bytes. Lanes 0 to 7 give the addresses of the first one's rows,
lanes 8 to 15 those of the second, and so on. Of each matrix, or of its transpose (``.trans``), a lane gets the 4 bytes
that it holds of a fragment. The four are the quarters of 16 rows of 32 bytes, in an order that depends on how an
operand lies in shared memory::

                          the depth runs along its rows          down its rows (.trans, 16 bits only)
    A, 16 rows            0 2   Q in Q K^T                       0 1   dS in dS K, if its transpose is there
                          1 3                                    2 3
    B, 16 columns         0 1   K in Q K^T                       0 2   V in P V
                          2 3                                    1 3

**float32, by single numbers.** ``.trans`` moves pairs of 16 bits only, so where the depth runs down the rows a lane
loads its numbers one by one. And P, an accumulator, is not yet what ``m16n8k8`` takes for A: lane c of a quad holds its
columns 2c and 2c + 1, and should hold c and c + 4. But a sum may be taken in any order. So columns 2c and 2c + 1 are
*called* c and c + 4, and of V the lane reads rows 2c and 2c + 1 where it should have read c and c + 4: each pair of
factors meets as before, and nothing is exchanged.

**float32, exactly.** x is split into hi, x in TF32, and lo = x - hi, which is exact. Then A B = lo hi + hi lo + hi hi,
without lo lo. A's hi is rounded: so its lo has 12 bits, of which the tensor core takes 11, and what is lost is at most
one unit of x's last place, up as often as down. B's hi is cut off, which takes one instruction less, and B is taken
apart most often; that was 3 % of the time. Of the 13 bits of its lo 11 are taken, too, and lost are three units at the
most, one in the mean. lo lo is at most 2^-21 of the rest, and of either sign, as A's lo is. A tensor core cuts off what
does not fit into its float32 sum, always towards zero: in a chain the losses add up, to some 4e-6 of the result for a
depth of 256, where float32 sums are right to 5e-7. So two steps of the depth are a chain of their own, of six
instructions, the small products first, and are added to the accumulator by an ordinary addition, which rounds to the
nearest. (Each step alone costs a tenth to a half more time.) Where both operands lie in shared memory the steps are a
loop over boxes, or the kernels' instructions would not fit into the cache for them.

**float32, at TF32's precision** (``precision="tf32"``): hi hi alone, all in one chain. Rounding by one multiplication:
hi = x (1 + 2^-11.5), of which the tensor core cuts the end off, adds between 0.7 and 1.4 halves of the unit that x is
cut to. It lets infinity and NaN be.

Infinity: hi is infinity and lo = inf - inf NaN, so three products answer NaN.

**float64** is multiplied as it is, and every sum is rounded to the nearest, so nothing is taken apart. Elements lie
where those of TF32 do, and columns 2c and 2c + 1 are called c and c + 4 here, too, in both operands: where the depth
runs along the rows a lane loads the two by one instruction. The instruction is ``m16n8k8`` from compute capability 9.0
on; before, there is ``m8n8k4``, which multiplies a quarter of it: 8 of the 16 rows, and half of the depth.
"""

from functools import lru_cache

from llvmlite import ir
from numba.cuda.typing import signature as numba_signature

from ...problem import FLOAT16, FLOAT32, FLOAT64
from .assembly import CONSTRAINTS, LLVM_TYPES, emit, float32, float64, pack, registers, uint32, unpack, with_arity
from .copies import BOX_ROW

STEP = 16                       # rows of A, and columns of B, that are loaded at once
BOX_STEPS = 4                   # of 32 bytes, in a row of a box
HALF_UNIT, LEADING_BITS = 1 << 12, -1 << 13             # of a TF32 number that lies in a float32
ROUND_TF32 = "0f3F800B50"                               # 1 + 2^-11.5


def _bits(builder, x, shift, mask):
    return builder.and_(builder.lshr(x, x.type(shift)), x.type(mask))


def _lane(builder):
    return emit(builder, "mov.u32 $0, %laneid;", ir.IntType(32), ["=r"], [], [], pure=True)


def _lane_address(builder, address, downwards):
    """Address that this lane gives for the first 16 rows of 32 bytes of a swizzled tile.

    `address` is that of the first of them, whose row's number is a multiple of 8.
    `downwards`: matrix 1 lies below matrix 0, and not beside it.
    """
    lane = _lane(builder)
    within, lower, beside = (_bits(builder, lane, *bits) for bits in ((0, 7), (3, 1), (4, 1)))
    if not downwards:
        lower, beside = beside, lower
    row = builder.or_(within, builder.shl(lower, lane.type(3)))
    unit = builder.xor(beside, within)
    return builder.xor(builder.add(address, builder.mul(row, lane.type(BOX_ROW))), builder.shl(unit, lane.type(4)))


def _number_address(builder, address, item):
    """Address of the first number that this lane loads where the depth runs down the rows: row 2c."""
    lane = _lane(builder)
    row, unit, within = builder.shl(_bits(builder, lane, 0, 3), lane.type(1)), *(
        _bits(builder, lane, *bits) for bits in (((4, 1), (2, 3)) if item == 4 else ((3, 3), (2, 1))))
    address = builder.add(address, builder.mul(row, lane.type(BOX_ROW)))
    address = builder.add(address, builder.shl(within, lane.type(item.bit_length() - 1)))
    return builder.xor(address, builder.shl(builder.xor(unit, row), lane.type(4)))


def _pair_address(builder, address):
    """Address of the first two float64 numbers that this lane loads where the depth runs along the rows."""
    lane = _lane(builder)
    c, row, odd = (_bits(builder, lane, *bits) for bits in ((0, 3), (2, 7), (2, 1)))
    unit = builder.xor(builder.xor(c, row), builder.shl(odd, lane.type(2)))
    return builder.xor(builder.add(address, builder.mul(row, lane.type(BOX_ROW))), builder.shl(unit, lane.type(4)))


def _place(operand, outer, k):
    """Where 16 rows of 32 bytes of an operand are: what to xor the lane's address with, and what to add then."""
    row, column = (k, outer) if operand.depth_down else (outer, k)
    box, within = divmod(column, BOX_STEPS)
    return within, row * STEP * BOX_ROW + box * operand.rows * BOX_ROW


def _load(names, address, operand, outer, k):
    """PTX: four registers from 16 rows of 32 bytes."""
    within, offset = _place(operand, outer, k)
    trans = ".trans" if operand.depth_down else ""
    return [f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {_list(names)}, [{address}{within} + {offset}];"]


def _load_numbers(names, address, operand, outer, k, of_a, item):
    """The same from 8 rows of 16 longer numbers, one by one: rows 2c and 2c + 1, two columns eight apart."""
    lines, eights = [], BOX_ROW // (8 * item)
    for n, name in enumerate(names):
        odd, half = (n // 2, n % 2) if of_a else (n % 2, n // 2)
        box, within = divmod(2 * outer + half, eights)
        offset = (8 * k + odd + box * operand.rows) * BOX_ROW
        lines.append(f"ld.shared.b{8 * item} {name}, [{address}{within + eights * odd} + {offset}];")
    return lines


def _load_pairs(names, address, operand, outer, k, of_a):
    """The same from 16 rows of 8 float64, by twos: columns 2c and 2c + 1 of two rows eight apart."""
    box, within = divmod(k, BOX_ROW // 64)
    return [f"ld.shared.v2.b64 {_list(names[half::2] if of_a else names[2 * half:2 * half + 2])}, "
            f"[{address}{within} + {(STEP * outer + 8 * half + box * operand.rows) * BOX_ROW}];" for half in range(2)]


def _addresses(name, address, step_bytes, odd=0):
    """This lane's address for each step of a box's columns; then, if units of odd rows lie at ``^ odd``, for those."""
    steps = BOX_ROW // step_bytes
    return [f"xor.b32 {name}{n}, {address}, {n % steps * step_bytes ^ n // steps * 16 * odd};"
            for n in range(steps * (2 if odd else 1))]


def _list(names):
    return "{" + ", ".join(names) + "}"


def _mma(shape, types, acc, a, b, before):
    return f"mma.sync.aligned.{shape}.row.col.{types} {_list(acc)}, {_list(a)}, {_list(b)}, {_list(before)};"


ZEROS = ["zero"] * 4


class _Of16Bits:
    """What a step of a product is for 16-bit numbers: one instruction."""

    declared, wall, pieces, chain, item = "", "", 1, 1, 2       # item: bytes of a number

    def __init__(self, dtype):
        element = "f16" if dtype == FLOAT16 else "bf16"
        self.types = f"f32.{element}.{element}.f32"

    def prepare(self, side, names):
        """What has to be done to registers of A or B before, and what is multiplied then."""
        return [], names

    def multiply(self, pieces, begins):
        """PTX of ``acc += a b`` for each of the pieces (acc, [a], [b]); if it `begins`, ``acc = a b``.

        There is an a and a b for each of `chain` steps of the depth.
        """
        return [_mma("m16n8k16", self.types, acc, a, b, ZEROS if begins else acc) for acc, [a], [b] in pieces]


class _OfTf32:
    """For float32 at TF32's precision: one instruction, and rounding before."""

    declared, wall, pieces, chain, item = ".reg .b32 a_hi<8>, b_hi<4>;", "", 1, 1, 4

    def prepare(self, side, names):
        hi = [f"{side}_hi{n}" for n in range(len(names))]
        return [f"mul.f32 {h}, {x}, {ROUND_TF32};" for h, x in zip(hi, names)], hi

    def multiply(self, pieces, begins):
        return [_mma("m16n8k8", "f32.tf32.tf32.f32", acc, a, b, ZEROS if begins else acc) for acc, [a], [b] in pieces]


class _OfFloat32:
    """For float32: three instructions from zero on, and an addition; see the top of the module."""

    declared = (".reg .b32 a_hi<16>, b_hi<32>, a_lo<16>, b_lo<32>; .reg .f32 t<32>; "
                ".reg .pred never; .reg .b32 grid_y; mov.u32 grid_y, %nctaid.y;")
    # The assembler would put all additions off to the end, and has no registers for what waits for them. But it moves
    # nothing past an instruction that might end the thread: here if the grid, which has one row, had 2, 3 or more. So
    # products come by turns of so many pieces, behind a wall each, and what a turn multiplies is loaded in the turn
    # before. (All threads share that number, so the assembler knows that no warp goes apart there. For compute
    # capability 8.x it finds a way past some walls, and some registers spill.)
    wall, pieces, chain, item = "setp.eq.u32 never, grid_y, {n}; @never trap;", 4, 2, 4

    def prepare(self, side, names):
        hi, lo = ([f"{side}_{part}{n}" for n in range(len(names))] for part in ("hi", "lo"))
        half = HALF_UNIT if side == "a" else 0          # A's hi is rounded, and B's cut off
        return [f"add.u32 {h}, {x}, {half}; and.b32 {h}, {h}, {LEADING_BITS}; sub.f32 {l}, {x}, {h};"
                for h, l, x in zip(hi, lo, names)], list(zip(hi, lo))

    def multiply(self, pieces, begins):
        lines = []
        steps = range(len(pieces[0][1]))
        places = [(k, *parts) for parts in ((1, 0), (0, 1)) for k in steps] + [(k, 0, 0) for k in steps]
        for place, (k, a_part, b_part) in enumerate(places):        # lo hi, hi lo, and last hi hi
            for n, (acc, a, b) in enumerate(pieces):        # by turns: each waits for its last
                t = [f"t{4 * n + e}" for e in range(4)]
                lines.append(_mma("m16n8k8", "f32.tf32.tf32.f32", acc if begins and place == len(places) - 1 else t,
                                  [x[a_part] for x in a[k]], [x[b_part] for x in b[k]], t if place else ZEROS))
        if not begins:
            lines += [f"add.f32 {x}, {x}, t{4 * n + e};" for n, (acc, _, _) in enumerate(pieces)
                      for e, x in enumerate(acc)]
        return lines


class _OfFloat64:
    """For float64: one instruction, or four for its quarters, of which two and two add to the same sums."""

    declared, wall, pieces, chain, item = "", "", 1, 1, 8

    def __init__(self, quarters):
        self.quarters = quarters

    def prepare(self, side, names):
        return [], names

    def multiply(self, pieces, begins):
        types = "f64.f64.f64.f64"
        if not self.quarters:
            return [_mma("m16n8k8", types, acc, a, b, ZEROS if begins else acc) for acc, [a], [b] in pieces]
        return [_mma("m8n8k4", types, acc[2 * lower:2 * lower + 2], [a[2 * k + lower]], [b[k]],
                     ZEROS[:2] if begins and k == 0 else acc[2 * lower:2 * lower + 2])
                for k in range(2) for acc, [a], [b] in pieces for lower in range(2)]


def _kind(factors):
    if factors in ("tf32", "float64 by quarters"):
        return _OfTf32() if factors == "tf32" else _OfFloat64(quarters=True)
    return (_OfFloat32() if factors == FLOAT32 else _OfFloat64(quarters=False) if factors == FLOAT64
            else _Of16Bits(factors))


@lru_cache(maxsize=None)
def make_warp_product(parts, columns, depth, factors, a_operand, b_operand, accumulate):
    """Build ``product(acc, a, b)``, ``acc + A B``; without `accumulate` ``product(a, b)``, ``A B``.

    ``mma.sync``, ISA: "Warp Level Matrix Multiply-Accumulate Instructions: mma", "Matrix Fragments for mma.m16n8k16",
    "... mma.m16n8k8"; "Warp-level matrix load instruction: ldmatrix".

    Parameters
    ----------
    parts : int
        Of the accumulator, and of A.
    columns, depth : int
        Multiples of 16.
    factors : numpy.dtype, "tf32" or "float64 by quarters"
        What is multiplied; "tf32" is float32 at TF32's precision, "by quarters" is by ``m8n8k4``.
    a_operand, b_operand : Operand
        How A and B lie in shared memory: their addresses are passed. If `a_operand` is None, A is a packed fragment.
    accumulate : bool

    Notes
    -----
    An operand may be a part of the tile that lies there: the address is then that of its first element. Its columns
    must not go on in another box if they begin within one.
    """
    kind = _kind(factors)
    item, in_pairs, is_float64 = kind.item, kind.item == 2, kind.item == 8
    real, word = (float64, float64) if is_float64 else (float32, uint32)        # of accumulators, and of packed A
    count, step = parts * columns // 2, 16 if in_pairs else 8
    a_words = depth // step * 4         # registers of a part of A
    a_count = 1 if a_operand else parts * a_words
    order = (0, 1, 2, 3) if in_pairs else (0, 2, 1, 3)      # of A's registers in an accumulator: columns 2c, 2c + 1

    def by_numbers(operand):
        return not in_pairs and operand is not None and operand.depth_down

    def load(names, address, operand, outer, k, of_a):
        if by_numbers(operand):
            return _load_numbers(names, address, operand, outer, k, of_a, item)
        return (_load_pairs(names, address, operand, outer, k, of_a) if is_float64
                else _load(names, address, operand, outer, k))

    def addresses(name, address, operand):
        if by_numbers(operand):
            return _addresses(name, address, 8 * item, odd=5 if is_float64 else 1)
        return _addresses(name, address, step * item)

    def advance(name, operand):
        """PTX that moves addresses on to the next steps of a rolled loop: to the next box, or down the rows."""
        rows = BOX_STEPS * step if operand.depth_down else operand.rows
        return [f"add.u32 {name}{n}, {name}{n}, {rows * BOX_ROW};" for n in range(len(addresses(name, name, operand)))]

    def lane_address(builder, address, operand, of_a):
        if by_numbers(operand):
            return _number_address(builder, address, item)
        return (_pair_address(builder, address) if is_float64
                else _lane_address(builder, address, downwards=operand.depth_down != of_a))

    # what is multiplied at a time: a step of the depth or a chain of steps, and some columns of it
    turn, chain = max(1, kind.pieces // (2 * parts)), kind.chain
    steps_at_once = BOX_STEPS if kind.wall and a_operand and depth // step % BOX_STEPS == 0 else depth // step
    rolled = steps_at_once < depth // step
    turns = [(range(k, k + chain), range(outer, min(outer + turn, columns // STEP)))
             for k in range(0, steps_at_once, chain) for outer in range(0, columns // STEP, turn)]

    def registers_of(number):
        """Names of the registers of a turn's A, and of its B, for each step; the next turn has others."""
        steps, outers = turns[number]
        first = count * (2 if accumulate else 1)                    # number of the first operand that is not acc
        a = [[f"a{8 * (k % (2 * chain)) + n}" for n in range(4 * parts)] if a_operand else
             [f"${first + part * a_words + 4 * k + n}" for part in range(parts) for n in order] for k in steps]
        return a, [[f"b{4 * turn * (number % 2 * chain + k - steps[0]) + n}" for n in range(4 * len(outers))]
                   for k in steps]

    def prepare(side, steps):
        """`kind.prepare` for the registers of each step."""
        size = len(steps[0])
        lines, prepared = kind.prepare(side, [name for names in steps for name in names])
        return lines, [prepared[first:first + size] for first in range(0, len(prepared), size)]

    def loads(number):
        """PTX that loads what a turn multiplies."""
        (steps, outers), lines = turns[number], []
        for k, a, b in zip(steps, *registers_of(number)):
            if a_operand and outers[0] == 0:
                for part in range(parts):
                    lines += load(a[4 * part:4 * part + 4], "at_a", a_operand, part, k, True)
            for n, outer in enumerate(outers):
                lines += load(b[4 * n:4 * n + 4], "at_b", b_operand, outer, k, False)
        return lines

    def text():
        first = count * (2 if accumulate else 1)
        b_address = f"${first + a_count}"
        # at_a, at_b: this lane's address for each step within a box
        zero = "0d0000000000000000" if is_float64 else "0f00000000"
        lines = [f"{{ .reg .b{word.bitwidth} a<{16 * chain}>, b<{8 * turn * chain}>; .reg .b32 at_a<8>, at_b<8>;",
                 f".reg .f{real.bitwidth} zero; mov.f{real.bitwidth} zero, {zero};",
                 kind.declared, *addresses("at_b", b_address, b_operand)]
        if a_operand:
            lines += addresses("at_a", f"${first}", a_operand)
        if rolled:
            lines += [f"mov.f32 ${n}, zero;" for n in range(count) if not accumulate]
            lines += [f".reg .pred more; .reg .b32 left; mov.u32 left, {depth // step // steps_at_once};",
                      r".pragma \22nounroll\22; AGAIN:"]      # \22 is a quote in LLVM's text
        ahead = 1 if kind.wall else 0       # how many turns loads are ahead of products
        for number in range(-ahead, len(turns)):
            if kind.wall and number >= 0:
                lines.append(kind.wall.format(n=number + 2))
            if number + ahead < len(turns):
                lines += loads(number + ahead)
            if number < 0:
                continue
            (steps, outers), (a, b) = turns[number], registers_of(number)
            if outers[0] == 0:
                made, prepared_a = prepare("a", a)
                lines += made
            made, b = prepare("b", b)
            lines += made
            pieces = []
            for n, outer in enumerate(outers):
                for part in range(parts):
                    for half in range(2):
                        start = part * columns // 2 + 8 * outer + 4 * half
                        pieces.append(([f"${start + n}" for n in range(4)],
                                       [x[4 * part:4 * part + 4] for x in prepared_a],
                                       [x[4 * n + 2 * half:4 * n + 2 * half + 2] for x in b]))
            lines += kind.multiply(pieces, begins=not (steps[0] or accumulate or rolled))
        if rolled:
            lines += [*advance("at_a", a_operand), *advance("at_b", b_operand),
                      "sub.u32 left, left, 1; setp.ne.u32 more, left, 0; @more bra AGAIN;"]
        return " ".join(lines) + " }"

    def generate(builder, acc, a, b):
        b = lane_address(builder, b, b_operand, of_a=False)
        a = [lane_address(builder, a, a_operand, of_a=True)] if a_operand else unpack(builder, a, a_count)
        # "&": results are written before all arguments have been read
        a_constraint = "r" if a_operand else CONSTRAINTS[word]
        out = emit(builder, text(), ir.LiteralStructType([LLVM_TYPES[real]] * count),
                   ["=&" + CONSTRAINTS[real]] * count, [*acc, *a, b],
                   [*map(str, range(len(acc))), *[a_constraint] * len(a), "r"])
        return pack(builder, unpack(builder, out, count))

    fragment = registers(real, count)
    a_type = uint32 if a_operand else registers(word, a_count)

    def product(typing_context, acc, a, b):
        def codegen(context, builder, signature, args):
            return generate(builder, unpack(builder, args[0], count), *args[1:])

        return numba_signature(fragment, fragment, a_type, uint32), codegen

    def first_product(typing_context, a, b):
        def codegen(context, builder, signature, args):
            return generate(builder, [], *args)

        return numba_signature(fragment, a_type, uint32), codegen

    return with_arity(product, ("acc", "a", "b")) if accumulate else with_arity(first_product, ("a", "b"))
