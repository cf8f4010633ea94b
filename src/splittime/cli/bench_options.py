"""The flags of `bench run`, `search` and `sweep` beside those of the load: a dataclass each, what they share in one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from splittime.cli.bench_flags import time_ns
from splittime.cli.options import JsonFlag
from splittime.loadgen.target import Target

DefinitionsFlag = Annotated[bool, typer.Option("--definitions", help="Say under the tables what each word means.")]


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Of every command that sends a load."""

    model: Annotated[str | None, typer.Option(metavar="NAME", help="Model to ask for. Default: the first it has.")] = (
        None
    )
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY", envvar="SPLITTIME_API_KEY", help="The server's key, if it wants one.")
    ] = None
    timeout: Annotated[str, typer.Option(metavar="TIME", help="Give a request up after so long.")] = "10m"
    vocab_size: Annotated[
        int | None, typer.Option(metavar="N", help="Of the server's model, where the server does not say.")
    ] = None
    max_model_len: Annotated[
        int | None, typer.Option(metavar="N", help="Most tokens of prompt and answer, where the server does not say.")
    ] = None
    json: JsonFlag = False

    @property
    def timeout_s(self) -> float:
        return time_ns(self.timeout, "--timeout") / 1e9

    def target(self, url: str) -> Target:
        return Target(url=url if "://" in url else f"http://{url}", api_key=self.api_key, model=self.model)


@dataclass(frozen=True, kw_only=True)
class RunOptions(ServerOptions):
    url: Annotated[
        list[str], typer.Argument(metavar="URL...", help="The server, with or without /v1; two: both in one run.")
    ]
    schedule: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Send this saved schedule again instead of drawing one.")
    ] = None
    save_schedule: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write down what is sent and when, for --schedule.")
    ] = None
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write everything, every request, as JSON.")] = None
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a line for each request.")] = None
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report as one page.")] = None
    slo: Annotated[
        str | None, typer.Option(metavar="TERMS", help="Exit with 1 if missed: ttft_p99=300ms,tpot_p99=40ms.")
    ] = None
    goodput: Annotated[
        str | None, typer.Option(metavar="TERMS", help="What makes a request good: ttft=300ms,tpot=40ms.")
    ] = None
    label: Annotated[str, typer.Option(metavar="TEXT", help="The run's name in reports.")] = ""
    definitions: DefinitionsFlag = False
    max_in_flight: Annotated[
        int | None, typer.Option(metavar="N", help="Hold requests back beyond so many; the wait counts as lateness.")
    ] = None
    stop_on_saturation: Annotated[
        bool,
        typer.Option(
            "--stop-on-saturation", help="End the run once a test says that the server is overloaded (open loop only)."
        ),
    ] = False
    interleave: Annotated[
        str, typer.Option(metavar="paired|blocks", help="Two servers: together, or by turns, if on one machine.")
    ] = "paired"
    block: Annotated[str, typer.Option(metavar="TIME", help="Length of a turn with --interleave blocks.")] = "10s"
    workers: Annotated[
        int | None, typer.Option(metavar="N", help="Processes that send. Default: as many as needed.")
    ] = None
    sample_interval: Annotated[str, typer.Option(metavar="TIME", help="Between looks at the server's metrics.")] = (
        "500ms"
    )
    salt: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Put before all prompts: no run finds another's. Default: random."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class SeriesOptions(ServerOptions):
    """Of the commands that make one run after another."""

    url: Annotated[str, typer.Argument(metavar="URL", help="The server, with or without /v1.")]
    pause: Annotated[str, typer.Option(metavar="TIME", help="Between two runs.")] = "1s"
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Keep each run there, as JSON.")] = None


@dataclass(frozen=True, kw_only=True)
class SearchOptions(SeriesOptions):
    slo: Annotated[str, typer.Option(metavar="TERMS", help="To be kept: ttft_p99=300ms,tpot_p99=40ms.")]
    low: Annotated[float, typer.Option(metavar="RATE", help="Requests a second to begin with.")] = 1.0
    high: Annotated[float, typer.Option(metavar="RATE", help="Look no higher.")] = 1000.0
    resolution: Annotated[
        float, typer.Option(metavar="SHARE", help="Stop when both ends are so close; 0.05 is 5%.")
    ] = 0.05
    confirmations: Annotated[int, typer.Option(metavar="N", help="Runs that must agree at each end.")] = 2
    max_runs: Annotated[int, typer.Option(metavar="N", help="Give up after so many.")] = 40


@dataclass(frozen=True, kw_only=True)
class SweepOptions(SeriesOptions):
    rates: Annotated[str | None, typer.Option(metavar="A,B,...", help="Requests a second, one run each.")] = None
    concurrencies: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="So many requests at a time, one run each.")
    ] = None
    slo: Annotated[str | None, typer.Option(metavar="TERMS", help="Say of each run whether it was kept.")] = None
