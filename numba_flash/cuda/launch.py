"""From a compiled kernel to a running one: the CUDA driver, on CuPy's current device and stream.

Numba's own launcher takes 40 to 55 µs of host time a call; packing the arguments once and calling the driver takes
about 5.
"""

import ctypes
import struct
import threading
import warnings
from functools import lru_cache, partial
from importlib.util import find_spec

from . import SIMULATOR
from .cache import compiled

MAX_DYNAMIC_SHARED = 8              # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
# cudaDeviceAttr: ComputeCapabilityMajor, ...Minor, MaxSharedMemoryPerBlockOptin, MultiProcessorCount
MAJOR, MINOR, SHARED_LIMIT, PROCESSORS = 75, 76, 97, 16
DEFAULT_SHARED = 48 * 1024          # what a block gets without asking
_thread = threading.local()


@lru_cache(maxsize=None)
def _driver():
    """The CUDA driver library. Pointers go to its functions as ctypes objects, numbers as C ints."""
    import sys
    return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")


def call_driver(name, *args):
    """Call the driver; its errors become exceptions."""
    code = getattr(_driver(), name)(*args)
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"{name}: {(text.value or b'unknown error').decode()} ({code})")


@lru_cache(maxsize=None)
def why_no_device():
    """Why no kernel can run here, in words; None if one can."""
    if find_spec("numba_cuda") is None:     # importing it takes as long as all else of a first call: `build` does
        return ("the package numba-cuda is not installed: pip install numba-cuda (no GPU needed for the simulator), "
                "or use kernel=\"cpu\"")
    if SIMULATOR:
        return None
    try:
        import cupy
    except Exception as error:
        return f"CuPy can't be imported ({error}): install cupy-cuda13x or cupy-cuda12x"
    try:
        if cupy.cuda.runtime.getDeviceCount() < 1:
            return "no CUDA device is visible"
        _driver()
    except Exception as error:
        return f"there is no working CUDA driver ({error})"
    return None


def current_device():
    """Number of CuPy's current device; None in the simulator."""
    if SIMULATOR:
        return None
    import cupy
    return cupy.cuda.runtime.getDevice()


@lru_cache(maxsize=None)
def attribute(number, device):
    """A property of a device: `SHARED_LIMIT`, say."""
    import cupy
    return cupy.cuda.runtime.deviceGetAttribute(number, device)


def capability():
    """Compute capability (major, minor) of the current device."""
    device = current_device()
    return attribute(MAJOR, device), attribute(MINOR, device)


def shared_limit():
    """Bytes of shared memory that a block may have on the current device."""
    return 227 * 1024 if SIMULATOR else attribute(SHARED_LIMIT, current_device())


def _enter_context():
    """Give this thread a context: the driver launches nothing without, and CuPy may have had no need of one yet."""
    from cupy import cuda
    cuda.runtime.setDevice(cuda.runtime.getDevice())
    _thread.has_context = True


class Launcher:
    """One kernel on the current device, ready to be launched.

    Parameters
    ----------
    factory, args
        See `cache`: ``factory(*args)`` builds the kernel and the types of its parameters.
    block : tuple of int
        Threads (x, y) of a block.
    shared_bytes : int
        Dynamic shared memory of a block.
    cc : tuple of int
        See `cache.compiled`.
    """

    def __init__(self, factory, args, block, shared_bytes, cc):
        import cupy
        kernel = compiled(factory, args, block[0] * block[1], cc)
        self.module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        call_driver("cuModuleLoadData", ctypes.byref(self.module), kernel.cubin)
        call_driver("cuModuleGetFunction", ctypes.byref(self.function), self.module, kernel.name.encode())
        if shared_bytes > DEFAULT_SHARED:
            call_driver("cuFuncSetAttribute", self.function, MAX_DYNAMIC_SHARED, ctypes.c_int(shared_bytes))
        self.current_stream, self.launch = cupy.cuda.get_current_stream, cupy.cuda.driver.launchKernel
        self.handle, self.shape = self.function.value, (1, 1, *block, 1, shared_bytes)
        self.is_array = [parameter.startswith("array") for parameter in kernel.parameters]
        codes = [code for parameter in kernel.parameters for code in _codes(parameter)]
        parts = "@" + "P" * len(codes), *codes
        self.layout = struct.Struct("".join(parts))
        self.offsets = [struct.calcsize("".join(parts[:n + 1])) - struct.calcsize("@" + code)
                        for n, code in enumerate(codes, 1)]
        self.buffer = ctypes.c_char * self.layout.size

    def flatten(self, args, first=0):
        """What the driver is told of some arguments, from the `first` on; it doesn't keep arrays alive."""
        flat = []
        for arg, is_array in zip(args, self.is_array[first:]):
            if is_array:        # what Numba passes of an array: owner, parent, size, itemsize, address, shape, strides
                flat += (0, 0, arg.size, arg.itemsize, arg.data.ptr, *arg.shape, *arg.strides)
            else:
                flat.append(0 if arg is None else arg)
        return flat

    def pack(self, flat):
        """Flat arguments as the driver takes them: a buffer of pointers, and behind them what they point to.

        Its address comes with it. Each launch has its own, for another thread may launch the same kernel now.
        """
        buffer = self.buffer()
        start = ctypes.addressof(buffer)
        self.layout.pack_into(buffer, 0, *(start + offset for offset in self.offsets), *flat)
        return buffer, start

    def run(self, grid, packed):
        """Launch `grid` blocks on CuPy's current stream with packed arguments; doesn't wait for them.

        Through CuPy, as ctypes takes longer than the driver itself.
        """
        if not hasattr(_thread, "has_context"):
            _enter_context()
        self.launch(self.handle, grid, *self.shape, self.current_stream().ptr, packed[1], 0)

    def __call__(self, grid, args):
        """Launch `grid` blocks with arrays, numbers and None, as the kernel takes them."""
        self.run(grid, self.pack(self.flatten(args)))


def _codes(parameter):
    """`struct` codes of what Numba makes of one of `Compiled.parameters`: for the driver, a parameter each."""
    if parameter.startswith("array"):
        return [*"PPqqP", *"qq" * int(parameter.removeprefix("array"))]
    return [parameter]


@lru_cache(maxsize=None)
def _launcher(factory, args, block, shared_bytes, cc, device):
    return Launcher(factory, args, block, shared_bytes, cc or capability())


def launcher(factory, args, block, shared_bytes, cc=None):
    """The kernel of ``factory(*args)`` for the current device, or for the simulator.

    Parameters
    ----------
    factory, args, block, shared_bytes
        As for `Launcher`.
    cc : tuple of int, optional
        What to compile for, if not for the device's compute capability in general.

    Returns
    -------
    launch : function
        ``launch(grid, arguments)``: `grid` blocks; arrays, numbers and None, as the kernel takes them.
    """
    if SIMULATOR:
        return partial(_simulate, factory, args, block, shared_bytes)
    return _launcher(factory, args, block, shared_bytes, cc, current_device())


def _simulate(factory, args, block, shared_bytes, grid, arguments):
    import numpy as np
    from numba import cuda
    from numba.cuda.cudadrv.devicearray import FakeCUDAArray

    from .compile import load_factory
    kernel, signature = load_factory(factory)(*args)

    def convert(argument, type_):
        if isinstance(argument, np.ndarray):        # wrapped by hand, as Numba would copy it and write it back
            return FakeCUDAArray(argument.view(np.uint16) if str(type_.dtype) == "uint16" else argument)
        return argument if argument is None else getattr(np, str(type_))(argument)

    with warnings.catch_warnings():         # np.errstate wouldn't reach the simulator's threads
        warnings.simplefilter("ignore", RuntimeWarning)
        cuda.jit(kernel)[grid, block, 0, shared_bytes](*map(convert, arguments, signature))
