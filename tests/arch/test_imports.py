"""The import rules of the design, read from the syntax tree: two columns, one direction, no home for nothing.

`MAY` says what each package may import of splittime; what is not said is forbidden. `llm`, `cli` and `cluster` are the
roots, where the columns meet, and nothing may import them.
"""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "splittime"

LOGIC_BELOW_SERVER = {"core", "ledger", "kv", "scheduler", "engine"}
MAY = {
    "core": set(),
    "ledger": {"core"},
    "kv": {"core", "ledger"},
    "scheduler": {"core", "ledger", "kv"},
    "engine": {"core", "ledger", "kv", "scheduler"},
    "server": LOGIC_BELOW_SERVER,
    "gateway": {"core", "ledger"},
    "loadgen": {"core", "ledger"},
    "diagnose": {"core", "ledger"},
    "simulate": LOGIC_BELOW_SERVER,
    "tune": LOGIC_BELOW_SERVER | {"simulate"},
    "kernels": {"core"},
    "models": {"core", "kernels"},
    "runner": {"core", "kernels", "models"},
}
ROOTS = {"cli", "cluster", "llm"}
TENSOR_COLUMN = {"kernels", "models", "runner"}
TENSOR_LIBRARIES = {"torch", "triton", "transformers"}
# within an allowed edge, the module that is meant all the same not to be seen
FORBIDDEN_MODULES = {
    ("models", "splittime.core.request"),
    ("kernels", "splittime.core.request"),
    ("models", "splittime.core.plan"),
    ("kernels", "splittime.core.plan"),
}
EXPORTERS = "splittime.ledger.export"
HOMES_FOR_NOTHING = {"utils", "util", "common", "helpers", "helper", "misc"}


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def package_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else path.stem


def imports(path: Path) -> set[str]:
    """Every module that a file imports, wherever in it; `if TYPE_CHECKING` counts too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts[: -node.level]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return found


def edges(path: Path) -> set[str]:
    """The packages of splittime that a file imports, but its own."""
    inside = {name.split(".")[1] for name in imports(path) if name.startswith("splittime.")}
    known = set(MAY) | ROOTS
    return (inside & known) - {package_of(path)}


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_one_way(path):
    package = package_of(path)
    if package in ROOTS or package == "__init__":
        return
    assert package in MAY, f"{package} has no place in the design"
    assert edges(path) <= MAY[package], f"{path.name} may import {sorted(MAY[package])}"
    libraries = {name.split(".")[0] for name in imports(path)}
    if package not in TENSOR_COLUMN:
        assert not libraries & TENSOR_LIBRARIES, "the logic column imports no tensors"
    forbidden = {module for owner, module in FORBIDDEN_MODULES if owner == package}
    assert not forbidden & imports(path), "a layer takes tensors; it cannot know what a request is"


def test_exporters_are_imported_by_edges_only():
    for path in modules():
        own = path.is_relative_to(SOURCE / "ledger" / "export")
        if not own and package_of(path) not in ROOTS | {"server", "gateway"}:
            assert not any(name.startswith(EXPORTERS) for name in imports(path)), path


def test_no_home_for_nothing():
    for path in SOURCE.rglob("*"):
        assert path.stem not in HOMES_FOR_NOTHING, path


def test_the_rules_bite(tmp_path):
    """What the test reads from a file, it reads right."""
    source = SOURCE / "engine" / "engine.py"
    assert "scheduler" in edges(source)
    assert "splittime.core.plan.Runner" in imports(source)
