"""dQ without atomics: FlashAttention-2's backward pass for `deterministic`, the half that owns queries.

New idea: none. The kernel walks as the forward pass does, a tile of queries stays and K and V come by, and computes S
and dP once more::

    S = Q K^T     P = exp(S - lse)     dP = dO V^T     dS = P (dP - delta)     dQ += dS K

dS is left in the registers from which the next product takes it. No two blocks write to one place, so the bits of dQ
are the same in every run, at the price of seven products in the place of five.

Reads and writes of global memory: as `forward`, and dO as Q.
"""

from functools import lru_cache

from ...scores import seen_keys, shared_keys
from ..compile import cuda, device
from ..ptx.arithmetic import lane_number, uniform
from ..ptx.assembly import int32
from ..ptx.copies import BOX_ROW, Operand, commit_rows, copied_by, make_copy_rows, shared_memory, wait_rows
from ..ptx.formats import make_pack, make_store_parts
from ..ptx.fragments import elementwise, first_column, first_row, make_filled, make_rows_down
from ..ptx.mma import make_warp_product
from ..signatures import array_type, int64, none, real_array, real_type
from ..tensor_cores import gradients
from ..tensor_cores.schedule import divide, tile_place
from ..tensor_cores.softmax import probability, scaled
from ..tensor_cores.spec import WARP
from ..tensor_cores.steps import make_score_tile, make_slope, plus_row
from .config import DqLayout

seen_keys, shared_keys = device(seen_keys), device(shared_keys)
first_row, first_column = device(first_row), device(first_column)
score_gradient = elementwise(gradients.score_gradient)


@lru_cache(maxsize=None)
def make_dq(tile, spec):
    """Build the kernel for dQ.

    Grid: one block for each query tile, the longest first (`tile_place`), or one for each of `spec.sides` of its
    columns. Block: `tile.warps` warps. Shared memory: `DqLayout`. A warp owns 16 or 32 query rows; a lane of it two or
    four, and every fourth pair of their columns.
    """
    layout = DqLayout(tile, spec)
    block_m, block_n, threads, stages = tile.block_m, tile.block_n, tile.threads, tile.stages
    parts, warp_rows = tile.parts, tile.warp_rows
    d, d_v, alibi, softcap, real = spec.d, spec.d_v, spec.alibi, spec.softcap, real_type(spec.dtype)
    has_rest = alibi or softcap
    sides, columns = spec.sides, d // spec.sides
    side_bytes = columns // spec.box * block_n * BOX_ROW        # of K, whose columns a side has
    _, _, k_bytes, v_bytes = layout.sizes
    q_tile, do_tile, k_tiles, v_tiles, _ = layout.offsets

    copy_q, copy_do = (make_copy_rows(block_m, boxes, threads, spec.item) for boxes in (spec.q_boxes, spec.v_boxes))
    copy_k, copy_v = (make_copy_rows(block_n, boxes, threads, spec.item) for boxes in (spec.q_boxes, spec.v_boxes))
    queries, keys = Operand(block_m, depth_down=False), Operand(block_n, depth_down=False)
    multiply_qk = make_warp_product(parts, block_n, d, spec.factors, queries, keys, accumulate=False)
    multiply_dov = make_warp_product(parts, block_n, d_v, spec.factors, queries, keys, accumulate=False)
    multiply_dsk = make_warp_product(parts, columns, block_n, spec.factors, None, Operand(block_n, depth_down=True),
                                     accumulate=True)
    zero_dq, down = make_filled(parts * columns, 0.0, real), make_rows_down(parts)
    pack, store_parts = make_pack(spec.dtype), make_store_parts(parts, spec.dtype)
    score_tile = make_score_tile(spec, block_n, warp_rows, parts, lane_number)
    damped, its_slope = gradients.make_damped(alibi), make_slope(spec)

    @device
    def load_step(shared, k_array, v_array, b, kv_h, j, stage):
        """Start to load K_j and V_j."""
        thread, left = int32(cuda.threadIdx.x), int32(k_array.shape[2] - j)
        copy_k(shared + k_tiles + stage * k_bytes, copied_by(thread, k_array, b, kv_h, j), k_array.strides[2], left,
               int32(k_array.shape[3]), thread)
        copy_v(shared + v_tiles + stage * v_bytes, copied_by(thread, v_array, b, kv_h, j), v_array.strides[2], left,
               int32(v_array.shape[3]), thread)
        commit_rows()

    @device
    def number_of(query_numbers, b, h, row, column):
        """lse, in base 2, of a query; past the last row another one's is as good; delta from column block_m on."""
        tile, place = divide(row, query_numbers.shape[3] // 2)
        return query_numbers[b, h, tile, column + place]

    @device
    def numbers_of(query_numbers, b, h, row, n_q, column):
        """Those of this lane's rows."""
        last = int32(n_q - 1)
        first = (number_of(query_numbers, b, h, min(row, last), column),
                 number_of(query_numbers, b, h, min(int32(row + 8), last), column))
        if parts == 1:
            return first
        return first + (number_of(query_numbers, b, h, min(int32(row + 16), last), column),
                        number_of(query_numbers, b, h, min(int32(row + 24), last), column))

    def mma_dq(q_array, k_array, v_array, do_array, query_numbers, dq_array, slopes, group, together, scale, factor,
               cap, offset, left, right):
        n_q, n_k, heads = int32(q_array.shape[2]), int32(k_array.shape[2]), int32(q_array.shape[1])
        band = n_q, n_k, int32(offset), int32(left), int32(right)
        tiles_m = int32((n_q + block_m - 1) // block_m)
        number, side = divide(cuda.blockIdx.x, sides)
        i_first, bh = tile_place(number, block_m, tiles_m, int32(q_array.shape[0] * heads), int32(together))
        b, h = divide(bh, heads)
        kv_h, _ = divide(h, int32(group))
        shared, thread, lane = shared_memory(), int32(cuda.threadIdx.x), lane_number()
        own = uniform(thread // WARP) * warp_rows               # the warp's first row in the tile
        i = int32(i_first + own)
        row = int32(i + first_row(lane))

        # the K/V tiles that some row of the block sees, and the keys that all rows of the warp see
        first, stop = seen_keys(i_first, min(i_first + block_m, n_q), band[2], band[3], band[4], n_k)
        j, j_stop = int32(first // block_n * block_n), int32(stop)
        all_first, all_stop = shared_keys(i, min(i + warp_rows, n_q), band[2], band[3], band[4], n_k)
        all_first, all_stop = int32(all_first), int32(all_stop)

        # load Q_i, dO_i, lse_i, delta_i, and the first K_j, V_j
        copy_q(shared + q_tile, copied_by(thread, q_array, b, h, i_first), q_array.strides[2], int32(n_q - i_first),
               int32(q_array.shape[3]), thread)
        copy_do(shared + do_tile, copied_by(thread, do_array, b, h, i_first), do_array.strides[2],
                int32(n_q - i_first), int32(do_array.shape[3]), thread)
        if j < j_stop:
            load_step(shared, k_array, v_array, b, kv_h, j, int32(0))
        row_lse = numbers_of(query_numbers, b, h, row, n_q, int32(0))
        deltas = numbers_of(query_numbers, b, h, row, n_q, int32(query_numbers.shape[3] // 2))

        slope = its_slope(slopes, b, h, scale)
        dq, stage = zero_dq(), int32(0)
        while j < j_stop:
            wait_rows()
            cuda.syncthreads()      # or K_j isn't there yet, or the next is written where others still multiply
            if stages == 2 and j + block_n < j_stop:
                load_step(shared, k_array, v_array, b, kv_h, int32(j + block_n), stage ^ 1)

            # S = Q K^T, mask, P = exp(S - lse)
            k_tile = shared + k_tiles + stage * k_bytes
            s = multiply_qk(shared + q_tile + own * BOX_ROW, k_tile)
            s, rest = score_tile(s, j, i, slope, scale, cap, band, j < all_first or j + block_n > all_stop)
            if has_rest:
                s = plus_row(s, rest)
            p = probability(s, factor, row_lse)

            # dP = dO V^T, dS = P (dP - delta)
            dp = multiply_dov(shared + do_tile + own * BOX_ROW, shared + v_tiles + stage * v_bytes)
            if softcap:
                distance = real(int32(row + band[2] - j - first_column(lane)))
                p = damped(p, real(0), s, down(distance), slope, cap)
            ds = score_gradient(dp, p, deltas)

            # dQ += dS K
            dq = multiply_dsk(dq, pack(ds), k_tile + side * side_bytes)

            if stages == 1:
                cuda.syncthreads()  # or the next K overwrites K_j, which others still multiply
                if j + block_n < j_stop:
                    load_step(shared, k_array, v_array, b, kv_h, int32(j + block_n), int32(0))
            else:
                stage = int32(stage ^ 1)
            j += int32(block_n)

        wait_rows()                 # a block must not end while its copies run
        store_parts(pack(scaled(dq, scale)), dq_array, b, h, row, int32(side * columns))

    signature = ((array_type(spec.dtype, 4),) * 4 + (real_array(spec.dtype, 4),)
                 + (array_type(spec.dtype, 4), real_array(spec.dtype, 2) if alibi else none, *[int64] * 2,
                    *[real] * 3, *[int64] * 3))
    return mma_dq, signature
