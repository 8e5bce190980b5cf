"""The engines: ways to compute the same thing, and the choice between them.

An engine is a module with these functions, imported when it is first needed::

    why_not(problem, backward=False)                          words, or None if it can do this problem here
    forward(problem, operands, o, lse)                        fills o and lse
    backward(problem, operands, do, dlse, o, lse, gradients)  fills gradients
    why_not_here()                                            words if it can do no problem at all here, or None;
                                                              those have it that need more than NumPy or CuPy
    why_later(problem)                                        words if "auto" should rather take a later one, or None;
                                                              not every engine has it
    LSE_IS_OPTIONAL                                           True if `forward` takes None for an lse that nobody wants;
                                                              not every engine has it

They get validated operands of sizes >= 1. `o` may have any strides; `lse` and the gradients are C-contiguous. `forward`
may return a launch for `again`, which fills other outputs of the same call: `tensor_cores.host.Prepared`.
"""

from functools import lru_cache
from importlib import import_module

from .cuda import SIMULATOR

# Fastest first: "auto" takes the first that can, of those that are not to be taken later.
ON_CPU = {"cpu": "numba_flash.cpu", "standard": "numba_flash.standard"}
ON_GPU = {"hopper": "numba_flash.cuda.hopper.engine", "mma": "numba_flash.cuda.mma.engine",
          "flash2": "numba_flash.cuda.flash2", "standard": "numba_flash.standard",
          "flash1": "numba_flash.cuda.flash1"}
ON_TENSOR_CORES = "hopper", "mma"   # they have limits: sizes, dtypes, options
ONLY_16_BIT = "hopper",             # takes no other inputs
IN_SIMULATOR = "flash2", "flash1"
NAMES = tuple(dict.fromkeys((*ON_CPU, *ON_GPU)))


def load(name):
    """Import the engine called `name`."""
    return import_module((ON_GPU | ON_CPU)[name])


def simulated():
    """Whether kernels run in Numba's CUDA simulator, which takes NumPy arrays."""
    return SIMULATOR


def why_not_here(engine):
    """Why an engine can do no problem at all here, in words; None if it may."""
    return engine.why_not_here() if hasattr(engine, "why_not_here") else None


def why_later(engine, problem):
    """Why "auto" should rather take an engine that comes later, in words; None if it shouldn't."""
    return engine.why_later(problem) if hasattr(engine, "why_later") else None


def choose(kernel, device, problem, backward=False):
    """Pick the engine for a call.

    Parameters
    ----------
    kernel : str
        ``"auto"``, or an engine's name.
    device : int or None
        Number of the GPU that the arrays are on, which must be the current one.
    problem : Problem
    backward : bool
        Whether gradients are asked for.

    Returns
    -------
    engine : module

    Raises
    ------
    TypeError, ValueError
        If there is no such engine, or if it can't do this problem, with its reason.
    """
    if not isinstance(kernel, str):
        raise TypeError(f"kernel must be the name of an engine or 'auto', got {type(kernel).__name__}")
    return _choose(str(kernel), device, problem, backward)


@lru_cache(maxsize=4096)
def _choose(kernel, device, problem, backward):
    on_gpu = device is not None
    here = ON_GPU if on_gpu else ON_CPU
    if kernel == "auto":
        reasons, later = [], []
        for name in here:
            engine = load(name)
            reason = engine.why_not(problem, backward)
            if reason is None and why_later(engine, problem) is None:
                return engine
            if reason is None:
                later.append(engine)
            reasons.append(f"{name}: {reason}")
        if later:
            return later[0]
        raise ValueError("no engine can do this problem; " + "; ".join(reasons))
    if kernel not in NAMES:
        raise ValueError(f"kernel must be 'auto' or one of {', '.join(NAMES)}, got {kernel!r}")
    if kernel not in here and not (kernel in ON_GPU and simulated()):
        simulator = ("" if on_gpu or kernel not in IN_SIMULATOR else
                     ", or set NUMBA_ENABLE_CUDASIM=1 before Python starts to run it in Numba's simulator")
        raise ValueError(f"kernel={kernel!r} runs on {'the CPU' if on_gpu else 'a GPU'}, and the arrays are on "
                         f"{'a GPU' if on_gpu else 'the CPU'}; pass {'NumPy' if on_gpu else 'CuPy'} arrays, "
                         f"or one of kernel={', '.join(('auto', *here))}{simulator}")
    engine = load(kernel)
    reason = engine.why_not(problem, backward)
    if reason is not None:
        raise ValueError(f"kernel={kernel!r} can't do this problem: {reason}; kernel='auto' picks one that can")
    return engine
