"""Compiled kernels, kept on disk: a process that finds them there imports neither Numba nor the kernels' own modules.

A kernel factory is a function of hashable arguments (tile shape, flags, dtype) that returns a plain Python function,
the kernel, and the Numba types of its parameters. Here it has a name only, "module:function" in this package, since its
module imports Numba, which takes longer than everything else that a first call does.
"""

import hashlib
import importlib.metadata
import os
import tempfile
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple


class Compiled(NamedTuple):
    """Machine code, and what a launch needs to know of the kernel in it.

    Attributes
    ----------
    name : str
        The kernel's name.
    parameters : list of str
        What the kernel takes: "array" and a number of axes, or the `struct` code of a number or of bytes.
    cubin : bytes
    """

    name: str
    parameters: list
    cubin: bytes


@lru_cache(maxsize=None)
def _source_hash():
    """Hash of all that decides what a factory with given arguments compiles to: our sources and the compilers.

    None where the sources are no files.
    """
    digest = hashlib.sha256()
    package = Path(__file__).parent
    try:
        for path in sorted([*package.rglob("*.py"), package.parent / "scores.py", package.parent / "problem.py"]):
            digest.update(path.read_bytes())
    except OSError:
        return None
    for name in ("numba", "numba-cuda", "llvmlite", "nvidia-nvvm", "nvidia-nvjitlink", "cuda-core"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = "none"
        digest.update(f"{name} {version};".encode())
    return digest.hexdigest()


def cache_folder():
    """Where machine code is kept: `$NUMBA_FLASH_CACHE`, else the user's cache folder; "" is nowhere."""
    if "NUMBA_FLASH_CACHE" in os.environ:
        return os.path.expanduser(os.environ["NUMBA_FLASH_CACHE"])
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path(os.path.expanduser("~"), ".cache"), "numba_flash")
    return str(default) if default.is_absolute() else ""


def _checksum(kernel):
    words = " ".join([kernel.name, *kernel.parameters]).encode()
    return hashlib.sha256(words + b"\n" + kernel.cubin).hexdigest()


def _read(path):
    """What `_write` has written; None if it isn't there, or not as it was written."""
    try:
        head, cubin = path.read_bytes().split(b"\n", 1)
        checksum, name, *parameters = head.decode().split()
    except (OSError, ValueError):
        return None
    kernel = Compiled(name, parameters, cubin)
    return kernel if checksum == _checksum(kernel) else None


def _write(path, kernel):
    """Keep a kernel for the next process, where that is possible; another process may do the same right now."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            try:
                head = " ".join([_checksum(kernel), kernel.name, *kernel.parameters])
                file.write(head.encode() + b"\n" + kernel.cubin)
                file.close()
                os.replace(file.name, path)
            except OSError:
                os.unlink(file.name)


@contextmanager
def _alone(path):
    """Let no other process compile the kernel of this path meanwhile, where files can be locked: it waits for ours.

    One file serves all kernels, each by a byte of its own that need not exist.
    """
    with ExitStack() as stack:
        with suppress(ImportError, OSError):
            import fcntl

            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((path.parent / "lock").open("a"))
            fcntl.lockf(file, fcntl.LOCK_EX, 1, int(path.stem[:7], 16))     # until it is closed, or the process ends
        yield


def compiled(factory, args, threads, cc):
    """The kernel of ``factory(*args)`` as machine code: from disk, or compiled and kept there.

    Parameters
    ----------
    factory : str
        "module:function".
    args : tuple
    threads : int
        Threads of a block.
    cc : tuple
        Compute capability, (9, 0) say; (9, 0, "a") allows instructions that only this one has.

    Returns
    -------
    kernel : Compiled
    """
    key = f"{_source_hash()} {factory}{args!r} {threads} {cc}"
    folder = cache_folder() if _source_hash() else ""
    path = Path(folder, hashlib.sha256(key.encode()).hexdigest() + ".cubin") if folder else None
    kernel = path and _read(path)
    if kernel:
        return kernel
    from .compile import build

    if not path:
        return build(factory, args, threads, cc)
    with _alone(path):
        kernel = _read(path)                        # another process may have been faster
        if not kernel:
            kernel = build(factory, args, threads, cc)
            _write(path, kernel)
    return kernel
