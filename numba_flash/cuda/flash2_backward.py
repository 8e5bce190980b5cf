"""FlashAttention-2 (arXiv 2307.08691): the backward pass, its Algorithm 2, as two kernels.

New idea: nothing of size n_q x n_k is kept from the forward pass: lse is enough to compute P again, tile by tile. One
kernel gives each K/V tile to a block and sums dK and dV over the query tiles; another gives each query tile to a block
and sums dQ.

Changed from the last step (`flash1`): dQ is not updated in global memory, at the price of computing S and dP twice. No
atomics: gradients are the same bits in every run.

Reads and writes of global memory: Q, dO once per K/V tile; K, V once per query tile; dQ, dK, dV are written once.

Time on H200: float32, n 4096, backward: about 25 TFLOP/s at d 64, 24 at d 128 (PyTorch's memory-efficient attention:
35.0, 36.6).
"""

from functools import lru_cache

from ..scores import seeing_queries, seen_keys, shared_keys
from .backward_parts import make_load_lse
from .compile import cuda, device
from .config import dkdv_tiles, dq_tiles
from .hooks import make_hooks
from .memory import make_shared_tiles
from .signatures import array_type, int32, option_types, real_array, real_type
from .tiles import (fill, gather, load_rows, make_load_tile, make_store_tile, multiply_nn, multiply_nn_seen,
                    multiply_nt, scale_by, scatter, thread_place)

seeing_queries, seen_keys, shared_keys = device(seeing_queries), device(seen_keys), device(shared_keys)


@lru_cache(maxsize=None)
def make_dkdv(tile, spec):
    """Build the kernel for dK and dV.

    Grid: one block per K/V tile and (batch, kv head). Block: (threads_n, threads_m). Shared memory: `dkdv_tiles`.
    Everything is transposed: thread (ty, tx) owns keys ``ty + r * threads_m``, in Sᵀ and dPᵀ queries ``tx + c *
    threads_n``, in dK and dV groups of four columns (see `tiles`).
    """
    block_m, block_n, threads_m, threads_n = tile.block_m, tile.block_n, tile.threads_m, tile.threads_n
    threads, d, d_v = tile.threads, spec.d, spec.d_v
    rows, cols, k_cols, v_cols = block_n // threads_m, block_m // threads_n, d // threads_n, d_v // threads_n
    always_checked = spec.bias or spec.mask
    real = real_type(spec.dtype)
    _, hide_tile, probability_tile, gradient_tile = make_hooks(tile, spec, transposed=True)
    load_lse = make_load_lse(real)
    load_tile, store_tile = make_load_tile(spec.dtype, real), make_store_tile(spec.dtype)
    (k_shared, v_shared, q_shared, do_shared, p_shared,
     lse_shared, delta_shared) = make_shared_tiles(dkdv_tiles(tile, spec), real)

    def flash2_dkdv(q, k, v, do, lse, delta, dk, dv, slopes, biases, masks, scale, cap, offset, left, right):
        n_q, n_k, kv_heads = q.shape[2], k.shape[2], k.shape[1]
        group = q.shape[1] // kv_heads
        tiles_n = (n_k + block_n - 1) // block_n
        j_first = cuda.blockIdx.x % tiles_n * block_n
        b, kv_h = cuda.blockIdx.x // tiles_n // kv_heads, cuda.blockIdx.x // tiles_n % kv_heads
        ty, tx = thread_place(threads_m, threads_n)
        thread = ty * threads_n + tx
        band = n_q, n_k, offset, left, right

        k_tile, v_tile, q_tile, do_tile, p_tile = k_shared(), v_shared(), q_shared(), do_shared(), p_shared()
        lse_tile, delta_tile = lse_shared(), delta_shared()
        s = cuda.local.array((rows, cols), real)
        p = cuda.local.array((rows, cols), real)
        dp = cuda.local.array((rows, cols), real)
        acc_k = cuda.local.array((rows, k_cols), real)
        acc_v = cuda.local.array((rows, v_cols), real)
        fill(acc_k, real(0))
        fill(acc_v, real(0))

        # load K_j, V_j
        load_tile(k_tile, d, k[b, kv_h], j_first, thread, threads)
        load_tile(v_tile, d_v, v[b, kv_h], j_first, thread, threads)

        first, stop = seeing_queries(j_first, min(j_first + block_n, n_k), offset, left, right, n_q)
        for h in range(kv_h * group, kv_h * group + group):
            q_head, do_head, lse_head, delta_head = q[b, h], do[b, h], lse[b, h], delta[b, h]
            options = cap, slopes, biases, masks, b, h
            for i_first in range(first // block_m * block_m, stop, block_m):
                # load Q_i, dO_i, lse_i, delta_i
                cuda.syncthreads()      # or a fast thread overwrites Q, dO or dS, which others still multiply
                strange = (load_tile(q_tile, d, q_head, i_first, thread, threads)
                           | load_tile(do_tile, d_v, do_head, i_first, thread, threads))
                load_lse(lse_tile, lse_head, i_first, thread, threads)
                load_rows(delta_tile, delta_head, i_first, real(0), thread, threads)
                # without this barrier a fast thread would multiply tiles that others haven't filled yet
                strange = cuda.syncthreads_or(int32(strange))

                # S^T = K Q^T, mask, P^T
                here = i_first, j_first, ty, tx
                fill(s, real(0))
                multiply_nt(s, k_tile, q_tile, d, ty, tx, threads_m, threads_n)
                probability_tile(p, s, lse_tile, scale, here, band, options)
                all_first, all_stop = shared_keys(i_first, i_first + block_m, offset, left, right, n_k)
                checked = (always_checked or i_first + block_m > n_q
                           or j_first < all_first or j_first + block_n > all_stop)
                guarded = checked and strange != 0
                hidden_p = real(-1) if guarded else real(0)
                if checked:
                    hide_tile(p, hidden_p, here, band, options)
                scatter(p_tile, p, ty, tx, threads_m, threads_n)

                # dV += P^T dO
                cuda.syncthreads()      # or a thread multiplies a row of P that its other threads haven't written yet
                if guarded:
                    multiply_nn_seen(acc_v, p_tile, do_tile, block_m, ty, tx, threads_m, threads_n, hidden_p)
                else:
                    multiply_nn(acc_v, p_tile, do_tile, block_m, ty, tx, threads_m, threads_n)

                # dP^T = V dO^T, dS^T
                fill(dp, real(0))
                multiply_nt(dp, v_tile, do_tile, d_v, ty, tx, threads_m, threads_n)
                gather(p, p_tile, ty, tx, threads_m, threads_n)     # kept there meanwhile, to save registers
                gradient_tile(dp, p, s, delta_tile, scale, here, cap)
                cuda.syncthreads()      # or dS overwrites elements of P that others still multiply
                scatter(p_tile, dp, ty, tx, threads_m, threads_n)

                # dK += dS^T Q
                cuda.syncthreads()      # or a thread multiplies a row of dS that its other threads haven't written yet
                if guarded:
                    multiply_nn_seen(acc_k, p_tile, q_tile, block_m, ty, tx, threads_m, threads_n, real(0))
                else:
                    multiply_nn(acc_k, p_tile, q_tile, block_m, ty, tx, threads_m, threads_n)

        # epilogue: dK, dV
        scale_by(acc_k, scale)
        store_tile(dk[b, kv_h], j_first, acc_k, ty, tx, threads_m, threads_n)
        store_tile(dv[b, kv_h], j_first, acc_v, ty, tx, threads_m, threads_n)

    real2 = (real_array(spec.dtype, 3),) * 2
    signature = (array_type(spec.dtype, 4),) * 4 + real2 + (array_type(spec.dtype, 4),) * 2 + option_types(spec)
    return flash2_dkdv, signature


@lru_cache(maxsize=None)
def make_dq(tile, spec):
    """Build the kernel for dQ.

    Grid: one block per query tile and (batch, head), the last tiles first. Block: (threads_n, threads_m). Shared
    memory: `dq_tiles`. Thread (ty, tx) owns what it owns in the forward kernel, with dQ in the place of O.
    """
    block_m, block_n, threads_m, threads_n = tile.block_m, tile.block_n, tile.threads_m, tile.threads_n
    threads, d, d_v = tile.threads, spec.d, spec.d_v
    rows, cols, q_cols = block_m // threads_m, block_n // threads_n, d // threads_n
    always_checked = spec.bias or spec.mask
    real = real_type(spec.dtype)
    _, hide_tile, probability_tile, gradient_tile = make_hooks(tile, spec)
    load_lse = make_load_lse(real)
    load_tile, store_tile = make_load_tile(spec.dtype, real), make_store_tile(spec.dtype)
    (q_shared, do_shared, k_shared, v_shared, ds_shared,
     lse_shared, delta_shared) = make_shared_tiles(dq_tiles(tile, spec), real)

    def flash2_dq(q, k, v, do, lse, delta, dq, slopes, biases, masks, scale, cap, offset, left, right):
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

        q_tile, do_tile, k_tile, v_tile, ds_tile = q_shared(), do_shared(), k_shared(), v_shared(), ds_shared()
        lse_tile, delta_tile = lse_shared(), delta_shared()
        s = cuda.local.array((rows, cols), real)
        p = cuda.local.array((rows, cols), real)
        dp = cuda.local.array((rows, cols), real)
        acc = cuda.local.array((rows, q_cols), real)
        fill(acc, real(0))

        # load Q_i, dO_i, lse_i, delta_i
        load_tile(q_tile, d, q[b, h], i_first, thread, threads)
        load_tile(do_tile, d_v, do[b, h], i_first, thread, threads)
        load_lse(lse_tile, lse[b, h], i_first, thread, threads)
        load_rows(delta_tile, delta[b, h], i_first, real(0), thread, threads)

        i_stop = min(i_first + block_m, n_q)
        first, stop = seen_keys(i_first, i_stop, offset, left, right, n_k)
        all_first, all_stop = shared_keys(i_first, i_stop, offset, left, right, n_k)
        for j_first in range(first // block_n * block_n, stop, block_n):
            # load K_j, V_j
            cuda.syncthreads()      # or a fast thread overwrites K or dS, which others still multiply
            strange = (load_tile(k_tile, d, k_head, j_first, thread, threads)
                       | load_tile(v_tile, d_v, v_head, j_first, thread, threads))
            # without this barrier a fast thread would multiply tiles that others haven't filled yet
            strange = cuda.syncthreads_or(int32(strange))

            # S = Q K^T, mask, P
            here = i_first, j_first, ty, tx
            fill(s, real(0))
            multiply_nt(s, q_tile, k_tile, d, ty, tx, threads_m, threads_n)
            probability_tile(p, s, lse_tile, scale, here, band, options)
            checked = always_checked or j_first < all_first or j_first + block_n > all_stop
            if checked:
                hide_tile(p, real(0), here, band, options)

            # dP = dO V^T, dS
            fill(dp, real(0))
            multiply_nt(dp, do_tile, v_tile, d_v, ty, tx, threads_m, threads_n)
            gradient_tile(dp, p, s, delta_tile, scale, here, cap)
            scatter(ds_tile, dp, ty, tx, threads_m, threads_n)

            # dQ += dS K
            cuda.syncthreads()          # or a thread multiplies a row of dS that its other threads haven't written yet
            if checked and strange != 0:
                multiply_nn_seen(acc, ds_tile, k_tile, block_n, ty, tx, threads_m, threads_n, real(0))
            else:
                multiply_nn(acc, ds_tile, k_tile, block_n, ty, tx, threads_m, threads_n)

        # epilogue: dQ
        scale_by(acc, scale)
        store_tile(dq[b, h], i_first, acc, ty, tx, threads_m, threads_n)

    signature = ((array_type(spec.dtype, 4),) * 4 + (real_array(spec.dtype, 3),) * 2 + (array_type(spec.dtype, 4),)
                 + option_types(spec))
    return flash2_dq, signature
