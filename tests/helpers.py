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


def growing(k):
    """Keys whose scores grow from one K/V tile to the next, first by a little and then by much."""
    sizes = np.array([1, 1, 2, 2, 12])[np.minimum(np.arange(k.shape[2]) // 64, 4)]
    return (k * sizes[:, None]).astype(k.dtype)


# Those on tensor cores have tests of their own.
TESTED_HERE = [name for name in engines.ON_GPU if name not in engines.ON_TENSOR_CORES]
ENGINES = ([Engine(name, "numpy") for name in engines.ON_CPU]
           + [Engine(name, "simulator") for name in TESTED_HERE if name != "standard"]
           + [Engine(name, "cupy") for name in TESTED_HERE])
