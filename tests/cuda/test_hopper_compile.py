"""The Hopper kernel for every tile shape and option, compiled to machine code without a GPU: no spill, no warning."""

import re
from types import SimpleNamespace

import pytest

from numba_flash.cuda import compile
from numba_flash.cuda.hopper import config
from numba_flash.problem import BFLOAT16, FLOAT16

pytestmark = pytest.mark.skipif(compile.why_no_compiler() is not None, reason=str(compile.why_no_compiler()))
SIZES = tuple(sorted({largest for largest, _, _ in config.TILES}))
ALL = {"hook": True, "softcap": True, "alibi": True, "sinks": True}
SPECS = [
    *(config.Spec(BFLOAT16, d, d_v) for d in SIZES for d_v in SIZES),
    *(config.Spec(dtype, d, d, **options) for d in SIZES for dtype, options in (
        (FLOAT16, {}), (BFLOAT16, ALL), (FLOAT16, {"hook": True, "alibi": True}), (FLOAT16, {"alibi": True}),
        (BFLOAT16, {"hook": True, "softcap": True}))),
    *(config.Spec(FLOAT16, d, 64) for d in (16, 80, 144, 208)),
    *(config.Spec(BFLOAT16, 64, d_v) for d_v in (16, 80, 96, 144, 208)),
]

# and how many keys a query sees, where that makes a difference
CASES = [(spec, keys) for spec in SPECS for keys in (0, config.MANY)
         if keys == 0 or config.choose(spec, keys) != config.choose(spec, 0)]


def name(spec):
    if isinstance(spec, int):
        return f"{spec}-keys"
    options = "".join(f"-{option}" for option in ALL if getattr(spec, option))
    return f"{spec.dtype}-{spec.d}x{spec.d_v}{options}"


def check(kernel, threads):
    """Compile a kernel to what runs and judge that; returns its PTX. Numba takes longest, and comes once for both.

    A spill is not only slow: a register that goes to memory while wgmma writes it makes ptxas serialise (C7510).
    """
    code = compile.compile_kernel(*kernel, threads, config.TARGET, "ltoir")
    assembled = compile.Assembled.of(*compile.link(code, config.TARGET))
    assert assembled.spill_bytes == 0 and assembled.stack_bytes == 0
    assert not re.search(r"\(C\d+\)", assembled.messages), assembled.messages
    ptx = compile.link(code, config.TARGET, "ptx")[0].decode()
    assert ".f64" not in ptx and "call." not in ptx
    return ptx


@pytest.mark.parametrize("sizes, keys", [
    ({"n_q": 200, "n_k": 9000}, 9000), ({"n_q": 200, "n_k": 9000, "left": 99, "right": 0}, 100),
    ({"n_q": 1, "n_k": 9000}, 0)], ids=str)
def test_keys_that_tile_shapes_are_chosen_by(sizes, keys):
    assert config.keys_of(SimpleNamespace(**{"left": 1 << 20, "right": 1 << 20, **sizes})) == keys


@pytest.mark.parametrize("spec, keys", CASES, ids=name)
def test_kernel_stays_in_registers(spec, keys):
    from numba_flash.cuda.hopper.forward import make_forward

    tile = config.choose(spec, keys)
    layout = config.Layout(tile, spec)
    ptx = check(make_forward(tile, spec), tile.threads)
    steps = 3 * spec.d // 16 + 2 * tile.block_n // 16       # S of the first, the next, the next query tile's first; O
    assert layout.total <= 227 * 1024
    assert ptx.count("wgmma.mma_async") == steps + layout.slants, "a product is written out elsewhere, or was dropped"
    assert ptx.count(".param .align 128") == 3, "tensor maps are no longer passed by value"


ALL_BACKWARD = {"hook": True, "softcap": True, "alibi": True}
BACKWARD_SPECS = [
    *(config.Spec(BFLOAT16, d, d_v) for d in config.BACKWARD_TILES for d_v in config.BACKWARD_TILES),
    *(config.Spec(dtype, d, d, **options) for d in config.BACKWARD_TILES
      for dtype, options in ((FLOAT16, {"hook": True}), (BFLOAT16, ALL_BACKWARD),
                             (FLOAT16, {"hook": True, "alibi": True}))),
    *(config.Spec(FLOAT16, d, d) for d in (16, 48, 80, 96, 144, 192)),
]


def check_backward(spec, ordered):
    """Compile the kernel for dQ, dK and dV."""
    from numba_flash.cuda.hopper import backward, backward_wide

    tile = config.choose_backward(spec)
    layout = config.BackwardLayout(tile, spec)
    assert layout.total <= 227 * 1024 and not any(offset % 1024 for offset in layout.offsets[:5])
    kernel = (backward_wide if tile.wide else backward).make_backward(tile, spec, ordered)
    ptx = check(kernel, tile.threads)
    s, dp, dv, dk = spec.d // 16, spec.d_v // 16, tile.block_m // 16, tile.block_m // 16
    dq = tile.block_n // 16 * (2 if tile.wide else 1)       # of both consumers, if they have code of their own
    assert ptx.count("wgmma.mma_async") == 2 * (s + dp) + dv + dk + 2 * dq


@pytest.mark.parametrize("spec", BACKWARD_SPECS, ids=name)
def test_backward_kernel_stays_in_registers(spec):
    check_backward(spec, ordered=False)


@pytest.mark.parametrize("spec", [config.Spec(BFLOAT16, d, d, **options) for d in config.BACKWARD_TILES
                                  for options in ({}, ALL_BACKWARD)], ids=name)
def test_backward_kernel_in_order_stays_in_registers(spec):
    check_backward(spec, ordered=True)


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
def test_kernels_around_the_backward_kernel(dtype):
    from numba_flash.cuda.tensor_cores.backward_parts import make_query_numbers, make_round

    specs = [config.Spec(dtype, d, d) for d in (16, 64, 96, 192, 256)]
    parts = [config.BackwardLayout(config.choose_backward(spec), spec).dq_parts for spec in specs]
    for kernel, threads in ([(make_query_numbers(256, lanes, 64, dtype, lanes > 4), 256) for lanes in (1, 8, 32)]
                            + [(make_round(its_parts, dtype), 128) for its_parts in parts]):
        check(kernel, threads)


@pytest.mark.parametrize("spec, keys", CASES, ids=name)
def test_fits_into_an_h200(spec, keys):
    tile = config.choose(spec, keys)
    layout = config.Layout(tile, spec)
    assert layout.total <= 227 * 1024
    assert not any(size % 1024 for size in (layout.k, layout.v, layout.q_bytes, layout.k_bytes, layout.v_bytes))
    registers = tile.producer_registers + tile.consumers * tile.consumer_registers
    assert registers * config.WARPGROUP <= 65536
