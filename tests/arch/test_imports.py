"""The import rules of the design, read from the syntax tree: two columns, one direction, no home for nothing.

`MAY` says what each package may import of splittime; what is not said is forbidden. `llm`, `cli` and `cluster` are the
roots, where the columns meet, and nothing may import them.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "splittime"

LOGIC = {"core", "ledger", "stats", "kv", "scheduler", "engine"}
MAY = {
    "core": set(),
    "ledger": {"core"},
    "stats": {"core"},
    "present": {"core"},
    "kv": {"core", "ledger"},
    "scheduler": {"core", "ledger", "kv"},
    "engine": {"core", "ledger", "kv", "scheduler"},
    "drive": LOGIC,
    "simulate": LOGIC | {"drive"},
    "text": {"core", "ledger"},
    "api": {"core", "ledger", "scheduler", "text"},
    "web": {"core"},
    "wire": {"core", "present"},
    "server": LOGIC | {"text", "drive", "api", "web", "diagnose", "simulate", "present"},
    "attach": {"core", "ledger", "scheduler", "drive", "simulate", "web", "server"},
    "gateway": {"core", "ledger", "api", "web", "wire"},
    "bench": {"core", "ledger", "stats", "present", "wire"},
    "diagnose": {"core", "ledger", "stats", "present", "bench", "simulate"},
    "tune": {"core", "ledger", "stats", "present", "wire", "bench", "diagnose", "simulate", "plan", "attach"},
    "plan": {"core", "ledger", "stats", "present", "bench", "diagnose", "simulate", "attach"},
    "kernels": {"core"},
    "models": {"core", "kernels"},
    "runner": {"core", "kernels", "models"},
    "assemble": LOGIC | {"drive", "text", "api", "server", "kernels", "models", "runner"},
    "lab": LOGIC | {"drive", "text", "present", "kernels", "models", "runner", "assemble", "llm"},
}
ROOTS = {"cli", "cluster", "llm"}
TENSOR_COLUMN = {"kernels", "models", "runner", "lab", "assemble"}
TENSOR_LIBRARIES = {"torch", "triton", "transformers"}
STARTED_OFTEN = {"gateway", "server", "web"}  # without aiohttp: its import takes half a second
# within an allowed edge, the packages to which it is confined
CONFINED = {
    ("diagnose", "bench"): "splittime.bench.book",
    ("api", "scheduler"): "splittime.scheduler.events",
    ("assemble", "server"): "splittime.server.config",
}
# within an allowed edge, the module that is meant all the same not to be seen
FORBIDDEN_MODULES = {
    ("models", "splittime.core.request"),
    ("kernels", "splittime.core.request"),
    ("models", "splittime.core.step"),
    ("kernels", "splittime.core.step"),
    # time is an argument: only who drives an engine has a clock
    *((package, module) for package in ("kv", "scheduler", "engine") for module in ("splittime.core.clock", "time")),
}
EXPORTERS = "splittime.ledger.export"
HOMES_FOR_NOTHING = {"utils", "util", "common", "helpers", "helper", "misc"}


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def package_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else path.stem


@cache
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


def violations(package: str, imported: set[str]) -> list[str]:
    """What a module of this package imports and may not."""
    if package in ROOTS or package == "__init__":
        return []
    if package not in MAY:
        return [f"{package} has no place in the design"]
    allowed = MAY[package] | {package}
    inside = {name for name in imported if name.startswith("splittime.")}
    found = [name for name in inside if name.split(".")[1] in (set(MAY) | ROOTS) - allowed]
    if package not in TENSOR_COLUMN:
        found += [name for name in imported if name.split(".")[0] in TENSOR_LIBRARIES]
    if package in STARTED_OFTEN:
        found += [name for name in imported if name.split(".")[0] == "aiohttp"]
    found += [name for name in inside if not _is_confined(package, name)]
    return sorted(found + [name for name in imported if (package, name) in FORBIDDEN_MODULES])


def _is_confined(package: str, name: str) -> bool:
    home = CONFINED.get((package, name.split(".")[1]))
    return home is None or f"{name}.".startswith(f"{home}.") or home.startswith(f"{name}.")


@pytest.mark.parametrize("package", sorted({package_of(path) for path in modules()}))
def test_imports_go_one_way(package):
    found = {path: violations(package, imports(path)) for path in modules() if package_of(path) == package}
    assert {path: wrong for path, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize(
    ("package", "module", "is_allowed"),
    [
        ("scheduler", "splittime.kv.cache", True),
        ("scheduler", "splittime.engine.engine", False),
        ("scheduler", "torch", False),
        ("engine", "torch.nn", False),
        ("engine", "time", False),
        ("engine", "splittime.core.clock", False),
        ("engine", "splittime.drive.crank", False),
        ("drive", "splittime.core.clock", True),
        ("engine", "splittime.runner.torch_runner", False),
        ("engine", "splittime.server.app", False),
        ("server", "splittime.cli.serve", False),
        ("server", "splittime.llm", False),
        ("server", "splittime.diagnose.doctor", True),
        ("web", "splittime.server.service", False),
        ("bench", "splittime.engine.engine", False),
        ("diagnose", "splittime.bench.book.records", True),
        ("diagnose", "splittime.bench.run", False),
        ("diagnose", "splittime.server.service", False),
        ("gateway", "splittime.drive.client", False),
        ("gateway", "aiohttp", False),
        ("diagnose", "splittime.scheduler.config", False),
        ("models", "splittime.core.request", False),
        ("models", "splittime.scheduler.config", False),
        ("runner", "splittime.core.step", True),
        ("runner", "torch", True),
        ("cli", "splittime.runner.torch_runner", True),
        ("somewhere", "splittime.core.step", False),
    ],
)
def test_the_rules_bite(package, module, is_allowed):
    assert (violations(package, {module}) == []) is is_allowed


def test_simulated_time_passes_only_when_it_is_moved():
    for path in (SOURCE / "simulate").glob("*.py"):
        assert not {"time", "splittime.core.clock.SystemClock"} & imports(path), path


def test_exporters_are_imported_by_edges_only():
    for path in modules():
        own = path.is_relative_to(SOURCE / "ledger" / "export")
        if not own and package_of(path) not in ROOTS | {"server", "gateway", "bench", "api", "attach"}:
            assert not any(name.startswith(EXPORTERS) for name in imports(path)), path


def test_no_home_for_nothing():
    for path in SOURCE.rglob("*"):
        assert path.stem not in HOMES_FOR_NOTHING, path


def test_imports_are_read_right():
    found = imports(SOURCE / "engine" / "engine.py")
    assert {"splittime.core.step", "splittime.core.step.StepPlan", "splittime.scheduler.scheduler"} <= found
