"""Counting operations and bytes, and clocks: what any figure is made of."""

import time
from functools import lru_cache
from statistics import median

import numpy as np


def flops(batch, heads, n_q, n_k, d, d_v=None, *, causal=False, left=None, backward=False):
    """Operations that attention has to do, a multiplication and an addition counted apart.

    Parameters
    ----------
    batch, heads, n_q, n_k, d, d_v : int
    causal : bool
        Count the pairs that bottom-right causal attention sees, as is usual without the diagonal's half:
        ``n * n / 2`` for n_q = n_k = n.
    left : int, optional
        Of these, only pairs at most so far apart, as with ``window=(left, 0)``.
    backward : bool
        Five products of a tile (S, dP, dV, dK, dQ) instead of two (S, O): 2.5 times as many if d = d_v.

    Returns
    -------
    flops : float

    Examples
    --------
    >>> flops(1, 8, 1024, 1024, 64) == 4 * 8 * 1024**2 * 64
    True
    >>> flops(1, 1, 2, 4, 8, causal=True) / flops(1, 1, 2, 4, 8)
    0.75
    """
    d_v = d_v or d
    pairs = n_q * n_k
    if causal:
        rows = min(n_q, n_k)                                 # rows above see nothing
        pairs = rows * (n_k - rows / 2)
        if left is not None:                                 # row by row, 1 + 2 + ... more keys are too far back
            pairs -= _triangle(n_k - 1 - left) - _triangle(n_k - rows - 1 - left)
    return batch * heads * pairs * 2 * (3 * d + 2 * d_v if backward else d + d_v)


def _triangle(n):
    """1 + 2 + ... + n."""
    return max(n, 0) * (n + 1) / 2


def in_turn(calls, seconds_of, rounds, warm=lambda call: call()):
    """Time rivals in turn, so that a drifting clock hits them alike, each round starting with another one.

    Parameters
    ----------
    calls : dict
        Name to a function without arguments, or what else `seconds_of` and `warm` take.
    seconds_of : function
        Runs a call and returns the seconds that it took.
    rounds : int
    warm : function
        Runs a call once, before all: compile, allocate, warm up.

    Returns
    -------
    medians : dict
        Name to the median of its seconds.
    """
    times, names = {name: [] for name in calls}, list(calls)
    for name in names:
        warm(calls[name])
    for i in range(rounds if names else 0):
        for name in names[i % len(names):] + names[:i % len(names)]:
            times[name].append(seconds_of(calls[name]))
    return {name: median(taken) for name, taken in times.items()}


def wall_seconds(call):
    """Seconds by the host's clock."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def event_seconds(call, repeats=1):
    """Seconds of one call by the clock of CuPy's current device and stream, the mean of some in a row."""
    import cupy as cp

    start, stop = cp.cuda.Event(), cp.cuda.Event()
    start.record()
    for _ in range(repeats):
        call()
    stop.record()
    stop.synchronize()
    return cp.cuda.get_elapsed_time(start, stop) * 1e-3 / repeats


def batch_seconds(call, budget=0.01):
    """`event_seconds` of as many calls in a row as take about `budget` seconds, 3 at least and 50 at most.

    One more before them lets the host run ahead of the device, so that its own share of a call doesn't count; in a
    call of five times the budget that share is nothing, and one is enough.
    """
    alone = event_seconds(call)
    if alone > 5 * budget:
        return alone
    repeats = max(3, min(50, int(budget / alone)))
    call()
    return event_seconds(call, repeats)


def device_seconds(call, repeats=30):
    """Seconds that the device takes for one of some calls in a row which the host has already handed over.

    Small calls are over before the host has made the next one. So the device is held up first, for twice as long as
    the host needs to make them all, and they then follow one another without a gap.
    """
    import cupy as cp

    ahead = 2 * host_seconds(call, repeats) * repeats + 1e-3
    cp.cuda.Device().synchronize()
    _hold_up()((1,), (1,), (np.int64(ahead * 1e9),))
    return event_seconds(call, repeats)


@lru_cache
def _hold_up():
    """A kernel that does nothing for so many nanoseconds."""
    import cupy as cp

    return cp.RawKernel(r"""
    __device__ unsigned long long now() {
        unsigned long long t;
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
        return t;
    }
    extern "C" __global__ void hold_up(long long nanoseconds) {
        unsigned long long stop = now() + nanoseconds;
        while (now() < stop) { }
    }""", "hold_up")


def host_seconds(call, batch=50):
    """Seconds that one of some calls in a row keeps the host busy; each returns before the device is done."""
    import cupy as cp

    cp.cuda.Device().synchronize()
    return wall_seconds(lambda: [call() for _ in range(batch)]) / batch


def awake_seconds(call):
    """Seconds of a call right after another: threads that have just slept through others' turns take time to wake."""
    call()
    return wall_seconds(call)
