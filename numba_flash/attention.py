"""The calls: describe what is asked for, allocate, choose an engine, run. No mathematics here."""

import math
from dataclasses import replace

import numpy as np

from . import again, arrays, engines
from .describe import check_flag, describe
from .problem import Gradients


def attention(q, k, v, *, return_lse=False, out=None, kernel="auto", scale=None, causal=False, window=None,
              softcap=None, alibi_slopes=None, bias=None, mask=None, sinks=None, precision=None, **unknown):
    r"""Exact attention, ``o = softmax(scale * q kᵀ) v``, in memory that grows linearly with the sequence.

    The scores of a row are ``s = scale * q·k``, then ``softcap * tanh(s / softcap)``, then ALiBi and bias are added,
    and hidden keys are dropped; ``lse = log(sum_j exp(s_j) + exp(sink))`` and ``o = sum_j exp(s_j - lse) v_j``.
    Computed as in FlashAttention-2 (Dao, arXiv 2307.08691, algorithm 1), but by two engines: ``standard`` stores the
    n_q x n_k scores, and ``flash1`` is the first FlashAttention (arXiv 2205.14135).

    Parameters
    ----------
    q : array of shape (batch, heads, n_q, d)
        Queries: NumPy or CuPy, float16, bfloat16 (ml_dtypes), float32 or float64. (heads, n_q, d) and (n_q, d) are
        taken too; every other argument then drops the same leading axes. Strides are free: data of shape
        (batch, n, heads, d) is passed as the view ``x.transpose(0, 2, 1, 3)``, without a copy.
    k : array of shape (batch, kv_heads, n_k, d)
        Keys. `heads` is a multiple of `kv_heads`; query head h reads key head ``h // (heads // kv_heads)``.
    v : array of shape (batch, kv_heads, n_k, d_v)
        Values.
    return_lse : bool
        Also return lse.
    out : array of shape (batch, heads, n_q, d_v), optional
        Where to write o; it may not overlap an input.
    kernel : str
        ``"auto"``, or an engine by name: ``cpu``, ``standard``, ``flash1``, ``flash2``, ``mma``, ``hopper``.
    scale : float, optional
        Factor on q·k; default ``1 / sqrt(d)``.
    causal : bool or {"bottom_right", "top_left"}
        True, the same as ``"bottom_right"``: query i sees keys ``j <= i + n_k - n_q``, so that the last query sees
        all. ``"top_left"``: ``j <= i``. For n_q = 2, n_k = 4 and for n_q = 4, n_k = 2, ``"bottom_right"`` shows ::

            # # # .        . .
            # # # #        . .
                           # .
                           # #
    window : (left, right), optional
        Query i sees keys ``i' - left <= j <= i' + right``, where ``i' = i + n_k - n_q`` (``i' = i`` with
        ``causal="top_left"``). None or -1 leaves a side open.
    softcap : float, optional
        Squash scores into (-softcap, softcap). Above 256, in 16 bits, the engines on tensor cores are not taken.
    alibi_slopes : array of shape (heads,) or (batch, heads), optional
        Adds ``-slope * |i' - j|``. Any floating dtype.
    bias : array, optional
        Added to the scores, any floating dtype; broadcasts to (batch, heads, n_q, n_k). -inf hides a key.
    mask : array of bool, optional
        True where a query may attend; broadcasts likewise.
    sinks : array of shape (heads,), optional
        One extra logit for each head that takes probability and gives nothing. Any floating dtype.
    precision : {None, "tf32"}
        None: as accurate as the inputs' dtype. ``"tf32"`` lets matrix products of float32 inputs take the leading 11
        bits of their factors only, as the ``mma`` engine then does: one product on tensor cores in the place of three.
        Of normal inputs with d 64 its o is off by 3e-4 at the most and its gradients by 6e-4, where by default both are
        off by 3e-7 (errors of the interpreted kernels, 130 to 200 keys). All other engines ignore it, and for 16-bit
        inputs, which have no more bits, it changes nothing. With float64 inputs it is an error.
    **unknown
        Any other name is an error, which lists the options.

    Returns
    -------
    o : array of shape (batch, heads, n_q, d_v)
        q's dtype, C-contiguous unless `out` was given. A row with no visible key is 0.
    lse : array of shape (batch, heads, n_q)
        If `return_lse`. Natural logarithm, float32 (float64 for float64 inputs). For a row with no visible key it is
        -inf, or the sink if there is one.

    Raises
    ------
    TypeError
        For a dtype, an array library or a kind of argument that can't be meant.
    ValueError
        For shapes, devices and values that don't fit together.

    Notes
    -----
    A hidden key has no effect, whatever it holds, NaN included; a NaN that a row sees comes out. (The ``standard``
    engine multiplies hidden values by zero: it lets a NaN through to rows that do not see it if other rows do. So do
    ``mma`` and ``hopper``, tile by tile; and of float32 inputs ``mma`` makes NaN of an infinity, and of a number within
    0.03% of float32's largest, wherever the products take it apart.)
    float64 inputs are summed in float64, all others in float32.

    Examples
    --------
    >>> import numpy as np, numba_flash as nf
    >>> q = np.zeros((1, 1, 2, 4), np.float32)
    >>> v = np.arange(5, dtype=np.float32).reshape(1, 1, 5, 1)
    >>> nf.attention(q, np.ones((1, 1, 5, 4), np.float32), v, causal=True).ravel().tolist()
    [1.5, 2.0]
    """
    check_flag(return_lse, "return_lse")
    key = None
    if out is alibi_slopes is bias is mask is sinks is None and not unknown:
        key = again.key_of(q, k, v, kernel, scale, causal, window, softcap, precision)
        if key is not None and (answer := again.repeat(key, return_lse)):
            return answer if return_lse else answer[0]
    call = describe("attention", q, k, v, scale=scale, causal=causal, window=window, softcap=softcap,
                    alibi_slopes=alibi_slopes, bias=bias, mask=mask, sinks=sinks, precision=precision, **unknown)
    o, lse = _forward(call, out, kernel, return_lse, key)
    return (o, call.drop_axes(lse)) if return_lse else o


def attention_backward(do, q, k, v, o, lse, *, dlse=None, need=(), deterministic=False, kernel="auto", **options):
    """Gradients of `attention` with respect to q, k and v, and on request bias and sinks.

    Recomputes the probabilities by tiles from `lse` (FlashAttention-2, arXiv 2307.08691, algorithm 2), so that memory
    stays linear in the sequence.

    Parameters
    ----------
    do : array of shape (batch, heads, n_q, d_v)
        Gradient arriving at o; o's dtype, any strides (a broadcast 1 too).
    q, k, v : array
        As given to `attention`.
    o, lse : array
        What ``attention(..., return_lse=True)`` returned for the same arguments.
    dlse : array of shape (batch, heads, n_q), optional
        Gradient arriving at lse.
    need : {"bias", "sinks"}, or a sequence of them
        Further gradients to return: that of bias first, then that of sinks, whatever the order here.
    deterministic : bool
        Ask for results that repeat bit by bit.
    kernel : str
        As in `attention`.
    **options
        `scale`, `causal`, `window`, `softcap`, `alibi_slopes`, `bias`, `mask`, `sinks`, `precision`, as given to
        `attention`.

    Returns
    -------
    dq, dk, dv : array
        New C-contiguous arrays of the shapes and dtype of q, k, v.
    dbias, dsinks : array
        Those that `need` names, with the shape and dtype of bias and sinks.

    Raises
    ------
    TypeError, ValueError
        As `attention`.

    Notes
    -----
    A key hidden from all rows has no effect on any gradient, nor has a row that sees no key. `lse` in float32 limits
    the accuracy of gradients where its size passes 1e4.

    Examples
    --------
    >>> import numpy as np, numba_flash as nf
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 6, 4))
    >>> o, lse = nf.attention(q, k, v, return_lse=True)
    >>> dq, dk, dv = nf.attention_backward(np.ones_like(o), q, k, v, o, lse)
    >>> np.allclose(dv.sum(2), 6)        # every row's probabilities sum to 1
    True
    """
    call = describe("attention_backward", q, k, v, **options)
    return _backward(call, do, o, lse, dlse, need, deterministic, kernel)


def attention_vjp(q, k, v, *, return_lse=False, out=None, kernel="auto", **options):
    """Attention, and the function that pulls a gradient back through it; options are given once.

    Parameters
    ----------
    q, k, v, return_lse, out, kernel, **options
        As in `attention`.

    Returns
    -------
    o : array, or (o, lse) if `return_lse`
    pullback : function
        ``pullback(do, dlse=None, *, need=(), deterministic=False)`` returns what `attention_backward` does. It holds
        on to all arguments, o and lse, which must not be overwritten before it is called.

    Examples
    --------
    >>> import numpy as np, numba_flash as nf
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 6, 4))
    >>> o, pullback = nf.attention_vjp(q, k, v, causal=True)
    >>> dq, dk, dv = pullback(np.ones_like(o))
    >>> dq.shape
    (1, 2, 6, 4)
    """
    check_flag(return_lse, "return_lse")
    call = describe("attention_vjp", q, k, v, **options)
    call = call.on_views()
    o, lse = _forward(call, out, kernel)
    lse = call.drop_axes(lse)

    def pullback(do, dlse=None, *, need=(), deterministic=False):
        return _backward(call, do, o, lse, dlse, need, deterministic, kernel)

    return ((o, lse) if return_lse else o), pullback


# ---- allocate, choose an engine, run ---------------------------------------------------------------------------------

def _forward(call, out, kernel, wants_lse=True, key=None):
    """o, lse; `key`: what to remember the call by, if it may be."""
    problem, operands = call.problem, call.operands
    xp = arrays.namespace(operands.q)
    with arrays.on_device(operands.q):
        engine = engines.choose(kernel, call.device, problem)
        if out is None:
            o = arrays.empty(xp, problem.o_shape, problem.dtype)
            out = call.drop_axes(o)
        else:
            o = _check_out(call, out)
        lse = None
        if wants_lse or problem.is_empty or not getattr(engine, "LSE_IS_OPTIONAL", False):
            lse = arrays.empty(xp, problem.lse_shape, problem.accumulator)
        if problem.is_empty:
            o[...] = 0
            lse[...] = -math.inf if operands.sinks is None else operands.sinks[:, None]
        else:
            launch = engine.forward(problem, operands, o, lse)
            if key is not None and launch is not None:
                again.remember(key, call, launch)
    return out, lse


def _check_out(call, out):
    o = call.adopt(out, "out", call.problem.o_shape, (call.problem.dtype,))
    if not arrays.may_write(o):
        raise ValueError("out must be writable, got a read-only array")
    if arrays.repeats_itself(o):
        raise ValueError(f"out must not repeat memory, got strides {o.strides}")
    for name, x in call.given.items():
        if arrays.overlap(o, x):
            raise ValueError(f"out must not overlap an input, got memory of {name}; pass new memory")
    return o


def _backward(call, do, o, lse, dlse, need, deterministic, kernel):
    check_flag(deterministic, "deterministic")
    need = (need,) if isinstance(need, str) or not hasattr(need, "__iter__") else tuple(need)
    for name in need:
        if name not in ("bias", "sinks"):
            raise ValueError(f"need must name 'bias' or 'sinks', got {name!r}"
                             + ("; pass () for none" if name is None else ""))
        if name not in call.given:
            raise ValueError(f"need={name!r} asks for the gradient of an option that was not given; pass {name}=")
    problem = replace(call.problem, deterministic=True) if deterministic else call.problem
    operands, dtype, accumulator = call.operands, problem.dtype, problem.accumulator
    xp = arrays.namespace(operands.q)
    do, o = (call.adopt(x, name, problem.o_shape, (dtype,)) for x, name in ((do, "do"), (o, "o")))
    lse = call.adopt(lse, "lse", problem.lse_shape, (accumulator,))
    with arrays.on_device(operands.q):
        engine = engines.choose(kernel, call.device, problem, backward=True)
        lse = xp.ascontiguousarray(lse)
        if dlse is not None:
            dlse = call.adopt(dlse, "dlse", problem.lse_shape)
            dlse = xp.ascontiguousarray(dlse.astype(accumulator, copy=False))
        shapes = {"dq": problem.q_shape, "dk": problem.k_shape, "dv": problem.v_shape}
        gradients = {name: arrays.empty(xp, shape, dtype) for name, shape in shapes.items()}
        if "bias" in need:
            bias = call.given["bias"]
            gradients["dbias"] = arrays.empty(xp, (1,) * (4 - bias.ndim) + bias.shape, accumulator)
        if "sinks" in need:
            gradients["dsinks"] = arrays.empty(xp, problem.heads, accumulator)
        gradients = Gradients(**gradients)
        if problem.is_empty:
            _backward_of_nothing(operands.sinks, dlse, gradients)
        else:
            engine.backward(problem, operands, do, dlse, o, lse, gradients)
        answer = [call.drop_axes(x) for x in (gradients.dq, gradients.dk, gradients.dv)]
        for name, gradient in (("bias", gradients.dbias), ("sinks", gradients.dsinks)):
            if name in need:
                given = call.given[name]
                with np.errstate(over="ignore"):
                    answer.append(gradient.reshape(given.shape).astype(given.dtype, copy=False))
    return tuple(answer)


def _backward_of_nothing(sinks, dlse, gradients):
    """Without queries or keys there is nothing to learn, except that lse is each row's sink."""
    for gradient in (gradients.dq, gradients.dk, gradients.dv, gradients.dbias):
        if gradient is not None:
            gradient[...] = 0
    if gradients.dsinks is not None:
        gradients.dsinks[...] = 0 if dlse is None else dlse.sum((0, 2)) * (sinks != -math.inf)
