"""Other people's attention by its true name, as rivals of a `contest`: PyTorch's backends, FlexAttention, JAX.

Importing this imports none of them. One that is not installed, or has no kernel for a problem, says so when it is made,
and its row stores the words.
"""

import os
from contextlib import contextmanager, nullcontext
from functools import lru_cache

import numpy as np

from numba_flash.problem import BFLOAT16

from .contest import Call
from .measure import wall_seconds

# What a row calls a backend of PyTorch's: its name in SDPBackend.
BACKENDS = {"cudnn": "CUDNN_ATTENTION", "torch flash": "FLASH_ATTENTION",         # FlashAttention-2
            "torch efficient": "EFFICIENT_ATTENTION", "torch math": "MATH"}


class Missing(Exception):
    """A peer that is not here, in words."""


# ---- PyTorch ---------------------------------------------------------------------------------------------------------

def import_torch():
    """PyTorch, or the words for there being none."""
    try:
        import torch
        import torch.nn.attention
    except ImportError as error:
        raise Missing(f"PyTorch is not installed ({error})") from None
    return torch


def why_not():
    """Why there is no PyTorch with a GPU here, in words; None if there is."""
    try:
        return None if import_torch().cuda.is_available() else "PyTorch finds no GPU"
    except Missing as reason:
        return str(reason)


def versions():
    """What the environment's list of Python packages doesn't say."""
    if why_not():
        return {}
    number = import_torch().backends.cudnn.version()
    return {"cudnn": ".".join(str(number // step % 100) for step in (10000, 100, 1))}


def on_stream():
    """Context in which CuPy works on PyTorch's current stream: events on it then see both."""
    if why_not():
        return nullcontext()
    import cupy

    return cupy.cuda.ExternalStream(import_torch().cuda.current_stream().cuda_stream)


def as_tensor(x):
    """The same memory for PyTorch. DLPack between the two has no bfloat16, so that travels as integers."""
    torch = import_torch()
    return torch.from_dlpack(x.view(np.int16)).view(torch.bfloat16) if x.dtype == BFLOAT16 else torch.from_dlpack(x)


def as_arrays(tensors):
    """The same memory as CuPy or NumPy arrays."""
    torch = import_torch()

    def as_array(x):
        x = x.detach().contiguous()
        if x.is_cuda:
            import cupy as xp
        else:
            xp = np
        if x.dtype == torch.bfloat16:
            return xp.from_dlpack(x.view(torch.int16)).view(BFLOAT16)
        return xp.from_dlpack(x)

    return [as_array(x) for x in tensors]


def torch_call(attend, inputs, backward, context=nullcontext):
    """The `Call` of a function of q, k, v that PyTorch can differentiate."""
    torch = import_torch()
    do, *tensors = map(as_tensor, inputs.arrays)
    if not backward:
        @contextmanager
        def without_gradients():
            with torch.no_grad(), context():
                yield

        return Call(lambda: (attend(*tensors),), without_gradients, as_arrays)
    tensors = [x.detach().requires_grad_() for x in tensors]
    with context():
        o = attend(*tensors)
    return Call(lambda: torch.autograd.grad(o, tensors, do, retain_graph=True), context, as_arrays)


def sdpa(name=None, deterministic=False):
    """A rival: PyTorch's attention by one of `BACKENDS`, and no other stands in for it; by PyTorch's choice if None."""
    def make(inputs, backward, causal=False, **options):
        if options:
            raise Missing(f"it has no {', '.join(options)}")
        torch = import_torch()
        if inputs.on_gpu and why_not():
            raise Missing(why_not())
        _, heads, _, _ = inputs.arrays[1].shape
        more = {"enable_gqa": True} if heads != inputs.arrays[2].shape[1] else {}

        def attend(q, k, v):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, **more)

        @contextmanager
        def context():
            attention = torch.nn.attention
            backend = [getattr(attention.SDPBackend, BACKENDS[name])] if name else None
            with attention.sdpa_kernel(backend) if name else nullcontext(), \
                    same_bits(torch) if deterministic else nullcontext():
                yield

        return torch_call(attend, inputs, backward, context)

    return make


@contextmanager
def same_bits(torch):
    """PyTorch's deterministic algorithms; without their habit of filling new memory, which takes time."""
    was, filled = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was)
        torch.utils.deterministic.fill_uninitialized_memory = filled


def flex(inputs, backward, causal=False, window=None, softcap=None, alibi_slopes=None):
    """A rival: FlexAttention, compiled for one option of numba_flash's."""
    if why_not():
        raise Missing(why_not())
    torch = import_torch()
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    options, n = {}, inputs.arrays[1].shape[2]
    if softcap is not None:
        options["score_mod"] = lambda s, b, h, i, j: softcap * torch.tanh(s / softcap)
    if alibi_slopes is not None:
        slopes = torch.from_numpy(alibi_slopes).to("cuda")
        options["score_mod"] = lambda s, b, h, i, j: s - slopes[h] * torch.abs(i - j)
    if causal:
        left = n if window is None else window[0]
        options["block_mask"] = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j <= left), None, None, n, n,
                                                  device="cuda")
    attend = torch.compile(flex_attention, dynamic=False)
    return torch_call(lambda q, k, v: attend(q, k, v, **options), inputs, backward)


# ---- JAX -------------------------------------------------------------------------------------------------------------

@lru_cache
def import_jax():
    """JAX with a GPU, or the words for there being none."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")       # it would take most of the GPU's memory
    try:
        import jax
    except ImportError as error:
        raise Missing(f"JAX is not installed ({error})") from None
    try:
        jax.devices("gpu")
    except RuntimeError as error:
        raise Missing(f"JAX finds no GPU ({error})") from None
    return jax


def jax_attention(implementation):
    """A rival: `jax.nn.dot_product_attention`, compiled; `implementation` is "cudnn" or "xla".

    It works on a stream of its own, so the host's clock times it, many calls in a row.
    """
    def make(inputs, backward, causal=False, **options):
        if options:
            raise Missing(f"it has no {', '.join(options)}")
        jax = import_jax()
        do, q, k, v = (_to_jax(jax, x) for x in inputs.arrays)

        def attend(q, k, v):
            return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation=implementation)

        if backward:
            _, pullback = jax.vjp(jax.jit(attend), q, k, v)
            compiled, arguments = jax.jit(lambda back, x: back(x)), (pullback, do)
        else:
            compiled, arguments = jax.jit(lambda *qkv: (attend(*qkv),)), (q, k, v)
        return Call(lambda: compiled(*arguments), as_arrays=lambda answer: [_from_jax(jax, x) for x in answer],
                    clock=lambda run: _seconds_until_ready(jax, run))

    return make


def _to_jax(jax, x):
    """A copy in JAX's layout, (batch, n, heads, d)."""
    x = x.transpose(0, 2, 1, 3).copy()
    if x.dtype != BFLOAT16:
        return jax.dlpack.from_dlpack(x)
    return jax.lax.bitcast_convert_type(jax.dlpack.from_dlpack(x.view(np.int16)), jax.numpy.bfloat16)


def _from_jax(jax, x):
    import cupy

    if x.dtype == jax.numpy.bfloat16:
        bits = jax.block_until_ready(jax.lax.bitcast_convert_type(x, jax.numpy.int16))
        return cupy.from_dlpack(bits).view(BFLOAT16).transpose(0, 2, 1, 3)
    return cupy.from_dlpack(jax.block_until_ready(x)).transpose(0, 2, 1, 3)


def _seconds_until_ready(jax, run, budget=0.02):
    def some(repeats):
        return wall_seconds(lambda: jax.block_until_ready([run() for _ in range(repeats)])) / repeats

    return some(max(3, min(50, int(budget / some(1)))))
