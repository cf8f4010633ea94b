"""One word for one thing: class names, docstrings and the glossary of the design, held against the source."""

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "splittime"
RIDDLES = {"bed", "fate", "fitted", "happened", "lapse", "lost", "news", "sparing", "told", "way"}

# beginnings of docstrings that speak of something named elsewhere
WITHOUT_SUBJECT = ("Also ", "And ", "It ", "Likewise", "Of ", "So ", "That ", "The same ", "They ", "Those ")


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCE.rglob("*.py"))}


def nodes(*kinds: type[ast.AST]) -> list[tuple[str, ast.AST]]:
    return [
        (str(path.relative_to(SOURCE)), node)
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, kinds)
    ]


def test_a_class_name_has_one_meaning():
    homes = defaultdict(set)
    for path, node in nodes(ast.ClassDef):
        homes[node.name].add(path)
    assert {name: sorted(paths) for name, paths in homes.items() if len(paths) > 1} == {}


def test_a_docstring_names_its_subject():
    described = nodes(ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)
    begins = [(path, getattr(node, "name", ""), ast.get_docstring(node) or "") for path, node in described]
    assert [(path, name) for path, name, text in begins if text.startswith(WITHOUT_SUBJECT)] == []


def test_no_name_is_a_riddle():
    named = [(path, node.name) for path, node in nodes(ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)]
    named += [(str(path.relative_to(SOURCE)), path.stem) for path in trees()]
    assert [each for each in named if each[1].lower().strip("_") in RIDDLES] == []
