"""What routing by difficulty costs and is worth, on prompts for which both models' answers were judged.

A point of a curve is one threshold: the mean cost and the mean worth of the answers, and `gain`, by which that is more
than random routing of the same cost would be worth. Routing is worth having where the gain's interval is above 0. Two
curves: by the text, with the scores that the gateway would give, and by the small model's first tokens where the data
have their log-probabilities; there an unsure answer costs the small model's price and the large one's.

Scores of prompts that stand in the labels too are found without their fold; the threshold was chosen with them all the
same, so that figures of a set of its own are to be preferred. `in_labels` counts them.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from splittime.core.errors import ConfigError
from splittime.gateway.config import DifficultyConfig
from splittime.gateway.routing.difficulty import below_of
from splittime.gateway.routing.judge import ALWAYS_LARGE, ChosenThreshold, DifficultyJudge, Floats
from splittime.gateway.routing.labels import LabelledPrompt

STEPS = 10  # of a curve, each with as many prompts


class EstimatedMean(Protocol):
    """A mean and the ends of its interval (95 %)."""

    @property
    def value(self) -> float:
        """The mean."""

    @property
    def low(self) -> float:
        """The lower end."""

    @property
    def high(self) -> float:
        """The upper end."""


Means = Callable[[Floats], Sequence[EstimatedMean]]


class MeanFigure(msgspec.Struct, frozen=True):
    """A mean over the prompts, with its interval (95 %)."""

    value: float
    low: float
    high: float


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True):
    """threshold: from which on the small model's answer is had. gain: worth beyond that of random routing of the same
    cost."""

    threshold: float
    share_small: float
    cost: MeanFigure
    worth: MeanFigure
    gain: MeanFigure


class Misroutes(msgspec.Struct, frozen=True, kw_only=True):
    """Where the chosen threshold was wrong, beside a choice that knows both answers.

    wasted: the share that the large model had, and the small one had done as well; wasted_cost: what that cost a
    request. lost: the share that the small one had, and the large one had done better; lost_worth: by how much."""

    wasted: MeanFigure
    wasted_cost: MeanFigure
    lost: MeanFigure
    lost_worth: MeanFigure


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """best: with a choice that knows both answers. The chosen points are the config's; None where it has none.
    expected, expected_check: what they were chosen for, where labels chose them. at_most: of `escalate`."""

    model: str
    prompts: int
    in_labels: int
    costs: str
    always_small: CurvePoint
    always_large: CurvePoint
    best: CurvePoint
    chosen: CurvePoint | None
    misroutes: Misroutes | None
    by_text: tuple[CurvePoint, ...]
    chosen_check: CurvePoint | None
    by_first_tokens: tuple[CurvePoint, ...]
    expected: ChosenThreshold | None = None
    expected_check: ChosenThreshold | None = None
    at_most: float | None = None


class Costs(NamedTuple):
    """What a request costs where the data do not say."""

    small: float
    large: float


class JudgedPrompts:
    """The data as columns. means: of columns, with intervals from one bootstrap. Raises `ConfigError` where it lacks
    something."""

    def __init__(self, prompts: Sequence[LabelledPrompt], costs: Costs, means: Means) -> None:
        if any(one.large_right is None for one in prompts):
            hint = "evaluate needs small_right and large_right in every line"
            raise ConfigError("large_right is missing in a line", param="large_right", hint=hint)
        self._means = means
        self.small = np.array([float(one.small_right) for one in prompts])
        self.large = np.array([float(one.large_right or 0) for one in prompts])
        self.are_told = all(None not in (one.small_cost, one.large_cost) for one in prompts)
        self.small_cost = np.array([_cost(one.small_cost, costs.small, self.are_told) for one in prompts])
        self.large_cost = np.array([_cost(one.large_cost, costs.large, self.are_told) for one in prompts])

    def points(self, thresholds: Sequence[float], scores: Floats, *, both: bool = False) -> tuple[CurvePoint, ...]:
        """Returns the curve's points. both: who has the large model has paid for the small one too."""
        chosen = [scores >= threshold for threshold in thresholds]
        columns = [column for goes_small in chosen for column in self._columns(goes_small, both)]
        found = iter(self.figures(columns))
        return tuple(
            CurvePoint(
                threshold=threshold,
                share_small=float(goes_small.mean()),
                cost=next(found),
                worth=next(found),
                gain=next(found),
            )
            for threshold, goes_small in zip(thresholds, chosen, strict=True)
        )

    def figures(self, columns: Sequence[Floats]) -> list[MeanFigure]:
        if not columns:
            return []
        return [MeanFigure(one.value, one.low, one.high) for one in self._means(np.stack(columns, axis=1))]

    def misroutes(self, goes_small: np.ndarray) -> Misroutes:
        is_wasted, is_lost = ~goes_small & (self.small >= self.large), goes_small & (self.large > self.small)
        extra, worse = self.large_cost - self.small_cost, self.large - self.small
        columns = [is_wasted.astype(float), is_wasted * extra, is_lost.astype(float), is_lost * worse]
        wasted, wasted_cost, lost, lost_worth = self.figures(columns)
        return Misroutes(wasted=wasted, wasted_cost=wasted_cost, lost=lost, lost_worth=lost_worth)

    def _columns(self, goes_small: np.ndarray, both: bool) -> Iterator[Floats]:
        cost = np.where(goes_small, self.small_cost, self.large_cost + (self.small_cost if both else 0.0))
        worth = np.where(goes_small, self.small, self.large)
        yield cost
        yield worth
        yield worth - self._random(float(cost.mean()))

    def _random(self, cost: float) -> Floats:
        """Returns what each prompt is worth to routing by chance that costs as much, or all that it can cost."""
        least, most = float(self.small_cost.mean()), float(self.large_cost.mean())
        share = min(1.0, max(0.0, (cost - least) / (most - least))) if most > least else 1.0
        return self.small + share * (self.large - self.small)


def _cost(told: float | None, assumed: float, are_told: bool) -> float:
    return assumed if told is None or not are_told else told


def evaluate(
    route: DifficultyConfig,
    judge: DifficultyJudge | None,
    prompts: Sequence[LabelledPrompt],
    costs: Costs,
    means: Means,
    bound: ChosenThreshold | None = None,
) -> Evaluation:
    """Returns the evaluation of a route with its judge. bound: of its first tokens, where that was found from labels.
    Raises `ConfigError` for data that cannot tell."""
    data = JudgedPrompts(prompts, costs, means)
    texts = [one.text for one in prompts]
    all_small, all_large = data.points([0.0, 1.0], np.full(len(texts), 0.5))
    (best,) = data.points([1.0], (data.small >= data.large).astype(float))
    scores = None if judge is None else judge.fair_scores(texts)
    logprobs = _logprobs(prompts)
    if scores is None and logprobs is None:
        hint = "give the [[difficulty]] labels, or small_logprob in every line of the data"
        raise ConfigError("there is nothing to evaluate", param="labels", hint=hint)
    by_text, chosen = _curve(data, scores, None if judge is None else judge.chosen.threshold)
    checks, below = route.escalate, None if route.escalate is None else below_of(route.escalate, bound)
    by_first, checked = _curve(data, logprobs, below, both=True) if checks or scores is None else ((), None)
    return Evaluation(
        model=route.model,
        prompts=len(texts),
        in_labels=0 if judge is None else sum(judge.knows(text) for text in texts),
        costs="as the data say" if data.are_told else f"small {costs.small:g}, large {costs.large:g} a request",
        always_small=all_small,
        always_large=all_large,
        best=best,
        chosen=chosen,
        misroutes=None if chosen is None or scores is None else data.misroutes(scores >= chosen.threshold),
        by_text=by_text,
        chosen_check=checked,
        by_first_tokens=by_first,
        expected=None if judge is None else judge.chosen,
        expected_check=bound,
        at_most=None if checks is None else checks.at_most,
    )


def _logprobs(prompts: Sequence[LabelledPrompt]) -> Floats | None:
    found = [one.small_logprob for one in prompts if one.small_logprob is not None]
    return np.array(found) if len(found) == len(prompts) else None


def _curve(
    data: JudgedPrompts, scores: Floats | None, chosen: float | None, *, both: bool = False
) -> tuple[tuple[CurvePoint, ...], CurvePoint | None]:
    """Returns points from all large to all small, and the chosen one."""
    if scores is None:
        return (), None
    above = float(np.nextafter(scores.max(), np.inf)) if both else ALWAYS_LARGE
    shares = np.quantile(scores, np.linspace(1, 0, STEPS + 1)[1:], method="inverted_cdf")
    thresholds = [above, *dict.fromkeys(shares.tolist())]
    points = data.points([*thresholds, *([] if chosen is None else [chosen])], scores, both=both)
    return points[: len(thresholds)], None if chosen is None else points[-1]
