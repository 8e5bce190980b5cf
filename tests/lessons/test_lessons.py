"""The lessons: solutions pass, exercises don't, and each kind of mistake is found and explained."""

import os
import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest

from numba_flash import lessons
from numba_flash.__main__ import main
from numba_flash.check import gpu_trouble
from numba_flash.cuda import SIMULATOR
from numba_flash.cuda.compile import compile_kernel, why_no_compiler
from numba_flash.lessons import runner

SOLUTIONS = Path(__file__).parent / "solutions"
NUMBERS = list(lessons.names())
simulated = [pytest.mark.simulator,
             pytest.mark.skipif(not SIMULATOR, reason="runs in Numba's CUDA simulator: set NUMBA_ENABLE_CUDASIM=1")]


def solution(number):
    return SOLUTIONS / f"{lessons.names()[number]}.py"


def check(number, path):
    """Whether a file passes, and the report."""
    said = []
    return runner.check(number, path, say=said.append), "\n".join(said)


def check_source(number, source, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(source, encoding="utf-8")
    return check(number, path)


def changed(number, *replacements):
    """A solution with some of its text replaced."""
    source = solution(number).read_text(encoding="utf-8")
    for old, new in replacements:
        assert old in source
        source = source.replace(old, new)
    return source


@pytest.mark.parametrize("number", NUMBERS)
class TestEachLesson:
    pytestmark = simulated

    def test_solution_passes_with_the_counts_that_are_called_good(self, number):
        passed, report = check(number, solution(number))
        assert passed, report
        rows = [line.split()[-2:] for line in report.splitlines() if "thread  " in line or "warps  " in line]
        assert len(rows) == 5 and all(yours == good for yours, good in rows), report

    def test_exercise_as_handed_out_fails(self, number):
        passed, report = check(number, lessons.exercise(number))
        assert not passed
        assert "still a hole" in report and "--hint" in report


@pytest.mark.parametrize("number", NUMBERS)
def test_solution_only_fills_the_holes(number):
    filled = iter(solution(number).read_text(encoding="utf-8").splitlines())
    for line in lessons.exercise(number).read_text(encoding="utf-8").splitlines():
        if "..." not in line:
            assert line.removesuffix("  # noqa: F821") in filled, line


@pytest.mark.skipif(SIMULATOR or why_no_compiler() is not None, reason=f"compiles: {why_no_compiler()}")
@pytest.mark.parametrize("number", NUMBERS)
def test_solution_compiles_for_a_gpu(number):
    lesson = lessons.load(number)
    given, expected = runner.problem(lesson, lesson.CASES[0])
    arrays = {**given, **{name: x.astype(np.float32) for name, x in expected.items()}}
    for step in lesson.launches(**lesson.CASES[0]):
        kernel = runner.load_kernels(solution(number), [step.kernel])[step.kernel]
        types = tuple(numba.typeof(np.ascontiguousarray(arrays[name]) if np.ndim(arrays[name]) else arrays[name])
                      for name in step.arguments.split())
        assert step.kernel in compile_kernel(kernel.py_func, types, int(np.prod(step.block)), (7, 5))


@pytest.mark.parametrize("number", NUMBERS)
def test_lesson_is_complete(number):
    lesson = lessons.load(number)
    assert 5 < len(lesson.__doc__.splitlines()) <= 30 and len(lesson.HINT.split()) > 10
    assert max(map(len, lesson.__doc__.splitlines())) <= 100
    assert len(lesson.CASES) > 2
    for sizes in lesson.CASES:
        given, expected = runner.problem(lesson, sizes)
        names = {name for step in lesson.launches(**sizes) for name in step.arguments.split()}
        assert names == {*given, *expected}


def test_there_are_twelve():
    assert NUMBERS == list(range(1, 13))


COLUMN = "cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x"
STALE_BARRIER = "        cuda.syncthreads()      # or a fast thread overwrites the tile that others still use\n"
LOADED_BARRIER = "        cuda.syncthreads()      # or a thread uses what others haven't loaded yet\n"
BROKEN = {
    # what: (lesson, replacements in its solution, words of the report)
    "wrong index": (1, [(COLUMN, "cuda.threadIdx.x")], ["A race for y[0]", "block 0 writes", "block 1 writes",
                                                        "Blocks run in no particular order"]),
    "no bounds check": (1, [("i < y.shape[0]", "True")], [
        "Wrong at n 37", "an index outside of x, whose shape is (37,): 37", "line 14:", "thread 5 of block 4"]),
    "last element forgotten": (1, [("i < y.shape[0]", "i < y.shape[0] - 1")], [
        "y[63] must be", "no thread has written it", "the first of 1 wrong elements of 64, in element 63"]),
    "read twice": (1, [("a * x[i]", "a * x[i] + x[i] - x[i]")], ["global reads per thread: 3, where 1 are enough"]),
    "row for column": (2, [("y[col, row] = x[row, col]", "y[row, col] = x[row, col]")], [
        "y[0, 1] must be", "Largest error", "rows 0 to 15, columns 0 to 15"]),
    "one bound forgotten": (2, [(" and col < x.shape[1]", "")], ["an index outside of x", "rows 10, cols 19"]),
    "atomic beside plain": (2, [("    if row", "    if row == col == 0:\n        y[0, 1] = 0\n    if row"),
                                ("y[col, row] = x[row, col]", "cuda.atomic.add(y, (col, row), x[row, col])")], [
        "A race for y[0, 1]", "thread (0, 0) of block (0, 0) writes it", "atomically adds to it"]),
    "missing barrier": (3, [("    cuda.syncthreads()\n", "")], [
        "A race for tile[", "reads it", "writes it", "line 21: tile[ty, tx] = x[row, col]", "No barrier lies between"]),
    "barrier in a branch": (3, [("    cuda.syncthreads()\n", "        cuda.syncthreads()\n")], [
        "Wrong at rows 10, cols 19", "A barrier that only some threads", "at the barrier of",
        "at the end, not at any barrier", "line 22: cuda.syncthreads()"]),
    "two barriers for one": (3, [
        ("    cuda.syncthreads()\n", "        cuda.syncthreads()\n    else:\n        cuda.syncthreads()\n")], [
        "A barrier that only some threads", "line 22", "line 24"]),
    "no tile": (3, [("tile[ty, tx] = x[row, col]", "y[col, row] = x[row, col]"),
                    ("y[row, col] = tile[tx, ty]", "pass")], [
        "The values are right, but shared reads per thread: none"]),
    "tile not turned": (3, [("tile[tx, ty]", "tile[ty, tx]")], ["y[0, 1] must be"]),
    "scattered writes": (3, [("cuda.blockIdx.x * TILE + ty, cuda.blockIdx.y * TILE + tx",
                              "cuda.blockIdx.x * TILE + tx, cuda.blockIdx.y * TILE + ty"),
                             ("tile[tx, ty]", "tile[ty, tx]")], ["32-byte pieces, all warps: 96, where 64"]),
    "no barrier in the loop": (4, [("        cuda.syncthreads()\n", "")], ["A race for part["]),
    "barrier for some in the loop": (4, [("        cuda.syncthreads()\n", "            cuda.syncthreads()\n")], [
        "A barrier that only some threads"]),
    "all write the sum": (4, [("if tx == 0:", "if True:")], ["A race for l[0]", "let one thread alone write"]),
    "a step too few": (4, [("half = THREADS // 2", "half = THREADS // 4")], ["l[0] must be"]),
    "nothing for a thread without a share": (4, [("    part[tx] = share", "    if tx < x.shape[1]:\n"
                                                  "        part[tx] = share")], [
        "Wrong at rows 2, n 3", "reads part[", "which no thread has written"]),
    "an error that a race led to": (4, [("part[tx + half]\n        cuda.syncthreads()\n",
                                         "part[tx + half]\n        int(part[7 - tx])\n")], ["A race for part["]),
    "an error of what has no value": (4, [("    part[tx] = share\n", "    int(part[tx])\n")], [
        "reads part[0], which no thread has written"]),
    "maximum overwritten": (5, [("    cuda.syncthreads()          # or a fast thread overwrites strip[0] before others "
                                 "have read m\n", "")], ["A race for strip[0]"]),
    "not safe": (5, [("exp(x[row, col] - m)", "exp(x[row, col])")], [
        "rows 2, n 19, large", "computed inf - inf, inf / inf"]),
    "alpha forgotten": (6, [("l_row *= exp(m_row - base)", "pass")], [
        "p[0, 13] must be", "l[0] must be", "4 wrong elements of 4"]),
    "overflow": (6, [("exp(m_row - base)", "exp(1000 - 2 * m_row)")], ["OverflowError", "On a GPU it would be inf"]),
    "tail forgotten": (6, [("x[row, first + c] if first + c < n else -inf", "x[row, first + c]")], [
        "Wrong at rows 6, n 10", "an index outside of x", "(0, 10)"]),
    "inf - inf": (6, [("m_new if m_new != -inf else np.float32(0)", "m_new")], [
        "Wrong at rows 5, n 11, hidden 5", "All wrong elements are NaN"]),
    "a pass too many": (6, [("max(m_new, chunk[c])", "max(m_new, x[row, first + c] if first + c < n else -inf)")], [
        "global reads per thread: 48, where 32"]),
    "alpha forgotten in o": (7, [("alpha * l * acc[c]", "l * acc[c]")], [
        "o[0, 0] must be", "in row 0, columns 0 to 3"]),
    "tile overwritten": (8, [(STALE_BARRIER, "")], ["A race for k_tile["]),
    "tile used too early": (8, [(LOADED_BARRIER, "")], ["A race for k_tile["]),
    "rows that are not there": (8, [("min(BLOCK_N, n_k - j_first)", "BLOCK_N")], ["Wrong at n_q 6, n_k 10"]),
    "a thread leaves": (8, [("    q_row =", "    if i >= n_q:\n        return\n    q_row =")], [
        "Wrong at n_q 6, n_k 10", "at the end, not at any barrier", "a thread with nothing to do must come too"]),
    "all load all": (8, [("range(tx, BLOCK_N * D, BLOCK_M)", "range(0, BLOCK_N * D)")], ["A race for k_tile[0, 0]"]),
    "o not corrected": (9, [("alpha * l_old * o[i, c] + pv", "l_old * o[i, c] + pv")], ["o[0, 0] must be"]),
    "m not stored": (9, [("        m[i], l[i] = m_new, l_new", "        l[i] = l_new")], ["m[0] must be"]),
    "nothing skipped": (10, [("min(n_k, i_stop + n_k - n_q)", "n_k")], ["32-byte pieces", "tiles of keys skipped"]),
    "mask off by one": (10, [("j_first + r > i", "j_first + r > i + 1")], ["o[0, 0] must be"]),
    "not divided": (10, [("acc[c] / l", "acc[c]")], ["o[1, 0] must be"]),
    "o of rows that are not there": (10, [("    if i < n_q:", "    if True:")], ["an index outside of o"]),
    "delta forgotten": (11, [("p * (dp - delta_i)", "p * dp")], ["dq[0, 0] must be"]),
    "no delta": (11, [("delta[i] = found", "pass")], ["delta[0] must be", "no thread has written it"]),
    "scale forgotten": (12, [("scale * ds", "ds")], ["dk[0, 0] must be"]),
    "lse of queries that are not there": (12, [("if tx < rows:", "if True:")], ["an index outside of"]),
    "barrier forgotten": (12, [(LOADED_BARRIER, "")], ["A race for q_tile["]),
}


@pytest.mark.parametrize("what", BROKEN)
class TestBrokenVariants:
    pytestmark = simulated

    def test_is_found_and_explained(self, what, tmp_path):
        number, replacements, words = BROKEN[what]
        passed, report = check_source(number, changed(number, *replacements), tmp_path)
        assert not passed
        for word in words:
            assert word in report, report
        assert "Traceback" not in report and "numba_flash/lessons" not in report


def test_each_lesson_has_a_broken_variant():
    assert {number for number, _, _ in BROKEN.values()} == set(NUMBERS)


FAULTS = {
    "syntax": ("def linear(y, x, a, b)\n", ["SyntaxError: expected ':'", "line 1: def linear(y, x, a, b)"]),
    "missing kernel": ("x = 1\n", ["There is no kernel called linear", "is this the file of lesson 1?"]),
    "another lesson": ("def linear_2(): pass\ndef row_sum(): pass\n", [
        "is this the file of lesson 1? It has a kernel of lesson 4."]),
    "no decorator": ("def linear(y, x, a, b):\n    pass\n", ["linear is no kernel", "@cuda.jit"]),
    "import": ("import nothing_like_this\n", ["ModuleNotFoundError", "line 1: import nothing_like_this"]),
    "exit": ("raise SystemExit(0)\n", ["SystemExit", "line 1"]),
    "name": ("y[0] = nothing", ["NameError: name 'nothing' is not defined", "line 4: y[0] = nothing",
                                "in thread 0 of block 0"]),
    "too few parameters": ("", ["TypeError", "argument"]),
    "input written": ("x[0] = 1", ["The kernel writes to x, which is an input.", "line 4: x[0] = 1"]),
    "whole arrays": ("y = a * x + b", ["TypeError", "line 4", "go element by element"]),
    "too many indices": ("y[0, 0] = 1", ["too many indices for y, whose shape is (64,)"]),
    "float index": ("y[1.0] = 1", ["an index of y must be an integer, got 1.0"]),
    "not in the simulator": ("cuda.syncwarp()", [
        "AttributeError: Numba's simulator of cuda has no attribute 'syncwarp'"]),
    "division": ("y[0] = 1 / 0", ["ZeroDivisionError", "On a GPU this gives inf or NaN"]),
    "log": ("from math import log; y[0] = log(0)", ["On a GPU log(0) gives -inf"]),
    "endless with a barrier": ("while True: cuda.syncthreads()", ["Not finished after 0.5 seconds", "line 4: while"]),
    "too slow": ("import time; time.sleep(1.5)", ["Not finished after 0.5 seconds", "line 4: import time"]),
}


@pytest.mark.parametrize("what", FAULTS)
class TestFaults:
    pytestmark = simulated

    def test_is_explained(self, what, tmp_path, monkeypatch):
        source, words = FAULTS[what]
        if not source:
            source = "from numba import cuda\n@cuda.jit\ndef linear(y, x):\n    pass\n"
        elif "\n" not in source:
            source = f"from numba import cuda\n@cuda.jit\ndef linear(y, x, a, b):\n    {source}\n"
        if "0.5 seconds" in words[0]:
            from numba_flash.lessons import simulator
            monkeypatch.setattr(simulator, "SECONDS", 0.5)
        passed, report = check_source(1, source, tmp_path)
        assert not passed
        for word in words:
            assert word in report, report
        assert "Traceback" not in report and "numba_flash/lessons" not in report


OTHER_WAYS = {
    "a row first": (2, [("y[col, row] = x[row, col]", "y[col][row] = x[row][col]")]),
    "turned": (2, [("y[col, row] = x[row, col]", "y.T[row, col] = x[row, col]")]),
    "a part": (2, [("y[col, row] = x[row, col]", "part = y[:, row]\n        part[col] = x[row, col]")]),
    "a part at once": (1, [("y[i] = a * x[i] + b", "y[i:i + 1] = a * x[i] + b")]),
    "atomic addition": (9, [("m[i], l[i] = m_new, l_new", "m[i] = m_new\n"
                             "            cuda.atomic.add(l, i, l_new - l_old)")]),
    "a vote for a barrier": (3, [("cuda.syncthreads()", "cuda.syncthreads_or(row < 3)")]),
    "two arrays in one line": (8, [("    v_tile = cuda.shared.array((BLOCK_N, D), np.float32)\n", ""),
                                   ("k_tile = cuda.shared.array((BLOCK_N, D), np.float32)",
                                    "k_tile, v_tile = [cuda.shared.array((BLOCK_N, D), np.float32) for _ in 'kv']")]),
    "a device function": (1, [("@cuda.jit\n", "@cuda.jit(device=True)\ndef f(y, i, value):\n    y[i] = value\n\n\n"
                               "@cuda.jit\n"), ("y[i] = a * x[i] + b", "f(y, i, a * x[i] + b)")]),
}


@pytest.mark.parametrize("what", OTHER_WAYS)
class TestOtherWays:
    pytestmark = simulated

    def test_passes_too(self, what, tmp_path):
        number, replacements = OTHER_WAYS[what]
        passed, report = check_source(number, changed(number, *replacements), tmp_path)
        assert passed, report


# The command: what follows runs with the simulator and without it.

def test_list(capsys):
    assert main(["lesson"]) == 0
    out = capsys.readouterr().out
    assert all(f"{name}.py" in out for name in lessons.names().values()) and "--start" in out


def test_text_and_hint(capsys):
    assert main(["lesson", "3", "--text", "--hint"]) == 0
    out = capsys.readouterr().out
    assert "a *barrier*" in out and 'return {"y": x.T}' in out and "tile[tx, ty]" in out
    assert main(["lesson", "4", "--hint"]) == 0
    assert capsys.readouterr().out.startswith("    part[tx] = share\n    cuda.syncthreads()\n")


def test_start_writes_and_never_overwrites(tmp_path, capsys):
    path = tmp_path / "mine.py"
    assert main(["lesson", "2", "--start", str(path)]) == 0
    assert f"lesson 2 {path}" in capsys.readouterr().out
    assert path.read_text() == lessons.exercise(2).read_text()
    path.write_text("precious")
    with pytest.raises(SystemExit):
        main(["lesson", "2", "--start", str(path)])
    assert "is there already" in capsys.readouterr().err and path.read_text() == "precious"


@pytest.mark.parametrize("arguments, words", [
    (["13"], "there is no lesson 13"), (["1", "nowhere.py"], "--start"), (["x"], "invalid int"),
    (["1", "--start", "/nowhere/at/all.py"], "nowhere"), (["1", "--gpu", "nowhere.py"], "there is no nowhere.py"),
    (["--start"], "give a number: lesson 1 --start"), (["--hint"], "give a number: lesson 1 --hint"),
    (["1", "/"], "/ is a folder")])
def test_says_what_is_wrong(arguments, words, capsys):
    with pytest.raises(SystemExit):
        main(["lesson", *arguments])
    assert words in capsys.readouterr().err


def test_an_interrupted_check_ends_quietly(capsys, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "run", interrupted)
    assert main(["lesson", "1", str(solution(1))]) == 130
    assert not "".join(capsys.readouterr()).strip()


def test_a_closed_pipe_ends_quietly():
    """As in ``lesson 1 --text | head``."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "numba_flash", "lesson", "1", "--text"], cwd=SOLUTIONS.parents[2],
                          stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.returncode == 1 and not done.stderr


def test_default_names_and_exit_status(tmp_path):
    """From a folder of the learner's own, as a learner would."""
    environment = {**os.environ, "PYTHONPATH": str(SOLUTIONS.parents[2]), "NUMBA_ENABLE_CUDASIM": "0"}

    def run(*arguments):
        return subprocess.run([sys.executable, "-m", "numba_flash", "lesson", *arguments], cwd=tmp_path,
                              env=environment, capture_output=True, text=True)

    assert run("3", "--start").returncode == 0
    done = run("3")
    assert done.returncode == 1 and "still a hole" in done.stdout and not done.stderr
    (tmp_path / "03_shared.py").write_text(solution(3).read_text())
    done = run("3", "03_shared.py", "--gpu")
    if gpu_trouble():
        assert done.returncode == 1 and "Numba finds no GPU here" in done.stdout, done.stdout + done.stderr
    else:
        assert done.returncode == 0 and "Passed." in done.stdout, done.stdout + done.stderr
    done = run("3")
    assert done.returncode == 0 and "Passed." in done.stdout, done.stdout + done.stderr
