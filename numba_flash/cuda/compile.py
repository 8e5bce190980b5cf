"""From a kernel factory to a compiled kernel: in memory, on disk, and without a GPU.

A kernel factory is a function of hashable arguments (tile shape, flags, dtype) that returns a plain Python function,
the kernel, and the Numba types of its parameters. `compile_cubin` compiles what it returns for the GPU at hand and
keeps the machine code on disk, so that the next process starts in milliseconds; `compile_kernel` and `assemble` do the
same with no GPU in sight, and report registers and spills.
"""

import hashlib
import importlib.metadata
import os
import re
import subprocess
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

SIMULATOR = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")

try:
    import numba_cuda       # noqa: F401 (the numba.cuda that Numba itself brings is an old one)
    from numba import cuda
    import_error = None
except Exception as error:      # a broken driver or toolkit raises anything: why_not tells it
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
    """What `ptxas -v` says of one kernel."""

    cubin: bytes
    registers: int
    spill_bytes: int
    stack_bytes: int
    messages: str


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
        spills = re.findall(r"(\d+) bytes spill", done.stderr)
        return Assembled(target.read_bytes(), int(re.search(r"Used (\d+) registers", done.stderr).group(1)),
                         sum(map(int, spills)), int(re.search(r"(\d+) bytes stack", done.stderr).group(1)), done.stderr)


def link(code, cc):
    """Machine code of PTX or of intermediate code, by nvJitLink, and what it says of it.

    PTX is assembled as a part of a program, whose other parts a kernel must be ready to meet: setmaxnreg is then
    ignored, and wgmma serialised (C7504, C7512). Intermediate code is optimised as a whole.
    """
    from cuda.core import Linker, LinkerOptions, ObjectCode
    is_ptx = isinstance(code, str)
    part = ObjectCode.from_ptx(code.encode()) if is_ptx else ObjectCode.from_ltoir(code)
    options = LinkerOptions(arch=_architecture(cc), link_time_optimization=None if is_ptx else True)
    linker = Linker(part, options=options)
    return bytes(linker.link("cubin").code), linker.get_info_log()


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


@lru_cache(maxsize=None)
def _source_hash():
    """Hash of all that decides what a factory with given arguments compiles to: our sources and the compilers."""
    digest = hashlib.sha256()
    package = Path(__file__).parent
    for path in sorted([*package.rglob("*.py"), package.parent / "scores.py", package.parent / "problem.py"]):
        digest.update(path.read_bytes())
    for name in ("numba", "numba-cuda", "llvmlite", "nvidia-nvvm", "nvidia-nvjitlink", "cuda-core"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = "none"
        digest.update(f"{name} {version};".encode())
    return digest.hexdigest()


def cache_folder():
    """Where machine code is kept: `$NUMBA_FLASH_CACHE`, else the user's cache folder; "" is nowhere."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path(os.path.expanduser("~"), ".cache"), "numba_flash")
    return os.environ.get("NUMBA_FLASH_CACHE", str(default))


def _read_cache(path):
    try:
        name, cubin = path.read_bytes().split(b"\n", 1)
        return name.decode(), cubin
    except (OSError, ValueError):
        return None


def _write_cache(path, name, cubin):
    """Keep a kernel for the next process, where that is possible; another process may do the same right now."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(name.encode() + b"\n" + cubin)
        os.replace(file.name, path)
    except OSError:
        pass


def compile_cubin(factory, args, threads, cc):
    """Compile ``factory(*args)`` to machine code for a GPU that is there.

    Returns
    -------
    name : str
        The kernel's name in it.
    cubin : bytes
    """
    key = f"{_source_hash()} {factory.__module__}.{factory.__qualname__}{args!r} {threads} {cc}"
    folder = cache_folder()
    path = Path(folder, hashlib.sha256(key.encode()).hexdigest() + ".cubin") if folder else None
    kept = path and _read_cache(path)
    if kept:
        return kept
    output = "ltoir" if isinstance(cc[-1], str) else "ptx"
    cubin, _ = link(compile_kernel(*factory(*args), threads, cc, output), cc)
    name = entry_name(cubin)
    if path:
        _write_cache(path, name, cubin)
    return name, cubin
