"""Which query tile a block works on when, and which K/V tiles belong to it.

A kernel has a block for each multiprocessor. Query tiles have numbers, and each block takes one in every round, in
every other round in reverse order. Under a causal mask the last tiles of a sequence are the longest, so they come
first, and who had a longer one gets a shorter one next: all blocks end at about the same time::

    round    tiles of 4 blocks, by length        of 6 heads `together`, first the last tile of each, then the one before
      0         8    8    8    8
      1         7    7    8    8     <-- block 0 takes the last of these
      2         7    7    7    7

Heads are numbered through the batch. Few heads `together` means that several blocks read the same K and V at a time.

`uniform` tells the compiler what all threads of a warp agree on. It keeps that in registers that a warp has once; where
wgmma's operands start must be there.
"""

from ...scores import seen_keys
from ..compile import cuda, device
from ..ptx.arithmetic import thread_number, uniform
from ..ptx.assembly import int32, uint32
from .spec import WARPGROUP

seen_keys = device(seen_keys)


@device
def thread_of_warpgroup():
    """Number of the thread in its warpgroup; asked for anew each time, for to remember it takes a register."""
    return thread_number() & (WARPGROUP - 1)


@device
def divide(x, y):
    """Quotient and rest of numbers below 2^32: unsigned division is much shorter in 32 bits than Numba's in 64."""
    x, y = uint32(x), uint32(y)
    return int32(x // y), int32(x % y)


@device
def tile_number(turn):
    """Number of the block's tile of a round."""
    block = cuda.blockIdx.x if turn & 1 == 0 else cuda.gridDim.x - 1 - cuda.blockIdx.x
    return int32(turn * cuda.gridDim.x + block)


@device
def tile_and_head(number, tiles, all_heads, together):
    """Which tile of which head comes at a number: the first of each head of those `together`, then the second, ..."""
    section, rest = divide(number, tiles * together)
    tile, head = divide(rest, min(together, all_heads - section * together))
    return tile, int32(section * together + head)


@device
def tile_place(number, block_m, tiles_m, all_heads, together):
    """First row of a query tile, and its head, counted through the batch."""
    from_last, head = tile_and_head(number, tiles_m, all_heads, together)
    return uniform((tiles_m - 1 - from_last) * block_m), uniform(head)


@device
def key_tiles(i_first, block_m, block_n, band):
    """K/V tiles of which the rows of a query tile see keys, as (first, stop); one that is hidden if they see none."""
    n_q, n_k, offset, left, right = band
    first, stop = seen_keys(i_first, min(i_first + block_m, n_q), offset, left, right, n_k)
    first = int32(min(first, n_k - 1) // block_n)
    return first, max(int32(first + 1), int32((stop + block_n - 1) // block_n))


@device
def own_stop(i, rows, j, block_n, band):
    """Where the K/V tiles from `j` on end for one consumer's rows, which may be before its query tile's end."""
    n_q, n_k, offset, left, right = band
    _, stop = seen_keys(i, min(i + rows, n_q), offset, left, right, n_k)
    return int32(j + 1) if i >= n_q else max(int32(j + 1), int32((stop + block_n - 1) // block_n))


@device
def following(stage, phase, stages):
    """The place in shared memory after this one, and its barriers' phase."""
    return (int32(0), int32(phase ^ 1)) if stage == stages - 1 else (int32(stage + 1), int32(phase))
