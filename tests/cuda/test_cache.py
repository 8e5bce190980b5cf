"""A kernel that is on disk is launched without Numba: two processes one after the other, GPU and driver made up."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from numba_flash.cuda import SIMULATOR, cache, compile

pytestmark = pytest.mark.skipif(SIMULATOR, reason="the simulator compiles nothing")
ROOT = Path(__file__).parent.parent.parent

CUPY = """
    import ctypes
    import numpy as np
    from types import SimpleNamespace

    class ndarray:
        '''An array that calls itself CuPy's, and lies on the host.'''

        def __init__(self, x, dtype=None):
            self.x = x if dtype is None else np.empty(x, dtype)
            self.data = SimpleNamespace(ptr=self.x.ctypes.data, device_id=0)

        def __getattr__(self, name):
            return getattr(self.x, name)

        def __getitem__(self, index):
            return ndarray(self.x[index])

        def ravel(self):
            return ndarray(self.x.ravel())

    empty = ndarray

    def empty_like(x):
        return empty(x.shape, x.dtype)

    zeros = empty

    def ascontiguousarray(x):
        return x

    class cuda:
        class runtime:
            getDevice = staticmethod(lambda: 0)
            getDeviceCount = staticmethod(lambda: 1)
            setDevice = staticmethod(lambda device: None)
            deviceGetAttribute = staticmethod(lambda number, device: {75: 9, 76: 0, 97: 227 << 10, 16: 132}[number])

        class driver:
            launched, check = [], False

            @classmethod
            def launchKernel(cls, function, *shape_stream_arguments):
                start = stop = shape_stream_arguments[-2]
                if cls.check:                   # then a kernel that has arguments: pointers, and what they point to
                    pointers = ctypes.c_uint64.from_address(start).value - start >> 3
                    stop = ctypes.c_uint64.from_address(start + 8 * (pointers - 1)).value
                cls.launched.append(ctypes.string_at(start, stop - start))

        @staticmethod
        def get_current_stream():
            return SimpleNamespace(ptr=0)
"""

CALL = """
    import sys
    import cupy, ml_dtypes, numpy as np
    from numba_flash.cuda import cache, launch

    class Driver:
        loaded = []

        def __getattr__(self, name):
            return lambda *args: 0

        def cuModuleLoadData(self, module, cubin):
            self.loaded.append(cubin)
            return 0

    launch._driver = Driver
    cupy.cuda.driver.check = CHECK
    before

    import numba_flash as nf
    q = cupy.empty((1, 1, 3, 8), ml_dtypes.bfloat16)
    o, lse = nf.attention(q, q, q, kernel="KERNEL", return_lse=True)
    if "KERNEL" != "hopper":
        nf.attention_backward(o, q, q, q, o, lse, kernel="KERNEL")
    assert all(cubin.startswith(b"START") for cubin in Driver.loaded), Driver.loaded
    for x in (o, lse):
        assert not CHECK or x.data.ptr.to_bytes(8, sys.byteorder) in cupy.cuda.driver.launched[0]
    launches = len(cupy.cuda.driver.launched)
    print(launches, len(Driver.loaded), [name for name in ("numba", "llvmlite") if name in sys.modules])
"""

MADE_UP = """
    class compile:
        '''Takes the place of the module that imports Numba.'''
        build = staticmethod(lambda factory, args, threads, cc: cache.Compiled("kernel", [], b"made up"))

    sys.modules["numba_flash.cuda.compile"] = compile
"""


def dedent(code):
    return "\n".join(line[4:] for line in code.splitlines())


@pytest.fixture
def run(tmp_path):
    """Run the call in a process of its own, and return what it prints."""
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "cupy.py").write_text(dedent(CUPY))
    (tmp_path / "broken").mkdir()
    for name in "numba", "numba_cuda", "llvmlite":
        (tmp_path / "broken" / f"{name}.py").write_text("raise AssertionError('imported')")

    def run(kernel, before, start, folders=("modules", "broken"), check=False):
        code = dedent(CALL.replace("    before\n", before))
        for word, value in ("KERNEL", kernel), ("START", start), ("CHECK", str(check)):
            code = code.replace(word, value)
        path = [*(str(tmp_path / folder) for folder in folders), str(ROOT)]
        environment = {**os.environ, "NUMBA_FLASH_CACHE": str(tmp_path / "cache")}
        done = subprocess.run([sys.executable, "-c", f"import sys\nsys.path[:0] = {path!r}\n{code}"], env=environment,
                              capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout.split(None, 2)

    return run


@pytest.mark.parametrize("kernel, kernels", [("hopper", 1), ("mma", 4), ("flash2", 4), ("flash1", 3)])
def test_a_second_process_imports_no_numba(run, kernel, kernels):
    first = run(kernel, MADE_UP, "made up")
    second = run(kernel, "", "made up")
    assert first == second == [str(kernels), str(kernels), "[]\n"]


@pytest.mark.skipif(compile.why_no_compiler() is not None, reason=str(compile.why_no_compiler()))
@pytest.mark.parametrize("kernel", ["hopper", "mma", "flash2"])
def test_a_second_process_runs_what_the_first_has_compiled(run, kernel):
    first = run(kernel, "", "\\x7fELF", ["modules"], check=True)
    second = run(kernel, "", "\\x7fELF", check=True)
    assert first[:2] == second[:2] and first[2] != second[2] == "[]\n"


def test_what_compiles_and_does_not_load_is_said(run):
    with pytest.raises(AssertionError, match="numba.cuda can't be imported .imported.*repair numba-cuda"):
        run("hopper", "", "")


KERNEL = cache.Compiled("name", ["array4", "q", "128s"], b"\x7fELF, and\nso on")


def test_a_damaged_file_is_no_kernel(tmp_path):
    path = tmp_path / "folder" / "kernel"
    cache._write(path, KERNEL)
    assert cache._read(path) == KERNEL and [*path.parent.iterdir()] == [path]
    content = path.read_bytes()
    for damaged in (b"", content[:20], content[:-1], content + b" ", content.replace(b"q", b"d"), b"hello\nworld",
                    b"\xff" + content, content.replace(b"so", b"os")):
        path.write_bytes(damaged)
        assert cache._read(path) is None
    assert cache._read(tmp_path) is None


def test_what_can_not_be_kept_leaves_nothing_behind(tmp_path):
    (tmp_path / "kernel").mkdir()               # in its place
    cache._write(tmp_path / "kernel", KERNEL)
    assert [path.name for path in tmp_path.iterdir()] == ["kernel"]
    (tmp_path / "file").write_text("")
    cache._write(tmp_path / "file" / "kernel", KERNEL)


def test_processes_that_need_a_kernel_at_once_compile_it_once(tmp_path):
    code = """if True:
        import time
        from numba_flash.cuda import cache, compile

        def build(factory, args, threads, cc):
            print("compiled")
            time.sleep(1)
            return cache.Compiled("name", ["array"], b"cubin")

        compile.build = build
        assert cache.compiled("module:function", (1,), 32, (9, 0)).cubin == b"cubin"
    """
    environment = {**os.environ, "NUMBA_FLASH_CACHE": str(tmp_path)}
    started = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT,
                                env=environment) for _ in range(3)]
    assert "".join(process.communicate()[0] for process in started) == "compiled\n"
    assert not any(process.returncode for process in started)


def test_cache_folder(monkeypatch):
    monkeypatch.setenv("NUMBA_FLASH_CACHE", "~/kept")
    monkeypatch.setenv("HOME", "/somewhere")
    assert cache.cache_folder() == "/somewhere/kept"
    monkeypatch.delenv("NUMBA_FLASH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache.cache_folder() == ""


@pytest.mark.parametrize("value, on", [("1", True), ("0", False), ("", False), ("false", False), ("00", False)])
def test_simulator_is_on_when_numba_says_so(value, on):
    code = "from numba_flash.cuda import SIMULATOR; print(SIMULATOR)"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "NUMBA_ENABLE_CUDASIM": value},
                          capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.split() == [str(on)], done.stderr
