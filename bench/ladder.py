"""The CUDA engines in float32 beside PyTorch's memory-efficient attention: speed, memory against n, host time.

TFLOP/s by `flops`, medians of event-timed runs in turn; memory is the peak beyond inputs and outputs in CuPy's pool.
"""

import sys

import cupy as cp
import numpy as np
from tqdm import tqdm

from numba_flash import attention, attention_backward, engines
from numba_flash.check import gpu_names
from reference.tolerance import judge

from .measure import bytes_beyond_answer, event_seconds, flops, in_turn, table, wall_seconds, write

HIDDEN, TOKENS = 2048, 16384          # heads * d, batch * n
KERNELS = [name for name in engines.ON_GPU if name != "hopper"]      # which has no float32
MEMORY_LENGTHS = (2048, 4096, 8192, 16384)


def normal(*shape):
    return cp.random.default_rng(0).standard_normal(shape, dtype=cp.float32)


def verify():
    """Nothing is timed before it is right."""
    do, q, k, v = normal(4, 1, 2, 200, 64)
    for kernel in KERNELS:
        o, lse = attention(q, k, v, causal=True, return_lse=True, kernel=kernel)
        grads = attention_backward(do, q, k, v, o, lse, causal=True, kernel=kernel)
        answer = [x.get() for x in (o, lse, *grads)]
        for name, (error, limit) in judge(answer, *(x.get() for x in (do, q, k, v)), causal=True).items():
            if not error <= limit:
                raise SystemExit(f"{kernel}: {name} is off by {error}, allowed {limit}: not timing a wrong result")


def torch_calls(do, q, k, v, causal):
    """PyTorch's memory-efficient attention, forward and backward; None without PyTorch."""
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError:
        print("PyTorch is not installed: no peer", file=sys.stderr)
        return None
    tensors = [torch.from_dlpack(x).requires_grad_() for x in (q, k, v)]
    arriving, attend = torch.from_dlpack(do), torch.nn.functional.scaled_dot_product_attention
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION]):
        o = attend(*tensors, is_causal=causal)

    def forward():
        with torch.no_grad(), sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION]):
            attend(*tensors, is_causal=causal)

    return forward, lambda: torch.autograd.grad(o, tensors, arriving, retain_graph=True)


def calls(kernel, do, q, k, v, causal):
    """One engine's forward and backward, as functions without arguments."""
    o, lse = attention(q, k, v, causal=causal, return_lse=True, kernel=kernel)
    return (lambda: attention(q, k, v, causal=causal, kernel=kernel),
            lambda: attention_backward(do, q, k, v, o, lse, causal=causal, kernel=kernel))


def speed(rounds):
    """TFLOP/s of every engine, and of the peer."""
    rows = []
    for d, causal in tqdm([(d, causal) for d in (64, 128) for causal in (False, True)]):
        batch, heads, n = TOKENS // 4096, HIDDEN // d, 4096
        do, q, k, v = normal(4, batch, heads, n, d)
        rivals = {kernel: calls(kernel, do, q, k, v, causal) for kernel in KERNELS}
        peer = torch_calls(do, q, k, v, causal)
        if peer:
            rivals["torch efficient"] = peer
        for i, direction in enumerate(("forward", "backward")):
            seconds = in_turn({name: pair[i] for name, pair in rivals.items()}, event_seconds, rounds)
            count = flops(batch, heads, n, n, d, causal=causal, backward=bool(i))
            row = {"direction": direction, "d": d, "n": n, "mask": "causal" if causal else "full"}
            row |= {f"{name} TFLOP/s": count / taken * 1e-12 for name, taken in seconds.items()}
            if peer:
                row["flash2 / torch"] = seconds["torch efficient"] / seconds["flash2"]
            rows.append(row)
    return rows


def memory():
    """Peak MiB beyond inputs and outputs against n, 4 heads of d 64: all that a call takes from a pool of its own."""
    rows = []
    for n in MEMORY_LENGTHS:
        row = {"n": n}
        do, q, k, v = normal(4, 1, 4, n, 64)
        for kernel in KERNELS:
            for direction, call in zip(("forward", "backward"), calls(kernel, do, q, k, v, False)):
                row[f"{kernel} {direction}"] = bytes_beyond_answer(call) / 2**20
        rows.append(row)
    return rows


def host_time(rounds, batch=50):
    """Median µs of host time of one call at (1, 1, 128, 64), which returns before the device is done."""
    q, k, v = normal(3, 1, 1, 128, 64)
    do = q.copy()
    rivals = {}
    for kernel in KERNELS:
        forward, backward = calls(kernel, do, q, k, v, False)
        rivals |= {f"{kernel} forward": forward, f"{kernel} backward": backward}
    peer = torch_calls(do, q, k, v, False)
    if peer:
        rivals |= {"torch efficient forward": peer[0], "torch efficient backward": peer[1]}

    def seconds_of(call):
        cp.cuda.Device().synchronize()
        return wall_seconds(lambda: [call() for _ in range(batch)]) / batch

    return {name: taken * 1e6 for name, taken in in_turn(rivals, seconds_of, rounds).items()}


def main(path, quick=False):
    """Measure, print, store."""
    verify()
    rows = speed(2 if quick else 5)
    table(rows, list(rows[0]))
    peaks = memory()
    table(peaks, list(peaks[0]))
    host = host_time(3 if quick else 9)
    print("host µs a call at (1, 1, 128, 64):", {name: round(taken, 1) for name, taken in host.items()})
    driver = cp.cuda.runtime.driverGetVersion()
    write(path, gpu=next(gpu_names()), cuda_driver=driver, rows=rows, memory_mib=peaks, host_us=host)
    if not np.isfinite([value for row in rows for value in row.values() if isinstance(value, float)]).all():
        raise SystemExit("a figure is not finite")
