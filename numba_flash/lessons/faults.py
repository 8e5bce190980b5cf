"""What can be wrong with a learner's file: each fault is an exception whose text explains it."""

import linecache
import traceback
from pathlib import Path
from textwrap import indent

import numpy as np


class Fault(Exception):
    """The file isn't right; the text says why, for the learner."""


class Stopped(BaseException):
    """Ends the threads of a block that has been given up; nobody sees it."""


def show_line(path, line):
    """A line of the learner's file, with its number."""
    return indent(f"line {line}: {linecache.getline(str(path), line).strip()}", "    ")


def show_place(place, shape):
    """Number of a thread in a block of some shape, or of a block in a grid: 3, or (3, 0) if there are two axes."""
    axes = max([1, *(axis + 1 for axis, size in enumerate(shape) if size > 1)])
    return str(place[0]) if axes == 1 else f"({', '.join(map(str, place[:axes]))})"


def line_of(error, path):
    """Where in the learner's file an exception arose; None if it didn't pass through it."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__)
             if Path(frame.filename) == Path(path)]
    return lines[-1] if lines else None


ADVICE = {
    OverflowError: "The result is too large for a float. On a GPU it would be inf, and inf / inf is NaN.",
    ZeroDivisionError: "On a GPU this gives inf or NaN, without an error.",
    UnboundLocalError: "This thread took a way through the kernel on which the variable gets no value.",
}


def raised(error, path, where=""):
    """An exception of the learner's code as a `Fault`."""
    line = line_of(error, path)
    if isinstance(error, SyntaxError) and error.lineno:
        line = error.lineno
    text = f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}"
    text = text.replace("'FakeCUDAModule' object", "Numba's simulator of cuda")
    if line:
        text += f"\n{show_line(path, line)}"
    if where:
        text += f"\nin {where}"
    advice = ADVICE.get(type(error))
    if isinstance(error, ValueError) and "math domain" in str(error):
        advice = "On a GPU log(0) gives -inf and log of a negative number gives NaN, without an error."
    if "'Array'" in text:
        advice = "In a kernel an array has elements, parts and a shape; to compute, go element by element."
    return Fault(f"{text}\n{advice}" if advice else text)


def ranges(wrong):
    """Where the wrong elements lie, axis by axis: "rows 8 to 9, columns 0 to 3"."""
    names = {1: ("elements",), 2: ("rows", "columns")}.get(wrong.ndim, [f"axis {n}:" for n in range(wrong.ndim)])
    parts = []
    for name, found in zip(names, np.nonzero(wrong)):
        first, last = found.min(), found.max()
        parts.append(f"{name} {first} to {last}" if first != last else f"{name.removesuffix('s')} {first}")
    return ", ".join(parts)


def differs(name, got, expected, written, tolerance):
    """Explain where an output differs from the specification; None if it doesn't.

    Parameters
    ----------
    name : str
    got, expected : arrays of the same shape
    written : boolean array of that shape, or None
        Which elements a thread has written; None if nobody knows.
    tolerance : float
        Allowed error, as a share of the largest expected value (of 1 if that is less).
    """
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    limit = tolerance * np.abs(expected[np.isfinite(expected)]).max(initial=1.0)
    with np.errstate(invalid="ignore"):
        error = np.where(got == expected, 0.0, np.abs(got - expected))
    wrong = ~(error <= limit)
    if not wrong.any():
        return None
    first = tuple(int(i) for i in np.argwhere(wrong)[0])

    def at(index):
        return f"{name}[{', '.join(map(str, index))}]"

    text = [f"{at(first)} must be {expected[first]:.6g}, it is {got[first]:.6g}"
            + (" (no thread has written it)" if written is not None and not written[first] else "")
            + f": the first of {wrong.sum()} wrong elements of {wrong.size}, in {ranges(wrong)}."]
    if written is not None and (wrong & ~written).any():
        text.append(f"Elements that no thread has written: {(wrong & ~written).sum()}; they keep the NaN that {name} "
                    "was filled with.")
    finite = np.where(wrong & np.isfinite(error), error, -1.0)
    if finite.max() >= 0:
        worst = tuple(int(i) for i in np.unravel_index(finite.argmax(), finite.shape))
        text.append(f"Largest error: {finite.max():.3g} at {at(worst)}; allowed is {limit:.1g}.")
    if np.isnan(got[wrong]).all() and (written is None or written[wrong].all()):
        text.append("All wrong elements are NaN: the kernel used something that has no value yet, "
                    "or computed inf - inf, inf / inf or 0 / 0.")
    return "\n".join(text)
