"""Every engine of this machine, as one fixture; answers are filled with NaN before anything computes them."""

import gc

import pytest
from helpers import ENGINES
from hypothesis import settings

from numba_flash import arrays, engines
from numba_flash.check import gpu_trouble

# Compiling makes the first example slow; a fixed seed keeps CI repeatable.
settings.register_profile("numba_flash", deadline=None, derandomize=True)
settings.load_profile("numba_flash")

# Numba's compiler makes millions of objects that stay: to look for garbage after every 700 takes an eighth of its time.
gc.set_threshold(100_000)


@pytest.fixture(params=ENGINES, ids=lambda engine: f"{engine.kernel}-{engine.place}")
def engine(request):
    """Each engine that can run here."""
    if request.param.place == "simulator" and not engines.simulated():
        pytest.skip("runs in Numba's CUDA simulator: set NUMBA_ENABLE_CUDASIM=1")
    if request.param.place != "simulator" and engines.simulated():
        pytest.skip("the simulator is on; this engine is tested without it")
    return request.param


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A process with no tests left takes some of another's: nearly all that take seconds stand side by side."""
    from xdist.scheduler import WorkStealingScheduling
    return WorkStealingScheduling(config, log) if config.getvalue("dist") == "load" else None


def pytest_collection_modifyitems(items):
    for item in items:
        place = getattr(item, "callspec", None) and item.callspec.params.get("engine")
        if place and place.place == "cupy":
            item.add_marker(pytest.mark.gpu)
        if place and place.place == "simulator":
            item.add_marker(pytest.mark.simulator)
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    reason = gpu_trouble() if gpu_items else None
    for item in gpu_items:
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def answers_start_as_nan(monkeypatch):
    """An element that an engine forgets to write must not be right by luck."""
    def filled(xp, shape, dtype):
        x = xp.empty(shape, dtype)
        x.view(f"u{x.itemsize}")[...] = 2**(8 * x.itemsize) - 1           # all bits set is a NaN in every dtype
        return x

    monkeypatch.setattr(arrays, "empty", filled)
