"""What a call costs where there is little to compute: the host's time, the device's, decoding, and the first call.

==========  ==========================================================================
`float16`   µs of the host's time for a call at (1, 1, 128, 64), beside PyTorch's
`float32`   the same for the engines that have float32
`device`    µs of the device's time for small calls, as if the host took none
`decode`    one query a head: GB/s of keys and values, also grouped
`compile`   seconds of the first call in a process, and of one that finds its machine code on disk
`cpu`       µs of a small call on the CPU
==========  ==========================================================================

Call after call reads the same keys and values in `decode`: what the cache holds of them, 50 MB on an H200, comes from
there.
"""

import json
import os
import subprocess
import sys
import tempfile

from tqdm import tqdm

from numba_flash import engines

from . import peers
from .ceilings import copying
from .contest import DTYPES, Inputs, engine, measured
from .first_call import Kernel
from .grid import HEAD_DIMS
from .measure import awake_seconds, device_seconds, host_seconds
from .parts import Part

SMALL = 1, 1, 128, 64
WITH_FLOAT32 = [name for name in engines.ON_GPU if name not in engines.ONLY_16_BIT]
TORCH = {"torch default": peers.sdpa(), "cudnn": peers.sdpa("cudnn"), "torch flash": peers.sdpa("torch flash")}
SMALL_SHAPES = (1, 1, 128, 64), (1, 8, 512, 64), (1, 16, 1024, 128), (4, 16, 512, 128)
# (batch, heads, kv_heads, n, d)
DECODED = (1, 32, 8, 8192, 128), (16, 32, 8, 8192, 128), (64, 32, 8, 4096, 128), (1, 32, 32, 16384, 128), \
    (64, 32, 32, 2048, 128)


def both_directions(dtype, shape, rivals, rounds, clock, gpu=True):
    """Rows in µs, forward and backward."""
    inputs = Inputs.of(dtype, shape, gpu=gpu)
    for direction in ("forward", "backward"):
        case = {"direction": direction, "shape": ", ".join(map(str, shape))}
        yield measured(case, inputs, rivals, 1, rounds, clock=clock, unit="us", backward=direction == "backward")


def float16(rounds):
    """Median µs of the host's time for one call at (1, 1, 128, 64), which returns before the device is done."""
    rivals = {"auto": engine("auto"), "hopper": engine("hopper"), **TORCH}
    return {"rows": list(both_directions("float16", SMALL, rivals, 3 * rounds, host_seconds))}


def float32(rounds):
    """The same in float32, by engine."""
    rivals = {name: engine(name) for name in ("auto", *WITH_FLOAT32)}
    rivals |= {"torch default": peers.sdpa(), "torch efficient": peers.sdpa("torch efficient")}
    return {"rows": list(both_directions("float32", SMALL, rivals, 3 * rounds, host_seconds))}


def device(rounds):
    """Median µs of the device's time for small calls in bfloat16, which follow one another without a gap."""
    rivals = {"hopper": engine("hopper"), **TORCH}
    return {"rows": [row for shape in tqdm(SMALL_SHAPES, desc="device")
                     for row in both_directions("bfloat16", shape, rivals, rounds, device_seconds)]}


def decode(rounds):
    """GB/s at which one query a head reads all keys and values, bfloat16."""
    ceilings, rivals = {"bfloat16": copying()}, {"auto": engine("auto"), **TORCH}
    rows = []
    for batch, heads, kv_heads, n, d in tqdm(DECODED, desc="decode"):
        inputs = Inputs.of("bfloat16", (batch, heads, 1, d), (batch, kv_heads, n, d))
        count = 2 * batch * kv_heads * n * d * DTYPES["bfloat16"].itemsize
        case = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "n": n, "d": d}
        rows.append(measured(case, inputs, rivals, count, rounds, ceilings, device_seconds, unit="GB/s"))
    return {"rows": rows, "ceiling": ceilings}


def first_calls(_, kernels=tuple(Kernel("bfloat16", d) for d in HEAD_DIMS), module="cupy"):
    """Seconds of the first call beyond a later one's, in fresh processes: with an empty cache folder, then filled."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for kernel, cache in tqdm([(kernel, cache) for kernel in kernels for cache in ("empty", "filled")]):
            command = f"import {module}; from bench.first_call import *; print_seconds({kernel!r}, {module})"
            done = subprocess.run([sys.executable, "-c", command], stdout=subprocess.PIPE, text=True, check=True,
                                  env={**os.environ, "NUMBA_FLASH_CACHE": folder, "NUMBA_CACHE_DIR": folder})
            taken = json.loads(done.stdout.splitlines()[-1])
            rows.append({"d": kernel.d, "cache": cache, "import s": taken["import s"],
                         "first call s": taken["first s"] - taken["later s"]})
    return {"rows": rows}


def cpu(rounds):
    """Median µs of a small call on the CPU, float32, and seconds of its first in a process."""
    rivals = {"auto": engine("auto"), "standard": engine("standard"), "torch default": peers.sdpa()}
    rows = [row for shape in tqdm([SMALL, (1, 8, 128, 64)], desc="cpu")
            for row in both_directions("float32", shape, rivals, 3 * rounds, _many_seconds, gpu=False)]
    return {"rows": rows, "first call": first_calls(rounds, [Kernel("float32", 64, "cpu")], "numpy")["rows"]}


def _many_seconds(call, repeats=20):
    """Seconds of one of some calls in a row."""
    return awake_seconds(lambda: [call() for _ in range(repeats)]) / repeats


PARTS = {
    "float16": Part(float16, kernels=[Kernel("float16", 64, backward=True)]),
    "float32": Part(float32, kernels=[Kernel("float32", 64, name, backward=True) for name in WITH_FLOAT32
                                      if name != "standard"]),
    "device": Part(device, kernels=[Kernel("bfloat16", d, backward=True) for d in (64, 128)]),
    "decode": Part(decode, kernels=[Kernel("bfloat16", 128)]), "compile": Part(first_calls),
    "cpu": Part(cpu, gpu=False)}
