"""The figures of a tree that its syntax tells."""

import ast
import copy
from collections import Counter, defaultdict
from collections.abc import Iterable
from math import comb
from pathlib import Path
from typing import Any

from benchmarks.house.tree import Function, Imports, Module, cycles, imports_of, read_tree, targets

LONG_FILE_LINES = 300
TINY_FILE_LINES = 5  # an `__init__` that holds next to nothing is no file that anybody reads
COPY_LINES = 6
BROAD = {"Exception", "BaseException"}


def figures(folder: Path) -> dict[str, Any]:
    modules = read_tree(folder)
    if not modules:
        raise ValueError(f"no Python file in {folder}")
    every = list(modules.values())
    return _sizes(every) | _words(every) | _import_figures(modules) | _classes(every) | _copies(every)


def _sizes(modules: list[Module]) -> dict[str, Any]:
    read = [module.num_lines for module in modules if module.num_lines > TINY_FILE_LINES]
    functions = [_num_lines(function) for module in modules for function in module.functions]
    return {
        "files": len(modules),
        "lines": sum(module.num_lines for module in modules),
        "code_lines": sum(module.num_code_lines for module in modules),
        "file_lines": _spread(read, 50, 90),
        "files_over_300_lines": sum(module.num_lines > LONG_FILE_LINES for module in modules),
        "functions": len(functions),
        "function_lines": _spread(functions, 50, 90, 99),
    }


def _words(modules: list[Module]) -> dict[str, Any]:
    functions = [function for module in modules for function in module.functions]
    classes = [one for module in modules for one in module.classes]
    documented = [text for one in [*functions, *classes] if (text := ast.get_docstring(one))]
    all_texts = documented + [text for module in modules if (text := ast.get_docstring(module.syntax))]
    return {
        "docstring_share": _share(len(documented), len(functions) + len(classes)),
        "return_annotation_share": _share(sum(one.returns is not None for one in functions), len(functions)),
        "docstrings_that_begin_with_of": sum(text.startswith("Of ") for text in all_texts),
        "uses_of_any": sum(_is_any(node) for module in modules for node in module.nodes),
        "broad_excepts": sum(_is_broad(node) for module in modules for node in module.nodes),
    }


def _import_figures(modules: dict[str, Module]) -> dict[str, Any]:
    imports = {name: imports_of(module) for name, module in modules.items()}

    def edges(take: Any) -> dict[str, set[str]]:
        return {name: set(targets(modules[name], take(found), modules)) for name, found in imports.items()}

    def everywhere(found: Imports) -> list[ast.stmt]:
        return found.at_load + found.in_functions

    importers = Counter(name for named in edges(everywhere).values() for name in named)
    return {
        "in_function_imports": sum(len(found.in_functions) for found in imports.values()),
        "cycles_at_load": cycles(edges(lambda found: found.at_load)),
        "cycles_with_in_function": cycles(edges(everywhere)),
        "modules_with_one_importer": sum(number == 1 for number in importers.values()),
    }


def _classes(modules: list[Module]) -> dict[str, Any]:
    homes = defaultdict(set)
    for module in modules:
        for one in module.classes:
            homes[one.name].add(module.name)
    twice = sorted((name for name in homes if len(homes[name]) > 1), key=lambda name: (-len(homes[name]), name))
    return {
        "classes": sum(len(module.classes) for module in modules),
        "class_names_with_several_meanings": len(twice),
        "those_names": {name: len(homes[name]) for name in twice},
    }


def _copies(modules: list[Module]) -> dict[str, Any]:
    """Pairs of functions of six lines or more that are alike but for names and constants, and those quite alike."""
    long = [one for module in modules for one in module.functions if _num_lines(one) >= COPY_LINES]
    shapes = Counter(_shape(one) for one in long)
    texts = Counter(ast.dump(_body(one)) for one in long)
    return {"copied_pairs_same_shape": _pairs(shapes), "copied_pairs_same_text": _pairs(texts)}


def _pairs(counts: Counter[str]) -> int:
    return sum(comb(number, 2) for number in counts.values())


def _body(function: Function) -> ast.Module:
    has_docstring = ast.get_docstring(function) is not None
    return ast.Module(function.body[has_docstring:], [])


class _Nameless(ast.NodeTransformer):
    """Replaces what two copies of one shape may differ in."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for name in ("id", "attr", "arg", "name"):
            if isinstance(getattr(node, name, None), str):
                setattr(node, name, "_")
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Constant(value=type(node.value).__name__)


def _shape(function: Function) -> str:
    return ast.dump(_Nameless().visit(copy.deepcopy(_body(function))))


def _num_lines(function: Function) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def _is_any(node: ast.AST) -> bool:
    return (isinstance(node, ast.Name) and node.id == "Any") or (isinstance(node, ast.Attribute) and node.attr == "Any")


def _is_broad(node: ast.AST) -> bool:
    if not isinstance(node, ast.ExceptHandler):
        return False
    return node.type is None or any(isinstance(one, ast.Name) and one.id in BROAD for one in ast.walk(node.type))


def _spread(values: Iterable[int], *percents: int) -> dict[str, int]:
    ordered = sorted(values)
    spread = {f"p{percent}": ordered[min(len(ordered) * percent // 100, len(ordered) - 1)] for percent in percents}
    return spread | {"max": ordered[-1]}


def _share(part: int, whole: int) -> float:
    return round(part / whole, 3) if whole else 0.0
