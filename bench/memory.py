"""Peak bytes against the length of the sequence: quadratic for `standard`, linear for the others.

==========  ==========================================================================
`float32`   4 heads of d 64: all engines and PyTorch's memory-efficient attention
`bfloat16`  16 heads of d 128: also the tensor core engines, cuDNN and FlashAttention-2
`cpu`       8 heads of d 64, float32: the CPU engine, `standard` and PyTorch
==========  ==========================================================================

MiB beyond inputs and what a call returns: of a forward call, o (our calls also make lse, which counts); of a backward
call dq, dk, dv; of `both`, one after the other, all four. On a GPU it is what a call takes from a pool of its own of
CuPy's, and PyTorch's peak. On a CPU it is how far the resident set of a process of its own rises.
"""

import json
import os
import subprocess
import sys

from tqdm import tqdm

from . import peers
from .contest import Inputs, Row, engine, give_memory_back, prepare, wait
from .forward import LONG
from .ladder import kernels
from .measure import flops
from .parts import Part
from .rungs import ladder, memory_efficient

DIRECTIONS = "forward", "backward", "both"
LENGTHS = 2048, 4096, 8192, 16384
CPU_LENGTHS = 1024, 2048, 4096, 8192
PATIENCE = 4096                                 # largest n of memory-efficient attention on a CPU
FEW_BLOCKS = 8192                               # largest n of flash1, which has a block for a head and takes seconds
LARGEST_SCORES = 2**30                          # bytes; a CPU's memory isn't to be filled with S
TORCH = {"torch efficient": peers.sdpa("torch efficient")}
PEERS = {"float32": TORCH, "bfloat16": {**TORCH, "torch flash": peers.sdpa("torch flash"),
                                        "cudnn": peers.sdpa("cudnn")}}
ON_CPU = {"cpu": engine("cpu"), "standard": engine("standard"), "memory-efficient": memory_efficient,
          "torch": peers.sdpa()}


# ---- what a call takes -----------------------------------------------------------------------------------------------

def peak_on_gpu(call):
    """Bytes that a call takes from CuPy, by a pool of its own, and from PyTorch, less those of what it returns."""
    import cupy as cp

    give_memory_back(True)                      # what made the call's inputs may have taken most of the GPU's memory
    cuda, before = None if peers.why_not() else peers.import_torch().cuda, 0
    if cuda:
        cuda.synchronize()
        cuda.reset_peak_memory_stats()
        before = cuda.memory_allocated()
    pool = cp.cuda.MemoryPool()
    with cp.cuda.using_allocator(pool.malloc):
        answer = call()
        wait(True)
        taken = pool.total_bytes() + (cuda.max_memory_allocated() - before if cuda else 0)
        returned = sum(x.nbytes for x in answer)
    del answer
    pool.free_all_blocks()
    return taken - returned


def peak_on_cpu(call):
    """Bytes by which the resident set rises during a call, at its highest, less those of what the call returns."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")                                     # the highest so far is forgotten
    before = _resident("VmRSS")
    answer = call()
    return max(0, _resident("VmHWM") - before - sum(x.nbytes for x in answer))


def _resident(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))


def calls(make, inputs):
    """{direction: function without arguments that returns arrays}; what a call starts from is there before it."""
    def in_context(call):
        with call.context():
            return tuple(call.run())

    def both():
        return *in_context(make(inputs, True)), inputs.arrays[0]        # which is as large as o, and o is there too

    forward, backward = make(inputs, False), make(inputs, True)
    return {"forward": lambda: in_context(forward), "backward": lambda: in_context(backward), "both": both}


def peaks(rivals, heads, d, lengths, dtype="float32", gpu=True, limits=None):
    """Rows of MiB against n, of what was right at the smallest n.

    Parameters
    ----------
    rivals : dict
    heads, d : int
    lengths : sequence of int
    dtype : str
    gpu : bool
    limits : dict, optional
        Names to the largest n.
    """
    inputs, n = Inputs.of(dtype, (1, heads, lengths[0], d), gpu=gpu), lengths[0]
    checked = [prepare({"n": n, "direction": direction}, inputs, rivals, flops(1, heads, n, n, d), backward=backward)
               for direction, backward in (("forward", False), ("backward", True))]
    missing = {name: figures["not measured"] for row in checked for name, figures in row.figures.items()
               if "not measured" in figures}
    rows = []
    for n in tqdm(lengths, desc="memory"):
        inputs = Inputs.of(dtype, (1, heads, n, d), gpu=gpu)
        rows.append(Row({"n": n}, 1, "MiB", dtype, gpu, figures={name: {} for name in rivals}))
        for name, make in rivals.items():
            if name in missing:
                rows[-1].figures[name] = {"not measured": missing[name]}
            elif n > (limits or {}).get(name, n):
                rows[-1].refuse(name, "too large for it: its scores, or its time")
            else:
                try:
                    for direction, call in calls(make, inputs).items():
                        rows[-1].figures[name][f"{direction} MiB"] = (peak_on_gpu if gpu else peak_on_cpu)(call) / 2**20
                except Exception as reason:     # too little memory, which is a result too
                    rows[-1].refuse(name, reason)
    return {"rows": rows, "heads": heads, "d": d}


# ---- the parts -------------------------------------------------------------------------------------------------------

def float32(_):
    """MiB beyond inputs and outputs against n, 4 heads of d 64, float32."""
    return peaks(ladder() | PEERS["float32"], 4, 64, LENGTHS)


def bfloat16(_):
    """MiB beyond inputs and outputs against n, 16 heads of d 128, bfloat16."""
    return peaks(ladder() | PEERS["bfloat16"], 16, 128, LENGTHS, "bfloat16", limits={"flash1": FEW_BLOCKS})


def cpu(_, lengths=CPU_LENGTHS, heads=8, d=64):
    """MiB beyond inputs and outputs against n on the CPU, 8 heads of d 64, float32."""
    rows = [Row({"n": n}, 1, "MiB", "float32", False) for n in lengths]
    for name in ON_CPU:                                     # memory that one leaves behind is no room for the next
        command = f"from bench.memory import print_peaks; print_peaks({name!r}, {tuple(lengths)}, {heads}, {d})"
        done = subprocess.run([sys.executable, "-c", command], stdout=subprocess.PIPE, text=True, check=True,
                              env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"})     # what is freed is given back
        for row, figures in zip(rows, json.loads(done.stdout.splitlines()[-1])):
            row.figures |= figures
    return {"rows": rows, "heads": heads, "d": d}


def print_peaks(name, lengths, heads, d):
    """Run in a process of its own: the figures of one rival at each length, as JSON."""
    small = Inputs.of("float32", (1, 1, 2, d), gpu=False)
    longest = int((LARGEST_SCORES / 4 / heads)**0.5)
    try:
        for call in calls(ON_CPU[name], small).values():
            call()                                          # compile
    except Exception:
        pass                                                # `peaks` says why
    rows = peaks({name: ON_CPU[name]}, heads, d, lengths, gpu=False,
                 limits={"standard": longest, "memory-efficient": PATIENCE})["rows"]
    print(json.dumps([row.figures for row in rows]))


PARTS = {"float32": Part(float32, kernels=kernels("float32", [64])),
         "bfloat16": Part(bfloat16, kernels=[*kernels("bfloat16", [128]), LONG]), "cpu": Part(cpu, gpu=False)}
