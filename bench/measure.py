"""What all measurements share: operation counts, timing in turn, and what a figure must be stored with."""

import json
import os
import platform
import subprocess
import sys
import time
from datetime import date
from importlib import metadata
from pathlib import Path
from statistics import median


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


def in_turn(calls, seconds_of, rounds):
    """Time rivals in turn, so that a drifting clock hits them alike, each round starting with another one.

    Parameters
    ----------
    calls : dict
        Name to a function without arguments.
    seconds_of : function
        Runs a call and returns the seconds that it took.
    rounds : int

    Returns
    -------
    medians : dict
        Name to the median of its seconds.
    """
    times, names = {name: [] for name in calls}, list(calls)
    for name in names:
        calls[name]()                                        # compile, allocate, warm up
    for i in range(rounds):
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

    One more before them lets the host run ahead of the device, so that its own share of a call doesn't count.
    """
    repeats = max(3, min(50, int(budget / event_seconds(call, 2))))
    call()
    return event_seconds(call, repeats)


def bytes_beyond_answer(call):
    """Bytes that a call takes from a CuPy pool of its own, less those of the arrays that it returns."""
    import cupy as cp

    pool = cp.cuda.MemoryPool()
    with cp.cuda.using_allocator(pool.malloc):
        answer = call()
        return pool.total_bytes() - sum(x.nbytes for x in (answer if isinstance(answer, tuple) else (answer,)))


def environment():
    """Machine, versions, commit and date."""
    versions = {}
    for package in ("numba_flash", "numpy", "numba", "numba-cuda", "cupy-cuda13x", "cupy-cuda12x", "torch"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            pass
    return {"date": date.today().isoformat(), "commit": _commit(), "python": platform.python_version(),
            "versions": versions, "cpu": _cpu(), "threads": len(os.sched_getaffinity(0))}


def _commit():
    if "NUMBA_FLASH_COMMIT" in os.environ:
        return os.environ["NUMBA_FLASH_COMMIT"]
    try:
        return subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True,
                              check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _cpu():
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def write(path, **content):
    """Store a measurement with its circumstances."""
    _write_json(path, {**environment(), **content})


def write_part(path, name, **content):
    """Store one part of a measurement with its own circumstances; other parts stay as an earlier run left them."""
    parts = json.loads(Path(path).read_text()) if Path(path).is_file() else {}
    _write_json(path, {**parts, name: {**environment(), **content}})


def _write_json(path, content):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(content, indent=1) + "\n")
    print(f"wrote {path}", file=sys.stderr)


def table(rows, columns):
    """Print dictionaries as a table."""
    cells = [[_cell(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells)]
    for line in (columns, *cells):
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths)))


def _cell(x):
    if not isinstance(x, float):
        return str(x)
    return f"{x:.2f}" if x == 0 or abs(x) >= 0.01 else f"{x:.2e}"
