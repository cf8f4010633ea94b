"""`splittime tune [MODEL] --slo TERMS`: the settings that keep an SLO, predicted by the simulator and then measured.

What `splittime tune` says at its end: the trials, the settings, and how to start a server with them.
"""

import functools
import inspect
import json
import math
import shlex
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.table import Table

from splittime import __version__
from splittime.assemble import model_source
from splittime.assemble import settings as settings_module
from splittime.assemble.settings import MODEL, Settings
from splittime.bench.book.metrics import shown
from splittime.bench.own_server import as_typed
from splittime.cli import options
from splittime.cli.bench_flags import load_of, load_parameters
from splittime.cli.options import wide
from splittime.cli.panels import place_of
from splittime.cli.progress import loading
from splittime.core.errors import ConfigError
from splittime.core.files import check_writable, write_whole
from splittime.core.settings import settings_of
from splittime.core.this_process import num_cores
from splittime.tune.knobs import DRAWS, words

if TYPE_CHECKING:
    from splittime.simulate.recorded import Recorded
    from splittime.tune.goal import Goal
    from splittime.tune.measure import DrawnLoad, Measurer, Profile, ProfileFigures, RecordedLoad, TimeBudget
    from splittime.tune.notebook import Tuned, TuneTrial
    from splittime.tune.servers import Servers
    from splittime.tune.tuner import Tuner

GAINED = (
    "While the SLO is missed: the improvement of its weakest term. Once it is kept: the improvement of the figure that "
    f"--profile seeks. Predicted: the median of {DRAWS} draws, in brackets the range of the middle {DRAWS - 2}."
)
STYLES = {"BETTER": "green", "WORSE": "red", "INCONCLUSIVE": "yellow", "EQUIVALENT": ""}
EXAMPLES = """\b
Examples:
  splittime tune --slo ttft_p99=500ms,itl_p99=50ms --rate 20
  splittime tune ./models/llama --slo tpot_p99=40ms --rate 4 --max-num-seqs 8
  splittime tune --url http://host:8000 --slo ttft_p99=1s --rate 5 --apply
  splittime tune --slo ttft_p99=1s --rate 9 --notebook n.jsonl --minutes 60
  splittime tune --slo ttft_p99=1s --ledger today.sqlite
  splittime tune --slo ttft_p99=1s --rate 2 --vllm 'serve ./model --port 8000'
  splittime tune --slo ttft_p99=1s --rate 9 --compare-profiles

\b
Without --url it starts servers of its own, one after the other, with the
flags of `splittime serve` that are given. Ctrl-C ends it: a running server
has its knobs back, and the same command goes on with the notebook.
Exit codes:
  0    better settings were found, or nothing is to be changed
  1    no change that could be kept meets the SLO; it says what was reached
  2    a usage or settings error
  3    no verdict: no time, nothing to predict from, or runs that differ a lot
  4    nobody answers
  130  Ctrl-C
"""
ENGINE_SETTINGS = {s.name: s for part in ("runner", "scheduler") for s in settings_of(settings_module.PARTS[part])}
QUALITY_TOKENS = 20_000
FAILED = 2


def settings_of_tuned(servers: "Servers", found: "Tuned") -> dict[str, Any]:
    """Returns the settings found, as `splittime serve` takes them."""
    from splittime.tune.servers import OwnServers  # scipy and a client: a second

    return servers.as_settings(found.changes) if isinstance(servers, OwnServers) else dict(found.changes)


def flags_of(servers: "Servers", found: "Tuned") -> list[str]:
    """Returns the flags that start a server with what was found: all of them for servers of our own, those that were
    changed for one that runs."""
    from splittime.tune.servers import OwnServers, VllmServers

    if isinstance(servers, OwnServers | VllmServers):
        return servers.flags(found.changes)
    return [word for name, value in found.changes.items() for word in as_typed(name, value)]


def as_toml(servers: "Servers", found: "Tuned") -> str:
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


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    model: options.ModelArgument = None
    slo: str = options.flag("TERMS", "To be kept: ttft_p99=500ms,itl_p99=50ms.", ...)
    url: str | None = options.flag("URL", "Tune this running server's live knobs instead.")
    vllm: str | None = options.flag("'serve MODEL ...'", "Tune vLLM's flags: servers of this command, with books.")
    ledger: Path | None = options.flag("FILE", "Load of this ledger's busiest half minute, instead of --rate.")
    compare_profiles: bool = options.switch(
        "--compare-profiles", "Measure the three profiles on this load, and change nothing."
    )
    profile: str | None = options.flag(
        "latency|throughput|balanced", "What to begin with (not with --url), and what to seek."
    )
    minutes: float = options.flag(
        "N", "Time for simulations and runs. A run or a quality gate that has begun is completed.", 20.0, min=0.1
    )
    notebook: Path | None = options.flag("FILE", "Keep each trial here; a trial that is in it is not repeated.")
    knob: list[str] | None = options.flag("NAME", "Turn only this one. May be given again.")
    keep_numbers: bool = options.switch("--keep-numbers", "Try nothing that changes what the model answers.")
    apply: bool = options.switch("--apply", "Leave the settings found on the server of --url.")
    write_config: Path | None = options.flag("FILE", "Write the settings found as a settings file.")
    api_key: str | None = options.flag("KEY", "Key of the server of --url.", envvar="SPLITTIME_API_KEY")
    json: options.JsonFlag = False


def check(given: TuneOptions, load: Mapping[str, Any]) -> None:
    """Raises ConfigError for flags that exclude each other, before anything is started."""
    _check_load(given, load)
    if given.apply and given.url is None:
        hint = "--write-config FILE keeps them for the next start."
        raise ConfigError("--apply needs the --url of a running server", param="apply", hint=hint)
    named = {"model": given.model, "url": given.url, "vllm": given.vllm}
    if sum(value is not None for value in named.values()) > 1:
        told = " and ".join(name for name, value in named.items() if value is not None)
        raise ConfigError(f"{told} at once", param="url", hint="Give one of MODEL, --url and --vllm.")
    if given.vllm is not None and (given.write_config is not None or given.compare_profiles or given.profile):
        words = "profiles and settings files are of `splittime serve`; vLLM has flags"
        raise ConfigError(words, param="vllm", value=given.vllm, hint="Leave the one or the other out.")
    _check_heeded(given)
    if given.write_config is not None:
        check_writable(given.write_config, "write_config")


def _check_load(given: TuneOptions, load: Mapping[str, Any]) -> None:
    if given.ledger is not None and load:
        name = next(iter(load))
        hint = "Leave one of them out."
        raise ConfigError("a ledger is a load already", param=name, value=load[name], hint=hint)
    words = "tune needs a load whose requests do not wait for answers (an open loop)"
    hint = "Give --rate, --trace with its own times, or --ledger."
    if "concurrency" in load:
        number = load["concurrency"]
        words = f"{words}, and --concurrency {number} has them wait"
        raise ConfigError(words, param="concurrency", value=number, hint=f"Leave --concurrency out. {hint}")
    if given.ledger is None and "rate" not in load and "trace" not in load:
        raise ConfigError(words, param="rate", hint=hint)


def _check_heeded(given: TuneOptions) -> None:
    """Raises ConfigError for a flag that would do nothing beside another one."""
    from splittime.tune.knobs import changes_numbers

    hint = "Leave one of them out."
    for name in ("profile", "knob", "keep_numbers", "write_config", "apply") if given.compare_profiles else ():
        if value := getattr(given, name):
            words = (
                f"--{name.replace('_', '-')} with --compare-profiles, which measures all profiles and changes nothing"
            )
            raise ConfigError(words, param=name, value=str(value), hint=hint)
    for name in given.knob or ():
        if given.keep_numbers and changes_numbers({name: None}):
            words = f"--keep-numbers with --knob {name}, which changes what the model answers"
            raise ConfigError(words, param="knob", value=name, hint=hint)


def tune(given: TuneOptions, settings: Settings, load: dict[str, Any]) -> None:
    """Find the settings that keep an SLO: search in the simulator, verify on the real engine."""
    from splittime.bench.event_loop import sigterm_interrupts
    from splittime.simulate.recorded import read_ledger
    from splittime.tune.measure import TimeBudget, compare_profiles

    check(given, load)
    recorded = None if given.ledger is None else read_ledger(given.ledger)
    servers, profile = _servers(given, settings, recorded)
    with sigterm_interrupts(), _tells_interrupt(given), loading("tuning") as say:
        budget = TimeBudget(given.minutes)
        measurer, asked_load, with_time = _measurer(given, servers, profile, load, recorded, budget, say)
        if given.compare_profiles:
            beside = compare_profiles(measurer, _asked(settings), budget)
        else:
            found = _tuner(given, servers, measurer, asked_load, budget, with_time).run()
        if given.apply:
            servers.apply(found.changes)  # type: ignore[attr-defined]
    if given.compare_profiles:
        from splittime.cli.options import wide

        if given.json:
            options.write_data(msgspec.json.encode(beside))
        else:
            wide().print(profiles_table(beside))
        return
    _tell(given, servers, found)
    raise typer.Exit(found.exit_code)


@contextmanager
def _tells_interrupt(given: TuneOptions) -> Iterator[None]:
    """Says, where it was interrupted, what is left of it."""
    try:
        yield
    except KeyboardInterrupt:
        knobs = "The server has its knobs as before. " if given.url is not None else ""
        kept = f"The runs are in {given.notebook}: the same command goes on."
        lost = "Nothing was kept: with --notebook FILE the same command would go on."
        options.talk().print(f"Interrupted. {knobs}{lost if given.notebook is None else kept}", markup=False)
        raise


def _servers(given: TuneOptions, settings: Settings, recorded: "Recorded | None") -> "tuple[Servers, Profile]":
    from splittime.tune.measure import PROFILES, recorded_settings
    from splittime.tune.servers import OwnServers, RunningServer, VllmServers
    from splittime.wire.target import Target

    if given.profile is not None and given.profile not in PROFILES:
        hint = f"one of {', '.join(PROFILES)}"
        raise ConfigError(f"there is no profile {given.profile!r}", param="profile", value=given.profile, hint=hint)
    profile = PROFILES[given.profile or "balanced"]
    asked = _asked(settings)
    if asked and (given.url is not None or given.vllm is not None):
        hint = "Leave them out: a running server has its settings already, and vLLM's go into --vllm."
        raise ConfigError("settings of `splittime serve` for another server", param=next(iter(asked)), hint=hint)
    if given.vllm is not None:
        return VllmServers(shlex.split(given.vllm)), profile
    if given.url is None:
        model_source.locate(given.model)  # refuses what is no model
        before = {} if recorded is None else recorded_settings(recorded.facts, ENGINE_SETTINGS)
        return OwnServers(given.model, {**before, **(profile.settings if given.profile else {}), **asked}), profile
    return RunningServer(Target(url=given.url, api_key=given.api_key)), profile


def _asked(settings: Settings) -> dict[str, Any]:
    """Returns the engine's settings that were given as a flag, in a file or in the environment."""
    return {name: settings[name] for name in ENGINE_SETTINGS if settings.values[name].origin != "default"}


def _measurer(
    given: TuneOptions,
    servers: "Servers",
    profile: "Profile",
    load: dict[str, Any],
    recorded: "Recorded | None",
    budget: "TimeBudget",
    say: Callable[..., None],
) -> "tuple[Measurer, RecordedLoad | DrawnLoad, Callable[[str, float | None], None]]":
    """Returns what makes runs, what they ask, and what shows the progress with the time that is left."""
    from splittime.tune.measure import DrawnLoad, Measurer, RealRuns, RecordedLoad
    from splittime.tune.notebook import Notebook

    goal = _goal(given.slo, profile)
    asked = DrawnLoad(load) if recorded is None else RecordedLoad(recorded, __version__, num_cores())
    about = {"servers": servers.about, "load": asked.about, "goal": goal, "version": __version__, "machine": _machine()}

    def with_time(what: str, share: float | None) -> None:
        say(f"at most {budget} left: {what}", share)  # a narrow terminal cuts the end off

    runs = RealRuns(servers, asked, goal, with_time)
    return Measurer(runs, goal, Notebook(given.notebook, about)), asked, with_time


def _tuner(
    given: TuneOptions,
    servers: "Servers",
    measurer: "Measurer",
    load: "RecordedLoad | DrawnLoad",
    budget: "TimeBudget",
    say: Callable[[str, float | None], None],
) -> "Tuner":
    from splittime.plan.kept import kept_for
    from splittime.tune.tuner import Tuner

    known = servers.knobs
    for name in given.knob or ():
        if name not in known:
            hint = f"one of {', '.join(known)}"
            raise ConfigError(f"there is no knob {name!r} here", param="knob", value=name, hint=hint)
    is_ours = given.vllm is None and given.url is None
    gate = functools.partial(_refusal, given.model) if is_ours and not given.keep_numbers else None
    return Tuner(measurer, load, budget, say, gate, tuple(given.knob or known), kept_for)


def _goal(slo: str, profile: "Profile") -> "Goal":
    from splittime.bench.book.slo import parse_slo
    from splittime.tune.goal import Goal

    goal = Goal(slo=parse_slo(slo), seeks=profile.seeks)
    goal.check()
    return goal


def _machine() -> str:
    import platform

    return f"{platform.node()}, {platform.machine()}, {num_cores()} cores"


def _refusal(model: str | None, change: Mapping[str, Any]) -> str | None:
    """Returns why the quality gate refuses a change; None if it passes."""
    from splittime.lab.quality.run import Competitor, Prepared, QualityComparison, Questions

    path = str(model_source.locate(model))
    questions = Questions(length="short", tokens=QUALITY_TOKENS)
    asked = QualityComparison(Competitor(path), Competitor(path, dict(change)), questions)
    report = Prepared(asked).measure(lambda what, done, total: None)
    if report.verdict == "PASS":
        return None
    return f"quality {report.verdict}: {' '.join(report.reasons)}"


def _tell(given: TuneOptions, servers: "Servers", found: "Tuned") -> None:

    flags = flags_of(servers, found)
    if given.write_config is not None:
        write_whole(given.write_config, as_toml(servers, found).encode(), param="write_config")
        options.talk().print(f"wrote {given.write_config}", markup=False)
    if given.json:
        told = {**msgspec.structs.asdict(found), "exit_code": found.exit_code, "flags": flags}
        options.write_data(msgspec.json.encode(told))
    else:
        program = "splittime serve" if given.vllm is None else "vllm serve"
        show(found, program, flags, _goal_of(given), is_applied=given.apply)


def _goal_of(given: TuneOptions) -> "Goal":
    from splittime.tune.measure import PROFILES

    return _goal(given.slo, PROFILES[given.profile or "balanced"])


def _signed() -> Any:
    """The command, with its own flags, those of a load, and those of the engine's settings."""
    chosen = list(ENGINE_SETTINGS.values())
    own, loads = options.parameters_of(TuneOptions), load_parameters("The load")
    config = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="Settings file of the servers.")]
    config_flag = inspect.Parameter("config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=config)

    @functools.wraps(tune)
    def with_flags(**arguments: Any) -> None:
        load = load_of(arguments)
        flags = {setting.name: arguments.pop(setting.name) for setting in chosen}
        settings = settings_module.load({**flags, MODEL.name: None}, arguments.pop("config"))
        given = TuneOptions(**arguments)
        tune(given, settings, load)

    options.sign(
        with_flags, [*own, *loads, *(options.flag_of(setting) for setting in sorted(chosen, key=place_of)), config_flag]
    )
    return options.fails_clearly(with_flags, FAILED)


command = _signed()
