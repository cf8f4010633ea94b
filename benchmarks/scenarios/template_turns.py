"""Which real chat templates keep the prefix cache over a conversation: `splittime check-template` of a whole folder.

    python -m benchmarks.scenarios.template_turns FOLDER [--json]

Prints a table in Markdown, of each *.jinja in FOLDER: for each case the turns' marks, as `check-template` has them; and
how many templates compute a history again though the client only goes on, by cause.
"""

import argparse
from collections import Counter
from pathlib import Path

from benchmarks.report import file_result
from splittime.cli.check_template import MARKS, NO_MODEL
from splittime.core.errors import ConfigError
from splittime.text.template_check import CASES, TurnCheck, check_template


def cell(found: tuple[TurnCheck, ...], case: str) -> str:
    return "".join(MARKS[one.verdict] for one in found if one.case == case) or "."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows, unread = dict[str, tuple[TurnCheck, ...]](), dict[str, str]()
    for path in sorted(arguments.folder.glob("*.jinja")):
        try:
            rows[path.stem] = check_template(path.read_text(), NO_MODEL)
        except ConfigError as error:
            unread[path.stem] = str(error)
    broken = [name for name, found in rows.items() if any(one.breaks for one in found)]
    causes = Counter(cause for found in rows.values() for cause in {one.cause for one in found if one.breaks})
    chosen = Counter(
        case for found in rows.values() for case in {one.case for one in found if one.verdict == "history"} if found
    )
    figures = {
        "templates": len(rows),
        "broken": broken,
        "causes": dict(causes),
        "by_case": dict(chosen),
        "turns": {name: {case.name: cell(found, case.name) for case in CASES} for name, found in rows.items()},
        "unread": unread,
    }
    file_result("template_turns", figures, {"folder": arguments.folder.name}, arguments.json)
    if arguments.json:
        return
    print(f"| template | {' | '.join(case.name for case in CASES)} |\n|---{'|---' * len(CASES)}|")
    for name, found in rows.items():
        print(f"| {name} | {' | '.join(f'`{cell(found, case.name)}`' for case in CASES)} |")
    print(f"\n{len(broken)} of {len(rows)} break in a conversation that only goes on: {dict(causes)}; {dict(chosen)}")


if __name__ == "__main__":
    main()
