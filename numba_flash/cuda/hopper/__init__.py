"""The engine ``hopper``: forward attention on the tensor cores of compute capability 9.0, for 16-bit inputs.

====================  ======================================================================
``config``            which tile shape for which head dims, and what lies where in shared memory
``tensor_map``        the host's part of TMA: encode where an array's boxes lie
``softmax``           what happens to each score and to each row
``forward``           the kernel
====================  ======================================================================

Arrays that TMA can't address (a base or a stride that is no multiple of 16 bytes, elements of a row that are not
neighbours, strides that are zero or negative) are copied first. A view of (batch, n, heads, d) data is not.

Tensor cores multiply the value row of a hidden key by zero. Where it holds a NaN or Inf, and its tile is loaded since
some of 128 queries see keys of it, the NaN comes through to all of the 128. Keys that no query sees are never loaded.
"""

from ...problem import BFLOAT16, FLOAT16, without_unseen_keys
from ..compile import SIMULATOR, cuda
from ..launch import capability, why_no_device

if cuda is not None and not SIMULATOR:
    from .forward import run

LARGEST_HEAD_DIM, HEAD_DIM_STEP = 256, 8        # a row of 8 elements is 16 bytes, the unit of TMA
LARGEST_LENGTH = 1 << 29                        # positions and bounds of the band are 32-bit numbers


def why_not(problem, backward=False):
    """Why this engine can't do a problem here, in words; None if it can."""
    return why_no_device() or _why_not_here() or _why_not(problem, backward)


def _why_not_here():
    if SIMULATOR:
        return "Numba's simulator has no tensor cores"
    here = capability()[:2]
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


def forward(problem, operands, o, lse):
    """Fill o and lse. There is no `backward` yet, and `why_not` says so."""
    run(*without_unseen_keys(problem, operands), o, lse)
