"""What the kernels of both engines do with a tile of scores, and with O in the end.

A *group* of threads owns some rows: a warpgroup 64, or a warp 16 or 32. Its thread's number in it says which rows and
columns the thread holds: see `ptx.fragments`.
"""

from functools import lru_cache
from math import inf

from ..compile import device
from ..ptx.arithmetic import fma, in_any_lane, quotient, reciprocal
from ..ptx.assembly import float32, int32
from ..ptx.formats import PART, make_pack, make_store_parts
from ..ptx.fragments import (elementwise, first_column, first_row, make_filled, make_part, make_rows_down, rowwise,
                             sum_of_elements)
from ..signatures import real_type
from .softmax import (HUGE, across_sum, finite, fold_max, fold_size, fold_sum, hide, larger, less_row, lse_of,
                      make_squash, near_limit, near_probability, normalised, plus, product, scaled, size,
                      squash_four, top, total, visible, weight_of, within)
from .spec import LOG2_E

first_row, first_column = device(first_row), device(first_column)
plus_rows, larger_rows, plus_row = rowwise(plus), rowwise(larger), elementwise(plus)


@rowwise
def no_later(position, last):
    """The smaller of the row's position and last."""
    return min(position, last)


@rowwise
def less(x, y):
    """x - y."""
    return x - y


@elementwise
def with_slope(s, column, distance, slope):
    """ALiBi: the score less slope times its distance, whose sign doesn't matter."""
    return s - slope * abs(distance - column)


@rowwise
def for_all(_, x):
    """x for each row."""
    return x


@device
def side_of_keys(j, block_n, i, rows, offset):
    """Where a tile's keys are from its rows' positions: 1, all before; -1, all after; 0, some before and some after."""
    position = int32(i + offset)
    if int32(j + (block_n - 1)) <= position:
        return int32(1)
    return int32(-1) if int32(position + (rows - 1)) <= j else int32(0)


@elementwise
def slanted(s, column, step):
    """The score and the row's step times its column: one multiply-add, as the column is a constant."""
    return fma(step, column, s)


@lru_cache(maxsize=None)
def make_slope(spec):
    """Build ``its_slope(slopes, b, h, scale)``: ALiBi's slope of a head, in the unit of the scores; 0 without it."""
    alibi, hook, real = spec.alibi, spec.hook, real_type(spec.dtype)

    @device
    def its_slope(slopes, b, h, scale):
        if not alibi:
            return real(0)
        slope = slopes[b, h]
        if not hook:                    # slope / scale, as good as rounded
            inverse = reciprocal(scale)
            ratio = slope * inverse
            slope = fma(fma(-ratio, scale, slope), inverse, ratio)
        return slope

    return its_slope


@lru_cache(maxsize=None)
def make_score_tile(spec, block_n, rows, parts, thread, with_slant=False):
    """Build ``score_tile(s, j, i, slope, scale, cap, band, some_hidden)``: scores, and what to add to each row.

    Parameters
    ----------
    spec : Spec
    block_n : int
        Columns of the tile.
    rows, parts : int
        Rows of the group, and the parts of a fragment.
    thread : device function
        The thread's number in the group.
    with_slant : bool
        Whether the scores come with the columns' part of ALiBi's linear term, from the tile's first column on.
    """
    softcap, alibi, hook, real = spec.softcap, spec.alibi, spec.hook, real_type(spec.dtype)
    in_16_bits, squash = spec.item == 2, make_squash(spec.dtype)
    down, nothing = make_rows_down(parts), make_filled(4 * parts, 0.0, real)

    @device
    def masked(s, j, i, band, otherwise):
        """`otherwise` for hidden scores."""
        n_q, n_k, offset, left, right = band
        number = thread()
        position = int32(i + first_row(number) + offset - j - first_column(number))
        stop = no_later(down(int32(position + right + 1)), int32(n_k - j - first_column(number)))
        return hide(s, int32(0), visible(down(int32(position - left)), stop), otherwise)

    @device
    def score_tile(s, j, i, slope, scale, cap, band, some_hidden):
        """From ``q·k`` to scores, hidden ones -inf; tiles of which all rows see all keys need no mask.

        Where all keys are on one side of all queries, ALiBi's term is linear: the column's part of it is added here, if
        the product did not, and the row's is left to the softmax. So is what a softcap's formula adds to all.
        """
        offset = band[2]
        rest = nothing()
        if softcap:
            if in_16_bits:
                if some_hidden:
                    s = masked(s, j, i, band, real(0))      # or a hidden NaN takes others along
                s, rest = squash_four(s, scale * quotient(real(2 * LOG2_E), cap), cap), for_all(rest, cap)
            else:
                s = squash(s, scale, cap)
        elif hook:
            s = scaled(s, scale)
        if alibi:
            number, side = thread(), side_of_keys(j, block_n, i, rows, offset)
            from_first = int32(i + offset + first_row(number) - j)
            from_own = real(int32(from_first - first_column(number)))
            if side != 0:
                step = slope if side > 0 else -slope
                if not with_slant:
                    s = slanted(s, real(0), for_all(rest, step))
                rest = plus_rows(rest, product(down(real(from_first) if with_slant else from_own), -step))
            else:
                s = with_slope(s, real(0), down(from_own), slope)
        if some_hidden:
            s = masked(s, j, i, band, real(-inf))
        return s, rest

    return score_tile


@lru_cache(maxsize=None)
def make_online_softmax(spec):
    """Build the steps of the online softmax, for scores ``s + rest``; that sum is made for a row's maximum only.

    Returns
    -------
    own_max
        ``own_max(s, rest, m)``: the larger of m and this thread's scores.
    any_huge
        ``any_huge(m_own, factor)``: whether, for some row of the warp, m times the exponent's factor may be rounded by
        more than weights bear, which are 2 to that power. To ask before m is known costs no time.
    relative
        ``relative(s, rest, m, factor, huge)``: s and each row's base: P is 2 to the power of ``s factor - base``. If
        some m is huge, s comes less m, and the base is 0.
    """
    has_rest, real = spec.alibi or spec.softcap, real_type(spec.dtype)
    bounded, in_float64 = spec.softcap and spec.item == 2 and not spec.alibi, spec.item == 8

    @device
    def own_max(s, rest, m):
        if has_rest:                        # which m has been through: it must not be rounded there once more
            return larger_rows(plus_rows(fold_max(s, for_all(m, real(-inf))), rest), m)
        return fold_max(s, m)

    @device
    def any_huge(m_own, factor):
        if bounded or in_float64:
            return int32(in_float64)        # whose exponentials take so long that the subtraction doesn't matter
        return in_any_lane(int32(sum_of_elements(size(m_own)) >= quotient(HUGE, factor)))

    @device
    def relative(s, rest, m, factor, huge):
        base = finite(m)
        if huge != 0:                       # the largest score becomes 0, and others are less, however they are rounded
            return less_row(plus_row(s, rest) if has_rest else s, base), for_all(base, real(0))
        return s, product(less(base, rest) if has_rest else base, factor)

    return own_max, any_huge, relative


@device
def are_near(s, ceiling, scale, cap):
    """Whether `near_weights` is right for ``q·k``: none of the warp's is large, nor may pass its row's ceiling."""
    sizes = fold_size(s, (float32(0), float32(0)))
    small = within(sizes, ceiling, scale, near_limit(scale, cap))
    return not in_any_lane(int32(not (small[0] and small[1])))


@device
def near_weights(s, m, l, scale, cap, factor):
    """P of ``q·k`` under a softcap, the new l, and alpha, which is 1 as m stays.

    So nothing waits for a maximum, and the polynomial's multiply-adds run while special functions take exponentials.
    """
    ratio = quotient(scale, cap)
    p = near_probability(s, scale * factor, ratio * ratio, product(m, factor))
    return p, fold_sum(p, l), (float32(1), float32(1))


@lru_cache(maxsize=None)
def make_store(dtype, parts, thread):
    """Build ``store(o, m, l, factor, sink, o_array, lse, b, h, i, column)``, for groups as in `make_score_tile`."""
    pack, store_rows = make_pack(dtype), make_store_parts(1, dtype)
    part_0, part_1 = make_part(parts, 0), make_part(parts, parts - 1)

    @device
    def store_part(packed, row_lse, o_array, lse, b, h, row, column, number):
        n_q = lse.shape[2]
        if number & 3 == 0:
            if row < n_q:
                lse[b, h, row] = row_lse[0]
            if row + 8 < n_q:
                lse[b, h, row + 8] = row_lse[1]
        store_rows(packed, o_array, b, h, row, column)

    @device
    def store(o, m, l, factor, sink, o_array, lse, b, h, i, column):
        """The epilogue: O / l, whose first column is given, and lse, if it has any rows, go out."""
        number = thread()
        row = int32(i + first_row(number))
        l = across_sum(l)
        base = finite(top(m, factor, sink))
        l = total(l, m, factor, base, sink)
        packed = pack(normalised(o, weight_of(m, factor, base, l)))
        row_lse = lse_of(l, base)
        store_part(part_0(packed), part_0(row_lse), o_array, lse, b, h, row, column, number)
        if parts == 2:
            store_part(part_1(packed), part_1(row_lse), o_array, lse, b, h, int32(row + PART), column,
                       number)

    return store
