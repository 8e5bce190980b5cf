"""Tables and JSON."""

import json
import os

from bench.results import table, write_part


def test_results_say_where_they_come_from(tmp_path):
    write_part(tmp_path / "x" / "y.json", "speed", rows=[1])
    stored = json.loads((tmp_path / "x" / "y.json").read_text())["speed"]
    assert stored["rows"] == [1] and {"date", "commit", "versions", "cpu", "threads"} <= set(stored)


def test_a_part_keeps_the_others_and_its_own_circumstances(tmp_path, monkeypatch):
    path = tmp_path / "parts.json"
    for name, commit in (("speed", "old"), ("error", "old"), ("speed", "new")):
        monkeypatch.setenv("NUMBA_FLASH_COMMIT", commit)
        write_part(path, name, rows=[commit])
    stored = json.loads(path.read_text())
    assert {name: (part["commit"], part["rows"]) for name, part in stored.items()} == {
        "speed": ("new", ["new"]), "error": ("old", ["old"])}


def test_a_part_may_go_nowhere():
    write_part(os.devnull, "speed", rows=[1])


def test_tables_show_small_figures(capsys):
    table([{"a": 1.0, "b": 0.00216}, {"a": 10}])
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["a", "b"], ["1.00", "2.16e-03"], ["10"]]


def test_tables_may_be_empty(capsys):
    table([])
    assert not capsys.readouterr().out.strip()
