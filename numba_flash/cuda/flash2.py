"""The engine `flash2`: FlashAttention-2. Its kernels are in `flash2_forward` and `flash2_backward`."""

from .host import chosen, option_arguments, run, run_dbias, run_delta, run_dsinks, why_no_kernel
from .launch import why_no_device

why_not_here = why_no_device


def why_not(problem, backward=False):
    """Why this engine can't do a problem here, in words; None if it can."""
    kernels = ["forward"]
    if backward:
        kernels = ["dkdv", "dq"] + (["dbias"] if problem.bias else [])
    return why_no_kernel(problem, kernels)


def forward(problem, operands, o, lse):
    """Fill o and lse."""
    choice = chosen("forward", problem)
    blocks = -(-problem.n_q // choice.tile.block_m) * problem.batch * problem.heads
    run(choice, blocks, (operands.q, operands.k, operands.v, o, lse, operands.sinks,
                         *option_arguments(problem, operands)))


def backward(problem, operands, do, dlse, o, lse, grads):
    """Fill the gradients. Extra memory: delta, one number per query."""
    q, k, v = operands.q, operands.k, operands.v
    options = option_arguments(problem, operands)
    delta = run_delta(problem, do, o, dlse, lse)
    choice = chosen("dkdv", problem)
    blocks = -(-problem.n_k // choice.tile.block_n) * problem.batch * problem.kv_heads
    run(choice, blocks, (q, k, v, do, lse, delta, grads.dk, grads.dv, *options))
    choice = chosen("dq", problem)
    blocks = -(-problem.n_q // choice.tile.block_m) * problem.batch * problem.heads
    run(choice, blocks, (q, k, v, do, lse, delta, grads.dq, *options))
    run_dbias(problem, operands, do, lse, delta, grads.dbias)
    run_dsinks(operands, lse, delta, grads.dsinks)
