"""The first call in a process, which compiles: how long it takes, and how to have it done beforehand."""

import json
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import cupy as cp
import numpy as np
from tqdm import tqdm

from numba_flash import attention, engines
from numba_flash.problem import BFLOAT16, FLOAT16

DTYPES = {"bfloat16": BFLOAT16, "float16": FLOAT16}


def make_call(dtype, d, softcap=None, alibi=False):
    """A call of the Hopper engine that is over at once, with the kernel of these options."""
    q = cp.asarray(np.ones((1, 1, 128, d), DTYPES[dtype]))
    slopes = cp.ones(1, np.float32) if alibi else None

    def call():
        attention(q, q, q, softcap=softcap, alibi_slopes=slopes, kernel="hopper")
        cp.cuda.Device().synchronize()

    return call


def compile_one(kernel):
    """Have one kernel in the cache on disk."""
    make_call(*kernel)()


def compile_ahead(kernels):
    """Have kernels in the cache on disk, all at once: one after the other they take seconds each.

    Parameters
    ----------
    kernels : list of tuple
        Arguments of `make_call`.
    """
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        list(tqdm(pool.map(compile_one, kernels), desc="compile", total=len(kernels)))


def print_seconds(dtype, d):
    """Run in a process of its own: seconds that the engine's import, the first call and a later one take."""
    seconds, call = [], make_call(dtype, d)              # by now CuPy has its context
    for step in (lambda: engines.load("hopper"), *[call] * 5):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    json.dump({"import s": seconds[0], "first s": seconds[1], "later s": min(seconds[2:])}, sys.stdout)
