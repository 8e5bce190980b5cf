"""What ncu writes is read, and held against the reference's counts."""

import pytest

from bench import traffic
from bench.rungs import ladder

HEADER = '"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"'


def csv(*lines):
    return "\n".join(["==PROF== Connected to process 7", HEADER,
                      *(f'"0","7","{name}","","{metric}","{unit}","{value}"' for name, metric, unit, value in lines)])


def test_kernels_belong_to_the_call_before_them():
    read, sectors = traffic.HBM["GB read"], traffic.L2["GB read from L2"]
    counts = traffic.read_counts(csv(
        ("warm up", read, "byte", "5"), ("call_3", read, "byte", "640"), ("forward(float)", read, "byte", "1,000,000"),
        ("softmax", read, "Kbyte", "2.5"), ("softmax", sectors, "sector", "10"), ("call_12", read, "byte", "64"),
        ("gemm", read, "byte", "7"), ("gemm", sectors, "", "n/a")))
    assert counts == {3: {read: 1002500, sectors: 320}, 12: {read: 7}}


def test_no_table_no_counts():
    assert traffic.read_counts("==ERROR== The user does not have permission\n") == {}


def test_rows_hold_counts_against_predictions():
    names = list(ladder())
    told = traffic.predicted("flash2")
    of_all = traffic.BATCH * traffic.HEADS
    counts = {names.index("flash2"): {traffic.HBM["GB read"]: of_all * told.read / 2,
                                      traffic.HBM["GB written"]: of_all * told.written / 2,
                                      traffic.L2["GB read from L2"]: 3e9}}
    refused = {traffic.number("backward", "flash2"): "no room"}
    rows = {(row["direction"], row["engine"]): row
            for row in traffic.rows_of(counts, refused, ("forward", "backward"), 4)}
    assert set(rows) == {(direction, name) for direction in ("forward", "backward") for name in names}
    row = rows["forward", "flash2"]
    assert row["counted / predicted"] == pytest.approx(0.5) and row["GB read from L2"] == pytest.approx(3)
    assert row["GB read"] == pytest.approx(row["predicted GB read"] / 2)
    assert rows["backward", "flash2"]["not measured"] == "no room" and "predicted GB read" in rows["backward", "flash2"]
    assert rows["forward", "hopper"]["not measured"] == "ncu saw no kernel"
    assert "predicted GB read" not in rows["backward", "standard"]


def test_every_forward_rung_is_predicted():
    assert {name for name in ladder() if traffic.predicted(name)} >= {"standard", "memory-efficient", "flash1",
                                                                      "flash2", "mma", "hopper"}


def test_a_missing_ncu_is_said_in_words(monkeypatch):
    monkeypatch.setattr(traffic.shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match="ncu .* is not installed"):
        traffic.count("float32", ("forward",), ["a"])


def test_ncu_is_run_on_this_module_and_its_words_are_passed_on(monkeypatch):
    def ncu(command, **options):
        assert command[0] == "ncu" and "a,b" in command and "profiled('float32', ('forward',))" in command[-1]
        log = command[command.index("--log-file") + 1]
        open(log, "w").write("==ERROR== no permission\n")
        return traffic.subprocess.CompletedProcess(command, 1, "", "")

    monkeypatch.setattr(traffic.shutil, "which", lambda name: name)
    monkeypatch.setattr(traffic.subprocess, "run", ncu)
    with pytest.raises(RuntimeError, match="counted nothing: ==ERROR== no permission"):
        traffic.count("float32", ("forward",), ["a", "b"])


def test_without_counters_of_l2_those_of_hbm_are_enough(monkeypatch):
    def count(dtype, directions, metrics):
        if len(metrics) > 2:
            raise RuntimeError("no such metric")
        return {0: dict.fromkeys(metrics, 1e9)}, {1: "refused"}

    monkeypatch.setattr(traffic, "count", count)
    first, second, *_ = traffic.measure("bfloat16")["rows"]
    assert first["GB read"] == 1 and "GB read from L2" not in first and second["not measured"] == "refused"


@pytest.mark.parametrize("words, reasons", [
    ("", {}), ('more\nrefused: {"4": "no float32"}\nand more', {4: "no float32"})])
def test_why_a_call_is_not_counted_comes_from_the_process_under_ncu(words, reasons, monkeypatch):
    def ncu(command, **options):
        log = command[command.index("--log-file") + 1]
        open(log, "w").write(csv(("call_3", "a", "byte", "640"), ("gemm", "a", "byte", "7")))
        return traffic.subprocess.CompletedProcess(command, 0, words, "")

    monkeypatch.setattr(traffic.shutil, "which", lambda name: name)
    monkeypatch.setattr(traffic.subprocess, "run", ncu)
    assert traffic.count("float32", ("forward",), ["a"]) == ({3: {"a": 7}}, reasons)
