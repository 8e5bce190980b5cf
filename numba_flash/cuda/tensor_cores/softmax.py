"""The online softmax on fragments: what happens to each element of S, P and O, and to each row's m and l.

The hardware's exponential is base 2, so ``exp(s - m) = 2^(s factor - m factor)`` with ``factor = log2(e)``, or
``scale log2(e)`` for scores that have not been scaled yet: one multiply-add and one exponential an element.
"""

from functools import lru_cache
from math import inf

from ..compile import device
from ..ptx.arithmetic import at_most, exp2, fma, in_any_lane, log2, low_bits, maximum, quotient, reciprocal
from ..ptx.assembly import float32, float64, int32
from ..ptx.fragments import elementwise, fourwise, make_across_quad, make_fold_rows, rowwise
from ..signatures import real_type
from .spec import LOG2_E

MOST = float32(30)
ROOM = float32(6)           # that a row's m may lag by at most, base 2: no weight passes 64, half of a tile's columns
HUGE = float32(2**16)       # exponents with 7 bits of fraction or less
# tanh(x) / x by powers of x^2, for x up to 1/2: the polynomial that agrees with it at the four nodes of Chebyshev. What
# is made of it is off by 3e-7 of cap.
TANH = 0.9999994510270872, -0.3332628423141671, 0.13189939425594752, -0.04439273843261177


@device
def series_in_float32(t):
    """(tanh(x) / x - 1) / t for ``t = x^2`` up to 1/16, by tanh's power series."""
    p = fma(t, float32(62 / 2835), float32(-17 / 315))
    return fma(t, fma(t, p, float32(2 / 15)), float32(-1 / 3))


@device
def series_in_float64(t):
    """The same with as many terms as float64 needs."""
    p = fma(t, 443861162 / -1856156927625, 6404582 / 10854718875)
    p = fma(t, fma(t, p, -929569 / 638512875), 21844 / 6081075)
    p = fma(t, fma(t, p, -1382 / 155925), 62 / 2835)
    return fma(t, fma(t, fma(t, p, -17 / 315), 2 / 15), -1 / 3)


@lru_cache(maxsize=None)
def make_squash(dtype):
    """Build ``squash(s, scale, cap)``: ``cap * tanh(scale s / cap)``, with ``tanh(x) = 1 - 2 / (1 + exp(2x))``.

    Its error is a unit of cap's last place or two. That is enough for exponentials in 16 bits up to `LARGEST_CAP`, but
    for longer dtypes it is too much where x is small.
    """
    in_16_bits, real = dtype.itemsize == 2, real_type(dtype)
    series = series_in_float64 if real == float64 else series_in_float32

    @elementwise
    def squash(s, scale, cap):
        s *= scale
        x = s * quotient(real(1), cap)
        far = fma(real(-2) * cap, reciprocal(real(1) + exp2(x * real(2 * LOG2_E))), cap)
        t = x * x
        return far if in_16_bits or not t < real(1 / 16) else fma(s * t, series(t), s)

    return squash


@device
def exp_of_twice(s, factor):
    """exp(2 x) for squash_four's x."""
    return exp2(at_most(s * factor, MOST))


@fourwise
def squash_four(s, factor, cap):
    """``cap * tanh(scale s / cap) - cap``, right to 5e-7 of cap, for ``factor = 2 log2(e) scale / cap``.

    A softcap waits for special functions, and here four elements of a row share a reciprocal. A NaN among them takes
    the others along: so no hidden key may bring one, and if a visible one does, all of its row are lost anyway. Beyond
    2^30, which tanh can't tell from infinity, the product of four could overflow.
    """
    a, b = exp_of_twice(s[0], factor), float32(1) + exp_of_twice(s[1], factor)
    c, d = exp_of_twice(s[2], factor), float32(1) + exp_of_twice(s[3], factor)
    ab, cd = fma(a, b, b), fma(c, d, d)                 # products of 1 + a, b, 1 + c, d
    x = float32(-2) * cap * reciprocal(ab * cd)
    by_ab, by_cd = x * cd, x * ab
    return by_ab * b, fma(by_ab, a, by_ab), by_cd * d, fma(by_cd, c, by_cd)


@device
def columns_below(stop):
    """A bit for each of the thread's columns, as `hide` numbers them, that is less than `stop`."""
    stop = max(int32(stop), int32(0))
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


@rowwise
def size(m):
    """The size of each row's m."""
    return abs(m)


@elementwise
def less_row(s, m):
    """The score less its row's m."""
    return s - m


@elementwise
def probability(s, factor, base):
    """exp(s - m), with ``base = m * factor``."""
    return exp2(fma(s, factor, -base))


@device
def near_limit(scale, cap):
    """Up to which size of q·k `near_probability` is right; none where one of its factors might leave float32."""
    limit = quotient(cap, float32(2) * abs(scale))
    return limit if float32(2**-15) < limit < float32(2**15) else float32(-1)


@rowwise
def within(size, ceiling, scale, limit):
    """Whether no q·k of that size is beyond the limit, nor its score above the ceiling, as its tanh isn't above it."""
    return size <= limit and size * abs(scale) <= ceiling


@elementwise
def near_probability(s, slope, square, base):
    """exp(cap tanh(scale s / cap) - m), where ``slope = scale factor``, ``square = (scale / cap)^2``, by `TANH`."""
    t = s * s
    p = fma(t, slope * square * square * square * float32(TANH[3]), slope * square * square * float32(TANH[2]))
    p = fma(t, fma(t, p, slope * square * float32(TANH[1])), slope * float32(TANH[0]))
    return exp2(fma(s, p, -base))


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
def ceiling_of(m, l, factor, huge):
    """Up to which score m may stay as it is, given the sum of the row's weights so far: what is to weigh half of it.

    A row that is a few keys' affair has no such room: there m is the largest score, whose weight is exactly 1, while
    all others are rounded to 16 bits. (Weights up to 2^8 whatever the row: 1.2 times the error on large scores.) By
    `ROOM` O might overflow where values in bfloat16 pass 5e36. Where m is huge, every tile is to pass the ceiling.
    """
    room = at_most(maximum(log2(l) - float32(1), float32(0)), ROOM)
    return m + quotient(room, factor) if huge == 0 else float32(-inf)


@device
def any_above(m, ceiling):
    """Whether some row of the warp has grown above its ceiling."""
    return in_any_lane(int32(m[0] > ceiling[0] or m[1] > ceiling[1]))


@rowwise
def lagging(m, m_old, ceiling):
    """The old m instead of the running max, where that is not above the row's ceiling: then alpha is 1."""
    return m_old if m <= ceiling else m


@device
def any_changes(alpha):
    """Whether some row of the warp has an alpha other than 1."""
    return in_any_lane(int32(alpha[0] != float32(1) or alpha[1] != float32(1)))


@rowwise
def growth(m_old, m, factor):
    """alpha = exp(m_old - m)."""
    return exp2((m_old - m) * factor)


@rowwise
def product(x, y):
    """x y, row by row."""
    return x * y


@device
def in_base_2(m, factor):
    """m factor, rounded: no part of a multiply-add, which would leave what a base was rounded by."""
    return fma(m, factor, type(m)(0))


@rowwise
def top(m, factor, sink):
    """The larger of m and the sink, base 2."""
    return maximum(in_base_2(m, factor), sink)


@rowwise
def total(l, m, factor, base, sink):
    """Sum of a row's exponentials and its sink's, relative to base."""
    return l * exp2(in_base_2(m, factor) - base) + exp2(sink - base)


@rowwise
def weight_of(m, factor, base, l):
    """What O is multiplied by in the end; 0 for a row without keys."""
    return exp2(in_base_2(m, factor) - base) * reciprocal(l) if l != type(l)(0) else type(l)(0)


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


def larger_size(x, y):
    """The function that sizes fold."""
    return maximum(abs(x), abs(y))


fold_size = make_fold_rows(larger_size)
fold_max, fold_sum = make_fold_rows(larger), make_fold_rows(plus)
across_max, across_sum = make_across_quad(larger), make_across_quad(plus)
