"""The Hopper engine's backward beside the backward passes of PyTorch's cuDNN attention and FlashAttention-2.

===============  ===========================================================================
`speed`          TFLOP/s in both 16-bit dtypes, hidden size 2048, 16384 tokens
`gqa`            64 query heads on 8 key/value heads
`deterministic`  bitwise repeatable gradients beside the usual ones
`options`        ALiBi, softcap and a window, beside plain attention and FlexAttention
===============  ===========================================================================

o and lse come from the same engine's forward pass, which is no part of a call. What both passes take of memory says
``python -m bench memory``.
"""

from tqdm import tqdm

from . import grid, peers
from .ceilings import products
from .contest import Inputs, engine
from .first_call import Kernel
from .parts import Part

RIVALS = {"hopper": engine("hopper"), "cudnn": peers.sdpa("cudnn"), "torch flash": peers.sdpa("torch flash")}
OURS = {"hopper": RIVALS["hopper"]}
REPEATABLE = {"hopper": RIVALS["hopper"], "hopper deterministic": engine("hopper", deterministic=True),
              "torch flash": RIVALS["torch flash"],
              "torch flash deterministic": peers.sdpa("torch flash", deterministic=True),
              "cudnn deterministic": peers.sdpa("cudnn", deterministic=True)}
MOST = 3                # rounds: a backward pass takes 2.5 times as long, and all should be over in a minute
DETERMINISTIC = 64, 128, 256                # head dims
SHAPES = grid.speed_shapes(between=grid.LENGTHS)


def speed(rounds):
    """TFLOP/s at hidden size 2048 and 16384 tokens."""
    return grid.speed(min(rounds, MOST), SHAPES, RIVALS, backward=True)


def gqa(rounds):
    """TFLOP/s of 64 query heads on 8 key/value heads."""
    return grid.gqa(min(rounds, MOST), (2048, 4096, 8192, 16384), RIVALS, backward=True)


def deterministic(rounds):
    """TFLOP/s of repeatable gradients beside the usual ones."""
    ceilings, rows = products(["bfloat16"]), []
    for d, n in tqdm([(d, n) for d in DETERMINISTIC for n in (4096, 16384)], desc="deterministic"):
        inputs = Inputs.of("bfloat16", (grid.TOKENS // n, grid.HIDDEN // d, n, d))
        rows += grid.both_masks(inputs, REPEATABLE, min(rounds, MOST), ceilings, backward=True)
    return {"rows": rows, "ceiling": ceilings}


def options(rounds):
    """TFLOP/s on the pairs that an option leaves, beside plain attention and, compiled, FlexAttention."""
    return grid.options(rounds, OURS | {"cudnn": RIVALS["cudnn"]}, OURS | {"flex": peers.flex}, backward=True)


SPEED = [Kernel(dtype, d, backward=True) for dtype, d in dict.fromkeys((dtype, d) for dtype, d, _ in SHAPES)]
PLAIN = Kernel("bfloat16", 128, backward=True)
PARTS = {"speed": Part(speed, kernels=SPEED), "gqa": Part(gqa, kernels=[PLAIN]),
         "deterministic": Part(deterministic, kernels=[
             Kernel("bfloat16", d, backward=True, deterministic=repeatable)
             for d in DETERMINISTIC for repeatable in (False, True)]),
         "options": Part(options, slow=True, kernels=[PLAIN, Kernel("bfloat16", 128, softcap=20.0, backward=True),
                                                      Kernel("bfloat16", 128, alibi=True, backward=True)])}
