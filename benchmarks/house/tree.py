"""A source tree, parsed once: its modules by dotted name, and the imports between them."""

import ast
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Module:
    name: str
    text: str
    is_package: bool

    @cached_property
    def syntax(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.syntax))

    @property
    def functions(self) -> list[Function]:
        return [node for node in self.nodes if isinstance(node, FUNCTIONS)]

    @property
    def classes(self) -> list[ast.ClassDef]:
        return [node for node in self.nodes if isinstance(node, ast.ClassDef)]

    @property
    def num_lines(self) -> int:
        return self.text.count("\n")

    @property
    def num_code_lines(self) -> int:
        """Lines that are neither blank nor a comment alone; a docstring's lines count."""
        lines = (line.strip() for line in self.text.splitlines())
        return sum(1 for line in lines if line and not line.startswith("#"))

    def package(self, level: int) -> str:
        """The package that a relative import of this level starts from."""
        parts = self.name.split(".")
        return ".".join(parts[: len(parts) - level + self.is_package])


@dataclass
class Imports:
    """Import statements of a module: those that run as it loads, and those inside functions."""

    at_load: list[ast.stmt] = field(default_factory=list)
    in_functions: list[ast.stmt] = field(default_factory=list)


def read_tree(folder: Path) -> dict[str, Module]:
    modules = {}
    for path in sorted(folder.rglob("*.py")):
        parts = [folder.name, *path.relative_to(folder).with_suffix("").parts]
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        modules[name] = Module(name, path.read_text(encoding="utf-8"), is_package)
    return modules


def imports_of(module: Module, with_types: bool = False) -> Imports:
    """with_types: with what only a type checker imports (`if TYPE_CHECKING`)."""
    found = Imports()
    _collect(module.syntax, found, False, with_types)
    return found


def _collect(node: ast.AST, found: Imports, in_function: bool, with_types: bool) -> None:
    if isinstance(node, ast.Import | ast.ImportFrom):
        (found.in_functions if in_function else found.at_load).append(node)
    if not with_types and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):  # statements alone: nothing else has imports
        for child in getattr(node, name, ()):
            _collect(child, found, in_function or isinstance(node, FUNCTIONS), with_types)


def targets(module: Module, statements: list[ast.stmt], modules: dict[str, Module]) -> Iterator[str]:
    """Yields the modules of the tree that these import statements name. A package is named where something of its own
    is taken from it, and not where its modules are."""
    for statement in statements:
        for name in _named(module, statement, modules):
            if name in modules and name != module.name:
                yield name


def _named(module: Module, statement: ast.stmt, modules: Container[str]) -> Iterator[str]:
    if isinstance(statement, ast.Import):
        yield from (alias.name for alias in statement.names)
    elif isinstance(statement, ast.ImportFrom):
        start = module.package(statement.level) if statement.level else ""
        base = ".".join(part for part in (start, statement.module) if part)
        named = [f"{base}.{alias.name}" for alias in statement.names]
        yield from named
        if any(name not in modules for name in named):
            yield base


def cycles(edges: dict[str, set[str]]) -> list[int]:
    """Sizes of the strongly connected components of two modules or more, largest first."""
    reached = {name: _reachable(name, edges) for name in edges}
    seen: set[str] = set()
    sizes = []
    for name in edges:
        if name not in seen:
            together = {other for other in reached[name] if name in reached[other]} | {name}
            seen |= together
            sizes.append(len(together))
    return sorted((size for size in sizes if size > 1), reverse=True)


def _reachable(start: str, edges: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for target in edges[waiting.pop()]:
            if target not in found:
                found.add(target)
                waiting.append(target)
    return found
