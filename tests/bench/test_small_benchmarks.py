"""The CPU's parts of cpu, memory, latency and train, at tiny sizes."""

import os

import numpy as np
import pytest

from bench import cpu, latency, measure, memory, train
from bench.ceilings import SIZE, products
from bench.contest import Inputs, engine
from bench.first_call import Kernel
from numba_flash import demo


@pytest.fixture(autouse=True)
def small_products(monkeypatch):
    monkeypatch.setitem(SIZE, "cpu", 64)


def test_products_are_counted_in_gflops():
    assert products(["float32", "float32"], gpu=False)["float32"] > 0.01


def test_cpu():
    result = cpu.speed(1, [(1, 2, 40, 8)])
    rows = [row.stored() for row in result["rows"]]
    assert [(row["direction"], row["mask"]) for row in rows] == [
        ("forward", "full"), ("backward", "full"), ("forward", "causal"), ("backward", "causal")]
    for row in rows:
        assert row["numba_flash GFLOP/s"] > 0 and row["numba_flash / numpy"] > 0 and row["numpy error"] < 1e-5
        assert ("torch GFLOP/s" in row) != ("torch not measured" in row)
    assert set(result["causal / full"]) == {"forward n 40 d 8", "backward n 40 d 8"}


needs_proc = pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="no Linux, no peak")


@needs_proc
def test_memory_on_a_cpu():
    rows = [row.stored() for row in memory.cpu(1, lengths=(64, 256), heads=2, d=16)["rows"]]
    assert [row["n"] for row in rows] == [64, 256]
    for row in rows:
        for name in "cpu", "standard", "memory-efficient":
            assert all(row[f"{name} {direction} MiB"] >= 0 for direction in memory.DIRECTIONS), row
        assert "torch forward MiB" in row or "torch not measured" in row


@needs_proc
def test_memory_sees_a_large_temporary():
    def call():
        x = np.ones(40 << 20, np.uint8)
        return x[:8 << 20].copy(),

    assert 35 << 20 < memory.peak_on_cpu(call) < 60 << 20


@needs_proc
def test_memory_has_limits_and_reasons():
    result = memory.peaks({"cpu": engine("cpu"), "hopper": engine("hopper")}, 1, 8, (4, 16), gpu=False,
                          limits={"cpu": 4})
    first, second = (row.stored() for row in result["rows"])
    assert "cpu forward MiB" in first and "cpu forward MiB" not in second
    assert "too large" in second["cpu not measured"] and "on the CPU" in first["hopper not measured"]


def test_what_a_call_starts_from_is_there_before_it():
    made = []

    def make(inputs, backward):
        made.append(backward)
        return engine("cpu")(inputs, backward)

    calls = memory.calls(make, Inputs.of("float32", (1, 1, 8, 8), gpu=False))
    assert made == [False, True]
    assert len(calls["forward"]()) == 1 and len(calls["backward"]()) == 3 and made == [False, True]
    assert len(calls["both"]()) == 4 and made == [False, True, True]        # its forward pass is part of the call


def test_latency_on_a_cpu(monkeypatch):
    monkeypatch.setattr(latency, "first_calls", lambda rounds, kernels, module: {"rows": [str(kernels[0]), module]})
    result = latency.cpu(1)
    rows = [row.stored() for row in result["rows"]]
    assert len(rows) == 4 and all(row["auto us"] > 0 and row["standard us"] > 0 for row in rows)
    assert result["first call"] == ["cpu float32 d 64", "numpy"]


def test_the_first_call_compiles(capfd):
    empty, filled = latency.first_calls(1, [Kernel("float32", 8, "standard")], "numpy")["rows"]
    assert empty["cache"] == "empty" and filled["cache"] == "filled"
    assert all({"import s", "first call s"} < set(row) for row in (empty, filled))


def test_train_on_a_cpu():
    settings = demo.Settings(steps=3, batch=2, context=16, dim=16, heads=2, layers=1, sample=0)
    result = train.cpu(1, settings)
    assert [row["engine"] for row in result["rows"]] == ["standard", "cpu"]
    assert all(row["tokens/s"] > 0 and row["error of loss"] < 1e-3 for row in result["rows"])
    assert result["rows"][0]["of the first"] == 1 and result["settings"]["context"] == 16


def test_train_leaves_out_what_cannot_or_is_wrong(monkeypatch):
    settings = demo.Settings(steps=2, batch=2, context=16, dim=16, heads=2, layers=1, sample=0)
    monkeypatch.setitem(train.LARGEST_ERROR, "bfloat16", 0.0)
    rows = train.tokens_per_second(settings, [("hopper", "float32"), ("cpu", "bfloat16"), ("cpu", "float32")], np,
                                   1)["rows"]
    assert "on the CPU" in rows[0]["not measured"] and "not timing a wrong result" in rows[1]["not measured"]
    assert rows[2]["of the first"] == 1


def test_small_calls_are_timed_many_at_a_time():
    done = []
    assert latency._many_seconds(lambda: done.append(0), repeats=5) < 1 and len(done) == 10
    assert measure.awake_seconds(lambda: done.append(0)) < 1 and len(done) == 12
