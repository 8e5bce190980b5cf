"""FlashAttention-2, forward, on the CPU: Algorithm 1 of Dao (2023).

A task is one tile of queries (Q_i) of one head; it goes through the keys and values in tiles (K_j, V_j). Everything is
done on transposed tiles, S^T = K Q^T and O^T = V^T P^T, with queries along the vector registers: the softmax then never
needs a sum or a maximum across a register, K_j and V_j are multiplied as they lie in memory, and P^T comes out of the
softmax as the next multiply wants it. A *panel* is as many queries of a tile as a block of registers is wide (two
vectors): its S^T stays in L1.
"""

from math import exp as scalar_exp
from math import log

import numpy as np
from numba import njit

from ..scores import seen_keys, shared_keys
from .hooks import Options, hide, is_seen, shape_scores
from .simd import ROWS, exp, fma, load_row, maximum, store, width, zero_row
from .tiles import fill, is_finite, load, multiply, multiply_add, pitch, round_up, scale_by, take, transpose, unload
from .threads import next_task


def scratch_elements(block_m, block_n, d, d_v, itemsize):
    """Elements of scratch memory that one worker of `forward` takes."""
    def tile(rows, columns):
        return rows * pitch(columns, itemsize)

    d_v = round_up(d_v, ROWS)
    return (tile(block_m, d) + tile(d, block_m) + tile(block_n, d) + tile(block_n, d_v) + tile(block_n, 1)
            + tile(d_v, block_m) + tile(block_m, d_v) + 2 * tile(1, block_m))


def forward(q, k, v, o, lse, alibi_slopes, bias, mask, sinks, scale, softcap, offset, left, right,
            has_alibi, has_bias, has_mask, bfloat16, block_m, block_n, counter, scratch):
    """Work off query tiles until `counter` has none left."""
    batch, heads, n_q, d = q.shape
    n_k, d_v = v.shape[2:]
    group = heads // k.shape[1]
    options = Options(offset, left, right, softcap, has_alibi, has_bias, has_mask, alibi_slopes, bias, mask)
    q_i, rest = take(scratch, block_m, d)
    q_t, rest = take(rest, d, block_m)
    k_j, rest = take(rest, block_n, d)
    v_j, rest = take(rest, block_n, round_up(d_v, ROWS))
    s, rest = take(rest, block_n, 1)
    o_t, rest = take(rest, round_up(d_v, ROWS), block_m)
    o_i, rest = take(rest, block_m, round_up(d_v, ROWS))
    m, rest = take(rest, 1, block_m)
    l, rest = take(rest, 1, block_m)
    panel = s.shape[1]
    lowest = np.finfo(scratch.dtype).min
    tiles = round_up(n_q, block_m) // block_m

    while True:
        task = next_task(counter)
        if task >= batch * heads * tiles:
            break
        b, h = divmod(task // tiles, heads)
        i_first = (tiles - 1 - task % tiles) * block_m      # the last first: under a causal mask they are the longest
        i_stop = min(i_first + block_m, n_q)

        # load Q_i
        load(q_i, q[b, h, i_first:i_stop], bfloat16)
        scale_by(q_i, scale)
        transpose(q_t, q_i)
        fill(o_t, 0)
        fill(m, lowest)
        fill(l, 0)

        j_first, j_end = seen_keys(i_first, i_stop, offset, left, right, n_k)
        # Tiles of keys are cut at the same places for all queries, so that results do not depend on block_m.
        for j in range(j_first // block_n * block_n, j_end, block_n):
            # load K_j, V_j
            j_stop = min(j + block_n, j_end)
            load(k_j, k[b, h // group, j:j_stop], bfloat16)
            load(v_j, v[b, h // group, j:j_stop], bfloat16)
            v_is_finite = is_finite(v_j)
            for column in range(0, i_stop - i_first, panel):
                i = i_first + column
                row, keys = _panel_keys(i, min(i + panel, n_q), j, j_stop, offset, left, right)
                if keys <= 0:
                    continue
                shared = shared_keys(i, min(i + panel, n_q), offset, left, right, n_k)
                has_hidden = j + row < shared[0] or j + row + keys > shared[1] or has_mask or has_bias

                # S = Q K^T
                multiply(s[:round_up(keys, ROWS)], k_j[row:], q_t[:, column:column + panel])
                s_j = s[:keys]
                shape_scores(s_j, options, b, h, i, j + row, n_q)

                # mask
                if has_hidden:
                    hide(s_j, options, b, h, i, j + row, n_q)

                # online softmax: m, alpha, P, l
                alpha = online_softmax(s_j, m, l, column)

                # O = alpha O + P V
                o_panel, values = o_t[:, column:column + panel], v_j[row:row + keys]
                if has_hidden and not v_is_finite:
                    add_seen_values(o_panel, alpha, s_j, values, options, b, h, i, j + row, n_q)
                else:
                    multiply_add(o_panel, values.T, s_j, alpha)

        # epilogue: O / l, lse
        finish(o_t, m, l, lse[b, h, i_first:i_stop], sinks[h])
        transpose(o_i, o_t)
        unload(o[b, h, i_first:i_stop], o_i, bfloat16)


@njit
def _panel_keys(i, i_stop, j, j_stop, offset, left, right):
    """Which rows of a key tile the queries of a panel see: the first, rounded down to a whole block, and how many."""
    first, stop = seen_keys(i, i_stop, offset, left, right, j_stop)
    row = max(first - j, 0) // ROWS * ROWS
    return row, stop - j - row


@njit
def online_softmax(s, m, l, column):
    """Turn S^T into P^T = exp(S - m) in place, update m and l of its queries, and return alpha.

    m starts from the lowest finite number: a hidden score, -inf, is then below every m, and its p is exactly 0.
    """
    m_old = load_row(m, 0, column)
    m_new = m_old
    for r in range(s.shape[0]):
        m_new = maximum(load_row(s, r, 0), m_new)
    alpha = exp(m_old - m_new)
    l_tile = zero_row(s)
    for r in range(s.shape[0]):
        p = exp(load_row(s, r, 0) - m_new)
        l_tile = l_tile + p
        store(p, s, r, 0)
    store(m_new, m, 0, column)
    store(fma(load_row(l, 0, column), alpha, l_tile), l, 0, column)
    return alpha


@njit
def add_seen_values(o_t, alpha, p, v, options, b, h, i, j, n_q):
    """O = alpha O + P V over the pairs that are seen: a hidden value may be NaN or Inf, which 0 does not hide."""
    scale_by(o_t, alpha)
    for c in range(min(p.shape[1], n_q - i)):
        for r in range(p.shape[0]):
            if is_seen(options, b, h, i + c, j + r):
                for e in range(v.shape[1]):
                    o_t[e, c] += p[r, c] * v[r, e]


@njit
def finish(o_t, m, l, lse, sink):
    """Take the sink (-inf: none) in, divide O by l, and write lse. A query that saw no key has l = 0, and o = 0."""
    for c in range(len(lse)):
        largest = max(m[0, c], sink)
        factor = scalar_exp(m[0, c] - largest)
        total = l[0, c] * factor + scalar_exp(sink - largest)
        lse[c] = largest + log(total) if total != 0 else -np.inf
        l[0, c] = total / factor if total != 0 else 1
    for r in range(o_t.shape[0]):
        for c in range(0, o_t.shape[1], width(o_t)):
            store(load_row(o_t, r, c) / load_row(l, 0, c), o_t, r, c)
