"""Three profiles: each a stated set of settings to begin with, and the figure that counts once the SLO is kept.

Each states the same knobs, so that none has what a server or a ledger happened to have. What a user sets goes before
what a profile says. `splittime tune --compare-profiles` measures them beside each other.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from splittime.bench.book.figures import summary
from splittime.bench.book.metrics import value_of
from splittime.bench.book.slo import limits_of
from splittime.tune.goal import Goal, score_of
from splittime.tune.measure import Measurer, TimeBudget

FIGURES = ("ttft_p50", "ttft_p99", "tpot_p99", "e2e_mean", "throughput")
REPEATS = 3


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """settings: of `splittime serve`, by name; reasons: why each. seeks: a metric of `bench.book.metrics`."""

    name: str
    seeks: str
    purpose: str
    settings: dict[str, Any]
    reasons: dict[str, str]


LATENCY = Profile(
    name="latency",
    seeks="e2e_mean",
    purpose="each request ends as soon as it can",
    settings={
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,
        "max_prefill_tokens": 64,
        "policy": "shortest_prefill",
    },
    reasons={
        "max_num_seqs": "a step of fewer rows is shorter, so each token comes sooner",
        "max_num_batched_tokens": "the server's default: fewer rows and shorter pieces of prompts never fill it",
        "max_prefill_tokens": "a prompt makes those who are answered wait for a short piece of it at a time",
        "policy": "a short prompt does not wait for a long one",
    },
)
THROUGHPUT = Profile(
    name="throughput",
    seeks="throughput",
    purpose="as many tokens a second as the machine can write",
    settings={"max_num_seqs": 256, "max_num_batched_tokens": 2048, "max_prefill_tokens": 2048, "policy": "fcfs"},
    reasons={
        "max_num_seqs": "the weights are read once for more rows",
        "max_num_batched_tokens": "whole prompts fit into a step beside all rows",
        "max_prefill_tokens": "a prompt takes few steps: products of many rows use the processor well",
        "policy": "nobody is overtaken, so nothing is held back for later",
    },
)
BALANCED = Profile(
    name="balanced",
    seeks="throughput",
    purpose="the server's own defaults: many rows, and prompts in pieces that the others hardly feel",
    settings={"max_num_seqs": 64, "max_num_batched_tokens": 512, "max_prefill_tokens": None, "policy": "fcfs"},
    reasons={
        "max_num_seqs": "more rows gain little more from reading the weights once",
        "max_num_batched_tokens": "the longest step stays within what a reader feels as even",
        "max_prefill_tokens": "measured when a server starts; one that runs already takes as many as fit into a step",
        "policy": "in the order in which they came",
    },
)
PROFILES = {profile.name: profile for profile in (LATENCY, THROUGHPUT, BALANCED)}


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
