"""Which calls are the same as one before: a call taken for another would get its answer."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from numba_flash import again, arrays
from numba_flash.describe import describe

PLAIN = {"kernel": "auto", "scale": None, "causal": False, "window": None, "softcap": None, "precision": None}


@pytest.fixture
def cupy(monkeypatch):
    """As much of CuPy as is asked for an array."""
    class Array:
        def __init__(self, ptr=1 << 20, shape=(1, 2, 8, 16), strides=(512, 256, 32, 2), dtype="float16", device=0):
            self.data = SimpleNamespace(ptr=ptr, device_id=device)
            self.shape, self.strides, self.dtype = shape, strides, np.dtype(dtype)

    module = SimpleNamespace(ndarray=Array, cuda=SimpleNamespace(runtime=SimpleNamespace(getDevice=lambda: 0)))
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setattr(again, "_known", {})
    monkeypatch.setattr(arrays, "empty", lambda xp, shape, dtype: np.empty(shape, dtype))
    return module


def key(cupy, change=None, device=0, **options):
    """Of three arrays of one device, the last of them changed."""
    q, k, v = (cupy.ndarray(device=device, **its) for its in ({}, {}, change or {}))
    return again.key_of(q, k, v, **{**PLAIN, **options})


def test_whatever_may_change_the_answer_is_in_the_key(cupy):
    calls = [{}, {"device": 1}, *({"change": change} for change in (
        {"ptr": 1 << 21}, {"shape": (1, 2, 8, 8)}, {"strides": (512, 32, 64, 2)}, {"dtype": "uint16"})),
        {"kernel": "hopper"}, {"scale": .5}, {"causal": True}, {"causal": "top_left"}, {"window": (3, None)},
        {"window": (3, 0)}, {"softcap": 2.0}, {"precision": "tf32"}]
    keys = [key(cupy, **call) for call in calls]
    assert None not in keys and len(set(keys)) == len(keys)
    assert keys == [key(cupy, **call) for call in calls]


@pytest.mark.parametrize("option", [{"causal": 1}, {"causal": np.True_}, {"scale": True}, {"scale": np.float32(1)},
                                    {"softcap": True}, {"window": (3.0, 0)}, {"window": [3, 0]}, {"window": (True, 0)},
                                    {"window": 3}, {"kernel": None}, {"precision": np.str_("tf32")}], ids=str)
def test_what_only_looks_like_a_plain_option_is_described_each_time(cupy, option):
    assert key(cupy, **option) is None


def test_only_cupy_arrays_of_one_device_have_keys(cupy, monkeypatch):
    x, y, elsewhere = cupy.ndarray(), np.zeros((1, 2, 8, 16), np.float16), cupy.ndarray(device=1)
    for q, k, v in ((x, x, y), (y, x, x), (y, y, y), (type("Sub", (cupy.ndarray,), {})(),) * 3, ([], [], []),
                    (x, x, elsewhere), (x, elsewhere, x), (elsewhere, x, x)):
        assert again.key_of(q, k, v, **PLAIN) is None
    monkeypatch.delitem(sys.modules, "cupy")
    assert again.key_of(x, x, x, **PLAIN) is None


class Launch:
    copies = ()

    def run(self, o, lse):
        o[...] = 3
        if lse is not None:
            lse[...] = 4


def remembered(cupy, shape=(1, 2, 8, 16), launch=Launch()):
    x = np.zeros(shape, np.float16)
    call = describe("attention", x, x, x)._replace(device=0)
    again.remember(key(cupy), call, launch)
    return key(cupy)


def test_a_call_like_one_before_is_only_launched(cupy):
    known = remembered(cupy)
    o, lse = again.repeat(known, return_lse=True)
    assert (o.shape, o.dtype, lse.shape, lse.dtype) == ((1, 2, 8, 16), np.float16, (1, 2, 8), np.float32)
    assert (o == 3).all() and (lse == 4).all()
    assert again.repeat(known, return_lse=False)[1] is None
    assert again.repeat(key(cupy, scale=.5), return_lse=False) is None
    cupy.cuda.runtime.getDevice = lambda: 1
    assert again.repeat(known, return_lse=False) is None, "another device is the current one"


def test_what_a_launch_alone_would_not_do_is_not_remembered(cupy):
    copying = Launch()
    copying.copies = [1]
    for known in remembered(cupy, launch=copying), remembered(cupy, (2, 8, 16)):
        assert again.repeat(known, return_lse=False) is None


def test_not_more_calls_are_remembered_than_fit(cupy, monkeypatch):
    monkeypatch.setattr(again, "KEPT", 2)
    for n in range(5):
        again._known[n] = None
        remembered(cupy)
        assert len(again._known) <= 3
