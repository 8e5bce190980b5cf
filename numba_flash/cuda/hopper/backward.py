r"""FlashAttention's backward pass on Hopper: dK and dV in registers, dQ added up in global memory.

A block owns 128 rows of K and V, its two consumers 64 each, and walks along the queries that see them. S and dP are
computed transposed, keys down and queries across: P^T and dS^T are then where the products for dV and dK want them::

    S^T = K Q^T        P^T = exp(S^T - lse)          dV += P^T dO
    dP^T = V dO^T      dS^T = P^T (dP^T - delta)     dK += dS^T Q         dQ += dS K

dQ needs both consumers' dS: they leave it in shared memory, and dQ of a step is computed in the next one. Each consumer
computes a half of it, and adds it to global memory in float32. A step::

    consumer 0    exp, dS   (turn) [dV | dQ of the step before | dK | S, dP of the next]   exp, dS   ...
    consumer 1                      exp, dS             (turn) [dV | dQ | dK | S, dP]   ...

The turns do two things: one consumer's exponentials run while the other's products do, and who gives the turn says
"my dS is there, and I have read that of the step before". As dS is stored before the turn comes, while the other may
still read that of two steps before, there are three places for it.

Query heads that share keys are walked one after another: dK and dV of a group add up in the same registers. Where
that leaves multiprocessors without work, several blocks share a group, and add up in global memory, too.

Reads and writes of global memory: as `flash2_backward` with tiles of 128 keys, each of which adds to all of dQ once.
"""

from functools import lru_cache

from ..compile import cuda, device
from ..ptx.arithmetic import uniform
from ..ptx.assembly import float32, int32
from ..ptx.barriers import barrier_arrive, barrier_sync, fence_async, make_set_registers, mbarrier_arrive
from ..ptx.copies import BOX_ROW, make_parameter_address, shared_memory, swizzled
from ..ptx.fragments import columnwise, first_column, first_row, make_filled, make_pack16, store_transposed
from ..ptx.wgmma import make_wait
from ..tensor_cores.gradients import (less_delta, make_damped, make_transposed_score_tile, probability,
                                      score_gradient)
from ..tensor_cores.schedule import following, thread_of_warpgroup
from ..tensor_cores.softmax import scaled
from ..tensor_cores.spec import WARPGROUP
from ..tensor_cores.steps import make_slope
from .backward_parts import CONSUMERS_OWN, make_parts, make_products, make_store_keys, signature_of
from .config import ROWS, BackwardLayout

TURN = CONSUMERS_OWN    # and the one after: the block's barriers for the consumers' turns

first_row, first_column = device(first_row), device(first_column)
probability, score_gradient, less_delta = map(columnwise, (probability, score_gradient, less_delta))


@lru_cache(maxsize=None)
def make_backward(tile, spec, ordered):
    """Build the backward kernel.

    Grid: one block for each K/V tile of each key head and share of its query heads. Block: one producer warpgroup and
    two consumers. Shared memory: `BackwardLayout`. A consumer's thread owns two keys, and every fourth pair of queries
    or columns. `ordered`: see `make_parts`.
    """
    layout = BackwardLayout(tile, spec)
    block_m, block_n, stages, by_rows, ds_slots = (tile.block_m, tile.block_n, tile.stages, tile.dq_by_rows,
                                                   tile.ds_slots)
    alibi, softcap = spec.alibi, spec.softcap
    _, _, q_bytes, do_bytes, ds_bytes, number_bytes, _ = layout.sizes
    k_tile, v_tile, q_tiles, do_tiles, ds_tiles, number_tiles, _, _ = layout.offsets
    k_full, v_full, q_full, q_empty, do_full, do_empty, _, _ = layout.barriers
    wait_for, set_barriers, own_place, produce, following_step, add_dq = make_parts(tile, spec, ordered)

    (q_map_address, k_map_address, v_map_address, do_map_address,
     numbers_map_address) = map(make_parameter_address, range(5))
    give_registers = make_set_registers("dec", tile.producer_registers)
    take_registers = make_set_registers("inc", tile.consumer_registers)
    multiply_kq, multiply_vdo, multiply_pdo, multiply_dsq, multiply_dsk = make_products(tile, spec)
    wait_all, wait_all_but_one = make_wait(0), make_wait(1)
    undefined_s, undefined_dq = make_filled(block_m, None), make_filled(layout.dq_columns, None)
    zero_dk, zero_dv = make_filled(spec.d, 0.0), make_filled(spec.d_v, 0.0)
    pack16 = make_pack16(spec.dtype)
    store_keys = make_store_keys(spec.dtype)
    score_tile = make_transposed_score_tile(spec, block_m, 1, thread_of_warpgroup)
    damped, its_slope = make_damped(alibi), make_slope(spec)

    @device
    def damp(dp, s, deltas, i, j, slope, cap, band):
        """dP - delta times the derivative of the scores under a softcap."""
        thread = thread_of_warpgroup()
        its_first = float32(int32(j + first_row(thread) - band[1] - i - first_column(thread)))
        return damped(less_delta(dp, deltas), float32(0), s, (its_first, its_first + float32(8)), slope, cap)

    def hopper_backward(q_map, k_map, v_map, do_map, numbers_map, sums, turns, dk_array, dv_array, dk_sums, dv_sums,
                        slopes, n_q, n_k, group, shares, together, scale, factor, cap, offset, left, right):
        n_q, n_k = int32(n_q), int32(n_k)
        band = n_k, int32(offset), int32(left), int32(right)
        place = own_place(n_q, int32(group), int32(shares), int32(together), int32(dk_array.shape[1]), band)
        shared, thread = shared_memory(), int32(cuda.threadIdx.x)
        set_barriers(shared)

        if thread < WARPGROUP:
            give_registers()
            produce(shared, q_map_address(), k_map_address(), v_map_address(), do_map_address(), numbers_map_address(),
                    turns, n_q, band, place)

        # ---- the consumers -------------------------------------------------------------------------------------------
        else:
            take_registers()
            b, kv_h, h_first, h_stop, j_first, i_first, i_stop = place
            consumer = uniform(thread // WARPGROUP - 1)
            leader = thread & (WARPGROUP - 1) == 0
            j = int32(j_first + consumer * ROWS)
            all_first = int32(j + ROWS - 1 - band[1] - band[3])                     # queries that see all keys
            all_stop = int32(j - band[1] + band[2] + 1) if j + ROWS <= n_k else int32(0)
            own_k, own_v = shared + k_tile + consumer * ROWS * BOX_ROW, shared + v_tile + consumer * ROWS * BOX_ROW
            own_ds = shared + ds_tiles + consumer * block_m * BOX_ROW
            dq_ds, dq_k = shared + ds_tiles, shared + k_tile        # what this one's part of dQ is the product of
            if by_rows:
                dq_ds += consumer * ROWS * BOX_ROW
            else:
                dq_k += consumer * block_n * BOX_ROW
            dk, dv = zero_dk(), zero_dv()
            stage, phase, i, h = int32(0), int32(0), int32(i_first), int32(h_first)
            last_i, last_h, slot, last_slot = i, h, int32(0), int32(0)
            add_phase, first = int32(1), True                                       # the first step adds nothing
            slope = its_slope(slopes, b, h, scale)

            if i < i_stop:
                wait_for(shared + k_full, 0)
                wait_for(shared + v_full, 0)
                wait_for(shared + q_full, 0)
                s = multiply_kq(undefined_s(), own_k, shared + q_tiles)
                wait_for(shared + do_full, 0)
                dp = multiply_vdo(undefined_s(), own_v, shared + do_tiles)
                if consumer == 1:
                    barrier_arrive(TURN, 2 * WARPGROUP)             # the other begins

                while h < h_stop:
                    its_numbers = shared + number_tiles + stage * number_bytes + 4 * first_column(thread_of_warpgroup())
                    # P^T = exp(S^T - lse)
                    s, dp = wait_all(s), wait_all(dp)       # the assembler does not keep only one in flight here
                    s = score_tile(s, i, j, slope, scale, cap, band, all_first, all_stop)
                    if softcap:         # before P, which takes the registers of S
                        dp = damp(dp, s, its_numbers + 4 * block_m, i, j, slope, cap, band)
                    p = probability(s, factor, its_numbers)

                    # dS^T = P^T (dP^T - delta)
                    if softcap:
                        ds = scaled(dp, p)
                    else:
                        ds = score_gradient(dp, p, its_numbers + 4 * block_m)
                    p16, ds16 = pack16(p), pack16(ds)
                    lane, warp = thread_of_warpgroup() & 31, thread_of_warpgroup() >> 5
                    store_transposed(ds16, swizzled(own_ds + slot * ds_bytes, (lane & 7) + (lane >> 4) * 8,
                                                    2 * warp + (lane >> 3 & 1)))
                    barrier_sync(TURN + consumer, 2 * WARPGROUP)

                    # dV += P^T dO, dQ += dS K of the step before, dK += dS^T Q
                    dv = multiply_pdo(dv, p16, shared + do_tiles + stage * do_bytes)
                    dq = multiply_dsk(undefined_dq(), dq_ds + last_slot * ds_bytes, dq_k)
                    dk = multiply_dsq(dk, ds16, shared + q_tiles + stage * q_bytes)
                    fence_async()               # dS is for both consumers' products of the next step

                    # S^T and dP^T of the next step; after the last one, of nothing that anybody reads
                    next_i, next_h, more = following_step(i, h, place)
                    next_stage, next_phase = following(stage, phase, stages)
                    if more:
                        wait_for(shared + q_full + 8 * next_stage, next_phase)
                        wait_for(shared + do_full + 8 * next_stage, next_phase)
                    dq = wait_all_but_one(dq)
                    if not first:
                        add_dq(shared, dq, sums, consumer, last_i, last_h, b, add_phase)
                    s = multiply_kq(undefined_s(), own_k, shared + q_tiles + next_stage * q_bytes)
                    dk, dv = wait_all_but_one(dk), wait_all_but_one(dv)
                    if leader:
                        mbarrier_arrive(shared + q_empty + 8 * stage)
                        mbarrier_arrive(shared + do_empty + 8 * stage)
                    stage, phase = next_stage, next_phase
                    dp = multiply_vdo(undefined_s(), own_v, shared + do_tiles + stage * do_bytes)
                    barrier_arrive(TURN + 1 - consumer, 2 * WARPGROUP)
                    last_slot, slot = slot, int32(slot + 1) if slot < ds_slots - 1 else int32(0)
                    last_i, last_h, i, h, add_phase, first = i, h, next_i, next_h, int32(add_phase ^ 1), False
                    if alibi and more:
                        slope = its_slope(slopes, b, h, scale)

                # dQ of the last step
                s, dp = wait_all(s), wait_all(dp)
                if consumer == 0:
                    barrier_sync(TURN, 2 * WARPGROUP)
                dq = wait_all(multiply_dsk(undefined_dq(), dq_ds + last_slot * ds_bytes, dq_k))
                add_dq(shared, dq, sums, consumer, last_i, last_h, b, add_phase)

            store_keys(dv, float32(1), dv_array, dv_sums, shares, b, kv_h, j, n_k)
            store_keys(dk, scale, dk_array, dk_sums, shares, b, kv_h, j, n_k)

    return hopper_backward, signature_of(spec, ordered)
