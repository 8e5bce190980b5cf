"""The Hopper engine's forward beside PyTorch's cuDNN attention and FlashAttention-2, and FlexAttention.

==========  ===========================================================================
`speed`     TFLOP/s in both 16-bit dtypes, hidden size 2048, 16384 tokens
`gqa`       64 query heads on 8 key/value heads
`options`   ALiBi, softcap and a window, beside plain attention and FlexAttention
`matmul`    attention as a share of a matrix product of the same dtype, in turn with it
`error`     against float64, also for large scores
==========  ===========================================================================
"""

from dataclasses import replace

from tqdm import tqdm

from numba_flash.cuda.hopper.config import MANY

from . import grid, peers
from .ceilings import SIZE, product
from .contest import Call, Inputs, Row, engine, prepare, take_turns
from .first_call import Kernel
from .measure import flops
from .parts import Part

RIVALS = {"hopper": engine("hopper"), "cudnn": peers.sdpa("cudnn"), "torch flash": peers.sdpa("torch flash")}
OURS = {"hopper": RIVALS["hopper"]}


def speed(rounds):
    """TFLOP/s at hidden size 2048 and 16384 tokens."""
    return grid.speed(rounds, grid.speed_shapes(), RIVALS)


def gqa(rounds):
    """TFLOP/s of 64 query heads on 8 key/value heads."""
    return grid.gqa(rounds, (2048, 4096, 8192, 16384, 32768), RIVALS)


def options(rounds):
    """TFLOP/s on the pairs that an option leaves, beside plain attention and, compiled, FlexAttention."""
    return grid.options(rounds, OURS | {"cudnn": RIVALS["cudnn"]}, OURS | {"flex": peers.flex})


def matmul(rounds, n=16384):
    """TFLOP/s beside those of a bfloat16 matrix product, which is all tensor cores."""
    multiply, operations = product("bfloat16")
    rows = []
    for d in (128, 256):
        heads = grid.HIDDEN // d
        rows.append(prepare({"d": d, "n": n, "mask": "full"}, Inputs.of("bfloat16", (1, heads, n, d)), OURS,
                            flops(1, heads, n, n, d)))
    ceiling = Row({}, operations, "TFLOP/s", "bfloat16", True, {"matmul": Call(multiply)}, {"matmul": {}})
    take_turns([*rows, ceiling], rounds)
    for row in rows:
        most, ours = ceiling.figures["matmul"].get("TFLOP/s"), row.figures["hopper"].get("TFLOP/s")
        if most and ours:
            row.case |= {"matmul TFLOP/s": most, "share": ours / most}
    return {"rows": rows, "size": SIZE["gpu"]}


def error(_):
    """Relative Frobenius error against float64 on normal inputs, and with scores six times as large."""
    rows = []
    cases = [(d, mask, factor) for d in grid.HEAD_DIMS for mask in grid.MASKS for factor in (1, 6)]
    for d, mask, factor in tqdm(cases, desc="error"):
        inputs = Inputs.of("bfloat16", (1, 4, 1024, d), q_factor=factor)
        rows.append(prepare({"dtype": "bfloat16", "d": d, "n": 1024, "mask": mask, "q factor": factor}, inputs, RIVALS,
                            1, causal=grid.MASKS[mask]))
    return {"rows": rows}


PLAIN = [Kernel("bfloat16", d) for d in grid.HEAD_DIMS]
LONG = Kernel("bfloat16", 128, n=MANY)          # which has another tile shape
SPEED = [Kernel(*case) for case in dict.fromkeys((dtype, d) for dtype, d, _ in grid.speed_shapes())]
SPEED += [LONG, replace(LONG, dtype="float16")]
PARTS = {"speed": Part(speed, kernels=SPEED), "gqa": Part(gqa, kernels=[Kernel("bfloat16", 128), LONG]),
         "options": Part(options, slow=True, kernels=[
             Kernel("bfloat16", 128), LONG, Kernel("bfloat16", 128, softcap=20.0),
             Kernel("bfloat16", 128, alibi=True)]),
         "matmul": Part(matmul, kernels=[LONG, *PLAIN[2:]]), "error": Part(error, kernels=PLAIN)}
