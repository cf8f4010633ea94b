"""`splittime fleet SOURCE --trace FILE --replicas N`: what many servers behind the gateway would do, on paper."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import orjson
from rich.table import Table

from splittime.cli.bench_flags import time_ns
from splittime.cli.options import EXIT_CODES, JsonFlag, argument, flag, talk, wide, with_options, write_data
from splittime.cli.progress import loading
from splittime.core.errors import ConfigError

if TYPE_CHECKING:
    from splittime.cluster.simulated.figures import FleetFigures
    from splittime.cluster.simulated.load import FleetLoadSpec
    from splittime.cluster.simulated.settings import FleetSettings
    from splittime.simulate.replica import Replica

EXAMPLES = f"""\b
Examples:
  splittime fleet one.json --trace azure.csv.gz --replicas 40 --copies 50
  splittime fleet run.sqlite --trace day.csv --speed-up 20 --replicas 8 \\
    --max-replicas 30 --warm-pool 6 --surge-at 2m
  splittime fleet --device L40S --model-config my-model --precision int8 \\
    --trace mooncake.jsonl --replicas 1000 --region eu --region us
  splittime fleet one.json --trace day.csv --replicas 40 --routing round_robin

{EXIT_CODES}"""
SHOWN_PERIODS = 20
BAR_CELLS = 10


@dataclass(frozen=True, kw_only=True)
class FleetOptions:
    source: str | None = argument(
        "SOURCE", "A ledger of one server, or what calibrate wrote. Default: this machine's calibration."
    )
    trace: Path = flag("FILE", "CSV or JSONL of arrivals and lengths, .gz or plain: what is asked.", ...)
    replicas: int = flag("N", "Servers at the begin, in all regions together.", 10)
    max_replicas: int | None = flag("N", "The most that a scaler may have. Default: as many as at the begin.")
    min_replicas: int = flag("N", "The fewest that a scaler may leave.", 1)
    scaling: str = flag(
        "tokens|waiting|none",
        "tokens: the controller of up, waiting: by requests that wait at servers alone, none: no scaling.",
        "tokens",
    )
    routing: str = flag("gateway|round_robin", "The gateway's own choice, or one after the other.", "gateway")
    affinity: bool = flag(None, "The gateway's prefix affinity, where the trace has blocks.", True)
    warm_pool: int = flag("N", "Sleeping servers beside those that serve.", 0)
    cold_start: str = flag("TIME", "Until a new server serves.", "60s")
    wake: str = flag("TIME", "Until a sleeping one serves.", "2s")
    region: list[str] | None = flag("NAME", "A region; may be given again.")
    rtt: str = flag("TIME", "Round trip between two regions.", "60ms")
    failures: float = flag("X", "How often each server fails, an hour.", 0.0)
    node_share: float = flag("X", "Of these, nodes that fall silent.", 0.3)
    speed_up: float = flag("X", "The trace's times, so much faster.", 1.0, min=0.001)
    copies: int = flag("N", "Each request so often, from other users.", 1, min=1)
    length_scale: float = flag("X", "Times every length.", 1.0, min=0.0001)
    surge_at: str | None = flag("TIME", "From then on more requests come; the reaction is told.")
    surge_times: float = flag("X", "So many times as many.", 3.0, min=1)
    surge_for: str = flag("TIME", "For so long.", "60s")
    ttft: str = flag("TIME", "A good answer begins within this.", "2s")
    tpot: str = flag("TIME", "And has a token in this, in the mean.", "100ms")
    device: str | None = flag("NAME", "Servers of the data sheet of this device, as of plan.")
    model_config: Path | None = flag("PATH", "With --device: the model's folder or config.json.")
    precision: str | None = flag("NAME", "With --device: the weights, as bfloat16 or int8.")
    price: float | None = flag("X", "Of a server for an hour.", min=0)
    seed: int = flag("N", "Of all chance.", 0)
    json: JsonFlag = False


@with_options(FleetOptions)
def fleet(given: FleetOptions) -> None:
    """Say what a fleet of servers behind the gateway would do with a trace: the gateway's routing and the controller's
    decisions, in virtual time."""
    from splittime.bench.spec import spec_of
    from splittime.bench.traces import read_trace
    from splittime.cluster.simulated.figures import figures_of
    from splittime.cluster.simulated.fleet import FleetRun
    from splittime.cluster.simulated.load import load_of_trace

    settings, spec = _settings(given), _load_spec(given)
    like = _server(given)
    trace = read_trace(spec_of({"trace": str(given.trace)}))
    load = load_of_trace(trace, spec, len(settings.regions), like.config.max_model_len, given.seed)
    with loading("simulating") as say:
        run = FleetRun(like, settings, load, given.seed)
        run.run(say)
    figures = figures_of(run, spec)
    if given.json:
        write_data(orjson.dumps(msgspec.to_builtins(figures)))
    else:
        _print(figures, given.price)
        talk().print(f"servers: {like.source}; steps as the cost model says, not measured here", markup=False)


def _settings(given: FleetOptions) -> "FleetSettings":
    """Raises ConfigError for a fleet that cannot be."""
    from splittime.cluster.scaling import ScaleSettings
    from splittime.cluster.simulated.settings import FailureSettings, FleetSettings, StartTimes

    scale = {"min_replicas": given.min_replicas, "warm_pool": given.warm_pool}
    scale["max_replicas"] = given.replicas if given.max_replicas is None else given.max_replicas
    cold_s, wake_s, ttft_s, tpot_s, rtt_s = (
        time_ns(getattr(given, name), f"--{name.replace('_', '-')}") / 1e9
        for name in ("cold_start", "wake", "ttft", "tpot", "rtt")
    )
    told = {
        "replicas": given.replicas,
        "regions": tuple(given.region or ["here"]),
        "routing": given.routing,
        "affinity": given.affinity,
        "scaling": given.scaling,
        "scale": scale,
        "rtt_ms": rtt_s * 1e3,
        "starts": msgspec.to_builtins(StartTimes(cold_s=cold_s, wake_s=wake_s)),
        "failures": msgspec.to_builtins(FailureSettings(per_replica_hour=given.failures, node_share=given.node_share)),
        "ttft_s": ttft_s,
        "tpot_s": tpot_s,
    }
    try:
        msgspec.convert(scale, ScaleSettings)
        return msgspec.convert(told, FleetSettings).validate()
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"no such fleet: {error}", param="fleet", hint="splittime fleet -h says what there is"
        ) from None


def _load_spec(given: FleetOptions) -> "FleetLoadSpec":
    from splittime.cluster.simulated.fleet import FILL_S
    from splittime.cluster.simulated.load import FleetLoadSpec

    surge_at_s = None if given.surge_at is None else time_ns(given.surge_at, "--surge-at") / 1e9
    if surge_at_s is not None and surge_at_s < FILL_S:
        hint = f"give a later one: a fleet begins empty, and for {FILL_S:g} s nobody scales it"
        message = f"--surge-at {given.surge_at} is before the fleet has filled"
        raise ConfigError(message, param="surge_at", value=given.surge_at, limit=FILL_S, hint=hint)
    return FleetLoadSpec(
        speed_up=given.speed_up,
        copies=given.copies,
        length_scale=given.length_scale,
        surge_at_s=surge_at_s,
        surge_times=given.surge_times,
        surge_s=time_ns(given.surge_for, "--surge-for") / 1e9,
    )


def _server(given: FleetOptions) -> "Replica":
    """Returns the server that all are like. Raises ConfigError where there is none, and for another engine's."""
    from splittime.cli.kept import kept_calibration
    from splittime.plan.sources import replica_in, replica_of_device
    from splittime.simulate.replica import Replica

    if (given.device is None) != (given.model_config is None):
        raise ConfigError("--device and --model-config go together", param="device", hint="Give both, or a SOURCE.")
    if given.device is not None and given.model_config is not None:
        from splittime.runner.config_sizes import sizes_of_config  # torch: two seconds

        sizes = sizes_of_config(given.model_config, (given.precision or "bfloat16").lower())
        return replica_of_device(
            given.device, sizes.cost, sizes.weights_bytes, sizes.max_model_len, sizes.precision, {}
        )
    found = kept_calibration().replica if given.source is None else replica_in(given.source, {})
    if not isinstance(found, Replica):
        hint = "Name the ledger of a splittime server."
        raise ConfigError("only servers of our own can be a fleet's", param="source", value=given.source, hint=hint)
    return found


def _print(figures: "FleetFigures", price: float | None) -> None:
    told = Table(box=None, padding=(0, 1), show_header=False)
    for name, value in _lines(figures, price):
        told.add_row(name, value)
    wide().print(told)
    wide().print(_over_time(figures))


def _lines(figures: "FleetFigures", price: float | None) -> list[tuple[str, str]]:
    endings = ", ".join(f"{count:,} {ending}" for ending, count in sorted(figures.endings.items()))
    left_out = f"; {figures.too_long:,} too long were left out" if figures.too_long else ""
    cost = "" if price is None else f", at {price:g} an hour {figures.replica_hours * price:,.2f}"
    lines = [
        ("requests", f"{figures.requests:,}: {endings}{left_out}"),
        ("good answers", f"{figures.good:.2%} of all that came"),
        ("first token, ms", _percentiles(figures.ttft_ms)),
        ("per token, ms", _percentiles(figures.tpot_ms)),
        ("whole request, ms", _percentiles(figures.e2e_ms)),
        ("servers", f"{figures.replica_hours:,.2f} hours{cost}; asleep {figures.asleep_hours:,.2f} hours"),
        ("a server's capacity", f"{figures.capacity_tokens:,} tokens running and waiting"),
    ]
    if any(figures.failures):
        words = "{} processes and {} nodes; {:,} requests tried again, of these {:,} streams resumed"
        lines.append(("failures", words.format(*figures.failures, figures.retried, figures.resumed)))
    if figures.cached:
        lines.append(("prompt tokens in caches", f"{figures.cached:.1%}"))
    if (reaction := figures.reaction) is not None:
        decided, ready = ("never" if s is None else f"{s:.1f} s" for s in (reaction.decided_s, reaction.ready_s))
        words = f"decided after {decided}, a server more after {ready}, good again after {reaction.recovered_s:.0f} s"
        lines.append(("surge", words))
    return lines


def _percentiles(times_ms: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:,.0f}" for name, value in times_ms.items()) or "-"


def _over_time(figures: "FleetFigures") -> Table:
    """Returns the fleet over time: a row for each part of the run, with a bar of its servers."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    for name in ("from", "requests/s", "good", "ready", "starting", "asleep", "running", "waiting", "held"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    each = max(1, -(-len(figures.periods) // SHOWN_PERIODS))
    most = max((period.ready for period in figures.periods), default=1) or 1
    lasts_s = figures.periods[1].at_s - figures.periods[0].at_s if len(figures.periods) > 1 else 1.0
    for at in range(0, len(figures.periods), each):
        some = figures.periods[at : at + each]
        last, came = some[-1], sum(period.requests for period in some)
        good = sum((period.good or 0.0) * period.requests for period in some) / came if came else None
        cells = [f"{some[0].at_s:,.0f} s", f"{came / lasts_s / len(some):,.1f}", "-" if good is None else f"{good:.0%}"]
        cells += [f"{getattr(last, name):,}" for name in ("ready", "starting", "asleep", "running", "waiting", "held")]
        table.add_row(*cells, "█" * round(last.ready / most * BAR_CELLS))
    return table
