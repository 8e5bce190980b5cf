"""The first call of a kind in a process, which compiles: how long it takes, and how to have it done beforehand."""

import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import numpy as np
from tqdm import tqdm

from numba_flash import attention, attention_backward, engines

from .contest import DTYPES, wait


@dataclass(frozen=True)
class Kernel:
    """What a first call compiles for: an engine, and the dtype, the head dim, the length and the options of a call."""

    dtype: str
    d: int
    engine: str = "hopper"
    n: int = 128
    softcap: float | None = None
    alibi: bool = False
    backward: bool = False
    deterministic: bool = False

    def __str__(self):
        options = [f"softcap {self.softcap}"] if self.softcap else []
        options += [f"n {self.n}"] if self.n != 128 else []
        options += [name for name in ("alibi", "backward", "deterministic") if getattr(self, name)]
        return " ".join([self.engine, self.dtype, f"d {self.d}", *options])

    def make_call(self, xp):
        """A call that is over at once."""
        q = xp.asarray(np.ones((1, 1, self.n, self.d), DTYPES[self.dtype]))
        options = {"softcap": self.softcap, "alibi_slopes": xp.ones(1, np.float32) if self.alibi else None,
                   "kernel": self.engine}

        def call():
            o, lse = attention(q, q, q, return_lse=True, **options)
            if self.backward:
                attention_backward(q, q, q, q, o, lse, deterministic=self.deterministic, **options)
            wait(xp is not np)

        return call


def compile_one(kernel):
    """Have one kernel in the cache on disk; returns the seconds that its first call took, or why there is none."""
    import cupy

    try:
        call = kernel.make_call(cupy)
        start = time.perf_counter()
        call()
        return round(time.perf_counter() - start, 2)
    except Exception as reason:                 # what can't run is noted by whoever wants to time it
        return str(reason)


def compile_ahead(kernels):
    """Have kernels in the cache on disk, all at once: one after the other they take seconds each.

    Parameters
    ----------
    kernels : list of Kernel

    Returns
    -------
    taken : dict
        Words for each kernel to the seconds that its first call took beside the others', or to why there is none.
    """
    try:
        with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
            done = list(tqdm(pool.map(compile_one, kernels), desc="compile", total=len(kernels)))
    except Exception as reason:                 # they will compile one after the other, when they are called
        return {"compiling ahead": str(reason)}
    return {str(kernel): taken for kernel, taken in zip(kernels, done)}


def print_seconds(kernel, xp):
    """Run in a process of its own: seconds that the engine's import, the first call and a later one take."""
    seconds, call = [], kernel.make_call(xp)            # by now CuPy has its context
    for step in (lambda: engines.load(kernel.engine), *[call] * 5):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    json.dump({"import s": seconds[0], "first s": seconds[1], "later s": min(seconds[2:])}, sys.stdout)
