"""Which engine ``kernel="auto"`` takes on which GPU, made up."""

from dataclasses import replace

import pytest

from numba_flash import engines
from numba_flash.cuda import SIMULATOR
from numba_flash.cuda.config import choose
from numba_flash.cuda.tensor_cores.host import _addressable
from numba_flash.problem import BFLOAT16, FLOAT32, FLOAT64, Problem

pytestmark = pytest.mark.skipif(SIMULATOR, reason="the simulator has no tensor cores")
PLAIN = Problem(1, 2, 2, 64, 64, 64, 64, BFLOAT16, 0.125, 0, 128, 128)


@pytest.fixture
def auto(monkeypatch):
    """``auto(capability, problem, backward)``: the engine's name."""
    def auto(capability, problem, backward):
        for name in engines.ON_TENSOR_CORES:
            module = engines.load(name)
            monkeypatch.setattr(module, "why_no_device", lambda: None)
            monkeypatch.setattr(module, "capability", lambda: capability)
        kilobytes = {(8, 0): 163, (9, 0): 227, (10, 0): 227}.get(capability, 99)
        monkeypatch.setattr(engines.load("mma"), "shared_limit", lambda: kilobytes * 1024)
        monkeypatch.setattr(engines.load("flash2"), "why_no_kernel", lambda problem, kernels: None)
        engines._choose.cache_clear()
        chosen = engines.choose("auto", 0, problem, backward)
        return next(name for name in engines.ON_GPU if engines.load(name) is chosen)

    yield auto
    engines._choose.cache_clear()


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("capability, name", [((7, 5), "flash2"), ((8, 0), "mma"), ((8, 6), "mma"), ((8, 9), "mma"),
                                              ((9, 0), "hopper"), ((10, 0), "mma"), ((12, 0), "mma")], ids=str)
def test_each_gpu_has_its_engine(auto, capability, name, backward):
    assert auto(capability, PLAIN, backward) == name
    fast = capability in ((8, 0), (9, 0), (10, 0))
    assert auto(capability, replace(PLAIN, dtype=FLOAT32, d=20), backward) == ("mma" if fast else "flash2")
    tf32 = auto(capability, replace(PLAIN, dtype=FLOAT32, tf32=True), backward)
    assert tf32 == ("mma" if capability >= (8, 0) else "flash2")
    assert auto(capability, replace(PLAIN, dtype=FLOAT32, d=18), backward) == "flash2"
    for d in 64, 256:
        float64 = auto(capability, replace(PLAIN, dtype=FLOAT64, d=d), backward)
        assert float64 == ("mma" if fast else "flash2")
    assert auto(capability, replace(PLAIN, d=20), backward) == "flash2"
    assert auto(capability, replace(PLAIN, mask=True), backward) == "flash2"
    assert auto(capability, replace(PLAIN, softcap=1000.0), backward) == "flash2"


@pytest.mark.parametrize("change", [{"d": 192, "d_v": 192}, {"softcap": 2.0}, {"deterministic": True}], ids=str)
def test_hopper_does_what_mma_does(auto, change):
    assert auto((9, 0), replace(PLAIN, **change), True) == "hopper"


def test_float64_has_room_or_says_why(auto, monkeypatch):
    wide, mma = replace(PLAIN, dtype=FLOAT64, d=256, d_v=256), engines.load("mma")
    auto((12, 0), wide, True)
    assert mma.why_not(wide) is None and "99 KB" in mma.why_not(wide, backward=True)
    assert mma.why_not(replace(wide, d=192, d_v=192), backward=True) is None
    auto((8, 0), wide, True)
    assert mma.why_not(wide, backward=True) is None


@pytest.mark.parametrize("kilobytes, dtype, forward, gradients", [
    (99, FLOAT32, 512, 384), (99, FLOAT64, 192, 128), (227, FLOAT32, 512, 512), (227, FLOAT64, 512, 256)], ids=str)
def test_flash2_takes_the_head_dims_that_the_readme_names(kilobytes, dtype, forward, gradients):
    def fits(d, *kernels):
        problem = replace(PLAIN, dtype=dtype, d=d, d_v=d)
        return all(choose(kernel, problem, kilobytes * 1024) for kernel in kernels)

    assert fits(forward, "forward") and not fits(forward + 1, "forward")
    assert fits(gradients, "dkdv", "dq", "dbias") and not fits(gradients + 1, "dkdv", "dq")


def test_positions_of_the_sums_for_dq_fit_into_32_bits(auto):
    """Units of 16 bytes within a batch: 64 GiB."""
    long, mma = replace(PLAIN, heads=64, kv_heads=64, n_q=2**20, n_k=2**20, d=256, d_v=256), engines.load("mma")
    auto((8, 0), PLAIN, True)
    assert mma.why_not(long) is None and "dq of one batch must take less than 64 GiB" in mma.why_not(long, True)
    assert mma.why_not(replace(long, d=64, d_v=64), True) is None


def test_rows_far_apart_are_copied_first():
    """What one thread copies is at most 64 GiB from where its batch begins."""
    reach = 1 << 36
    assert _addressable(0, 2, (1, 1, 2, 8), (reach, reach, reach - 16, 2))
    assert not _addressable(0, 2, (1, 1, 2, 8), (reach, reach, reach, 2))
    assert not _addressable(0, 2, (1, 3, 2, 8), (2 * reach, reach // 2, 16, 2))
    assert _addressable(0, 2, (3, 1, 2, 8), (2 * reach, reach, 16, 2))
