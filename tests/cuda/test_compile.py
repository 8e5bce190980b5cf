"""Every kernel that the engines can choose, compiled to machine code without a GPU: registers, stack and float64
arithmetic.

The slowest test of the project: `pytest -n 2` halves it.
"""

import re

import pytest

from numba_flash.cuda import compile
from numba_flash.cuda.config import (FLOAT32_SHAPES, FLOAT64_SHAPES, KERNELS, PAIRS, PLAIN, SCORE, Spec, TileConfig,
                                     elements)
from numba_flash.problem import BFLOAT16, FLOAT16, FLOAT32, FLOAT64

pytestmark = pytest.mark.skipif(compile.why_no_compiler() is not None, reason=str(compile.why_no_compiler()))
FLOAT64_ARITHMETIC = re.compile(r"\b(?:add|sub|mul|fma|div|mad|neg|abs|min|max|cvt)\.[\w.]*f64")


def cases():
    """(kernel, dtype, largest head dim, shape, need): every row of `config`, with the most that it is for."""
    for kernel in KERNELS:
        for dtype in FLOAT32, FLOAT16, BFLOAT16, FLOAT64:
            for largest, need, shape in (FLOAT64_SHAPES if dtype == FLOAT64 else FLOAT32_SHAPES)[kernel]:
                yield kernel, dtype, largest, shape, need
                if dtype == FLOAT32 and need == SCORE:
                    yield kernel, dtype, largest, shape, PLAIN


def name(case):
    kernel, dtype, largest, shape, need = case
    return f"{kernel}-{dtype}-{largest}-{'x'.join(map(str, shape))}-{('plain', 'score', 'pairs')[need]}"


def compiled(kernel, dtype, d, shape, need, cc=(9, 0)):
    """PTX of a kernel and what ptxas says of it."""
    tile = TileConfig(*shape)
    options = {"softcap": need >= SCORE, "alibi": need >= SCORE, "bias": need >= PAIRS, "mask": need >= PAIRS}
    spec = Spec(dtype, tile.padded(d), tile.padded(d), **options, sinks=need > PLAIN)
    factory, _ = KERNELS[kernel]
    more = (False, False) if kernel == "dbias" else ()
    ptx = compile.compile_kernel(*compile.load_factory(factory)(tile, spec, *more), tile.threads, cc)
    return ptx, compile.assemble(ptx, cc)


@pytest.mark.parametrize("case", list(cases()), ids=name)
def test_kernel_stays_in_registers(case):
    ptx, assembled = compiled(*case)
    assert assembled.spill_bytes == 0 and assembled.stack_bytes == 0, assembled.registers
    if case[1] != FLOAT64:
        assert not FLOAT64_ARITHMETIC.search(ptx)
    assert re.search(r"ld\.shared\.v[24]", ptx), "tiles are no longer read four elements at once"


@pytest.mark.parametrize("cc", [(8, 0), (8, 6), (12, 0)])
@pytest.mark.parametrize("kernel", ["forward", "dkdv"])
def test_other_gpus(kernel, cc):
    shape = {"forward": (64, 32, 8, 16), "dkdv": (32, 32, 16, 16)}[kernel]
    _, assembled = compiled(kernel, FLOAT32, 128, shape, PLAIN, cc)
    assert assembled.spill_bytes == 0 and assembled.stack_bytes == 0


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16, FLOAT32, FLOAT64], ids=str)
@pytest.mark.parametrize("has_dlse", [False, True])
def test_delta(dtype, has_dlse):
    make_delta = compile.load_factory("backward_parts:make_delta")
    ptx = compile.compile_kernel(*make_delta(32, 4, dtype, has_dlse), 128, (9, 0))
    assert compile.assemble(ptx, (9, 0)).stack_bytes == 0
    assert dtype == FLOAT64 or not FLOAT64_ARITHMETIC.search(ptx)


@pytest.mark.parametrize("case", list(cases()), ids=name)
def test_fits_into_an_h200(case):
    kernel, dtype, largest, shape, _ = case
    tile = TileConfig(*shape)
    spec = Spec(dtype, tile.padded(largest), tile.padded(largest))
    assert elements(KERNELS[kernel][1](tile, spec)) * spec.real_size <= 227 * 1024


def test_links_without_a_gpu():
    tile = TileConfig(*FLOAT32_SHAPES["forward"][0][2])
    spec = Spec(FLOAT32, 64, 64)
    ptx = compile.compile_kernel(*compile.load_factory("flash2_forward:make_forward")(tile, spec), tile.threads, (9, 0))
    cubin, _ = compile.link(ptx, (9, 0))
    assert cubin.startswith(b"\x7fELF")
    assert f".entry {compile.entry_name(cubin)}(" in ptx        # and not a function that the linker adds
