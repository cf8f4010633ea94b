"""The search in the simulator: one change at a time from the settings that a server has.

Each predicted knob's values are simulated once, with the load that the real engine will be given. Where a knob gains,
its best value is improved: further in the same direction as long as that gains more, then between the values tried. The
best few changes are simulated again and again, with other coefficients of the cost model in other hours, each draw with
and without the change: what does not gain more than `WORTH_IT` in most draws is no finalist. Nor is what may lose,
unless the SLO is missed anyway: then measuring decides. The first to be measured is what the doctor names.

What is told of a gain is where that of a run would lie, as in `simulate.what_if`: made in another hour with another
noise, and wider by what the simulation of the present settings misses of their runs.
"""

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from splittime.bench.schedule import Schedule
from splittime.core.errors import ConfigError
from splittime.plan.capacity import run_of
from splittime.plan.load import requests_of_schedule
from splittime.simulate.change import Change
from splittime.simulate.cost import OutOfRange
from splittime.simulate.draws import LATER, hours
from splittime.simulate.replica import AnyReplica
from splittime.tune.goal import WORTH_IT, Goal, Score, best_of, gain, score_of
from splittime.tune.knobs import DRAWS, KNOBS, Knob, with_its_needs, words

FINALISTS = 4
MOST_STEPS = 4
FINE = (0.71, 1.41)

Say = Callable[[str, float | None], None]


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """What a change is predicted to do. gain: the logarithm of a ratio (`goal.gain`), the median of the draws. low,
    high: where that of runs would lie, but for the lowest and the highest draw. own_low: the least that the change does
    in the very hour, but for the lowest draw. before, after: of the likeliest model."""

    change: dict[str, Any]
    before: Score
    after: Score
    gain: float
    low: float
    high: float
    own_low: float = 0.0


class DrawnGains(NamedTuple):
    """A change's gain in each draw, in rising order. own: in the same hour with the same noise. later: of a run in
    another hour, with another noise."""

    own: list[float]
    later: list[float]


class Forecaster:
    """Simulates one load on one server, with whatever change. seen: of real runs with the present settings. If they
    miss the SLO, a change has to gain slack, also where the simulation of the present settings just keeps it."""

    def __init__(self, replica: AnyReplica, schedule: Schedule, goal: Goal, seen: Score) -> None:
        self._replica, self._goal, self._seen = replica.steady(), goal, seen
        self.is_missed = not seen.keeps
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

    @property
    def miss(self) -> float:
        """Returns how far the simulation of the present settings is from their runs, as a gain is told."""
        return abs(self.gain(self.score({}), self._seen))

    def drawn_gains(self, change: Mapping[str, Any], draws: int) -> DrawnGains:
        """Returns the change's gain in each of so many draws."""
        rng = random.Random(0)
        own, later = [], []
        here = hours(draws, self._replica.costs.errors.drift, rng)
        for number, (factor, next_hour) in enumerate(zip(here, hours(draws, 0.0, rng), strict=True)):
            drawn = self._replica.drawn(factor, rng)
            before = self._run(drawn, {}, number)
            own.append(self.gain(before, self._run(drawn, change, number)))
            later.append(self.gain(before, self._run(drawn.slower(next_hour), change, number + LATER)))
        return DrawnGains(sorted(own), sorted(later))

    def _run(self, replica: AnyReplica, change: Mapping[str, Any], seed: int) -> Score:
        books = replica.run(self._requests, Change(dict(change)), seed)
        return score_of(run_of(books, self._goal.slo, self._warm_up), self._goal)


def finalists(
    forecaster: Forecaster, say: Say, names: Sequence[str] | None = None, more: Mapping[str, Any] | None = None
) -> list[Forecast]:
    """Returns the changes that are predicted to gain, the best first, one of each knob and at most `FINALISTS`. names:
    of the knobs that may be turned; None: all. Where the SLO is missed, what gains only by the likeliest model comes
    last: a run tells more than a doubt. more: what the doctor names, a value by knob: it is tried besides, and what
    gains of it comes first. Raises what the simulation raises of the settings as they are, and OutOfRange if all that
    gains has steps in other hours that nobody has recorded."""
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
    order.sort(key=lambda name: not set(best[name]) & set(more or ()))
    drawn = _drawn(forecaster, [best[name] for name in order[:FINALISTS]], before, say)
    if before.keeps and not forecaster.is_missed:
        return [one for one in drawn if one.gain >= WORTH_IT and one.own_low > 0]
    return sorted(drawn, key=lambda one: (one.gain < WORTH_IT, one.own_low <= 0))


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
            own, later = forecaster.drawn_gains(change, DRAWS)
        except OutOfRange as error:
            say(f"{words(change)} is left out: {error.info.message}", None)
            left_out = error
            continue
        after, middle = forecaster.score(change), statistics.median(own)
        low, high = _wider(middle, later, forecaster.miss)
        found.append(
            Forecast(change=change, before=before, after=after, gain=middle, low=low, high=high, own_low=own[1])
        )
    if left_out is not None and not found:
        raise left_out
    return found


def _wider(middle: float, later: Sequence[float], miss: float) -> tuple[float, float]:
    """Returns the interval of what a run would gain, in which the gain of the draws lies."""
    below, above = max(0.0, middle - later[1]), max(0.0, later[-2] - middle)
    return middle - math.hypot(below, miss), middle + math.hypot(above, miss)
