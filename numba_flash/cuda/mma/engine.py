"""The host's side of the engine `mma`: which problems, and the launch. The kernel is in `forward`."""

from functools import lru_cache
from typing import Any, NamedTuple

from ...problem import without_unseen_keys
from .. import SIMULATOR
from ..launch import PROCESSORS, attribute, capability, launcher, shared_limit, why_no_device
from ..tensor_cores.host import for_copies, numbers, why_not_for_tensor_cores
from ..tensor_cores.spec import Spec, heads_together
from .config import Layout, choose


def why_not(problem, backward=False):
    """Why this engine can't do a problem here, in words; None if it can."""
    return why_no_device() or why_not_here() or why_not_for_tensor_cores(problem) or _why_not(backward)


def why_not_here():
    """Why it does not run on the current device, in words; None if it does."""
    if SIMULATOR:
        return "Numba's simulator has no tensor cores"
    here = capability()
    return None if here >= (8, 0) else (f"it needs a GPU of compute capability 8.0 or more, and this one has {here[0]}."
                                        f"{here[1]}")


def _why_not(backward):
    return "it has no backward pass yet" if backward else None


class Plan(NamedTuple):
    """What a launch needs besides arrays: `launch`, the number of blocks, and the last arguments of the kernel."""

    launch: Any
    blocks: int
    numbers: tuple


@lru_cache(maxsize=1024)
def make_plan(problem, device):
    """The `Plan` for a problem on the current device, whose number is given."""
    spec, limit = Spec.of(problem), shared_limit()
    tile = choose(spec, limit)
    heads, processors = problem.batch * problem.heads, attribute(PROCESSORS, device)
    launch = launcher("mma.forward:make_forward", (tile, spec), (tile.threads, 1), Layout(tile, spec).total)
    return Plan(launch, -(-problem.n_q // tile.block_m) * heads,
                (problem.group, min(heads, heads_together(problem, processors)), *numbers(spec, problem)))


def forward(problem, operands, o, lse):
    """Fill o and lse."""
    problem, operands = without_unseen_keys(problem, operands)
    plan = make_plan(problem, operands.q.data.device_id)
    q, k, v, target = map(for_copies, (operands.q, operands.k, operands.v, o))
    plan.launch(plan.blocks, (q, k, v, target, lse, operands.sinks, operands.alibi_slopes, *plan.numbers))
    if target is not o:
        o.view("uint16")[...] = target.view("uint16")
