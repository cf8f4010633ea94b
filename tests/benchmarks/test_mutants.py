"""The runner of chosen mutants says what it should of each kind, and its table can be read."""

import subprocess
from pathlib import Path

import pytest

from benchmarks import mutants
from benchmarks.mutants import KILLED, LIVED, STALE, UNSOUND, Mutant, Trial, copy_tree, read_table

SOURCE = "def bounded(size):\n    return min(size, 10)\n\n\ndef other(size):\n    return size + 1\n"
SOUND = "from splittime.part import bounded\n\n\ndef test_it():\n    assert bounded(11) == 10\n"


@pytest.fixture
def tree(tmp_path) -> Path:
    source = tmp_path / "src" / "splittime"
    source.mkdir(parents=True)
    (source / "__init__.py").write_text("")
    (source / "part.py").write_text(SOURCE)
    (tmp_path / "tests").mkdir()
    for name in ("test_sound.py", "test_broken.py", "test_slow.py"):
        (tmp_path / "tests" / name).write_text(SOUND)
    return tmp_path


def status_of(tree: Path, places: list[str], limit_s: float) -> int:
    """As pytest would end: sound asks for the bound, broken fails, slow never ends where `other` is wrong."""
    part: dict = {}
    exec((tree / "src" / "splittime" / "part.py").read_text(), part)
    if places == ["tests/test_slow.py"] and part["other"](1) != 2:
        raise subprocess.TimeoutExpired("pytest", limit_s)
    return {"tests/test_sound.py": int(part["bounded"](11) != 10), "tests/test_broken.py": 1}.get(places[0], 0)


def mutant(old: str, new: str, test: str = "test_sound.py") -> Mutant:
    return Mutant(what="x", file="part.py", old=old, new=new, tests=(test,))


@pytest.mark.parametrize(
    ("tried", "verdict"),
    [
        (mutant("min(size, 10)", "size"), KILLED),
        (mutant("size + 1", "size + 2"), LIVED),
        (mutant("max(size, 10)", "size"), STALE),
        (mutant("return ", "raise "), STALE),  # it is there twice
        (mutant("min(size, 10)", "size", "test_gone.py"), STALE),
        (mutant("min(size, 10)", "size", "test_broken.py"), UNSOUND),
        (mutant("size + 1", "size - 1", "test_slow.py"), KILLED),
    ],
)
def test_each_verdict(tree, tried, verdict, monkeypatch):
    monkeypatch.setattr(mutants, "run_tests", status_of)
    assert Trial(tree).verdict(tried) == verdict
    assert (tree / "src" / "splittime" / "part.py").read_text() == SOURCE


@pytest.mark.sweep
@pytest.mark.parametrize(("new", "verdict"), [("size", KILLED), ("min(10, size)", LIVED)])
def test_pytest_itself_decides(tree, new, verdict):
    assert Trial(tree).verdict(mutant("min(size, 10)", new)) == verdict


def test_the_table_is_read_and_no_entry_changes_nothing():
    table = read_table()
    assert len(table) >= 50
    assert len({(one.file, one.old, one.new) for one in table}) == len(table)
    for one in table:
        assert one.old != one.new
        assert one.old.strip()
        assert one.tests


def test_a_copy_has_what_is_not_ignored_and_what_is_new(tmp_path):
    root, copy = tmp_path / "root", tmp_path / "copy"
    files = {"src/known.py": "1", "src/new.py": "2", "src/built.so": "3", "tests/gone.py": "4", "left/out.txt": "5"}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / ".gitignore").write_text("*.so\nleft\n")
    for words in (["init", "-q"], ["add", "src/known.py", "tests/gone.py"]):
        subprocess.run(["git", *words], cwd=root, check=True)
    (root / "tests" / "gone.py").unlink()
    copy_tree(root, copy)
    found = {str(path.relative_to(copy)): path.read_text() for path in copy.rglob("*") if path.is_file()}
    assert found == {".gitignore": "*.so\nleft\n", "src/known.py": "1", "src/new.py": "2", "src/built.so": "3"}
