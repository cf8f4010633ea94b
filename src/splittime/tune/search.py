"""The search in the simulator: one change at a time from the settings that a server has.

Each predicted knob's values are simulated once, with the load that the real engine will be given. Where a knob gains,
its best value is improved: further in the same direction as long as that gains more, then between the values tried. The
best few changes are simulated again and again, with other coefficients of the cost model in other hours, each draw with
and without the change: what does not gain more than `WORTH_IT` in most draws is no finalist. Nor is what may lose,
unless the SLO is missed anyway: then measuring decides.
"""

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from splittime.bench.schedule import Schedule
from splittime.core.errors import ConfigError
from splittime.plan.judged import run_of
from splittime.plan.load import requests_of_schedule
from splittime.simulate.change import Change
from splittime.simulate.cost import OutOfRange
from splittime.simulate.draws import hours
from splittime.simulate.replica import AnyReplica
from splittime.tune.goal import WORTH_IT, Goal, Score, best_of, gain, score_of
from splittime.tune.knobs import KNOBS, Knob, with_its_needs, words

DRAWS = 7
FINALISTS = 2
MOST_STEPS = 4
FINE = (0.71, 1.41)

Say = Callable[[str, float | None], None]


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """What a change is predicted to do. gain: the logarithm of a ratio (`goal.gain`), the median of the draws, with the
    interval that leaves out the lowest and the highest. before, after: of the likeliest model."""

    change: dict[str, Any]
    before: Score
    after: Score
    gain: float
    low: float
    high: float


class Forecaster:
    """Simulates one load on one server, with whatever change. is_missed: real runs miss the SLO, so a change has to
    gain slack, also where the simulation of the present settings just keeps it."""

    def __init__(self, replica: AnyReplica, schedule: Schedule, goal: Goal, is_missed: bool = False) -> None:
        self._replica, self._goal, self.is_missed = replica.steady(), goal, is_missed
        self._requests = requests_of_schedule(schedule, replica)
        last_ns = max(1, schedule.requests[-1].at_ns or 1)
        self._warm_up = min(0.9, (schedule.measured_from_ns or 0) / last_ns)
        self._known: dict[str, Score] = {}

    @property
    def now(self) -> dict[str, Any]:
        """Returns the settings as they are, by name."""
        return {**self._replica.settings, **msgspec.to_builtins(self._replica.config)}

    def score(self, change: Mapping[str, Any]) -> Score:
        """Returns what the likeliest model says. Raises ConfigError for a change that cannot be."""
        name = words(change)
        if name not in self._known:
            self._known[name] = self._run(self._replica, change, 0)
        return self._known[name]

    def gain(self, before: Score, after: Score) -> float:
        return gain(before, after, self.is_missed)

    def drawn_gains(self, change: Mapping[str, Any], draws: int) -> list[float]:
        """Returns the change's gain in each of so many draws, in rising order."""
        rng = random.Random(0)
        found = []
        for number, factor in enumerate(hours(draws, self._replica.costs.errors.drift, rng)):
            drawn = self._replica.drawn(factor, rng)
            found.append(self.gain(self._run(drawn, {}, number), self._run(drawn, change, number)))
        return sorted(found)

    def _run(self, replica: AnyReplica, change: Mapping[str, Any], seed: int) -> Score:
        books = replica.run(self._requests, Change(dict(change)), seed)
        return score_of(run_of(books, self._goal.slo, self._warm_up), self._goal)


def finalists(
    forecaster: Forecaster, say: Say, names: Sequence[str] | None = None, more: Mapping[str, Any] | None = None
) -> list[Forecast]:
    """Returns the changes that are predicted to gain, the best first, one of each knob and at most `FINALISTS`. names:
    of the knobs that may be turned; None: all. Where the SLO is missed, what gains only by the likeliest model comes
    last: a run tells more than a doubt. more: a value to try besides, by knob. Raises what the simulation raises
    of the settings as they are, and OutOfRange if all that gains has steps in other hours that nobody has recorded."""
    before = forecaster.score({})
    chosen = [knob for knob in KNOBS.values() if knob.is_predicted and (names is None or knob.name in names)]
    best: dict[str, dict[str, Any]] = {}
    for place, knob in enumerate(chosen):
        say(f"simulating {knob.name}", place / len(chosen))
        values = knob.values(forecaster.now)
        if more is not None and knob.name in more:
            values.append(more[knob.name])
        found = _best_of_knob(forecaster, knob, values, before)
        if found is not None:
            best[words(found)] = found
    order = best_of({name: forecaster.score(change) for name, change in best.items()})
    drawn = _drawn(forecaster, [best[name] for name in order[: 2 * FINALISTS]], before, say)
    if before.keeps and not forecaster.is_missed:
        return [one for one in drawn if one.gain >= WORTH_IT and one.low > 0][:FINALISTS]
    return sorted(drawn, key=lambda one: (one.gain < WORTH_IT, one.low <= 0))[:FINALISTS]


def _best_of_knob(forecaster: Forecaster, knob: Knob, values: Sequence[Any], before: Score) -> dict[str, Any] | None:
    """Returns the change of this knob that gains most; None if none gains enough."""
    now = forecaster.now
    tried = {value: with_its_needs(knob.name, value, now) for value in values}
    scores = {str(value): score for value, change in tried.items() if (score := _score(forecaster, change))}
    order = best_of(scores)
    if not order or forecaster.gain(before, scores[order[0]]) < WORTH_IT:
        return None
    value = next(value for value in tried if str(value) == order[0])
    if isinstance(value, int) and not isinstance(value, bool):
        value = _climbed(forecaster, knob, value)
    return with_its_needs(knob.name, value, now)


def _climbed(forecaster: Forecaster, knob: Knob, value: int) -> int:
    """Returns a better value than this one, if there is: twice as far in the same direction, again and again, and then
    between."""
    now = forecaster.now
    up = value > (now[knob.name] or now["max_num_batched_tokens"])
    for _ in range(MOST_STEPS):
        further = _best_value(forecaster, knob, [value, value * 2 if up else max(1, value // 2)])
        if further == value:
            break
        value = further
    return _best_value(forecaster, knob, [value, *(max(1, round(value * ratio)) for ratio in FINE)])


def _best_value(forecaster: Forecaster, knob: Knob, values: Sequence[int]) -> int:
    """Returns the best; of equals the first."""
    scores = {value: _score(forecaster, with_its_needs(knob.name, value, forecaster.now)) for value in values}
    best = values[0]
    for value, score in scores.items():
        current = scores[best]
        if score is not None and (current is None or best_of({"new": score, "old": current})[0] == "new"):
            best = value if current is None or _is_more(forecaster, current, score) else best
    return best


def _is_more(forecaster: Forecaster, current: Score, score: Score) -> bool:
    return forecaster.gain(current, score) > WORTH_IT or (score.keeps and not current.keeps)


def _score(forecaster: Forecaster, change: Mapping[str, Any]) -> Score | None:
    """Returns None for a change that cannot be."""
    try:
        return forecaster.score(change)
    except ConfigError:
        return None


def _drawn(forecaster: Forecaster, changes: Sequence[dict[str, Any]], before: Score, say: Say) -> list[Forecast]:
    """Returns what other hours make of these changes, without those whose steps nobody has recorded. Raises OutOfRange
    if there are such changes and no others."""
    found: list[Forecast] = []
    left_out: OutOfRange | None = None
    for place, change in enumerate(changes):
        say(f"simulating {words(change)} {DRAWS} times", place / len(changes))
        try:
            gains = forecaster.drawn_gains(change, DRAWS)
        except OutOfRange as error:
            say(f"{words(change)} is left out: {error.info.message}", None)
            left_out = error
            continue
        after, middle = forecaster.score(change), statistics.median(gains)
        found.append(Forecast(change=change, before=before, after=after, gain=middle, low=gains[1], high=gains[-2]))
    if left_out is not None and not found:
        raise left_out
    return found
