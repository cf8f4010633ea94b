"""What `splittime serve` says when it is ready, for people: what was resolved and from where, how long the start took,
and what to try. Each thing once, and wrapped to the terminal; in a log one line for each, however long."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import orjson

from splittime.cli.options import talk
from splittime.cli.settings import Settings
from splittime.cli.startup import Timeline
from splittime.core.fitted import UNLIMITED, Sentence

if TYPE_CHECKING:
    from rich.console import Console

NAME_COLUMNS = 36
OF_SCHEDULER = "scheduler."


def announce(url: str, model: str, resolved: dict[str, Any], timeline: Timeline, settings: Settings) -> None:
    """On standard error."""
    console = talk()
    if not console.is_terminal:
        console.width = UNLIMITED
    console.print(f"\n{model} on {url}\n", style="bold", markup=False)
    _say_rows(console, "resolved configuration", configuration(resolved, settings))
    console.print(f"{'start-up, ms since the process began':<{NAME_COLUMNS + 3}}{'begin':>9} {'end':>9}", style="dim")
    for phase in timeline.phases():
        console.print(f"  {phase.name:<{NAME_COLUMNS}} {phase.begin_ms:>9.1f} {phase.end_ms:>9.1f}", markup=False)
    console.print("try", style="dim")
    console.print(curl(url, model, needs_key=bool(settings["api_key"] or settings["api_keys_file"])), markup=False)
    console.print(f"  splittime explain ID --url {url}  # ID: the id in the answer", markup=False)


def _say_rows(console: "Console", title: str, rows: Iterator[tuple[str, str]]) -> None:
    console.print(title, style="dim")
    shown = list(rows)
    longest = max(len(name) for name, _ in shown)
    for name, value in shown:
        console.print(Sentence(value, head=f"  {name:<{longest}}  ", indent=longest + 4))


def configuration(resolved: dict[str, Any], settings: Settings) -> Iterator[tuple[str, str]]:
    """Each name once, with the origin of what is not a default; then the settings that nothing was resolved from."""
    changed = {entry["name"]: entry for entry in settings.shown() if entry["origin"] != "default"}
    for name, value in flatten(resolved):
        short = name.removeprefix(OF_SCHEDULER)
        is_said = short != name and resolved.get(short) == value
        if value == [] or is_said:  # [] is of what is not in use: ranks, captured steps
            continue
        entry = changed.pop(short, None)
        yield name, str(value) if entry is None else f"{value}  {_origin(entry, value)}"
    for name, entry in changed.items():
        yield name, f"{entry['value']}  ({entry['origin']})"


def _origin(entry: dict[str, Any], value: Any) -> str:
    """With what was asked for, where something else became of it."""
    return f"({entry['origin']})" if entry["value"] == value else f"({entry['origin']}: {entry['value']})"


def flatten(resolved: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """`{"a": {"b": 1}}` as `[("a.b", 1)]`."""
    rows: list[tuple[str, Any]] = []
    for name, value in resolved.items():
        rows += flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else [(f"{prefix}{name}", value)]
    return rows


def curl(url: str, model: str, needs_key: bool) -> str:
    """A request to paste into a shell, in short lines."""
    key = " \\\n    -H 'Authorization: Bearer YOUR_KEY'" if needs_key else ""
    what = orjson.dumps({"model": model, "prompt": "def read_json(path):"}).decode()
    how = orjson.dumps({"max_tokens": 48, "temperature": 0}).decode()
    return (
        f"  curl {url}/v1/completions \\\n"
        f"    -H 'Content-Type: application/json' -H 'X-Include-Timing: 1'{key} \\\n"
        f"    -d '{what[:-1]},\n        {how[1:]}'"
    )
