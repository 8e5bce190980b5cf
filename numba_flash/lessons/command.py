"""``python -m numba_flash lesson``: list the lessons, write an exercise, show its text or hint, check a file."""

import os
import subprocess
import sys
from importlib.util import find_spec
from inspect import getsource
from pathlib import Path
from textwrap import dedent, indent

from . import exercise, load, names, title
from .runner import NOT_PASSED

SECONDS = 600       # for a whole check; the simulator has a limit of its own, for each launch
ROOT = Path(__file__).parents[2]


def add_arguments(parser):
    """Describe the command to `argparse`."""
    parser.add_argument("number", nargs="?", type=int, metavar="N", help="the lesson; without it, list all")
    parser.add_argument("file", nargs="?", metavar="FILE",
                        help="check this file (default: the exercise's own name, 01_map.py say, in this folder)")
    parser.add_argument("--start", nargs="?", const="", metavar="FILE",
                        help="write the exercise to FILE (default: its own name); never overwrites")
    parser.add_argument("--text", action="store_true", help="show what the lesson teaches")
    parser.add_argument("--hint", action="store_true", help="show a hint")
    parser.add_argument("--gpu", action="store_true", help="check on a GPU, not in Numba's simulator: results only")


def run(arguments):
    """Do what the command line asks for.

    Parameters
    ----------
    arguments : argparse.Namespace
        See `add_arguments`.

    Returns
    -------
    status : int
        0 if a file that was to be checked passes, or nothing was to be checked; 1 if it doesn't pass; 130, as shells
        have it, if the check was interrupted.

    Raises
    ------
    ValueError, OSError
        A lesson or file that isn't there, or a file that is there already.
    """
    number = arguments.number
    for name in ("start", "text", "hint", "gpu"):
        if number is None and getattr(arguments, name) not in (None, False):
            raise ValueError(f"give a number: lesson 1 --{name}")
    if number is None:
        show_list()
        return 0
    if number not in names():
        raise ValueError(f"there is no lesson {number}: they are {min(names())} to {max(names())}")
    file = Path(arguments.start or arguments.file or exercise(number).name)
    if arguments.start is not None:
        start(number, file)
    if arguments.text:
        print(text(number))
    if arguments.hint:
        print(dedent(load(number).HINT).strip("\n"))
    if arguments.start is None and not arguments.text and not arguments.hint:
        return check(number, file, arguments.gpu)
    return 0


def show_list():
    """Print all lessons."""
    for number, name in names().items():
        print(f"{number:3}  {name + '.py':26}{title(number)}")
    print("\nBegin with: python -m numba_flash lesson 1 --start")


def text(number):
    """What a lesson teaches, and what its kernels must compute, in NumPy."""
    lesson = load(number)
    return f"{lesson.__doc__.strip()}\n\nIn NumPy:\n\n{indent(getsource(lesson.specification).strip(), '    ')}"


def start(number, file):
    """Write an exercise into a new file, and say how to go on."""
    try:
        with open(file, "x", encoding="utf-8") as out:
            out.write(exercise(number).read_text(encoding="utf-8"))
    except FileExistsError:
        raise ValueError(f"{file} is there already, and is left as it is: give another name, --start FILE") from None
    named = "" if file.name == str(file) == exercise(number).name else f" {file}"
    print(f"{text(number)}\n\nWrote {file}. Fill its hole, then check it:\n"
          f"    python -m numba_flash lesson {number}{named}")


def check(number, file, gpu):
    """Check a file in a process of its own, as the simulator must be chosen before Numba is imported."""
    if file.is_dir():
        raise ValueError(f"{file} is a folder: name the file to check, {file / exercise(number).name} say")
    if not file.exists():
        raise ValueError(f"there is no {file}: write the exercise with python -m numba_flash lesson {number} --start")
    if find_spec("numba.cuda") is None:
        raise ValueError("this Numba has no numba.cuda: pip install numba-cuda")
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "0" if gpu else "1",
                   "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    command = [sys.executable, "-m", "numba_flash.lessons.runner", str(number), str(file)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, encoding="utf-8",
                              errors="replace", timeout=SECONDS)
    except subprocess.TimeoutExpired:
        print(f"Not finished after {SECONDS} seconds. Does a loop never end?")
        return 1
    except KeyboardInterrupt:
        print()                             # the prompt's line is its own
        return 130
    print(done.stdout, end="")
    if done.returncode not in (0, NOT_PASSED):
        print(done.stderr, end="")          # not the learner's fault: show all there is
    return 1 if done.returncode else 0
