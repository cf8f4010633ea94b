"""Bars of the tree's size, which may only fall: whoever removes code lowers them, and raising one takes an ADR.

Each stands a little above its figure, since several people add and remove at a time.
"""

from collections import Counter

from test_imports import SOURCE
from test_words import named

from benchmarks.house.tree import imports_of, read_tree, targets

MOST_FILES = 545
MOST_LINES = 115_000
MOST_RIDDLES = 552
MOST_WITH_ONE_IMPORTER = 90
MOST_LINES_OF_A_FILE = 600  # what is read in one sitting
RIDDLES = ("How ", "What ", "Where ", "Whether ", "Which ", "Who ", "Whose ")  # no verb, no noun


def num_with_one_importer(modules):
    importers = Counter()
    for module in modules.values():
        found = imports_of(module)
        importers.update(set(targets(module, found.at_load + found.in_functions, modules)))
    return sum(number == 1 for number in importers.values())


def test_the_tree_does_not_grow():
    modules = read_tree(SOURCE)
    assert len(modules) <= MOST_FILES, "fold a module into the one that uses it"
    assert sum(one.num_lines for one in modules.values()) <= MOST_LINES, "remove as many lines as you add"
    assert num_with_one_importer(modules) <= MOST_WITH_ONE_IMPORTER, "fold one of `python -m benchmarks.house`"


def test_a_file_is_read_in_one_sitting():
    long = [name for name, one in read_tree(SOURCE).items() if one.num_lines > MOST_LINES_OF_A_FILE]
    assert long == [], "divide it by its subjects"


def test_riddles_become_fewer():
    found = [(each.path, each.name) for each in named() if each.docstring.startswith(RIDDLES)]
    assert len(found) <= MOST_RIDDLES, found[-5:]


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
