"""The tests that a change concerns, for `make quick`: prints their files.

    python tests/quick.py [CHANGED...]      what git says has changed since main, if none is named

They are the tests that changed, those in the folders of the packages that changed, and those of modules that import
what has changed: the test imports it, or a module that imports it. Imports are found in the text, wherever they stand.
A `conftest.py` concerns its folder, a page the tests of the pages, and a file of another kind in a package its folder.
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE, TESTS = ROOT / "src" / "splittime", ROOT / "tests"
IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)|import[ \t]+([^\n]*))", re.MULTILINE
)
PAGES = ("docs", "guides")
STEPS = 2  # from a test to what has changed


def names_in(text: str, package: str) -> set[str]:
    """Find the modules, and what may be some, that a text imports."""
    found = set()
    for base, names, plain in IMPORT.findall(text):
        if base.startswith("."):
            up = len(base) - len(base.lstrip("."))
            inside = package.split(".")[: len(package.split(".")) - up + 1]
            base = ".".join([*inside, *filter(None, [base.lstrip(".")])])
        if base:
            found |= {base} | {f"{base}.{name.split()[0]}" for name in names.strip("()").split(",") if name.split()}
        found |= {name.split()[0] for name in plain.split(",") if name.split()}
    return found


def imports(files: Iterable[Path]) -> dict[Path, set[Path]]:
    """Find which of these files each of them imports."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    roots = {str(ROOT / name).rstrip("/") for name in ("src", *settings["pythonpath"])}
    by_place = {str(file.parent if file.stem == "__init__" else file.with_suffix("")): file for file in files}
    found = {}
    for file in by_place.values():
        package = ".".join(file.parent.relative_to(ROOT / "src" if file.is_relative_to(SOURCE) else ROOT).parts)
        places = [name.replace(".", "/") for name in names_in(file.read_text(encoding="utf-8"), package)]
        wanted = [f"{root}/{place}" for place in places for root in (*roots, str(file.parent))]
        found[file] = {by_place[place] for place in wanted if place in by_place}
    return found


def concerned(changed: set[Path], imported: dict[Path, set[Path]]) -> set[Path]:
    """Choose the files and folders of tests that a change of these files concerns."""
    chosen: set[Path] = set()
    for file in changed:
        if file.is_relative_to(SOURCE):
            chosen.add(TESTS / file.relative_to(SOURCE).parts[0])
        elif file.name == "conftest.py" and file.parent != TESTS:
            chosen.add(file.parent)
        elif file.is_relative_to(ROOT / "docs"):
            chosen |= {TESTS / name for name in PAGES}
    reached = set(changed)
    for _ in range(STEPS):
        reached |= {file for file, names in imported.items() if names & reached}
    chosen |= {file for file in reached if file.is_relative_to(TESTS) and file.name.startswith("test_")}
    return {one for one in chosen if one.exists() and not any(other in chosen for other in one.parents)}


def changed_files() -> set[Path]:
    """Ask git for what differs from the last commit that is also on main, and for what it does not know yet."""

    def git(*words: str) -> list[str]:
        return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True).stdout.split("\n")

    bases = [line for name in ("origin/main", "main", "HEAD") for line in git("merge-base", "HEAD", name) if line]
    base = bases[0] if bases else "HEAD"
    listed = git("diff", "--name-only", base) + git("ls-files", "--others", "--exclude-standard")
    return {ROOT / name for name in listed if name}


def main(*named: str) -> None:
    files = [file for folder in (SOURCE, TESTS, ROOT / "benchmarks") for file in folder.rglob("*.py")]
    changed = {Path(name).resolve() for name in named} or changed_files()
    for file in sorted(concerned(changed, imports(files))):
        print(file.relative_to(ROOT))


if __name__ == "__main__":
    main(*sys.argv[1:])
