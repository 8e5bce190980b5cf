"""FlashAttention-2 (arXiv 2307.08691): the forward pass, its Algorithm 1. The backward pass is in `flash2_backward`.

New idea: the loop over query tiles is carried out by the grid; inside a block one loop runs over K/V tiles, and the
running max m, the running sum l and the output O of the block's rows never leave the chip. O is divided by l once, at
the end.

Changed from the last step (`flash1`): the two loops changed places; O, m and l are not read and written in every step.

Reads and writes of global memory: Q once, O and lse once; K and V once per query tile, n_q / block_m times.

Time on H200: float32, n 4096, forward: about 32 TFLOP/s at d 64 and 128 (PyTorch's memory-efficient attention:
35.2, 45.3).
"""

from functools import lru_cache
from math import exp, inf, log

from ..scores import seen_keys, shared_keys
from .compile import cuda, device
from .config import forward_tiles
from .hooks import make_hooks
from .memory import make_shared_tiles
from .signatures import array_type, int32, none, option_types, real_array, real_type
from .tiles import (fill, make_load_tile, make_store_tile, multiply_nn, multiply_nn_seen, multiply_nt, row_max, scatter,
                    strip_max, strip_sum, thread_place)

seen_keys, shared_keys = device(seen_keys), device(shared_keys)


@lru_cache(maxsize=None)
def make_forward(tile, spec):
    """Build the forward kernel.

    Grid: one block per query tile and (batch, head); the last tiles first, as causal attention makes them the longest.
    Block: (threads_n, threads_m). Shared memory: `forward_tiles`. Thread (ty, tx) owns rows ``ty + r * threads_m`` of
    the query tile: in S and P their columns ``tx + c * threads_n``, in O groups of four columns (see `tiles`), and a
    share of their l.
    """
    block_m, block_n, threads_m, threads_n = tile.block_m, tile.block_n, tile.threads_m, tile.threads_n
    threads, d, d_v, sinks = tile.threads, spec.d, spec.d_v, spec.sinks
    rows, cols, o_cols = block_m // threads_m, block_n // threads_n, d_v // threads_n
    always_checked = spec.bias or spec.mask
    real = real_type(spec.dtype)
    score_tile, hide_tile, _, _ = make_hooks(tile, spec)
    load_tile, store_tile = make_load_tile(spec.dtype, real), make_store_tile(spec.dtype)
    q_shared, k_shared, v_shared, p_shared, strip_shared = make_shared_tiles(forward_tiles(tile, spec), real)

    def flash2_forward(q, k, v, o, lse, sink_logits, slopes, biases, masks, scale, cap, offset, left, right):
        heads, n_q, n_k = q.shape[1], q.shape[2], k.shape[2]
        tiles_m = (n_q + block_m - 1) // block_m
        i_first = (tiles_m - 1 - cuda.blockIdx.x % tiles_m) * block_m
        b, h = cuda.blockIdx.x // tiles_m // heads, cuda.blockIdx.x // tiles_m % heads
        kv_h = h // (heads // k.shape[1])
        k_head, v_head = k[b, kv_h], v[b, kv_h]
        ty, tx = thread_place(threads_m, threads_n)
        thread = ty * threads_n + tx
        band = n_q, n_k, offset, left, right
        options = cap, slopes, biases, masks, b, h

        q_tile, k_tile, v_tile, p_tile = q_shared(), k_shared(), v_shared(), p_shared()
        strip = strip_shared()
        # this thread's micro-tiles, in registers
        s = cuda.local.array((rows, cols), real)
        acc = cuda.local.array((rows, o_cols), real)
        m = cuda.local.array((rows, 1), real)
        l = cuda.local.array((rows, 1), real)       # of this thread's columns only, until the epilogue
        fill(acc, real(0))
        fill(m, real(-inf))
        fill(l, real(0))

        # load Q_i
        load_tile(q_tile, d, q[b, h], i_first, thread, threads)

        i_stop = min(i_first + block_m, n_q)
        first, stop = seen_keys(i_first, i_stop, offset, left, right, n_k)
        all_first, all_stop = shared_keys(i_first, i_stop, offset, left, right, n_k)
        for j_first in range(first // block_n * block_n, stop, block_n):
            # load K_j, V_j
            cuda.syncthreads()      # or a fast thread overwrites K, V or P, which others still multiply
            strange = (load_tile(k_tile, d, k_head, j_first, thread, threads)
                       | load_tile(v_tile, d_v, v_head, j_first, thread, threads))
            # without this barrier a fast thread would multiply tiles that others haven't filled yet;
            # strange: does any thread of the block hold a NaN or an Inf?
            strange = cuda.syncthreads_or(int32(strange))

            # S = Q K^T
            here = i_first, j_first, ty, tx
            fill(s, real(0))
            multiply_nt(s, q_tile, k_tile, d, ty, tx, threads_m, threads_n)
            score_tile(s, scale, here, band, options)

            # mask
            checked = always_checked or j_first < all_first or j_first + block_n > all_stop
            if checked:
                hide_tile(s, real(-inf), here, band, options)

            # online softmax: m, alpha, P, l
            for r in range(rows):
                strip[ty + r * threads_m, tx] = row_max(s, r)
            cuda.syncthreads()      # or a row's max is taken of entries that its other threads haven't written yet
            # P = -1 marks a hidden pair for `multiply_nn_seen`, which leaves it out: 0 * NaN would be NaN
            guarded = checked and strange != 0
            hidden_p = real(-1) if guarded else real(0)
            for r in range(rows):
                m_old = m[r, 0]
                m[r, 0] = max(m_old, strip_max(strip, ty + r * threads_m))
                base = m[r, 0] if m[r, 0] != real(-inf) else real(0)     # no key seen yet: -inf + inf would be NaN
                alpha = real(exp(m_old - base))
                l[r, 0] *= alpha
                for c in range(o_cols):
                    acc[r, c] *= alpha
                for c in range(cols):
                    p = real(exp(s[r, c] - base))
                    l[r, 0] += p
                    s[r, c] = hidden_p if s[r, c] == real(-inf) else p
            scatter(p_tile, s, ty, tx, threads_m, threads_n)

            # O = alpha O + P V
            cuda.syncthreads()      # or a thread multiplies a row of P that its other threads haven't written yet
            if guarded:
                multiply_nn_seen(acc, p_tile, v_tile, block_n, ty, tx, threads_m, threads_n, hidden_p)
            else:
                multiply_nn(acc, p_tile, v_tile, block_n, ty, tx, threads_m, threads_n)

        # epilogue: O / l, lse
        for r in range(rows):
            strip[ty + r * threads_m, tx] = l[r, 0]
        cuda.syncthreads()          # or l lacks what the other threads of the row have summed
        for r in range(rows):
            i = i_first + ty + r * threads_m
            m_row, l_row = m[r, 0], strip_sum(strip, ty + r * threads_m)
            if sinks:
                sink = sink_logits[h]
                m_row = max(m[r, 0], sink)
                base = m_row if m_row != real(-inf) else real(0)
                alpha = real(exp(m[r, 0] - base))
                l_row = l_row * alpha + real(exp(sink - base))
                for c in range(o_cols):
                    acc[r, c] *= alpha
            empty = l_row == real(0)
            for c in range(o_cols):
                acc[r, c] = real(0) if empty else acc[r, c] / l_row
            if tx == 0 and i < n_q:
                lse[b, h, i] = real(-inf) if empty else m_row + real(log(l_row))
        store_tile(o[b, h], i_first, acc, ty, tx, threads_m, threads_n)

    signature = ((array_type(spec.dtype, 4),) * 4
                 + (real_array(spec.dtype, 3), real_array(spec.dtype, 1) if sinks else none) + option_types(spec))
    return flash2_forward, signature
