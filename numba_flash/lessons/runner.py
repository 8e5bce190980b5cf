"""Checks a learner's file: ``python -m numba_flash.lessons.runner NUMBER FILE``, in a process of its own.

In the simulator if NUMBA_ENABLE_CUDASIM is set, on a GPU otherwise. `command` starts it and shows what it prints.
"""

import ast
import sys
from dataclasses import asdict
from pathlib import Path
from textwrap import indent

import numpy as np

from . import load, names, title
from .faults import Fault, differs, raised, show_line

NOT_PASSED = 3          # exit status; Python's own is 1 if this program fails
TOLERANCE = 2e-5        # of float32 sums of a few dozen terms
ALLOWED = {"pieces": 1}     # times as much as a good solution needs; else a tenth more: a number read twice is no crime

LABELS = {
    "global_reads": "global reads per thread", "global_writes": "global writes per thread",
    "shared_reads": "shared reads per thread", "shared_writes": "shared writes per thread",
    "pieces": "32-byte pieces, all warps",
}


def read_source(path):
    """The text of the learner's file, if it is Python without a hole."""
    try:
        source = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Fault(f"{path} can't be read: {error}") from None
    try:
        tree = ast.parse(source, str(path))
    except SyntaxError as error:
        raise raised(error, path) from None
    for node in ast.walk(tree):
        if isinstance(node, (ast.Expr, ast.Assign)) and getattr(node.value, "value", None) is ...:
            raise Fault(f"There is still a hole: replace the `...` by your code.\n{show_line(path, node.lineno)}")
    return source


def lessons_by_kernel():
    """The number of its lesson for the name of each kernel."""
    return {step.kernel: number for number in names() for step in load(number).launches(**load(number).CASES[0])}


def load_kernels(path, wanted):
    """Run the learner's file and return its kernels by name."""
    scope = {"__name__": "lesson", "__file__": str(path)}
    try:
        exec(compile(read_source(path), str(path), "exec"), scope)
    except Fault:
        raise
    except BaseException as error:          # a SystemExit of the file must not end the check without a word
        raise raised(error, path) from None
    for name in wanted:
        if name not in scope:
            owners = lessons_by_kernel()
            other = next((f" It has a kernel of lesson {owners[found]}." for found in scope
                          if found in owners and owners[found] != owners[name]), "")
            raise Fault(f"There is no kernel called {name} in {path}: is this the file of lesson {owners[name]}?"
                        f"{other}")
        if not hasattr(scope[name], "py_func"):
            raise Fault(f"{name} is no kernel: write @cuda.jit in the line above its def.")
    return {name: scope[name] for name in wanted}


def problem(lesson, sizes):
    """Inputs, and what must come out, by name."""
    given = lesson.inputs(np.random.default_rng(0), **sizes)
    with np.errstate(all="ignore"):
        expected = lesson.specification(**given)
    return given, {name: np.asarray(value) for name, value in expected.items()}


def simulate(path, kernels, launches, given, outputs):
    """Run the kernels in the simulator; return what they did to memory."""
    from .simulator import Memory, launch

    memory = Memory(path)
    arrays = {name: memory.add(name, x, name in outputs) if isinstance(x, np.ndarray) else x
              for name, x in {**given, **outputs}.items()}
    for step in launches:
        launch(kernels[step.kernel], step.grid, step.block, [arrays[name] for name in step.arguments.split()], memory)
    return memory


def why_no_gpu():
    """Why nothing can be checked on a GPU here, in words; None if it can."""
    from numba import cuda

    try:
        found, why = cuda.is_available(), ""
    except Exception as error:              # a broken driver or toolkit raises anything
        found, why = False, f" ({error})"
    return None if found else f"Numba finds no GPU here{why}. Without --gpu the file is checked in its simulator."


def run_on_gpu(path, kernels, launches, given, outputs):
    """Run the kernels on a GPU; fill `outputs`."""
    from numba import cuda

    arrays = {name: cuda.to_device(x) if isinstance(x, np.ndarray) else x for name, x in {**given, **outputs}.items()}
    try:
        for step in launches:
            kernels[step.kernel][step.grid, step.block](*[arrays[name] for name in step.arguments.split()])
        cuda.synchronize()
    except Exception as error:              # Numba tells its compile errors by many classes, the driver by others
        raise raised(error, path) from None
    for name, x in outputs.items():
        arrays[name].copy_to_host(x)


def check_case(lesson, path, kernels, sizes, simulated):
    """Run one size and compare; return the `Counts` of the simulator, or None."""
    given, expected = problem(lesson, sizes)
    outputs = {name: np.full(x.shape, np.nan, np.float32) for name, x in expected.items()}
    launches = lesson.launches(**sizes)
    memory = (simulate if simulated else run_on_gpu)(path, kernels, launches, given, outputs)
    written = {}
    if memory:
        for origin in memory.origins:
            written[origin.name] = np.ones(origin.shape, bool)
            written[origin.name].ravel()[list(origin.unwritten)] = False
    faults = [differs(name, outputs[name], expected[name], written.get(name), TOLERANCE) for name in expected]
    if any(faults):
        raise Fault("\n".join(fault for fault in faults if fault))
    return memory.count() if memory else None


def show_counts(yours, good, sizes):
    """A table of what the busiest thread reads and writes, beside a good solution."""
    lines = [f"{show_sizes(sizes):34}{'yours':>8}{'good':>8}"]
    for name, count in asdict(yours).items():
        lines.append(f"{LABELS[name]:34}{count:8}{getattr(good, name):8}")
    return "\n".join(lines)


def show_sizes(sizes):
    """Sizes in words; a flag that is off isn't one."""
    return ", ".join(name if value is True else f"{name} {value}"
                     for name, value in sizes.items() if value is not False)


def wasteful(lesson, counts):
    """What a right answer does too often to pass; None if nothing."""
    for name, why in lesson.ENFORCED.items():
        yours, good = getattr(counts, name), getattr(lesson.GOOD, name)
        if name.startswith("shared"):       # the lesson is about using it at all
            if yours == 0 < good:
                return f"The values are right, but {LABELS[name]}: none. {why}"
        elif yours > good * ALLOWED.get(name, 1.1):
            return f"The values are right, but {LABELS[name]}: {yours}, where {good} are enough. {why}"
    return None


def check(number, path, simulated=True, say=print):
    """Check a file against a lesson.

    Parameters
    ----------
    number : int
        The lesson.
    path : str or path
        The learner's file.
    simulated : bool
        Whether Numba's simulator is on.
    say : function
        Takes each piece of the report.

    Returns
    -------
    passed : bool
    """
    lesson, counts, path = load(number), None, str(path)
    say(f"lesson {number}, {title(number)}: {path}{'' if simulated else ', on a GPU'}")
    if not simulated and (reason := why_no_gpu()):
        say(f"\n{reason}")
        return False
    try:
        kernels = load_kernels(path, sorted({step.kernel for step in lesson.launches(**lesson.CASES[0])}))
        for sizes in lesson.CASES:
            try:
                found = check_case(lesson, path, kernels, sizes, simulated)
            except Fault as fault:
                raise Fault(f"Wrong at {show_sizes(sizes)}:\n\n{fault}") from None
            counts = counts or found
            say(f"  right at {show_sizes(sizes)}")
        if counts:
            say(f"\n{indent(show_counts(counts, lesson.GOOD, lesson.CASES[0]), '  ')}")
            if waste := wasteful(lesson, counts):
                raise Fault(waste)
    except Fault as fault:
        say(f"\n{fault}\n\nNot yet. For a hint: python -m numba_flash lesson {number} --hint")
        return False
    say("\nPassed. " + (f"The next one: python -m numba_flash lesson {number + 1} --start"
                        if number + 1 in names() else "That was the last one."))
    return True


def main():
    """The command: exit status 0 if the file passes, NOT_PASSED if it doesn't."""
    from ..cuda import SIMULATOR

    passed = check(int(sys.argv[1]), sys.argv[2], SIMULATOR, lambda text: print(text, flush=True))
    return 0 if passed else NOT_PASSED


if __name__ == "__main__":
    sys.exit(main())
