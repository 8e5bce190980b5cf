"""The rungs of the ladder: the engines that the package has, and memory-efficient attention, which is none of them."""

from numba_flash import arrays, attention, attention_backward, engines, merge_states

from .contest import Call, engine

CHUNK = 2048            # queries, and keys, of a chunk


def ladder(table=engines.ON_GPU):
    """Rivals by name, from the first idea to the last: an engine that the package gets appears by itself."""
    later = [name for name in reversed(table) if name != "standard"]
    return {"standard": engine("standard"), "memory-efficient": memory_efficient,
            **{name: engine(name) for name in later}}


def memory_efficient(inputs, backward, causal=False, **options):
    """A rival: attention by chunks of queries and keys, each as `standard` does it, merged at the end.

    Rabe and Staats, arXiv 2112.05682, as `reference.memory_efficient_attention`, of as many queries as keys.
    """
    if options:
        raise NotImplementedError(f"memory-efficient attention has no {', '.join(options)} here")
    do, q, k, v = inputs.arrays
    if not backward:
        return Call(lambda: forward(q, k, v, causal)[:1])
    o, lse = forward(q, k, v, causal)
    return Call(lambda: gradients(do, q, k, v, o, lse, causal))


def chunks(n):
    """The chunks of n rows, as slices."""
    return [slice(first, min(first + CHUNK, n)) for first in range(0, n, CHUNK)]


def pairs(n, causal):
    """Chunks of queries and of keys that they see, and whether a mask goes between them."""
    for rows in chunks(n):
        yield rows, [(cols, causal and cols == rows) for cols in chunks(n) if not causal or cols.start <= rows.start]


def forward(q, k, v, causal):
    """o and lse."""
    parts = []
    for rows, seen in pairs(q.shape[2], causal):
        parts.append(merge_states([attention(q[:, :, rows], k[:, :, cols], v[:, :, cols], causal=masked,
                                             return_lse=True, kernel="standard") for cols, masked in seen]))
    concatenate = arrays.namespace(q).concatenate
    return tuple(concatenate(x, 2) for x in zip(*parts))


def gradients(do, q, k, v, o, lse, causal):
    """dq, dk, dv, summed in float32."""
    xp = arrays.namespace(q)
    dq, dk, dv = sums = [xp.zeros(x.shape, lse.dtype) for x in (q, k, v)]
    for rows, seen in pairs(q.shape[2], causal):
        for cols, masked in seen:
            part = attention_backward(do[:, :, rows], q[:, :, rows], k[:, :, cols], v[:, :, cols], o[:, :, rows],
                                      lse[:, :, rows], causal=masked, kernel="standard")
            for total, at, x in ((dq, rows, part[0]), (dk, cols, part[1]), (dv, cols, part[2])):
                total[:, :, at] += x.astype(total.dtype)
    return tuple(x.astype(q.dtype) for x in sums)
