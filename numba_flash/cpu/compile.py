"""Compiled kernels, one per dtype: compiled at the first call that needs one, kept on disk where that is possible."""

from functools import lru_cache
from pathlib import Path

from numba import njit, types

from ..problem import FLOAT32, FLOAT64


def array(dtype, ndim, writable=False):
    """An array type that takes every array of this dtype: any strides, read-only or not, aligned or not."""
    return types.Array(dtype, ndim, "A", readonly=not writable, aligned=False)


def element_types(dtype):
    """How kernels see a dtype, and what they compute in. The 16-bit dtypes share a kernel, as bits."""
    if dtype == FLOAT64:
        return types.float64, types.float64
    return (types.float32 if dtype == FLOAT32 else types.uint16), types.float32


@lru_cache(maxsize=None)
def compiled(kernel, *argument_types):
    """The machine code of a kernel function for one signature."""
    options = {"nogil": True, "error_model": "numpy"}
    signature = types.void(*argument_types)
    try:
        dispatcher = njit(cache=True, **options)(kernel)
        _stamp(dispatcher)
        dispatcher.compile(signature)
    except (RuntimeError, OSError):     # nowhere to keep it: Numba finds no directory, or cannot write there
        dispatcher = njit(**options)(kernel)
        dispatcher.compile(signature)
    dispatcher.disable_compile()        # so that calls convert their arguments to this signature
    return dispatcher


def _stamp(dispatcher):
    """Tie cached code to all sources that a kernel is made of: Numba looks at the kernel's own file only."""
    package = Path(__file__).parent
    sources = sorted([*package.glob("*.py"), package.parent / "scores.py"])
    stamp = tuple((path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in sources)
    try:
        dispatcher._cache._cache_file._source_stamp = stamp
    except AttributeError:              # a Numba that keeps it elsewhere: then editing needs an empty cache
        pass
