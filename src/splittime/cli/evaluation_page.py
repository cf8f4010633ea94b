"""The page of `gateway evaluate --html`: worth against cost, for each way to decide, beside chance and both models."""

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
