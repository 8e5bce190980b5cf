"""What a launch promises: the current stream, no synchronisation, graphs, large grids, large arrays."""

import numpy as np
import pytest
from helpers import problem

import numba_flash as nf

pytestmark = pytest.mark.gpu
kernels = pytest.mark.parametrize("kernel", ["flash1", "flash2"])


def placed(**sizes):
    import cupy

    return [cupy.asarray(x) for x in problem(**sizes)]


def both(kernel, do, q, k, v, **options):
    o, lse = nf.attention(q, k, v, kernel=kernel, return_lse=True, **options)
    return o, lse, *nf.attention_backward(do, q, k, v, o, lse, kernel=kernel, **options)


@kernels
def test_graph_capture_and_replay(kernel):
    """A captured forward and backward gives the answer for whatever the inputs hold when it is replayed."""
    import cupy

    inputs = placed(n_q=70, d=16)
    both(kernel, *inputs, causal=True)                       # compiled before the capture
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        captured = both(kernel, *inputs, causal=True)
        graph = stream.end_capture()
    for x, new in zip(inputs, placed(seed=1, n_q=70, d=16)):
        x[...] = new
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    for got, right in zip(captured, both(kernel, *inputs, causal=True)):
        assert bool((got == right).all())


@kernels
def test_the_current_stream_is_used_and_not_waited_for(kernel):
    """Work queued before the call on the same stream is seen by it, though it takes longer than the call."""
    import cupy

    do, q, k, v = placed(n_q=70, d=16)
    right = both(kernel, do, q, k, v)
    late = cupy.zeros_like(q)
    busy = cupy.ones((6000, 6000), cupy.float32)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        for _ in range(20):
            busy @ busy
        late[...] = q
        done = cupy.cuda.Event()
        got = both(kernel, do, late, k, v)
        done.record()
        assert not done.done, "the call has waited for the device"
    stream.synchronize()
    for x, y in zip(got, right):
        assert bool((x == y).all())


def test_more_heads_than_a_grid_is_high():
    import cupy

    do, q, k, v = placed(batch=700, heads=100, n_q=2, d=4)
    assert 700 * 100 > 65535
    whole = both("flash2", do, q, k, v)
    part = both("flash2", *(x[-1:] for x in (do, q, k, v)))
    for x, y in zip(whole, part):
        assert bool((x[-1:] == y).all()) and bool(cupy.isfinite(x).all())


def test_offsets_past_two_to_the_31():
    """Keys and values spread over more than 2^31 elements, and an output with more."""
    import cupy

    n, d, step = 9, 16, 2**31 + 64
    memory = cupy.zeros(step + 4096, cupy.float16)
    strides = (2 * step, 2 * n * d, 2 * d, 2)
    k, v = (cupy.lib.stride_tricks.as_strided(memory[start:], (2, 1, n, d), strides) for start in (0, 1024))
    do, q, new_k, new_v = placed(batch=2, heads=1, n_q=n, d=d, dtype=np.float16)
    k[...], v[...] = new_k, new_v
    for x, y in zip(both("flash2", do, q, k, v), both("flash2", do, q, new_k, new_v)):
        assert bool((x == y).all())
    del memory, k, v
    heads = 2**16 + 1
    q = cupy.zeros((1, heads, 256, 1), cupy.float16)
    v = cupy.broadcast_to(cupy.arange(128, dtype=cupy.float16), (1, 1, 1, 128))
    o, lse = nf.attention(q, q[:, :1, :1], v, return_lse=True, kernel="flash2")
    assert o.size > 2**31
    for h in (0, heads // 2, heads - 1):
        assert bool((o[0, h] == v[0, 0, 0]).all())


def test_the_callers_device_stays_current():
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    do, q, k, v = problem(n_q=5)
    with cupy.cuda.Device(1):
        on_second = [cupy.asarray(x) for x in (do, q, k, v)]
    got = both("flash2", *on_second)
    assert cupy.cuda.Device().id == 0 and got[0].device.id == 1
    for x, y in zip(got, both("flash2", *map(cupy.asarray, (do, q, k, v)))):
        np.testing.assert_array_equal(x.get(), y.get())
    with pytest.raises(ValueError, match="GPU"):
        nf.attention(cupy.asarray(q), *on_second[2:])


@pytest.mark.parametrize("library", ["torch", "interface"])
def test_foreign_gpu_arrays_are_answered_with_cupy(library):
    import cupy

    _, q, k, v = placed(n_q=5)
    if library == "torch":
        torch = pytest.importorskip("torch")
        foreign = [torch.from_dlpack(x) for x in (q, k, v)]
    else:
        class Foreign:
            def __init__(self, x):
                self.__cuda_array_interface__ = x.__cuda_array_interface__
        foreign = [Foreign(x) for x in (q, k, v)]
    o = nf.attention(*foreign)
    assert isinstance(o, cupy.ndarray) and bool((o == nf.attention(q, k, v)).all())
    with pytest.raises(TypeError, match="one side|on the same side|one library"):
        nf.attention(q, k.get(), v)
