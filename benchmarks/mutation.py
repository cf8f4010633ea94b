"""How much of what is broken on purpose the tests of `make check` find.

A mutant is one small change to one place: a comparison with its edge moved, a sum for a difference, `and` for `or`, a
number one larger, a call left out. So many are drawn at random from each part of the tree, and the tests of that part
run on each, chosen as `make check` chooses them, until one fails. What no test finds is printed with its place: some of
those mutants change nothing that can be seen, and who reads the list says which.

The tree that is mutated is a copy: `git worktree add --detach ../mutants`, with the built kernels in it.

    python -m benchmarks.mutation ../mutants --number 7
"""

import argparse
import ast
import copy
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PARTS = {
    "scheduler": (
        "scheduler/scheduler.py scheduler/planner.py scheduler/requests.py scheduler/state.py",
        "scheduler laws engine",
    ),
    "queue": ("scheduler/queue.py", "scheduler laws"),
    "kv": ("kv", "kv scheduler laws"),
    "account": ("ledger/account.py ledger/derive.py ledger/steps.py", "ledger laws"),
    "sampler": ("runner/sampler.py runner/penalties.py", "runner"),
    "kernels": ("kernels/rounded.py kernels/cpu kernels/native/packed.py kernels/native/ops.py", "kernels equivalence"),
    "server endings": ("server/visit.py server/group.py server/service.py", "server"),
    "gateway": ("gateway", "gateway"),
    "joins of books": ("bench/join.py", "bench"),
}  # fmt: skip
AS_IN_CHECK = "not slow and not sweep and not timing"
LIMIT_S = 400  # a mutant that never ends is found
FOUND = (1, 2)  # exit statuses of pytest: a test failed, or could not be collected
EDGES = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
SUMS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult}
TURNED = {"min": "max", "max": "min", "any": "all", "all": "any"}
NOT_LOOKED_INTO = (ast.Assert, ast.Raise)  # our own checks, and the words of an error
OF_THE_TESTS = {"check", "verify"}  # functions that nobody else calls


@dataclass(frozen=True)
class Mutant:
    path: Path
    line: int
    before: str
    after: str
    text: str


def places_of(path: Path) -> list[tuple[Path, int]]:
    """Those of a file that can be changed, by number."""
    nodes = _nodes(ast.parse(path.read_text()))
    return [(path, number) for number, node in enumerate(nodes) if _change(copy.copy(node))]


def mutant(path: Path, number: int) -> Mutant:
    tree = ast.parse(path.read_text())
    node = _nodes(tree)[number]
    before = ast.unparse(node)
    _change(node)
    return Mutant(path, node.lineno, before, ast.unparse(node), ast.unparse(tree))  # type: ignore[attr-defined]


def _nodes(tree: ast.AST) -> list[ast.AST]:
    """What is inside functions, and may be changed."""
    nodes: list[ast.AST] = []

    def look(node: ast.AST, is_inside: bool) -> None:
        if isinstance(node, NOT_LOOKED_INTO) or getattr(node, "name", "") in OF_THE_TESTS:
            return
        if isinstance(node, ast.keyword) and node.arg == "strict":  # of zip: a check of our own
            return
        if is_inside:
            nodes.append(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for child in node.body:
                look(child, True)
        else:
            for child in ast.iter_child_nodes(node):
                look(child, is_inside)

    look(tree, False)
    return nodes


def _change(node: ast.AST) -> bool:
    """Change the node as its kind allows; whether it could be."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in EDGES:
        node.ops = [EDGES[type(node.ops[0])](), *node.ops[1:]]
    elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in SUMS:
        node.op = SUMS[type(node.op)]()
    elif isinstance(node, ast.BoolOp):
        node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    elif isinstance(node, ast.If | ast.IfExp) and not isinstance(node.test, ast.Compare | ast.BoolOp):
        node.test = ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1
    elif isinstance(node, ast.Name) and node.id in TURNED:
        node.id = TURNED[node.id]
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        node.value = ast.Constant(None)
    else:
        return False
    return True


def draw(tree: Path, number: int, seed: int) -> Iterator[tuple[str, Mutant]]:
    for part, (places, _) in PARTS.items():
        found = [tree / "src" / "splittime" / place for place in places.split()]
        files = sorted(file for path in found for file in (path.rglob("*.py") if path.is_dir() else [path]))
        every = [place for file in files for place in places_of(file)]
        for path, at in random.Random(f"{seed} {part}").sample(every, number):
            yield part, mutant(path, at)


def is_found(tree: Path, part: str, drawn: Mutant) -> bool:
    """Whether a test of the part fails on it. The file is put back."""
    original = drawn.path.read_text()
    drawn.path.write_text(drawn.text)
    try:
        return tested(tree, part) in FOUND
    except subprocess.TimeoutExpired:
        return True
    finally:
        drawn.path.write_text(original)


def tested(tree: Path, part: str) -> int:
    """The exit status of the part's tests."""
    return run_tests(tree, [f"tests/{folder}" for folder in PARTS[part][1].split()], LIMIT_S)


def run_tests(tree: Path, places: list[str], limit_s: float) -> int:
    """The exit status of pytest in this tree. Raises `subprocess.TimeoutExpired`."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", AS_IN_CHECK, *places]
    environment = os.environ | {"PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command,
        cwd=tree,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=limit_s,
        check=False,
    ).returncode


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutation", description=__doc__)
    parser.add_argument("tree", type=Path, help="a copy of the repository, which is changed and put back")
    parser.add_argument("--number", type=int, default=7, help="of each part")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--part", choices=PARTS, action="append", help="this part alone")
    arguments = parser.parse_args()
    tree, results = arguments.tree.resolve(), dict[str, list[bool]]()
    for part, drawn in draw(tree, arguments.number, arguments.seed):
        if arguments.part and part not in arguments.part:
            continue
        if part not in results and tested(tree, part):
            sys.exit(f"the tests of {part} fail with nothing changed")
        found = is_found(tree, part, drawn)
        results.setdefault(part, []).append(found)
        change = f"{drawn.path.name}:{drawn.line} {drawn.before!r} -> {drawn.after!r}"
        print("found    " if found else "NOT FOUND", f"{part}: {change}", flush=True)
    print(json.dumps({part: [sum(found), len(found)] for part, found in results.items()}))


if __name__ == "__main__":
    main()
