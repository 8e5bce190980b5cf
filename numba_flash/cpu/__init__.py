"""The engine `cpu`: FlashAttention-2 on all cores, in Numba. It can do every problem.

`forward`, `backward` and `bias_gradient` in the modules of those names are the kernels; here they get their arguments.
"""

import numpy as np
from numba import types

from . import backward as _backward
from . import dbias as _dbias
from . import forward as _forward
from ..problem import BFLOAT16, FLOAT16
from .compile import array, compiled, element_types
from .recompute import tiles_elements
from .simd import ROWS, VECTOR_BYTES, VECTORS
from .threads import run, thread_count
from .tiles import allocate, pitch, round_up

# Rows of a query tile and of a key tile. Forward, 256 queries read each K_j and V_j half as often as 128, which is
# worth 5 %; the keys hardly matter (128 x 64: 134, 128 x 128: 137, 256 x 64: 143, 256 x 128: 143, 256 x 192: 145
# GFLOP/s of CPU time on one busy core, n = 4096, d = 64). Backward, the tiles of P and dS have to stay in L2 beside
# Q_i, dO_i, K_j and V_j: 64 x 64: 139, 128 x 64: 153, 128 x 128: 155, 256 x 128: 151. Forward, a tile of queries is
# made smaller, down to SMALLEST_M, where there would be fewer than two for each thread.
BLOCK_M, BLOCK_N = 256, 128
BACKWARD_M, BACKWARD_N = 128, 128
SMALLEST_M = 64
DETERMINISTIC_PARTS = 8


def why_not(problem, backward=False):
    """Why this engine cannot do a problem, in words, or None if it can."""
    return None


def forward(problem, operands, o, lse):
    """Fill `o` (any strides) and `lse` (contiguous)."""
    threads, block_m = thread_count(), BLOCK_M
    while block_m > SMALLEST_M and _query_tiles(problem, block_m) < 2 * threads:
        block_m //= 2
    block_m, block_n = _blocks(problem, block_m, BLOCK_N)
    element, accumulator = element_types(problem.dtype)
    kernel = compiled(
        _forward.forward, *[array(element, 4)] * 3, array(element, 4, True), array(accumulator, 3, True),
        *_option_types(accumulator), *_work_types(accumulator))
    arguments = (*map(_bits, (operands.q, operands.k, operands.v, o)), lse, *_option_arguments(problem, operands),
                 block_m, block_n)
    elements = _forward.scratch_elements(block_m, block_n, problem.d, problem.d_v, problem.accumulator.itemsize)

    def work(worker, counter):
        kernel(*arguments, counter, allocate(elements, problem.accumulator))

    run(work, min(threads, _query_tiles(problem, block_m)))


def backward(problem, operands, do, dlse, o, lse, grads):
    """Fill the arrays of `grads`; `do` and `o` may have any strides, `dlse` may be None.

    Repeatable for a given number of threads; with `problem.deterministic` for any.
    """
    block_m, block_n = _blocks(problem, BACKWARD_M, BACKWARD_N)
    element, accumulator = element_types(problem.dtype)
    itemsize = problem.accumulator.itemsize
    given = (*map(_bits, (operands.q, operands.k, operands.v, do, o)), lse,
             np.zeros((1, 1, 1), problem.accumulator) if dlse is None else dlse)
    given_types = [array(element, 4)] * 5 + [array(accumulator, 3)] * 2
    options = (dlse is not None, *_option_arguments(problem, operands), block_m, block_n)
    option_types = [types.bool_, *_option_types(accumulator)]

    # A head whose query tiles are shared out needs a dK and a dV for each part, so only do it where threads would idle.
    # The sums of the parts depend on their number, which for deterministic results must not depend on the threads.
    threads, tasks = thread_count(), problem.batch * problem.kv_heads
    tiles = -(-problem.n_q // block_m)
    parts = DETERMINISTIC_PARTS if problem.deterministic else threads
    chunks = min(-(-parts // tasks), problem.group * tiles)
    workers = min(threads, tasks * chunks)
    slots = workers if chunks == 1 else tasks * chunks
    rows = round_up(problem.n_k, block_n) + block_n
    dk_sums, dv_sums = (
        allocate(slots * rows * pitch(columns, itemsize), problem.accumulator)
        .reshape(slots, rows, -1)[:, :, :round_up(columns, VECTORS * VECTOR_BYTES // itemsize)]
        for columns in (problem.d, problem.d_v))
    dsink_parts = np.zeros((problem.batch, problem.heads, tiles), problem.accumulator)
    kernel = compiled(
        _backward.backward, *given_types, *[array(element, 4, True)] * 3,
        *[types.Array(accumulator, 3, "A")] * 2, array(accumulator, 3, True), types.int64,
        *option_types, types.int64, *_work_types(accumulator))
    arguments = (*given, *map(_bits, (grads.dq, grads.dk, grads.dv)), dk_sums, dv_sums, dsink_parts, chunks, *options)
    elements = _backward.scratch_elements(block_m, block_n, problem.d, problem.d_v, itemsize)

    def work(worker, counter):
        kernel(*arguments, worker, counter, allocate(elements, problem.accumulator))

    run(work, workers)
    if chunks > 1:
        for gradient, sums in ((grads.dk, dk_sums), (grads.dv, dv_sums)):
            parts = sums.reshape(problem.batch, problem.kv_heads, chunks, rows, -1)
            gradient[...] = parts[:, :, :, :problem.n_k, :gradient.shape[3]].sum(axis=2)
    if grads.dsinks is not None:
        grads.dsinks[...] = dsink_parts.sum(axis=(0, 2), dtype=np.float64)
    if grads.dbias is not None:
        _fill_dbias(problem, given, given_types, options, option_types, grads.dbias)


def _fill_dbias(problem, given, given_types, options, option_types, dbias):
    block_m, block_n = _blocks(problem, BACKWARD_M, BACKWARD_N)
    _, accumulator = element_types(problem.dtype)
    kernel = compiled(_dbias.bias_gradient, *given_types, array(accumulator, 4, True), *option_types,
                      *_work_types(accumulator))
    elements = tiles_elements(block_m, block_n, problem.d, problem.d_v, problem.accumulator.itemsize)

    def work(worker, counter):
        kernel(*given, dbias, *options, counter, allocate(elements, problem.accumulator))

    run(work, min(thread_count(), _dbias.task_count(dbias.shape, block_m)))


def _query_tiles(problem, block_m):
    return problem.batch * problem.heads * -(-problem.n_q // block_m)


def _blocks(problem, block_m, block_n):
    """Rows of a query tile and of a key tile: no more than there are, in whole blocks."""
    block = VECTORS * VECTOR_BYTES // problem.accumulator.itemsize
    return min(block_m, round_up(problem.n_q, block)), min(block_n, round_up(problem.n_k, ROWS))


def _bits(x):
    """A 16-bit floating array as the integers that kernels see."""
    return x.view(np.uint16) if x.dtype in (FLOAT16, BFLOAT16) else x


def _option_arguments(problem, operands):
    """What every kernel gets to know about the options; an array that is not there has a stand-in."""
    def given(x, ndim, dtype):
        return np.zeros((1,) * ndim, dtype) if x is None else x

    sinks = operands.sinks if problem.sinks else np.full(problem.heads, -np.inf, problem.accumulator)
    return (given(operands.alibi_slopes, 2, problem.accumulator), given(operands.bias, 4, problem.accumulator),
            given(operands.mask, 4, np.bool_), sinks,
            problem.scale, problem.softcap or 0.0, problem.offset, problem.left, problem.right,
            problem.alibi, problem.bias, problem.mask, problem.dtype == BFLOAT16)


def _option_types(accumulator):
    """The types of `_option_arguments`, and of the two block sizes."""
    return [array(accumulator, 2), array(accumulator, 4), array(types.bool_, 4), array(accumulator, 1),
            *[types.float64] * 2, *[types.int64] * 3, *[types.bool_] * 4, *[types.int64] * 2]


def _work_types(accumulator):
    """The types of a task counter and of scratch memory."""
    return [types.Array(types.int64, 1, "C"), types.Array(accumulator, 1, "C")]
