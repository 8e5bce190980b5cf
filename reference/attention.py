"""Attention, from five operations on whole matrices to FlashAttention-2, one idea at a time.

==============================  ================================================================
`standard_attention`            S and P as whole matrices: the definition, and the oracle
`memory_efficient_attention`    chunks that know nothing of each other, put together at the end
`two_pass_attention`            online softmax over the keys, then a second pass for o
`one_pass_attention`            o joins the recurrence: no second pass
`tiled_attention`               the recurrence takes block_n keys at a step
`flash_attention_1`             tiles of queries too; K/V outside, so o, m, l go to and fro
`flash_attention_2`             Q outside, so o, m, l stay on chip; one division at the end
==============================  ================================================================

All of them take the same arrays and options, those of `reference.problem.Problem`, and compute in
float64.  Everything is (batch, heads, n, d); m, l and alpha are (batch, heads, rows, 1).  "On chip"
is a local variable here, "memory" an array that is indexed by `rows` or `cols`.
"""

import numpy as np

from .problem import Problem, tiles
from .softmax import divide, exp_diff, log_sum


def softmax_with_sink(s, sinks):
    """P and lse of masked scores, three passes as in `safe_softmax`, with the sink in the sum."""
    m = np.maximum(s.max(axis=-1, keepdims=True, initial=-np.inf), sinks)
    l = exp_diff(s, m).sum(axis=-1, keepdims=True) + exp_diff(sinks, m)
    return divide(exp_diff(s, m), l), log_sum(m, l)


def online_softmax_step(m, l, s):
    """One step of `online_softmax` that takes a whole tile of scores.

    Parameters
    ----------
    m, l : arrays of shape (batch, heads, rows, 1)
        Maximum and sum of the keys before this tile.
    s : array of shape (batch, heads, rows, cols)

    Returns
    -------
    m, alpha, p, l
        The new maximum, the factor for everything summed before, exp(s - m), the new sum.
    """
    m_new = np.maximum(m, s.max(axis=-1, keepdims=True, initial=-np.inf))
    alpha = exp_diff(m, m_new)
    p = exp_diff(s, m_new)
    return m_new, alpha, p, alpha * l + p.sum(axis=-1, keepdims=True)


def standard_attention(q, k, v, *, return_lse=False, **options):
    """softmax(Q K^T) V with S and P as whole matrices: the oracle for everything else.

    Algorithm 0 of arXiv 2205.14135 with all options, as five operations, each of which would read
    and write n_q * n_k numbers: product, score, mask, softmax, product::

        s   = scale q k^T;  s = softcap tanh(s / softcap);  s += alibi + bias
        s   = where(visible, s, -inf)
        lse = log(sum_j exp(s_j) + exp(sink));  p = exp(s - lse);  o = p v

    Parameters
    ----------
    q : array of shape (batch, heads, n_q, d)
    k : array of shape (batch, kv_heads, n_k, d)
    v : array of shape (batch, kv_heads, n_k, d_v)
        Any real dtype.  Also (heads, n, d) and (n, d).
    return_lse : bool
        Also return lse.
    **options
        scale, causal, window, softcap, alibi_slopes, bias, mask, sinks, dtype: see `Problem`.

    Returns
    -------
    o : float64 array of shape (batch, heads, n_q, d_v)
        0 for a row that sees no key.
    lse : float64 array of shape (batch, heads, n_q)
        Natural log, of the scores with everything in them; -inf for a row that sees no key and has
        no sink.

    Raises
    ------
    ValueError, TypeError
        As `Problem`.

    Examples
    --------
    Equal scores, so every query returns the mean of the values that it sees:

    >>> q, k, v = np.zeros((2, 1)), np.zeros((3, 1)), np.array([[1.0], [2.0], [6.0]])
    >>> o, lse = standard_attention(q, k, v, causal=True, return_lse=True)
    >>> o
    array([[1.5],
           [3. ]])
    >>> np.exp(lse)
    array([2., 3.])
    """
    problem = Problem(q, k, v, **options)
    s = problem.score(problem.q, problem.k)
    s = problem.hide(s)
    p, lse = softmax_with_sink(s, problem.sinks)
    o = problem.weighted_sum(p, problem.v, s != -np.inf)
    return problem.output(o, lse, return_lse)


def memory_efficient_attention(q, k, v, *, block_m=64, block_n=64, return_lse=False, **options):
    """Attention by chunks of queries and keys whose results are merged at the end.

    Figure 1 of Rabe and Staats, "Self-attention does not need O(n^2) memory", arXiv 2112.05682.
    Each chunk of keys is summed against its own maximum, as if it were alone, and leaves (o, m, l)
    in memory; the merge then brings all of them to one maximum.

    Parameters
    ----------
    q, k, v, return_lse, **options
        As in `standard_attention`.
    block_m, block_n : int
        Rows of a tile of q, and of a tile of k and v.  The last tiles may be shorter.

    Returns
    -------
    o, lse
        As `standard_attention`.

    Raises
    ------
    ValueError, TypeError
        As `Problem`; ValueError also for a block below 1.

    Examples
    --------
    >>> v = np.array([[1.0], [2.0], [6.0]])
    >>> memory_efficient_attention(np.zeros((1, 1)), np.zeros((3, 1)), v, block_n=2)
    array([[3.]])
    """
    problem = Problem(q, k, v, **options)
    o, lse = problem.zeros(problem.n_q, problem.d_v), problem.zeros(problem.n_q, 1)
    for rows in tiles(problem.n_q, block_m):
        # load Q_i
        q_i = problem.q[..., rows, :]
        parts = [(np.zeros_like(o[..., rows, :]), *problem.start(rows))]
        for cols in tiles(problem.n_k, block_n):
            # load K_j, V_j
            k_j, v_j = problem.k[..., cols, :], problem.v[..., cols, :]
            # S = Q K^T
            s = problem.score(q_i, k_j, rows, cols)
            # mask
            s = problem.hide(s, rows, cols)
            # softmax of this chunk alone: m, P, l
            m_j = s.max(axis=-1, keepdims=True)
            p = exp_diff(s, m_j)
            # O = P V
            o_j = problem.weighted_sum(p, v_j, s != -np.inf)
            parts.append((o_j, m_j, p.sum(axis=-1, keepdims=True)))
        # merge: m, alpha_j, O = sum alpha_j O_j, l = sum alpha_j l_j
        o_j, m_j, l_j = (np.stack(part) for part in zip(*parts))
        m = m_j.max(axis=0)
        alpha_j = exp_diff(m_j, m)
        l = (alpha_j * l_j).sum(axis=0)
        # epilogue: O / l, lse
        o[..., rows, :] = divide((alpha_j * o_j).sum(axis=0), l)
        lse[..., rows, :] = log_sum(m, l)
    return problem.output(o, lse, return_lse)


def two_pass_attention(q, k, v, *, return_lse=False, **options):
    """Online softmax over the keys, then a second pass that sums the values.

    The "multi-pass self-attention" of Ye, "From online softmax to FlashAttention" (2023)::

        pass 1:  m_j = max(m_{j-1}, s_j);  l_j = l_{j-1} exp(m_{j-1} - m_j) + exp(s_j - m_j)
        pass 2:  o_j = o_{j-1} + exp(s_j - m_n) / l_n v_j

    A weight is known only when the whole row has been seen, so the scores are needed twice.

    Parameters, returned values and errors are those of `standard_attention`.

    Examples
    --------
    >>> v = np.array([[1.0], [2.0], [6.0]])
    >>> two_pass_attention(np.zeros((1, 1)), np.zeros((3, 1)), v)
    array([[3.]])
    """
    problem = Problem(q, k, v, **options)
    keys = tiles(problem.n_k, 1)
    m, l = problem.start()
    scores = []
    for j in keys:
        s_j = problem.hide(problem.score(problem.q, problem.k[..., j, :], cols=j), cols=j)
        m_old, m = m, np.maximum(m, s_j)
        l = l * exp_diff(m_old, m) + exp_diff(s_j, m)
        scores.append(s_j)

    o = problem.zeros(problem.n_q, problem.d_v)
    for j, s_j in zip(keys, scores):
        p = divide(exp_diff(s_j, m), l)
        o = o + problem.weighted_sum(p, problem.v[..., j, :], s_j != -np.inf)
    return problem.output(o, log_sum(m, l), return_lse)


def one_pass_attention(q, k, v, *, return_lse=False, **options):
    """The row recurrence of FlashAttention: o joins m and l, and one pass is enough.

    Ye, "From online softmax to FlashAttention" (2023).  o_j is the attention over the first j keys,
    and only the *last* o must be right, so it may be rescaled on the way like l::

        m_j = max(m_{j-1}, s_j)
        l_j = l_{j-1} exp(m_{j-1} - m_j) + exp(s_j - m_j)
        o_j = (o_{j-1} l_{j-1} exp(m_{j-1} - m_j) + exp(s_j - m_j) v_j) / l_j

    Parameters, returned values and errors are those of `standard_attention`.

    Examples
    --------
    >>> v = np.array([[1.0], [2.0], [6.0]])
    >>> one_pass_attention(np.zeros((1, 1)), np.zeros((3, 1)), v)
    array([[3.]])
    """
    problem = Problem(q, k, v, **options)
    o = problem.zeros(problem.n_q, problem.d_v)
    m, l = problem.start()
    for j in tiles(problem.n_k, 1):
        s_j = problem.hide(problem.score(problem.q, problem.k[..., j, :], cols=j), cols=j)
        m_old, m = m, np.maximum(m, s_j)
        alpha, p = exp_diff(m_old, m), exp_diff(s_j, m)
        l_old, l = l, l * alpha + p
        pv = problem.weighted_sum(p, problem.v[..., j, :], s_j != -np.inf)
        o = divide(o * l_old * alpha + pv, l)
    return problem.output(o, log_sum(m, l), return_lse)


def tiled_attention(q, k, v, *, block_n=64, return_lse=False, **options):
    """The recurrence of `one_pass_attention`, `block_n` keys at a step.

    Ye, "From online softmax to FlashAttention" (2023), section "tiling".  With m over a tile of
    scores and sums over its columns nothing else changes; o is still normalised at each step.

    Parameters, returned values and errors are those of `memory_efficient_attention`, without
    block_m: all rows of q make one tile.

    Examples
    --------
    >>> v = np.array([[1.0], [2.0], [6.0]])
    >>> tiled_attention(np.zeros((1, 1)), np.zeros((3, 1)), v, block_n=2)
    array([[3.]])
    """
    problem = Problem(q, k, v, **options)
    o = problem.zeros(problem.n_q, problem.d_v)
    m, l = problem.start()
    for cols in tiles(problem.n_k, block_n):
        # load K_j, V_j
        k_j, v_j = problem.k[..., cols, :], problem.v[..., cols, :]
        # S = Q K^T
        s = problem.score(problem.q, k_j, cols=cols)
        # mask
        s = problem.hide(s, cols=cols)
        # online softmax: m, alpha, P, l
        l_old = l
        m, alpha, p, l = online_softmax_step(m, l, s)
        # O = (alpha l_old O + P V) / l
        o = divide(alpha * l_old * o + problem.weighted_sum(p, v_j, s != -np.inf), l)
    # epilogue: lse
    return problem.output(o, log_sum(m, l), return_lse)


def flash_attention_1(q, k, v, *, block_m=64, block_n=64, return_lse=False, **options):
    """FlashAttention-1: K/V tiles outside, query tiles inside, o, m and l in memory.

    Algorithm 1 of Dao et al., arXiv 2205.14135.  A tile of K and V is read once; for each, *all* of
    q, o, m and l are read, and o, m, l written, with o normalised after every step.  The paper sums
    a tile against its own maximum and rescales both sums; here, as in the recurrence, one maximum
    serves both.

    Parameters, returned values and errors are those of `memory_efficient_attention`; block_m and
    block_n are B_r and B_c of the paper.

    Examples
    --------
    >>> v = np.array([[1.0], [2.0], [6.0]])
    >>> flash_attention_1(np.zeros((1, 1)), np.zeros((3, 1)), v, block_m=2, block_n=2)
    array([[3.]])
    """
    problem = Problem(q, k, v, **options)
    o = problem.zeros(problem.n_q, problem.d_v)
    m, l = (np.array(x) for x in problem.start())
    for cols in tiles(problem.n_k, block_n):
        # load K_j, V_j
        k_j, v_j = problem.k[..., cols, :], problem.v[..., cols, :]
        for rows in tiles(problem.n_q, block_m):
            # load Q_i, O_i, m_i, l_i
            q_i, o_i = problem.q[..., rows, :], o[..., rows, :]
            m_i, l_old = m[..., rows, :], l[..., rows, :]
            # S = Q K^T
            s = problem.score(q_i, k_j, rows, cols)
            # mask
            s = problem.hide(s, rows, cols)
            # online softmax: m, alpha, P, l
            m_i, alpha, p, l_i = online_softmax_step(m_i, l_old, s)
            # O = (alpha l_old O + P V) / l
            o_i = divide(alpha * l_old * o_i + problem.weighted_sum(p, v_j, s != -np.inf), l_i)
            # store O_i, m_i, l_i
            o[..., rows, :], m[..., rows, :], l[..., rows, :] = o_i, m_i, l_i
    # epilogue: lse
    return problem.output(o, log_sum(m, l), return_lse)


def flash_attention_2(q, k, v, *, block_m=64, block_n=64, return_lse=False, **options):
    """FlashAttention-2: query tiles outside, K/V tiles inside, o, m and l on chip.

    Algorithm 1 of Dao, arXiv 2307.08691.  The loops of FlashAttention-1 change places: each query
    tile is finished alone, so query tiles run in parallel and nothing but o and lse is written.
    As o stays on chip it need not be a valid answer before the end: it is left unnormalised, and
    the division moves out of the loop.

    Parameters, returned values and errors are those of `memory_efficient_attention`; block_m and
    block_n are B_r and B_c of the paper.

    Examples
    --------
    >>> v = np.array([[1.0], [2.0], [6.0]])
    >>> flash_attention_2(np.zeros((1, 1)), np.zeros((3, 1)), v, block_m=2, block_n=2)
    array([[3.]])
    """
    problem = Problem(q, k, v, **options)
    o, lse = problem.zeros(problem.n_q, problem.d_v), problem.zeros(problem.n_q, 1)
    for rows in tiles(problem.n_q, block_m):
        # load Q_i
        q_i = problem.q[..., rows, :]
        o_i = np.zeros_like(o[..., rows, :])
        m, l = problem.start(rows)
        for cols in tiles(problem.n_k, block_n):
            # load K_j, V_j
            k_j, v_j = problem.k[..., cols, :], problem.v[..., cols, :]
            # S = Q K^T
            s = problem.score(q_i, k_j, rows, cols)
            # mask
            s = problem.hide(s, rows, cols)
            # online softmax: m, alpha, P, l
            m, alpha, p, l = online_softmax_step(m, l, s)
            # O = alpha O + P V
            o_i = alpha * o_i + problem.weighted_sum(p, v_j, s != -np.inf)
        # epilogue: O / l, lse
        o[..., rows, :] = divide(o_i, l)
        lse[..., rows, :] = log_sum(m, l)
    return problem.output(o, lse, return_lse)
