"""`python -m numba_flash check` and `info`: what runs on this machine, and whether it is right."""

import platform
import sys
import time
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import ml_dtypes
import numpy as np

from . import engines
from .attention import attention, attention_backward
from .problem import FLOAT16, FLOAT32, FLOAT64, Problem

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
    """o, lse and the gradients by one engine, and the seconds that each direction took once compiled.

    An engine without a backward pass gives o and lse only, and None for its seconds.
    """
    do, q, k, v = arrays
    need = need_of(options)

    def timed(function, *args, **kwargs):
        wait = (lambda: None) if isinstance(q, np.ndarray) else q.device.synchronize
        function(*args, **kwargs)
        wait()
        start = time.perf_counter()
        answer = function(*args, **kwargs)
        wait()
        return answer, time.perf_counter() - start

    (o, lse), forward = timed(attention, q, k, v, return_lse=True, kernel=kernel, **options)
    try:
        grads, backward = timed(attention_backward, do, q, k, v, o, lse, need=need, kernel=kernel, **options)
    except ValueError:
        grads, backward = (), None
    answer = (o, lse, *grads)
    return answer if isinstance(q, np.ndarray) else tuple(x.get() for x in answer), forward, backward


def worst(names, judgement):
    """The largest error over its limit among some of the answers; at most 1 passes; None if there are none."""
    return max((error / limit if limit else float("inf") if error else 0.0
                for name, (error, limit) in judgement.items() if name in names), default=None)


def places():
    """Yield (engine, place, why it can't run there, or None); place is "cpu", "gpu" or "simulator"."""
    trouble = gpu_trouble()
    for name in engines.NAMES:
        if name in engines.ON_CPU:
            yield name, "cpu", None
        if name in engines.ON_GPU and engines.simulated() and name != "standard":
            yield name, "simulator", engines.why_not_here(engines.load(name))
        elif name in engines.ON_GPU:
            yield name, "gpu", trouble or engines.why_not_here(engines.load(name))


def put(x, place):
    """An array where an engine at that place wants it; anything else as it is."""
    if place != "gpu" or not isinstance(x, np.ndarray):
        return x
    import cupy

    return cupy.asarray(x)


def check_one(name, place, problem, problems):
    """Run one engine on one problem and print a line; return whether it is right, or None if it doesn't take it."""
    from reference.tolerance import judge       # here, as another module of that name must not stop `info` and the demo

    arrays, options = make(problem, problems)
    try:
        answer, forward, backward = run(name, [put(x, place) for x in arrays],
                                        {key: put(x, place) for key, x in options.items()})
    except ValueError as error:
        print(f"{name:10}{problem:10}   not its problem: {str(error).split(': ', 1)[-1].split(';')[0]}")
        return None
    judgement = judge(answer, *arrays, need=need_of(options), **options)
    ratios = [worst(names, judgement) for names in (("o", "lse"), ("dq", "dk", "dv", "dbias", "dsinks"))]
    wrong = not max(ratio for ratio in ratios if ratio is not None) <= 1
    cells = (f"{'-':>{width}}" if value is None else f"{value:{width}.2f}" for width, value in (
        (10, ratios[0]), (11, ratios[1]), (12, forward * 1e3), (13, backward and backward * 1e3)))
    print(f"{name:10}{problem:10}{''.join(cells)}   {place}{'   WRONG' if wrong else ''}", flush=True)
    return not wrong


def check():
    """Run every engine that can run here against the reference and print a table; return the number of faults."""
    print(f"{'engine':10}{'problem':10}{'o, lse':>10}{'gradients':>11}{'forward ms':>12}{'backward ms':>13}   "
          "(error / allowed error: at most 1 is right)")
    right, wrong, idle, faults = [], [], [], 0
    for name, place, reason in places():
        title = f"{name} ({place})"
        if reason:
            print(f"{name:10}{place:10}   did not run: {reason}")
            idle.append(title)
            continue
        problems = SIMULATED_PROBLEMS if place == "simulator" else PROBLEMS
        verdicts = [check_one(name, place, problem, problems) for problem in problems]
        faults += verdicts.count(False)
        (wrong if False in verdicts else right if True in verdicts else idle).append(title)
    for verdict, titles in (("right", right), ("wrong", wrong), ("did not run", idle)):
        if titles:
            print(f"{verdict}: {', '.join(titles)}")
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
                simulated = side == "CuPy" and engines.simulated() and name != "standard"
                missing = gpu_trouble() if side == "CuPy" and not simulated else None
                dtype = FLOAT16 if name in engines.ONLY_16_BIT else FLOAT32
                engine, its_problem = engines.load(name), replace(problem, dtype=dtype)
                reason = missing or engine.why_not(its_problem)
                later = [] if reason else [engines.why_later(engine, replace(problem, dtype=dtype))
                                           for dtype in (FLOAT32, FLOAT64)]
                places.append(f"{'simulator' if simulated else side}: {reason or 'runs here'}"
                              + "".join(f", but auto rather takes another: {why}" for why in filter(None, later)))
        print(f"  {name:10}{'; '.join(places)}")


def _cpu():
    from .cpu.threads import thread_count

    return f"{platform.processor() or platform.machine()}, {thread_count()} threads"


def reference_trouble():
    """Why the NumPy reference can't be imported here, or None. A file of that name is looked at, not run."""
    own = Path(__file__).resolve().parents[1] / "reference"
    found = find_spec("reference")
    if found and any((Path(folder) / "tolerance.py").is_file() for folder in found.submodule_search_locations or ()):
        return None
    if found is None:
        return f"numba_flash's own module reference is missing, which belongs at {own}; install numba_flash again"
    place = found.origin or list(found.submodule_search_locations)[0]
    return f"a module named reference at {place} hides numba_flash's own; rename it, or start Python in another folder"


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
        return 'CuPy is not installed (pip install ".[cuda13]" or ".[cuda12]")'
    except Exception as error:      # whatever a missing driver, a broken one or a full card raises
        return f"CuPy finds no usable CUDA device ({str(error).splitlines()[0]})"


def gpu_names():
    """Yield a line about each CUDA device."""
    import cupy

    for i in range(cupy.cuda.runtime.getDeviceCount()):
        properties = cupy.cuda.runtime.getDeviceProperties(i)
        yield (f"{properties['name'].decode()}, compute capability {properties['major']}.{properties['minor']}, "
               f"{properties['totalGlobalMem'] / 2**30:.0f} GiB")
