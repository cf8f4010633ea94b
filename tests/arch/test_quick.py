"""`make quick` runs the tests that a change concerns."""

import pytest

import quick
from quick import ROOT, SOURCE, TESTS


def chosen(*changed):
    places = {"planner": SOURCE / "scheduler/planner.py", "engine": SOURCE / "engine/engine.py"}
    places |= {
        name: TESTS / name
        for name in ("engine/test_a.py", "laws/test_engine_laws.py", "laws/test_gone.py", "laws/laws.py")
    }
    imported = {
        places["planner"]: set(),
        places["engine"]: {places["planner"]},
        places["laws/test_engine_laws.py"]: {places["engine"]},
        places["laws/laws.py"]: {places["laws/test_engine_laws.py"]},
        places["laws/test_gone.py"]: {places["laws/laws.py"]},
    }
    found = quick.concerned({places.get(name, ROOT / name) for name in changed}, imported)
    return {str(one.relative_to(TESTS)) for one in found}


def test_the_package_s_tests_and_those_two_imports_away():
    assert chosen("planner") == {"scheduler", "laws/test_engine_laws.py"}
    assert chosen("engine") == {"engine", "laws/test_engine_laws.py"}


def test_what_is_no_module_concerns_its_folder():
    assert chosen("src/splittime/server/dashboard/app.js") == {"server"}
    assert chosen("tests/gateway/conftest.py") == {"gateway"}
    assert chosen("docs/start.md") == {"docs", "guides"}
    assert chosen("README.md") == set()
    assert chosen("tests/gateway/conftest.py", "tests/gateway/test_app.py") == {"gateway"}, "once"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("import a.b, c as d", {"a.b", "c"}),
        ("    from a import (\n    b,\n    c as d,\n)", {"a", "a.b", "a.c"}),
        ("from . import b", {"x.y", "x.y.b"}),
        ("from ..z import b", {"x.z", "x.z.b"}),
        ("nothing imports it", set()),
    ],
)
def test_imports_are_found_wherever_they_stand(text, names):
    assert quick.names_in(text, "x.y") == names


def test_files_are_found_by_their_names():
    found = quick.imports([SOURCE / "engine/engine.py", SOURCE / "scheduler/scheduler.py", TESTS / "patience.py"])
    assert found[SOURCE / "engine/engine.py"] == {SOURCE / "scheduler/scheduler.py"}
