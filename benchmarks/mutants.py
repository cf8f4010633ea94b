"""Changes that somebody could make by mistake, each chosen and written down, and whether a test finds it.

`mutation` draws changes at random; the table `mutants.toml` beside this file has those that would matter: a limit left
out, one tenant's name for another's, an order turned round. Each names a file, the text there, what it becomes, and the
tests that must notice. They run in a copy of the tree, which is changed and put back, one process at a time.

    python -m benchmarks.mutants [--only TEXT ...] [--list]

* killed: a test failed, or the time was up
* LIVED: no test failed
* STALE: the text is not in the file any more, or more than once, or a test file is gone: the table has to follow
* UNSOUND: the tests fail with nothing changed

It ends with 1 if anything but the first came. The time of each is limited (`--limit`).
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from shutil import copy2
from typing import NamedTuple

import msgspec

from benchmarks.mutation import FOUND, run_tests

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_suffix(".toml")
KILLED, LIVED, STALE, UNSOUND = "killed", "LIVED", "STALE", "UNSOUND"
LIMIT_S = 120.0


class Mutant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """what: the mistake, in words. file: under src/splittime. old: stands in it once. tests: under tests."""

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


class Table(msgspec.Struct, forbid_unknown_fields=True):
    mutant: list[Mutant]


class Verdict(NamedTuple):
    mutant: Mutant
    verdict: str


def read_table(path: Path = TABLE) -> list[Mutant]:
    return msgspec.toml.decode(path.read_bytes(), type=Table).mutant


def copy_tree(root: Path, copy: Path) -> None:
    """Copy what git knows or does not ignore, and the built kernels."""
    known = _lines(root, "git", "ls-files", "--cached", "--others", "--exclude-standard")
    built = [str(path.relative_to(root)) for path in (root / "src").rglob("*.so")]
    for name in (*known, *built):
        if (root / name).is_file():  # else deleted, and not committed yet
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            copy2(root / name, copy / name)


def _lines(root: Path, *command: str) -> list[str]:
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()


class Trial:
    """Tries mutants in a copy of the tree. limit_s: of the tests of one."""

    def __init__(self, tree: Path, limit_s: float = LIMIT_S) -> None:
        self._tree, self._limit_s = tree, limit_s
        self._is_sound: dict[tuple[str, ...], bool] = {}

    def verdict(self, mutant: Mutant) -> str:
        path = self._tree / "src" / "splittime" / mutant.file
        text = path.read_text() if path.is_file() else ""
        if text.count(mutant.old) != 1 or not all(self._has(test) for test in mutant.tests):
            return STALE
        if not self._are_sound(mutant.tests):
            return UNSOUND
        path.write_text(text.replace(mutant.old, mutant.new))
        try:
            return KILLED if self._fails(mutant.tests) else LIVED
        finally:
            path.write_text(text)

    def _has(self, test: str) -> bool:
        return (self._tree / "tests" / test.partition("::")[0]).exists()

    def _are_sound(self, tests: tuple[str, ...]) -> bool:
        """Look once whether these pass with nothing changed."""
        if tests not in self._is_sound:
            self._is_sound[tests] = not self._fails(tests)
        return self._is_sound[tests]

    def _fails(self, tests: Sequence[str]) -> bool:
        try:
            status = run_tests(self._tree, [f"tests/{test}" for test in tests], self._limit_s)
        except subprocess.TimeoutExpired:
            return True
        if status not in (0, *FOUND):
            raise RuntimeError(f"pytest ended with status {status} for {', '.join(tests)}")
        return status in FOUND


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="with one of these in words or file")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for the tests of one")
    parser.add_argument("--list", action="store_true", help="say which there are, and try none")
    args = parser.parse_args()
    chosen = [one for one in read_table() if any(text in f"{one.what} {one.file}" for text in args.only)]
    if args.list:
        print("\n".join(f"{one.file}: {one.what}" for one in chosen))
        return 0
    found = list[Verdict]()
    with tempfile.TemporaryDirectory() as folder:
        copy_tree(ROOT, Path(folder))
        trial = Trial(Path(folder), args.limit)
        for one in chosen:
            found.append(Verdict(one, trial.verdict(one)))
            print(f"{found[-1].verdict:8}{one.file}: {one.what}", flush=True)
    counts = {name: sum(each.verdict == name for each in found) for name in (KILLED, LIVED, STALE, UNSOUND)}
    print(", ".join(f"{count} {name}" for name, count in counts.items()))
    return int(counts[KILLED] != len(found))


if __name__ == "__main__":
    sys.exit(main())
