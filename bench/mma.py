"""The engine for any GPU's tensor cores, `mma`, forward and backward, in every dtype beside PyTorch.

==========  ==========================================================================
`bfloat16`  beside FlashAttention-2; gradients also with the same bits in every run
`float32`   exact, and with ``precision="tf32"``, beside memory-efficient attention
`float64`   beside the formula, which is all that others have there
==========  ==========================================================================

Hidden size 2048 and 16384 tokens. Where scores take more memory than there is, the formula has no figures.
"""

from tqdm import tqdm

from . import grid, peers
from .ceilings import products
from .contest import Inputs, engine
from .first_call import Kernel
from .parts import Part

MOST = 3                        # rounds
TF32_ERROR = 2e-3               # some three times that of a product of 11 bits
LENGTHS = {"bfloat16": grid.LENGTHS, "float32": grid.LENGTHS[1:], "float64": grid.LENGTHS[1:]}
HEAD_DIMS = {"bfloat16": grid.HEAD_DIMS, "float32": (64, 128), "float64": (64, 128)}
MMA, STANDARD = engine("mma"), engine("standard")
RIVALS = {"bfloat16": {"mma": MMA, "torch flash": peers.sdpa("torch flash")},
          "float32": {"mma": MMA, "mma tf32": engine("mma", right=TF32_ERROR, precision="tf32"), "standard": STANDARD,
                      "torch efficient": peers.sdpa("torch efficient")},
          "float64": {"mma": MMA, "standard": STANDARD, "torch math": peers.sdpa("torch math")}}
REPEATABLE = {"mma deterministic": engine("mma", deterministic=True)}


def beside(dtype, rounds):
    """Rows of both directions, full and causal; ratios are those of `mma`."""
    ceilings, rows = products([dtype]), []
    for d, n in tqdm([(d, n) for d in HEAD_DIMS[dtype] for n in LENGTHS[dtype]], desc=dtype):
        inputs = Inputs.of(dtype, (grid.TOKENS // n, grid.HIDDEN // d, n, d))
        for backward in (False, True):
            rivals = RIVALS[dtype] | (REPEATABLE if backward else {})
            for row in grid.both_masks(inputs, rivals, min(rounds, MOST), ceilings, backward):
                row.case = {"direction": "backward" if backward else "forward", **row.case}
                rows.append(row)
    return {"rows": rows, "ceiling": ceilings}


def bfloat16(rounds):
    """TFLOP/s in bfloat16."""
    return beside("bfloat16", rounds)


def float32(rounds):
    """TFLOP/s in float32."""
    return beside("float32", rounds)


def float64(rounds):
    """TFLOP/s in float64."""
    return beside("float64", rounds)


def kernels(dtype):
    """What to compile ahead."""
    return [Kernel(dtype, d, "mma", backward=True, deterministic=repeatable) for d in HEAD_DIMS[dtype]
            for repeatable in (False, True)]


PARTS = {part.__name__: Part(part, kernels=kernels(part.__name__)) for part in (bfloat16, float32, float64)}
