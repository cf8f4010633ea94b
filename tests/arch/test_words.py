"""One word for one thing: class names, docstrings and the glossary of the design, held against the source."""

import ast
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "splittime"
RIDDLES_OF_NAMES = {"bed", "fate", "fitted", "happened", "lapse", "lost", "news", "sparing", "told", "way"}

MOST_RIDDLES = 546
RIDDLES = ("How ", "What ", "Where ", "Whether ", "Which ", "Who ", "Whose ")  # no verb, no noun

# beginnings of docstrings that speak of something named elsewhere
WITHOUT_SUBJECT = ("Also ", "And ", "It ", "Likewise", "Of ", "So ", "That ", "The same ", "They ", "Those ")


class Named(NamedTuple):
    """A module, class or function. No syntax tree is kept: the garbage collector would walk all of them, many times."""

    path: str
    name: str
    is_class: bool
    docstring: str


@pytest.fixture(scope="module")
def named() -> list[Named]:
    return [each for path in sorted(SOURCE.rglob("*.py")) for each in named_in(path)]


def named_in(path: Path) -> list[Named]:
    own, where = ast.parse(path.read_text(encoding="utf-8")), str(path.relative_to(SOURCE))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        Named(where, getattr(node, "name", path.stem), isinstance(node, ast.ClassDef), ast.get_docstring(node) or "")
        for node in ast.walk(own)
        if isinstance(node, kinds)
    ]


def test_a_class_name_has_one_meaning(named):
    homes = defaultdict(set)
    for each in named:
        if each.is_class:
            homes[each.name].add(each.path)
    assert {name: sorted(paths) for name, paths in homes.items() if len(paths) > 1} == {}


def test_a_docstring_names_its_subject(named):
    assert [(each.path, each.name) for each in named if each.docstring.startswith(WITHOUT_SUBJECT)] == []


def test_no_name_is_a_riddle(named):
    assert [(each.path, each.name) for each in named if each.name.lower().strip("_") in RIDDLES_OF_NAMES] == []


def test_riddles_become_fewer(named):
    found = [(each.path, each.name) for each in named if each.docstring.startswith(RIDDLES)]
    assert len(found) <= MOST_RIDDLES, found[-5:]
