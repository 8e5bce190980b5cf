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


def flops(batch, heads, n_q, n_k, d, d_v=None, *, causal=False, backward=False):
    """Operations that attention has to do, a multiplication and an addition counted apart.

    Parameters
    ----------
    batch, heads, n_q, n_k, d, d_v : int
    causal : bool
        Count the pairs that bottom-right causal attention sees, as is usual without the diagonal's half:
        ``n * n / 2`` for n_q = n_k = n.
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
    return batch * heads * pairs * 2 * (3 * d + 2 * d_v if backward else d + d_v)


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
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps({**environment(), **content}, indent=1) + "\n")
    print(f"wrote {path}", file=sys.stderr)


def table(rows, columns):
    """Print dictionaries as a table."""
    cells = [[f"{row.get(column, ''):.2f}" if isinstance(row.get(column), float) else str(row.get(column, ""))
              for column in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells)]
    for line in (columns, *cells):
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths)))
