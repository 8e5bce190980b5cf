r"""FlashAttention-2 (arXiv 2307.08691) on the tensor cores of a warp: the forward pass.

New idea: the matrix products are instructions. A warp's ``mma.sync`` multiplies two small matrices whose elements are
spread over the registers of its threads, and adds to a third. Q, K and V come from shared memory (`ldmatrix`); the
scores S never go there: they are left in just the registers from which the next product takes P.

Changed from `flash2`: tiles of 16-bit numbers, or of longer ones. A warp owns whole rows, so a row's maximum is four
lanes' affair, and no barrier's. Copies into shared memory are asynchronous (`cp.async`): the threads start them and go
on. So V arrives while S = Q K^T is computed, and the next K meanwhile softmax and O += P V::

    copies     Q K0 |   V0   |       K1        |   V1   |       K2        | ...
    products        |   S0   | softmax, O += P V0 |  S1 | softmax, O += P V1 | ...
                    ^        ^                    ^     ^
                    each a barrier: "it is there, and nobody reads what comes next into its place"

What a block waits for, another one on the same multiprocessor uses: there is room for two of most tile shapes.

Reads and writes of global memory: as `flash2`, with tiles of 64 or 128 queries.

Exactness: m is the exact running max of the scores, and P is rounded to 16 bits, if inputs have no more, after its sum
was added to l.
"""

from functools import lru_cache
from math import inf

from ...scores import seen_keys, shared_keys
from ..compile import cuda, device
from ..ptx.arithmetic import lane_number, uniform
from ..ptx.assembly import int32, uint64
from ..ptx.copies import BOX_ROW, Operand, commit_rows, copied_by, make_copy_rows, shared_memory, wait_rows
from ..ptx.formats import make_pack
from ..ptx.fragments import make_filled
from ..ptx.mma import make_warp_product
from ..signatures import array_type, int64, none, real_array, real_type
from ..tensor_cores.schedule import divide, tile_place
from ..tensor_cores.softmax import across_max, finite, fold_sum, growth, probability, product, scaled
from ..tensor_cores.spec import LOG2_E, WARP
from ..tensor_cores.steps import make_online_softmax, make_score_tile, make_slope, make_store
from .config import Layout

seen_keys, shared_keys = device(seen_keys), device(shared_keys)


@lru_cache(maxsize=None)
def make_forward(tile, spec):
    """Build the forward kernel.

    Grid: one block for each query tile, the longest first (`tile_place`), or one for each of `spec.sides` of its
    columns. Block: `tile.warps` warps. Shared memory: `Layout`. A warp owns 16 or 32 query rows; a lane of it two or
    four, and every fourth pair of their columns.
    """
    layout = Layout(tile, spec)
    block_m, block_n, parts, warp_rows, threads = tile.block_m, tile.block_n, tile.parts, tile.warp_rows, tile.threads
    d, d_v, k_tile, v_tile = spec.d, spec.d_v, layout.k, layout.v
    alibi, sinks, sides, columns, real = spec.alibi, spec.sinks, spec.sides, d_v // spec.sides, real_type(spec.dtype)
    side_bytes = columns // spec.box * block_n * BOX_ROW        # of V, whose columns a side has

    copy_q = make_copy_rows(block_m, spec.q_boxes, threads, spec.item)
    copy_k = make_copy_rows(block_n, spec.q_boxes, threads, spec.item)
    copy_v = make_copy_rows(block_n, spec.v_boxes, threads, spec.item)
    multiply_qk = make_warp_product(parts, block_n, d, spec.factors, Operand(block_m, depth_down=False),
                                    Operand(block_n, depth_down=False), accumulate=False)
    multiply_pv = make_warp_product(parts, columns, block_n, spec.factors, None, Operand(block_n, depth_down=True),
                                    accumulate=True)
    zero_o, empty, no_sum = (make_filled(size, value, real) for size, value in (
        (parts * columns, 0.0), (4 * parts, -inf), (4 * parts, 0.0)))
    pack = make_pack(spec.dtype)
    score_tile = make_score_tile(spec, block_n, warp_rows, parts, lane_number)
    (own_max, any_huge, relative), its_slope = make_online_softmax(spec), make_slope(spec)
    store = make_store(spec.dtype, parts, lane_number)

    def mma_forward(q_array, k_array, v_array, o_array, lse, sink_logits, slopes, group, together, scale, factor, cap,
                    offset, left, right):
        n_q, n_k, heads = int32(q_array.shape[2]), int32(k_array.shape[2]), int32(q_array.shape[1])
        d_left, d_v_left = int32(q_array.shape[3]), int32(v_array.shape[3])
        band = n_q, n_k, int32(offset), int32(left), int32(right)
        tiles_m = int32((n_q + block_m - 1) // block_m)
        number, side = divide(cuda.blockIdx.x, sides)
        i_first, bh = tile_place(number, block_m, tiles_m, int32(q_array.shape[0] * heads), int32(together))
        b, h = divide(bh, heads)
        kv_h, _ = divide(h, int32(group))
        shared, thread = shared_memory(), int32(cuda.threadIdx.x)
        row = uniform(thread // WARP) * warp_rows               # the warp's first in the tile
        i = int32(i_first + row)

        # the K/V tiles that some row of the block sees, and the keys that all rows of the warp see
        first, stop = seen_keys(i_first, min(i_first + block_m, n_q), band[2], band[3], band[4], n_k)
        j, j_stop = int32(first // block_n * block_n), int32(stop)
        all_first, all_stop = shared_keys(i, min(i + warp_rows, n_q), band[2], band[3], band[4], n_k)
        all_first, all_stop = int32(all_first), int32(all_stop)
        k_rows, v_rows = copied_by(thread, k_array, b, kv_h, j), copied_by(thread, v_array, b, kv_h, j)

        # load Q_i, and the first K_j
        copy_q(shared, copied_by(thread, q_array, b, h, i_first), q_array.strides[2], int32(n_q - i_first), d_left,
               thread)
        if j < j_stop:
            copy_k(shared + k_tile, k_rows, k_array.strides[2], int32(n_k - j), d_left, thread)
        commit_rows()

        slope = its_slope(slopes, b, h, scale)
        o, m, l = zero_o(), empty(), no_sum()       # l is of this thread's columns only, until the epilogue
        while j < j_stop:
            # load V_j
            wait_rows()
            cuda.syncthreads()      # or K_j isn't there yet, or V_j overwrites the last V, which others still multiply
            copy_v(shared + v_tile, v_rows, v_array.strides[2], int32(n_k - j), d_v_left, thread)
            commit_rows()

            # S = Q K^T
            s = multiply_qk(shared + row * BOX_ROW, shared + k_tile)

            # load K_j of the next step
            wait_rows()
            cuda.syncthreads()      # or V_j isn't there yet, or the next K overwrites K_j, which others still multiply
            k_rows += uint64(block_n * k_array.strides[2])
            v_rows += uint64(block_n * v_array.strides[2])
            if j + block_n < j_stop:
                copy_k(shared + k_tile, k_rows, k_array.strides[2], int32(n_k - j - block_n), d_left, thread)
                commit_rows()

            # mask, online softmax: m, alpha, P, l
            s, rest = score_tile(s, j, i, slope, scale, cap, band, j < all_first or j + block_n > all_stop)
            m_old, m_own = m, own_max(s, rest, m)
            huge, m = any_huge(m_own, factor), across_max(m_own)
            alpha = growth(m_old, finite(m), factor)
            s, base = relative(s, rest, m, factor, huge)
            p = probability(s, factor, base)
            l = fold_sum(p, product(l, alpha))

            # O = alpha O + P V
            o = multiply_pv(scaled(o, alpha), pack(p), shared + v_tile + side * side_bytes)
            j += int32(block_n)

        wait_rows()                 # a block must not end while its copies run
        sink = sink_logits[h] * real(LOG2_E) if sinks else real(-inf)
        store(o, m, l, factor, sink, o_array, lse, b, h, i, int32(side * columns))

    signature = ((array_type(spec.dtype, 4),) * 4
                 + (real_array(spec.dtype, 3), real_array(spec.dtype, 1) if sinks else none,
                    real_array(spec.dtype, 2) if alibi else none, *[int64] * 2, *[real] * 3, *[int64] * 3))
    return mma_forward, signature
