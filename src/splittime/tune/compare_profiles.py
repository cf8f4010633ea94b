"""The three profiles beside each other: the same load on a server of each, by turns."""

from collections.abc import Mapping
from typing import Any

import msgspec

from splittime.bench.book.figures import summary
from splittime.bench.book.metrics import value_of
from splittime.bench.book.slo import limits_of
from splittime.tune.budget import TimeBudget
from splittime.tune.goal import Goal, score_of
from splittime.tune.measure import Measurer
from splittime.tune.profiles import PROFILES, Profile

FIGURES = ("ttft_p50", "ttft_p99", "tpot_p99", "e2e_mean", "throughput")
REPEATS = 3


class ProfileFigures(msgspec.Struct, frozen=True, kw_only=True):
    """figures: of each run, by the metric's name, in base units. kept: of each run, whether it kept the SLO."""

    name: str
    purpose: str
    settings: dict[str, Any]
    kept: tuple[bool, ...]
    figures: dict[str, tuple[float, ...]]


def compare_profiles(
    measurer: Measurer, asked: Mapping[str, Any], budget: TimeBudget, repeats: int = REPEATS
) -> list[ProfileFigures]:
    """Returns what each profile does, from `repeats` runs in rotation, or fewer if time is up before. asked: settings
    that go before a profile's."""
    profiles = list(PROFILES.values())
    for number in range(repeats):
        if number and budget.left_s < len(profiles) * (measurer.seconds or 0.0):
            break
        for profile in profiles[number:] + profiles[:number]:
            measurer.run(_changes(profile, asked), number)
    return [_figures(measurer, profile, asked) for profile in profiles]


def _changes(profile: Profile, asked: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in profile.settings.items() if name not in asked}


def _figures(measurer: Measurer, profile: Profile, asked: Mapping[str, Any]) -> ProfileFigures:
    changes = _changes(profile, asked)
    runs = [measurer.run(changes, number) for number in range(len(measurer.scores(changes)))]
    goal = Goal(slo=measurer.goal.slo, seeks=profile.seeks)
    found = [summary(run, limits=limits_of(goal.slo, run.slo)) for run in runs]
    values = {name: tuple(v for each in found if (v := value_of(each, name)) is not None) for name in FIGURES}
    kept = tuple(score_of(run, goal).keeps for run in runs)
    return ProfileFigures(name=profile.name, purpose=profile.purpose, settings=changes, kept=kept, figures=values)
