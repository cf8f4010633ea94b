"""A plan as a file: one HTML page with plots, or a CSV of its lines."""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from splittime.bench.book.metrics import RATES, SHARES
from splittime.core.errors import ConfigError
from splittime.core.files import check_writable, write_whole
from splittime.plan.worksheet import PlanTerms, Sheet, SheetLine, money
from splittime.present.plot import Plot, Scale, duration, fitting, number, plot_styles, share

COLUMNS = ("server", "source", "name", "value", "low", "high", "unit", "formula")
OWN = {"out": b"<title>splittime plan</title>", "csv": ",".join(COLUMNS).encode()}  # near the begin of such a file
BEGIN_BYTES = 1024


def require_replaceable(path: Path, param: str) -> None:
    """Raises ConfigError for a file that cannot be written, and for one that is there and is no former plan."""
    check_writable(path, param)
    if not path.exists():
        return
    with path.open("rb") as file:
        begin = file.read(BEGIN_BYTES)
    if begin and OWN[param] not in begin:
        words = f"{path} is there already, and is no former plan"
        raise ConfigError(words, param=param, value=str(path), hint="Name another file, or move this one away.")


def write_page(sheets: Sequence[Sheet], slo: Mapping[str, float], path: Path, about: str = "") -> None:
    """Write whole or not at all. about: as of `render_page`. Raises `ConfigError` where it cannot be written."""
    write_whole(path, render_page(sheets, slo, about).encode("utf-8", "replace"), param="out")


def load_words(load: Mapping[str, Any], terms: PlanTerms) -> str:
    """`200 requests/s x 1.5, 3 regions, poisson, 64 + 32 tokens`. load: the fields of `LoadSpec` that were given."""
    left = dict(load)
    rate, trace = left.pop("rate", None), left.get("trace")
    grown = f" x {terms.growth:g}" if terms.growth != 1 else ""
    words = [f"{rate or terms.peak:g} requests/s{grown}" if rate or terms.peak else "one server, no rate given"]
    words += [f"{terms.regions} regions"] if terms.regions > 1 else []
    words.append(left.pop("arrivals", None) or ("the trace's own times" if trace and not rate else "poisson"))
    if not trace and "lengths_file" not in left:
        told = {name: left.pop(name, None) for name in ("input_tokens", "output_tokens")}
        words += [" + ".join(length or "its own" for length in told.values()) + " tokens"] if any(told.values()) else []
    return ", ".join([*words, *(f"{name} {value}" for name, value in left.items())])


def render_page(sheets: Sequence[Sheet], slo: Mapping[str, float], about: str = "") -> str:
    """Returns the page. The same plan gives the same bytes; nothing is fetched. about: the load, the day, the
    version."""
    assets = files("splittime.plan") / "assets"
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    styles = plot_styles() + (assets / "plan.css").read_text("utf-8")
    return environment.from_string((assets / "plan.html").read_text("utf-8")).render(
        sheets=[(sheet, _term_plots(sheet)) for sheet in sheets],
        kept=", ".join(f"{name} {_axis(name)(limit)}" for name, limit in slo.items()),
        about=about,
        names=line_names(sheets),
        line_of=line_of,
        shown=shown,
        styles=Markup(styles),
    )


def write_csv(sheets: Sequence[Sheet], path: Path) -> None:
    """Write whole or not at all. Raises `ConfigError` where it cannot be written."""
    file = io.StringIO(newline="")
    rows = csv.writer(file, lineterminator="\n")
    rows.writerow(COLUMNS)
    for sheet in sheets:
        for line in sheet.lines:
            rows.writerow(
                [sheet.label, sheet.source, line.name, line.value, line.low, line.high, line.unit, line.formula]
            )
    write_whole(path, file.getvalue().encode("utf-8", "replace"), param="csv")


def line_names(sheets: Sequence[Sheet]) -> list[str]:
    """Returns the names of all lines, in their order."""
    return list(dict.fromkeys(line.name for sheet in sheets for line in sheet.lines))


def line_of(sheet: Sheet, name: str) -> SheetLine | None:
    return next((line for line in sheet.lines if line.name == name), None)


def shown(line: SheetLine) -> str:
    """Returns a line's value with its unit and interval, for people."""
    if isinstance(line.value, str):
        return line.value
    told = money if line.is_money else _digits
    words = f"{told(line.value)} {line.unit}".rstrip()
    if line.low is None or line.high is None or line.low == line.high:
        return words
    return f"{words} ({told(line.low)} to {told(line.high)})"


def _digits(value: float) -> str:
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _term_plots(sheet: Sheet) -> list[Plot]:
    """Draws what is judged: limits of each request are one term, goodput, and the error rate is always among them."""
    return [_term_plot(sheet, term.name, term.limit) for term in sheet.capacity.likeliest.trials[0].terms]


def _term_plot(sheet: Sheet, name: str, limit: float) -> Plot:
    """Draws a term of the SLO against the rate, with its limit and the knee."""
    told = [(trial.rate, trial.term(name).value) for trial in sheet.capacity.likeliest.trials]
    known = [(rate, value) for rate, value in told if value is not None]
    label = _axis(name)
    rates, values = [rate for rate, _ in known], [value for _, value in known]
    described = f"{name} at {len(known)} simulated rates; the knee lies from {_knee(sheet)} requests a second."
    plot = Plot(_across(rates), fitting([*values, limit]), title=f"{name}, by requests a second", described=described)
    plot.x_axis(number).y_axis(label).band(*sheet.capacity.knee, "cool")
    plot.line(rates, values, "response")
    plot.dots(rates, values, "response")
    plot.across(limit, "bad")
    plot.key("response", "simulated")
    plot.key("bad", f"limit, {label(limit)}")
    plot.key("cool", f"knee, {_knee(sheet)}")
    return plot


def _axis(name: str) -> Callable[[float], str]:
    """Returns what writes a value of this term."""
    return share if name in SHARES else number if name in RATES else duration


def _knee(sheet: Sheet) -> str:
    return " to ".join(f"{rate:.3g}" for rate in sheet.capacity.knee)


def _across(rates: Sequence[float]) -> Scale:
    return Scale(min(rates) * 0.95, max(rates) * 1.05, is_log=True)
