"""How many bytes each algorithm moves between memory (HBM) and chip, for one head.

A fused kernel wins because it moves less, not because it computes less, so the count is the thing
to know, and a profiler's count can be held against it.  Every function counts what its algorithm in
`reference.attention` or `reference.backward` loads and stores, whatever a cache may save on top;
batch and heads multiply the result.  Masks are not counted, nor tiles that they let a kernel skip.

Common parameters: `n_q`, `n_k`, `d`, `d_v` are sizes (d_v = d if not given), `block_m` and
`block_n` the rows of a query tile and of a K/V tile, `itemsize` the bytes of one number of q, k, v,
o, s, p and the gradients.  m, l, lse and delta are float32, one number for each row.
"""

import math
from typing import NamedTuple

STAT = 4  # bytes of one m, l, lse or delta


class Traffic(NamedTuple):
    """Bytes read from memory and written to it.

    Examples
    --------
    >>> Traffic(read=6, written=2).total
    8
    """

    read: int
    written: int

    @property
    def total(self):
        """Bytes moved either way."""
        return self.read + self.written


def tile_sizes(sram_bytes, d, *, itemsize=2):
    """block_m and block_n that FlashAttention-1 takes for a chip memory of `sram_bytes`.

    Line 1 of Algorithm 1, arXiv 2205.14135: B_c = ceil(M / 4d), B_r = min(B_c, d), with M in
    numbers; four tiles (q, k, v, o) then fill the chip.

    Parameters
    ----------
    sram_bytes, d, itemsize : int

    Returns
    -------
    block_m, block_n : int

    Raises
    ------
    ValueError
        If a size is below 1.

    Examples
    --------
    >>> tile_sizes(96 * 1024, 64)
    (64, 192)
    """
    _check(sram_bytes=sram_bytes, d=d, itemsize=itemsize)
    block_n = math.ceil(sram_bytes / (4 * d * itemsize))
    return min(block_n, d), block_n


class _Bytes:
    """Bytes of each whole array, and how many tiles q and k fall into."""

    def __init__(self, n_q, n_k, d, d_v, itemsize, block_m=1, block_n=1):
        d_v = d if d_v is None else d_v
        _check(d=d, d_v=d_v, itemsize=itemsize, block_m=block_m, block_n=block_n)
        if min(n_q, n_k) < 0:
            raise ValueError(f"n_q and n_k must be at least 0, got {n_q} and {n_k}")
        self.q, self.o = n_q * d * itemsize, n_q * d_v * itemsize
        self.k, self.v = n_k * d * itemsize, n_k * d_v * itemsize
        self.s = n_q * n_k * itemsize
        self.stat = n_q * STAT
        self.q_tiles, self.k_tiles = math.ceil(n_q / block_m), math.ceil(n_k / block_n)


def _check(**sizes):
    """Raise a ValueError if a size is below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")


def standard_attention_traffic(n_q, n_k, d, d_v=None, *, itemsize=2, extra_passes=0):
    """Bytes moved by `standard_attention`: Theta(N d + N^2), Theorem 2 of arXiv 2205.14135.

    ============  =======  =======
    operation     reads    writes
    ============  =======  =======
    S = Q K^T     q, k     s
    P = softmax   s        p
    O = P V       p, v     o
    ============  =======  =======

    Parameters
    ----------
    n_q, n_k, d, d_v, itemsize : int
        See the module.
    extra_passes : int
        Passes over s between product and softmax that are not fused with either: scale, mask.

    Returns
    -------
    Traffic

    Raises
    ------
    ValueError
        If n_q or n_k is below 0, or another size below 1.

    Examples
    --------
    >>> standard_attention_traffic(1024, 1024, 64)
    Traffic(read=4587520, written=4325376)
    """
    x = _Bytes(n_q, n_k, d, d_v, itemsize)
    passes = (1 + extra_passes) * x.s
    return Traffic(read=x.q + x.k + passes + x.s + x.v, written=x.s + passes + x.o)


def memory_efficient_attention_traffic(n_q, n_k, d, d_v=None, *, block_m, block_n, itemsize=2):
    """Bytes moved by `memory_efficient_attention`: less memory than standard, not less traffic.

    As published (arXiv 2112.05682) the three operations on a chunk are separate, so s and p pass
    through memory chunk by chunk, Theta(N^2) in all, and each pair of chunks leaves o, m and l:

    ============  =================================  ==============================
    operation     reads                              writes
    ============  =================================  ==============================
    S = Q K^T     q per key chunk, k per q chunk     s
    m, P, l       s                                  p; m, l per key chunk
    O_j = P V     p; v per query chunk               o per key chunk
    merge         o, m, l per key chunk              o, lse
    ============  =================================  ==============================

    Parameters, returned value and errors are those of `flash_attention_1_traffic`.

    Examples
    --------
    >>> memory_efficient_attention_traffic(1024, 1024, 64, block_m=256, block_n=512).read
    5783552
    """
    x = _Bytes(n_q, n_k, d, d_v, itemsize, block_m, block_n)
    parts = x.k_tiles * (x.o + 2 * x.stat)
    return Traffic(read=x.k_tiles * x.q + x.q_tiles * (x.k + x.v) + 2 * x.s + parts,
                   written=2 * x.s + parts + x.o + x.stat)


def flash_attention_1_traffic(n_q, n_k, d, d_v=None, *, block_m, block_n, itemsize=2, o_itemsize=None):
    """Bytes moved by `flash_attention_1`: Theta(N^2 d^2 / M), Theorem 2 of arXiv 2205.14135.

    K and V are read once.  For each of the T_c = n_k / block_n tiles of them, all of q, o, m and l
    is read, and o, m, l written; they start with one write of zeros.  The traffic is T_c passes
    over N d numbers.  With M numbers on chip the paper takes block_n = M / 4d, so T_c = 4 N d / M::

        T_c * N d = 4 N^2 d^2 / M

    that is, less than the N^2 of `standard_attention` by a factor of about M / d^2, as long as a
    d x d matrix fits on chip.  lse = m + log(l) is left to whoever needs it.

    Parameters
    ----------
    n_q, n_k, d, d_v, block_m, block_n, itemsize : int
        See the module; `tile_sizes` gives the blocks of the paper.
    o_itemsize : int, optional
        Of o while it is corrected, if that is not `itemsize`.

    Returns
    -------
    Traffic

    Raises
    ------
    ValueError
        If n_q or n_k is below 0, or another size below 1.

    Examples
    --------
    >>> flash_attention_1_traffic(1024, 1024, 64, block_m=64, block_n=192)
    Traffic(read=1884160, written=974848)
    """
    x = _Bytes(n_q, n_k, d, d_v, itemsize, block_m, block_n)
    o = x.o if o_itemsize is None else _Bytes(n_q, n_k, d, d_v, o_itemsize).o
    state = o + 2 * x.stat
    return Traffic(read=x.k + x.v + x.k_tiles * (x.q + state), written=(x.k_tiles + 1) * state)


def flash_attention_2_traffic(n_q, n_k, d, d_v=None, *, block_m, block_n, itemsize=2):
    """Bytes moved by `flash_attention_2`: still Theta(N^2 d^2 / M), and o is written once.

    q is read once, o and lse are written once (arXiv 2307.08691, Algorithm 1).  For each of the
    T_r = n_q / block_m query tiles, all of k and v is read: T_r * 2 N d numbers, with block_m of
    the order of M / d.  block_n does not matter, and nothing is ever read back.

    Parameters, returned value and errors are those of `flash_attention_1_traffic`.

    Examples
    --------
    >>> flash_attention_2_traffic(1024, 1024, 64, block_m=128, block_n=64)
    Traffic(read=2228224, written=135168)
    """
    x = _Bytes(n_q, n_k, d, d_v, itemsize, block_m, block_n)
    return Traffic(read=x.q + x.q_tiles * (x.k + x.v), written=x.o + x.stat)


def standard_attention_backward_traffic(n_q, n_k, d, d_v=None, *, itemsize=2):
    """Bytes moved by `standard_attention_backward` if p was kept: Theta(N d + N^2).

    Algorithm 3 of arXiv 2205.14135:

    ===================  =======  =======
    operation            reads    writes
    ===================  =======  =======
    dV = P^T dO          p, do    dv
    dP = dO V^T          do, v    dp
    dS = P (dP - delta)  p, dp    ds
    dQ = dS K            ds, k    dq
    dK = dS^T Q          ds, q    dk
    ===================  =======  =======

    Parameters, returned value and errors are those of `standard_attention_traffic`.

    Examples
    --------
    >>> standard_attention_backward_traffic(1024, 1024, 64)
    Traffic(read=11141120, written=4587520)
    """
    x = _Bytes(n_q, n_k, d, d_v, itemsize)
    return Traffic(read=5 * x.s + 2 * x.o + x.q + x.k + x.v, written=2 * x.s + x.q + x.k + x.v)


def memory_efficient_attention_backward_traffic(n_q, n_k, d, d_v=None, *, block_m, block_n,
                                                itemsize=2):
    """Bytes moved by the gradient of `memory_efficient_attention`: Theta(N^2).

    arXiv 2112.05682 computes each chunk again and then takes its gradient, operation by operation,
    as `standard_attention_backward` does for the whole; dq, dk and dv start as zeros and are read
    and written by each chunk.

    ===================  =============================================  =======================
    operation            reads                                          writes
    ===================  =============================================  =======================
    delta                do, o                                          delta
    S = Q K^T            q per key chunk, k per query chunk             s
    P = exp(S - lse)     s; lse per key chunk                           p
    dV += P^T dO         p; do per key chunk, dv per query chunk        dv per query chunk
    dP = dO V^T          do per key chunk, v per query chunk            dp
    dS = P (dP - delta)  p, dp; delta per key chunk                     ds
    dQ += dS K           ds; k per query chunk, dq per key chunk        dq per key chunk
    dK += dS^T Q         ds; q per key chunk, dk per query chunk        dk per query chunk
    ===================  =============================================  =======================

    Parameters, returned value and errors are those of `flash_attention_1_traffic`.

    Examples
    --------
    >>> t = memory_efficient_attention_backward_traffic(1024, 1024, 64, block_m=256, block_n=512)
    >>> t.read > 6 * 1024 * 1024 * 2
    True
    """
    x = _Bytes(n_q, n_k, d, d_v, itemsize, block_m, block_n)
    summed = x.k_tiles * x.q + x.q_tiles * (x.k + x.v)
    return Traffic(
        read=(2 * x.o + 6 * x.s + summed
              + x.k_tiles * (2 * x.q + 2 * x.o + 2 * x.stat) + x.q_tiles * (2 * x.k + x.v)),
        written=x.stat + 4 * x.s + (x.q + x.k + x.v) + summed)


def flash_attention_1_backward_traffic(n_q, n_k, d, d_v=None, *, block_m, block_n, itemsize=2):
    """Bytes moved by `flash_attention_1_backward`: Theta(N^2 d^2 / M), Theorem 5 of 2205.14135.

    k and v are read once, dk and dv written once.  For each of the n_k / block_n tiles of them, all
    of q, o, do, lse and dq is read, and dq written; dq starts with one write of zeros.

    Parameters, returned value and errors are those of `flash_attention_1_traffic`.

    Examples
    --------
    >>> flash_attention_1_backward_traffic(1024, 1024, 64, block_m=64, block_n=192)
    Traffic(read=3432448, written=1179648)
    """
    x = _Bytes(n_q, n_k, d, d_v, itemsize, block_m, block_n)
    return Traffic(read=x.k + x.v + x.k_tiles * (2 * x.q + 2 * x.o + x.stat),
                   written=(x.k_tiles + 1) * x.q + x.k + x.v)


def flash_attention_2_backward_traffic(n_q, n_k, d, d_v=None, *, block_m, block_n, itemsize=2,
                                       atomic_dq=False):
    """Bytes moved by `flash_attention_2_backward`: Theta(N^2 d^2 / M).

    ===============  ==========================================  ===========
    step             reads                                       writes
    ===============  ==========================================  ===========
    1. delta         o, do                                       delta
    2. dk, dv        k, v; q, do, lse, delta per K/V tile        dk, dv
    3. dq            q, do, lse, delta; k, v per query tile      dq
    ===============  ==========================================  ===========

    Parameters
    ----------
    n_q, n_k, d, d_v, block_m, block_n, itemsize : int
        See the module.
    atomic_dq : bool
        Count Algorithm 2 of arXiv 2307.08691 as published, without step 3: step 2 reads and writes
        dq once per K/V tile, and dq starts with one write of zeros.

    Returns
    -------
    Traffic

    Raises
    ------
    ValueError
        As `flash_attention_1_traffic`.

    Examples
    --------
    >>> flash_attention_2_backward_traffic(1024, 1024, 64, block_m=128, block_n=128)
    Traffic(read=5054464, written=397312)
    """
    x = _Bytes(n_q, n_k, d, d_v, itemsize, block_m, block_n)
    rows, keys = x.q + x.o + 2 * x.stat, x.k + x.v
    read, written = 2 * x.o + keys + x.k_tiles * rows, x.stat + keys
    if atomic_dq:
        return Traffic(read + x.k_tiles * x.q, written + (x.k_tiles + 1) * x.q)
    return Traffic(read + rows + x.q_tiles * keys, written + x.q)
