"""`splittime gateway evaluate`: what routing by difficulty costs and is worth on prompts that were judged."""

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.table import Column, Table

from splittime.cli.options import EXIT_CODES, JsonFlag, argument, fails_clearly, flag, talk, wide, write_data
from splittime.core.errors import ConfigError
from splittime.core.whole_file import write_whole

if TYPE_CHECKING:
    from splittime.gateway.config import DifficultyConfig, GatewayConfig
    from splittime.gateway.routing.evaluate import CurvePoint, Evaluation, MeanFigure
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from markupsafe import Markup

from splittime.present.plot import Plot, plot_styles
from splittime.present.scale import Scale, from_zero, number

if TYPE_CHECKING:
    from splittime.gateway.routing.evaluate import CurvePoint, Evaluation


ROOM = 0.12  # of what the points span, beside them
LEFT_FROM = 0.7  # of the x axis, from which on a point's name stands left of it
_STYLES = """
:root { background: var(--page); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 0 auto; padding: 2rem 1.25rem; }
p { max-width: 46rem; }
.under { text-align: center; color: var(--dim); font-size: 0.8rem; margin: 0.2rem 0 1.5rem 3.6rem; max-width: none; }
.c-text { --ink: var(--prefill); }
.c-tokens { --ink: var(--batch-slots); }
.c-chance { --ink: var(--edge); }
.c-ends { --ink: var(--text); }
.room .line.c-chance { stroke-dasharray: 4 3; }
.room .dots { stroke-width: 7px; opacity: 1; }
"""


def render_evaluation(found: "Evaluation") -> str:
    """Returns the page, whole. The same evaluation gives the same bytes; nothing is fetched."""
    page = Markup(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><title>{0}</title><style>{1}</style></head>'
        "<body><h1>{0}</h1>\n<p>{2}</p>\n{3}\n<p class=under>cost of a request</p></body></html>\n"
    )
    title = f"What {found.model} costs and is worth"
    return str(page.format(title, Markup(plot_styles() + _STYLES), _words(found), curve_plot(found)))


def _words(found: "Evaluation") -> str:
    words = f"{found.prompts} judged prompts, costs {found.costs}. Upright lines are intervals of 95 %."
    if found.in_labels:
        words += f" {found.in_labels} of the prompts stand in the labels too: the threshold was chosen with them."
    return f"{words} What lies above the broken line is worth more than a draw that costs as much."


def curve_plot(found: "Evaluation") -> Plot:
    """Returns the drawing of both curves, with the points that the config chose."""
    ends, curves = [found.always_small, found.always_large], list(_curves(found))
    points = [*ends, found.best, *(point for _, curve, chosen in curves for point in (*curve, *chosen))]
    low, high = min(one.worth.low for one in points), max(one.worth.high for one in points)
    room = ROOM * (high - low) or 0.01
    across = from_zero([one.cost.value for one in points])
    described = f"Worth against cost: {', '.join(name for name, _, _ in curves)}, chance, and the two models alone."
    plot = Plot(across, Scale(low - room, high + room), title="worth of an answer", described=described, height_px=420)
    plot.x_axis(number).y_axis(number)
    plot.line(*_places(ends), "chance")
    for name, curve, chosen in curves:
        _draw(plot, curve, name)
        plot.line(*_places(curve), name)
        plot.key(name, f"by {'its text' if name == 'text' else 'first tokens'}")
        for point in chosen:
            plot.upright(point.cost.value, name)
            _draw(plot, [point], name)
            _name(plot, point, f"chosen by {name}", name)
    plot.key("chance", "chance")
    _draw(plot, [*ends, found.best], "ends")
    for point, name in zip((*ends, found.best), ("always small", "always large", "best possible"), strict=True):
        _name(plot, point, name, "ends")
    return plot


def _curves(found: "Evaluation") -> Iterator[tuple[str, "Sequence[CurvePoint]", "Sequence[CurvePoint]"]]:
    """Yields name, points and the chosen point of each curve that there is."""
    for name, curve, chosen in (
        ("text", found.by_text, found.chosen),
        ("tokens", found.by_first_tokens, found.chosen_check),
    ):
        if curve:
            yield name, curve, () if chosen is None else (chosen,)


def _draw(plot: Plot, points: "Sequence[CurvePoint]", ink: str) -> None:
    xs, ys = _places(points)
    plot.spans(xs, [one.worth.low for one in points], [one.worth.high for one in points], ink)
    plot.dots(xs, ys, ink)


def _name(plot: Plot, point: "CurvePoint", name: str, ink: str) -> None:
    is_right = float(plot.x.share(point.cost.value)) < LEFT_FROM
    plot.note(name, point.cost.value, point.worth.value, ink, "right below" if is_right else "left up")


def _places(points: "Sequence[CurvePoint]") -> tuple[list[float], list[float]]:
    return [one.cost.value for one in points], [one.worth.value for one in points]


EXAMPLES = f"""\b
Examples:
  splittime gateway evaluate gateway.toml judged.jsonl
  splittime gateway evaluate gateway.toml judged.jsonl --html curves.html
  splittime gateway evaluate gateway.toml judged.jsonl --large-cost 10 --json

{EXIT_CODES}"""

EACH_IS_CHECKED = "by tokens every prompt is checked; the gateway checks what goes to the small model by its text"


@fails_clearly
def evaluate(
    config: Path = argument("CONFIG", "The gateway's config, in TOML.", ...),
    data: Path = argument("DATA", "JSONL: prompt, small_right and large_right a line.", ...),
    model: str | None = flag("NAME", "The [[difficulty]], if there are several."),
    small_cost: float = flag("X", "Of a request, if the data have none.", 0.1, min=0),
    large_cost: float = flag("X", "Of a request, if the data have none.", 1.0, min=0),
    html: Path | None = flag("FILE", "Draw the curves, as a page."),
    json: JsonFlag = False,
) -> None:
    """Say what a [[difficulty]] costs and is worth on judged prompts, beside always-small, always-large and chance."""
    from splittime.gateway.config_file import read_config
    from splittime.gateway.routing.evaluate import Costs
    from splittime.gateway.routing.evaluate import evaluate as evaluated
    from splittime.gateway.routing.first_tokens import bounds_of
    from splittime.gateway.routing.judge import judges_of
    from splittime.gateway.routing.labels import read_labels
    from splittime.stats.paired import means

    told = read_config(config)
    route = _route(told, model)
    prompts = read_labels(data, "DATA").prompts
    judge, bound = judges_of(told).get(route.model), bounds_of(told).get(route.model)
    found = evaluated(route, judge, prompts, Costs(small_cost, large_cost), means, bound)
    if html is not None:
        write_whole(html, render_evaluation(found).encode(), param="html")
    if json:
        write_data(msgspec.json.encode(found))
        return
    _tell(found)


def _route(config: "GatewayConfig", model: str | None) -> "DifficultyConfig":
    names = [route.model for route in config.difficulty]
    if model is None and len(names) != 1:
        hint = f"name one with --model: {', '.join(names)}" if names else "give the config a [[difficulty]]"
        raise ConfigError(f"the config has {len(names)} [[difficulty]]", param="model", hint=hint)
    found = next((route for route in config.difficulty if model in (None, route.model)), None)
    if found is None:
        raise ConfigError(
            f"no [[difficulty]] is {model!r}", param="model", value=model, hint=f"there are {', '.join(names)}"
        )
    return found


def _tell(found: "Evaluation") -> None:
    talk().print(f"{found.model}: {found.prompts} prompts, costs {found.costs}; intervals of 95 %", markup=False)
    if found.in_labels:
        words = f"{found.in_labels} of them stand in the labels too: the threshold was chosen with them"
        talk().print(words, style="yellow", markup=False)
    heads = ("threshold", "small", "cost", "worth", "gain over chance")
    table = Table(Column("", no_wrap=True), *heads, box=None, pad_edge=False)
    for name, point in (("always small", found.always_small), ("always large", found.always_large)):
        table.add_row(name, "-", *_cells(point)[1:])
    table.add_row("best possible", "-", *_cells(found.best)[1:])
    _add_curve(table, "text", found.by_text, found.chosen)
    _add_curve(table, "tokens", found.by_first_tokens, found.chosen_check)
    wide().print(table)
    _tell_chosen(found)
    if found.by_text and found.by_first_tokens:
        print(EACH_IS_CHECKED)
    if found.misroutes is not None:
        wrong = found.misroutes
        print(f"large for nothing: {_share(wrong.wasted)} of requests, {_figure(wrong.wasted_cost)} a request")
        print(f"small, and worse: {_share(wrong.lost)} of requests, {_figure(wrong.lost_worth)} of worth a request")


def _tell_chosen(found: "Evaluation") -> None:
    """What a threshold was chosen for, and what the bound on escalations makes of the one by tokens."""
    for name, expected in (("text", found.expected), ("tokens", found.expected_check)):
        if expected is not None:
            low, mean = f"{expected.quality_low:.3f}", f"{expected.quality:.3f}"
            print(
                f"by {name}, {expected.prompts} labels promise a worth of {low} at the least (95 %), {mean} on the mean"
            )
    check, most = found.chosen_check, found.at_most
    if check is not None and most is not None and 1 - check.share_small > most:
        print(
            f"by tokens {1 - check.share_small:.0%} would be asked anew, and at_most lets {most:.0%}: the rest is kept"
        )


def _add_curve(table: Table, name: str, points: "tuple[CurvePoint, ...]", chosen: "CurvePoint | None") -> None:
    for point in points:
        table.add_row(name, *_cells(point))
    if chosen is not None:
        table.add_row(f"chosen by {name}", *_cells(chosen), style="bold")


def _cells(point: "CurvePoint") -> tuple[str, ...]:
    figures = (_figure(point.cost), _figure(point.worth), _figure(point.gain))
    return f"{point.threshold:.4g}", f"{point.share_small:.0%}", *figures


def _figure(figure: "MeanFigure") -> str:
    return f"{figure.value:.3f} ({figure.low:.3f}, {figure.high:.3f})"


def _share(figure: "MeanFigure") -> str:
    return f"{figure.value:.1%} ({figure.low:.1%} to {figure.high:.1%})"
