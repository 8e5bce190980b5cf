"""Tokens/s of the demo, ``python -m numba_flash demo``, by engine.

==========  ==========================================================================
`gpu`       context 2048, attention in float32 and in bfloat16
`cpu`       a small context
==========  ==========================================================================

Everything but attention is the same plain NumPy or CuPy code in float32, so the gain is that of a whole training step.
First the losses of each engine are held against those with the NumPy reference, at a small size.
"""

from dataclasses import replace

import numpy as np
from tqdm import tqdm

from numba_flash import demo, engines

from .ladder import kernels
from .measure import in_turn
from .parts import Part

CHECKED = demo.Settings(steps=4, batch=2, context=32, dim=64, heads=2, layers=1, sample=0)
GPU = demo.Settings(steps=6, batch=4, context=2048, dim=512, heads=8, layers=4, sample=0)
CPU = demo.Settings(steps=10, batch=4, context=256, dim=128, heads=4, layers=2, sample=0)
# Of a loss near 5, in the first steps: all that rounding q, k, v and o to 16 bits may do.
LARGEST_ERROR = {"float32": 1e-3, "bfloat16": 5e-2}


def seconds_of_training(settings, xp):
    """Seconds of the steps of a training run, its tokens, and its losses."""
    result = demo.train(settings, xp, progress=False)
    tokens = settings.steps * settings.batch * settings.context
    return tokens / result.tokens_per_second, tokens, result.losses


def tokens_per_second(settings, ways, xp, rounds):
    """Rows of tokens/s in turn, of what gives the reference's losses.

    Parameters
    ----------
    settings : demo.Settings
    ways : list of (engine, dtype)
    xp : module
        NumPy or CuPy.
    rounds : int
    """
    right = seconds_of_training(replace(CHECKED, attention="reference"), xp)[-1]
    rows, calls = [], {}
    for name, dtype in tqdm(ways, desc="check"):
        rows.append({"engine": name, "attention in": dtype})
        try:
            chosen = {"attention": name, "attention_dtype": dtype}
            error = float(np.max(np.abs(np.subtract(seconds_of_training(replace(CHECKED, **chosen), xp)[-1], right))))
            if not error <= LARGEST_ERROR[dtype]:
                raise ArithmeticError(f"its losses are off by {error:.2g}: not timing a wrong result")
            seconds_of_training(replace(settings, steps=2, **chosen), xp)                   # compile, warm up
        except Exception as reason:             # an engine that has no such problem
            rows[-1]["not measured"] = str(reason).splitlines()[0]
            continue
        rows[-1]["error of loss"] = error
        calls[name, dtype] = replace(settings, **chosen)
    seconds = in_turn(calls, lambda chosen: seconds_of_training(chosen, xp)[0], rounds, warm=lambda chosen: None)
    first = None
    for row in rows:
        if (row["engine"], row["attention in"]) in seconds:
            taken = seconds[row["engine"], row["attention in"]]
            row["tokens/s"] = settings.steps * settings.batch * settings.context / taken
            first = first or taken
            row["of the first"] = first / taken
    sizes = {name: getattr(settings, name) for name in ("batch", "context", "dim", "heads", "layers")}
    return {"rows": rows, "settings": sizes}


def gpu(rounds):
    """Tokens/s on a GPU at context 2048."""
    import cupy

    names = ["standard", *(name for name in reversed(engines.ON_GPU) if name != "standard")]
    ways = [(name, dtype) for dtype in ("float32", "bfloat16") for name in names
            if dtype != "float32" or name not in engines.ONLY_16_BIT]
    return tokens_per_second(GPU, ways, cupy, min(rounds, 3))


def cpu(rounds, settings=CPU):
    """Tokens/s on the CPU."""
    return tokens_per_second(settings, [("standard", "float32"), ("cpu", "float32")], np, min(rounds, 3))


DIMS = sorted({settings.dim // settings.heads for settings in (CHECKED, GPU)})
PARTS = {"gpu": Part(gpu, kernels=[kernel for dtype in LARGEST_ERROR for kernel in kernels(dtype, DIMS)]),
         "cpu": Part(cpu, gpu=False)}
