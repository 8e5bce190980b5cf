"""The CPU engine beside PyTorch's CPU attention and the unfused NumPy formula: float32, forward and backward.

All have as many threads as the process may use. What they take of memory says ``python -m bench memory``.
"""

import os

import numpy as np
from tqdm import tqdm

from . import peers
from .ceilings import products
from .contest import Call, Inputs, engine, measured
from .grid import MASKS
from .measure import flops
from .parts import Part

SHAPES = [(1, 8, 1024, 64), (1, 8, 4096, 64), (1, 8, 2048, 128)]


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


def numpy_rival(inputs, backward, causal):
    """A rival: the formula above."""
    do, q, k, v = inputs.arrays
    if backward:
        return Call(lambda: numpy_backward(do, q, k, v, causal))
    return Call(lambda: numpy_formula(q, k, v, causal)[:1])


def torch_rival(inputs, backward, causal):
    """A rival: PyTorch's attention by the backend of its choice, with as many threads as we have."""
    peers.import_torch().set_num_threads(len(os.sched_getaffinity(0)))
    return peers.sdpa()(inputs, backward, causal=causal)


RIVALS = {"numba_flash": engine("cpu"), "torch": torch_rival, "numpy": numpy_rival}


def speed(rounds, shapes=SHAPES):
    """GFLOP/s beside PyTorch and NumPy, float32."""
    ceilings, rows = products(["float32"], gpu=False), []
    for batch, heads, n, d in tqdm(shapes, desc="speed"):
        inputs = Inputs.of("float32", (batch, heads, n, d), gpu=False)
        for mask, causal in MASKS.items():
            for direction in ("forward", "backward"):
                backward = direction == "backward"
                case = {"direction": direction, "batch": batch, "heads": heads, "n": n, "d": d, "mask": mask}
                rows.append(measured(case, inputs, RIVALS, flops(batch, heads, n, n, d, causal=causal,
                                                                 backward=backward),
                                     rounds, ceilings, unit="GFLOP/s", backward=backward, causal=causal))
    return {"rows": rows, "ceiling": ceilings, "causal / full": causal_over_full(rows)}


def causal_over_full(rows):
    """How much of the full time causal attention takes; half is ideal."""
    taken = {(row.case["direction"], row.case["n"], row.case["d"], row.case["mask"]):
             row.figures["numba_flash"].get("ms") for row in rows}
    return {f"{direction} n {n} d {d}": ms / taken[direction, n, d, "full"]
            for (direction, n, d, mask), ms in taken.items()
            if mask == "causal" and ms and taken[direction, n, d, "full"]}


PARTS = {"speed": Part(speed, gpu=False)}
