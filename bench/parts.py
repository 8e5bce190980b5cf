"""A benchmark is a module with `PARTS`; this runs them one after the other, each stored as soon as it is there."""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from numba_flash.check import gpu_names, gpu_trouble

from . import peers
from .contest import Row, give_memory_back
from .results import table, write_part


@dataclass(frozen=True)
class Part:
    """One part of a benchmark.

    Attributes
    ----------
    measure : function
        Takes the number of rounds, returns {"rows": list of dict or `contest.Row`, ...}; its docstring is the title.
    gpu : bool
        Whether it needs a GPU; else it is for the CPU.
    slow : bool
        Whether it takes a minute by itself, so that it only runs when it is asked for by name.
    kernels : sequence of first_call.Kernel
        What to compile beforehand.
    """

    measure: Callable
    gpu: bool = True
    slow: bool = False
    kernels: Sequence = ()


def choose(parts, wanted=None, trouble=None):
    """Which parts to run: those asked for; or those for the GPU, or for the CPU if there is no GPU or no such part.

    Parameters
    ----------
    parts : dict
        Name to `Part`.
    wanted : list of str, optional
    trouble : str, optional
        Why there is no GPU.

    Returns
    -------
    names : list of str

    Raises
    ------
    SystemExit
        With words, if a name is unknown, or if nothing can run here.
    """
    if wanted:
        unknown = [name for name in wanted if name not in parts]
        if unknown:
            raise SystemExit(f"there is no part {', '.join(unknown)}; the parts are {', '.join(parts)}")
        names = [name for name in parts if name in wanted]
    else:
        on_gpu = not trouble and any(part.gpu for part in parts.values())
        names = [name for name, part in parts.items() if part.gpu == on_gpu and not part.slow]
        names = names or [name for name, part in parts.items() if not part.slow]
    if trouble and all(parts[name].gpu for name in names):
        raise SystemExit(f"can't measure {', '.join(names)} here, which needs a GPU: {trouble}")
    return names


def run(parts, path, wanted=None, rounds=5):
    """Measure, print and store parts.

    Parameters
    ----------
    parts : dict
    path : str, Path or None
        Of the JSON; None to store nothing.
    wanted : list of str, optional
        Names of parts; see `choose`.
    rounds : int

    Raises
    ------
    SystemExit
        After all others, if a part failed.
    """
    trouble = gpu_trouble()
    names, failed = choose(parts, wanted, trouble), []
    on_gpu = any(parts[name].gpu for name in names) and not trouble
    circumstances, compiled = {}, {}
    if on_gpu:
        from .first_call import compile_ahead

        if peers.why_not():
            print(f"{peers.why_not()}: no such peer is measured", file=sys.stderr)
        circumstances = on_what_gpu()
        kernels = list(dict.fromkeys(kernel for name in names for kernel in parts[name].kernels))
        compiled = compile_ahead(kernels) if kernels else {}
    with peers.on_stream() if on_gpu else nullcontext():
        for name in names:
            part = parts[name]
            print(f"\n{name}: {part.measure.__doc__.splitlines()[0]}", flush=True)
            if part.gpu and trouble:
                failed.append(name)
                print(f"NOT MEASURED: {name} needs a GPU: {trouble}", file=sys.stderr)
                continue
            start = time.perf_counter()
            try:
                result = part.measure(rounds)
            except Exception as reason:         # the other parts can still be measured
                failed.append(name)
                print(f"NOT MEASURED: {name}: {type(reason).__name__}: {reason}", file=sys.stderr)
                continue
            finally:
                give_memory_back(part.gpu)
            ahead = {kernel: compiled[kernel] for kernel in map(str, part.kernels) if kernel in compiled}
            show(**result, **({"compiled ahead": ahead} if ahead else {}))
            result["rows"] = [row.stored() if isinstance(row, Row) else row for row in result["rows"]]
            if path:
                write_part(path, name, **(circumstances if part.gpu else {}), **result, compiled_ahead_s=ahead,
                           took_s=round(time.perf_counter() - start, 1))
    if failed:
        raise SystemExit(f"not measured: {', '.join(failed)}")


def on_what_gpu():
    """The GPU, its driver, and what else belongs to the circumstances."""
    import cupy

    return {"gpu": next(gpu_names()), "cuda_driver": cupy.cuda.runtime.driverGetVersion(), **peers.versions()}


def show(rows, **more):
    """Print a part."""
    lines = [line for row in rows for line in (row.lines() if isinstance(row, Row) else [row])]
    empty = {name for name in lines[0] if all(line.get(name, "") == "" for line in lines)} if lines else set()
    table([{name: x for name, x in line.items() if name not in empty} for line in lines])
    for name, value in more.items():
        words = ", ".join(f"{what}: {x}" for what, x in value.items()) if isinstance(value, dict) else value
        print(f"{name}: {words}")
