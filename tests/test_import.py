"""Importing: quick, alone, and unharmed by machines without CUDA, without CuPy, or without a place to write."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CALL = """
    import numpy as np, numba_flash as nf
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 1, 3, 4)).astype(np.float32)
    o, lse = nf.attention(q, k, v, causal=True, return_lse=True)
    dq, dk, dv = nf.attention_backward(o, q, k, v, o, lse, causal=True)
"""


def python(code, *options, **environment):
    """Run code in a fresh process and return what it printed; it must succeed."""
    done = subprocess.run([sys.executable, *options, "-c", textwrap.dedent(code)], capture_output=True, text=True,
                          cwd=Path(sys.executable).anchor,         # not where a numba_flash lies
                          env={**os.environ, "PYTHONPATH": str(ROOT), **environment})
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return done.stdout


def test_nothing_is_imported_that_the_caller_did_not_bring():
    loaded = python(CALL + """
    import sys
    print([name for name in ("cupy", "torch", "numba.cuda", "numba_cuda", "jax", "matplotlib") if name in sys.modules])
    """)
    assert loaded.strip() == "[]"


def test_import_is_quick():
    seconds = min(float(python("""
        import time, numpy, ml_dtypes, numba
        start = time.perf_counter()
        import numba_flash
        print(time.perf_counter() - start)
        """)) for _ in range(3))
    assert seconds < 1


def test_no_warning_even_as_an_error():
    python(CALL, "-W", "error")


def test_where_nothing_can_be_written(tmp_path):
    """numba#4908, #5566: 'cannot cache function: no locator available'."""
    copy = tmp_path / "site"
    for package in ("numba_flash", "reference"):
        for path in (ROOT / package).rglob("*.py"):
            target = copy / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
            (target.parent / "__pycache__").write_text("a file where a folder would be: not even root can write here")
    python(CALL, "-W", "error", "-B", PYTHONPATH=str(copy), HOME="/nonexistent", XDG_CACHE_HOME="/dev/null/nowhere",
           NUMBA_CACHE_DIR="")


@pytest.mark.parametrize("broken", ["raise ImportError('no driver here')", "raise RuntimeError('driver too old')",
                                    "def __getattr__(name): raise RuntimeError('driver too old')"])
def test_a_broken_cupy_is_said_and_harms_nobody(tmp_path, broken):
    (tmp_path / "cupy.py").write_text(broken + "\n")
    out = python(CALL + """
    from numba_flash.__main__ import main
    main(["info"])
    """, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert "GPU: CuPy" in out and ("no driver" in out or "driver too old" in out)


def test_the_simulator_without_numba_cuda_says_what_to_install():
    out = python("""
    import sys
    sys.modules["numba_cuda"] = None            # as if it were not installed
    import numpy as np, numba_flash as nf
    q = np.ones((1, 1, 2, 4), np.float32)
    for kernel in "flash1", "flash2", "mma", "hopper":
        try:
            nf.attention(q, q, q, kernel=kernel)
        except ValueError as error:
            print(error)
    """, NUMBA_ENABLE_CUDASIM="1").splitlines()
    assert len(out) == 4
    assert all("the package numba-cuda is not installed: pip install numba-cuda" in line for line in out[:2])
    assert all("no tensor cores" in line and "numba-cuda" not in line for line in out[2:])


def test_a_foreign_reference_stops_only_what_needs_it(tmp_path):
    (tmp_path / "reference.py").write_text("raise RuntimeError('run')\n")
    out = python("""
    from numba_flash.__main__ import main
    main(["info"])
    main("demo --steps 1 --dim 8 --heads 2 --layers 1 --context 8 --batch 1 --sample 1 --attention standard".split())
    for arguments in ["check"], ["demo", "--attention", "reference"]:
        try:
            main(arguments)
        except SystemExit as stop:
            print(stop)
    """, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert "engines:" in out and "it writes:" in out
    assert out.splitlines()[-2].startswith(f"check can't run: a module named reference at {tmp_path}")
    assert out.splitlines()[-1] == "2"
