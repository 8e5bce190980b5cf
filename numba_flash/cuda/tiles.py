"""What the kernels do with tiles: load them into shared memory, and multiply them by register micro-tiles.

A block of ``threads_m x threads_n`` threads shares a tile of scores; thread (ty, tx) owns a micro-tile of it, whose
rows and columns lie strided over the tile::

    row r of the thread    = row    ty + r * threads_m  of the tile
    column c of the thread = column tx + c * threads_n  of the tile

Neighbouring threads so read neighbouring rows of K, which a padding of 4 elements puts into different banks of shared
memory. Of a tile of outputs (O, dQ, dK, dV) the thread owns the same rows, and columns in groups of four that it reads
at once: columns ``4 * (tx + u * threads_n)`` to ``+ 3``.

Micro-tiles are local arrays whose loops have constant bounds: the compiler unrolls them and keeps every element in a
register.
"""

from functools import lru_cache

from .compile import cuda, device
from .memory import load4, make_conversions, read

WARP = 32           # neighbouring threads that read neighbouring elements of global memory


@device
def thread_place(threads_m, threads_n):
    """Row and column (ty, tx) of this thread in its block; the `&` tells the compiler that neither is negative."""
    return cuda.threadIdx.y & (threads_m - 1), cuda.threadIdx.x & (threads_n - 1)


@device
def output_col(c, tx, threads_n):
    """Which column of a tile of outputs is column c of this thread's micro-tile."""
    return 4 * tx + c // 4 * (4 * threads_n) + c % 4


@device
def fill(micro, value):
    """Set every element of a micro-tile."""
    for r in range(micro.shape[0]):
        for c in range(micro.shape[1]):
            micro[r, c] = value


@lru_cache(maxsize=None)
def make_load_tile(dtype, real):
    """Build `load_tile` for arrays of one dtype; `real` is the Numba type of the tile's elements."""
    to_real, _ = make_conversions(dtype)

    @device
    def copy(tile, cols, x, first, thread, threads, clamped):
        lanes = min(WARP, threads)
        lane, warp, warps = thread % lanes, thread // lanes, threads // lanes
        n, width = x.shape
        strange = False
        for step in range(tile.shape[0] // warps):
            row = warp + step * warps
            for col_step in range(cols // lanes):
                col = lane + col_step * lanes
                if clamped:
                    i = first + row
                    value = to_real(read(x, (i if i < n else 0, col if col < width else 0)))
                    value = value if i < n and col < width else real(0)
                else:
                    value = to_real(read(x, (first + row, col)))
                tile[row, col] = value
                strange |= value - value != real(0)
        return strange

    @device
    def load_tile(tile, cols, x, first, thread, threads):
        """Copy rows ``first, first + 1, ...`` of x, shape (n, width), into a tile; zeros past the ends of x.

        At the ends addresses are clamped and not guarded: loads without branches are all in flight at once.
        Returns whether this thread met a NaN or an Inf.
        """
        if first + tile.shape[0] <= x.shape[0] and cols == x.shape[1]:
            return copy(tile, cols, x, first, thread, threads, False)
        return copy(tile, cols, x, first, thread, threads, True)

    return load_tile


@lru_cache(maxsize=None)
def make_store_tile(dtype):
    """Build `store_tile`, which writes a tile of outputs to rows ``first, first + 1, ...`` of x."""
    _, from_real = make_conversions(dtype)

    @device
    def store_tile(x, first, micro, ty, tx, threads_m, threads_n):
        for r in range(micro.shape[0]):
            i = first + ty + r * threads_m
            if i < x.shape[0]:
                for c in range(micro.shape[1]):
                    col = output_col(c, tx, threads_n)
                    if col < x.shape[1]:
                        x[i, col] = from_real(micro[r, c])

    return store_tile


@device
def scale_by(micro, factor):
    """Multiply every element of a micro-tile."""
    for r in range(micro.shape[0]):
        for c in range(micro.shape[1]):
            micro[r, c] *= factor


@device
def load_rows(target, x, first, missing, thread, threads):
    """Copy ``x[first:first + len(target)]`` into shared memory; `missing` past its end."""
    for row in range(thread, target.shape[0], threads):
        i = first + row
        value = read(x, (i if i < x.shape[0] else 0,))
        target[row] = value if i < x.shape[0] else missing


@device
def scatter(tile, micro, ty, tx, threads_m, threads_n):
    """Write this thread's micro-tile of scores to its places in a tile."""
    for r in range(micro.shape[0]):
        for c in range(micro.shape[1]):
            tile[ty + r * threads_m, tx + c * threads_n] = micro[r, c]


@device
def scatter_transposed(tile, micro, ty, tx, threads_m, threads_n):
    """Write this thread's micro-tile of scores to its places in the transposed tile."""
    for r in range(micro.shape[0]):
        for c in range(micro.shape[1]):
            tile[tx + c * threads_n, ty + r * threads_m] = micro[r, c]


@device
def gather(micro, tile, ty, tx, threads_m, threads_n):
    """Read back what `scatter` wrote."""
    for r in range(micro.shape[0]):
        for c in range(micro.shape[1]):
            micro[r, c] = tile[ty + r * threads_m, tx + c * threads_n]


@device
def multiply_nt(acc, a, b, depth, ty, tx, threads_m, threads_n):
    """``acc += A Bᵀ`` for this thread's micro-tile: both operands are read along their rows, four elements at once."""
    for k in range(0, depth, 4):
        for r in range(acc.shape[0]):
            x = load4(a, ty + r * threads_m, k)
            for c in range(acc.shape[1]):
                y = load4(b, tx + c * threads_n, k)
                s = acc[r, c]
                s += x[0] * y[0]
                s += x[1] * y[1]
                s += x[2] * y[2]
                s += x[3] * y[3]
                acc[r, c] = s


@device
def add_row(acc, r, c, x, y):
    """``acc[r, c:c + 4] += x * y``."""
    acc[r, c] += x * y[0]
    acc[r, c + 1] += x * y[1]
    acc[r, c + 2] += x * y[2]
    acc[r, c + 3] += x * y[3]


@device
def multiply_nn(acc, a, b, depth, ty, tx, threads_m, threads_n):
    """``acc += A B`` for this thread's micro-tile of outputs."""
    for k in range(0, depth, 4):
        for c in range(0, acc.shape[1], 4):
            col = 4 * tx + c * threads_n
            y0 = load4(b, k, col)
            y1 = load4(b, k + 1, col)
            y2 = load4(b, k + 2, col)
            y3 = load4(b, k + 3, col)
            for r in range(acc.shape[0]):
                x = load4(a, ty + r * threads_m, k)
                add_row(acc, r, c, x[0], y0)
                add_row(acc, r, c, x[1], y1)
                add_row(acc, r, c, x[2], y2)
                add_row(acc, r, c, x[3], y3)


@device
def multiply_nn_seen(acc, a, b, depth, ty, tx, threads_m, threads_n, hidden):
    """`multiply_nn` that leaves out the pairs where A is `hidden`: a NaN or Inf of B there would come through as 0 *
    NaN.

    Several times slower; kernels take it for a tile only if a row of B that holds such a value is hidden from some row
    of A.
    """
    for k in range(depth):
        for r in range(acc.shape[0]):
            x = a[ty + r * threads_m, k]
            if x != hidden:
                for c in range(0, acc.shape[1], 4):
                    add_row(acc, r, c, x, load4(b, k, 4 * tx + c * threads_n))


@device
def strip_max(strip, row):
    """Largest entry of one row of a strip."""
    largest = strip[row, 0]
    for c in range(0, strip.shape[1], 4):
        x = load4(strip, row, c)
        largest = max(largest, max(max(x[0], x[1]), max(x[2], x[3])))
    return largest


@device
def strip_sum(strip, row):
    """Sum of one row of a strip."""
    x = load4(strip, row, 0)
    total = (x[0] + x[1]) + (x[2] + x[3])
    for c in range(4, strip.shape[1], 4):
        x = load4(strip, row, c)
        total += (x[0] + x[1]) + (x[2] + x[3])
    return total


@device
def row_max(micro, r):
    """Largest element of row r of a micro-tile."""
    largest = micro[r, 0]
    for c in range(1, micro.shape[1]):
        largest = max(largest, micro[r, c])
    return largest
