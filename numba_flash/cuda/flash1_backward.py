"""FlashAttention (arXiv 2205.14135): the backward pass as published, its Algorithm 4.

New idea: P is not kept from the forward pass but computed again, tile by tile, from q, k and lse.

Changed from the last step (`standard`): one kernel; S, P, dP and dS stay in shared memory and registers.

Reads and writes of global memory: K, V, dK, dV once; Q, dO and dQ once per K/V tile: dQ is read, corrected and written
back.

Time on H200: float32, n 4096, backward: about 9.7 TFLOP/s at d 64, 6.2 at d 128.

Two things differ from the paper: lse is one number in the place of m and l, and delta = rowsum(dO * O) is computed
beforehand and not again for every tile (line 19).
"""

from functools import lru_cache

from ..scores import seeing_queries, shared_keys
from .backward_parts import make_load_lse
from .compile import cuda, device
from .config import flash1_backward_tiles
from .hooks import make_hooks
from .memory import make_conversions, make_shared_tiles
from .signatures import array_type, int32, option_types, real_array, real_type
from .tiles import (fill, load_rows, make_load_tile, make_store_tile, multiply_nn, multiply_nn_seen, multiply_nt,
                    output_col, scale_by, scatter, scatter_transposed, thread_place)

seeing_queries, shared_keys = device(seeing_queries), device(shared_keys)


@lru_cache(maxsize=None)
def make_backward(tile, spec):
    """Build the backward kernel.

    Grid: one block per (batch, kv head). Block: (threads_n, threads_m). Shared memory: `flash1_backward_tiles`.
    Thread (ty, tx) owns queries ``ty + r * threads_m`` of S, P, dP, dS and dQ, but keys ``ty + r * threads_m`` of dK
    and dV, which are products of the transposed Pᵀ and dSᵀ.
    """
    block_m, block_n, threads_m, threads_n = tile.block_m, tile.block_n, tile.threads_m, tile.threads_n
    threads, d, d_v = tile.threads, spec.d, spec.d_v
    rows, cols, k_rows = block_m // threads_m, block_n // threads_n, block_n // threads_m
    k_cols, v_cols = d // threads_n, d_v // threads_n
    always_checked = spec.bias or spec.mask
    real = real_type(spec.dtype)
    _, hide_tile, probability_tile, gradient_tile = make_hooks(tile, spec)
    load_tile, load_lse = make_load_tile(spec.dtype, real), make_load_lse(real)
    store_tile = make_store_tile(spec.dtype)
    _, from_real = make_conversions(spec.dtype)
    (k_shared, v_shared, q_shared, do_shared, ds_shared, transposed_shared,
     lse_shared, delta_shared) = make_shared_tiles(flash1_backward_tiles(tile, spec), real)

    def flash1_backward(q, k, v, do, lse, delta, dq, dk, dv, work,
                        slopes, biases, masks, scale, cap, offset, left, right):
        n_q, n_k, kv_heads, width = q.shape[2], k.shape[2], k.shape[1], q.shape[3]
        group = q.shape[1] // kv_heads
        b, kv_h = cuda.blockIdx.x // kv_heads, cuda.blockIdx.x % kv_heads
        k_head, v_head = k[b, kv_h], v[b, kv_h]
        ty, tx = thread_place(threads_m, threads_n)
        thread = ty * threads_n + tx
        band = n_q, n_k, offset, left, right

        k_tile, v_tile, q_tile, do_tile = k_shared(), v_shared(), q_shared(), do_shared()
        ds_tile, transposed = ds_shared(), transposed_shared()
        lse_tile, delta_tile = lse_shared(), delta_shared()
        s = cuda.local.array((rows, cols), real)
        p = cuda.local.array((rows, cols), real)
        dp = cuda.local.array((rows, cols), real)
        acc_q = cuda.local.array((rows, k_cols), real)
        acc_k = cuda.local.array((k_rows, k_cols), real)
        acc_v = cuda.local.array((k_rows, v_cols), real)

        # dQ = 0
        for h in range(kv_h * group, kv_h * group + group):
            for i in range(ty, n_q, threads_m):
                for col in range(tx, width, threads_n):
                    work[b, h, i, col] = real(0)

        for j_first in range(0, n_k, block_n):
            # load K_j, V_j
            cuda.syncthreads()      # or a fast thread overwrites K or V, which others still multiply
            strange_kv = (load_tile(k_tile, d, k_head, j_first, thread, threads)
                          | load_tile(v_tile, d_v, v_head, j_first, thread, threads))
            fill(acc_k, real(0))
            fill(acc_v, real(0))

            first, stop = seeing_queries(j_first, min(j_first + block_n, n_k), offset, left, right, n_q)
            for h in range(kv_h * group, kv_h * group + group):
                q_head, do_head, lse_head, delta_head, work_head = q[b, h], do[b, h], lse[b, h], delta[b, h], work[b, h]
                options = cap, slopes, biases, masks, b, h
                for i_first in range(first // block_m * block_m, stop, block_m):
                    # load Q_i, dO_i, lse_i, delta_i
                    cuda.syncthreads()      # or a fast thread overwrites Q, dO or dS, which others still multiply
                    strange = (load_tile(q_tile, d, q_head, i_first, thread, threads)
                               | load_tile(do_tile, d_v, do_head, i_first, thread, threads))
                    load_lse(lse_tile, lse_head, i_first, thread, threads)
                    load_rows(delta_tile, delta_head, i_first, real(0), thread, threads)
                    # without this barrier a fast thread would multiply tiles that others haven't filled yet, or add to
                    # elements of dQ that others haven't set to 0 yet
                    strange = cuda.syncthreads_or(int32(strange | strange_kv))

                    # S = Q K^T, mask, P
                    here = i_first, j_first, ty, tx
                    fill(s, real(0))
                    multiply_nt(s, q_tile, k_tile, d, ty, tx, threads_m, threads_n)
                    probability_tile(p, s, lse_tile, scale, here, band, options)
                    all_first, all_stop = shared_keys(i_first, i_first + block_m, offset, left, right, n_k)
                    checked = (always_checked or i_first + block_m > n_q
                               or j_first < all_first or j_first + block_n > all_stop)
                    guarded = checked and strange != 0
                    hidden_p = real(-1) if guarded else real(0)
                    if checked:
                        hide_tile(p, hidden_p, here, band, options)
                    scatter_transposed(transposed, p, ty, tx, threads_m, threads_n)

                    # dV += P^T dO
                    cuda.syncthreads()      # or a thread multiplies a row of P^T that other threads haven't written yet
                    if guarded:
                        multiply_nn_seen(acc_v, transposed, do_tile, block_m, ty, tx, threads_m, threads_n, hidden_p)
                    else:
                        multiply_nn(acc_v, transposed, do_tile, block_m, ty, tx, threads_m, threads_n)

                    # dP = dO V^T, dS
                    fill(dp, real(0))
                    multiply_nt(dp, do_tile, v_tile, d_v, ty, tx, threads_m, threads_n)
                    gradient_tile(dp, p, s, delta_tile, scale, here, cap)
                    scatter(ds_tile, dp, ty, tx, threads_m, threads_n)
                    cuda.syncthreads()      # or dS^T overwrites elements of P^T that others still multiply
                    scatter_transposed(transposed, dp, ty, tx, threads_m, threads_n)

                    # dK += dS^T Q, dQ += dS K
                    cuda.syncthreads()      # or a thread multiplies rows of dS or dS^T that others haven't written yet
                    fill(acc_q, real(0))
                    if guarded:
                        multiply_nn_seen(acc_k, transposed, q_tile, block_m, ty, tx, threads_m, threads_n, real(0))
                        multiply_nn_seen(acc_q, ds_tile, k_tile, block_n, ty, tx, threads_m, threads_n, real(0))
                    else:
                        multiply_nn(acc_k, transposed, q_tile, block_m, ty, tx, threads_m, threads_n)
                        multiply_nn(acc_q, ds_tile, k_tile, block_n, ty, tx, threads_m, threads_n)
                    for r in range(rows):
                        i = i_first + ty + r * threads_m
                        for c in range(k_cols):
                            col = output_col(c, tx, threads_n)
                            if i < n_q and col < width:
                                work_head[i, col] += scale * acc_q[r, c]

            # write dK_j, dV_j
            scale_by(acc_k, scale)
            store_tile(dk[b, kv_h], j_first, acc_k, ty, tx, threads_m, threads_n)
            store_tile(dv[b, kv_h], j_first, acc_v, ty, tx, threads_m, threads_n)

        # epilogue: dQ in the dtype of dq
        cuda.syncthreads()                  # or elements of dQ are read before other threads have written them
        for h in range(kv_h * group, kv_h * group + group):
            for i in range(ty, n_q, threads_m):
                for col in range(tx, width, threads_n):
                    dq[b, h, i, col] = from_real(work[b, h, i, col])

    signature = ((array_type(spec.dtype, 4),) * 4 + (real_array(spec.dtype, 3),) * 2 + (array_type(spec.dtype, 4),) * 3
                 + (real_array(spec.dtype, 4),) + option_types(spec))
    return flash1_backward, signature
