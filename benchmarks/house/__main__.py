"""Prints the figures of a tree, or writes them as JSON."""

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.house.figures import figures
from benchmarks.house.walk import walk

HERE = Path(__file__).parents[2] / "src" / "splittime"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.house", description=__doc__)
    parser.add_argument("--source", type=Path, default=HERE, help="folder of the package; its name is the package's")
    parser.add_argument("--walk", action="store_true", help="also walk one streamed completion through a real server")
    parser.add_argument("--json", action="store_true", help="as JSON")
    arguments = parser.parse_args()
    source = arguments.source.resolve()
    found = {"commit": commit(source)} | figures(source) | ({"walk": walk(source)} if arguments.walk else {})
    print(json.dumps(found, indent=1) if arguments.json else "\n".join(_lines(found)))


def commit(source: Path) -> str:
    """The commit of the tree; empty where it is in no repository."""
    command = ["git", "-C", str(source), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _lines(found: dict[str, Any], indent: str = "") -> list[str]:
    lines = []
    for name, value in found.items():
        shown = f"{indent}{name.replace('_', ' ')}: "
        if isinstance(value, dict):
            lines += [shown, *_lines(value, indent + "  ")]
        else:
            lines.append(shown + (" -> ".join(value) if name == "order" else str(value)))
    return lines


if __name__ == "__main__":
    main()
