"""The kernels of `mma` for every tile shape and option, compiled without a GPU to the machine code of its GPUs."""

from dataclasses import replace
from functools import lru_cache

import pytest

from numba_flash.cuda import compile
from numba_flash.cuda.mma import config
from numba_flash.cuda.mma.engine import ADDS_BY_FOUR
from numba_flash.cuda.tensor_cores.spec import Spec
from numba_flash.problem import BFLOAT16, FLOAT16, FLOAT32, FLOAT64

pytestmark = pytest.mark.skipif(compile.why_no_compiler() is not None, reason=str(compile.why_no_compiler()))
GPUS = {163: [(8, 0)], 99: [(8, 6), (8, 9), (12, 0)], 227: [(9, 0), (10, 0)]}      # by KB of shared memory
LIMITS = {cc: limit for limit, gpus in GPUS.items() for cc in gpus}
HANDFUL = 32        # bytes of spills: addresses that a step reads once
ALL = {"hook": True, "softcap": True, "alibi": True, "sinks": True}
SPECS = [
    *(Spec(dtype, d, d, **options) for d in (64, 128, 256)
      for dtype, options in ((BFLOAT16, {}), (FLOAT16, ALL), (BFLOAT16, {"hook": True, "alibi": True}))),
    *(Spec(FLOAT16, d, d_v) for d, d_v in ((16, 16), (96, 96), (112, 80), (192, 128), (64, 256), (256, 64))),
    *(Spec(FLOAT32, d, d, **options) for d in (64, 128, 256) for options in ({}, ALL)),
    *(Spec(FLOAT32, d, d_v) for d, d_v in ((16, 16), (96, 80), (192, 128))), Spec(FLOAT32, 128, 128, tf32=True),
]


# In float64: a few for each GPU, whose kernels differ by what fits, and by the instructions that it has.
FLOAT64_SPECS = [*((Spec(FLOAT64, d, d, quarters=True), cc) for d, cc in (
                     (128, (8, 0)), (256, (8, 0)), (128, (8, 6)), (64, (8, 9)))),
                 *((Spec(FLOAT64, d, d), cc) for d, cc in (
                     (64, (9, 0)), (128, (9, 0)), (256, (9, 0)), (64, (10, 0)), (128, (12, 0)))),
                 (Spec(FLOAT64, 128, 128, **ALL), (9, 0))]


def cases(specs):
    """Specs, each for every size of shared memory, which decides on the tile shape: its GPUs take turns.

    And skip a turn after each round, or in lists of three kinds of spec after one another each GPU would have its own.
    """
    return [(spec, gpus[(n + n // len(gpus)) % len(gpus)]) for n, spec in enumerate(specs) for gpus in GPUS.values()]


def name(x):
    if not isinstance(x, Spec):
        return ".".join(map(str, x))
    return f"{x.dtype}-{x.d}x{x.d_v}" + "".join(f"-{option}" for option in (*ALL, "tf32", "quarters")
                                                if getattr(x, option))


@lru_cache(maxsize=None)
def ptx(factory, tile, spec, *more):
    """PTX of a kernel, for the oldest of the GPUs that have its instructions: the others take it too."""
    oldest = (9, 0) if spec.dtype == FLOAT64 and not spec.quarters else (8, 0)
    return compile.compile_kernel(*compile.load_factory(factory)(tile, spec, *more), tile.threads, oldest)


def check(cc, layout, spill_bytes, factory, tile, spec, *more):
    """Hold a kernel against the limits of a GPU; code of float32 for 8.x takes more registers.

    In float64 m, l and some addresses spill, which a step reads once, and with options some more.
    """
    if spec.dtype == FLOAT32:
        spill_bytes = 1100 if cc < (9, 0) else 160 if max(spec.d, spec.d_v) > 128 else HANDFUL
    if spec.dtype == FLOAT64:
        spill_bytes = 500 if spec.hook else 300
    assert layout.total <= LIMITS[cc] * 1024
    code = ptx(factory, tile, spec, *more)
    assert (".f64" in code) == (spec.dtype == FLOAT64) and "call." not in code
    assert ("m8n8k4" in code) == spec.quarters
    assembled = compile.Assembled.of(*compile.link(code, cc))
    assert assembled.spill_bytes <= spill_bytes, assembled.registers


FORWARD = cases(SPECS) + FLOAT64_SPECS + [(Spec(FLOAT64, 256, 256), (12, 0))]      # whose gradients have no room


@pytest.mark.parametrize("spec, cc", FORWARD, ids=name)
def test_forward(spec, cc):
    """At the most l spills, four numbers, where S and O take 192 registers of a thread's 255."""
    tile = config.choose(spec, LIMITS[cc] * 1024)
    full = tile.parts * (tile.block_n + spec.d_v) // 2 > 150
    check(cc, config.Layout(tile, spec), 128 if full else 0, "mma.forward:make_forward", tile, spec)


FLOAT64_BACKWARD = [(replace(spec, sinks=False), cc) for spec, cc in FLOAT64_SPECS]
BACKWARD_SPECS = [*(spec for spec in SPECS if not spec.sinks),
                  *(Spec(dtype, d, d, hook=True, softcap=True, alibi=True) for d in (64, 128, 256)
                    for dtype in (FLOAT16, FLOAT32))]
BACKWARD = cases(BACKWARD_SPECS) + FLOAT64_BACKWARD


def check_backward(spec, cc, adds_dq):
    tile = config.choose_backward(spec, LIMITS[cc] * 1024)
    layout = config.BackwardLayout(tile, spec)
    check(cc, layout, HANDFUL, "mma.backward:make_backward", tile, spec, adds_dq, False)


@pytest.mark.parametrize("spec, cc", BACKWARD, ids=name)
def test_backward(spec, cc):
    check_backward(spec, cc, adds_dq=True)


def first_of_each_kind(cases):
    """Of cases with the same tile shape, options, and size of numbers the first."""
    kinds = {}
    for spec, cc in cases:
        tile = config.choose_backward(spec, LIMITS[cc] * 1024)
        kinds.setdefault((tile, spec.item, spec.hook, spec.softcap, spec.alibi), (spec, cc))
    return list(kinds.values())


@pytest.mark.parametrize("spec, cc", first_of_each_kind(BACKWARD), ids=name)
def test_backward_without_dq(spec, cc):
    """The same kernel less the last of its products."""
    check_backward(spec, cc, adds_dq=False)


@pytest.mark.parametrize("spec, cc", BACKWARD, ids=name)
def test_backward_of_queries(spec, cc):
    tile = config.choose_dq(spec, LIMITS[cc] * 1024)
    check(cc, config.DqLayout(tile, spec), HANDFUL, "mma.backward_dq:make_dq", tile, spec)


@pytest.mark.parametrize("choose, compiled, item, tables", [
    (config.choose, FORWARD, 2, (config.TILES, config.MEDIUM_TILES, config.SMALL_TILES)),
    (config.choose, FORWARD, 4, (config.FLOAT32_TILES, config.SMALL_FLOAT32_TILES)),
    (config.choose, FORWARD, 8, (config.FLOAT64_TILES,)),
    (config.choose_backward, BACKWARD, 2, (config.BACKWARD_TILES,)),
    (config.choose_backward, BACKWARD, 4, (config.FLOAT32_BACKWARD_TILES,)),
    (config.choose_backward, BACKWARD, 8, (config.FLOAT64_BACKWARD_TILES,)),
    (config.choose_dq, BACKWARD, 2, (config.DQ_TILES,)),
    (config.choose_dq, BACKWARD, 4, (config.FLOAT32_DQ_TILES,)),
    (config.choose_dq, BACKWARD, 8, (config.FLOAT64_DQ_TILES,))],
    ids=lambda x: getattr(x, "__name__", x if isinstance(x, int) else ""))
def test_no_tile_shape_is_left_out(choose, compiled, item, tables):
    chosen = {choose(spec, LIMITS[cc] * 1024) for spec, cc in compiled if spec.item == item}
    assert chosen == {tile for table in tables for _, tile in table}


@pytest.mark.parametrize("cc", LIMITS, ids=name)
def test_compiles_for_each_gpu_itself(cc):
    """And adds four numbers at once where it can."""
    spec = Spec(BFLOAT16, 64, 64)
    tile = config.choose(spec, LIMITS[cc] * 1024)
    kernel = compile.load_factory("mma.forward:make_forward")(tile, spec)
    compile.link(compile.compile_kernel(*kernel, tile.threads, cc), cc)
    tile, by_four = config.choose_backward(spec, LIMITS[cc] * 1024), cc >= ADDS_BY_FOUR
    kernel = compile.load_factory("mma.backward:make_backward")(tile, spec, True, by_four)
    code = compile.compile_kernel(*kernel, tile.threads, cc)
    compile.link(code, cc)
    assert by_four == ("red.global.add.v4.f32" in code)
