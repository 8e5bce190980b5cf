"""A first kernel: a thread for each element.

NumPy's y = a * x + b is one operation on a whole array. A kernel says what *one thread* does, and a
GPU runs thousands of threads at once: here thread number i computes y[i] and nothing else.

Threads come in blocks, all of one size, and a launch starts as many blocks as are needed to cover
the array. A thread asks where it is:

    cuda.blockIdx.x       the number of its block
    cuda.blockDim.x       how many threads a block has
    cuda.threadIdx.x      its own number in the block

so the threads of all blocks are numbered through by blockIdx.x * blockDim.x + threadIdx.x.

With blocks of 8, an array of 37 elements needs 5 blocks, and these have 40 threads. The last three
have no element. They run all the same, and must do nothing: a GPU doesn't check indices, and y[37]
would be somebody else's memory.
"""

import numpy as np

from . import Counts, Launch, blocks

HINT = """
Compute i as the text says. Then: if i < y.shape[0], write y[i].
"""
THREADS = 8
CASES = {"n": 64}, {"n": 8}, {"n": 37}, {"n": 1}
GOOD = Counts(global_reads=1, global_writes=1, shared_reads=0, shared_writes=0, pieces=16)
ENFORCED = {"global_reads": "Read each element once."}


def inputs(rng, n):
    """Two numbers and a vector."""
    return {"a": np.float32(2.5), "b": np.float32(-1), "x": rng.standard_normal(n).astype(np.float32)}


def specification(a, b, x):
    """y = a x + b."""
    return {"y": a * x + b}


def launches(n):
    """One block for eight elements."""
    return [Launch("linear", blocks(n, THREADS), THREADS, "y x a b")]
