r"""FlashAttention on Hopper (FlashAttention-3, arXiv 2407.08608, sections 3.1 and 3.2): the forward pass.

New idea: loading and computing are different jobs. One warpgroup, the *producer*, only starts copies (TMA); others, the
*consumers*, own 64 query rows each and only compute. Matrix products run on the tensor cores while a consumer's threads
go on, so a consumer starts S of the next tile before it needs O of this one, and does its softmax meanwhile.

Changed from `flash2`: tiles of 16-bit numbers, copied by the hardware into shared memory and multiplied from there;
S, P, O, m, l live in registers; P goes from one product to the next without leaving them. A block works on one query
tile after another (`schedule`), so that the next one's Q, K and V arrive while this one's O goes out.

Reads and writes of global memory: as `flash2`, with tiles of 128 or 192 queries.

Tiles of K and of V have places for two (``stages``) in shared memory, taken in turn, and two barriers for each place::

                 k_full: "K is there"                     tile         0        1        2        3
    producer  --------------------------->  consumers     place        0        1        0        1
              <---------------------------                phase of
                 k_empty: "we have read it"               k_full       0        0        1        1
                                                          k_empty      (1)      (1)      0        0

A barrier's phases alternate, so a wait names the parity of the phase whose end it waits for. The producer, who finds
all places empty at first, waits for the parity before the first. It has three warps, for Q, for K and for V, each
with its own barriers; that of Q leaves a note of which query tile it loaded. What the warpgroups do meanwhile::

    producer      Q K0 V0 K1 V1 | wait for k_empty: K2 | for v_empty: V2 | ...                           Q' K0'
    consumer 0    S0  softmax 0   [S1 | O += P0 V0]  softmax 1   ...   softmax n  [O += Pn Vn | S0']  O / l
    consumer 1    S0  softmax 0      [S1 | O += P0 V0]  softmax 1   ...   softmax n  [O += Pn Vn | S0']  O / l

Brackets are the tensor cores', primes the next query tile's: one consumer's softmax runs while the other's products do,
and its own. Some tile shapes have three consumers. In most the consumers don't wait for one another. Where it is faster
(``tile.turns``), they start their brackets in turn, which a barrier for each of them arranges, so that both never do
their softmax at a time and leave the tensor cores idle.

Exactness: m is the running max of the scores, or lags behind it up to a *ceiling*, where that costs no accuracy
(`tensor_cores.softmax.ceiling_of`). So most tiles need no maximum of their rows, only the knowledge that none has
passed its ceiling, and O is seldom multiplied by alpha. With ALiBi most rows grow with every tile on the way to the
diagonal: m is the maximum, and only O is spared where no alpha differs from 1. Under a softcap, tiles of small scores
take a polynomial for its tanh as long as m stays (`tensor_cores.steps.near_weights`). P is rounded to 16 bits after its
sum was added to l.
"""

from functools import lru_cache
from math import inf

from ...scores import shared_keys
from ..compile import cuda, device
from ..ptx.arithmetic import uniform
from ..ptx.assembly import float32, int32
from ..ptx.barriers import (barrier_arrive, barrier_sync, fence_mbarrier_init, make_set_registers, mbarrier_arrive,
                            mbarrier_expect, mbarrier_init, mbarrier_wait, mbarrier_wait_or_trap)
from ..ptx.copies import (copy_boxes, load_shared, make_parameter_address, shared_memory, store_shared, swizzled,
                          tensor_map)
from ..ptx.fragments import make_filled, make_load_fragment, make_pack16
from ..ptx.wgmma import Operand, make_product_of_registers, make_product_of_shared, make_wait
from ..signatures import array_type, int64, none, real_array
from ..tensor_cores.schedule import (divide, following, key_tiles, own_stop, thread_of_warpgroup, tile_number,
                                     tile_place)
from ..tensor_cores.softmax import (across_max, across_sum, any_above, any_changes, ceiling_of, finite, fold_sum,
                                    growth, lagging, probability, product, scaled)
from ..tensor_cores.spec import BOX, LOG2_E, WARP, WARPGROUP, round_up
from ..tensor_cores.steps import are_near, make_online_softmax, make_score_tile, make_slope, make_store, near_weights
from .alibi import make_slant
from .config import NOTE, ROWS, Layout

OWN, TURN = 1, 4            # the block's barriers from here on are the consumers' own, and their turns
LAST = -1                   # "first row" in the note after the last query tile

shared_keys = device(shared_keys)


@lru_cache(maxsize=None)
def make_forward(tile, spec):
    """Build the forward kernel.

    Grid: at most one block for each multiprocessor. Block: one producer warpgroup and the consumers. Shared memory:
    `Layout`. A consumer's thread owns two rows, and every fourth pair of their columns.
    """
    layout = Layout(tile, spec)
    block_m, block_n, stages, q_stages, consumers = (tile.block_m, tile.block_n, tile.stages, tile.q_stages,
                                                     tile.consumers)
    d, d_v, q_bytes, k_bytes, v_bytes = spec.d, spec.d_v, layout.q_bytes, layout.k_bytes, layout.v_bytes
    k_tiles, v_tiles, notes = layout.k, layout.v, layout.notes
    q_full, q_empty, k_full, k_empty, v_full, v_empty = layout.barriers
    q_boxes, v_boxes = round_up(d, BOX) // BOX, round_up(d_v, BOX) // BOX
    alibi, sinks, q_in_registers, turns = spec.alibi, spec.sinks, tile.q_in_registers, tile.turns
    may_be_near, may_lag = spec.softcap and not alibi, not alibi

    q_map_address, k_map_address, v_map_address = map(make_parameter_address, range(3))
    give_registers = make_set_registers("dec", tile.producer_registers)
    take_registers = make_set_registers("inc", tile.consumer_registers)
    wait_for = mbarrier_wait_or_trap if tile.debug else mbarrier_wait
    q_operand, k_operand = Operand(ROWS, depth_down=False), Operand(block_n, depth_down=False)
    load_q = make_load_fragment(d)
    multiply_qk = (make_product_of_registers(block_n, d, spec.dtype, k_operand, accumulate=False) if q_in_registers
                   else make_product_of_shared(block_n, d, spec.dtype, q_operand, k_operand))
    multiply_pv = make_product_of_registers(d_v, block_n, spec.dtype, Operand(block_n, depth_down=True))
    wait_all, wait_all_but_one = make_wait(0), make_wait(1)
    undefined_s, zero_o = make_filled(block_n, None), make_filled(d_v, 0.0)
    pack16 = make_pack16(spec.dtype)
    first_score_tile, score_tile = (make_score_tile(spec, block_n, ROWS, 1, thread_of_warpgroup, with_slant)
                                    for with_slant in (False, layout.slants))       # one and the same without a slant
    write_columns, parts_of, add_slant = make_slant(layout)
    (own_max, any_huge, relative), its_slope = make_online_softmax(spec), make_slope(spec)
    store = make_store(spec.dtype, 1, thread_of_warpgroup)

    # ---- the producer's warps ----------------------------------------------------------------------------------------

    @device
    def load_queries(shared, q_map, band, order):
        """Load Q_i of all query tiles, each consumer's rows for itself, and note which tile it is."""
        tiles, tiles_m, heads, all_heads, together, _ = order
        leader = cuda.threadIdx.x % WARP == 0
        stage, phase, turn = int32(0), int32(1), int32(0)
        while tile_number(turn) < tiles:
            i_first, bh = tile_place(tile_number(turn), block_m, tiles_m, all_heads, together)
            b, h = divide(bh, heads)
            j, j_stop = key_tiles(i_first, block_m, block_n, band)
            consumer = int32(0)
            while consumer < consumers:
                place = stage * consumers + consumer
                wait_for(shared + q_empty + 8 * place, phase)
                if leader:
                    write_note(shared + notes + NOTE * place, i_first, b, h, j, j_stop)
                    mbarrier_expect(shared + q_full + 8 * place, q_bytes)
                    copy_boxes(shared + place * q_bytes, q_map, shared + q_full + 8 * place, q_boxes, ROWS,
                               i_first + consumer * ROWS, h, b)
                consumer = uniform(consumer + int32(1))     # so that the loop is not unrolled, which takes registers
            stage, phase = following(stage, phase, q_stages)
            turn += int32(1)
        for consumer in range(consumers):
            place = stage * consumers + consumer
            wait_for(shared + q_empty + 8 * place, phase)
            if leader:
                write_note(shared + notes + NOTE * place, LAST, 0, 0, 0, 0)
                mbarrier_arrive(shared + q_full + 8 * place)

    @device
    def write_note(note, i_first, b, h, j, j_stop):
        store_shared(note, i_first)
        store_shared(note + 4, b)
        store_shared(note + 8, h)
        store_shared(note + 12, j)
        store_shared(note + 16, j_stop)

    @device
    def load_tiles(target, x_map, full, empty, boxes, size, band, order):
        """Load K_j, or V_j, of all query tiles."""
        tiles, tiles_m, heads, all_heads, together, group = order
        leader = cuda.threadIdx.x % WARP == 0
        stage, phase, turn = int32(0), int32(1), int32(0)
        while tile_number(turn) < tiles:
            i_first, bh = tile_place(tile_number(turn), block_m, tiles_m, all_heads, together)
            b, h = divide(bh, heads)
            kv_h, _ = divide(h, group)
            j, j_stop = key_tiles(i_first, block_m, block_n, band)
            while j < j_stop:
                wait_for(empty + 8 * stage, phase)
                if leader:
                    mbarrier_expect(full + 8 * stage, size)
                    copy_boxes(target + stage * size, x_map, full + 8 * stage, boxes, block_n, j * block_n, kv_h, b)
                stage, phase = following(stage, phase, stages)
                j = uniform(j + int32(1))                   # as above
            turn += int32(1)

    # ---- the consumers' steps ----------------------------------------------------------------------------------------

    @device
    def wait_for_queries(shared, place, phase):
        """Wait for Q_i; which query tile it is: first row (or LAST), batch, head, K/V tiles (first, stop)."""
        wait_for(shared + q_full + 8 * place, phase)
        note = shared + notes + NOTE * place
        return (uniform(load_shared(note)), uniform(load_shared(note + 4)), uniform(load_shared(note + 8)),
                uniform(load_shared(note + 12)), uniform(load_shared(note + 16)))

    @device
    def queries(shared, place):
        """Q as the first operand of S = Q K^T."""
        address = shared + place * q_bytes
        if q_in_registers:
            thread = thread_of_warpgroup()
            return load_q(swizzled(address, (thread >> 5) * 16 + (thread & 15), (thread & 31) >> 4))
        return address

    @device
    def leave_queries(shared, place):
        """Let the producer have the place of Q_i, after a product that had Q in registers.

        Not before it: an arrival does not wait for this thread's loads that are under way, and what they have still to
        read would be the next query tile.
        """
        if q_in_registers:
            mbarrier_arrive(shared + q_empty + 8 * place)

    @device
    def take_turn(consumer):
        """Wait until this consumer may start its next products."""
        if turns:
            barrier_sync(TURN + consumer, 2 * WARPGROUP)

    @device
    def give_turn(consumer):
        """Let the next consumer start its."""
        if turns:
            barrier_arrive(TURN + (consumer + 1 if consumer < consumers - 1 else 0), 2 * WARPGROUP)

    @device
    def let_by(shared, j, j_stop, stage, phase, consumer):
        """Let tiles of K and V go by, in which this consumer has nothing to see.

        One thread does it for all, and all wait: a thread that is two phases late on a barrier, or one early, would
        take one phase for another. (Where the consumer computes, its products keep its warps together.)
        """
        while j < j_stop:
            if thread_of_warpgroup() == 0:
                wait_for(shared + k_full + 8 * stage, phase)
                mbarrier_arrive(shared + k_empty + 8 * stage)
                wait_for(shared + v_full + 8 * stage, phase)
                mbarrier_arrive(shared + v_empty + 8 * stage)
            take_turn(consumer)
            give_turn(consumer)
            stage, phase = following(stage, phase, stages)
            j += int32(1)
        barrier_sync(OWN + consumer, WARPGROUP)
        return stage, phase

    @device
    def hides_some(j_first, all_first, all_stop):
        """Whether a tile has keys besides those that all rows see."""
        return j_first < all_first or int32(j_first + block_n) > all_stop

    def hopper_forward(q_map, k_map, v_map, o_array, lse, sink_logits, slopes, n_k, group, tiles, tiles_m, together,
                       scale, factor, cap, offset, left, right):
        heads, n_q = int32(o_array.shape[1]), int32(o_array.shape[2])
        band = n_q, int32(n_k), int32(offset), int32(left), int32(right)
        order = int32(tiles), int32(tiles_m), heads, int32(o_array.shape[0] * heads), int32(together), int32(group)

        shared = shared_memory()
        thread = int32(cuda.threadIdx.x)
        if thread == 0:
            for place in range(q_stages * consumers):
                mbarrier_init(shared + q_full + 8 * place, 1)
                mbarrier_init(shared + q_empty + 8 * place, WARPGROUP)
            for stage in range(stages):
                mbarrier_init(shared + k_full + 8 * stage, 1)
                mbarrier_init(shared + v_full + 8 * stage, 1)
                mbarrier_init(shared + k_empty + 8 * stage, consumers)
                mbarrier_init(shared + v_empty + 8 * stage, consumers)
            fence_mbarrier_init()
        write_columns(shared)
        cuda.syncthreads()      # or a thread waits on a barrier that isn't set up yet, or a product reads no columns

        # ---- the producer --------------------------------------------------------------------------------------------
        if thread < WARPGROUP:
            give_registers()
            warp = uniform(thread // WARP)
            if warp == 0:
                load_queries(shared, q_map_address(), band, order)
            elif warp == 1:
                load_tiles(shared + k_tiles, k_map_address(), shared + k_full, shared + k_empty, q_boxes, k_bytes, band,
                           order)
            elif warp == 2:
                load_tiles(shared + v_tiles, v_map_address(), shared + v_full, shared + v_empty, v_boxes, v_bytes, band,
                           order)

        # ---- the consumers -------------------------------------------------------------------------------------------
        else:
            take_registers()
            consumer = uniform(thread // WARPGROUP - 1)
            leader = thread & (WARPGROUP - 1) == 0
            stage, phase, q_stage, q_phase = int32(0), int32(0), int32(0), int32(0)
            if consumer == consumers - 1:
                give_turn(consumer)                 # the first consumer begins

            # S = Q K^T, of the first tiles
            i_first, b, h, j, j_stop = wait_for_queries(shared, consumer, q_phase)
            q = queries(shared, consumer)
            wait_for(shared + k_full, phase)
            s = wait_all(multiply_qk(undefined_s(), q, shared + k_tiles))
            leave_queries(shared, consumer)
            if leader:
                mbarrier_arrive(shared + k_empty)

            while i_first != LAST:
                i = int32(i_first + consumer * ROWS)
                tile_stop = j_stop
                j_stop = own_stop(i, ROWS, j, block_n, band)
                all_first, all_stop = shared_keys(i, min(i + ROWS, n_q), band[2], band[3], band[4], band[1])
                all_first, all_stop = uniform(int32(all_first)), uniform(int32(all_stop))
                slope = its_slope(slopes, b, h, scale)
                slope_parts = parts_of(slope)
                o = zero_o()
                m = float32(-inf), float32(-inf)
                l = float32(0), float32(0)          # of this thread's columns only, until the epilogue

                # mask, online softmax: m, P, l
                j_first = int32(j * block_n)
                some_hidden = hides_some(j_first, all_first, all_stop)
                s, rest = first_score_tile(s, j_first, i, slope, scale, cap, band, some_hidden)
                m_own = own_max(s, rest, m)
                huge, m = any_huge(m_own, factor), across_max(m_own)
                s, base = relative(s, rest, m, factor, huge)
                p = probability(s, factor, base)
                l = fold_sum(p, l)
                p16 = pack16(p)
                ceiling = ceiling_of(m, across_sum(l), factor, huge)
                wait_for(shared + v_full + 8 * stage, phase)

                j = int32(j + 1)
                while j < j_stop:
                    # S = Q K^T, of the next K tile, and ALiBi's slope times the column
                    next_stage, next_phase = following(stage, phase, stages)
                    wait_for(shared + k_full + 8 * next_stage, next_phase)
                    take_turn(consumer)
                    s = multiply_qk(undefined_s(), q, shared + k_tiles + next_stage * k_bytes)
                    s = add_slant(s, shared, slope_parts, int32(j * block_n), i, band[2])

                    # O = alpha O + P V, of this one
                    o = multiply_pv(o, p16, shared + v_tiles + stage * v_bytes)
                    give_turn(consumer)

                    # softcap, ALiBi, mask, online softmax: m, alpha, P, l
                    s = wait_all_but_one(s)
                    if leader:
                        mbarrier_arrive(shared + k_empty + 8 * next_stage)
                    j_first = int32(j * block_n)
                    all_see = not hides_some(j_first, all_first, all_stop)
                    if may_be_near and all_see and are_near(s, ceiling, scale, cap):
                        grown = False
                        p, l, alpha = near_weights(s, m, l, scale, cap, factor)
                    else:
                        some_hidden = hides_some(j_first, all_first, all_stop)
                        s, rest = score_tile(s, j_first, i, slope, scale, cap, band, some_hidden)
                        m_old, m_own, alpha = m, own_max(s, rest, m), (float32(1), float32(1))
                        grown = not may_lag or any_above(m_own, ceiling) != 0
                        if grown:
                            huge, m = any_huge(m_own, factor), across_max(m_own)
                            if may_lag:
                                m = lagging(m, m_old, ceiling)
                            alpha = growth(m_old, finite(m), factor)
                            s, base = relative(s, rest, m, factor, huge)
                        elif may_be_near:       # tiles that have no use for a base
                            s, base = relative(s, rest, m, factor, int32(0))
                        p = probability(s, factor, base)
                        l = fold_sum(p, product(l, alpha))
                    wait_for(shared + v_full + 8 * next_stage, next_phase)      # here, as it keeps the next wait below
                    o = wait_all(o)
                    if leader:
                        mbarrier_arrive(shared + v_empty + 8 * stage)
                    p16 = pack16(p)             # only now: the product before has read the registers of the last P
                    if grown and (may_lag or any_changes(alpha)):
                        o = scaled(o, alpha)
                        if may_lag:
                            ceiling = ceiling_of(m, across_sum(l), factor, huge)
                    stage, phase = next_stage, next_phase
                    j = int32(j + 1)

                o = multiply_pv(o, p16, shared + v_tiles + stage * v_bytes)
                v_read = shared + v_empty + 8 * stage
                if not q_in_registers:
                    mbarrier_arrive(shared + q_empty + 8 * (q_stage * consumers + consumer))
                stage, phase = following(stage, phase, stages)
                others_go_on = j < tile_stop
                if others_go_on:
                    o = wait_all(o)
                    if leader:
                        mbarrier_arrive(v_read)         # or they wait for this consumer, who waits for them
                    stage, phase = let_by(shared, j, tile_stop, stage, phase, consumer)
                stage, phase = uniform(stage), uniform(phase)

                # S = Q K^T, of the next query tile; after the last one, of nothing that anybody reads
                q_stage, q_phase = following(q_stage, q_phase, q_stages)
                q_place = q_stage * consumers + consumer
                next_first, next_b, next_h, j, j_stop = wait_for_queries(shared, q_place, q_phase)
                q = queries(shared, q_place)
                if next_first != LAST:
                    wait_for(shared + k_full + 8 * stage, phase)
                s = multiply_qk(undefined_s(), q, shared + k_tiles + stage * k_bytes)

                o = wait_all_but_one(o)
                if leader and not others_go_on:
                    mbarrier_arrive(v_read)
                sink = sink_logits[h] * float32(LOG2_E) if sinks else float32(-inf)
                store(o, m, l, factor, sink, o_array, lse, b, h, i, int32(0))

                s = wait_all(s)
                leave_queries(shared, q_place)
                if leader and next_first != LAST:
                    mbarrier_arrive(shared + k_empty + 8 * stage)
                i_first, b, h = next_first, next_b, next_h
            if consumer == 0:
                take_turn(consumer)                 # the last one that was given

    signature = ((tensor_map,) * 3
                 + (array_type(spec.dtype, 4), real_array(spec.dtype, 3), real_array(spec.dtype, 1) if sinks else none,
                    real_array(spec.dtype, 2) if alibi else none, *[int64] * 5, *[float32] * 3, *[int64] * 3))
    return hopper_forward, signature
