"""A reduction: the threads of a block add up a row.

A sum needs the numbers of all threads in one place. One thread could add them all while the others
watch; better is to *halve*: with 8 numbers in shared memory, threads 0 to 3 add to theirs the
number four places on, then threads 0 and 1 add the number two places on, then thread 0 the number
next to it. Three steps in the place of seven, and for 256 threads eight in the place of 255.

A step reads what other threads wrote in the step before, so each needs a barrier; and every thread
of the block must come to it, also the half that has nothing more to add.

Here a block of 8 threads sums a row of any length. First each thread adds up its own share, every
eighth element: thread tx takes columns tx, tx + 8, tx + 16 and so on (neighbouring threads read
neighbouring elements), in a variable of its own, a register. A short row leaves some threads with
nothing: their share is 0, and they must say so. Then the shares are halved.

This is how a block finds a row's sum l and, with max in the place of +, its max m.
"""

import numpy as np

from . import Counts, Launch

HINT = """
    part[tx] = share
    cuda.syncthreads()
    half = THREADS // 2
    while half > 0:
        if tx < half:
            ...             # part[tx] grows by part[tx + half]
        cuda.syncthreads()  # outside of the if
        half //= 2
After the last barrier part[0] is the sum. One thread writes it.
"""
THREADS = 8
CASES = {"rows": 3, "n": 32}, {"rows": 1, "n": 8}, {"rows": 2, "n": 29}, {"rows": 2, "n": 3}
GOOD = Counts(global_reads=4, global_writes=1, shared_reads=7, shared_writes=4, pieces=15)
ENFORCED = {"global_reads": "Each thread should read its share of the row only."}


def inputs(rng, rows, n):
    """A matrix."""
    return {"x": rng.standard_normal((rows, n)).astype(np.float32)}


def specification(x):
    """Sums of the rows."""
    return {"l": x.sum(axis=1, dtype=np.float64)}


def launches(rows, n):
    """A block for each row."""
    return [Launch("row_sum", rows, THREADS, "l x")]
