"""Kernels that the backward passes of both engines share: delta and the gradient of bias, and how lse is read."""

from functools import lru_cache
from math import inf

from ..scores import seen_keys, shared_keys
from .compile import cuda, device
from .config import dbias_tiles
from .hooks import make_hooks
from .memory import make_conversions, make_shared_tiles, read
from .signatures import array_type, none, option_types, real_array, real_type
from .tiles import fill, load_rows, make_load_tile, multiply_nt, scatter, thread_place

seen_keys, shared_keys = device(seen_keys), device(shared_keys)


@lru_cache(maxsize=None)
def make_load_lse(real):
    """Build ``load_lse(lse_tile, lse_head, first, thread, threads)``."""

    @device
    def load_lse(lse_tile, lse_head, first, thread, threads):
        """Copy a tile's lse; +inf past the end or without visible keys: exp(s - lse) is 0 there, not NaN."""
        n = lse_head.shape[0]
        for row in range(thread, lse_tile.shape[0], threads):
            i = first + row
            value = read(lse_head, (i if i < n else 0,))
            lse_tile[row] = real(inf) if i >= n or value == real(-inf) else value

    return load_lse


@lru_cache(maxsize=None)
def make_delta(lanes, rows, dtype, has_dlse):
    """Build the kernel for ``delta = rowsum(do * o) - dlse``.

    Grid: one block per `rows` rows of (batch, heads, n_q). Block: (lanes, rows): `lanes` neighbouring threads share a
    row, and read neighbouring elements. Where o is 0 nothing is added: a row without visible keys has no delta, even if
    do holds NaN.
    """
    real = real_type(dtype)
    to_real, _ = make_conversions(dtype)
    strip_shared, = make_shared_tiles([(rows, lanes)], real)

    def delta_kernel(do, o, dlse, delta):
        heads, n_q = o.shape[1], o.shape[2]
        lane, place = cuda.threadIdx.x, cuda.threadIdx.y
        row = cuda.blockIdx.x * rows + place
        total = o.shape[0] * heads * n_q
        inside = row if row < total else 0
        b, h, i = inside // n_q // heads, inside // n_q % heads, inside % n_q
        strip = strip_shared()
        products = real(0)
        for col in range(lane, o.shape[3], lanes):
            x = to_real(o[b, h, i, col])
            if x != real(0):
                products += x * to_real(do[b, h, i, col])
        strip[place, lane] = products
        cuda.syncthreads()      # or the sum lacks what the other threads of the row have to add
        if lane == 0 and row < total:
            for other in range(1, lanes):
                products += strip[place, other]
            delta[b, h, i] = products - dlse[b, h, i] if has_dlse else products

    signature = (array_type(dtype, 4),) * 2 + (real_array(dtype, 3) if has_dlse else none, real_array(dtype, 3))
    return delta_kernel, signature


@lru_cache(maxsize=None)
def make_dbias(tile, spec, one_row, one_col):
    """Build the kernel for dbias.

    Grid: one block per tile of dbias, in the shape that bias had before it was broadcast. Block: (threads_n,
    threads_m). A block loops over everything that its tile was broadcast to (batch, heads, and if `one_row` all query
    tiles, if `one_col` all K/V tiles), sums dS of each pair (i, j) of a tile in registers, and adds up rows and columns
    at the end. So no two blocks write to one place. Shared memory: `dbias_tiles`.
    """
    block_m, block_n, threads_m, threads_n = tile.block_m, tile.block_n, tile.threads_m, tile.threads_n
    threads, d, d_v = tile.threads, spec.d, spec.d_v
    rows, cols = block_m // threads_m, block_n // threads_n
    real = real_type(spec.dtype)
    _, hide_tile, probability_tile, _ = make_hooks(tile, spec)
    load_tile, load_lse = make_load_tile(spec.dtype, real), make_load_lse(real)
    (q_shared, do_shared, k_shared, v_shared, sum_shared,
     lse_shared, delta_shared) = make_shared_tiles(dbias_tiles(tile, spec), real)

    def dbias_kernel(q, k, v, do, lse, delta, dbias, slopes, biases, masks, scale, cap, offset, left, right):
        heads, n_q, n_k = q.shape[1], q.shape[2], k.shape[2]
        group = heads // k.shape[1]
        tiles_m = (dbias.shape[2] + block_m - 1) // block_m
        tiles_n = (dbias.shape[3] + block_n - 1) // block_n
        block = cuda.blockIdx.x
        own_j, own_i = block % tiles_n * block_n, block // tiles_n % tiles_m * block_m
        own_h = block // tiles_n // tiles_m % dbias.shape[1]
        own_b = block // tiles_n // tiles_m // dbias.shape[1]
        ty, tx = thread_place(threads_m, threads_n)
        thread = ty * threads_n + tx
        band = n_q, n_k, offset, left, right

        q_tile, do_tile, k_tile, v_tile, sum_tile = q_shared(), do_shared(), k_shared(), v_shared(), sum_shared()
        lse_tile, delta_tile = lse_shared(), delta_shared()
        s = cuda.local.array((rows, cols), real)
        p = cuda.local.array((rows, cols), real)
        dp = cuda.local.array((rows, cols), real)
        acc = cuda.local.array((rows, cols), real)
        fill(acc, real(0))

        # everything that this tile was broadcast to
        b_first, b_stop = (0, q.shape[0]) if dbias.shape[0] == 1 else (own_b, own_b + 1)
        h_first, h_stop = (0, heads) if dbias.shape[1] == 1 else (own_h, own_h + 1)
        i_begin, i_end = (0, n_q) if one_row else (own_i, min(own_i + block_m, n_q))
        for b in range(b_first, b_stop):
            for h in range(h_first, h_stop):
                q_head, do_head, lse_head, delta_head = q[b, h], do[b, h], lse[b, h], delta[b, h]
                k_head, v_head = k[b, h // group], v[b, h // group]
                options = cap, slopes, biases, masks, b, h
                for i_first in range(i_begin, i_end, block_m):
                    cuda.syncthreads()      # or a fast thread overwrites Q or dO, which others still multiply
                    load_tile(q_tile, d, q_head, i_first, thread, threads)
                    load_tile(do_tile, d_v, do_head, i_first, thread, threads)
                    load_lse(lse_tile, lse_head, i_first, thread, threads)
                    load_rows(delta_tile, delta_head, i_first, real(0), thread, threads)
                    first, stop = seen_keys(i_first, min(i_first + block_m, n_q), offset, left, right, n_k)
                    first = first // block_n * block_n
                    if not one_col:
                        first, stop = max(first, own_j), min(stop, own_j + block_n)
                    for j_first in range(first, stop, block_n):
                        cuda.syncthreads()      # or a fast thread overwrites K or V, which others still multiply
                        load_tile(k_tile, d, k_head, j_first, thread, threads)
                        load_tile(v_tile, d_v, v_head, j_first, thread, threads)
                        cuda.syncthreads()      # or a fast thread multiplies tiles that others haven't filled yet

                        # S = Q K^T, P, mask
                        here = i_first, j_first, ty, tx
                        fill(s, real(0))
                        multiply_nt(s, q_tile, k_tile, d, ty, tx, threads_m, threads_n)
                        probability_tile(p, s, lse_tile, scale, here, band, options)
                        hide_tile(p, real(0), here, band, options)

                        # dP = dO V^T, dbias += P (dP - delta)
                        fill(dp, real(0))
                        multiply_nt(dp, do_tile, v_tile, d_v, ty, tx, threads_m, threads_n)
                        for r in range(rows):
                            for c in range(cols):
                                ds = p[r, c] * (dp[r, c] - delta_tile[ty + r * threads_m])
                                acc[r, c] += real(0) if p[r, c] <= real(0) else ds

        # epilogue: sum the rows and columns that are one row or one column of dbias
        scatter(sum_tile, acc, ty, tx, threads_m, threads_n)
        cuda.syncthreads()      # or sums lack what other threads have found
        out_rows = 1 if one_row else block_m
        out_cols = 1 if one_col else block_n
        for place in range(thread, out_rows * out_cols, threads):
            row, col = place // out_cols, place % out_cols
            total = real(0)
            for r in range(row, block_m if one_row else row + 1):
                for c in range(col, block_n if one_col else col + 1):
                    total += sum_tile[r, c]
            if own_i + row < dbias.shape[2] and own_j + col < dbias.shape[3]:
                dbias[own_b, own_h, own_i + row, own_j + col] = total

    signature = ((array_type(spec.dtype, 4),) * 4 + (real_array(spec.dtype, 3),) * 2 + (real_array(spec.dtype, 4),)
                 + option_types(spec))
    return dbias_kernel, signature
