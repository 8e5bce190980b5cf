"""ALiBi's term as a part of the product: ``S = Q Kᵀ + slope * column``.

Where all keys of a tile are before its rows, or all after them, the term is linear. The row's part of it is left to the
softmax (`steps.make_score_tile`). The column's is as if Q had three columns more, all rows alike, and K three that hold
the number of the row in its tile. Those of Q add up to the slope: the 24 bits of a float32 are three times 8, as
bfloat16 has them. K's numbers are exact, too, up to 256.

The tensor cores need the time of 16 columns for it. A multiply-add for each score, which it saves, would come before
the softmax's maximum, for which all else waits.
"""

from ...problem import BFLOAT16
from ..compile import cuda, device
from ..ptx.assembly import float32, int32, uint32
from ..ptx.barriers import fence_async
from ..ptx.copies import store_shared
from ..ptx.fragments import make_pack16, make_unpack16
from ..ptx.wgmma import DEPTH, NarrowOperand, make_product_of_registers
from ..tensor_cores.schedule import thread_of_warpgroup
from ..tensor_cores.steps import side_of_keys
from .config import COLUMN, ROWS

SIGNS = 0x80008000          # of two numbers of 16 bits
WORDS = 4                   # that a row of a `NarrowOperand` has in one place
pack, unpack = make_pack16(BFLOAT16), make_unpack16(BFLOAT16)


@device
def rounded(x):
    """The nearest number of bfloat16."""
    return unpack(pack((x, float32(0))))[0]


def make_slant(layout):
    """Build what the forward kernel does for it; without ALiBi, or with a softcap before it, that is nothing.

    Returns
    -------
    write_columns
        ``write_columns(shared)``: write the columns' numbers; all threads share the work.
    parts_of
        ``parts_of(slope)``: the slope's three parts, as this thread holds them of a matrix of 16 columns.
    add_slant
        ``add_slant(s, shared, parts, j, i, offset)``: start ``s + slope * column``, for keys from j on and rows from i.
    """
    slants, columns, block_n, threads = layout.slants, layout.columns, layout.tile.block_n, layout.tile.threads
    add_product = make_product_of_registers(block_n, DEPTH, BFLOAT16, NarrowOperand(block_n))

    @device
    def write_columns(shared):
        if slants:
            word = int32(cuda.threadIdx.x)
            while word < block_n * COLUMN // 4:
                number = float32(word // WORDS % block_n)
                store_shared(shared + columns + 4 * word, int32(pack((number, number))[0]))
                word += threads
            fence_async()

    @device
    def parts_of(slope):
        if not slants:
            return uint32(0)
        high = rounded(slope)
        middle = rounded(slope - high)
        lane = thread_of_warpgroup() & 3            # which holds columns 2 lane and 2 lane + 1
        return pack((high if lane == 0 else slope - high - middle if lane == 1 else float32(0),
                     middle if lane == 0 else float32(0)))[0]

    @device
    def add_slant(s, shared, parts, j, i, offset):
        if not slants:
            return s
        side = side_of_keys(j, block_n, i, ROWS, offset)
        word = uint32(0) if side == 0 else parts if side > 0 else parts ^ uint32(SIGNS)
        return add_product(s, (word, word, uint32(0), uint32(0)), shared + columns)

    return write_columns, parts_of, add_slant
