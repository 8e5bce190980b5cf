"""What the tests share: engines, random problems, and the judgement of an answer."""

from dataclasses import dataclass

import numpy as np

import numba_flash as nf
from numba_flash import engines
from reference.tolerance import judge


@dataclass(frozen=True)
class Engine:
    """One engine on one kind of array: takes NumPy arrays, runs the public calls, returns NumPy arrays."""

    kernel: str
    place: str                       # "numpy", "cupy" or "simulator"

    @property
    def sizes(self):
        """Sequence lengths around the edges of this engine's tiles, small in the simulator, which is slow."""
        return (1, 3, 4, 5, 9) if self.place == "simulator" else (1, 2, 15, 16, 17, 63, 64, 65, 127, 129, 200)

    def put(self, x):
        """An array where this engine wants it, with the same strides."""
        if self.place != "cupy" or not isinstance(x, np.ndarray):
            return x
        import cupy

        base = x
        while isinstance(base.base, np.ndarray):
            base = base.base
        if base is x:
            return cupy.asarray(x)
        memory = cupy.asarray(base)
        offset = x.ctypes.data - base.ctypes.data
        return cupy.ndarray(x.shape, x.dtype, memory.data + offset, strides=x.strides)

    @staticmethod
    def get(x):
        return x if isinstance(x, np.ndarray) else x.get()

    def _options(self, options):
        return {name: self.put(value) for name, value in options.items()}

    def attention(self, q, k, v, **options):
        """o and lse."""
        o, lse = nf.attention(*map(self.put, (q, k, v)), return_lse=True, kernel=self.kernel, **self._options(options))
        return self.get(o), self.get(lse)

    def attention_backward(self, do, q, k, v, o, lse, **options):
        """dq, dk, dv and what else was asked for."""
        grads = nf.attention_backward(*map(self.put, (do, q, k, v, o, lse)), kernel=self.kernel,
                                      **self._options(options))
        return tuple(self.get(x) for x in grads)

    def both(self, do, q, k, v, dlse=None, need=(), **options):
        """o, lse, and the gradients through them."""
        o, lse = self.attention(q, k, v, **options)
        return (o, lse, *self.attention_backward(do, q, k, v, o, lse, dlse=dlse, need=need, **options))

    def check(self, do, q, k, v, dlse=None, need=(), **options):
        """Compare o, lse and all gradients with the oracle."""
        check_answer(self.both(do, q, k, v, dlse, need, **options), do, q, k, v, dlse, need, **options)


def worst(answer, do, q, k, v, dlse=None, need=(), **options):
    """The largest error over its limit, and whose it is: (1.7, "dq", ...) fails."""
    judgement = judge(answer, do, q, k, v, dlse=dlse, need=need, **options)
    return max((error / limit if limit else np.inf if error else 0.0, name, error, limit)
               for name, (error, limit) in judgement.items())


def check_answer(answer, do, q, k, v, dlse=None, need=(), **options):
    """Fail unless every part of the answer is as right as design asks for."""
    ratio, name, error, limit = worst(answer, do, q, k, v, dlse, need, **options)
    assert ratio <= 1, f"{name} is off by {error:.3g}, allowed {limit:.3g}"


def normal(rng, *shape, dtype=np.float32):
    """Standard normal numbers."""
    return np.asarray(rng.standard_normal(shape)).astype(dtype)


def problem(seed=0, batch=1, heads=2, kv_heads=None, n_q=5, n_k=None, d=8, d_v=None, dtype=np.float32):
    """Random (do, q, k, v) of the given sizes; the key side is like the query side unless said otherwise."""
    kv_heads, n_k, d_v = kv_heads or heads, n_q if n_k is None else n_k, d_v or d
    rng = np.random.default_rng(seed)
    return tuple(normal(rng, *shape, dtype=dtype) for shape in (
        (batch, heads, n_q, d_v), (batch, heads, n_q, d), (batch, kv_heads, n_k, d), (batch, kv_heads, n_k, d_v)))


def check_huge_scores(attention, dtype, size, n_q=9, n_k=20):
    """Scores up to ``7 size``, of which the two largest are equal and have all the weight, or for other rows the least.

    ``.7 * 7 * log2(e)`` is rounded by half of its last place, which becomes more than an exponent bears.
    """
    rng = np.random.default_rng(0)
    q, k, v = np.zeros((1, 1, n_q, 8)), np.zeros((1, 1, n_k, 8)), normal(rng, 1, 1, n_k, 8, dtype=dtype)
    most, least, signs = [n_k // 2, n_k - 2], [n_k // 2 - 1, n_k - 1], rng.choice([1, -1], n_q)
    q[..., 0], k[..., 0] = size**.5 * signs, size**.5 * rng.integers(-6, 7, n_k)
    k[..., most, 0], k[..., least, 0] = 7 * size**.5, -7 * size**.5
    o, lse = attention(q.astype(dtype), k.astype(dtype), v, scale=.7)
    right = np.where((signs > 0)[:, None], *(v[0, 0, rows].astype(np.float64).mean(0) for rows in (most, least)))
    np.testing.assert_allclose(o[0, 0].astype(np.float64), right, rtol=.01, atol=.01)
    np.testing.assert_allclose(lse, .7 * 7 * size + np.log(2), rtol=1e-6)
    for slope in 1, 300:                # which of the two it is now, is below a unit of their last place
        o, lse = attention(q.astype(dtype), k.astype(dtype), v, scale=.7, alibi_slopes=np.float32([slope]))
        between = v[0, 0, [most, least]][np.where(signs > 0, 0, 1)].astype(np.float64)
        assert ((between.min(1) - .01 <= o[0, 0]) & (o[0, 0] <= between.max(1) + .01)).all()
        np.testing.assert_allclose(lse, .7 * 7 * size, rtol=1e-3)


def check_growth_by_ulps(attention, dtype, n_q=9, n_k=20):
    """Five scores have the weight, which are a unit of float32's last place apart, and larger from tile to tile."""
    q, k, v = np.zeros((1, 1, n_q, 8)), np.zeros((1, 1, n_k, 8)), normal(np.random.default_rng(0), 1, 1, n_k, 8)
    lead = np.arange(1, 6) * n_k // 6
    q[..., 0], q[..., 1], q[..., 2] = 2**13, 2, np.arange(n_q)      # so that scores of some row are rounded either way
    k[..., 0], k[..., lead, 0], k[..., lead, 1], k[..., lead, 2] = 2**12, 2**13, 4 * np.arange(5), 8
    o, _ = attention(q.astype(dtype), k.astype(dtype), v.astype(dtype), scale=.25)
    weights = np.exp(2 * np.arange(-4, 1))
    right = weights / weights.sum() @ v[0, 0, lead]
    np.testing.assert_allclose(o[0, 0].astype(np.float64), np.broadcast_to(right, (n_q, 8)), atol=.03)


def check_steep_slopes(attention, dtype, slope, n_q=9, n_k=20, **options):
    """With ALiBi's slope as steep as this, the nearest key has all the weight, or the farthest if it is negative."""
    _, q, k, v = problem(heads=1, n_q=n_q, n_k=n_k, dtype=dtype)
    for causal in True, "top_left":
        o, _ = attention(q, k, v, alibi_slopes=np.float32([slope]), causal=causal, **options)
        nearest = np.arange(n_q) + (n_k - n_q if causal is True else 0) if slope > 0 else np.zeros(n_q, int)
        right = v[0, 0, np.minimum(nearest, n_k - 1)].astype(np.float64)
        np.testing.assert_allclose(o[0, 0].astype(np.float64), right, rtol=.01, atol=.01)


def growing(k):
    """Keys whose scores grow from one K/V tile to the next, first by a little and then by much."""
    sizes = np.array([1, 1, 2, 2, 12])[np.minimum(np.arange(k.shape[2]) // 64, 4)]
    return (k * sizes[:, None]).astype(k.dtype)


# Those on tensor cores have tests of their own.
TESTED_HERE = [name for name in engines.ON_GPU if name not in engines.ON_TENSOR_CORES]
ENGINES = ([Engine(name, "numpy") for name in engines.ON_CPU]
           + [Engine(name, "simulator") for name in TESTED_HERE if name != "standard"]
           + [Engine(name, "cupy") for name in TESTED_HERE])
