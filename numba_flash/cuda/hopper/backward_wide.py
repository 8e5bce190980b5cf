r"""The backward pass on Hopper for head dims above 128, whose dK and dV are too wide for one consumer's registers.

The consumers own the same 64 keys, and each has two of the four products (as pairs of warps have in `mma.backward`), so
that each holds one sum only, dV or dK. P goes from one to the other through shared memory, in float32 and as the
threads hold it; dS stays there for dQ, of which each computes half of the columns in the next step::

    consumer 0    S^T = K Q^T     P^T = exp(S^T - lse)  [dV += P^T dO | dQ of the step before]   S^T of the next
    consumer 1    dP^T = V dO^T          P^T --> dS^T = P^T (dP^T - delta)  [dK += dS^T Q | dQ]  dP^T of the next

A barrier of the block says "P is there, and I have read dS of the step before the last", and an mbarrier, ``ds_full``,
"dS is there, and I have read P".

Reads and writes of global memory: as `backward`, with tiles of 64 keys.
"""

from functools import lru_cache

from ..compile import cuda, device
from ..ptx.arithmetic import uniform
from ..ptx.assembly import float32, int32
from ..ptx.barriers import barrier_arrive, barrier_sync, fence_async, make_set_registers, mbarrier_arrive
from ..ptx.copies import BOX_ROW, make_parameter_address, shared_memory, swizzled
from ..ptx.exchange import make_load_words, store_words
from ..ptx.fragments import columnwise, first_column, first_row, make_filled, make_pack16, store_transposed
from ..ptx.wgmma import make_wait
from ..tensor_cores.gradients import make_damped, make_transposed_score_tile, probability, score_gradient
from ..tensor_cores.schedule import following, thread_of_warpgroup
from ..tensor_cores.spec import BOX, WARP, WARPGROUP
from ..tensor_cores.steps import make_slope
from .backward_parts import CONSUMERS_OWN, make_parts, make_products, make_store_keys, signature_of
from .config import ROWS, BackwardLayout

P_THERE = CONSUMERS_OWN         # the block's barrier, of both consumers

first_row, first_column = device(first_row), device(first_column)
probability, score_gradient = columnwise(probability), columnwise(score_gradient)


@lru_cache(maxsize=None)
def make_backward(tile, spec, ordered):
    """Build the backward kernel.

    Grid: one block for each K/V tile of each key head and share of its query heads. Block: one producer warpgroup and
    two consumers. Shared memory: `BackwardLayout`. A consumer's thread owns two keys, and every fourth pair of queries
    or columns. `ordered`: see `make_parts`.
    """
    layout = BackwardLayout(tile, spec)
    block_m, block_n, stages = tile.block_m, tile.block_n, tile.stages
    dq_columns, alibi, softcap = layout.dq_columns, spec.alibi, spec.softcap
    _, _, q_bytes, do_bytes, ds_bytes, number_bytes, _ = layout.sizes
    k_tile, v_tile, q_tiles, do_tiles, ds_tiles, number_tiles, p_tile, _ = layout.offsets
    k_full, v_full, q_full, q_empty, do_full, do_empty, _, ds_full = layout.barriers
    wait_for, set_barriers, own_place, produce, following_step, add_dq = make_parts(tile, spec, ordered)

    (q_map_address, k_map_address, v_map_address, do_map_address,
     numbers_map_address) = map(make_parameter_address, range(5))
    give_registers = make_set_registers("dec", tile.producer_registers)
    take_registers = make_set_registers("inc", tile.consumer_registers)
    multiply_kq, multiply_vdo, multiply_pdo, multiply_dsq, multiply_dsk = make_products(tile, spec)
    wait_all = make_wait(0)
    undefined_s, undefined_dq = make_filled(block_m, None), make_filled(dq_columns, None)
    zero_dk, zero_dv = make_filled(spec.d, 0.0), make_filled(spec.d_v, 0.0)
    pack16, load_p = make_pack16(spec.dtype), make_load_words(block_m // 2, float32)
    store_keys = make_store_keys(spec.dtype)
    score_tile = make_transposed_score_tile(spec, block_m, 1, thread_of_warpgroup)
    damped, its_slope = make_damped(alibi), make_slope(spec)

    @device
    def dq_of(shared, slot, consumer):
        """Start dQ = dS K, this consumer's columns."""
        return multiply_dsk(undefined_dq(), shared + ds_tiles + slot * ds_bytes,
                            shared + k_tile + consumer * (dq_columns // BOX * block_n * BOX_ROW))

    @device
    def end_step(shared, acc, dq, sums, consumer, stage, i, h, b, first, add_phase):
        """Wait for the products, give Q_i and dO_i back, add to dQ of the step before. Returns dV or dK."""
        acc, dq = wait_all(acc), wait_all(dq)
        if thread_of_warpgroup() == 0:
            mbarrier_arrive(shared + q_empty + 8 * stage)
            mbarrier_arrive(shared + do_empty + 8 * stage)
        if not first:
            add_dq(shared, dq, sums, consumer, i, h, b, add_phase)
        return acc

    @device
    def passed_at(shared):
        """Where this thread leaves P, or finds it."""
        thread = thread_of_warpgroup()
        return shared + p_tile + (thread // WARP) * (WARP * 2 * block_m) + thread % WARP * 16

    @device
    def passed_on(p, s, i, j, slope, cap, band):
        """What dP - delta is multiplied by: P, under a softcap times the derivative of the scores."""
        if softcap:
            thread = thread_of_warpgroup()
            its_first = float32(int32(j + first_row(thread) - band[1] - i - first_column(thread)))
            p = damped(p, float32(0), s, (its_first, its_first + float32(8)), slope, cap)
        return p

    def hopper_backward_wide(q_map, k_map, v_map, do_map, numbers_map, sums, turns, dk_array, dv_array, dk_sums,
                             dv_sums, slopes, n_q, n_k, group, shares, together, scale, factor, cap, offset, left,
                             right):
        n_q, n_k = int32(n_q), int32(n_k)
        band = n_k, int32(offset), int32(left), int32(right)
        place = own_place(n_q, int32(group), int32(shares), int32(together), int32(dk_array.shape[1]), band)
        shared, thread = shared_memory(), int32(cuda.threadIdx.x)
        set_barriers(shared)
        b, kv_h, h_first, h_stop, j, i_first, i_stop = place
        consumer = uniform(thread // WARPGROUP - 1)
        stage, phase, i, h = int32(0), int32(0), int32(i_first), int32(h_first)
        last_i, last_h, slot, add_phase, first = i, h, int32(0), int32(1), True      # the first step adds nothing

        if thread < WARPGROUP:
            give_registers()
            produce(shared, q_map_address(), k_map_address(), v_map_address(), do_map_address(), numbers_map_address(),
                    turns, n_q, band, place)

        # ---- S, P, dV ------------------------------------------------------------------------------------------------
        elif consumer == 0:
            take_registers()
            all_first = int32(j + ROWS - 1 - band[1] - band[3])                     # queries that see all keys
            all_stop = int32(j - band[1] + band[2] + 1) if j + ROWS <= n_k else int32(0)
            own_p = passed_at(shared)
            dv = zero_dv()
            if i < i_stop:
                wait_for(shared + k_full, 0)
                wait_for(shared + q_full, 0)
                s = multiply_kq(undefined_s(), shared + k_tile, shared + q_tiles)
                while h < h_stop:
                    # P^T = exp(S^T - lse)
                    slope = its_slope(slopes, b, h, scale)
                    its_lse = shared + number_tiles + stage * number_bytes + 4 * first_column(thread_of_warpgroup())
                    s = wait_all(s)
                    s = score_tile(s, i, j, slope, scale, cap, band, all_first, all_stop)
                    p = probability(s, factor, its_lse)
                    p16 = pack16(p)
                    p = passed_on(p, s, i, j, slope, cap, band)
                    wait_for(shared + ds_full, add_phase)           # of the step before; and P has been read
                    store_words(p, own_p)
                    barrier_arrive(P_THERE, 2 * WARPGROUP)

                    # dV += P^T dO, dQ += dS K of the step before
                    wait_for(shared + do_full + 8 * stage, phase)
                    dv = multiply_pdo(dv, p16, shared + do_tiles + stage * do_bytes)
                    dq = dq_of(shared, slot ^ 1, int32(0))
                    dv = end_step(shared, dv, dq, sums, int32(0), stage, last_i, last_h, b, first, add_phase)

                    # S^T of the next step; after the last one, of nothing that anybody reads
                    next_i, next_h, more = following_step(i, h, place)
                    stage, phase = following(stage, phase, stages)
                    if more:
                        wait_for(shared + q_full + 8 * stage, phase)
                    s = multiply_kq(undefined_s(), shared + k_tile, shared + q_tiles + stage * q_bytes)
                    last_i, last_h, i, h, slot = i, h, next_i, next_h, int32(slot ^ 1)
                    add_phase, first = int32(add_phase ^ 1), False

                # dQ of the last step
                s = wait_all(s)
                wait_for(shared + ds_full, add_phase)
                barrier_arrive(P_THERE, 2 * WARPGROUP)
                dq = wait_all(dq_of(shared, slot ^ 1, int32(0)))
                add_dq(shared, dq, sums, int32(0), last_i, last_h, b, add_phase)
            store_keys(dv, float32(1), dv_array, dv_sums, shares, b, kv_h, j, n_k)

        # ---- dP, dS, dK ----------------------------------------------------------------------------------------------
        else:
            take_registers()
            own_p = passed_at(shared)
            dk = zero_dk()
            if i < i_stop:
                wait_for(shared + v_full, 0)
                wait_for(shared + k_full, 0)
                wait_for(shared + do_full, 0)
                dp = multiply_vdo(undefined_s(), shared + v_tile, shared + do_tiles)
                while h < h_stop:
                    # dS^T = P^T (dP^T - delta)
                    its_delta = (shared + number_tiles + stage * number_bytes
                                 + 4 * (block_m + first_column(thread_of_warpgroup())))
                    wait_for(shared + q_full + 8 * stage, phase)
                    dp = wait_all(dp)
                    barrier_sync(P_THERE, 2 * WARPGROUP)            # and dS of the step before the last has been read
                    ds = score_gradient(dp, load_p(own_p), its_delta)
                    ds16 = pack16(ds)
                    lane, warp = thread_of_warpgroup() & 31, thread_of_warpgroup() >> 5
                    store_transposed(ds16, swizzled(shared + ds_tiles + slot * ds_bytes, (lane & 7) + (lane >> 4) * 8,
                                                    2 * warp + (lane >> 3 & 1)))
                    fence_async()                                   # dS is for both consumers' products
                    mbarrier_arrive(shared + ds_full)

                    # dK += dS^T Q, dQ += dS K of the step before
                    dk = multiply_dsq(dk, ds16, shared + q_tiles + stage * q_bytes)
                    dq = dq_of(shared, slot ^ 1, int32(1))
                    dk = end_step(shared, dk, dq, sums, int32(1), stage, last_i, last_h, b, first, add_phase)

                    # dP^T of the next step; after the last one, of nothing that anybody reads
                    next_i, next_h, more = following_step(i, h, place)
                    stage, phase = following(stage, phase, stages)
                    if more:
                        wait_for(shared + do_full + 8 * stage, phase)
                    dp = multiply_vdo(undefined_s(), shared + v_tile, shared + do_tiles + stage * do_bytes)
                    last_i, last_h, i, h, slot = i, h, next_i, next_h, int32(slot ^ 1)
                    add_phase, first = int32(add_phase ^ 1), False

                # dQ of the last step
                dp = wait_all(dp)
                barrier_sync(P_THERE, 2 * WARPGROUP)                # or dS isn't there yet of all threads
                dq = wait_all(dq_of(shared, slot ^ 1, int32(1)))
                add_dq(shared, dq, sums, int32(1), last_i, last_h, b, add_phase)
            store_keys(dk, scale, dk_array, dk_sums, shares, b, kv_h, j, n_k)

    return hopper_backward_wide, signature_of(spec, ordered)
