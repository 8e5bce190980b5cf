"""The host's side of the engine `hopper`: which problems, and the launch. The kernel is in `forward`."""

from functools import lru_cache

import numpy as np

from .. import SIMULATOR
from ..launch import PROCESSORS, attribute, capability, launcher, why_no_device
from ..tensor_cores.host import (Plan, begin_backward, for_copies, make_prepare, numbers, round_sums, run_forward,
                                 why_not_for_tensor_cores, zero_sums)
from ..tensor_cores.spec import Spec, heads_together, key_heads_together, shares_of_group
from .config import NUMBERS, ROWS, TARGET, BackwardLayout, Layout, choose, choose_backward, keys_of
from .tensor_map import NO_SWIZZLE, encode


def why_not(problem, backward=False):
    """Why this engine can't do a problem here, in words; None if it can."""
    return why_not_here() or why_not_for_tensor_cores(problem)


def why_not_here():
    """Why it does not run on the current device, in words; None if it does."""
    if SIMULATOR:
        return "Numba's simulator has no tensor cores"
    if reason := why_no_device():
        return reason
    here = capability()
    return None if here == (9, 0) else f"it needs a GPU of compute capability 9.0, and this one has {here[0]}.{here[1]}"


@lru_cache(maxsize=1024)
def make_plan(problem, device):
    """The `Plan` for a problem on the current device, whose number is given."""
    spec = Spec.of(problem)
    tile = choose(spec, keys_of(problem))
    heads, tiles_m = problem.batch * problem.heads, -(-problem.n_q // tile.block_m)
    tiles, processors = tiles_m * heads, attribute(PROCESSORS, device)
    return Plan(
        launcher("hopper.forward:make_forward", (tile, spec), (tile.threads, 1), Layout(tile, spec).total, TARGET),
        tile, min(tiles, processors),
        (problem.n_k, problem.group, tiles, tiles_m, min(heads, heads_together(problem, processors)),
         *numbers(spec, problem)))


def _maps(plan, q, k, v):
    return encode(q, ROWS), encode(k, plan.tile.block_n), encode(v, plan.tile.block_n)


LSE_IS_OPTIONAL = True
prepare = make_prepare(make_plan, _maps)


def forward(problem, operands, o, lse):
    """Fill o, and lse unless it is None; the launch is for `again`."""
    return run_forward(prepare(problem, operands), operands, o, lse)


def backward(problem, operands, do, dlse, o, lse, gradients):
    """Fill the gradients.

    Extra memory: two numbers for each query, and dQ in float32; dK and dV, too, where blocks share them; a few turns
    if bits repeat.
    """
    import cupy
    spec = Spec.of_backward(problem)
    tile = choose_backward(spec)
    layout = BackwardLayout(tile, spec)
    problem, operands, query_numbers, do, dk, dv = begin_backward(problem, operands, do, dlse, o, lse, gradients,
                                                                  tile.block_m)
    q, k, v = map(for_copies, (operands.q, operands.k, operands.v))
    tiles, processors = -(-problem.n_k // tile.block_n), attribute(PROCESSORS, do.data.device_id)
    shares = shares_of_group(problem, tiles, processors)
    together = key_heads_together(problem, tiles, processors)
    dq_sums = zero_sums(gradients.dq, layout.dq_parts)
    key_sums = [zero_sums(x, parts) if shares > 1 else dq_sums for x, parts in zip((dk, dv), layout.key_parts)]
    turns = cupy.zeros((*dq_sums.shape[:3], 1), np.int32) if problem.deterministic else None
    maps = (encode(q, tile.block_m), encode(k, tile.block_n), encode(v, tile.block_n), encode(do, tile.block_m),
            encode(query_numbers.reshape(*query_numbers.shape[:2], -1, NUMBERS), layout.number_rows, NO_SWIZZLE))
    name = "backward_wide" if tile.wide else "backward"
    launch = launcher(f"hopper.{name}:make_backward", (tile, spec, problem.deterministic), (tile.threads, 1),
                      layout.total, TARGET)
    launch(tiles * problem.batch * problem.kv_heads * shares,
           (*maps, dq_sums, turns, dk, dv, *key_sums, operands.alibi_slopes, problem.n_q, problem.n_k,
            problem.group, shares, together, *numbers(spec, problem)))
    round_sums(layout.dq_parts, dq_sums, gradients.dq, problem.scale)
    if shares > 1:
        for parts, sums, gradient, scale in zip(layout.key_parts, key_sums, (dk, dv), (problem.scale, 1.0)):
            round_sums(parts, sums, gradient, scale)
