"""The host's side that the engines with tensor cores share."""

from functools import lru_cache

import numpy as np

from ...problem import BFLOAT16, FLOAT16, without_unseen_keys
from ..host import run_dsinks
from ..launch import launcher
from .spec import LOG2_E, ROWS_OF_LANES, WARP, WARPGROUP

LARGEST_HEAD_DIM = 256
LARGEST_LENGTH = 1 << 29                        # positions and bounds of the band are 32-bit numbers
ALIGNMENT = 16                                  # bytes, of the base and of all strides: the unit of copies
LARGEST_STRIDE = 1 << 40
LARGEST_REACH = 1 << 36                         # bytes within a batch: positions are 32-bit numbers of units
LARGEST_CAP = 256               # in 16 bits: scores are right to 1e-4 then, see `softmax.squash_four`
THREADS = 256                                   # of the kernels around a backward kernel


def why_not_for_tensor_cores(problem, dtypes=(FLOAT16, BFLOAT16)):
    """Why an engine for these dtypes can't do a problem, in words; None if it can."""
    if problem.dtype not in dtypes:
        return f"it takes {', '.join(map(str, dtypes))}, and the inputs are {problem.dtype}"
    step = ALIGNMENT // problem.dtype.itemsize
    for name in "bias", "mask":
        if getattr(problem, name):
            return f"it has no {name} yet"
    for name in "d", "d_v":
        size = getattr(problem, name)
        if size % step or size > LARGEST_HEAD_DIM:
            return (f"head dims of {problem.dtype} must be multiples of {step} up to {LARGEST_HEAD_DIM}, and {name} is "
                    f"{size}")
    if problem.dtype.itemsize == 2 and (problem.softcap or 0) > LARGEST_CAP:
        return f"in {problem.dtype} its softcap is {LARGEST_CAP} at the most, and here it is {problem.softcap}"
    if max(problem.n_q, problem.n_k) > LARGEST_LENGTH:
        return f"sequences must not be longer than {LARGEST_LENGTH}"
    return None


def numbers(spec, problem):
    """The arguments that all kernels end with: scale, the exponent's factor, softcap, and the band."""
    factor = LOG2_E if spec.hook else LOG2_E * problem.scale
    cap = 1.0 if problem.softcap is None else problem.softcap
    return problem.scale, factor, cap, problem.offset, problem.left, problem.right


@lru_cache(maxsize=1024)
def _addressable(rest, item, shape, strides):
    """Whether copies of 16 bytes, and tensor maps, can read an array of four axes whose address leaves this rest."""
    return (rest == 0 and (strides[3] == item or shape[3] == 1)
            and all(size == 1 or (stride % ALIGNMENT == 0 and 0 < stride < LARGEST_STRIDE)
                    for size, stride in zip(shape[:3], strides))
            and sum((size - 1) * stride for size, stride in zip(shape[1:3], strides[1:])) < LARGEST_REACH)


def for_copies(x):
    """`x`, or a copy of it if its rows can't be copied by 16 bytes."""
    if _addressable(x.data.ptr % ALIGNMENT, x.itemsize, x.shape, x.strides):
        return x
    import cupy
    return cupy.ascontiguousarray(bits(x)).view(x.dtype)


def bits(x):
    """The same memory as whole numbers, which CuPy copies whatever the dtype."""
    return x.view(f"u{x.itemsize}")


def lanes_of_query(d_v, item):
    """How many lanes share a row of dO and O, each 16 bytes of it: a power of two."""
    return min(WARP, 1 << (-(-d_v * item // ALIGNMENT) - 1).bit_length())


def blocks_for_numbers(rows, lanes):
    """How many blocks of `backward_parts.make_query_numbers` so many rows take."""
    return -(-rows * lanes // (ROWS_OF_LANES * THREADS))


def begin_backward(problem, operands, do, dlse, o, lse, gradients, block_m):
    """What comes before the kernels: the numbers of the queries, dsinks, and zeros for keys that no query sees.

    Returns
    -------
    problem, operands
        On the keys that are seen.
    query_numbers : array
        lse in base 2, and delta, by tiles of `block_m` queries: see `backward_parts.make_query_numbers`.
    do, dk, dv : array
        dO, or a copy that can be copied by 16 bytes; views of the gradients of keys that are seen.
    """
    import cupy
    do, o, b, h = for_copies(do), for_copies(o), problem.batch, problem.heads
    tiles, lanes = -(-problem.n_q // block_m), lanes_of_query(problem.d_v, problem.dtype.itemsize)
    query_numbers = cupy.empty((b, h, tiles, 2 * block_m), problem.accumulator)
    launch = launcher("tensor_cores.backward_parts:make_query_numbers",
                      (THREADS, lanes, block_m, problem.dtype, dlse is not None), (THREADS, 1), 0)
    launch(blocks_for_numbers(query_numbers.size // 2, lanes), (do, o, lse, dlse, query_numbers))
    if gradients.dsinks is not None:
        delta = query_numbers.reshape(b, h, tiles, 2, block_m)[:, :, :, 1].reshape(b, h, -1)[:, :, :problem.n_q]
        run_dsinks(operands, lse, delta, gradients.dsinks)
    first, stop = problem.seen
    dk, dv = gradients.dk[:, :, first:stop], gradients.dv[:, :, first:stop]
    if stop - first < problem.n_k:
        bits(gradients.dk)[...], bits(gradients.dv)[...] = 0, 0
    return *without_unseen_keys(problem, operands), query_numbers, do, dk, dv


def zero_sums(gradient, parts, accumulator=np.float32):
    """A gradient while it is added up, as `SumParts` lie."""
    import cupy
    return cupy.zeros((*gradient.shape[:2], *parts.shape(gradient.shape[2])), accumulator)


def round_sums(parts, sums, gradient, scale=1.0):
    """Write a gradient in its dtype: its sums times `scale`."""
    launch = launcher("tensor_cores.backward_parts:make_round", (parts, gradient.dtype), (WARPGROUP, 1), 0)
    launch(-(-sums.size // sums.shape[3] // (WARPGROUP // parts.threads)), (sums, gradient, scale))
