"""ALiBi's term as a part of the product: ``S = Q Kᵀ + slope * key``, the key's number in its tile.

Where all keys of a tile are before its rows, or all after them, the term is linear, with the slope's sign or the
other. The row's part of it is left to the softmax (`tensor_cores.steps.make_score_tile`), which does all for tiles on
the diagonal: for them this product adds zeros. The key's part is as if Q and K had 16 columns more. In Q all rows are
alike: three numbers that add up to the slope, in the unit of q·k, and 13 zeros. The 24 bits of a float32 are three
times 8, as bfloat16 has them. In K each row holds its number in all columns; up to 256 it is exact, too.

That costs the tensor cores the time of 16 columns. It saves a multiply-add for each score, which would delay the
softmax's maximum, for which all else waits. With a softcap it can't be: ALiBi's term comes after that.
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
