"""Twelve exercises that lead from a first kernel to FlashAttention-2's backward pass.

For somebody who knows NumPy; a GPU isn't needed, for Numba's simulator runs the kernels. The words are explained at the
top of `numba_flash.cuda`. ``python -m numba_flash lesson`` lists the lessons.

===================  ==================================================================================
``lesson_NN_*``      the lessons, a module each
``exercises``        what the learner gets: kernels with a hole, a file each
``command``          ``python -m numba_flash lesson``
``runner``           loads the learner's file and checks it, in a process of its own
``simulator``        Numba's simulator with watched memory: counts, races, barriers that not all threads reach
``faults``           what can be wrong with a file, in words
===================  ==================================================================================

The module of a lesson holds:

==================================  ===================================================================
docstring                           its first line is the title, the rest teaches one new idea
``HINT``                            a step towards the answer
``CASES``                           the sizes to check, a dict each; reads and writes are counted on the first
``inputs(rng, **sizes)``            what the kernels are given, by name
``specification(**inputs)``         what they must write, by name: NumPy, the plainest way
``launches(**sizes)``               the kernels, in order, each a `Launch`
``GOOD``                            the `Counts` of a good solution
``ENFORCED``                        the counts that a file must not exceed to pass
==================================  ===================================================================
"""

from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Launch:
    """One launch of one kernel.

    Attributes
    ----------
    kernel : str
        Name of the kernel in the learner's file.
    grid, block : int or tuple of int
        Blocks, and threads of a block.
    arguments : str
        Names of inputs and outputs in the kernel's order, with spaces between.
    """

    kernel: str
    grid: object
    block: object
    arguments: str


@dataclass(frozen=True)
class Counts:
    """How often memory is read and written.

    Attributes
    ----------
    global_reads, global_writes, shared_reads, shared_writes : int
        Elements that the busiest thread reads or writes.
    pieces : int
        Pieces of 32 bytes that all warps together move from or to global memory. What 32 neighbouring threads read at
        once comes in few pieces if it lies side by side, and in one piece each if it is scattered.
    """

    global_reads: int
    global_writes: int
    shared_reads: int
    shared_writes: int
    pieces: int


def names():
    """The lessons' names by number: ``{1: "01_map", ...}``."""
    found = sorted(module.name.removeprefix("lesson_") for module in iter_modules([str(HERE)])
                   if module.name.startswith("lesson_"))
    return {int(name[:2]): name for name in found}


@lru_cache(maxsize=None)
def load(number):
    """The module of a lesson."""
    return import_module(f".lesson_{names()[number]}", __name__)


def title(number):
    """First line of a lesson."""
    return load(number).__doc__.splitlines()[0].rstrip(".")


def exercise(number):
    """Path of what the learner starts from."""
    return HERE / "exercises" / f"{names()[number]}.py"


def blocks(n, size):
    """How many blocks of `size` cover n elements."""
    return (n + size - 1) // size
