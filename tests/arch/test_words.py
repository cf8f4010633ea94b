"""One word for one thing: class names, docstrings and the glossary of the design, held against the source."""

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parents[2] / "src" / "splittime"
RIDDLES = {"bed", "fate", "fitted", "happened", "lapse", "lost", "news", "sparing", "told", "way"}

# beginnings of docstrings that speak of something named elsewhere
WITHOUT_SUBJECT = ("Also ", "And ", "It ", "Likewise", "Of ", "So ", "That ", "The same ", "They ", "Those ")


class Named(NamedTuple):
    """A module, class or function. No syntax tree is kept: the garbage collector would walk all of them, many times."""

    path: str
    name: str
    is_class: bool
    docstring: str


@cache
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


def test_a_class_name_has_one_meaning():
    homes = defaultdict(set)
    for each in named():
        if each.is_class:
            homes[each.name].add(each.path)
    assert {name: sorted(paths) for name, paths in homes.items() if len(paths) > 1} == {}


def test_a_docstring_names_its_subject():
    assert [(each.path, each.name) for each in named() if each.docstring.startswith(WITHOUT_SUBJECT)] == []


def test_no_name_is_a_riddle():
    assert [(each.path, each.name) for each in named() if each.name.lower().strip("_") in RIDDLES] == []
