"""Foreign arrays, overlap and writability."""

import numpy as np
import pytest

import numba_flash as nf
from numba_flash import arrays


class Host:
    """A library of its own that speaks DLPack for host memory."""

    def __init__(self, x):
        self.x = x

    def __dlpack__(self, **kwargs):
        return self.x.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()


class Pinned(Host):
    def __dlpack_device__(self):
        return 3, 0


class Elsewhere(Host):
    def __dlpack_device__(self):
        return 8, 0


class OnGpu:
    """Speaks __cuda_array_interface__; nobody gets as far as its memory without CuPy."""

    __cuda_array_interface__ = {"version": 3, "shape": (1, 1, 2, 4), "typestr": "<f4", "data": (1024, True)}


def inputs():
    return np.random.default_rng(0).standard_normal((3, 1, 2, 5, 4)).astype(np.float32)


def test_dlpack_on_the_host_is_answered_with_numpy():
    q, k, v = inputs()
    o = nf.attention(*map(Host, (q, k, v)))
    assert type(o) is np.ndarray
    np.testing.assert_array_equal(o, nf.attention(q, k, v))
    o, lse = nf.attention(*map(Host, (q, k, v)), return_lse=True)
    for do in (o, Host(o)):          # answers come back to us as they are, beside the caller's own kind of array
        grads = nf.attention_backward(do, *map(Host, (q, k, v)), o, lse)
        pulled = nf.attention_vjp(*map(Host, (q, k, v)))[1](do)
        for x, y, z in zip(grads, pulled, nf.attention_backward(o, q, k, v, o, lse)):
            np.testing.assert_array_equal(x, z)
            np.testing.assert_array_equal(y, z)


def test_a_mixture_of_libraries_is_refused():
    q, k, v = inputs()
    for mixed in ((Host(q), k, v), (q, Host(k), v), (q, k, Host(v))):
        with pytest.raises(TypeError, match="one library"):
            nf.attention(*mixed)
    with pytest.raises(TypeError, match="one library.*bias"):
        nf.attention(q, k, v, bias=Host(np.zeros((5, 5), np.float32)))


def test_pinned_host_memory_is_taken():
    q, k, v = inputs()
    np.testing.assert_array_equal(nf.attention(*map(Pinned, (q, k, v))), nf.attention(q, k, v))


def test_plain_numbers_where_an_option_has_no_axes():
    q, k, v = (x[0, 0] for x in inputs())
    np.testing.assert_array_equal(nf.attention(q, k, v, sinks=1, alibi_slopes=2, bias=3, mask=True),
                                  nf.attention(q, k, v, sinks=np.float32(1), alibi_slopes=np.float64(2),
                                               bias=np.array(3.0), mask=np.True_))


def test_other_devices_are_refused():
    with pytest.raises(TypeError, match="DLPack device of kind 8"):
        nf.attention(*map(Elsewhere, inputs()))


def test_gpu_memory_without_cupy_says_what_to_install():
    try:
        import cupy  # noqa: F401
        pytest.skip("CuPy is installed")
    except ImportError:
        pass
    with pytest.raises(TypeError, match="needs CuPy: pip install"):
        nf.attention(OnGpu(), OnGpu(), OnGpu())


def test_torch_host_tensors():
    torch = pytest.importorskip("torch")
    q, k, v = inputs()
    tensors = [torch.from_numpy(x) for x in (q, k, v)]
    np.testing.assert_array_equal(nf.attention(*tensors), nf.attention(q, k, v))
    with pytest.raises(TypeError, match="q must.*detach"):
        nf.attention(tensors[0].requires_grad_(), *tensors[1:])


def test_overlap():
    x = np.zeros((4, 6))
    assert arrays.overlap(x, x) and arrays.overlap(x[1:], x[:2]) and arrays.overlap(x, x[::-1, ::-1])
    assert not arrays.overlap(x[:2], x[2:]) and not arrays.overlap(x[:, ::2], x[:, 1::2])
    assert not arrays.overlap(x, np.zeros((4, 6))) and not arrays.overlap(x[:0], x)


def test_repeats_itself():
    x = np.zeros((4, 6))
    assert not any(map(arrays.repeats_itself, (x, x.T, x[::-1, ::2], x[:, :1], x[:0])))
    assert arrays.repeats_itself(np.broadcast_to(x[0], (4, 6)))
    assert arrays.repeats_itself(np.lib.stride_tricks.as_strided(x, (3, 3), (8, 8)))


def test_byte_bounds():
    x = np.zeros((4, 6), np.float32)
    start = x.ctypes.data
    for view in (x, x[::-1], x[:, ::-1], x.T):
        assert arrays.byte_bounds(view) == (start, start + 96)
