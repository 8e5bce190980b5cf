"""The host's side of the engine `hopper`: which problems, and the launch. The kernel is in `forward`."""

from functools import lru_cache
from typing import Any, NamedTuple

from ...problem import BFLOAT16, FLOAT16, without_unseen_keys
from .. import SIMULATOR
from ..launch import PROCESSORS, attribute, capability, launcher, why_no_device
from .config import LOG2_E, ROWS, TARGET, Layout, Spec, choose, heads_together
from .tensor_map import encode, for_copies

LARGEST_HEAD_DIM, HEAD_DIM_STEP = 256, 8        # a row of 8 elements is 16 bytes, the unit of TMA
LARGEST_LENGTH = 1 << 29                        # positions and bounds of the band are 32-bit numbers

# Packed arguments of former calls by where their arrays lay. Allocators give memory back in the same places again and
# again, and to encode three tensor maps takes longer than all else that a call does.
_packed = {}
KEPT = 4096


def why_not(problem, backward=False):
    """Why this engine can't do a problem here, in words; None if it can."""
    return why_no_device() or _why_not_here() or _why_not(problem, backward)


def _why_not_here():
    if SIMULATOR:
        return "Numba's simulator has no tensor cores"
    here = capability()
    return None if here == (9, 0) else f"it needs a GPU of compute capability 9.0, and this one has {here[0]}.{here[1]}"


def _why_not(problem, backward):
    if backward:
        return "it has no backward pass yet"
    if problem.dtype not in (FLOAT16, BFLOAT16):
        return f"its tensor cores take float16 and bfloat16, and the inputs are {problem.dtype}"
    for name in "bias", "mask":
        if getattr(problem, name):
            return f"it has no {name} yet"
    for name in "d", "d_v":
        size = getattr(problem, name)
        if size % HEAD_DIM_STEP or size > LARGEST_HEAD_DIM:
            return (f"head dims must be multiples of {HEAD_DIM_STEP} up to {LARGEST_HEAD_DIM}, and {name} is {size}")
    if max(problem.n_q, problem.n_k) > LARGEST_LENGTH:
        return f"sequences must not be longer than {LARGEST_LENGTH}"
    return None


class Plan(NamedTuple):
    """What a launch needs besides arrays.

    Attributes
    ----------
    launcher : launch.Launcher
    blocks : int
    block_n : int
        Rows of a K/V tile.
    numbers : tuple
        The last arguments of the kernel.
    """

    launcher: Any
    blocks: int
    block_n: int
    numbers: tuple


@lru_cache(maxsize=1024)
def make_plan(problem, device):
    """The `Plan` for a problem on the current device, whose number is given."""
    spec = Spec.of(problem)
    tile = choose(spec)
    heads, tiles_m = problem.batch * problem.heads, -(-problem.n_q // tile.block_m)
    tiles, processors = tiles_m * heads, attribute(PROCESSORS, device)
    factor = LOG2_E if spec.hook else LOG2_E * problem.scale
    cap = 1.0 if problem.softcap is None else problem.softcap
    return Plan(
        launcher("hopper.forward:make_forward", (tile, spec), (tile.threads, 1), Layout(tile, spec).total, TARGET),
        min(tiles, processors), tile.block_n,
        (problem.n_k, problem.group, tiles, tiles_m, min(heads, heads_together(problem, processors)), problem.scale,
         factor, cap, problem.offset, problem.left, problem.right))


def forward(problem, operands, o, lse):
    """Fill o and lse. There is no `backward` yet, and `why_not` says so."""
    problem, operands = without_unseen_keys(problem, operands)
    q, k, v, slopes, _, _, sinks = operands
    device = q.data.device_id
    plan = make_plan(problem, device)
    # what the kernel is told of arrays, less what the problem says; lse, slopes and sinks are C-contiguous
    places = (problem, device, q.data.ptr, q.strides, k.data.ptr, k.strides, v.data.ptr, v.strides, o.data.ptr,
              o.strides, lse.data.ptr, slopes is not None and slopes.data.ptr, sinks is not None and sinks.data.ptr)
    packed, target = _packed.get(places), o
    if packed is None:
        copies = q, k, v, target = [for_copies(x) for x in (q, k, v, o)]
        maps = encode(q, ROWS), encode(k, plan.block_n), encode(v, plan.block_n)
        packed = plan.launcher.pack((*maps, target, lse, sinks, slopes, *plan.numbers))
        if all(x is y for x, y in zip(copies, (operands.q, operands.k, operands.v, o))):
            if len(_packed) >= KEPT:
                _packed.clear()
            _packed[places] = packed
    plan.launcher.run(plan.blocks, packed)
    if target is not o:
        o.view("uint16")[...] = target.view("uint16")
