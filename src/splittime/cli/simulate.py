"""`splittime simulate LEDGER`: what a change would have done to the requests of a ledger file."""

import functools
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import orjson
import typer
from rich.table import Table

from splittime.assemble import settings as settings_module
from splittime.cli import options
from splittime.cli.bench_flags import NOT_SIMULATED, load_of, load_parameters
from splittime.cli.kept import kept_calibration
from splittime.cli.progress import loading
from splittime.core.errors import ConfigError
from splittime.core.this_process import num_cores
from splittime.simulate.change import SIMULATED, UNSIMULATED, Change, PredictedFigure, in_blocks, require_simulated
from splittime.wire.target import is_url

if TYPE_CHECKING:
    from splittime.simulate.recorded import Recorded
    from splittime.simulate.what_if import Prediction, ServedLoad

EXAMPLES = f"""\b
Examples:
  splittime simulate run.sqlite --max-num-seqs 32      and 32 slots?
  splittime simulate run.sqlite --speed 1.5            and half as much again?
  splittime simulate run.sqlite --num-blocks 400 --policy priority
  splittime simulate run.sqlite --speed 2 --out twice.sqlite
  splittime simulate run.sqlite --rate 40 --input-tokens lognormal:500:1
  splittime simulate run.sqlite --concurrency 32 --num-requests 400
  splittime simulate run.sqlite --trace mooncake.jsonl --length-scale 0.05
  splittime simulate run.sqlite                        how well does it do?
  splittime simulate run.sqlite --check                the same decisions?
  splittime simulate --rate 40 --input-tokens 500      of what was calibrated

{options.ASKING_CODES} --check: 1 if they differ."""

THOUSANDS = 100_000  # from here on they are told in thousands
MOST_CHARS = 160  # of what was decided
WORDS = {
    "ttft": "first token",
    "itl": "token gap",
    "e2e": "request",
    "queue": "in the queue",
    "output_tokens_per_s": "output tokens/s",
    "refused": "refused",
    "preemptions": "preemptions",
    "mean_running": "requests in a step",
    "steps": "steps",
}


def simulate(
    ledger: str | None = options.argument(
        "LEDGER",
        "A ledger file (splittime serve --ledger-file); for another load also what calibrate wrote, or a "
        "calibrated server's URL. Default: this machine's calibration.",
    ),
    num_blocks: int | None = options.flag("N", "Blocks of the KV cache.", min=1),
    long_prefill_token_threshold: int | None = options.flag(
        "N", "Tokens of a long prompt in a step, of vLLM's ledgers alone.", min=0
    ),
    speed: float = options.flag("X", "Requests come X times as fast.", 1.0, min=0.01, max=100),
    draws: int = options.flag("N", "Simulations, for the interval.", 20, min=1, max=1000),
    check: bool = options.switch("--check", "Replay the recorded step times: are all decisions the same?"),
    out: Path | None = options.flag("FILE", "Keep one simulation as a ledger: for doctor, explain."),
    json: options.JsonFlag = False,
    **settings: Any,
) -> None:
    """Say what a change would have done to recorded requests, with the same scheduler under a virtual clock; or to the
    load that is described."""
    from splittime.simulate.recorded import require_new

    load = load_of(settings)
    own = {"num_blocks": num_blocks, "long_prefill_token_threshold": long_prefill_token_threshold}
    given = {name: value for name, value in {**settings, **own}.items() if value is not None}
    change = Change(given, speed)
    require_simulated(given)
    _require_possible(change, load, is_check=check, is_kept=out is not None)
    if out is not None:
        require_new(out)
    recorded = _recorded_in(ledger)
    if check:
        raise typer.Exit(_check(recorded, json))
    served = _of_replica(ledger, load) if recorded is None else _of_ledger(recorded, load)
    _tell_lengths(load, served)
    change = Change(_in_blocks(given, served.facts.settings), speed)
    prediction = _predicted(served, change, draws, out)
    if json:
        options.write_data(orjson.dumps(msgspec.to_builtins(prediction)))
    else:
        _print(prediction)


def _in_blocks(given: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Returns what is simulated of the settings, and says what is not known of it."""
    found = in_blocks(given, now)
    if "kv_cache_dtype" in given:
        told = f"{found['num_blocks']:,} blocks for {now['num_blocks']:,} {now['kv_cache_dtype']} ones"
        options.talk().print(
            f"kv_cache_dtype {given['kv_cache_dtype']}: {told}; steps as quick as recorded", markup=False
        )
    return found


def _require_possible(change: Change, load: dict[str, Any], is_check: bool, is_kept: bool) -> None:
    """Raises ConfigError for flags that exclude each other, before anything is read."""
    if is_check and (str(change) or load or is_kept):
        hint = "Leave --check out to simulate a change, or the change to check."
        raise ConfigError("--check replays what was, and takes no change and no --out", param="check", hint=hint)
    if change.speed != 1 and "concurrency" in load:
        hint = "Give --concurrency alone, or --rate."
        raise ConfigError("a closed loop comes as fast as it is answered", param="speed", value=change.speed, hint=hint)


def _recorded_in(source: str | None) -> "Recorded | None":
    """Returns the ledger of a file; None for a calibration's file, for a URL, and for nothing."""
    from splittime.simulate.recorded import is_ledger, read_ledger

    if source is None or is_url(source) or (source.endswith(".json") and not is_ledger(Path(source))):
        return None
    return read_ledger(source)


def _of_ledger(recorded: "Recorded", load: dict[str, Any]) -> "ServedLoad":
    from splittime.attach.simulators import simulator_of
    from splittime.plan.load import requests_for
    from splittime.simulate.what_if import recorded_load

    others = functools.partial(requests_for, load) if load else None
    return recorded_load(recorded, others, simulator_of(recorded.facts).to_replica)


def _tell_lengths(load: dict[str, Any], served: "ServedLoad") -> None:
    from splittime.plan.load import lengths_words

    words = lengths_words(load, served.replica) if load else ""
    if words:
        options.talk().print(f"lengths: {words}", markup=False)


def _of_replica(source: str | None, load: dict[str, Any]) -> "ServedLoad":
    """Returns a calibrated server with the load that is described. source: the calibration's file, or the URL of a
    server for which one is kept; None: this machine's. Raises ConfigError without a load."""
    from splittime.plan.load import requests_for
    from splittime.simulate.replica import load_replica
    from splittime.simulate.what_if import ServedLoad

    replica = load_replica(Path(source)) if source is not None and not is_url(source) else None
    if not load:
        hint = "Name a ledger (serve --ledger-file FILE), or a load: --rate 20 --input-tokens 64 --output-tokens 32."
        what = "no ledger is named" if source is None else f"{source} has no requests"
        raise ConfigError(f"{what}: there is nothing to simulate", param="ledger", hint=hint)
    replica = replica or kept_calibration(source).replica
    return ServedLoad(replica, requests_for(load, replica), replica.facts, {})


def _predicted(served: "ServedLoad", change: Change, draws: int, out: Path | None) -> "Prediction":
    """Returns the prediction. out: where one simulation is kept."""
    from splittime.simulate.what_if import predict_of, write_simulated  # scipy: half a second

    with loading("simulating") as say:
        prediction = predict_of(
            served,
            change,
            draws,
            on_draw=lambda number: say(f"simulation {number} of {draws}", number / draws),
            processes=num_cores(),
        )
    if out is not None:
        write_simulated(served, change, out)
    return prediction


def _check(recorded: "Recorded | None", as_json: bool) -> int:
    """Returns the exit code. Raises ConfigError where there is no ledger."""
    from splittime.attach.simulators import simulator_of

    if recorded is None:
        hint = "Name a ledger file: splittime serve --ledger-file FILE."
        raise ConfigError("a calibration has no decisions to check", param="check", hint=hint)
    divergence = simulator_of(recorded.facts).replay(recorded)
    if as_json:
        told = {"steps": len(recorded.steps), "divergence": None if divergence is None else divergence._asdict()}
        options.write_data(orjson.dumps(told))
    elif divergence is None:
        options.wide().print(f"All {len(recorded.steps):,} steps are decided as they were recorded.")
    else:
        was, now = (_clipped(str(value)) for value in (divergence.recorded, divergence.replayed))
        words = f"Step {divergence.step_id} is decided otherwise: {divergence.what} was {was}, now {now}"
        turned = recorded.facts.knobs_changed_ns > recorded.steps[0].begin_ns
        why = ". A knob was turned meanwhile, and a replay knows the last settings only" if turned else ""
        options.wide().print(f"{words}{why}", markup=False)
    return int(divergence is not None)


def _clipped(text: str) -> str:
    return text if len(text) <= MOST_CHARS else f"{text[:MOST_CHARS]} ..."


def _print(prediction: "Prediction") -> None:
    heads = ["recorded", "simulated"] if _is_replay(prediction) else ["simulated"]
    if str(prediction.change):
        heads += ["changed", "change"]
    table = Table(box=None, padding=(0, 1, 0, 0))
    for name in ("", *heads):
        table.add_column(name, justify="right" if name else "left", overflow="fold")
    for figure in prediction.figures:
        cells = _cells(figure, has_ends=bool(prediction.share))
        table.add_row(_name(figure.name), *(cells[name] for name in heads))
    console = options.wide()
    console.print(table)
    options.talk().print(_about(prediction), markup=False)


def _is_replay(prediction: "Prediction") -> bool:
    """Whether the requests are the recorded ones, not those of a load that was described."""
    return any(figure.recorded is not None for figure in prediction.figures)


def _cells(figure: "PredictedFigure", has_ends: bool) -> dict[str, str]:
    """Returns a figure's cells by the heads of their columns. has_ends: intervals are told, in brackets."""
    changed, change = _value(figure.after), _times(figure.ratio)
    if has_ends and figure.ratio is not None:
        changed += f" ({_value(figure.after_low)}-{_value(figure.after_high)})"
        change += f" ({_times(figure.low)[:-1]}-{_times(figure.high)[:-1]})"
    return {
        "recorded": _value(figure.recorded),
        "simulated": _value(figure.before),
        "changed": changed,
        "change": change,
    }


def _name(name: str) -> str:
    """`ttft_ms_p99` for people."""
    first, _, percent = name.partition("_ms_")
    return f"{WORDS[first]} {percent}, ms" if percent else WORDS[name]


def _times(ratio: float | None) -> str:
    if ratio is None:
        return ""
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.3g}x"


def _value(value: float | None) -> str:
    if value is None:
        return "-"
    if value >= THOUSANDS:
        return f"{value / 1000:,.0f}k"
    if value >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}" if value >= 1 else f"{value:.3f}"


def _about(prediction: "Prediction") -> str:
    change = str(prediction.change)
    lines = [f"changed: {change}" if change else "simulated: the settings as they were recorded"]
    refused = f" and {prediction.num_refused:,} refused ones, as long as others" if prediction.num_refused else ""
    if _is_replay(prediction):
        come = "; they come when they came, whatever the answers before"
    elif prediction.waits:
        come = " are drawn; each comes when an answer has ended, until the run ends"
    else:
        come = " are drawn; they come when they are meant to come"
    lines.append(f"{prediction.num_requests:,} requests{refused}{come}")
    if prediction.interval_words:
        lines.append(prediction.interval_words)
    if prediction.leaves_out_drafts:
        lines.append(
            "The server guesses tokens ahead. Nobody knows what it would guess of these requests: nothing here."
        )
    error = prediction.model.errors.median_relative
    lines.append(
        f"step times: a model of {prediction.num_steps:,} steps; the median error of held-out ones is {error:.1%}"
    )
    if prediction.miss is not None and prediction.miss.is_far:
        miss = f"{_name(prediction.miss.name).split(',')[0]} at {_times(prediction.miss.ratio)} of the recorded"
        corrected = ": the changed figures are corrected by that, and their intervals wider" if change else ""
        lines.append(f"Simulated with the settings as they were, it has {miss}{corrected}.")
    if prediction.model.unsure:
        unsure = ", ".join(prediction.model.unsure)
        lines.append(
            f"The recorded steps cannot separate the costs of {unsure}; the intervals are wider for that reason."
        )
    return "\n".join(lines)


def _signed() -> Any:
    """The command, with a flag for each setting that a simulation can change; hidden ones for the others, which are
    refused with a reason."""
    own = [one for one in inspect.signature(simulate).parameters.values() if one.name != "settings"]
    guarded = options.fails_clearly(simulate)
    of_settings = [
        options.flag_of(setting, setting.doc.help, is_hidden=setting.name in UNSIMULATED)
        for setting in settings_module.SETTINGS
        if setting.name in SIMULATED or setting.name in UNSIMULATED
    ]
    options.sign(guarded, [*own, *of_settings, *load_parameters("Another load than the recorded one", *NOT_SIMULATED)])
    return guarded


command = _signed()
