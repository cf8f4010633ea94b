"""Bars of the tree's size, which may only fall: whoever removes code lowers them, and raising one takes an ADR.

Each stands a little above its figure, since several people add and remove at a time. No module of kernels or models
imports one that imports it, in-function imports included. The tree is parsed once for all of that.
"""

from collections import Counter

import pytest
from test_imports import SOURCE

from benchmarks.house.tree import cycles, imports_of, read_tree, targets

MOST_FILES = 530
MOST_LINES = 115_931
MOST_WITH_ONE_IMPORTER = 86
MOST_IN_CYCLES = [4]  # modules of each group, as a reader meets them: what only a type checker imports counts
MOST_LINES_OF_A_FILE = 600  # what is read in one sitting


@pytest.fixture(scope="module")
def tree():
    return read_tree(SOURCE)


def num_with_one_importer(modules):
    importers = Counter()
    for module in modules.values():
        found = imports_of(module)
        importers.update(set(targets(module, found.at_load + found.in_functions, modules)))
    return sum(number == 1 for number in importers.values())


def test_the_tree_does_not_grow(tree):
    assert len(tree) <= MOST_FILES, "fold a module into the one that uses it"
    assert sum(one.num_lines for one in tree.values()) <= MOST_LINES, "remove as many lines as you add"
    assert num_with_one_importer(tree) <= MOST_WITH_ONE_IMPORTER, "fold one of `python -m benchmarks.house`"


def test_a_file_is_read_in_one_sitting(tree):
    long = [name for name, one in tree.items() if one.num_lines > MOST_LINES_OF_A_FILE]
    assert long == [], "divide it by its subjects"


def test_importers_are_counted_right(tmp_path):
    package = tmp_path / "small"
    package.mkdir()
    for name, text in {"__init__": "", "a": "from small import b, c", "b": "def f():\n    from small import c"}.items():
        (package / f"{name}.py").write_text(text)
    (package / "c.py").write_text("")
    assert num_with_one_importer(read_tree(package)) == 1  # b; c has two


def test_a_package_is_imported_where_something_of_its_own_is(tmp_path):
    package = tmp_path / "small"
    (package / "inner").mkdir(parents=True)
    first = "from small.inner import b"
    for name, text in {"__init__": "", "a": first, "c": first, "inner/__init__": "X = 1", "inner/b": ""}.items():
        (package / f"{name}.py").write_text(text)
    assert num_with_one_importer(read_tree(package)) == 0
    (package / "c.py").write_text("from small.inner import X, b")
    assert num_with_one_importer(read_tree(package)) == 1  # inner, by c; b has two


def edges_of(modules, sources, with_types=False):
    found = {name: imports_of(module, with_types) for name, module in sources.items()}
    return {name: set(targets(modules[name], one.at_load + one.in_functions, modules)) for name, one in found.items()}


def test_there_is_no_cycle(tree):
    mine = {name: one for name, one in tree.items() if name.split(".")[1:2] in (["kernels"], ["models"])}
    assert len(mine) > 50
    assert cycles(edges_of(mine, mine)) == []


def test_the_contract_imports_no_backend(tree):
    name = "splittime.kernels.api"
    assert edges_of(tree, {name: tree[name]})[name] == {"splittime.kernels.layer", "splittime.kernels.low_rank"}


def test_cycles_become_fewer(tree):
    found = cycles(edges_of(tree, tree, with_types=True))
    assert len(found) <= len(MOST_IN_CYCLES), found
    assert all(size <= most for size, most in zip(found, MOST_IN_CYCLES, strict=False)), found


def test_what_a_type_checker_imports_counts(tmp_path):
    package = tmp_path / "small"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("from small import b")
    (package / "b.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from small import a")
    small = read_tree(package)
    assert (cycles(edges_of(small, small, with_types=True)), cycles(edges_of(small, small))) == ([2], [])
