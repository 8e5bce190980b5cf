r"""FlashAttention on Hopper (FlashAttention-3, arXiv 2407.08608, sections 3.1 and 3.2): the forward pass.

New idea: loading and computing are different jobs. One warpgroup, the *producer*, only starts copies (TMA); two others,
the *consumers*, own 64 query rows each and only compute. Matrix products run on the tensor cores while a consumer's
threads go on, so a consumer starts S of the next tile before it needs O of this one, and does its softmax meanwhile.

Changed from `flash2`: tiles of 16-bit numbers, copied by the hardware into shared memory and multiplied from there;
S, P, O, m, l live in registers; P goes from one product to the next without leaving them.

Reads and writes of global memory: as `flash2`, with tiles of 128 queries.

Tiles of K and of V have places for two (``stages``) in shared memory, taken in turn, and two barriers for each place::

                 k_full: "K is there"                     step         0        1        2        3
    producer  --------------------------->  consumers     place        0        1        0        1
              <---------------------------                phase of
                 k_empty: "we have read it"               k_full       0        0        1        1
                                                          k_empty      (1)      (1)      0        0

A barrier's phases alternate, so a wait names the parity of the phase whose end it waits for. The producer, who finds
all places empty at first, waits for the parity before the first. What the warpgroups do meanwhile::

    producer      K0 V0 K1 V1 | wait for k_empty: K2 | for v_empty: V2 | ...
    consumer 0    S0  softmax 0   [S1 | O += P0 V0]  softmax 1   [S2 | O += P1 V1]  softmax 2   ...   O += Pn Vn
    consumer 1    S0  softmax 0              [S1 | O += P0 V0]  softmax 1           [S2 | ...]   softmax 2

Brackets are the tensor cores'. The consumers take turns in handing work to them, so that one's softmax runs while the
other's products do.

Exactness: m is the exact running max of the scores, and P is rounded to 16 bits after its sum was added to l.
"""

from functools import lru_cache
from math import inf

from ...scores import make_score, seen_keys, shared_keys
from ..compile import cuda, device
from ..launch import launch
from ..ptx.arithmetic import quotient
from ..ptx.assembly import float32, int32, uint32
from ..ptx.barriers import (barrier_arrive, barrier_sync, fence_async, fence_mbarrier_init, make_set_registers,
                            mbarrier_arrive, mbarrier_expect, mbarrier_init, mbarrier_wait, mbarrier_wait_or_trap)
from ..ptx.copies import (commit_copies, copy_to_global, copy_to_shared, make_parameter_address, shared_memory,
                          swizzled, tensor_map, wait_copies_read)
from ..ptx.fragments import elementwise, first_column, first_row, make_filled, make_pack16, store_fragment
from ..ptx.wgmma import Operand, make_product_of_registers, make_product_of_shared, make_wait
from ..signatures import int64, none, real_array
from .config import BOX, LOG2_E, ROWS, WARPGROUP, Layout, Spec, choose, round_up
from .softmax import (across_max, across_sum, finite, fold_max, fold_sum, growth, hide, lse_of, normalised, probability,
                      product, scaled, top, total, weight_of)
from .tensor_map import encode, for_copies

TURN = 1                    # block barriers: 1 and 2 are the consumers' turns, 3 and 4 their own threads'
OWN = 3
TARGET = 9, 0, "a"        # wgmma and setmaxnreg are Hopper's own
BOX_ROW = 2 * BOX           # bytes


@device
def divide(x, y):
    """Quotient and rest of numbers below 2^32: unsigned division is much shorter in 32 bits than Numba's in 64."""
    x, y = uint32(x), uint32(y)
    return int64(x // y), int64(x % y)


seen_keys, shared_keys = device(seen_keys), device(shared_keys)
first_row, first_column = device(first_row), device(first_column)


def run(problem, operands, o, lse):
    """Fill o and lse."""
    spec = Spec.of(problem)
    tile = choose(spec)
    q, k, v, target = map(for_copies, (operands.q, operands.k, operands.v, o))
    maps = [encode(x, rows) for x, rows in ((q, ROWS), (k, tile.block_n), (v, tile.block_n), (target, ROWS))]
    blocks = -(-problem.n_q // tile.block_m) * problem.batch * problem.heads
    factor = LOG2_E if spec.hook else LOG2_E * problem.scale
    cap = 1.0 if problem.softcap is None else problem.softcap
    launch(make_forward, (tile, spec), blocks, (tile.threads, 1), Layout(tile, spec).total,
           (*maps, lse, operands.sinks, operands.alibi_slopes, problem.n_k, problem.group, problem.scale, factor, cap,
            problem.offset, problem.left, problem.right))
    if target is not o:
        o.view("uint16")[...] = target.view("uint16")


@lru_cache(maxsize=None)
def make_forward(tile, spec):
    """Build the forward kernel.

    Grid: one block per tile of 128 queries and (batch, head); the last tiles first, as causal attention makes them the
    longest. Block: one producer and two consumer warpgroups. Shared memory: `Layout`.
    """
    layout = Layout(tile, spec)
    block_m, block_n, stages, consumers = tile.block_m, tile.block_n, tile.stages, tile.consumers
    take_turns = tile.take_turns
    k_bytes, v_bytes, qo_bytes, d, d_v = layout.k_bytes, layout.v_bytes, layout.qo_bytes, spec.d, spec.d_v
    k_offset, v_offset, barriers, q_bytes = layout.k, layout.v, layout.barriers, layout.q_bytes
    q_boxes, v_boxes = round_up(d, BOX) // BOX, round_up(d_v, BOX) // BOX
    hook, alibi, sinks = spec.hook, spec.alibi, spec.sinks
    q_full, k_full, k_empty, v_full, v_empty = (barriers + 8 * n for n in (0, *range(1, 1 + 4 * stages, stages)))

    q_map_address, k_map_address, v_map_address, o_map_address = map(make_parameter_address, range(4))
    give_registers = make_set_registers("dec", tile.producer_registers)
    take_registers = make_set_registers("inc", tile.consumer_registers)
    wait_for = mbarrier_wait_or_trap if tile.debug else mbarrier_wait
    q_operand, k_operand = Operand(ROWS, depth_down=False), Operand(block_n, depth_down=False)
    multiply_qk = make_product_of_shared(block_n, d, spec.dtype, q_operand, k_operand)
    multiply_pv = make_product_of_registers(d_v, block_n, spec.dtype, Operand(block_n, depth_down=True))
    wait_all, wait_all_but_one = make_wait(0), make_wait(1)
    undefined_s, zero_o = make_filled(block_n, None), make_filled(d_v, 0.0)
    pack16 = make_pack16(spec.dtype)
    score = device(make_score(spec.softcap, alibi, False, quotient)[0])

    @elementwise
    def score_of(s, column, position, scale, cap, slope):
        return score(scale * s, cap, slope, float32(abs(int32(position - column))), float32(0))

    @device
    def following(stage, phase):
        """The next place and its phase."""
        return (0, phase ^ 1) if stage == stages - 1 else (stage + 1, phase)

    @device
    def load_boxes(target, map_address, barrier, boxes, rows, row, head, batch):
        """Start to copy `rows` rows, box by box."""
        for box in range(boxes):
            copy_to_shared(target + box * rows * BOX_ROW, map_address, barrier, box * BOX, row, head, batch)

    @device
    def produce(shared, q_map, k_map, v_map, i_first, j_first, steps, h, kv_h, b):
        # load Q_i
        mbarrier_expect(shared + q_full, consumers * q_bytes)
        for consumer in range(consumers):
            load_boxes(shared + consumer * qo_bytes, q_map, shared + q_full, q_boxes, ROWS,
                       i_first + consumer * ROWS, h, b)
        # load K_j, V_j
        stage, phase = 0, 1
        for step in range(steps):
            j = j_first + step * block_n
            wait_for(shared + k_empty + 8 * stage, phase)
            mbarrier_expect(shared + k_full + 8 * stage, k_bytes)
            load_boxes(shared + k_offset + stage * k_bytes, k_map, shared + k_full + 8 * stage, q_boxes, block_n,
                       j, kv_h, b)
            wait_for(shared + v_empty + 8 * stage, phase)
            mbarrier_expect(shared + v_full + 8 * stage, v_bytes)
            load_boxes(shared + v_offset + stage * v_bytes, v_map, shared + v_full + 8 * stage, v_boxes, block_n,
                       j, kv_h, b)
            stage, phase = following(stage, phase)

    @device
    def score_tile(s, j, row, column, slope, scale, cap, band, all_first, all_stop):
        """From ``q·k`` to scores, hidden ones -inf; tiles of which all rows see all keys need no mask."""
        n_k, offset, left, right = band
        position = int32(row + offset - j), int32(row + 8 + offset - j)
        if hook:
            s = score_of(s, column, position, scale, cap, slope)
        if j < all_first or j + block_n > all_stop:
            last = int32(n_k - j)
            first = int32(position[0] - left), int32(position[1] - left)
            stop = (min(int32(position[0] + right + 1), last), min(int32(position[1] + right + 1), last))
            s = hide(s, column, first, stop)
        return s

    @device
    def online_softmax(s, m_old, l, factor):
        """P, and the new m, l, and alpha."""
        m = across_max(fold_max(s, m_old))
        base = finite(m)
        alpha = growth(m_old, base, factor)
        p = probability(s, factor, product(base, factor))
        return p, m, fold_sum(p, product(l, alpha)), alpha

    def hopper_forward(q_map, k_map, v_map, o_map, lse, sink_logits, slopes, n_k, group, scale, factor, cap, offset,
                       left, right):
        heads, n_q = lse.shape[1], lse.shape[2]
        tiles_m = (n_q + block_m - 1) // block_m
        bh, from_last = divide(cuda.blockIdx.x, tiles_m)
        b, h = divide(bh, heads)
        kv_h, _ = divide(h, group)
        i_first = (tiles_m - 1 - from_last) * block_m
        first, stop = seen_keys(i_first, min(i_first + block_m, n_q), offset, left, right, n_k)
        first = first // block_n * block_n
        steps = max(0, (stop - first + block_n - 1) // block_n)

        shared = shared_memory()
        thread = cuda.threadIdx.x
        if thread == 0:
            mbarrier_init(shared + q_full, 1)
            for stage in range(stages):
                mbarrier_init(shared + k_full + 8 * stage, 1)
                mbarrier_init(shared + v_full + 8 * stage, 1)
                mbarrier_init(shared + k_empty + 8 * stage, consumers)
                mbarrier_init(shared + v_empty + 8 * stage, consumers)
            fence_mbarrier_init()
        cuda.syncthreads()      # or a thread waits on a barrier that isn't set up yet

        # ---- the producer --------------------------------------------------------------------------------------------
        if thread < WARPGROUP:
            give_registers()
            if thread == 0:
                produce(shared, q_map_address(), k_map_address(), v_map_address(), i_first, first, steps, h,
                        kv_h, b)

        # ---- the consumers -------------------------------------------------------------------------------------------
        else:
            take_registers()
            consumer, thread = thread // WARPGROUP - 1, thread % WARPGROUP
            leader = thread == 0
            q_tile = shared + consumer * qo_bytes
            i = i_first + consumer * ROWS
            all_first, all_stop = shared_keys(i, min(i + ROWS, n_q), offset, left, right, n_k)
            row, column = i + first_row(thread), int32(first_column(thread))
            band = n_k, offset, left, right
            slope = slopes[b, h] if alibi else float32(0)
            o = zero_o()
            m = float32(-inf), float32(-inf)
            l = float32(0), float32(0)          # of this thread's columns only, until the epilogue

            wait_for(shared + q_full, 0)
            if steps > 0:
                # S = Q K^T, of the first tile
                stage, phase, j = 0, 0, first
                wait_for(shared + k_full, 0)
                s = wait_all(multiply_qk(undefined_s(), q_tile, shared + k_offset))
                if leader:
                    mbarrier_arrive(shared + k_empty)
                s = score_tile(s, j, row, column, slope, scale, cap, band, all_first, all_stop)
                p, m, l, alpha = online_softmax(s, m, l, factor)
                p16 = pack16(p)
                if take_turns and consumer == 0:
                    barrier_arrive(TURN + 1, 2 * WARPGROUP)         # the other begins

                for step in range(1, steps):
                    next_stage, next_phase = following(stage, phase)
                    j += block_n
                    # S = Q K^T, of the next tile
                    wait_for(shared + k_full + 8 * next_stage, next_phase)
                    if take_turns:
                        barrier_sync(TURN + consumer, 2 * WARPGROUP)
                    s = multiply_qk(undefined_s(), q_tile, shared + k_offset + next_stage * k_bytes)

                    # O = alpha O + P V, of this one
                    wait_for(shared + v_full + 8 * stage, phase)
                    o = multiply_pv(o, p16, shared + v_offset + stage * v_bytes)
                    if take_turns:
                        barrier_arrive(TURN + 1 - consumer, 2 * WARPGROUP)

                    # mask, online softmax: m, alpha, P, l
                    s = wait_all_but_one(s)
                    if leader:
                        mbarrier_arrive(shared + k_empty + 8 * next_stage)
                    s = score_tile(s, j, row, column, slope, scale, cap, band, all_first, all_stop)
                    p, m, l, alpha = online_softmax(s, m, l, factor)
                    o = wait_all(o)
                    if leader:
                        mbarrier_arrive(shared + v_empty + 8 * stage)
                    p16 = pack16(p)             # only now: the product before has read the registers of the last P
                    o = scaled(o, alpha)
                    stage, phase = next_stage, next_phase

                wait_for(shared + v_full + 8 * stage, phase)
                o = wait_all(multiply_pv(o, p16, shared + v_offset + stage * v_bytes))

            # epilogue: O / l, lse
            l = across_sum(l)
            sink = sink_logits[h] * float32(LOG2_E) if sinks else float32(-inf)
            base = finite(top(m, factor, sink))
            l = total(l, m, factor, base, sink)
            o = normalised(o, weight_of(m, factor, base, l))
            row_lse = lse_of(l, base)
            if thread & 3 == 0:
                if row < n_q:
                    lse[b, h, row] = row_lse[0]
                if row + 8 < n_q:
                    lse[b, h, row + 8] = row_lse[1]
            lane, warp = thread & 31, thread >> 5
            store_fragment(pack16(o), swizzled(q_tile, warp * 16 + (lane & 15), lane >> 4))
            fence_async()
            barrier_sync(OWN + consumer, WARPGROUP)     # or a row isn't there yet that the copy reads
            if leader:
                for box in range(v_boxes):
                    copy_to_global(o_map_address(), q_tile + box * ROWS * BOX_ROW, box * BOX, i, h, b)
                commit_copies()
                wait_copies_read()              # or the block ends, and its shared memory is another's

    signature = ((tensor_map,) * 4 + (real_array(spec.dtype, 3), real_array(spec.dtype, 1) if sinks else none,
                                      real_array(spec.dtype, 2) if alibi else none, int64, int64, float32, float32,
                                      float32, int64, int64, int64))
    return hopper_forward, signature


make_forward.target = TARGET
