"""The host's side of `flash1` and `flash2`: what both do around their kernels."""

from math import inf

from . import SIMULATOR
from .config import choose, why_too_large
from .launch import launcher, shared_limit, why_no_device


def why_no_kernel(problem, kernels):
    """Why one of these kernels can't do its part of a problem here, in words; None if all can."""
    return why_no_device() or next(
        filter(None, (why_too_large(name, problem, shared_limit()) for name in kernels)), None)


def chosen(kernel, problem):
    """The `config.Choice` of a kernel for a problem that it can do on the current device."""
    return choose(kernel, problem, shared_limit())


def run(choice, grid, arguments, *more):
    """Launch the kernel that ``factory(tile, spec, *more)`` of a choice makes on `grid` blocks."""
    launcher(choice.factory, (choice.tile, choice.spec, *more), choice.block, choice.shared_bytes)(grid, arguments)


def option_arguments(problem, operands):
    """The arguments that all kernels end with; their types are `signatures.option_types`."""
    cap = 1.0 if problem.softcap is None else problem.softcap
    return (operands.alibi_slopes, operands.bias, operands.mask, problem.scale, cap, problem.offset, problem.left,
            problem.right)


def array_module():
    """CuPy, or NumPy for the simulator."""
    if SIMULATOR:
        import numpy
        return numpy
    import cupy
    return cupy


def run_delta(problem, do, o, dlse, lse):
    """``delta = rowsum(do * o) - dlse``, one number per query, as a new array like lse."""
    lanes, rows = (4, 4) if SIMULATOR else (32, 4)
    delta = array_module().empty_like(lse)
    blocks = -(-problem.batch * problem.heads * problem.n_q // rows)
    launch = launcher("backward_parts:make_delta", (lanes, rows, problem.dtype, dlse is not None), (lanes, rows),
                      lanes * rows * problem.accumulator.itemsize)
    launch(blocks, (do, o, dlse, delta))
    return delta


def run_dbias(problem, operands, do, lse, delta, dbias):
    """Fill dbias, unless nobody asked for it."""
    if dbias is None:
        return
    choice = chosen("dbias", problem)
    one_row, one_col = (dbias.shape[axis] == 1 for axis in (2, 3))
    blocks = (dbias.shape[0] * dbias.shape[1] * -(-dbias.shape[2] // choice.tile.block_m)
              * -(-dbias.shape[3] // choice.tile.block_n))
    run(choice, blocks, (operands.q, operands.k, operands.v, do, lse, delta, dbias,
                         *option_arguments(problem, operands)), one_row, one_col)


def run_dsinks(operands, lse, delta, dsinks):
    """Fill dsinks: minus the sum of each head's ``exp(sink - lse) * delta``, unless nobody asked for it."""
    if dsinks is None:
        return
    xp = array_module()
    sinks = operands.sinks[None, :, None]
    weight = xp.exp(sinks - xp.where(lse == -inf, inf, lse))          # lse = -inf: there is a sink, and it is -inf too
    xp.sum(xp.where(weight == 0, 0, weight * -delta), axis=(0, 2), out=dsinks)
