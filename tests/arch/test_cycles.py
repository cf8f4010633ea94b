"""No module of kernels or models imports one that imports it, in-function imports included."""

import ast

from test_imports import SOURCE

from benchmarks.house.tree import cycles, imports_of, read_tree, targets


def edges_of(modules, sources):
    found = {name: imports_of(module) for name, module in sources.items()}
    return {name: set(targets(modules[name], one.at_load + one.in_functions, modules)) for name, one in found.items()}


def test_there_is_no_cycle():
    mine = {name: one for name, one in read_tree(SOURCE).items() if name.split(".")[1:2] in (["kernels"], ["models"])}
    assert len(mine) > 50
    assert cycles(edges_of(mine, mine)) == []


def test_the_contract_imports_no_backend():
    modules, name = read_tree(SOURCE), "splittime.kernels.api"
    to = edges_of(modules, {name: modules[name]})[name]
    assert to == {"splittime.kernels.layer", "splittime.kernels.low_rank"}


MOST_IN_CYCLES = [4]  # modules of each group, as a reader meets them: what only a type checker imports counts


def cycles_of(modules):
    statements = {
        name: [node for node in one.nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        for name, one in modules.items()
    }
    return cycles({name: set(targets(modules[name], some, modules)) for name, some in statements.items()})


def test_cycles_become_fewer():
    found = cycles_of(read_tree(SOURCE))
    assert len(found) <= len(MOST_IN_CYCLES), found
    assert all(size <= most for size, most in zip(found, MOST_IN_CYCLES, strict=False)), found


def test_what_a_type_checker_imports_counts(tmp_path):
    package = tmp_path / "small"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("from small import b")
    (package / "b.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from small import a")
    assert cycles_of(read_tree(package)) == [2]
