"""`splittime bench search URL --slo TERMS`: the highest rate that keeps an SLO. `bench sweep URL --rates 1,2,4`.

Each run is a `bench run` of its own, with prompts of its own; a rate that is run again gets another seed. `--out` keeps
every run. Exit codes: 0 done, 1 no rate was found (or nothing could be run), 2 a usage error, 3 VOID: the client was at
fault and the search ended there.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from splittime.cli.bench_flags import time_ns, with_load_flags
from splittime.cli.bench_run import VOID
from splittime.cli.options import JsonFlag
from splittime.core.errors import ConfigError
from splittime.loadgen.target import Target

NOT_FOUND = 1
USUAL = {"duration_s": 30.0, "warm_up_s": 5.0, "cool_down_s": 5.0}  # of each run of a rate, where not said
SEARCH_EXAMPLES = """\b
Examples:
  splittime bench search http://127.0.0.1:8000 --slo ttft_p99=300ms,tpot_p99=40ms
  splittime bench search URL --slo ttft_p99=1s --low 2 --high 64 --duration 60s --confirmations 3 --out runs/
"""
SWEEP_EXAMPLES = """\b
Examples:
  splittime bench sweep http://127.0.0.1:8000 --rates 1,2,4,8 --duration 30s
  splittime bench sweep URL --concurrencies 1,4,16,64 --num-requests 200 --slo tpot_p99=40ms --out runs/
"""

Url = Annotated[str, typer.Argument(metavar="URL", help="The server, with or without /v1.")]
Out = Annotated[Path | None, typer.Option(metavar="FOLDER", help="Keep each run there, as JSON.")]
Pause = Annotated[str, typer.Option(metavar="TIME", help="Between two runs.")]
Timeout = Annotated[str, typer.Option(metavar="TIME", help="Of each request.")]
Model = Annotated[str | None, typer.Option(metavar="NAME", help="Default: the server's first.")]
ApiKey = Annotated[str | None, typer.Option(metavar="KEY", envvar="SPLITTIME_API_KEY", help="The server's.")]
VocabSize = Annotated[int | None, typer.Option(metavar="N", help="Of the model, where the server does not say.")]
MaxModelLen = Annotated[int | None, typer.Option(metavar="N", help="Prompt and answer, where the server does not say.")]


@with_load_flags("rate", "rate_end", "ramp_s", "concurrency", "cool_down_requests")
def search(
    load: dict[str, Any],
    url: Url,
    slo: Annotated[str, typer.Option(metavar="TERMS", help="To be kept: ttft_p99=300ms,tpot_p99=40ms.")],
    low: Annotated[float, typer.Option(metavar="RATE", help="Requests a second to begin with.")] = 1.0,
    high: Annotated[float, typer.Option(metavar="RATE", help="Look no higher.")] = 1000.0,
    resolution: Annotated[float, typer.Option(metavar="SHARE", help="How close both ends are to come.")] = 0.05,
    confirmations: Annotated[int, typer.Option(metavar="N", help="Runs that must agree at each end.")] = 2,
    max_runs: Annotated[int, typer.Option(metavar="N", help="Give up after so many.")] = 40,
    pause: Pause = "1s",
    timeout: Timeout = "10m",
    out: Out = None,
    model: Model = None,
    api_key: ApiKey = None,
    vocab_size: VocabSize = None,
    max_model_len: MaxModelLen = None,
    json: JsonFlag = False,
) -> None:
    """Find the highest rate that keeps an SLO, as an interval with both ends confirmed."""
    from splittime.cli.bench_levels import Runs, Setup, print_trials
    from splittime.loadgen.event_loop import run_loop
    from splittime.loadgen.search import Found, highest_rate
    from splittime.loadgen.slo import parse_slo

    setup = Setup(
        target=Target(url=url, api_key=api_key, model=model),
        load=_with_usual(load),
        level="rate",
        slo=parse_slo(slo),
        pause_s=time_ns(pause, "--pause") / 1e9,
        timeout_s=time_ns(timeout, "--timeout") / 1e9,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        out=out,
        stop_on_saturation=True,
    )

    async def work() -> Found:
        runs = await Runs.on(setup)
        options = {"low": low, "high": high, "resolution": resolution}
        return await highest_rate(
            runs.measure, runs.keeps, **options, confirmations=confirmations, max_runs=max_runs, on_trial=runs.tell
        )

    found = run_loop(work())
    print_trials(setup, found.trials, found, found.sentence, json)
    is_found = found.kept is not None and found.stopped is None
    raise typer.Exit(VOID if found.is_void else 0 if is_found else NOT_FOUND)


@with_load_flags("rate", "concurrency")
def sweep(
    load: dict[str, Any],
    url: Url,
    rates: Annotated[str | None, typer.Option(metavar="A,B,...", help="Requests a second, one run each.")] = None,
    concurrencies: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Closed loop: workers, one run each.")
    ] = None,
    slo: Annotated[str | None, typer.Option(metavar="TERMS", help="Say of each run whether it was kept.")] = None,
    pause: Pause = "1s",
    timeout: Timeout = "10m",
    out: Out = None,
    model: Model = None,
    api_key: ApiKey = None,
    vocab_size: VocabSize = None,
    max_model_len: MaxModelLen = None,
    json: JsonFlag = False,
) -> None:
    """Run one load at several rates or concurrencies and show them side by side."""
    from splittime.cli.bench_levels import Runs, Setup, print_trials
    from splittime.loadgen.event_loop import run_loop
    from splittime.loadgen.search import Swept
    from splittime.loadgen.search import sweep as run_sweep
    from splittime.loadgen.slo import parse_slo

    level, levels = _levels(rates, concurrencies)
    setup = Setup(
        target=Target(url=url, api_key=api_key, model=model),
        load=_with_usual(load) if level == "rate" else load,
        level=level,
        slo=parse_slo(slo) if slo is not None else {},
        pause_s=time_ns(pause, "--pause") / 1e9,
        timeout_s=time_ns(timeout, "--timeout") / 1e9,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        out=out,
    )

    async def work() -> Swept:
        runs = await Runs.on(setup)
        return await run_sweep(runs.measure, levels, runs.keeps, on_trial=runs.tell)

    found = run_loop(work())
    print_trials(setup, found.trials, found, found.stopped or "", json)
    raise typer.Exit(VOID if found.is_void else 0)


def _with_usual(load: dict[str, Any]) -> dict[str, Any]:
    """A window and what is around it, for whoever says nothing of them."""
    says_length = {"duration_s", "num_requests"} & set(load)
    usual = {name: value for name, value in USUAL.items() if name != "duration_s" or not says_length}
    if "warm_up_requests" in load:
        usual.pop("warm_up_s")
    return {**usual, **load}


def _levels(rates: str | None, concurrencies: str | None) -> tuple[str, list[float]]:
    if (rates is None) == (concurrencies is None):
        raise ConfigError("a sweep is over rates or over concurrencies", param="rates", hint="Give --rates 1,2,4.")
    name, text = ("rate", rates) if rates is not None else ("concurrency", concurrencies)
    try:
        levels = [float(one) for one in (text or "").split(",")]
    except ValueError:
        levels = []
    is_whole = name == "rate" or all(one == round(one) for one in levels)
    if not levels or not is_whole or not all(0 < one < float("inf") for one in levels):
        hint = "Give numbers above 0 with commas between; concurrencies are whole."
        raise ConfigError(f"{text!r} are no levels to sweep over", param=name, value=text, hint=hint)
    return name, levels
