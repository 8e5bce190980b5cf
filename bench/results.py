"""Where figures go: a table on the screen, and JSON with the circumstances that they came about in."""

import json
import os
import platform
import subprocess
import sys
from datetime import date
from importlib import metadata
from pathlib import Path
from textwrap import shorten

PACKAGES = ("numba_flash", "numpy", "numba", "numba-cuda", "cupy-cuda13x", "cupy-cuda12x", "torch", "triton", "jax")


def environment():
    """Machine, versions, commit and date."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            pass
    return {"date": date.today().isoformat(), "commit": _commit(), "python": platform.python_version(),
            "versions": versions, "cpu": _cpu(), "threads": len(os.sched_getaffinity(0))}


def _commit():
    """What was measured: a commit, and behind it "-dirty" or "+" where the files had changes not committed yet."""
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


def write_part(path, name, **content):
    """Store one part of a measurement with its own circumstances; other parts stay as an earlier run left them."""
    path = Path(path)
    parts = json.loads(path.read_text()) if path.is_file() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**parts, name: {**environment(), **content}}, indent=1) + "\n")
    print(f"wrote {path}", file=sys.stderr)


def table(rows, columns=None):
    """Print dictionaries as a table; all their keys, if no columns are named."""
    columns = list(dict.fromkeys(key for row in rows for key in row)) if columns is None else columns
    cells = [[_cell(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *cells)]
    for line in (columns, *cells):
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths)))


def _cell(x):
    if not isinstance(x, float):
        return shorten(str(x), 60, placeholder=" ...")
    return f"{x:.2f}" if x == 0 or abs(x) >= 0.01 else f"{x:.2e}"
