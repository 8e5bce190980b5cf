"""FlashAttention-2, backward, on the CPU: Algorithm 2 of Dao (2023), from o and lse.

A task is one key/value head with all the query heads that share it, or a part of their query tiles where there are
fewer heads than threads. Its dK and dV are sums that nobody else touches, so that results are repeatable without a
lock. The loops are the other way round than in the paper: Q_i and dO_i, which are needed both as they are and
transposed, are packed once and dQ_i is finished in scratch, while K_j, V_j, dK_j and dV_j pass by.
"""

from math import exp

from numba import njit

from ..scores import seen_keys
from .hooks import Options
from .recompute import load_keys, load_queries, recompute, seeing_columns, take_pairs, take_queries, tiles_elements
from .simd import ROWS, load_row, store, width
from .threads import next_task
from .tiles import fill, multiply_add, pitch, round_up, scale_by, take, unload


def scratch_elements(block_m, block_n, d, d_v, itemsize):
    """Elements of scratch memory that one worker of `backward` takes."""
    return tiles_elements(block_m, block_n, d, d_v, itemsize) + block_m * pitch(d, itemsize)


def backward(q, k, v, do, o, lse, dlse, dq, dk, dv, dk_sums, dv_sums, dsink_parts, chunks, has_dlse,
             alibi_slopes, bias, mask, sinks, scale, softcap, offset, left, right,
             has_alibi, has_bias, has_mask, bfloat16, block_m, block_n, worker, counter, scratch):
    """Work off tasks until `counter` has none left.

    `dk_sums` and `dv_sums` hold a pair of accumulators for every worker, or, with several `chunks` of a head's query
    tiles, for every task; in the latter case the caller adds them up.
    """
    batch, heads, n_q, d = q.shape
    kv_heads, n_k, d_v = v.shape[1:]
    group = heads // kv_heads
    options = Options(offset, left, right, softcap, has_alibi, has_bias, has_mask, alibi_slopes, bias, mask)
    queries, rest = take_queries(scratch, block_m, d, d_v)
    pairs, rest = take_pairs(rest, block_m, block_n, d, d_v)
    dq_i, rest = take(rest, block_m, d)
    tiles = round_up(n_q, block_m) // block_m

    while True:
        task = next_task(counter)
        if task >= batch * kv_heads * chunks:
            break
        b, g = divmod(task // chunks, kv_heads)
        slot = worker if chunks == 1 else task
        dk_sum, dv_sum = dk_sums[slot], dv_sums[slot]
        fill(dk_sum, 0)
        fill(dv_sum, 0)

        # The query tiles of a chunk are far apart, so that all chunks have as much to do under a causal mask.
        for x in range(task % chunks, group * tiles, chunks):
            h, i_first = g * group + x // tiles, x % tiles * block_m
            i_stop = min(i_first + block_m, n_q)

            # load Q_i, dO_i, L_i, D_i
            load_queries(queries, q, do, o, lse, dlse, has_dlse, scale, options, b, h, i_first, i_stop, n_k, bfloat16)
            dsink_parts[b, h, x % tiles] = sink_gradient(queries, sinks[h], i_stop - i_first)
            fill(dq_i, 0)

            j_first, j_end = seen_keys(i_first, i_stop, offset, left, right, n_k)
            for j in range(j_first, j_end, block_n):
                # load K_j, V_j
                j_stop = min(j + block_n, j_end)
                keys, rows = j_stop - j, round_up(j_stop - j, ROWS)
                has_hidden = load_keys(pairs, k, v, options, b, h, g, i_first, i_stop, j, j_stop, bfloat16)
                first, stop = seeing_columns(options, i_first, i_stop, j, j_stop, width(dq_i))

                # P, dS
                recompute(queries, pairs, options, has_hidden, b, h, i_first, j, keys, first, stop, n_q)
                p, ds = pairs.p[:rows, first:stop], pairs.ds[:rows, first:stop]
                if softcap > 0:
                    apply_slope(pairs.ds[:keys, first:stop], pairs.slope[:keys, first:stop])

                # dV += P^T dO, dK += dS^T Q, dQ += dS K
                multiply_add(dv_sum[j:j + rows], p, queries.do[first:stop], 1)
                multiply_add(dk_sum[j:j + rows], ds, queries.q[first:stop], 1)
                last = round_up(stop, ROWS)
                multiply_add(dq_i[first:last], pairs.ds[:, first:last].T, pairs.k[:keys], 1)

            # epilogue: dQ_i
            scale_by(dq_i, scale)
            unload(dq[b, h, i_first:i_stop], dq_i, bfloat16)

        if chunks == 1:
            unload(dk[b, g], dk_sum, bfloat16)
            unload(dv[b, g], dv_sum, bfloat16)


@njit
def apply_slope(ds, slope):
    """From the gradient at capped scores to that at the scores before: in place, element by element."""
    for r in range(ds.shape[0]):
        for c in range(0, ds.shape[1], width(ds)):
            store(load_row(ds, r, c) * load_row(slope, r, c), ds, r, c)


@njit
def sink_gradient(queries, sink, rows):
    """What a tile of queries adds to the gradient of its head's sink, whose dp is 0."""
    total = 0.0
    for r in range(rows):
        lse = queries.lse[0, r]
        total -= exp(sink - lse) * queries.delta[0, r]
    return total
