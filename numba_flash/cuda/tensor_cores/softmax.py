"""The online softmax on fragments: what happens to each element of S, P and O, and to each row's m and l.

The hardware's exponential is base 2, so ``exp(s - m) = 2^(s factor - m factor)`` with ``factor = log2(e)``, or
``scale log2(e)`` for scores that have not been scaled yet: one multiply-add and one exponential an element.
"""

from math import inf

from ..compile import device
from ..ptx.arithmetic import at_most, exp2, fma, log2, low_bits, maximum, quotient, reciprocal
from ..ptx.assembly import float32, int32
from ..ptx.fragments import elementwise, fourwise, make_across_quad, make_fold_rows, rowwise
from .spec import LOG2_E

MOST = float32(30)


@device
def squash(s, cap):
    """``cap * tanh(s / cap)``, as ``tanh(x) = 1 - 2 / (1 + exp(2x))``: right to 1e-7 of cap, as scores need it."""
    e = exp2(s * quotient(type(cap)(2 * LOG2_E), cap))
    return fma(type(cap)(-2) * cap, reciprocal(type(cap)(1) + e), cap)


@elementwise
def squash_scaled(s, scale, cap):
    """`squash` of scale s."""
    return squash(scale * s, cap)


@fourwise
def squash_four(s, factor, cap):
    """The same less cap, right to 5e-7 of cap, for ``factor = 2 log2(e) scale / cap``, four of a row at a time.

    A softcap waits for special functions, and here four share a reciprocal. A NaN among them takes the others along: so
    no hidden key may bring one, and if a visible one does, all of its row are lost. Beyond 2^30, which tanh can't tell
    from infinity, the product of four could overflow.
    """
    a, b = float32(1) + exp2(at_most(s[0] * factor, MOST)), float32(1) + exp2(at_most(s[1] * factor, MOST))
    c, d = float32(1) + exp2(at_most(s[2] * factor, MOST)), float32(1) + exp2(at_most(s[3] * factor, MOST))
    ab, cd = a * b, c * d
    x = float32(-2) * cap * reciprocal(ab * cd)
    by_ab, by_cd = x * cd, x * ab
    return by_ab * b, by_ab * a, by_cd * d, by_cd * c


@device
def columns_below(stop):
    """A bit for each of the thread's columns, as `hide` numbers them, that is less than `stop`."""
    stop = min(max(int32(stop), int32(0)), int32(128))
    return low_bits(int32((stop >> 3) * 2 + min(stop & 7, 2)))


@rowwise
def visible(first, stop):
    """The bits of the columns in [first, stop) of the row, counted from the thread's first column."""
    return columns_below(stop) & ~columns_below(first)


@elementwise
def hide(s, column, bits, otherwise):
    """`otherwise` where the row's bit of the column is 0. Pass 0 for `column`, so that each bit is a constant.

    A thread's columns are 0, 1, 8, 9, 16, ... from its first: up to 128 columns of a tile are 32 bits. To look at a bit
    is shorter than two comparisons.
    """
    return s if bits & (int32(1) << int32(column // 8 * 2 + column % 8)) else otherwise


@elementwise
def probability(s, factor, base):
    """exp(s - m), with ``base = m * factor``."""
    return exp2(fma(s, factor, -base))


@elementwise
def scaled(x, alpha):
    """alpha x."""
    return x * alpha


@elementwise
def normalised(x, weight):
    """x times the row's weight; a row without keys is 0, whatever hidden values have left in it."""
    return x * weight if weight != type(x)(0) else type(x)(0)


@rowwise
def finite(m):
    """m, or 0 where no key has been seen: -inf - -inf would be NaN."""
    return m if m != type(m)(-inf) else type(m)(0)


@rowwise
def growth(m_old, m, factor):
    """alpha = exp(m_old - m)."""
    return exp2((m_old - m) * factor)


@rowwise
def product(x, y):
    """x y, row by row."""
    return x * y


@rowwise
def top(m, factor, sink):
    """The larger of m and the sink, base 2."""
    return maximum(m * factor, sink)


@rowwise
def total(l, m, factor, base, sink):
    """Sum of a row's exponentials and its sink's, relative to base."""
    return l * exp2(fma(m, factor, -base)) + exp2(sink - base)


@rowwise
def weight_of(m, factor, base, l):
    """What O is multiplied by in the end; 0 for a row without keys."""
    return exp2(fma(m, factor, -base)) * reciprocal(l) if l != type(l)(0) else type(l)(0)


@rowwise
def lse_of(l, base):
    """Natural log of the row's sum."""
    return (base + log2(l)) * type(l)(1 / LOG2_E) if l != type(l)(0) else type(l)(-inf)


def plus(x, y):
    """The function that sums fold."""
    return x + y


def larger(x, y):
    """The function that maxima fold."""
    return maximum(x, y)


fold_max, fold_sum = make_fold_rows(larger), make_fold_rows(plus)
across_max, across_sum = make_across_quad(larger), make_across_quad(plus)
