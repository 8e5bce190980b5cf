"""What comes before a backward kernel, lse and delta of the queries, and after it: sums in their dtype."""

from functools import lru_cache
from math import inf

from ..compile import cuda, device
from ..ptx.assembly import int32, uint64
from ..ptx.copies import element_address
from ..ptx.exchange import make_load_sums
from ..ptx.formats import make_load_piece, make_pack, make_store_parts, make_unpack
from ..ptx.fragments import elementwise, first_row, rowwise, sum_of_elements
from ..signatures import array_type, none, real_array, real_type
from .schedule import divide
from .softmax import plus, scaled
from .spec import LOG2_E, ROWS_OF_LANES, WARPGROUP

PIECE_BYTES = 16        # what a thread takes at once
ALL_LANES = 0xffffffff

first_row, plus_rows = device(first_row), rowwise(plus)


@rowwise
def from_lane(x, distance):
    """x and that of the lane across."""
    return x + cuda.shfl_xor_sync(ALL_LANES, x, distance)


@elementwise
def product_unless_zero(x, y):
    """x y, or 0 if x is: o is 0 in a row without visible keys, which has no delta even if do holds NaN."""
    return x * y if x != type(x)(0) else type(x)(0)


@lru_cache(maxsize=None)
def make_query_numbers(threads, lanes, block_m, dtype, has_dlse):
    """Build the kernel for lse, in base 2, and ``delta = rowsum(do * o) - dlse``, tile by tile.

    Grid: `threads` a block, of which `lanes` neighbours share four rows and read neighbouring 16 bytes of each.
    ``numbers[b, h, tile]`` holds `block_m` lse and as many delta: what the backward kernel copies at once. Past the
    last query, and where a query sees nothing, lse is +inf: exp(s - inf) is 0 there, not NaN.
    """
    unpack, load_piece, item, real = make_unpack(dtype), make_load_piece(dtype), dtype.itemsize, real_type(dtype)

    @device
    def product_of(do, o, b, h, row, place):
        """Of this lane's elements of a row, or of the last one's past it: loads wait for no comparison."""
        row = min(row, int32(o.shape[2] - 1))
        return sum_of_elements(product_unless_zero(unpack(load_piece(element_address(o, b, h, row) + uint64(place))),
                                                   unpack(load_piece(element_address(do, b, h, row) + uint64(place)))))

    @device
    def write(delta, lse, dlse, numbers, b, h, row):
        n_q, its_lse = lse.shape[2], real(-inf)
        if row < n_q:
            its_lse = lse[b, h, row]
            if has_dlse:
                delta -= dlse[b, h, row]
        tile, place = divide(row, block_m)
        numbers[b, h, tile, place] = its_lse * real(LOG2_E) if its_lse != real(-inf) else real(inf)
        numbers[b, h, tile, block_m + place] = delta if row < n_q else real(0)

    def query_numbers_kernel(do, o, lse, dlse, numbers):
        heads, tiles = int32(o.shape[1]), int32(numbers.shape[2])
        group, lane = divide(cuda.blockIdx.x * threads + cuda.threadIdx.x, lanes)
        bh, row = divide(group * ROWS_OF_LANES, tiles * block_m)
        b, h = divide(bh, heads)
        inside = b < o.shape[0]
        place, stop = int32(lane * PIECE_BYTES), int32(o.shape[3] * item) if inside else int32(0)
        deltas = real(0), real(0), real(0), real(0)
        while place < stop:
            deltas = plus_rows(deltas, (product_of(do, o, b, h, row, place), product_of(do, o, b, h, row + 1, place),
                                        product_of(do, o, b, h, row + 2, place),
                                        product_of(do, o, b, h, row + 3, place)))
            place += int32(lanes * PIECE_BYTES)
        distance = int32(lanes // 2)
        while distance > 0:
            deltas = from_lane(deltas, distance)
            distance //= int32(2)
        if inside and lane == 0:
            write(deltas[0], lse, dlse, numbers, b, h, row)
            write(deltas[1], lse, dlse, numbers, b, h, int32(row + 1))
            write(deltas[2], lse, dlse, numbers, b, h, int32(row + 2))
            write(deltas[3], lse, dlse, numbers, b, h, int32(row + 3))

    signature = ((array_type(dtype, 4),) * 2
                 + (real_array(dtype, 3), real_array(dtype, 3) if has_dlse else none, real_array(dtype, 4)))
    return query_numbers_kernel, signature


@lru_cache(maxsize=None)
def make_round(parts, dtype):
    """Build the kernel for ``x = scale * sums`` in its dtype, from `SumParts`.

    Grid: one block of 128 threads for as many parts as it has groups. Each group holds its part as who added to it.
    """
    threads, rows, columns, across = parts.threads, parts.rows, parts.columns, parts.across
    real = real_type(dtype)
    load_sums, pack = make_load_sums(columns, threads, parts.by_four, real), make_pack(dtype)
    store_parts = make_store_parts(1, dtype)

    def round_kernel(sums, array, scale):
        group, thread = divide(cuda.threadIdx.x, threads)
        bh, part = divide(cuda.blockIdx.x * (WARPGROUP // threads) + group, sums.shape[2])
        b, h = divide(bh, sums.shape[1])
        if b >= sums.shape[0]:
            return
        down, side = divide(part, across)
        row, column = int32(down * rows + first_row(thread)), int32(side * columns)
        x = load_sums(element_address(sums, b, h, part), thread)
        store_parts(pack(scaled(x, scale)), array, b, h, row, column)

    return round_kernel, (real_array(dtype, 4), array_type(dtype, 4), real)
