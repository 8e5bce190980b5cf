"""The host's side that the engines with tensor cores share."""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ...again import keep
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
_packed = {}                                    # launches that are remembered, of all kernels


class Plan(NamedTuple):
    """What a launch needs besides arrays.

    Attributes
    ----------
    launcher : launch.Launcher
    tile : Tile
        The kernel's tile shape.
    blocks : int
    numbers : tuple
        The last arguments of the kernel.
    """

    launcher: Any
    tile: Any
    blocks: int
    numbers: tuple


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
    return bits(x).copy(order="C").view(x.dtype)        # contiguous arrays, too: they may begin anywhere


def bits(x):
    """The same memory as whole numbers, which CuPy copies whatever the dtype."""
    return x.view(f"u{x.itemsize}")


class Prepared:
    """A forward kernel's launch for queries, keys and values in certain places, which it doesn't keep alive.

    Attributes
    ----------
    copies : list of array
        What is read instead of those that can't be copied by 16 bytes.
    """

    def __init__(self, plan, problem, operands, told_of):
        copies = list(map(for_copies, operands[:3]))
        self.plan, self.inputs = plan, plan.launcher.flatten(told_of(plan, *copies))
        self.no_lse = (*problem.lse_shape[:2], 0), problem.accumulator
        self.copies = [x for x, given in zip(copies, operands) if x is not given]

    def run(self, o, lse, sinks=None, slopes=None):
        """Fill o, and lse unless it is None."""
        plan = self.plan
        places = (self, o.data.ptr, o.strides, lse is not None and lse.data.ptr, sinks is not None and sinks.data.ptr,
                  slopes is not None and slopes.data.ptr)       # all but o are C-contiguous
        packed = _packed.get(places)
        if packed is None:
            import cupy
            lse = cupy.ndarray(*self.no_lse) if lse is None else lse
            flat = plan.launcher.flatten((o, lse, sinks, slopes, *plan.numbers), first=3)
            packed = plan.launcher.pack(self.inputs + flat)
            if not self.copies:
                keep(_packed, places, packed)
        plan.launcher.run(plan.blocks, packed)


def make_prepare(plan_of, told_of):
    """Build ``prepare(problem, operands)``: the `Prepared` of an engine.

    Parameters
    ----------
    plan_of : function
        ``plan_of(problem, device)`` returns a `Plan`.
    told_of : function
        ``told_of(plan, q, k, v)``: what the kernel gets for them.

    Notes
    -----
    It is remembered by where the arrays lie: allocators give memory back in the same places again and again.
    """
    known = {}

    def prepare(problem, operands):
        q, k, v = operands[:3]
        device = q.data.device_id
        places = problem, device, q.data.ptr, q.strides, k.data.ptr, k.strides, v.data.ptr, v.strides
        launch = known.get(places)
        if launch is None:
            problem, operands = without_unseen_keys(problem, operands)
            launch = Prepared(plan_of(problem, device), problem, operands, told_of)
            if not launch.copies:
                keep(known, places, launch)
        return launch

    return prepare


def run_forward(launch, operands, o, lse):
    """Fill o, and lse unless it is None, by a `Prepared`, which is returned."""
    target = for_copies(o)
    launch.run(target, lse, operands.sinks, operands.alibi_slopes)
    if target is not o:
        bits(o)[...] = bits(target)
    return launch


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
