"""From a compiled kernel to a running one: the CUDA driver through ctypes, on CuPy's current device and stream.

Numba's own launcher takes 40 to 55 µs of host time a call; packing the arguments once and calling the driver takes
about 5.
"""

import ctypes
import struct
import warnings
from functools import lru_cache

from .compile import SIMULATOR, compile_cubin, cuda, import_error

MAX_DYNAMIC_SHARED = 8              # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
CAPABILITY = 75, 76, 97     # cudaDeviceAttr: ComputeCapabilityMajor, ...Minor, MaxSharedMemoryPerBlockOptin
DEFAULT_SHARED = 48 * 1024          # what a block gets without asking


@lru_cache(maxsize=None)
def _driver():
    """The CUDA driver library."""
    import sys
    driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    driver.cuLaunchKernel.argtypes = [ctypes.c_void_p] + [ctypes.c_uint] * 7 + [ctypes.c_void_p] * 3
    return driver


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
    if cuda is None:
        return f"numba.cuda can't be imported ({import_error}): install numba-cuda, or use kernel=\"cpu\""
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


@lru_cache(maxsize=None)
def _capability(device):
    import cupy
    major, minor, shared = (cupy.cuda.runtime.deviceGetAttribute(attribute, device) for attribute in CAPABILITY)
    return (major, minor), shared


def capability():
    """Compute capability (major, minor) of the current device."""
    import cupy
    return _capability(cupy.cuda.runtime.getDevice())[0]


def shared_limit():
    """Bytes of shared memory that a block may have on the current device."""
    if SIMULATOR:
        return 227 * 1024
    import cupy
    return _capability(cupy.cuda.runtime.getDevice())[1]


def array_module():
    """CuPy, or NumPy for the simulator."""
    if SIMULATOR:
        import numpy
        return numpy
    import cupy
    return cupy


class Launcher:
    """One kernel on one device, ready to be launched.

    Parameters
    ----------
    factory, args
        See `compile`: ``factory(*args)`` builds the kernel and the types of its parameters.
    block : tuple of int
        Threads (x, y) of a block.
    shared_bytes : int
        Dynamic shared memory of a block.
    cc : tuple of int
    """

    def __init__(self, factory, args, block, shared_bytes, cc):
        name, cubin = compile_cubin(factory, args, block[0] * block[1], cc)
        self.block, self.shared_bytes = block, shared_bytes
        self.module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        call_driver("cuModuleLoadData", ctypes.byref(self.module), cubin)
        call_driver("cuModuleGetFunction", ctypes.byref(self.function), self.module, name.encode())
        if shared_bytes > DEFAULT_SHARED:
            call_driver("cuFuncSetAttribute", self.function, MAX_DYNAMIC_SHARED, ctypes.c_int(shared_bytes))
        _, signature = factory(*args)
        codes = [code for type_ in signature for code in _parameter_codes(type_)]
        self.layout = struct.Struct("@" + "".join(codes))
        self.offsets = [struct.calcsize("@" + "".join(codes[:n + 1])) - struct.calcsize("@" + code)
                        for n, code in enumerate(codes)]
        self.pointers = ctypes.c_void_p * len(codes)
        self.is_array = [hasattr(type_, "ndim") for type_ in signature]

    def __call__(self, grid, args):
        """Launch `grid` blocks on CuPy's current stream; doesn't wait for them."""
        import cupy
        flat = []
        for arg, is_array in zip(args, self.is_array):
            if is_array:        # what Numba passes of an array: owner, parent, size, itemsize, address, shape, strides
                flat += (0, 0, arg.size, arg.itemsize, arg.data.ptr, *arg.shape, *arg.strides)
            else:
                flat.append(0 if arg is None else arg)
        values = self.layout.pack(*flat)
        start = ctypes.cast(values, ctypes.c_void_p).value
        call_driver("cuLaunchKernel", self.function, grid, 1, 1, *self.block, 1, self.shared_bytes,
                    cupy.cuda.get_current_stream().ptr, self.pointers(*[start + n for n in self.offsets]), None)


def _parameter_codes(type_):
    """`struct` codes of the kernel parameters that Numba makes of one argument, and the driver finds by pointers."""
    if hasattr(type_, "ndim"):
        return "PPqqP" + "q" * (2 * type_.ndim)
    return [{"float32": "f", "float64": "d", "int64": "q", "none": "P", "tensor_map": "128s"}[str(type_)]]


@lru_cache(maxsize=None)
def _launcher(factory, args, block, shared_bytes, device):
    return Launcher(factory, args, block, shared_bytes, getattr(factory, "target", _capability(device)[0]))


def launch(factory, args, grid, block, shared_bytes, arguments):
    """Run ``factory(*args)``, compiled if need be, on `grid` blocks: on the GPU, or in the simulator.

    Parameters
    ----------
    factory, args, block, shared_bytes
        As for `Launcher`. A factory whose kernels need instructions of one GPU only has it as its ``target``.
    grid : int
        Blocks.
    arguments : tuple
        Arrays, numbers and None, as the kernel takes them.
    """
    if SIMULATOR:
        return _simulate(factory, args, grid, block, shared_bytes, arguments)
    import cupy
    _launcher(factory, args, block, shared_bytes, cupy.cuda.runtime.getDevice())(grid, arguments)


def launch_choice(factory, choice, grid, arguments, *more):
    """`launch` the kernel of ``factory(tile, spec, *more)`` as a `config.Choice` says."""
    launch(factory, (choice.tile, choice.spec, *more), grid, choice.block, choice.shared_bytes, arguments)


def option_arguments(problem, operands):
    """The arguments that all kernels end with; their types are `signatures.option_types`."""
    cap = 1.0 if problem.softcap is None else problem.softcap
    return (operands.alibi_slopes, operands.bias, operands.mask, problem.scale, cap, problem.offset, problem.left,
            problem.right)


def _simulate(factory, args, grid, block, shared_bytes, arguments):
    import numpy as np
    from numba.cuda.cudadrv.devicearray import FakeCUDAArray
    kernel, signature = factory(*args)

    def convert(argument, type_):
        if isinstance(argument, np.ndarray):        # wrapped by hand, as Numba would copy it and write it back
            return FakeCUDAArray(argument.view(np.uint16) if str(type_.dtype) == "uint16" else argument)
        return argument if argument is None else getattr(np, str(type_))(argument)

    with warnings.catch_warnings():         # np.errstate wouldn't reach the simulator's threads
        warnings.simplefilter("ignore", RuntimeWarning)
        cuda.jit(kernel)[grid, block, 0, shared_bytes](*map(convert, arguments, signature))
