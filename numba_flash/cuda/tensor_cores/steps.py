"""What the kernels of both engines do with a tile of scores, and with O in the end.

A *group* of threads owns some rows: a warpgroup 64, or a warp 16 or 32. Its thread's number in it says which rows and
columns the thread holds: see `ptx.fragments`.
"""

from functools import lru_cache

from ...scores import make_score
from ..compile import device
from ..ptx.assembly import int32, uint64
from ..ptx.copies import element_address
from ..ptx.formats import make_pack, make_store_rows
from ..ptx.fragments import elementwise, first_column, first_row, make_part, make_rows_down, rowwise
from ..signatures import real_type
from .softmax import (across_max, across_sum, finite, fold_max, fold_sum, growth, hide, lse_of, normalised, probability,
                      product, squash, top, total, visible, weight_of)

PART = 16       # rows of one part of a fragment

first_row, first_column = device(first_row), device(first_column)


@rowwise
def no_later(position, last):
    """The smaller of the row's position and last."""
    return min(position, last)


@rowwise
def less(position, left):
    """The row's position less left."""
    return position - left


@rowwise
def scaled_row(distance, step):
    """The row's distance times step."""
    return step * distance


@lru_cache(maxsize=None)
def make_score_tile(spec, block_n, rows, parts, thread):
    """Build ``score_tile(s, j, i, slope, scale, cap, band, all_first, all_stop)``.

    Parameters
    ----------
    spec : Spec
    block_n : int
        Columns of the tile.
    rows, parts : int
        Rows of the group, and the parts of a fragment.
    thread : device function
        The thread's number in the group.
    """
    softcap, alibi, hook, real = spec.softcap, spec.alibi, spec.hook, real_type(spec.dtype)
    score = device(make_score(softcap, alibi, False, squash)[0])
    down = make_rows_down(parts)

    @elementwise
    def score_of(s, column, distance, slope, scale, cap):
        return score(scale * s, cap, slope, abs(distance - column), real(0))

    @elementwise
    def score_far(s, column, bias, step, scale, cap):
        """The same where all keys are on one side of all queries: ALiBi's term is linear, one multiply-add."""
        return score(scale * s, cap, real(1), bias - step * column, real(0))

    @device
    def score_tile(s, j, i, slope, scale, cap, band, all_first, all_stop):
        """From ``q·k`` to scores, hidden ones -inf; tiles of which all rows see all keys need no mask."""
        n_q, n_k, offset, left, right = band
        if hook:
            number = thread()
            its_first = real(int32(i + first_row(number) + offset - j - first_column(number)))
            keys_before, keys_after = j + block_n - 1 <= i + offset, i + rows - 1 + offset <= j
            if alibi and not softcap and (keys_before or keys_after):
                step = slope if keys_before else -slope
                s = score_far(s, real(0), scaled_row(down(its_first), step), step, scale, cap)
            else:
                s = score_of(s, real(0), down(its_first), slope, scale, cap)
        if j < all_first or j + block_n > all_stop:
            number = thread()
            position = int32(i + first_row(number) + offset - j - first_column(number))
            stop = no_later(down(int32(position + right + 1)), int32(n_k - j - first_column(number)))
            s = hide(s, int32(0), visible(less(down(position), int32(left)), stop))
        return s

    return score_tile


@device
def online_softmax(s, m_old, l, factor):
    """P, and the new m, l, and alpha."""
    m = across_max(fold_max(s, m_old))
    base = finite(m)
    alpha = growth(m_old, base, factor)
    p = probability(s, factor, product(base, factor))
    return p, m, fold_sum(p, product(l, alpha)), alpha


@lru_cache(maxsize=None)
def make_store(dtype, parts, thread):
    """Build ``store(o, m, l, factor, sink, o_array, lse, b, h, i, column)``, for groups as in `make_score_tile`."""
    pack, store_rows, item = make_pack(dtype), make_store_rows(dtype), dtype.itemsize
    part_0, part_1 = make_part(parts, 0), make_part(parts, parts - 1)

    @device
    def store_part(packed, row_lse, o_array, lse, b, h, row, column, number):
        n_q = lse.shape[2]
        if number & 3 == 0:
            if row < n_q:
                lse[b, h, row] = row_lse[0]
            if row + 8 < n_q:
                lse[b, h, row + 8] = row_lse[1]
        store_rows(packed, element_address(o_array, b, h, row) + uint64(column * item), o_array.strides[2],
                   int32(n_q - row), int32(o_array.shape[3] - column))

    @device
    def store(o, m, l, factor, sink, o_array, lse, b, h, i, column):
        """The epilogue: O / l, whose first column is given, and lse go out."""
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
