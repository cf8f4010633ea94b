"""The flags of `bench run`, `search` and `sweep`.

Those of a load are made from `LoadSpec`: one for each field, its help the field's own description.

A field in seconds or milliseconds takes a time with a unit (`--duration 90s`, `--slow-reader-delay 50ms`); a bare
number is in the field's own unit. The field's whole name with its unit is a name of the flag too (`--duration-s`).
The others are the fields of a dataclass for each command (`options.with_options`), what they share in one.

What every `bench` command exits with: one meaning for each number, chosen in one place.

Scripts read nothing else, so a run that tells nothing must not look like one that went well: one in which no request
was answered is a failure, with or without an SLO, and so is one that Ctrl-C cut short. `exit_code` chooses,
`MEANINGS` says what each means of which command, in its help and in docs/reference.
"""

import functools
import inspect
import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from splittime.bench.spec import LoadSpec
from splittime.cli.options import (
    INTERRUPTED,
    NOBODY,
    JsonFlag,
    argument,
    fails_clearly,
    flag,
    parameters_of,
    rare,
    sign,
    switch,
)
from splittime.cli.panels import RARELY
from splittime.core.errors import ConfigError
from splittime.wire.target import Target

DONE, SHORT, UNCLEAR, VOID = 0, 1, 2, 3
LATE = "VOID: the client was late, so the figures are about it"
CUT_SHORT = "Ctrl-C; what was measured until then is kept"
ASKED = {UNCLEAR: "a usage error", VOID: LATE, NOBODY: "no server is there", INTERRUPTED: CUT_SHORT}
MEANINGS = {
    "": {
        DONE: "done; compare: BETTER or EQUIVALENT",
        SHORT: "the SLO is missed, or no answers; compare: WORSE",
        **ASKED,
        UNCLEAR: "a usage error; compare: INCONCLUSIVE",
    },
    "run": {DONE: "done; with --slo: it was kept", SHORT: "the SLO is missed, or nobody was answered", **ASKED},
    "search": {DONE: "the highest rate was found", SHORT: "no rate keeps the SLO, or the server went away", **ASKED},
    "sweep": {
        DONE: "all levels were run; a missed SLO is a result, and no failure",
        SHORT: "at some level nobody was answered",
        **ASKED,
    },
    "compare": {
        DONE: "BETTER or EQUIVALENT; with --slo: B kept it",
        SHORT: "WORSE, or B missed the SLO",
        UNCLEAR: "INCONCLUSIVE (also where a run is VOID), or a usage error",
    },
    "report": {
        DONE: "shown; with --slo: it was kept",
        SHORT: "with --slo: it is missed, or nobody was answered",
        UNCLEAR: "a usage error, or no run in the file",
        VOID: "with --slo: the run is VOID",
    },
    "books": {DONE: "shown", UNCLEAR: "a usage error, no run in the file, or no such request in both books"},
    "mock-server": {UNCLEAR: "a usage error, or the port is taken", INTERRUPTED: "Ctrl-C"},
}
NS_PER_UNIT = {"ns": 1, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9, "m": 60e9, "min": 60e9, "h": 3600e9}
MAX_NS = 10_000 * 3600e9
TERMS_HELP = "ttft, tpot, itl, e2e, each with _p50 _p90 _p95 _p99 or _mean; goodput, error_rate"
_TIME = re.compile(r"([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*([a-zµ]*)")
_UNITS = {"_s": 1e9, "_ms": 1e6}
NOT_SIMULATED = (  # phases, texts, and what a simulated client does not do
    *("rate_end", "ramp_s", "cool_down_s", "cool_down_requests", "warm_up_s", "warm_up_requests"),
    *("slow_reader_share", "slow_reader_delay_ms", "prompt_form", "dataset", "speed_up"),
)
NOT_PLANNED = (  # a plan looks for the rate, of requests: turns make it one of sessions
    *("concurrency", "num_requests", "turns", "turn_input_tokens", "think_s", "expected_ttft_ms", "expected_tpot_ms"),
    *NOT_SIMULATED,
)
COMMON_LOAD = {
    *("rate", "arrivals", "concurrency", "num_requests", "duration_s", "seed", "dataset", "input_tokens"),
    *("output_tokens", "prefix_share", "trace", "turns"),
}
FIELDS: Any = msgspec.inspect.type_info(LoadSpec).fields  # type: ignore[attr-defined]


def codes(command: str = "") -> str:
    """Part of a command's help; without a command, of the whole group."""
    return "\b\nExit codes:\n" + "".join(f"  {code:<4} {meaning}\n" for code, meaning in MEANINGS[command].items())


def exit_code(
    *, is_interrupted: bool = False, is_void: bool = False, falls_short: bool = False, is_unclear: bool = False
) -> int:
    """Returns the code of the first that holds, in this order: a void run's figures miss no SLO, an interrupted one's
    keep none."""
    if is_interrupted:
        return INTERRUPTED
    if is_void:
        return VOID
    return SHORT if falls_short else UNCLEAR if is_unclear else DONE


def time_ns(text: str, flag: str, unit: str = "s") -> int:
    """`300ms`, `5s`, `2m` in ns. Raises `ConfigError`."""
    match = _TIME.fullmatch(text.strip())
    if match is None or (match[2] or unit) not in NS_PER_UNIT:
        hint = f"for example {flag} 300ms; units are {', '.join(NS_PER_UNIT)}"
        raise ConfigError(f"{flag}: {text!r} is no time", param=flag, value=text, hint=hint)
    found_ns = float(match[1]) * NS_PER_UNIT[match[2] or unit]
    if found_ns > MAX_NS:
        limit = f"{MAX_NS / 3600e9:.0f}h"
        raise ConfigError(f"{flag}: {text!r} is too long; at most {limit}", param=flag, value=text, limit=limit)
    return round(found_ns)


def with_load_flags(
    options: type, *without: str, panel: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the flags of `options` and of a load: it is called with a value of `options`, and with what was
    given of the load, a dict of `LoadSpec`'s fields. panel: as of `load_parameters`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        flags = [*parameters_of(options), *load_parameters(panel, *without)]

        @functools.wraps(command)
        def with_load(**arguments: Any) -> None:
            load = load_of(arguments)
            command(options(**arguments), load)

        sign(with_load, flags)
        return fails_clearly(with_load)

    return decorate


def load_parameters(panel: str | None, *without: str) -> list[inspect.Parameter]:
    """Returns the flags of a load. panel: the heading under which they are listed."""
    is_turned = "turns" not in without
    return [_parameter(field, panel, is_turned) for field in FIELDS if field.name not in without]


def load_of(arguments: dict[str, Any]) -> dict[str, Any]:
    """Takes a load's flags out of a command's arguments. Returns what was given of them, by the names of `LoadSpec`."""
    given = {field.name: arguments.pop(field.name) for field in FIELDS if field.name in arguments}
    return {name: _value(name, value) for name, value in given.items() if value is not None}


def flag_names(field: str) -> list[str]:
    """`duration_s` is `--duration` and `--duration-s`."""
    whole = "--" + field.replace("_", "-")
    unit = next((unit for unit in _UNITS if field.endswith(unit)), None)
    return [whole] if unit is None else [whole.removesuffix(unit.replace("_", "-")), whole]


def _parameter(field: Any, panel: str | None, is_turned: bool) -> inspect.Parameter:
    """is_turned: there are sessions of turns, of which a rate can be."""
    kind, choices = _kind(field.name)
    names = flag_names(field.name)
    metavar: str | None = "|".join(choices) if choices else _NAMED.get(field.name, _METAVARS.get(kind, "TEXT"))
    if field.name.endswith(tuple(_UNITS)):
        kind, metavar = str, "TIME"
    if kind is bool:
        names, metavar = [f"{names[0]}/--no-{names[0][2:]}"], None
    text = _description(field) if is_turned or field.name != "rate" else "Requests a second."
    panel = panel if field.name in COMMON_LOAD else RARELY
    option = typer.Option(None, *names, help=text, metavar=metavar, show_default=False, rich_help_panel=panel)
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind | None)


_METAVARS = {int: "N", float: "X"}
_NAMED = {
    **dict.fromkeys(("dataset", "lengths_file", "trace"), "FILE"),
    **dict.fromkeys(("time_column", "input_column", "output_column"), "NAME"),
    **dict.fromkeys(("input_tokens", "output_tokens", "turn_input_tokens"), "LENGTHS"),
    "turns": "NUMBERS",
}
_HINTS = typing.get_type_hints(LoadSpec)


def _kind(name: str) -> tuple[Any, tuple[str, ...]]:
    """The type of a field without None, and what it may be, if that is a list."""
    hint = _HINTS[name]
    parts = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    kind = next(part for part in parts if part is not type(None))
    if typing.get_origin(kind) is typing.Literal:
        return str, typing.get_args(kind)
    return kind, ()


def _description(field: Any) -> str:
    text = (getattr(field.type, "extra_json_schema", None) or {}).get("description", "")
    default = field.default
    is_plain = default in (None, False, msgspec.NODEFAULT, msgspec.UNSET) or default == 0
    return text if is_plain else f"{text.rstrip('.')}. Default: {default}."


def _value(name: str, value: Any) -> Any:
    """A time in the field's own unit; where a field may also be a distribution, it is left for the field to say."""
    unit = next((unit for unit in _UNITS if name.endswith(unit)), None)
    if unit is None or not isinstance(value, str):
        return value
    kind, _ = _kind(name)
    if kind is str and not _TIME.fullmatch(value.strip()):
        return value
    number = time_ns(value, flag_names(name)[0], unit[1:]) / _UNITS[unit]
    return str(number) if kind is str else number


DefinitionsFlag = Annotated[bool, typer.Option("--definitions", help="Say under the tables what each word means.")]


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The flags of every command that sends a load."""

    model: str | None = flag("NAME", "Model to ask for. Default: the first it has.")
    api_key: str | None = flag("KEY", "The server's key, if it wants one.", envvar="SPLITTIME_API_KEY")
    timeout: str = flag("TIME", "Give a request up after so long.", "10m")
    vocab_size: int | None = rare("N", "Vocabulary size of the model, where the server does not say.")
    max_model_len: int | None = rare("N", "Most tokens of prompt and answer, where the server does not say.")
    json: JsonFlag = False

    @property
    def timeout_s(self) -> float:
        return time_ns(self.timeout, "--timeout") / 1e9

    def target(self, url: str) -> Target:
        return Target(url=url, api_key=self.api_key, model=self.model)


@dataclass(frozen=True, kw_only=True)
class BenchRunOptions(ServerOptions):
    url: list[str] = argument("URL...", "The server, with or without /v1; two: both in one run.", ...)
    schedule: Path | None = flag("FILE", "Send this saved schedule again instead of drawing one.")
    save_schedule: Path | None = flag("FILE", "Write down what is sent and when, for --schedule.")
    out: Path | None = flag("FILE", "Write everything, every request, as JSON.")
    csv: Path | None = flag("FILE", "Write a line for each request.")
    html: Path | None = flag("FILE", "Write the report as one page.")
    slo: str | None = flag("TERMS", "Exit with 1 if missed: ttft_p99=300ms,tpot_p99=40ms.")
    goodput: str | None = flag("TERMS", "What makes a request good: ttft=300ms,tpot=40ms.")
    label: str = flag("TEXT", "The run's name in reports.", "")
    definitions: DefinitionsFlag = False
    max_in_flight: int | None = rare("N", "Hold requests back beyond so many; the wait counts as lateness.")
    stop_on_saturation: bool = switch(
        "--stop-on-saturation", "End the run once a test says that the server is overloaded (open loop only)."
    )
    interleave: str = rare("paired|blocks", "Two servers: together, or by turns, if on one machine.", "paired")
    block: str = rare("TIME", "Length of a turn with --interleave blocks.", "10s")
    workers: int | None = rare("N", "Processes that send. Default: as many as needed.")
    sample_interval: str = rare("TIME", "Between looks at the server's metrics.", "500ms")
    salt: str | None = rare("TEXT", "Put before all prompts: no run finds another's. Default: random.")


@dataclass(frozen=True, kw_only=True)
class SeriesOptions(ServerOptions):
    """The flags of the commands that make one run after another."""

    url: str = argument("URL", "The server, with or without /v1.", ...)
    pause: str = flag("TIME", "Between two runs.", "1s")
    out: Path | None = flag("FOLDER", "Keep each run there, as JSON.")


@dataclass(frozen=True, kw_only=True)
class SearchOptions(SeriesOptions):
    slo: str = flag("TERMS", "To be kept: ttft_p99=300ms,tpot_p99=40ms.", ...)
    low: float = flag("RATE", "Requests a second to begin with.", 1.0)
    high: float = flag("RATE", "Look no higher.", 1000.0)
    resolution: float = flag("SHARE", "Stop when both ends are so close; 0.05 is 5%.", 0.05)
    confirmations: int = flag("N", "Runs that must agree at each end.", 2)
    max_runs: int = flag("N", "Give up after so many.", 40)


@dataclass(frozen=True, kw_only=True)
class SweepOptions(SeriesOptions):
    rates: str | None = flag("A,B,...", "Requests a second, one run each.")
    concurrencies: str | None = flag("A,B,...", "So many requests at a time, one run each.")
    slo: str | None = flag("TERMS", "Say of each run whether it was kept.")
