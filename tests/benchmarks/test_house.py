"""The figures of a small tree, counted by hand."""

import pytest

from benchmarks.house.figures import figures
from benchmarks.house.walk import Call, _always, _figures

FIRST = '''"""Of two modules the first."""

import json
from typing import TYPE_CHECKING, Any

from small import second

if TYPE_CHECKING:
    from small.inner import third


class Plan:
    def both(self, one: Any) -> int:
        """Adds."""
        a = json.loads(one)
        b = a + 1  # no comment alone
        # a comment alone
        c = b + 2
        return c
'''
SECOND = """def other(two):
    from small.first import Plan
    try:
        d = Plan.loads(two)
        e = d + 3
        f = e + 4
        return f
    except (ValueError, Exception):
        return None


class Plan:
    pass
"""
THIRD = """from ..second import other


def twice(two):
    x = dict.loads(two)
    y = x + 1
    z = y + 2
    # the same in other words

    return z
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tree") / "small"
    (folder / "inner").mkdir(parents=True)
    for name, text in {
        "__init__": "",
        "first": FIRST,
        "second": SECOND,
        "inner/__init__": "from small.second import Plan\n",
        "inner/third": THIRD,
    }.items():
        (folder / f"{name}.py").write_text(text)
    return figures(folder)


def test_sizes(found):
    assert found["files"] == 5
    assert found["lines"] == 19 + 13 + 1 + 10
    assert found["code_lines"] == (19 - 5 - 1) + (13 - 2) + 1 + (10 - 4)
    assert found["file_lines"] == {"p50": 13, "p90": 19, "max": 19}
    assert found["functions"] == 3
    assert found["function_lines"] == {"p50": 7, "p90": 9, "p99": 9, "max": 9}


def test_words(found):
    assert found["docstrings_that_begin_with_of"] == 1
    assert found["docstring_share"] == 0.2
    assert found["return_annotation_share"] == 0.333
    assert found["uses_of_any"] == 1
    assert found["broad_excepts"] == 1


def test_imports_run_in_a_circle_through_a_function_alone(found):
    assert found["in_function_imports"] == 1
    assert found["cycles_at_load"] == []
    assert found["cycles_with_in_function"] == [2]


def test_a_name_of_two_classes_and_a_copy_under_other_names(found):
    assert found["those_names"] == {"Plan": 2}
    assert found["copied_pairs_same_shape"] == 1
    assert found["copied_pairs_same_text"] == 0


def test_a_walk_is_read_thread_by_thread_and_what_happens_now_and_then_is_left_out():
    server, engine = (1, 1), (2, 1)
    each_time = [(server, "a", "f", ""), (engine, "k", "m", ""), (server, "b", "g", "a"), (server, "a", "h", "b")]
    once = (server, "timer", "tick", "")
    calls = [Call(number, at, *call) for number in range(1, 6) for at, call in enumerate(each_time)]
    found = _figures(_always([*calls, Call(5, 9, *once)]))
    assert found["order"] == ["a", "b", "a", "k"]
    assert (found["files"], found["edges"], found["file_changes"], found["functions"]) == (3, 2, 3, 4)
