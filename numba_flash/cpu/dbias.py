"""The gradient of a bias that was broadcast, on the CPU: dS summed over the axes along which the bias was repeated.

A pass of its own over the tiles. A task owns a part of dbias, alone, and goes through all the heads and tiles that are
summed there; so nothing of the size of S is ever stored, and the result is repeatable.
"""

from numba import njit

from ..scores import seen_keys
from .hooks import Options
from .recompute import load_keys, load_queries, recompute, seeing_columns, take_pairs, take_queries
from .simd import width
from .threads import next_task
from .tiles import round_up

# Keys that a task owns: so many that packing the queries is little beside the work on them.
KEYS_PER_TASK = 1024


def task_count(dbias_shape, block_m):
    """Tasks that `bias_gradient` has."""
    batch, heads, n_q, n_k = dbias_shape
    return batch * heads * -(-n_q // block_m) * -(-n_k // KEYS_PER_TASK)


def bias_gradient(q, k, v, do, o, lse, dlse, dbias, has_dlse,
                  alibi_slopes, bias, mask, sinks, scale, softcap, offset, left, right,
                  has_alibi, has_bias, has_mask, bfloat16, block_m, block_n, counter, scratch):
    """Work off parts of dbias until `counter` has none left."""
    batch, heads, n_q, d = q.shape
    kv_heads, n_k, d_v = v.shape[1:]
    group = heads // kv_heads
    options = Options(offset, left, right, softcap, has_alibi, has_bias, has_mask, alibi_slopes, bias, mask)
    queries, rest = take_queries(scratch, block_m, d, d_v)
    pairs, rest = take_pairs(rest, block_m, block_n, d, d_v)
    db_batch, db_heads, db_queries, db_keys = dbias.shape
    q_parts = round_up(db_queries, block_m) // block_m
    k_parts = round_up(db_keys, KEYS_PER_TASK) // KEYS_PER_TASK

    while True:
        task = next_task(counter)
        if task >= db_batch * db_heads * q_parts * k_parts:
            break
        head, part = divmod(task, q_parts * k_parts)
        db_b, db_h = divmod(head, db_heads)
        i_part, j_part = divmod(part, k_parts)
        i_begin, i_end = _part(i_part, block_m, db_queries, n_q)
        j_begin, j_end = _part(j_part, KEYS_PER_TASK, db_keys, n_k)
        db = dbias[db_b, db_h]
        db[i_begin:i_end, j_begin:j_end] = 0

        for b in _repeats(db_b, db_batch, batch):
            for h in _repeats(db_h, db_heads, heads):
                for i in range(i_begin, i_end, block_m):
                    i_stop = min(i + block_m, i_end)
                    load_queries(queries, q, do, o, lse, dlse, has_dlse, scale, options, b, h, i, i_stop, n_k, bfloat16)
                    seen = seen_keys(i, i_stop, offset, left, right, n_k)
                    j_last = min(j_end, seen[1])
                    for j in range(max(j_begin, seen[0]), j_last, block_n):
                        j_stop = min(j + block_n, j_last)
                        has_hidden = load_keys(pairs, k, v, options, b, h, h // group, i, i_stop, j, j_stop, bfloat16)
                        first, stop = seeing_columns(options, i, i_stop, j, j_stop, width(pairs.p))
                        recompute(queries, pairs, options, has_hidden, b, h, i, j, j_stop - j, first, stop, n_q)
                        add_sums(db, pairs.ds[:j_stop - j, first:stop], i + first, j)


@njit
def _part(index, size, db_length, length):
    """Positions along an axis that belong to a part of dbias: all of them where the axis is summed."""
    return (0, length) if db_length == 1 else (index * size, min((index + 1) * size, length))


@njit
def _repeats(index, db_length, length):
    """Batches, or heads, that belong to one index of dbias."""
    return range(length) if db_length == 1 else range(index, index + 1)


@njit
def add_sums(db, ds, i, j):
    """Add dS^T of a tile at query i and key j to dbias; summed first, within the tile, along an axis of size 1."""
    rows, columns = ds.shape
    if db.shape[0] == 1:
        for r in range(rows):
            ds[r, 0] = ds[r].sum()
        i, columns = 0, 1
    if db.shape[1] == 1:
        for c in range(columns):
            ds[0, c] = ds[:, c].sum()
        j, rows = 0, 1
    for c in range(columns):
        for r in range(rows):
            db[i + c, j + r] += ds[r, c]
