"""Writes docs/reference/vllm.md: which releases of vLLM the attached books work with, from runs of their tests.

python docs/vllm_versions.py 0.32.0 results.xml   takes in what `make check-vllm VLLM=0.32.0` found, and writes the page
python docs/vllm_versions.py                      writes the page from what is known
"""

import json
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

FOLDER = Path(__file__).parent / "reference"
KNOWN, PAGE = FOLDER / "vllm_versions.json", FOLDER / "vllm.md"
PARTS = {
    "test_vllm_causes": "the scheduler's causes and steps",
    "test_vllm": "a served model: accounts, counters, page",
    "test_vllm_replica": "replay and what-if",
    "test_vllm_faults": "faults, ends and refusals",
}
Found = dict[str, dict[str, dict[str, int]]]  # by version and part: how many tests passed and failed


def found_in(results: Path) -> dict[str, dict[str, int]]:
    """Returns how many tests of each part passed and failed."""
    counts = {part: Counter(passed=0, failed=0) for part in PARTS}
    for case in ElementTree.parse(results).iter("testcase"):
        part = case.get("classname", "").rpartition(".")[2]
        if part in counts and case.find("skipped") is None:
            is_bad = case.find("failure") is not None or case.find("error") is not None
            counts[part]["failed" if is_bad else "passed"] += 1
    return {part: dict(count) for part, count in counts.items()}


def page(found: Found) -> str:
    header = "| vLLM | " + " | ".join(PARTS.values()) + " |\n|---|" + "---|" * len(PARTS) + "\n"
    versions = sorted(found, key=lambda version: [int(part) for part in version.split(".")], reverse=True)
    rows = "".join(
        f"| {version} | " + " | ".join(_cell(found[version].get(part)) for part in PARTS) + " |\n"
        for version in versions
    )
    return (
        "<!-- Made by docs/vllm_versions.py from runs of tests; change it there. -->\n\n"
        "# Releases of vLLM\n\n"
        "What works of the [books inside vLLM](../guides/why-is-my-vllm-slow.md) on which release, as "
        "`make check-vllm` found on a CPU. A release that is not in this table is refused, and a build "
        "between releases; "
        "`SPLITTIME_VLLM_UNTESTED=1` tries it all the same.\n\n" + header + rows + "\n"
        "Not tried for want of hardware: cards, tensor and pipeline parallel engines, KV connectors. The asynchronous "
        "scheduler of vLLM, which a card has by default and a CPU cannot have, was tested with vLLM's own "
        "`step_with_batch_queue` and a simulated device.\n"
    )


def _cell(counts: dict[str, int] | None) -> str:
    if not counts or not sum(counts.values()):
        return "not tried"
    total = counts["passed"] + counts["failed"]
    return f"yes ({total} tests)" if not counts["failed"] else f"{counts['passed']} of {total} tests"


def main() -> None:
    found: Found = json.loads(KNOWN.read_text()) if KNOWN.is_file() else {}
    if len(sys.argv) == 3:
        found[sys.argv[1]] = found_in(Path(sys.argv[2]))
        KNOWN.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(page(found))


if __name__ == "__main__":
    main()
