"""The gradients of attention: from P as a whole matrix, or from o and lse, tile by tile.

With s = score(q k^T), p = softmax(s), o = p v, and do the gradient that arrives at o::

    dv = p^T do                 dp = do v^T
    ds = p (dp - delta)         delta = rowsum(p dp) - dlse = rowsum(do o) - dlse
    dq = (ds score') k          dk = (ds score')^T q

ds is also the gradient of the bias; score' = scale (1 - tanh^2), or scale without a softcap.  The
second form of delta is the step that makes tiles possible: it needs no whole row of p.  dlse, the
gradient that arrives at lse, only shifts delta, since d lse / d s_j = p_j.  A sink is one more
score with dp = 0, hence dsink = -exp(sink - lse) delta, summed over batch and rows.

Shapes and options are those of `reference.attention`; delta and lse are (batch, heads, rows, 1).
"""

import numpy as np

from .attention import softmax_with_sink
from .problem import ALL, Problem, tiles
from .softmax import exp_diff, quiet


def incoming(problem, do, dlse):
    """do and dlse, checked; dlse is 0 where the caller has none."""
    dlse = problem.zeros(problem.n_q, 1) if dlse is None else problem.like_q("dlse", dlse)
    return problem.like_q("do", do, problem.d_v), dlse


@quiet
def row_delta(do, o, dlse):
    """delta = rowsum(dO O) - dlse: the whole row of P that dS needs, in one number."""
    return (do * o).sum(axis=-1, keepdims=True) - dlse


@quiet
def probability_gradient(do, v, s):
    """dP = dO V^T, 0 where the score is hidden, so that no hidden NaN gets further."""
    return np.where(s == -np.inf, 0, do @ v.mT)


@quiet
def score_gradients(problem, q_i, k_j, s, p, dp, delta):
    """dS = P (dP - delta), and dqk, the same by the bare product q·k; 0 where hidden."""
    ds = np.where(s == -np.inf, 0, p * (dp - delta))
    return ds, np.where(s == -np.inf, 0, ds * problem.score_derivative(q_i, k_j))


def recompute_tile(problem, rows, cols, do_i, lse_i, delta_i):
    """p, ds, dqk and visible of one tile, (batch, heads, rows, cols), from lse and delta.

    lse holds maximum and sum of the finished row, so p comes out normalised in one step.
    """
    q_i, k_j, v_j = problem.q[..., rows, :], problem.k[..., cols, :], problem.v[..., cols, :]
    # S = Q K^T
    s = problem.score(q_i, k_j, rows, cols)
    # mask
    s = problem.hide(s, rows, cols)
    # P = exp(S - lse)
    p = exp_diff(s, lse_i)
    # dP = dO V^T
    dp = probability_gradient(do_i, v_j, s)
    # dS = P (dP - delta)
    ds, dqk = score_gradients(problem, q_i, k_j, s, p, dp, delta_i)
    return p, ds, dqk, s != -np.inf


class Gradients:
    """The gradients of one call while they are summed, (batch, heads, n, d) each.

    dbias alone needs n_q * n_k numbers (before it is summed over what was broadcast), so ds is kept
    only where `need` names it.
    """

    def __init__(self, problem, need):
        need = tuple(need)
        for name in need:
            if problem.extras.get(name) is None:
                raise ValueError('need may name "bias" and "sinks", each only if the call has it, '
                                 f"got {need!r}")
        self.problem, self.need = problem, need
        self.dq = problem.zeros(problem.n_q, problem.d)
        self.dk = problem.zeros(problem.n_k, problem.d)
        self.dv = problem.zeros(problem.n_k, problem.d_v)
        self.ds = problem.zeros(problem.n_q, problem.n_k) if "bias" in need else None

    def store_ds(self, ds, rows=ALL, cols=ALL):
        """Keep ds of one tile if dbias is asked for."""
        if self.ds is not None:
            self.ds[..., rows, cols] = ds

    @quiet
    def results(self, lse, delta):
        """(dq, dk, dv [, dbias] [, dsinks]), each in shape and dtype of what it belongs to."""
        problem = self.problem
        q, k, v = problem.shapes
        group = (problem.batch, problem.kv_heads, problem.heads // problem.kv_heads, problem.n_k)
        # A kv head gets the sum of what the query heads of its group send.
        dk = self.dk.reshape(*group, problem.d).sum(axis=2)
        dv = self.dv.reshape(*group, problem.d_v).sum(axis=2)
        grads = [x.reshape(shape).astype(problem.stored)
                 for x, shape in ((self.dq, q), (dk, k), (dv, v))]
        if "bias" in self.need:
            shape, dtype = problem.extras["bias"]
            grads.append(sum_to_shape(self.ds, shape).astype(dtype))
        if "sinks" in self.need:
            shape, dtype = problem.extras["sinks"]
            dsinks = -(exp_diff(problem.sinks, lse) * delta).sum(axis=(0, 2, 3))
            grads.append(dsinks.reshape(shape).astype(dtype))
        return tuple(grads)


def sum_to_shape(x, shape):
    """The gradient of broadcasting: `x` summed over every axis along which `shape` was repeated."""
    new = x.ndim - len(shape)
    repeated = (*range(new), *(new + i for i, n in enumerate(shape) if n == 1))
    return x.sum(axis=repeated).reshape(shape)


def standard_attention_backward(do, q, k, v, *, dlse=None, need=(), **options):
    """Gradients of `standard_attention`, with P, dP and dS as whole matrices: the oracle.

    Algorithm 3 of arXiv 2205.14135.  Computes p again, and takes delta as rowsum(p dp), so that it
    shares nothing with the tiled forms below but the formula for ds.

    Parameters
    ----------
    do : array of shape (batch, heads, n_q, d_v)
        Gradient that arrives at o.
    q, k, v : arrays
        As in `standard_attention`.
    dlse : array of shape (batch, heads, n_q), optional
        Gradient that arrives at lse; 0 if not given.
    need : sequence of "bias" and "sinks"
        Which gradients to return besides dq, dk and dv.
    **options
        Those of the forward call: see `Problem`.

    Returns
    -------
    dq, dk, dv : float64 arrays in the shapes of q, k, v
    dbias, dsinks : float64 arrays in the shapes of bias and sinks
        Those that `need` names, always in this order.

    Raises
    ------
    ValueError, TypeError
        As `Problem`; ValueError also if `need` names an option that is not there.

    Examples
    --------
    Two equal scores: p = 1/2 each, and the value above the mean pulls its own score up.

    >>> q, k, v = np.ones((1, 1)), np.zeros((2, 1)), np.array([[1.0], [0.0]])
    >>> dq, dk, dv = standard_attention_backward(np.ones((1, 1)), q, k, v)
    >>> dk.ravel(), dv.ravel()
    (array([ 0.25, -0.25]), array([0.5, 0.5]))
    """
    problem = Problem(q, k, v, **options)
    out = Gradients(problem, need)
    do, dlse = incoming(problem, do, dlse)
    s = problem.hide(problem.score(problem.q, problem.k))
    p, lse = softmax_with_sink(s, problem.sinks)
    p, visible = np.where(s == -np.inf, 0, p), s != -np.inf

    out.dv = problem.weighted_sum(p.mT, do, visible.mT)
    dp = probability_gradient(do, problem.v, s)
    delta = (p * dp).sum(axis=-1, keepdims=True) - dlse
    ds, dqk = score_gradients(problem, problem.q, problem.k, s, p, dp, delta)
    out.dq = problem.weighted_sum(dqk, problem.k, visible)
    out.dk = problem.weighted_sum(dqk.mT, problem.q, visible.mT)
    out.store_ds(ds)
    return out.results(lse, delta)


def flash_attention_1_backward(do, q, k, v, o, lse, *, dlse=None, need=(), block_m=64, block_n=64,
                               **options):
    """Gradients from o and lse by tiles, K/V outside and Q inside, as FlashAttention-1 takes them.

    Algorithm 4 of arXiv 2205.14135, with lse in place of its m and l.  dk and dv of a K/V tile stay
    on chip; dq is read and written once for every K/V tile, and delta computed as often.

    Parameters
    ----------
    do : array of shape (batch, heads, n_q, d_v)
        Gradient that arrives at o.
    q, k, v : arrays
        As in `standard_attention`.
    o, lse : arrays of shape (batch, heads, n_q, d_v) and (batch, heads, n_q)
        What the forward call returned.
    dlse, need, **options
        As in `standard_attention_backward`.
    block_m, block_n : int
        Rows of a query tile and of a K/V tile.

    Returns
    -------
    dq, dk, dv [, dbias] [, dsinks]
        As `standard_attention_backward`.

    Raises
    ------
    ValueError, TypeError
        As `standard_attention_backward`; ValueError also for a block below 1.

    Examples
    --------
    >>> q, k, v = np.ones((1, 1)), np.zeros((2, 1)), np.array([[1.0], [0.0]])
    >>> o, lse = np.array([[0.5]]), np.log([2.0])
    >>> dq, dk, dv = flash_attention_1_backward(np.ones((1, 1)), q, k, v, o, lse, block_n=1)
    >>> dk.ravel(), dv.ravel()
    (array([ 0.25, -0.25]), array([0.5, 0.5]))
    """
    problem = Problem(q, k, v, **options)
    out = Gradients(problem, need)
    do, dlse = incoming(problem, do, dlse)
    o, lse = problem.like_q("o", o, problem.d_v), problem.like_q("lse", lse)
    for cols in tiles(problem.n_k, block_n):
        # load K_j, V_j
        k_j, dk_j, dv_j = problem.k[..., cols, :], 0, 0
        for rows in tiles(problem.n_q, block_m):
            # load Q_i, O_i, dO_i, dQ_i, lse_i
            q_i, do_i, lse_i = problem.q[..., rows, :], do[..., rows, :], lse[..., rows, :]
            # delta = rowsum(dO O) - dlse
            delta_i = row_delta(do_i, o[..., rows, :], dlse[..., rows, :])
            # S = Q K^T ... dS = P (dP - delta)
            p, ds, dqk, visible = recompute_tile(problem, rows, cols, do_i, lse_i, delta_i)
            # dV += P^T dO
            dv_j = dv_j + problem.weighted_sum(p.mT, do_i, visible.mT)
            # dQ += dS K
            out.dq[..., rows, :] += problem.weighted_sum(dqk, k_j, visible)
            # dK += dS^T Q
            dk_j = dk_j + problem.weighted_sum(dqk.mT, q_i, visible.mT)
            out.store_ds(ds, rows, cols)
        # epilogue: dK, dV
        out.dk[..., cols, :], out.dv[..., cols, :] = dk_j, dv_j
    return out.results(lse, row_delta(do, o, dlse))


def flash_attention_2_backward(do, q, k, v, o, lse, *, dlse=None, need=(), block_m=64, block_n=64,
                               **options):
    """Gradients from o and lse by tiles, in three steps that each own what they write.

    Algorithm 2 of arXiv 2307.08691 in the form that needs no atomic sums: delta first, once; then
    dk and dv with K/V outside; then dq with Q outside.  (The paper adds to dq in memory from the
    second step, which saves computing s twice, and leaves the order of the sums to chance.)

    Parameters
    ----------
    do, q, k, v, o, lse, dlse, need, block_m, block_n, **options
        As in `flash_attention_1_backward`.

    Returns
    -------
    dq, dk, dv [, dbias] [, dsinks]
        As `standard_attention_backward`.

    Raises
    ------
    ValueError, TypeError
        As `flash_attention_1_backward`.

    Examples
    --------
    One key that weighs all: no gradient but dv, which is do.

    >>> x, do = np.ones((1, 1)), np.array([[3.0]])
    >>> flash_attention_2_backward(do, x, x, x, o=x, lse=np.ones(1))
    (array([[0.]]), array([[0.]]), array([[3.]]))
    """
    problem = Problem(q, k, v, **options)
    out = Gradients(problem, need)
    do, dlse = incoming(problem, do, dlse)
    o, lse = problem.like_q("o", o, problem.d_v), problem.like_q("lse", lse)

    # Step 1: delta = rowsum(dO O) - dlse
    delta = row_delta(do, o, dlse)

    def recompute(rows, cols):
        on_chip = (x[..., rows, :] for x in (do, lse, delta))
        return recompute_tile(problem, rows, cols, *on_chip)

    # Step 2: dK, dV; K/V outside
    for cols in tiles(problem.n_k, block_n):
        for rows in tiles(problem.n_q, block_m):
            # S = Q K^T ... dS = P (dP - delta)
            p, ds, dqk, visible = recompute(rows, cols)
            q_i, do_i = problem.q[..., rows, :], do[..., rows, :]
            # dV += P^T dO
            out.dv[..., cols, :] += problem.weighted_sum(p.mT, do_i, visible.mT)
            # dK += dS^T Q
            out.dk[..., cols, :] += problem.weighted_sum(dqk.mT, q_i, visible.mT)
            out.store_ds(ds, rows, cols)

    # Step 3: dQ; Q outside
    for rows in tiles(problem.n_q, block_m):
        for cols in tiles(problem.n_k, block_n):
            # S = Q K^T ... dS = P (dP - delta)
            _, _, dqk, visible = recompute(rows, cols)
            # dQ += dS K
            out.dq[..., rows, :] += problem.weighted_sum(dqk, problem.k[..., cols, :], visible)
    return out.results(lse, delta)
