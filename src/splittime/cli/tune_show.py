"""What `splittime tune` says at its end: the trials, the settings, and how to start a server with them."""

import json
import math
import shlex
import statistics
from typing import TYPE_CHECKING, Any

from rich.table import Table

from splittime.bench.book.metrics import shown
from splittime.bench.own_server import as_typed
from splittime.cli.options import wide
from splittime.tune.knobs import words
from splittime.tune.search import DRAWS
from splittime.tune.servers import OwnServers, Servers, VllmServers

if TYPE_CHECKING:
    from splittime.tune.goal import Goal
    from splittime.tune.notebook import Tuned, TuneTrial
    from splittime.tune.profiles import ProfileFigures

GAINED = (
    "While the SLO is missed: the improvement of its weakest term. Once it is kept: the improvement of the figure that "
    f"--profile seeks. Predicted: the median of {DRAWS} draws, in brackets the range of the middle {DRAWS - 2}."
)
STYLES = {"BETTER": "green", "WORSE": "red", "INCONCLUSIVE": "yellow", "EQUIVALENT": ""}


def settings_of_tuned(servers: Servers, found: "Tuned") -> dict[str, Any]:
    """Returns the settings found, as `splittime serve` takes them."""
    return servers.as_settings(found.changes) if isinstance(servers, OwnServers) else dict(found.changes)


def flags_of(servers: Servers, found: "Tuned") -> list[str]:
    """Returns the flags that start a server with what was found: all of them for servers of our own, those that were
    changed for one that runs."""
    if isinstance(servers, OwnServers | VllmServers):
        return servers.flags(found.changes)
    return [word for name, value in found.changes.items() for word in as_typed(name, value)]


def as_toml(servers: Servers, found: "Tuned") -> str:
    """Returns a settings file, with what was asked for and what was found."""
    about = servers.about.get("settings", {})
    settings = {**about, **settings_of_tuned(servers, found)}
    return "".join(f"{name} = {_toml(value)}\n" for name, value in settings.items() if value is not None)


def _toml(value: Any) -> str:
    """Returns a value as TOML: JSON's booleans, numbers, strings and arrays are TOML's too."""
    return json.dumps(value, ensure_ascii=False, default=str)


def show(found: "Tuned", program: str, flags: list[str], goal: "Goal", is_applied: bool) -> None:
    """Writes all to standard output. program: what the flags are given to."""
    console = wide()
    if found.trials:
        console.print(_table(found))
        console.print(GAINED, markup=False, style="dim")
        for number, trial in enumerate(found.trials, 1):
            console.print(f"{number}: {trial.why}", markup=False)
    for note in found.notes:
        console.print(f"note: {note}", markup=False)
    console.print(f"\n{found.outcome.upper()}: {_sentence(found)}", markup=False)
    for name in found.after.terms:
        console.print(f"  {name}: {_change_of(found, name)}{_limit(goal, name)}", markup=False)
    if found.changes:
        done = "  (applied)" if is_applied else ""
        console.print(f"{program} {shlex.join(flags)}{done}", markup=False, soft_wrap=True)


def _table(found: "Tuned") -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0))
    for name in ("", "change", "predicted", "measured", "runs", "verdict", "cost"):
        table.add_column(name, justify="left" if name in ("change", "verdict") else "right", overflow="fold")
    for number, trial in enumerate(found.trials, 1):
        style = STYLES[trial.verdict]
        verdict = f"[{style}]{trial.verdict}[/]" if style else str(trial.verdict)
        runs = f"{trial.runs}+{trial.runs}"
        table.add_row(
            str(number), words(trial.change), _predicted(trial), _gain(trial.measured), runs, verdict, _cost(trial)
        )
    return table


def _predicted(trial: "TuneTrial") -> str:
    if trial.predicted is None:
        return "-"
    return f"{_gain(trial.predicted.gain)} ({_gain(trial.predicted.low)} to {_gain(trial.predicted.high)})"


def _gain(value: float | None) -> str:
    return "-" if value is None else f"{math.exp(value):.3g}x"


def _cost(trial: "TuneTrial") -> str:
    return f"{trial.seconds:.0f} s"


def _sentence(found: "Tuned") -> str:
    took = f"{found.seconds:.0f} s" if found.seconds < 90 else f"{found.seconds / 60:.0f} min"
    if found.outcome == "nothing to change":
        return f"the settings keep the SLO, and nothing gains more than noise ({took})."
    if found.outcome == "better":
        return f"{words(found.changes)} ({took})."
    if found.outcome == "slo missed":
        best = ", ".join(f"{name} {shown(name, value)}" for name, value in found.best.items())
        return f"no change that could be kept meets the SLO ({took}). The best of each term on its own: {best}."
    return f"no verdict within {took}: {_way_out(found)}"


def _way_out(found: "Tuned") -> str:
    unsure = next((trial for trial in found.trials if trial.is_open and not trial.is_cut_off), None)
    if unsure is None:
        return "allow more --minutes, or a longer --duration."
    gained = f"{words(unsure.change)} measured {_gain(unsure.measured)}"
    return f"{gained}, and its runs differ too much to be sure. A longer --duration would tell."


def _change_of(found: "Tuned", name: str) -> str:
    """Returns a term's value before and after."""
    before, after = found.before.terms.get(name), found.after.terms.get(name)
    texts = [shown(name, value) for value in (before, after) if value is not None]
    return " -> ".join(dict.fromkeys(texts))


def _limit(goal: "Goal", name: str) -> str:
    return f"  (SLO {shown(name, goal.slo[name])})" if name in goal.slo else ""


def profiles_table(beside: "list[ProfileFigures]") -> Table:
    """Returns a column for each profile: the median of its runs, and under it the least and the most."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("")
    for one in beside:
        table.add_column(one.name, justify="right", overflow="fold")
    table.add_row("SLO kept, runs", *(f"{sum(one.kept)} of {len(one.kept)}" for one in beside))
    for name in beside[0].figures:
        table.add_row(name, *(_spread(name, one.figures[name]) for one in beside))
    return table


def _spread(name: str, values: tuple[float, ...]) -> str:
    if not values:
        return "-"
    middle = shown(name, statistics.median(values))
    return middle if len(values) == 1 else f"{middle}\n({shown(name, min(values))} to {shown(name, max(values))})"
