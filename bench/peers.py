"""PyTorch's attention by the true names of its backends, on tensors that share their memory with CuPy arrays."""

from contextlib import nullcontext

import cupy as cp

from numba_flash.problem import BFLOAT16

try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
except ImportError:
    torch = None

DEVICE = "cuda"


def why_not():
    """Why there is no peer here, in words; None if there is one."""
    if torch is None:
        return "PyTorch is not installed"
    return None if torch.cuda.is_available() else "PyTorch finds no GPU"


def versions():
    """What the environment's list of Python packages doesn't say."""
    if why_not():
        return {}
    major, minor, patch = (torch.backends.cudnn.version() // step % 100 for step in (10000, 100, 1))
    return {"cudnn": f"{major}.{minor}.{patch}"}


def on_stream():
    """Context in which CuPy works on PyTorch's current stream: events on it then see both."""
    return nullcontext() if why_not() else cp.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)


def normal(dtype, *shapes):
    """Tensors of random numbers, the same in every run; `dtype` is a name."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    return [torch.randn(shape, generator=generator, device=DEVICE, dtype=getattr(torch, dtype)) for shape in shapes]


def as_cupy(x):
    """The same memory as a CuPy array. DLPack between the two has no bfloat16, so that travels as integers."""
    return cp.from_dlpack(x.view(torch.int16)).view(BFLOAT16) if x.dtype == torch.bfloat16 else cp.from_dlpack(x)


def cudnn():
    """Context in which attention is cuDNN's or an error: no other backend stands in for it."""
    return sdpa_kernel([SDPBackend.CUDNN_ATTENTION])


def make_sdpa(tensors, **options):
    """A call of PyTorch's attention on q, k, v; its default choice of a backend, unless a context says otherwise."""
    return lambda: torch.nn.functional.scaled_dot_product_attention(*tensors, **options)


def make_cudnn(tensors, causal=False):
    """A call of cuDNN's attention."""
    attend = make_sdpa(tensors, is_causal=causal, enable_gqa=tensors[0].shape[1] != tensors[1].shape[1])

    def call():
        with cudnn():
            return attend()

    return call


def make_flex(tensors, *, causal=False, window=None, softcap=None, alibi_slopes=None):
    """A call of FlexAttention, compiled for one option of numba_flash's, which `alibi_slopes` takes from NumPy."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    options, n = {}, tensors[0].shape[2]
    if softcap is not None:
        options["score_mod"] = lambda s, b, h, i, j: softcap * torch.tanh(s / softcap)
    if alibi_slopes is not None:
        slopes = torch.from_numpy(alibi_slopes).to(DEVICE)
        options["score_mod"] = lambda s, b, h, i, j: s - slopes[h] * torch.abs(i - j)
    if causal:
        left = n if window is None else window[0]
        options["block_mask"] = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j <= left), None, None, n, n,
                                                  device=DEVICE)
    attend = torch.compile(flex_attention, dynamic=False)
    return lambda: attend(*tensors, **options)


def last_rows(o, rows):
    """The last rows of the last head, in float64 on the host."""
    return o[-1:, -1:, -rows:].double().cpu().numpy()


def distance(x, right):
    """Relative Frobenius distance of two tensors."""
    right = right.float()
    return float((x.float() - right).norm() / right.norm())
