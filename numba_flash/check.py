"""`python -m numba_flash check` and `info`: what runs on this machine, and whether it is right."""

import platform
import sys
import time
from importlib import metadata

import ml_dtypes
import numpy as np

from reference.tolerance import judge

from . import engines
from .attention import attention, attention_backward
from .problem import FLOAT32, Problem

PROBLEMS = {
    # name: (q's shape, kv heads, n_k, d_v, dtype, options)
    "float32": ((2, 4, 200, 64), 4, 200, 64, np.float32, {}),
    "causal": ((1, 4, 257, 64), 4, 257, 64, np.float32, {"causal": True}),
    "grouped": ((1, 8, 65, 40), 2, 190, 24, np.float32, {"causal": True}),
    "window": ((1, 2, 300, 32), 2, 300, 32, np.float32, {"window": (60, 10), "softcap": 5.0}),
    "options": ((2, 2, 70, 16), 1, 90, 16, np.float32, {"alibi": True, "bias": True, "mask": True, "sinks": True}),
    "float16": ((1, 2, 130, 64), 2, 130, 64, np.float16, {}),
    "bfloat16": ((1, 2, 130, 64), 2, 130, 64, ml_dtypes.bfloat16, {"causal": True}),
    "float64": ((1, 2, 100, 32), 2, 100, 32, np.float64, {"causal": True}),
}
SIMULATED_PROBLEMS = {
    "float32": ((1, 2, 9, 8), 1, 11, 4, np.float32, {"causal": True}),
    "options": ((1, 2, 9, 8), 2, 11, 8, np.float32, {"alibi": True, "bias": True, "mask": True, "sinks": True}),
}


def make(name, problems=PROBLEMS):
    """Random inputs of one of the problems: (do, q, k, v), options."""
    shape, kv_heads, n_k, d_v, dtype, wanted = problems[name]
    batch, heads, n_q, d = shape
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape).astype(dtype) for shape in (
        (batch, heads, n_q, d_v), shape, (batch, kv_heads, n_k, d), (batch, kv_heads, n_k, d_v))]
    options = {key: value for key, value in wanted.items() if value is not True or key == "causal"}
    if "alibi" in wanted:
        options["alibi_slopes"] = rng.random(heads).astype(np.float32)
    if "bias" in wanted:
        options["bias"] = rng.standard_normal((heads, n_q, n_k)).astype(np.float32)
    if "mask" in wanted:
        options["mask"] = rng.random((batch, 1, n_q, n_k)) < 0.8
    if "sinks" in wanted:
        options["sinks"] = rng.standard_normal(heads).astype(np.float32)
    return arrays, options


def need_of(options):
    """The gradients that a problem's options have."""
    return tuple(name for name in ("bias", "sinks") if name in options)


def run(kernel, arrays, options):
    """o, lse and the gradients by one engine, and the seconds that each direction took once compiled."""
    do, q, k, v = arrays
    need = need_of(options)

    def timed(function, *args, **kwargs):
        function(*args, **kwargs)
        start = time.perf_counter()
        answer = function(*args, **kwargs)
        return answer, time.perf_counter() - start

    if isinstance(q, np.ndarray):
        (o, lse), forward = timed(attention, q, k, v, return_lse=True, kernel=kernel, **options)
        grads, backward = timed(attention_backward, do, q, k, v, o, lse, need=need, kernel=kernel, **options)
        return (o, lse, *grads), forward, backward
    from cupyx.profiler import benchmark

    o, lse = attention(q, k, v, return_lse=True, kernel=kernel, **options)
    grads = attention_backward(do, q, k, v, o, lse, need=need, kernel=kernel, **options)
    times = [benchmark(call, n_repeat=10, n_warmup=1).gpu_times.mean() for call in (
        lambda: attention(q, k, v, kernel=kernel, **options),
        lambda: attention_backward(do, q, k, v, o, lse, need=need, kernel=kernel, **options))]
    return tuple(x.get() for x in (o, lse, *grads)), *times


def worst(names, judgement):
    """The largest error over its limit among some of the answers; at most 1 passes."""
    return max(error / limit if limit else float("inf") if error else 0.0
               for name, (error, limit) in judgement.items() if name in names)


def check():
    """Run every engine that can run here against the reference and print a table; return the number of faults."""
    on_gpu, to_device = gpu_trouble() is None, None
    if on_gpu:
        import cupy

        to_device = cupy.asarray
    print(f"{'engine':10}{'problem':10}{'o, lse':>10}{'gradients':>11}{'forward ms':>12}{'backward ms':>13}   "
          "(error / allowed error: at most 1 is right)")
    faults = 0
    for name in engines.NAMES:
        for side, table in (("cpu", engines.ON_CPU), ("gpu", engines.ON_GPU)):
            simulated = side == "gpu" and engines.simulated()
            if name not in table or side == "gpu" and not (on_gpu or simulated and name != "standard"):
                continue
            problems = SIMULATED_PROBLEMS if simulated else PROBLEMS
            for problem in problems:
                arrays, options = make(problem, problems)
                placed, placed_options = arrays, options
                if side == "gpu" and not simulated:
                    placed = [to_device(x) for x in arrays]
                    placed_options = {key: to_device(x) if isinstance(x, np.ndarray) else x
                                      for key, x in options.items()}
                answer, forward, backward = run(name, placed, placed_options)
                judgement = judge(answer, *arrays, need=need_of(options), **options)
                o_ratio, gradient_ratio = (worst(names, judgement) for names in (
                    ("o", "lse"), ("dq", "dk", "dv", "dbias", "dsinks")))
                wrong = not max(o_ratio, gradient_ratio) <= 1
                faults += wrong
                print(f"{name:10}{problem:10}{o_ratio:10.2f}{gradient_ratio:11.2f}{forward * 1e3:12.2f}"
                      f"{backward * 1e3:13.2f}   {side}{'   WRONG' if wrong else ''}", flush=True)
    print("every engine is right" if not faults else f"{faults} wrong")
    return faults


def info():
    """Print versions, devices, and each engine with the reason if it can't run here."""
    print(f"Python {platform.python_version()} on {platform.platform()}")
    for package in ("numba_flash", "numpy", "scipy", "numba", "ml_dtypes", "numba-cuda", "cupy-cuda12x",
                    "cupy-cuda13x", "torch"):
        try:
            print(f"  {package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            print(f"  {package}: not installed")
    print(f"CPU: {_cpu()}")
    print(f"GPU: {gpu_trouble() or ', '.join(gpu_names())}")
    print("engines:")
    problem = Problem(1, 1, 1, 64, 64, 64, 64, FLOAT32, 0.125, 0, 128, 128)
    for name in engines.NAMES:
        places = []
        for side, table in (("NumPy", engines.ON_CPU), ("CuPy", engines.ON_GPU)):
            if name in table:
                missing = gpu_trouble() if side == "CuPy" and not engines.simulated() else None
                reason = missing or engines.load(name).why_not(problem)
                places.append(f"{side}: {reason or 'runs here'}")
        print(f"  {name:10}{'; '.join(places)}")


def _cpu():
    from .cpu.threads import thread_count

    return f"{platform.processor() or platform.machine()}, {thread_count()} threads"


def gpu_trouble():
    """Why CuPy arrays can't be used here, or None."""
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
        cupy.zeros(1)
        return None
    except ImportError as error:
        if "cupy" in sys.modules or error.name != "cupy":
            return f"CuPy is installed but does not load ({error})"
        return "CuPy is not installed (pip install 'numba_flash[cuda13]' or '[cuda12]')"
    except Exception as error:      # whatever a missing driver, a broken one or a full card raises
        return f"CuPy finds no usable CUDA device ({str(error).splitlines()[0]})"


def gpu_names():
    import cupy

    for i in range(cupy.cuda.runtime.getDeviceCount()):
        properties = cupy.cuda.runtime.getDeviceProperties(i)
        yield (f"{properties['name'].decode()}, compute capability {properties['major']}.{properties['minor']}, "
               f"{properties['totalGlobalMem'] / 2**30:.0f} GiB")
