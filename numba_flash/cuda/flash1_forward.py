"""FlashAttention (arXiv 2205.14135): the forward pass as published, its Algorithm 1. The backward pass is in
`flash1_backward`.

New idea: S and P are never written to global memory. A tile of keys and values is loaded once, all queries pass by it,
and what a row of queries knows so far (its output O, its max m, its sum l) is corrected in global memory with every
tile.

Changed from the last step (`standard`): one kernel in the place of five passes over an n_q x n_k array.

Reads and writes of global memory: K and V once; Q, O, m and l once per K/V tile, n_k / block_n times.

Time on H200: float32, n 4096, forward: about 11.5 TFLOP/s at d 64 (128 heads, 132 processors), 7.3 at d 128 (64 heads).

Extra memory: m and l, and for 16-bit arrays O in float32.
"""

from functools import lru_cache
from math import exp, inf, log

from ..scores import seeing_queries, shared_keys
from .compile import cuda, device
from .config import flash1_forward_tiles
from .hooks import make_hooks
from .memory import make_conversions, make_shared_tiles
from .signatures import array_type, int32, none, option_types, real_array, real_type
from .tiles import (fill, make_load_tile, multiply_nn, multiply_nn_seen, multiply_nt, output_col, row_max, scatter,
                    strip_max, strip_sum, thread_place)

seeing_queries, shared_keys = device(seeing_queries), device(shared_keys)


@lru_cache(maxsize=None)
def make_forward(tile, spec):
    """Build the forward kernel.

    Grid: one block per (batch, head). Block: (threads_n, threads_m). Shared memory: `flash1_forward_tiles`. Thread
    (ty, tx) owns rows ``ty + r * threads_m`` of each query tile: in S and P their columns ``tx + c * threads_n``, in O
    groups of four columns (see `tiles`).
    """
    block_m, block_n, threads_m, threads_n = tile.block_m, tile.block_n, tile.threads_m, tile.threads_n
    threads, d, d_v, sinks = tile.threads, spec.d, spec.d_v, spec.sinks
    rows, cols, o_cols = block_m // threads_m, block_n // threads_n, d_v // threads_n
    always_checked = spec.bias or spec.mask
    real = real_type(spec.dtype)
    score_tile, hide_tile, _, _ = make_hooks(tile, spec)
    load_tile = make_load_tile(spec.dtype, real)
    _, from_real = make_conversions(spec.dtype)
    (k_shared, v_shared, q_shared, p_shared,
     max_shared, sum_shared) = make_shared_tiles(flash1_forward_tiles(tile, spec), real)

    def flash1_forward(q, k, v, o, lse, sink_logits, work, m, l,
                       slopes, biases, masks, scale, cap, offset, left, right):
        heads, n_q, n_k, width = q.shape[1], q.shape[2], k.shape[2], v.shape[3]
        b, h = cuda.blockIdx.x // heads, cuda.blockIdx.x % heads
        kv_h = h // (heads // k.shape[1])
        q_head, k_head, v_head, o_head = q[b, h], k[b, kv_h], v[b, kv_h], o[b, h]
        work_head, m_head, l_head = work[b, h], m[b, h], l[b, h]
        ty, tx = thread_place(threads_m, threads_n)
        thread = ty * threads_n + tx
        band = n_q, n_k, offset, left, right
        options = cap, slopes, biases, masks, b, h

        k_tile, v_tile, q_tile, p_tile = k_shared(), v_shared(), q_shared(), p_shared()
        max_strip, sum_strip = max_shared(), sum_shared()
        s = cuda.local.array((rows, cols), real)
        acc = cuda.local.array((rows, o_cols), real)
        m_kept = cuda.local.array((rows, 1), real)
        l_kept = cuda.local.array((rows, 1), real)

        # O = 0, m = -inf, l = 0
        for i in range(ty, n_q, threads_m):
            for col in range(tx, width, threads_n):
                work_head[i, col] = real(0)
            if tx == 0:
                m_head[i], l_head[i] = real(-inf), real(0)

        for j_first in range(0, n_k, block_n):
            # load K_j, V_j
            cuda.syncthreads()      # or a fast thread overwrites K or V, which others still multiply
            strange_kv = (load_tile(k_tile, d, k_head, j_first, thread, threads)
                          | load_tile(v_tile, d_v, v_head, j_first, thread, threads))

            first, stop = seeing_queries(j_first, min(j_first + block_n, n_k), offset, left, right, n_q)
            for i_first in range(first // block_m * block_m, stop, block_m):
                # load Q_i
                cuda.syncthreads()      # or a fast thread overwrites Q or P, which others still multiply
                load_tile(q_tile, d, q_head, i_first, thread, threads)
                # without this barrier a fast thread would multiply tiles that others haven't filled yet, or correct O,
                # m and l before others have written what they began with
                strange = cuda.syncthreads_or(int32(strange_kv))

                # S = Q K^T, mask
                here = i_first, j_first, ty, tx
                fill(s, real(0))
                multiply_nt(s, q_tile, k_tile, d, ty, tx, threads_m, threads_n)
                score_tile(s, scale, here, band, options)
                all_first, all_stop = shared_keys(i_first, min(i_first + block_m, n_q), offset, left, right, n_k)
                checked = always_checked or j_first < all_first or j_first + block_n > all_stop
                if checked:
                    hide_tile(s, real(-inf), here, band, options)

                # softmax of this tile alone: m~, P~, l~
                for r in range(rows):
                    max_strip[ty + r * threads_m, tx] = row_max(s, r)
                cuda.syncthreads()      # or a row's max is taken of entries that its other threads haven't written yet
                guarded = checked and strange != 0
                hidden_p = real(-1) if guarded else real(0)
                for r in range(rows):
                    m_tile = strip_max(max_strip, ty + r * threads_m)
                    base = m_tile if m_tile != real(-inf) else real(0)
                    l_part = real(0)
                    for c in range(cols):
                        p = real(exp(s[r, c] - base))
                        l_part += p
                        s[r, c] = hidden_p if s[r, c] == real(-inf) else p
                    sum_strip[ty + r * threads_m, tx] = l_part
                scatter(p_tile, s, ty, tx, threads_m, threads_n)

                # P~ V
                cuda.syncthreads()      # or a thread uses rows of P and sums that other threads haven't written yet
                fill(acc, real(0))
                if guarded:
                    multiply_nn_seen(acc, p_tile, v_tile, block_n, ty, tx, threads_m, threads_n, hidden_p)
                else:
                    multiply_nn(acc, p_tile, v_tile, block_n, ty, tx, threads_m, threads_n)

                # m_new, l_new, O = (l e^(m - m_new) O + e^(m~ - m_new) P~ V) / l_new
                for r in range(rows):
                    i = i_first + ty + r * threads_m
                    m_tile, l_tile = strip_max(max_strip, ty + r * threads_m), strip_sum(sum_strip, ty + r * threads_m)
                    if i < n_q:
                        m_old, l_old = m_head[i], l_head[i]
                        m_new = max(m_old, m_tile)
                        base = m_new if m_new != real(-inf) else real(0)
                        alpha, beta = real(exp(m_old - base)), real(exp(m_tile - base))
                        l_new = alpha * l_old + beta * l_tile
                        for c in range(o_cols):
                            col = output_col(c, tx, threads_n)
                            if col < width and l_new != real(0):
                                work_head[i, col] = (alpha * l_old * work_head[i, col] + beta * acc[r, c]) / l_new
                        m_kept[r, 0], l_kept[r, 0] = m_new, l_new
                cuda.syncthreads()      # or m and l change while other threads of the row still read the old ones
                for r in range(rows):
                    i = i_first + ty + r * threads_m
                    if tx == 0 and i < n_q:
                        m_head[i], l_head[i] = m_kept[r, 0], l_kept[r, 0]

        # epilogue: the sink's share, lse, and O in the dtype of o
        cuda.syncthreads()              # or O, m and l are read before other threads have written them
        for i in range(ty, n_q, threads_m):
            m_row, l_row = m_head[i], l_head[i]
            share = real(1)
            if sinks:
                sink = sink_logits[h]
                m_row = max(m_row, sink)
                base = m_row if m_row != real(-inf) else real(0)
                seen = l_row * real(exp(m_head[i] - base))
                l_row = seen + real(exp(sink - base))
                share = seen / l_row if l_row != real(0) else real(0)
            for col in range(tx, width, threads_n):
                o_head[i, col] = from_real(work_head[i, col] * share)
            if tx == 0:
                lse[b, h, i] = real(-inf) if l_row == real(0) else m_row + real(log(l_row))

    signature = (array_type(spec.dtype, 4),) * 4 + (
        real_array(spec.dtype, 3), real_array(spec.dtype, 1) if sinks else none, real_array(spec.dtype, 4),
        real_array(spec.dtype, 3), real_array(spec.dtype, 3)) + option_types(spec)
    return flash1_forward, signature
