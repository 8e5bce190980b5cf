"""Bytes between a GPU and its memory (HBM), counted by ncu, beside what `reference.traffic` says of each algorithm.

==========  ==========================================================================
`float32`   standard, memory-efficient, flash1, flash2, forward and backward
`bfloat16`  forward, with the engines on tensor cores; `standard` works in float32
==========  ==========================================================================

This runs itself under ``ncu``, once for a part: every engine's call follows a kernel that does nothing but bear the
call's number, so that the kernels between two of them are one call's.

What the L2 cache (50 MB on an H200) does to the prediction: `reference.traffic` counts what kernels ask for, whatever a
cache may save. S and P of `standard` are gigabytes, so the cache can't help, and CuPy's softmax in several passes moves
more than the formula's one. K and V of a head are 2 MB here, and all query tiles of a head work at about the same time:
HBM is asked once, L2 the other times. So the engines from `flash2` on should move far less than predicted, as should
`flash1` with its Q and O, and what they ask of L2, in columns of its own, should be what the formula counts. Every
kernel starts with an empty cache (ncu sees to that), and what it leaves unwritten there at its end, up to 50 MB, is not
counted as written; q, k, v and o have 134 MB each in float32.
"""

import csv
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from numba_flash.cuda import config
from numba_flash.cuda.hopper import config as hopper_config
from numba_flash.cuda.mma import config as mma_config
from numba_flash.cuda.tensor_cores.spec import Spec
from numba_flash.problem import BFLOAT16
from reference import traffic

from .contest import Inputs, prepare, wait
from .ladder import kernels
from .parts import Part
from .rungs import CHUNK, ladder

BATCH, HEADS, N, D = 4, 32, 4096, 64            # also the example of the course
HBM = {"GB read": "dram__bytes_read.sum", "GB written": "dram__bytes_write.sum"}
L2 = {"GB read from L2": "lts__t_sectors_srcunit_tex_op_read.sum",
      "GB written to L2": "lts__t_sectors_srcunit_tex_op_write.sum"}
SHARED = 227 * 1024                             # bytes of shared memory that a block of an H200 may have
SECTOR = 32                                     # bytes
UNITS = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "sector": SECTOR}
REFUSED = "refused: "                           # how the line begins that says whose calls are not counted
DIRECTIONS = {"float32": ("forward", "backward"), "bfloat16": ("forward",)}


# ---- what is predicted -----------------------------------------------------------------------------------------------

def tile_rows(kernel):
    """block_m and block_n of the fastest shape that `flash1` or `flash2` has for the example in float32."""
    return next(shape[:2] for largest, _, shape in config.FLOAT32_SHAPES[kernel] if D <= largest)


def query_rows():
    """block_m of the forward kernels that go by the formula of FlashAttention-2, for the example on an H200."""
    spec = Spec(BFLOAT16, D, D)
    return {"flash2": tile_rows("forward")[0], "mma": mma_config.choose(spec, SHARED).block_m,
            "hopper": hopper_config.choose(spec, N).block_m}


def predicted(engine, direction="forward", itemsize=4):
    """Bytes of one head, or None where there is no formula for what the engine does.

    Parameters
    ----------
    engine : str
    direction : str
    itemsize : int
        Bytes of a number; `standard` and memory-efficient attention work in float32 whatever comes.

    Returns
    -------
    Traffic or None
    """
    sizes = {"n_q": N, "n_k": N, "d": D}
    if direction == "forward":
        if engine == "standard":
            return traffic.standard_attention_traffic(**sizes, itemsize=4, extra_passes=1)
        if engine == "memory-efficient":
            return traffic.memory_efficient_attention_traffic(**sizes, block_m=CHUNK, block_n=CHUNK, itemsize=4)
        if engine == "flash1":
            block_m, block_n = tile_rows("flash1_forward")
            return traffic.flash_attention_1_traffic(**sizes, block_m=block_m, block_n=block_n, itemsize=itemsize,
                                                     o_itemsize=4)
        block_m = query_rows().get(engine)
        return block_m and traffic.flash_attention_2_traffic(**sizes, block_m=block_m, block_n=1, itemsize=itemsize)
    if engine == "memory-efficient":
        return traffic.memory_efficient_attention_backward_traffic(**sizes, block_m=CHUNK, block_n=CHUNK, itemsize=4)
    if engine == "flash1":
        return traffic.flash_attention_1_backward_traffic(**sizes, block_m=1, block_n=tile_rows("flash1_backward")[1],
                                                          itemsize=itemsize)
    if engine == "flash2":
        return traffic.flash_attention_2_backward_traffic(**sizes, block_m=tile_rows("dq")[0],
                                                          block_n=tile_rows("dkdv")[1], itemsize=itemsize)
    return None                                 # standard's formula is for one that kept P; hopper sums dQ in float32


# ---- what is counted -------------------------------------------------------------------------------------------------

def number(direction, engine):
    """The number of a call."""
    names = list(ladder())
    return len(names) * (direction == "backward") + names.index(engine)


def profiled(dtype, directions):
    """Run in a process of its own under ncu: each call that is right, after a kernel with its number.

    Prints why the others are not.
    """
    import cupy as cp

    inputs, calls, refused = Inputs.of(dtype, (BATCH, HEADS, N, D)), {}, {}
    for direction in directions:
        row = prepare({"direction": direction}, inputs, ladder(), 1, backward=direction == "backward")
        calls |= {number(direction, name): call for name, call in row.calls.items()}
        refused |= {number(direction, name): figures["not measured"] for name, figures in row.figures.items()
                    if "not measured" in figures}
    print(REFUSED + json.dumps(refused), flush=True)
    marks = cp.RawModule(code="\n".join(f'extern "C" __global__ void call_{mark}() {{ }}' for mark in calls))
    marks = {mark: marks.get_function(f"call_{mark}") for mark in calls}
    wait(True)
    cp.cuda.profiler.start()
    for mark, call in calls.items():
        marks[mark]((1,), (1,), ())
        call.run()
    wait(True)
    cp.cuda.profiler.stop()


def read_counts(text):
    """Sums of each call's kernels from ncu's CSV: {number of the call: {metric: bytes}}."""
    lines = text.splitlines()
    first = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    counts, call = {}, None
    for row in csv.DictReader(lines[first:]):
        mark = re.match(r"call_(\d+)\b", row["Kernel Name"])
        if mark:
            call = int(mark.group(1))
        elif call is not None and row["Metric Unit"] in UNITS and row["Metric Value"] != "n/a":
            value = float(row["Metric Value"].replace(",", "")) * UNITS[row["Metric Unit"]]
            of_call = counts.setdefault(call, {})
            of_call[row["Metric Name"]] = of_call.get(row["Metric Name"], 0) + value
    return counts


def count(dtype, directions, metrics):
    """`read_counts` of a run under ncu, and {number: why a call is not among them}.

    RuntimeError with ncu's words if it counted nothing.
    """
    if shutil.which("ncu") is None:
        raise RuntimeError("ncu (Nsight Compute) is not installed, or not on PATH")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "ncu.csv")
        done = subprocess.run(
            ["ncu", "--csv", "--print-units", "base", "--log-file", str(log), "--metrics", ",".join(metrics),
             "--clock-control", "none", "--cache-control", "all", "--profile-from-start", "off", "--replay-mode",
             "kernel", sys.executable, "-c",
             f"from bench.traffic import profiled; profiled({dtype!r}, {tuple(directions)!r})"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        text = log.read_text() if log.is_file() else ""
    counts = read_counts(text)
    if not counts:
        words = [line for line in text.splitlines() if "==ERROR==" in line] or (done.stdout + text).splitlines()[-3:]
        raise RuntimeError("ncu counted nothing: " + " ".join(words))
    refused = next((line for line in done.stdout.splitlines() if line.startswith(REFUSED)), REFUSED + "{}")
    return counts, {int(mark): reason for mark, reason in json.loads(refused[len(REFUSED):]).items()}


def rows_of(counts, refused, directions, itemsize):
    """Rows of predicted and counted GB, and their ratio."""
    rows = []
    for direction in directions:
        for name in ladder():
            row, told = {"direction": direction, "engine": name}, predicted(name, direction, itemsize)
            if told:
                row |= {"predicted GB read": BATCH * HEADS * told.read * 1e-9,
                        "predicted GB written": BATCH * HEADS * told.written * 1e-9}
            mark = number(direction, name)
            found = counts.get(mark)
            if found is None:
                row["not measured"] = refused.get(mark, "ncu saw no kernel")
            else:
                row |= {what: found[metric] * 1e-9 for what, metric in {**HBM, **L2}.items() if metric in found}
                if told and set(HBM.values()) <= set(found):
                    row["counted / predicted"] = sum(found[metric] for metric in HBM.values()) / (
                        BATCH * HEADS * told.total)
            rows.append(row)
    return rows


def measure(dtype):
    """Rows of one part; without what ncu says of L2, if it doesn't know those counters."""
    directions = DIRECTIONS[dtype]
    try:
        counted = count(dtype, directions, [*HBM.values(), *L2.values()])
    except RuntimeError as reason:
        print(f"without L2: {reason}", file=sys.stderr)
        counted = count(dtype, directions, list(HBM.values()))
    return {"rows": rows_of(*counted, directions, 4 if dtype == "float32" else 2),
            "sizes": {"batch": BATCH, "heads": HEADS, "n": N, "d": D}}


def float32(_):
    """GB between GPU and HBM, float32, beside the formula."""
    return measure("float32")


def bfloat16(_):
    """GB between GPU and HBM, bfloat16, forward, beside the formula."""
    return measure("bfloat16")


PARTS = {"float32": Part(float32, kernels=kernels("float32", [D])),
         "bfloat16": Part(bfloat16, kernels=kernels("bfloat16", [D]))}
