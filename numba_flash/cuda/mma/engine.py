"""The host's side of the engine `mma`: which problems, and the launches."""

from functools import lru_cache

from ...problem import BFLOAT16, FLOAT16, FLOAT32, FLOAT64
from .. import SIMULATOR
from ..launch import PROCESSORS, attribute, capability, launcher, shared_limit, why_no_device
from ..tensor_cores.host import (LARGEST_REACH, Plan, begin_backward, for_copies, make_prepare, numbers, round_sums,
                                 run_forward, why_not_for_tensor_cores, zero_sums)
from ..tensor_cores.spec import BOX_BYTES, WARPGROUP, Spec, heads_together, key_heads_together
from .config import BackwardLayout, DqLayout, Layout, choose, choose_backward, choose_dq

DTYPES = FLOAT16, BFLOAT16, FLOAT32, FLOAT64
# Compute capabilities where float32 is faster here than in `flash2`. On an H200 (9.0) it is twice as fast. It should be
# so where tensor cores are 7 or more times as fast in TF32 as other units in float32. NVIDIA's data sheets: 156 TFLOP/s
# to 19.5 (A100), 495 to 67 (H100); but 35.6 to 35.6 (RTX 3090), 82.6 to 82.6 (RTX 4090), 60 to 30 (L4).
FASTER_IN_FLOAT32 = (8, 0), (9, 0), (10, 0)
# The same in float64. On an H200 it has 62 to 76 % of a matrix product's speed. NVIDIA's data sheets: 19.5 TFLOP/s on
# tensor cores to 9.7 on other units (A100), 67 to 34 (H100), 40 to 40 (B200), where only shared memory is read less
# often. Others (8.6, 8.9, 10.3, 12.x) are some 64 times slower in float64 than in float32, however it is computed.
FASTER_IN_FLOAT64 = (8, 0), (9, 0), (10, 0)
ADDS_BY_FOUR = 9, 0             # compute capability from which a thread adds four float32 numbers at once
WHOLE_IN_FLOAT64 = 9, 0         # and from which products of float64 are not by quarters: see `ptx.mma`


def why_not(problem, backward=False):
    """Why this engine can't do a problem here, in words; None if it can."""
    return (why_not_here() or why_not_for_tensor_cores(problem, DTYPES) or why_no_tile(problem, backward)
            or why_too_many_sums(problem, backward))


def why_not_here():
    """Why it does not run on the current device, in words; None if it does."""
    if SIMULATOR:
        return "Numba's simulator has no tensor cores"
    if reason := why_no_device():
        return reason
    here = capability()
    return None if here >= (8, 0) else (f"it needs a GPU of compute capability 8.0 or more, and this one has {here[0]}."
                                        f"{here[1]}")


def why_no_tile(problem, backward):
    """Why no tile shape fits into a block's shared memory, in words; None if one does. In float64 some don't."""
    limit, spec = shared_limit(), spec_of(problem)
    fits = choose_backward(spec, limit) and choose_dq(spec, limit) if backward else choose(spec, limit)
    return None if fits else (f"{'gradients' if backward else 'tiles'} of {problem.dtype} with d {problem.d} and d_v "
                              f"{problem.d_v} need more shared memory than the {limit // 1024} KB of a block here")


def why_too_many_sums(problem, backward):
    """Why dQ is too large while it is added up, in words; None if it isn't."""
    size = problem.heads * (problem.n_q + WARPGROUP) * (problem.d + BOX_BYTES) * problem.accumulator.itemsize
    return None if not backward or size < LARGEST_REACH else (
        f"the sums for dq of one batch must take less than {LARGEST_REACH >> 30} GiB, and here they may take "
        f"{size >> 30}")


def why_later(problem):
    """Why "auto" should rather take `flash2` here, in words; None if it shouldn't."""
    if problem.dtype == FLOAT32 and not problem.tf32 and capability() not in FASTER_IN_FLOAT32:
        return "float32 is three TF32 products, which are not known to be faster here than other units"
    if problem.dtype == FLOAT64 and capability() not in FASTER_IN_FLOAT64:
        return "float64 is not known to be faster here on tensor cores than on other units"
    return None


def spec_of(problem):
    """The `Spec` of the forward kernel on the current device."""
    return Spec.of(problem, quarters=capability() < WHOLE_IN_FLOAT64)


def backward_spec_of(problem):
    """That of the backward kernels."""
    return Spec.of_backward(problem, quarters=capability() < WHOLE_IN_FLOAT64)


def adds_by_four(problem):
    """Whether a thread adds four numbers of dQ at once on the current device."""
    return problem.dtype != FLOAT64 and capability() >= ADDS_BY_FOUR


def _by_queries(factory, tile, layout, spec, problem, device):
    """The `Plan` of a kernel with a block for each query tile."""
    launch = launcher(factory, (tile, spec), (tile.threads, 1), layout(tile, spec).total)
    heads = problem.batch * problem.heads
    together = min(heads, heads_together(problem, attribute(PROCESSORS, device)))
    return Plan(launch, tile, -(-problem.n_q // tile.block_m) * heads * spec.sides,
                (problem.group, together, *numbers(spec, problem)))


@lru_cache(maxsize=1024)
def plan_forward(problem, device):
    """The `Plan` of the forward kernel on the current device, whose number is given."""
    spec = spec_of(problem)
    return _by_queries("mma.forward:make_forward", choose(spec, shared_limit()), Layout, spec, problem, device)


@lru_cache(maxsize=1024)
def plan_dq(problem, device):
    """The `Plan` of the kernel for dQ alone."""
    spec = backward_spec_of(problem)
    return _by_queries("mma.backward_dq:make_dq", choose_dq(spec, shared_limit()), DqLayout, spec, problem, device)


@lru_cache(maxsize=1024)
def plan_backward(problem, device):
    """The `Plan` of the kernel for dK and dV, and for dQ if its bits need not repeat."""
    spec = backward_spec_of(problem)
    tile = choose_backward(spec, shared_limit())
    launch = launcher("mma.backward:make_backward",
                      (tile, spec, not problem.deterministic, adds_by_four(problem)), (tile.threads, 1),
                      BackwardLayout(tile, spec).total)
    tiles = -(-problem.n_k // tile.block_n)
    together = key_heads_together(problem, tiles, attribute(PROCESSORS, device))
    return Plan(launch, tile, tiles * problem.batch * problem.kv_heads * spec.sides,
                (problem.group, together, *numbers(spec, problem)))


LSE_IS_OPTIONAL = True
prepare = make_prepare(plan_forward, lambda plan, q, k, v: (q, k, v))


def forward(problem, operands, o, lse):
    """Fill o, and lse unless it is None; the launch is for `again`."""
    return run_forward(prepare(problem, operands), operands, o, lse)


def backward(problem, operands, do, dlse, o, lse, gradients):
    """Fill the gradients. Extra memory: two numbers for each query, and dQ as sums if its bits need not repeat."""
    device, slopes = do.data.device_id, operands.alibi_slopes
    spec = backward_spec_of(problem)
    layout = BackwardLayout(choose_backward(spec, shared_limit()), spec)
    problem, operands, query_numbers, do, dk, dv = begin_backward(problem, operands, do, dlse, o, lse, gradients,
                                                                  layout.tile.block_m)
    inputs = *map(for_copies, (operands.q, operands.k, operands.v)), do, query_numbers
    parts = layout.dq_parts(adds_by_four(problem))
    sums = None if problem.deterministic else zero_sums(gradients.dq, parts, problem.accumulator)
    plan = plan_backward(problem, device)
    plan.launcher(plan.blocks, (*inputs, sums, dk, dv, slopes, *plan.numbers))
    if problem.deterministic:
        plan = plan_dq(problem, device)
        plan.launcher(plan.blocks, (*inputs, gradients.dq, slopes, *plan.numbers))
    else:
        round_sums(parts, sums, gradients.dq, problem.scale)
