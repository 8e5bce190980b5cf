"""What comes before a backward kernel, lse and delta of the queries, and after it: sums in their dtype."""

from functools import lru_cache
from math import inf

from ..compile import cuda, device
from ..ptx.assembly import int32, uint64
from ..ptx.copies import element_address
from ..ptx.formats import make_load_piece, make_pack, make_store_rows, make_unpack
from ..ptx.fragments import elementwise, first_row, make_load_sums, sum_of_elements
from ..signatures import array_type, none, real_array, real_type
from .schedule import divide
from .softmax import scaled
from .spec import LOG2_E, WARPGROUP

PIECE_BYTES = 16        # what a thread takes at once
ALL_LANES = 0xffffffff

first_row = device(first_row)


@elementwise
def product_unless_zero(x, y):
    """x y, or 0 if x is: o is 0 in a row without visible keys, which has no delta even if do holds NaN."""
    return x * y if x != type(x)(0) else type(x)(0)


@lru_cache(maxsize=None)
def make_query_numbers(threads, lanes, block_m, dtype, has_dlse):
    """Build the kernel for lse, in base 2, and ``delta = rowsum(do * o) - dlse``, tile by tile.

    Grid: `threads` a block, of which `lanes` neighbours share a query and read neighbouring 16 bytes. ``numbers[b, h,
    tile]`` holds `block_m` lse and as many delta: what the backward kernel copies at once. Past the last query, and
    where a query sees nothing, lse is +inf: exp(s - inf) is 0 there, not NaN.
    """
    unpack, load_piece, item, real = make_unpack(dtype), make_load_piece(dtype), dtype.itemsize, real_type(dtype)

    def query_numbers_kernel(do, o, lse, dlse, numbers):
        n_q, heads, tiles = int32(o.shape[2]), int32(o.shape[1]), int32(numbers.shape[2])
        piece, lane = divide(cuda.blockIdx.x * threads + cuda.threadIdx.x, lanes)
        bh, row = divide(piece, tiles * block_m)
        if bh >= o.shape[0] * heads:        # all of a warp or none: its rows are of one tile
            return
        b, h = divide(bh, heads)
        delta = real(0)
        place, stop = int32(lane * PIECE_BYTES), int32(o.shape[3] * item) if row < n_q else int32(0)
        while place < stop:
            x = unpack(load_piece(element_address(o, b, h, row) + uint64(place)))
            y = unpack(load_piece(element_address(do, b, h, row) + uint64(place)))
            delta += sum_of_elements(product_unless_zero(x, y))
            place += int32(lanes * PIECE_BYTES)
        distance = int32(lanes // 2)
        while distance > 0:
            delta += cuda.shfl_xor_sync(ALL_LANES, delta, distance)
            distance //= int32(2)
        if lane == 0:
            tile, place = divide(row, block_m)
            its_lse = lse[b, h, row] if row < n_q else real(-inf)
            if has_dlse and row < n_q:
                delta -= dlse[b, h, row]
            numbers[b, h, tile, place] = its_lse * real(LOG2_E) if its_lse != real(-inf) else real(inf)
            numbers[b, h, tile, block_m + place] = delta

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
    store_rows, item = make_store_rows(dtype), dtype.itemsize

    def round_kernel(sums, array, scale):
        group, thread = divide(cuda.threadIdx.x, threads)
        bh, part = divide(cuda.blockIdx.x * (WARPGROUP // threads) + group, sums.shape[2])
        b, h = divide(bh, sums.shape[1])
        if b >= sums.shape[0]:
            return
        down, side = divide(part, across)
        row, column = int32(down * rows + first_row(thread)), int32(side * columns)
        x = load_sums(element_address(sums, b, h, part), thread)
        store_rows(pack(scaled(x, scale)), element_address(array, b, h, row) + uint64(column * item), array.strides[2],
                   int32(array.shape[2] - row), int32(array.shape[3] - column))

    return round_kernel, (real_array(dtype, 4), array_type(dtype, 4), real)
