"""A part of `run.sh` that has ended, as one line of a file: what it printed, as JSON if it is that, and how it ended.

python -m benchmarks.gpu.collect FILE.jsonl PART EXIT SECONDS STDOUT STDERR
"""

import json
import sys
from pathlib import Path
from typing import Any

KEPT = 6000  # characters at the end of what is not JSON


def line_of(part: str, status: int, seconds: float, printed: str, errors: str) -> dict[str, Any]:
    line: dict[str, Any] = {"part": part, "exit": status, "seconds": seconds}
    try:
        line["result"] = json.loads(printed)
    except ValueError:
        line["text"] = printed[-KEPT:]
    return line | {"errors": errors[-KEPT:]}


def read(paths: list[Path]) -> dict[str, dict[str, Any]]:
    """Each part's line, of these files and of all .jsonl files in these folders; the last of each part counts. What is
    not there has no parts."""
    there = [path for path in paths if path.exists()]
    files = [file for path in there for file in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])]
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines() if line.strip()]
    return {line["part"]: line for line in lines}


def main() -> None:
    file, part, status, seconds, printed, errors = sys.argv[1:]
    found = line_of(
        part, int(status), float(seconds), *(Path(name).read_text(errors="replace") for name in (printed, errors))
    )
    with Path(file).open("a") as target:
        target.write(json.dumps(found) + "\n")
    print(f"{part}: exit {status} after {seconds} s", flush=True)
    if int(status):
        print(errors_of(found), flush=True)


def errors_of(found: dict[str, Any]) -> str:
    """The last lines of what went wrong."""
    told = [*found.get("text", "").splitlines()[-3:], *found["errors"].splitlines()[-6:]]
    return "\n".join(f"    {line[:200]}" for line in told)


if __name__ == "__main__":
    main()
