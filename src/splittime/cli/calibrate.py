"""`splittime calibrate [MODEL]`: what the steps of a server take, measured within a minute, for plans."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import orjson
from rich.table import Table

from splittime.assemble import model_source
from splittime.assemble.settings import ENGINE, Settings
from splittime.cli import options
from splittime.cli.progress import loading
from splittime.core.errors import ConfigError
from splittime.core.files import check_writable
from splittime.wire.target import Target

if TYPE_CHECKING:
    from splittime.bench.book.records import Arm
    from splittime.cli.progress import Say
    from splittime.plan.kept import KindOfSteps, ServerCalibration

EXAMPLES = f"""\b
Examples:
  splittime calibrate                            the packaged model
  splittime calibrate ./models/llama --quantization int8 --max-num-seqs 128
  splittime calibrate --url http://host:9000 --seconds 30 --out replica.json
  splittime plan replica.json --rate 5 --slo ttft_p99=500ms

{options.ASKING_CODES}"""
MUCH_OF_OTHERS = 0.05


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    model: options.ModelArgument = None
    url: str | None = options.flag("URL", "Measure this server instead; it must be idle.")
    seconds: float = options.flag("N", "How long to measure, about.", 60.0, min=5, max=600)
    out: Path | None = options.flag("FILE", "Write the replica to this file too.")
    api_key: str | None = options.flag("KEY", "The server's.", envvar="SPLITTIME_API_KEY")
    force: bool = options.switch("--force", "Measure a server that is at work, too.")
    json: options.JsonFlag = False


@options.with_settings("runner", "scheduler", options=CalibrateOptions)
def calibrate(settings: Settings, given: CalibrateOptions) -> None:
    """Measure what a server's steps take, and keep it for plans."""
    from splittime.bench.event_loop import sigterm_interrupts
    from splittime.plan.kept import calibration_of, check_keepable, keep
    from splittime.simulate.replica import save_replica

    if given.out is not None:
        check_writable(given.out)
    check_keepable()
    with sigterm_interrupts(), loading("starting") as say, _server(settings, given) as target:
        arms = asyncio.run(_climbed(target, given, say))
    found, facts = calibration_of(arms), arms[-1].facts
    assert facts is not None
    kept = keep(found.replica, facts)
    if given.out is not None:
        save_replica(found.replica, given.out)
    files = [path for path in (kept, given.out) if path is not None]
    _tell(found, files, given.json)


@contextmanager
def _server(settings: Settings, given: CalibrateOptions) -> Iterator[Target]:
    """Gives the server of --url, or one of our own that ends on leaving. Raises ConfigError for --url with a model or
    settings."""
    values = settings.values.items()
    asked = {name: value.value for name, value in values if name in ENGINE and value.origin != "default"}
    model = asked.pop("model", None)
    if given.url is None:
        from splittime.bench.own_server import as_typed, own_server

        model_source.locate(model, settings["load_format"])  # refuses what is no model
        flags = [one for name, value in asked.items() for one in as_typed(name, value)]
        with own_server([*([model] if model is not None else []), *flags]) as target:
            yield msgspec.structs.replace(target, api_key=given.api_key)
        return
    if model is not None or asked:
        name = "model" if model is not None else next(iter(asked))
        hint = "Leave it out, or leave --url out."
        raise ConfigError(f"a server that is up has its {name} already", param=name, hint=hint)
    yield Target(url=given.url, api_key=given.api_key)


async def _climbed(target: Target, given: CalibrateOptions, say: "Say") -> "list[Arm]":
    from splittime.bench.stairs import climb

    def on_stair(rows: int, done: int, total: int) -> None:
        say(f"{rows} requests at a time", done / total)

    return await climb(target, given.seconds, is_forced=given.force, on_stair=on_stair)


def _tell(found: "ServerCalibration", files: list[Path], as_json: bool) -> None:
    if as_json:
        told = msgspec.to_builtins(found) | {"files": [str(path) for path in files]}
        options.write_data(orjson.dumps(told))
        return
    options.wide().print(_table(found.errors))
    console = options.talk()
    console.print(f"{found.num_steps:,} steps in {found.seconds:.0f} s; errors are those of held-out steps")
    if found.others_share > MUCH_OF_OTHERS:
        words = f"warning: {found.others_share:.0%} of the rows were of others' requests"
        console.print(words, style="yellow", markup=False)
    for path in files:
        console.print(f"wrote {path}", markup=False)


def _table(errors: "list[KindOfSteps]") -> Table:
    table = Table(box=None, padding=(0, 1))
    table.add_column("tokens in a step", no_wrap=True)
    for name in ("steps", "median ms", "median\nerror", "of this,\nnoise", "mean\nerror"):
        table.add_column(name, justify="right", no_wrap=True)
    for error in errors:
        table.add_row(
            error.kind,
            f"{error.num_steps:,}",
            f"{error.taken_ns / 1e6:.3g}",
            f"{error.median_relative:.1%}",
            f"{error.machine_relative:.1%}",
            f"{error.mean_relative:+.1%}",
        )
    return table
