"""No module of kernels or models imports one that imports it, in-function imports included."""

from test_imports import SOURCE

from benchmarks.house.tree import cycles, imports_of, read_tree, targets


def edges_of(modules):
    found = {name: imports_of(module) for name, module in modules.items()}
    return {name: set(targets(modules[name], one.at_load + one.in_functions, modules)) for name, one in found.items()}


def test_there_is_no_cycle():
    edges = edges_of(read_tree(SOURCE))
    mine = {name: to for name, to in edges.items() if name.split(".")[1:2] in (["kernels"], ["models"])}
    assert len(mine) > 50
    assert cycles({name: to & mine.keys() for name, to in mine.items()}) == []


def test_the_contract_imports_no_backend():
    to = edges_of(read_tree(SOURCE))["splittime.kernels.api"]
    assert to == {"splittime.kernels.layer", "splittime.kernels.low_rank"}
