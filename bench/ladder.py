"""Every engine on the same problem, forward and backward, beside PyTorch's backends and JAX.

==========  ==========================================================================
`float32`   where there are no tensor cores to help; the engines that have no float32 say so
`bfloat16`  where `hopper` is at home, and `flash1` and `flash2` run at float32's speed
==========  ==========================================================================
"""

from tqdm import tqdm

from numba_flash import engines

from . import grid, peers
from .ceilings import products
from .contest import Inputs, measured
from .first_call import Kernel
from .measure import flops
from .parts import Part
from .rungs import ladder

N = 4096
MOST = 3                        # rounds: the lower rungs take their time
JAX_HEAD_DIM = 128              # the only one: it compiles each problem for seconds
SHAPES = [(d, mask) for d in (64, 128) for mask in grid.MASKS]
PEERS = {"float32": {"torch efficient": peers.sdpa("torch efficient"), "torch math": peers.sdpa("torch math"),
                     "jax xla": peers.jax_attention("xla")},
         "bfloat16": {"cudnn": peers.sdpa("cudnn"), "torch flash": peers.sdpa("torch flash"),
                      "torch efficient": peers.sdpa("torch efficient"), "jax cudnn": peers.jax_attention("cudnn")}}


def rungs(dtype, rounds, tokens=grid.TOKENS):
    """Rows of all rungs and peers at n 4096; ratios are those of the highest rung."""
    ceilings, rows, climbed = products([dtype]), [], ladder()
    rivals = {name: climbed[name] for name in reversed(climbed)} | PEERS[dtype]
    for d, mask in tqdm(SHAPES, desc=dtype):
        batch, heads = tokens // N, grid.HIDDEN // d
        beside = rivals if d == JAX_HEAD_DIM else {name: x for name, x in rivals.items() if "jax" not in name}
        inputs, causal = Inputs.of(dtype, (batch, heads, N, d)), grid.MASKS[mask]
        for direction in ("forward", "backward"):
            backward = direction == "backward"
            rows.append(measured({"direction": direction, "d": d, "n": N, "mask": mask}, inputs, beside,
                                 flops(batch, heads, N, N, d, causal=causal, backward=backward), min(rounds, MOST),
                                 ceilings, backward=backward, causal=causal))
    return {"rows": rows, "ceiling": ceilings}


def float32(rounds):
    """TFLOP/s of every engine in float32."""
    return rungs("float32", rounds)


def bfloat16(rounds):
    """TFLOP/s of every engine in bfloat16."""
    return rungs("bfloat16", rounds)


def kernels(dtype, dims=(64, 128)):
    """What to compile ahead for head dims: all engines but `standard`, which has no kernel."""
    return [Kernel(dtype, d, name, backward=backward) for name in ladder() for d in dims
            for backward in (False, True) if name not in ("standard", "memory-efficient")
            and (dtype != "float32" or name not in engines.ONLY_16_BIT)]


PARTS = {"float32": Part(float32, kernels=kernels("float32")), "bfloat16": Part(bfloat16, kernels=kernels("bfloat16"))}
