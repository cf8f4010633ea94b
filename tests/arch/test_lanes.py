"""The lanes: what is slow is known by measure, and what guards the main way is run all the same."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import lanes


def slow(monkeypatch, *names, mark="slow"):
    """Return which of these tests are slow, by a table of two and a guard; or which have another mark."""
    cases = {"a.py::case[1]": 0.5, "a.py::case[2]": 0.4, "a.py::case[3]": 0.3, "a.py::case[4]": 0.2} | dict.fromkeys(
        ("a.py::guard[1]", "a.py::guard[2]"), 9.0
    )
    monkeypatch.setattr(lanes, "costs", lambda: {"a.py::long": 0.6, "a.py::short": 0.5, "a.py::guard": 9.0} | cases)
    monkeypatch.setattr(lanes, "guards", lambda: ["a.py::guard"])
    marked = []

    def item(name):
        return SimpleNamespace(
            nodeid=name,
            path=Path(name.partition("::")[0]),
            add_marker=lambda one: marked.append(name) if getattr(one, "name", one) == mark else None,
            get_closest_marker=lambda _: "sweep" if "swept" in name else None,
        )

    lanes.pytest_collection_modifyitems([item(name) for name in names])
    return marked


def test_more_than_half_a_second_is_slow_unless_it_guards_the_main_way(monkeypatch):
    assert slow(monkeypatch, "a.py::long", "a.py::short", "a.py::guard", "a.py::new") == ["a.py::long"]


def test_of_cases_the_cheapest_may_take_half_a_second_and_others_a_fifth(monkeypatch):
    one, two, three, four = (f"a.py::case[{number}]" for number in (1, 2, 3, 4))
    assert slow(monkeypatch, one, two, three) == [one, two]
    assert slow(monkeypatch, one, two, three, four) == [one, two, three]
    assert slow(monkeypatch, one, two, "a.py::case[swept]") == [one]  # that one is in no check
    assert slow(monkeypatch, "a.py::guard[1]", "a.py::guard[2]") == []


def test_what_takes_long_is_waited_for(monkeypatch):
    assert slow(monkeypatch, "a.py::long", "a.py::guard", "a.py::x[swept]", mark="timeout") == [
        "a.py::guard",
        "a.py::x[swept]",
    ]


def test_one_case_of_each_of_triton_s_tests_is_not_slow(monkeypatch):
    names = [f"test_triton_x.py::{test}[{case}]" for test in "ab" for case in range(3)]
    assert slow(monkeypatch, *names) == [name for name in names if "[0]" not in name]
    assert slow(monkeypatch, "test_native.py::a[0]", "test_native.py::a[1]") == []


def test_processes_begin_with_the_files_that_take_longest(monkeypatch):
    monkeypatch.setattr(lanes, "costs", lambda: {"b.py::long": 1.0, "a.py::x": 0.4, "c.py::x": 0.5})
    names = ["a.py::x", "a.py::y", "b.py::short", "b.py::long", "c.py::x"]
    items = [SimpleNamespace(nodeid=name, path=Path(name[:4])) for name in names]
    forks = [1, 3]
    session = SimpleNamespace(config=SimpleNamespace(getoption=lambda name: forks[0]), items=items)
    lanes.pytest_collection_finish(session)
    assert [item.nodeid for item in items] == names
    del forks[0]
    lanes.pytest_collection_finish(session)
    assert [item.nodeid for item in items] == ["b.py::short", "b.py::long", "c.py::x", "a.py::x", "a.py::y"]


def test_guards_are_about_forty_and_there():
    found = lanes.guards()
    assert len(set(found)) == len(found) <= 50
    assert [name for name in found if not lanes._is_there(name)] == []


def test_the_time_of_children_counts_while_they_live():
    before_s = lanes.processor_s()
    burn = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        living_s = lanes.processor_s() - before_s
        child.communicate(b"\n")
    assert living_s >= 0.45
    assert lanes.processor_s() - before_s >= living_s


def test_the_table_keeps_what_did_not_run(monkeypatch, tmp_path):
    monkeypatch.setattr(lanes, "COSTS", tmp_path / "costs.txt")
    monkeypatch.setattr(lanes, "HERE", tmp_path / "tests")
    (tmp_path / "a.py").write_text("def x():\n    def kept():\n        def small():")
    lanes.COSTS.write_text("2.0 a.py::gone\n3.0 a.py::kept\n4.0 a.py::x[1]\n4.0 a.py::small\n")
    measured = lanes.Measured()
    for name, cost in (("a.py::x[1]", 0.5), ("a.py::small", 0.2)):
        measured.pytest_runtest_logreport(SimpleNamespace(when="call", nodeid=name, processor_s=cost))
    config = SimpleNamespace(getoption=lambda name: True)
    measured.pytest_terminal_summary(SimpleNamespace(write_line=lambda line: None), config)
    assert lanes.costs() == {"a.py::x[1]": 0.5, "a.py::kept": 3.0}


@pytest.mark.parametrize(("cost", "is_told"), [(1.2, True), (0.9, False)])
def test_what_has_grown_slow_is_told(monkeypatch, tmp_path, cost, is_told):
    monkeypatch.setattr(lanes, "COSTS", tmp_path / "none")
    measured, lines = lanes.Measured(), []
    measured.seconds = {"a.py::x": cost}
    measured.pytest_terminal_summary(
        SimpleNamespace(write_line=lines.append), SimpleNamespace(getoption=lambda name: False)
    )
    assert any("a.py::x" in line for line in lines) is is_told
