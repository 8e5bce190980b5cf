"""From a kernel factory (see `cache`) to machine code, with Numba; needs no GPU.

`build` compiles what a launch runs; `compile_kernel`, `assemble` and `link` are its steps and others, and report
registers and spills.
"""

import re
import subprocess
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path

from . import SIMULATOR
from .cache import Compiled

try:
    import numba_cuda       # noqa: F401 (the numba.cuda that Numba itself brings is an old one)
    from numba import cuda
    import_error = None
except Exception as error:      # a broken driver or toolkit raises anything: `build` tells it
    cuda, import_error = None, error


def device(function):
    """Decorate a device function: it is always inlined into the kernel that calls it."""
    if cuda is None:
        return function
    return cuda.jit(device=True)(function) if SIMULATOR else cuda.jit(device=True, forceinline=True)(function)


@contextmanager
def _without_device(cc):
    """Let Numba compile device functions where there is no GPU: it asks the driver for one, for its capability only."""
    from numba.cuda import dispatcher
    asked = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: type("Device", (), {"compute_capability": cc[:2]})
    try:
        yield
    finally:
        dispatcher.get_current_device = asked


def compile_kernel(kernel, signature, threads, cc, output="ptx"):
    """Compile to PTX, or to NVVM's own intermediate code ("ltoir"); needs no GPU.

    Parameters
    ----------
    kernel : function
    signature : tuple of numba types
    threads : int
        Threads of a block: the compiler shares the registers out among them.
    cc : tuple
        Compute capability, (9, 0) say; (9, 0, "a") allows instructions that only this one has.
    output : {"ptx", "ltoir"}
    """
    with _without_device(cc):
        code, _ = cuda.compile(kernel, signature, device=False, abi="numba", cc=cc, output=output,
                               launch_bounds=(threads, 1))
    return code


def _architecture(cc):
    return "sm_" + "".join(map(str, cc))


def entry_name(cubin):
    """Name of the one kernel in machine code: functions have no constant bank for parameters, a kernel has."""
    return re.search(rb"\0\.nv\.constant0\.([\w$]+)\0", cubin).group(1).decode()


@dataclass(frozen=True)
class Assembled:
    """Machine code of one kernel, and what its assembler says of it."""

    cubin: bytes
    registers: int
    spill_bytes: int
    stack_bytes: int
    messages: str

    @classmethod
    def of(cls, cubin, messages):
        """From what ``ptxas -v`` says."""
        spills = re.findall(r"(\d+) bytes spill", messages)
        return cls(cubin, int(re.search(r"Used (\d+) registers", messages).group(1)), sum(map(int, spills)),
                   int(re.search(r"(\d+) bytes stack", messages).group(1)), messages)


def find_ptxas():
    """Path of ptxas: of PyPI's nvidia-cuda-nvcc, else of a CUDA toolkit, else None."""
    import shutil
    import sysconfig
    found = Path(sysconfig.get_path("purelib"), "nvidia").glob("*/bin/ptxas")
    return next((str(path) for path in found), None) or shutil.which("ptxas")


def assemble(ptx, cc):
    """Assemble PTX with ptxas; needs no GPU."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        done = subprocess.run([find_ptxas(), "-v", "-arch=" + _architecture(cc), str(source), "-o", str(target)],
                              capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"ptxas: {done.stderr}")
        return Assembled.of(target.read_bytes(), done.stderr)


def link(code, cc, output="cubin"):
    """Machine code of PTX, or of intermediate code, by nvJitLink, which is what runs, and what it says of it.

    Of intermediate code it can give the PTX ("ptx") that it makes of it on the way.

    PTX is assembled as a part of a program, whose other parts a kernel must be ready to meet: setmaxnreg is then
    ignored, and wgmma serialised (C7504, C7512). Intermediate code is optimised as a whole.
    """
    from cuda.core import Linker, LinkerOptions, ObjectCode
    is_ptx = isinstance(code, str)
    part = ObjectCode.from_ptx(code.encode()) if is_ptx else ObjectCode.from_ltoir(code)
    options = LinkerOptions(arch=_architecture(cc), link_time_optimization=None if is_ptx else True, verbose=True,
                            ptx=True if output == "ptx" else None)
    linker = Linker(part, options=options)
    return bytes(linker.link(output).code), linker.get_info_log()


@lru_cache(maxsize=None)
def why_no_compiler():
    """Why kernels can't be compiled to machine code and looked at here, in words; None if they can. Needs no GPU."""
    if cuda is None:
        return f"numba.cuda can't be imported: {import_error}"
    if SIMULATOR:
        return "the simulator compiles nothing"
    if find_ptxas() is None:
        return 'there is no ptxas: pip install ".[compile]"'
    try:
        link(compile_kernel(lambda: None, (), 32, (8, 0)), (8, 0))
    except Exception as error:      # NVVM, NVRTC or nvJitLink is missing, too old, or does not load
        return f'the CUDA compiler does not work here ({str(error).splitlines()[0]}): pip install ".[compile]"'
    return None


def load_factory(name):
    """The kernel factory called "module:function"."""
    module, function = name.split(":")
    return getattr(import_module("." + module, __package__), function)


def parameter(type_):
    """What a kernel takes for an argument of this Numba type, in the words of `cache.Compiled`."""
    if hasattr(type_, "ndim"):
        return f"array{type_.ndim}"
    return {"float32": "f", "float64": "d", "int64": "q", "none": "P", "tensor_map": "128s"}[str(type_)]


def build(factory, args, threads, cc):
    """Compile the kernel of ``factory(*args)``, a factory by its name, to machine code: returns a `cache.Compiled`."""
    if cuda is None:
        raise RuntimeError(f"numba.cuda can't be imported ({import_error}), and this kernel has not been compiled "
                           f"before: repair numba-cuda, or use kernel=\"standard\"") from import_error
    kernel, signature = load_factory(factory)(*args)
    code = compile_kernel(kernel, signature, threads, cc, "ltoir" if isinstance(cc[-1], str) else "ptx")
    cubin, _ = link(code, cc)
    return Compiled(entry_name(cubin), list(map(parameter, signature)), cubin)
