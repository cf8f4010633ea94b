"""`splittime gateway evaluate`: what routing by difficulty costs and is worth on prompts that were judged."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.table import Table

from splittime.cli.options import EXIT_CODES, JsonFlag, fails_clearly, talk, wide, write_data
from splittime.core.errors import ConfigError
from splittime.core.whole_file import write_whole

if TYPE_CHECKING:
    from splittime.gateway.config import DifficultyConfig, GatewayConfig
    from splittime.gateway.routing.evaluate import CurvePoint, Evaluation, MeanFigure

EXAMPLES = f"""\b
Examples:
  splittime gateway evaluate gateway.toml judged.jsonl
  splittime gateway evaluate gateway.toml judged.jsonl --html curves.html
  splittime gateway evaluate gateway.toml judged.jsonl --large-cost 10 --json

{EXIT_CODES}"""

EACH_IS_CHECKED = "by tokens every prompt is checked; the gateway checks what goes to the small model by its text"


@fails_clearly
def evaluate(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The gateway's config, in TOML.")],
    data: Annotated[Path, typer.Argument(metavar="DATA", help="JSONL: prompt, small_right and large_right a line.")],
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="The [[difficulty]], if there are several.")
    ] = None,
    small_cost: Annotated[
        float, typer.Option("--small-cost", metavar="X", min=0, help="Of a request, if the data have none.")
    ] = 0.1,
    large_cost: Annotated[
        float, typer.Option("--large-cost", metavar="X", min=0, help="Of a request, if the data have none.")
    ] = 1.0,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Draw the curves, as a page.")] = None,
    json: JsonFlag = False,
) -> None:
    """Say what a [[difficulty]] costs and is worth on judged prompts, beside always-small, always-large and chance."""
    from splittime.cli.evaluation_page import render_evaluation
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
        hint = f"name one with --model: {', '.join(names)}" if names else "docs/guides/gateway-difficulty.md has one"
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
    table = Table("", "threshold", "small", "cost", "worth", "gain over chance", box=None, pad_edge=False)
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
