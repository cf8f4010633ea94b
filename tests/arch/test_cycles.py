"""No module of kernels or models imports one that imports it, in-function imports included."""

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
