"""The engine `flash1`: FlashAttention as published. Its kernels are in `flash1_forward` and `flash1_backward`."""

from .host import array_module, chosen, option_arguments, run, run_dbias, run_delta, run_dsinks, why_no_kernel
from .launch import why_no_device

why_not_here = why_no_device


def why_not(problem, backward=False):
    """Why this engine can't do a problem here, in words; None if it can."""
    kernels = ["flash1_forward"]
    if backward:
        kernels = ["flash1_backward"] + (["dbias"] if problem.bias else [])
    return why_no_kernel(problem, kernels)


def forward(problem, operands, o, lse):
    """Fill o and lse. Extra memory: m and l, and for 16-bit arrays O in float32."""
    xp = array_module()
    work = o if problem.dtype == problem.accumulator else xp.empty(problem.o_shape, problem.accumulator)
    m, l = xp.empty_like(lse), xp.empty_like(lse)
    run(chosen("flash1_forward", problem), problem.batch * problem.heads,
        (operands.q, operands.k, operands.v, o, lse, operands.sinks, work, m, l, *option_arguments(problem, operands)))


def backward(problem, operands, do, dlse, o, lse, grads):
    """Fill the gradients. Extra memory: delta, one number per query, and for 16-bit arrays dQ in float32."""
    work = grads.dq
    if problem.dtype != problem.accumulator:
        work = array_module().empty(problem.q_shape, problem.accumulator)
    delta = run_delta(problem, do, o, dlse, lse)
    run(chosen("flash1_backward", problem), problem.batch * problem.kv_heads,
        (operands.q, operands.k, operands.v, do, lse, delta, grads.dq, grads.dk, grads.dv, work,
         *option_arguments(problem, operands)))
    run_dbias(problem, operands, do, lse, delta, grads.dbias)
    run_dsinks(operands, lse, delta, grads.dsinks)
