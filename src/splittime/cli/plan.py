"""`splittime plan SOURCE... --slo TERMS --rate PEAK`: how many servers a load needs, and what they cost."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import orjson
from rich.table import Column, Table
from rich.text import Text

from splittime import __version__
from splittime.cli.bench_flags import NOT_PLANNED, TERMS_HELP, time_ns, with_load_flags
from splittime.cli.options import JsonFlag, argument, flag, talk, wide, write_data
from splittime.cli.progress import loading
from splittime.core.errors import ConfigError, EngineError
from splittime.core.this_process import num_cores
from splittime.present.tables import FittingTable, Sentence

if TYPE_CHECKING:
    from splittime.cli.progress import Say
    from splittime.plan.kept import KeptCalibration
    from splittime.plan.worksheet import PlanTerms, Sheet
    from splittime.simulate.data_sheet import Device
    from splittime.simulate.replica import AnyReplica

CODES = (
    "Exit codes: 0 done, 1 failed; or no rate keeps the SLO, 2 a usage or settings error, 4 nobody answers, 130 Ctrl-C."
)
EXAMPLES = f"""\b
Examples:
  splittime plan run.sqlite --slo ttft_p99=500ms,itl_p99=50ms --rate 40
  splittime plan run.sqlite --slo ttft_p99=1s --rate 40 --price 2.5 --growth 2
  splittime plan run.sqlite --slo e2e_p90=5s --trace azure.csv --price 2.5
  splittime plan one.json light.json,heavy.json --slo ttft_p99=1s --rate 40
  splittime plan --device H100 --device L40S --model-config my-model \\
    --slo ttft_p99=1s,itl_p99=50ms --rate 40 --max-num-seqs 256

{CODES}"""

THIS = "cpu"


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    source: list[str] | None = argument(
        "SOURCE...",
        "A ledger of one server, what calibrate wrote, a calibrated server's URL, or runs of bench against "
        "one server (light.json,heavy.json). Several sources are compared. Default: this machine's calibration.",
    )
    slo: str = flag("TERMS", f"To be kept: ttft_p99=300ms,itl_p99=50ms. Terms: {TERMS_HELP}.", ...)
    device: list[str] | None = flag(
        "NAME",
        "Plan from the data sheet of this device; or NAME:GB:GB/S:TFLOPS, your own figures; or cpu, for this "
        "machine's, measured now. No server is measured. May be given again.",
    )
    model_config: Path | None = flag("PATH", "With --device: the model's folder or config.json.")
    precision: str | None = flag("NAME", "With --device: the weights, as bfloat16, fp8, int8, int4. Default: bfloat16.")
    max_num_seqs: int | None = flag("N", "Slots, instead of the server's own.")
    max_num_batched_tokens: int | None = flag("N", "Tokens of a step, instead of the server's own.")
    num_blocks: int | None = flag("N", "Blocks of the KV cache, instead of the server's own.")
    price: list[float] | None = flag("X", "Price of one server for an hour, or one for each source.", min=0)
    currency: str = flag("TEXT", "Unit of the price.", "$")
    growth: float = flag("X", "Plan for X times the peak.", 1.0, min=0.01)
    regions: int = flag("N", "Each has its part of the load, and a spare.", 1, min=1)
    start_up: str | None = flag("TIME", "Time until a new server serves. Default: as the ledger's server.")
    draws: int = flag("N", "Models that are searched, for the interval.", 8, min=1, max=200)
    out: Path | None = flag("FILE", "Write one HTML page with plots; replaces a former plan only.")
    csv: Path | None = flag("FILE", "Write the lines as CSV; replaces a former plan only.")
    json: JsonFlag = False

    @property
    def settings(self) -> dict[str, Any]:
        """What was given instead of the servers' own settings."""
        given = {name: getattr(self, name) for name in ("max_num_seqs", "max_num_batched_tokens", "num_blocks")}
        return {name: value for name, value in given.items() if value is not None}


@with_load_flags(PlanOptions, *NOT_PLANNED, panel="The load of all servers together")
def plan(given: PlanOptions, load: dict[str, Any]) -> None:
    """Say how many servers a load needs within an SLO, what breaks first, and what it costs."""
    from splittime.bench.book.slo import check_terms, parse_slo
    from splittime.plan.page import require_replaceable, write_csv, write_page

    slo = parse_slo(given.slo)
    check_terms(slo)
    for name, path in (("out", given.out), ("csv", given.csv)):
        if path is not None:
            require_replaceable(path, name)
    terms = _terms(given, load)
    sources = _sources(given)
    with loading("reading what the servers did") as say:
        replicas = _replicas(given, sources)
        priced = zip(replicas, _prices(given, len(replicas)), strict=True)
        priced_terms = [(one, msgspec.structs.replace(terms, price=price).validate()) for one, price in priced]
        sheets = [_sheet(*one, given.draws, load, slo, its_terms, say) for one, its_terms in priced_terms]
    if given.out is not None:
        write_page(sheets, slo, given.out, _about(load, terms))
    if given.csv is not None:
        write_csv(sheets, given.csv)
    if given.json:
        write_data(orjson.dumps({"plans": msgspec.to_builtins(sheets)}))
    else:
        _print(sheets)
    for path in (given.out, given.csv):
        if path is not None:
            talk().print(f"wrote {path}", markup=False)


def _about(load: dict[str, Any], terms: "PlanTerms") -> str:
    """Returns what a page is about, for who finds it later."""
    from splittime.plan.page import load_words

    return f"For: {load_words(load, terms)}; made {time.strftime('%Y-%m-%d')}, splittime {__version__}."


def _sources(given: PlanOptions) -> "list[tuple[str, str | KeptCalibration]]":
    """Returns each source as it was named, with its file, or with its calibration if it is a URL. Raises ConfigError if
    there is nothing to plan with."""
    if given.device and given.model_config is None:
        raise ConfigError("--device needs the model", param="model_config", hint="Give --model-config FOLDER.")
    for name in ("model_config", "precision"):
        value = getattr(given, name)
        if value is not None and not given.device:
            words = f"--{name.replace('_', '-')} is for --device"
            raise ConfigError(words, param=name, value=str(value), hint="Give --device H100, say.")
    from splittime.cli.kept import kept_calibration
    from splittime.wire.target import is_url

    if not given.source and not given.device:
        kept = kept_calibration()
        return [(str(kept.path), kept)]
    return [(source, kept_calibration(source) if is_url(source) else source) for source in given.source or ()]


def _replicas(
    given: PlanOptions, sources: "Sequence[tuple[str, str | KeptCalibration]]"
) -> "list[tuple[str, AnyReplica]]":
    """Returns the servers to plan with, each with what it is called."""
    from splittime.plan.sources import replica_in
    from splittime.wire.target import is_url

    told = [words for words, _ in sources]
    names = [words if is_url(words) else Path(words).name for words in told]
    labels = names if len(set(names)) == len(set(told)) else told
    found: list[tuple[str, AnyReplica]] = []
    for label, (_, source) in zip(labels, sources, strict=True):
        if isinstance(source, str):
            found.append((label, replica_in(source, given.settings)))
        else:
            found.append((label, source.replica.with_settings(given.settings)))
    if given.model_config is not None:
        found += _devices(given, given.model_config)
    numbered = _numbered([label for label, _ in found])
    return list(zip(numbered, [replica for _, replica in found], strict=True))


def _numbered(labels: Sequence[str]) -> list[str]:
    """Returns the labels, with a number behind those that are there already: `epyc`, `epyc 2`."""
    seen: Counter[str] = Counter()
    told = []
    for label in labels:
        seen[label] += 1
        told.append(f"{label} {seen[label]}" if seen[label] > 1 else label)
    return told


def _devices(given: PlanOptions, config: Path) -> "list[tuple[str, AnyReplica]]":
    """Returns the servers of data sheets, each with its device's name. config: the model's."""
    from splittime.plan.sources import replica_of_device
    from splittime.runner.config_sizes import sizes_of_config  # torch: two seconds

    found: list[tuple[str, AnyReplica]] = []
    for name in given.device or ():
        sizes = sizes_of_config(config, (given.precision or "bfloat16").lower(), is_card=name.lower() != THIS)
        about = (sizes.cost, sizes.weights_bytes, sizes.max_model_len, sizes.precision, given.settings)
        kv_formula = _kv_formula(config, sizes.cost.kv_bytes_per_token)
        device = _this_processor(sizes.precision) if name.lower() == THIS else name
        found.append((name.partition(":")[0], replica_of_device(device, *about, kv_formula)))
    return found


def _kv_formula(path: Path, token_bytes: int) -> str:
    """Returns how the KV bytes of a token come from the model's config."""
    from splittime.kernels.layer import kv_groups
    from splittime.models.config import load_config, parse_config
    from splittime.models.fields import read_json

    model = load_config(path) if path.is_dir() else parse_config(read_json(path))
    groups = kv_groups(model.layers)
    numbers = sum(2 * len(each.layers) * each.num_kv_heads * each.head_dim for each in groups)
    told = [f"{len(each.layers)} layers x {each.num_kv_heads} KV heads x {each.head_dim}" for each in groups]
    return f"2 x ({' + '.join(told)}) x {token_bytes // numbers} bytes of a number"


def _this_processor(precision: str) -> "Device":
    """Returns this machine's processor. Raises EngineError where it cannot be measured."""
    from splittime.core.this_process import free_memory_bytes
    from splittime.runner.ceilings import measured_processor
    from splittime.simulate.data_sheet import processor

    found = measured_processor(precision)
    if not found.read_bytes_per_s or not found.operations_per_s:
        hint = "Give its figures: --device NAME:GB:GB/S:TFLOPS."
        raise EngineError(f"{found.cpu} could not be measured with {precision}", hint=hint)
    rates = (found.read_bytes_per_s, found.operations_per_s)
    return processor(found.cpu, free_memory_bytes(), *rates, f"measured now, {found.threads} threads")


def _prices(given: PlanOptions, count: int) -> "list[float | None]":
    prices = given.price or []
    if len(prices) not in (0, 1, count):
        words = f"{len(prices)} prices for {count} server{'s' if count != 1 else ''}"
        raise ConfigError(words, param="price", value=len(prices), hint="Give one for all, or one for each.")
    return list(prices) if len(prices) == count else [*prices, None][:1] * count


def _terms(given: PlanOptions, load: dict[str, Any]) -> "PlanTerms":
    """Returns what the servers are for, but for their price."""
    from splittime.plan.load import rate_of
    from splittime.plan.worksheet import PlanTerms

    return PlanTerms(
        peak=rate_of(load),
        currency=given.currency,
        growth=given.growth,
        regions=given.regions,
        start_up_s=None if given.start_up is None else time_ns(given.start_up, "--start-up") / 1e9,
    ).validate()


def _sheet(
    label: str,
    replica: "AnyReplica",
    draws: int,
    load: dict[str, Any],
    slo: dict[str, float],
    terms: "PlanTerms",
    say: "Say",
) -> "Sheet":
    from splittime.plan.capacity import capacity
    from splittime.plan.worksheet import worksheet

    found = capacity(
        replica, load, slo, draws, processes=num_cores(), say=lambda words, share: say(f"{label}: {words}", share)
    )
    return worksheet(label, replica, found, terms)


def _print(sheets: "list[Sheet]") -> None:
    wide().print(_alone(sheets[0]) if len(sheets) == 1 else _beside(sheets))
    for sheet in sheets:
        talk().print(f"{sheet.label}: {sheet.source}", markup=False)
        for note in sheet.notes:
            talk().print(Sentence(note, indent=2, head="  "))


def _alone(sheet: "Sheet") -> FittingTable:
    """Returns a plan's lines with their formulas beside them, or under them where there is no room."""
    from splittime.plan.page import shown

    with_room, without = (Table(box=None, padding=(0, 1), show_header=False) for _ in range(2))
    for line in sheet.lines:
        with_room.add_row(line.name, shown(line), Text(line.formula, style="dim"))
        without.add_row(line.name, Text(f"{shown(line)}\n").append(line.formula, style="dim"))
    return FittingTable(with_room, without)


def _beside(sheets: "list[Sheet]") -> Table:
    from splittime.plan.page import line_names, line_of, shown

    table = Table("", *(Column(sheet.label, overflow="fold") for sheet in sheets), box=None, padding=(0, 1))
    for name in line_names(sheets):
        lines = [line_of(sheet, name) for sheet in sheets]
        table.add_row(name, *("-" if line is None else shown(line) for line in lines))
    return table
