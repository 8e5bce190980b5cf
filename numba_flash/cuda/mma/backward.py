r"""FlashAttention-2's backward pass on a warp's tensor cores: dK and dV in registers, dQ added up in global memory.

A block owns a tile of K and V and walks along the queries that see it. S and dP are computed transposed, keys down and
queries across: P^T and dS^T are then where the products for dV and dK want them, in registers.

New idea: warps work in pairs. Both own the same keys, and each has two of the four products, so that each holds one
sum only, dV or dK, for twice as many keys as it could hold of both::

    warp 0    S^T = K Q^T      P^T = exp(S^T - lse)      dV += P^T dO
                                     |  through shared memory
    warp 1    dP^T = V dO^T    dS^T = P^T (dP^T - delta)     dK += dS^T Q     dS^T stays there for dQ
    all                                                                                           dQ += dS K

dQ needs the dS of all pairs: each warp computes some rows and columns of it, when all dS are there, and adds them to
global memory, or doesn't, if bits are to repeat: see `make_dq`.

Under a softcap P is passed on times the score's derivative.

Query heads that share keys are walked one after another: dK and dV of a group add up in the same registers.

Reads and writes of global memory: as `flash2_backward` with tiles of 32 to 128 keys, each of which adds to all of dQ
once.
"""

from functools import lru_cache

from ...scores import seeing_queries
from ..compile import cuda, device
from ..ptx.arithmetic import lane_number, thread_number, uniform
from ..ptx.assembly import int32, uint32, uint64
from ..ptx.barriers import barrier_arrive, barrier_sync
from ..ptx.copies import (BOX_ROW, UNIT, Operand, commit_rows, copied_by, copy_unit, make_copy_rows, make_swizzled,
                          shared_memory, unit_address, wait_rows)
from ..ptx.exchange import make_add_fragment, make_load_words, make_store_words
from ..ptx.formats import make_pack, make_store_box, make_store_parts, make_unpack, word_type
from ..ptx.fragments import columnwise, first_column, first_row, make_filled, make_load_fragment, make_rows_down
from ..ptx.mma import make_warp_product
from ..signatures import array_type, int64, none, real_array, real_type
from ..tensor_cores import gradients
from ..tensor_cores.schedule import divide, tile_and_head
from ..tensor_cores.softmax import scaled
from ..tensor_cores.spec import WARP
from ..tensor_cores.steps import make_slope
from .config import PART, BackwardLayout

PAIR = 1                    # the block's barriers from here on are the pairs'

seeing_queries = device(seeing_queries)
first_row, first_column = device(first_row), device(first_column)


@lru_cache(maxsize=None)
def make_backward(tile, spec, adds_dq, by_four):
    """Build the kernel for dK and dV, and for dQ if `adds_dq`.

    Grid: one block for each K/V tile of each key head, or one for each of `spec.sides` of the columns of dV, dK and dQ.
    Block: `tile.pairs` pairs of warps, first all that compute dV. Shared memory: `BackwardLayout`. A lane owns two keys
    or four, and every fourth pair of queries or columns; of dQ two queries. `by_four`: see `SumParts`.
    """
    layout = BackwardLayout(tile, spec)
    block_m, block_n, pairs, parts, pair_rows = tile.block_m, tile.block_n, tile.pairs, tile.parts, tile.pair_rows
    threads, stages, d, d_v, alibi, softcap = tile.threads, tile.stages, spec.d, spec.d_v, spec.alibi, spec.softcap
    _, _, q_bytes, do_bytes, slot_bytes, row_bytes = layout.sizes
    k_tile, v_tile, q_tiles, do_tiles, ds_tile, row_tiles, _ = layout.offsets
    item, box, sides, real, number_bytes = spec.item, spec.box, spec.sides, real_type(spec.dtype), layout.number_bytes
    # In 16 bits each of the two warps has instructions of its own, so that the compiler mixes what runs on different
    # units. For longer numbers, whose products take many more, both sorts of them have no room in the cache for
    # instructions; they are the same but for their addresses.
    alike = d == d_v and item > 2
    own, across, sharing = layout.dq_columns, layout.dq_across, tile.sharing
    own_bytes = own * item if own < box else own // box * block_n * BOX_ROW
    pieces = 1 if item == 2 or own <= 2 * box else own // box           # or a lane has no registers for the sums
    at_once = own // pieces
    own_ds, all_ds = pair_rows * BOX_ROW, block_n * BOX_ROW             # bytes of a box of dS: a pair's, and all
    ds_bytes = PART * item if PART * item < BOX_ROW else all_ds         # from 16 queries to the next

    copy_k, copy_v = (make_copy_rows(block_n, boxes, threads, item) for boxes in (spec.q_boxes, spec.v_boxes))
    copy_q, copy_do = (make_copy_rows(block_m, boxes, threads, item) for boxes in (spec.q_boxes, spec.v_boxes))
    keys, queries = Operand(block_n, depth_down=False), Operand(block_m, depth_down=False)
    keys_down, queries_down = Operand(block_n, depth_down=True), Operand(block_m, depth_down=True)
    keys_in_registers = tile.keys_in_registers
    multiply_dsk = make_warp_product(1, at_once, block_n, spec.factors, keys_down, keys_down, accumulate=False)
    pack, unpack, word = make_pack(spec.dtype), make_unpack(spec.dtype), word_type(spec.dtype)
    store_parts, store_words = make_store_parts(parts, spec.dtype), make_store_words(own_ds, all_ds)
    load_words = make_load_words(parts * block_m * item * 4 // word.bitwidth, word, own_ds, all_ds)
    store_box, swizzled = make_store_box(parts, spec.dtype, block_n), make_swizzled(item)
    down, add_fragment = make_rows_down(parts), make_add_fragment(WARP, by_four)
    score_tile = gradients.make_transposed_score_tile(spec, block_m, parts, lane_number)
    damped, its_slope = gradients.make_damped(alibi), make_slope(spec)
    probability, score_gradient = (columnwise(function, parts)
                                   for function in (gradients.probability, gradients.score_gradient))

    # ---- both warps' steps -------------------------------------------------------------------------------------------

    @device
    def load_step(shared, q_array, do_array, query_numbers, b, h, i, stage):
        """Start to load Q_i and dO_i, lse_i and delta_i."""
        thread, left = thread_number(), int32(q_array.shape[2] - i)
        copy_q(shared + q_tiles + stage * q_bytes, copied_by(thread, q_array, b, h, i), q_array.strides[2], left,
               int32(q_array.shape[3]), thread)
        copy_do(shared + do_tiles + stage * do_bytes, copied_by(thread, do_array, b, h, i), do_array.strides[2], left,
                int32(do_array.shape[3]), thread)
        copy_unit(shared + row_tiles + stage * row_bytes + UNIT * thread,
                  unit_address(query_numbers, b, h, int32(uint32(i) // uint32(block_m)), thread), thread,
                  int32(row_bytes // UNIT))
        commit_rows()

    @device
    def meet():
        """Wait for this thread's copies, and for all others."""
        wait_rows()
        barrier_sync(0, threads)

    @device
    def own_rows(address, load):
        """The pair's rows of K_j or V_j as the first operand of a product."""
        if keys_in_registers:
            return load(swizzled(address, lane_number() & 15, lane_number() >> 4))
        return address

    @device
    def begin_step():
        """Wait for Q_i and dO_i; with two stages the step before has done it."""
        if stages == 1:
            meet()                      # or Q_i isn't there yet, or others still read P and dS of the step before

    @device
    def load_next_step(shared, q_array, do_array, query_numbers, b, h, i, h_stop, stage):
        """With two stages, load what the next step needs: not first of all, as tensor cores would wait meanwhile."""
        if stages == 2 and h < h_stop:
            load_step(shared, q_array, do_array, query_numbers, b, h, i, stage ^ 1)

    @device
    def end_step(shared, q_array, do_array, query_numbers, b, h, i, h_stop):
        """Meet when dS is there and Q_i and dO_i have been read; with two stages, also the next Q and dO are there."""
        meet()          # or dS isn't there yet, or the next Q, or Q_i is overwritten, which others still multiply
        if stages == 1 and h < h_stop:
            load_step(shared, q_array, do_array, query_numbers, b, h, i, int32(0))

    @device
    def add_dq(shared, dq_sums, b, h, i, stage, pair, role, side, n_q):
        """dQ += dS K: this warp's part. The branch is always taken: without it registers don't suffice."""
        if adds_dq and i < n_q:
            down, along = divide(pair, sharing)
            along = int32((side * sharing + along) * 2 + role)
            ds, k = shared + ds_tile + stage * slot_bytes + down * ds_bytes, shared + k_tile + along * own_bytes
            target = unit_address(dq_sums, b, h, int32(int32(uint32(i) // uint32(PART) + down) * across + along),
                                  int32(0))
            for _ in range(pieces):
                add_fragment(multiply_dsk(ds, k), target, lane_number())
                k, target = k + own_bytes // pieces, target + uint64(at_once * PART * number_bytes)

    @device
    def following(i, h, i_first, i_stop):
        """The next step's first query, and head."""
        i = int32(i + block_m)
        return (i, int32(h)) if i < i_stop else (int32(i_first), int32(h + 1))

    # ---- a warp's walk -----------------------------------------------------------------------------------------------

    @lru_cache(maxsize=None)
    def make_walk(depth, columns):
        """Build `walk` for the head dims of the factors of S or dP, and of dV or dK."""
        multiply_first = make_warp_product(parts, block_m, depth, spec.factors, None if keys_in_registers else keys,
                                           queries, accumulate=False)
        multiply_second = make_warp_product(parts, columns // sides, block_m, spec.factors, None, queries_down,
                                            accumulate=True)
        load, zero = make_load_fragment(depth, block_n, parts), make_filled(parts * columns // sides, 0.0, real)
        side_bytes = columns // sides // box * block_m * BOX_ROW

        @device
        def walk(role, shared, q_array, do_array, query_numbers, dq_sums, dk_array, dv_array, slopes, b, kv_h, h,
                 h_stop, i_first, i_stop, j, band, all_first, all_stop, scale, factor, cap, pair, side, n_q):
            """Walk along the queries, and write dV (role 0) or dK (1)."""
            own_keys = pair * pair_rows * BOX_ROW
            i, stage, total = i_first, int32(0), zero()
            own = own_rows(shared + (k_tile if role == 0 else v_tile) + own_keys, load)
            while h < h_stop:
                next_i, next_h = following(i, h, i_first, i_stop)
                begin_step()
                q, do = shared + q_tiles + stage * q_bytes, shared + do_tiles + stage * do_bytes
                numbers = shared + row_tiles + stage * row_bytes + number_bytes * first_column(lane_number())
                own_slot = shared + ds_tile + stage * slot_bytes + own_keys + lane_number() * 16    # for the pair's P

                # S^T = K Q^T, or dP^T = V dO^T
                s = dp = multiply_first(own, q if role == 0 else do)
                if role == 0:
                    # mask, P^T = exp(S^T - lse)
                    slope = its_slope(slopes, b, h, scale)
                    s = score_tile(s, i, j, slope, scale, cap, band, all_first, all_stop)
                    p = probability(s, factor, numbers)
                    packed = pack(p)
                    if softcap:
                        lane = lane_number()
                        its_first = int32(j + first_row(lane) - band[1] - i - first_column(lane))
                        p = damped(p, real(0), s, down(real(its_first)), slope, cap)
                        store_words(pack(p), own_slot)
                    else:
                        store_words(packed, own_slot)
                    barrier_arrive(PAIR + pair, 2 * WARP)
                    load_next_step(shared, q_array, do_array, query_numbers, b, next_h, next_i, h_stop, stage)
                else:
                    # dS^T = P^T (dP^T - delta)
                    load_next_step(shared, q_array, do_array, query_numbers, b, next_h, next_i, h_stop, stage)
                    barrier_sync(PAIR + pair, 2 * WARP)         # or P isn't there yet
                    p = unpack(load_words(own_slot))
                    cuda.syncwarp()                             # or dS overwrites what other lanes have yet to read
                    packed = pack(score_gradient(dp, p, numbers + number_bytes * block_m))
                    row = int32(pair * pair_rows + first_row(lane_number()))
                    within = first_column(lane_number()) * item         # bytes, of the row
                    store_box(packed, swizzled(shared + ds_tile + stage * slot_bytes, row, within >> 4) + (within & 15))

                # dV += P^T dO, or dK += dS^T Q
                total = multiply_second(total, packed, (do if role == 0 else q) + side * side_bytes)

                end_step(shared, q_array, do_array, query_numbers, b, next_h, next_i, h_stop)
                add_dq(shared, dq_sums, b, h, i, stage, pair, role, side, n_q)
                i, h, stage = next_i, next_h, int32(stage ^ 1 if stages == 2 else 0)

            wait_rows()                 # a block must not end while its copies run
            row, column = int32(j + first_row(lane_number())), int32(side * (columns // sides))
            if role == 0:
                store_parts(pack(total), dv_array, b, kv_h, row, column)
            else:
                store_parts(pack(scaled(total, scale)), dk_array, b, kv_h, row, column)

        return walk

    walk_for_dv, walk_for_dk = make_walk(d, d_v), make_walk(d_v, d)

    def mma_backward(q_array, k_array, v_array, do_array, query_numbers, dq_sums, dk_array, dv_array, slopes, group,
                     together, scale, factor, cap, offset, left, right):
        n_q, n_k, kv_heads = int32(q_array.shape[2]), int32(k_array.shape[2]), int32(k_array.shape[1])
        band = n_k, int32(offset), int32(left), int32(right)
        number, side = divide(cuda.blockIdx.x, sides)
        tiles_n = int32((n_k + block_n - 1) // block_n)
        walks, _ = divide(cuda.gridDim.x, tiles_n * sides)
        tile_n, bh = tile_and_head(number, tiles_n, walks, int32(together))
        b, kv_h = divide(bh, kv_heads)
        j_first = int32(tile_n * block_n)
        i_first, i_stop = seeing_queries(j_first, min(j_first + block_n, n_k), band[1], band[2], band[3], n_q)
        i_first, i_stop = int32(i_first // block_m * block_m), int32(i_stop)
        shared, thread = shared_memory(), int32(cuda.threadIdx.x)
        warp = uniform(thread // WARP)
        pair, role = (warp, int32(0)) if warp < pairs else (int32(warp - pairs), int32(1))
        j = int32(j_first + pair * pair_rows)                               # the pair's first key
        all_first = int32(j + pair_rows - 1 - band[1] - band[3])            # queries that see all of its keys
        all_stop = int32(j - band[1] + band[2] + 1) if j + pair_rows <= n_k else int32(0)

        # load K_j, V_j, and Q_i, dO_i of the first step
        copy_k(shared + k_tile, copied_by(thread, k_array, b, kv_h, j_first), k_array.strides[2], int32(n_k - j_first),
               int32(k_array.shape[3]), thread)
        copy_v(shared + v_tile, copied_by(thread, v_array, b, kv_h, j_first), v_array.strides[2], int32(n_k - j_first),
               int32(v_array.shape[3]), thread)
        h, h_stop = int32(kv_h * group), int32((kv_h + 1) * group)
        if i_first >= i_stop:
            h = h_stop                                                      # nobody sees these keys
        if h < h_stop:
            load_step(shared, q_array, do_array, query_numbers, b, h, i_first, int32(0))
        if stages == 2:
            meet()                      # or they aren't there yet

        given = (shared, q_array, do_array, query_numbers, dq_sums, dk_array, dv_array, slopes, b, kv_h, h, h_stop,
                 i_first, i_stop, j, band, all_first, all_stop, scale, factor, cap, pair, side, n_q)
        if alike:
            walk_for_dv(role, *given)
        elif role == 0:
            walk_for_dv(int32(0), *given)
        else:
            walk_for_dk(int32(1), *given)

    signature = ((array_type(spec.dtype, 4),) * 4
                 + (real_array(spec.dtype, 4), real_array(spec.dtype, 4) if adds_dq else none)
                 + (array_type(spec.dtype, 4),) * 2
                 + (real_array(spec.dtype, 2) if alibi else none, *[int64] * 2, *[real] * 3, *[int64] * 3))
    return mma_backward, signature
