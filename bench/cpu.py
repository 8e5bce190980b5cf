"""The CPU engine beside PyTorch's CPU attention and the unfused NumPy formula: float32, forward and backward.

GFLOP/s by `flops`, medians of runs in turn, all with as many threads as the process may use; peak memory by the
resident set of a fresh process.
"""

import os
import resource
import subprocess
import sys
import threading
import time
from importlib.util import find_spec

import numpy as np
from tqdm import tqdm

from numba_flash import attention, attention_backward
from reference.tolerance import judge

from .measure import flops, in_turn, table, wall_seconds, write

SHAPES = [(1, 8, 1024, 64), (1, 8, 4096, 64), (1, 8, 2048, 128)]
MEMORY_SHAPE = (1, 8, 16384, 64)


def numpy_formula(q, k, v, causal):
    """What NumPy users write: every operation its own pass over n x n scores."""
    s = q @ k.swapaxes(-1, -2) * np.float32(q.shape[-1]**-0.5)
    if causal:
        s = np.where(np.tri(s.shape[-1], dtype=bool), s, np.float32(-np.inf))
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return p @ v, p


def numpy_backward(do, q, k, v, causal):
    """Its gradients, from what `attention_backward` starts from: no n x n array is kept from the forward pass."""
    p = numpy_formula(q, k, v, causal)[1]
    dv = p.swapaxes(-1, -2) @ do
    dp = do @ v.swapaxes(-1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * np.float32(q.shape[-1]**-0.5)
    return ds @ k, ds.swapaxes(-1, -2) @ q, dv


def rivals(do, q, k, v, causal):
    """Name to (forward, backward), functions without arguments."""
    o, lse = attention(q, k, v, causal=causal, return_lse=True)
    calls = {"numba_flash": (lambda: attention(q, k, v, causal=causal),
                             lambda: attention_backward(do, q, k, v, o, lse, causal=causal)),
             "numpy": (lambda: numpy_formula(q, k, v, causal), lambda: numpy_backward(do, q, k, v, causal))}
    try:
        import torch
    except ImportError:
        return calls
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tensors = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    attend, dt = torch.nn.functional.scaled_dot_product_attention, torch.from_numpy(do)
    ot = attend(*tensors, is_causal=causal)

    def torch_forward():
        with torch.no_grad():
            attend(*tensors, is_causal=causal)

    calls["torch"] = (torch_forward, lambda: torch.autograd.grad(ot, tensors, dt, retain_graph=True))
    return calls


def awake_seconds(call):
    """Seconds of a call right after another: threads that have just slept through others' turns take time to wake."""
    call()
    return wall_seconds(call)


def verify():
    """Nothing is timed before it is right."""
    do, q, k, v = np.random.default_rng(1).standard_normal((4, 1, 2, 200, 64)).astype(np.float32)
    o, lse = attention(q, k, v, causal=True, return_lse=True)
    answer = o, lse, *attention_backward(do, q, k, v, o, lse, causal=True)
    for name, (error, limit) in judge(answer, do, q, k, v, causal=True).items():
        if not error <= limit:
            raise SystemExit(f"{name} is off by {error}, allowed {limit}: not timing a wrong result")


def speed(rounds):
    """GFLOP/s of every rival at every shape."""
    rows = []
    for (batch, heads, n, d), causal in tqdm([(shape, causal) for shape in SHAPES for causal in (False, True)]):
        do, q, k, v = np.random.default_rng(0).standard_normal((4, batch, heads, n, d)).astype(np.float32)
        calls = rivals(do, q, k, v, causal)
        for i, direction in enumerate(("forward", "backward")):
            seconds = in_turn({name: pair[i] for name, pair in calls.items()}, awake_seconds, rounds)
            count = flops(batch, heads, n, n, d, causal=causal, backward=bool(i))
            row = {"direction": direction, "shape": f"{batch},{heads},{n},{d}", "mask": "causal" if causal else "full",
                   "ms": seconds["numba_flash"] * 1e3}
            row |= {f"{name} GFLOP/s": count / taken * 1e-9 for name, taken in seconds.items()}
            row |= {f"of {name}": taken / seconds["numba_flash"]
                    for name, taken in seconds.items() if name != "numba_flash"}
            rows.append(row)
    return rows


def peak_memory():
    """MB beyond inputs and outputs at `MEMORY_SHAPE`, forward and backward, in a fresh process."""
    done = subprocess.run([sys.executable, "-c", "from bench.cpu import print_peak; print_peak()"], check=True,
                          capture_output=True, text=True)
    forward, backward = map(float, done.stdout.split())
    return {"shape": ",".join(map(str, MEMORY_SHAPE)), "forward MB": forward, "backward MB": backward}


def print_peak():
    """Run in a process of its own: how far the resident set rises above what is held before and after."""
    small = np.ones((1, 1, 2, MEMORY_SHAPE[-1]), np.float32)
    attention_backward(small, small, small, small, *attention(small, small, small, return_lse=True))   # compile
    do, q, k, v = np.random.default_rng(0).standard_normal((4, *MEMORY_SHAPE), np.float32)

    def rise(call):
        before, peak, done = _resident(), [0], threading.Event()

        def watch():
            while not done.is_set():
                peak[0] = max(peak[0], _resident())
                time.sleep(0.001)

        watcher = threading.Thread(target=watch)
        watcher.start()
        answer = call()
        done.set()
        watcher.join()
        return answer, (peak[0] - before - sum(x.nbytes for x in answer)) / 1e6

    (o, lse), forward = rise(lambda: attention(q, k, v, return_lse=True))
    _, backward = rise(lambda: attention_backward(do, q, k, v, o, lse))
    print(forward, backward)


def _resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def main(path, quick=False):
    """Measure, print, store."""
    verify()
    if find_spec("torch") is None:
        print("PyTorch is not installed: its columns stay empty (pip install torch)", file=sys.stderr)
    rows = speed(2 if quick else 9)
    columns = ["direction", "shape", "mask", "ms", "numba_flash GFLOP/s", "torch GFLOP/s", "numpy GFLOP/s", "of torch",
               "of numpy"]
    table(rows, columns)
    by_case = {(row["direction"], row["shape"], row["mask"]): row["ms"] for row in rows}
    ratios = {f"{direction} {shape}": ms / by_case[direction, shape, "full"]
              for (direction, shape, mask), ms in by_case.items() if mask == "causal"}
    print("causal time / full time:", ", ".join(f"{name}: {ratio:.2f}" for name, ratio in ratios.items()))
    memory = peak_memory()
    print("peak memory beyond inputs and outputs:", memory)
    write(path, rows=rows, causal_over_full=ratios, memory=memory)
