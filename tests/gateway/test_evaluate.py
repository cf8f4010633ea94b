"""`gateway evaluate`: cost and worth of routing by difficulty, by hand on few prompts and from a shell on many."""

import json
import random
import subprocess
import tomllib

import numpy as np
import pytest

import forked
from splittime.core.errors import ConfigError
from splittime.gateway.config_file import config_of
from splittime.gateway.routing.difficulty import LabelledPrompt
from splittime.gateway.routing.rehearse import Costs, JudgedPrompts, evaluate
from splittime.stats.paired import means

from .conftest import upstream
from .test_difficulty import config, lines
from .test_routing import BASE

FOUR = [
    LabelledPrompt(small_right=True, large_right=True, small_logprob=-0.1),
    LabelledPrompt(small_right=True, large_right=False, small_logprob=-0.2),
    LabelledPrompt(small_right=False, large_right=True, small_logprob=-2.0),
    LabelledPrompt(small_right=False, large_right=False, small_logprob=-3.0),
]
SCORES = np.array([0.2, 0.8, 0.9, 0.1])  # the third is taken for easy, the first and last for hard


def values(*figures) -> list[float]:
    return [round(figure.value, 6) for figure in figures]


def test_a_point_and_its_misroutes_by_hand():
    data = JudgedPrompts(FOUR, Costs(1, 9), means)
    (point,) = data.points([0.5], SCORES)
    assert (point.threshold, point.share_small) == (0.5, 0.5)
    assert values(point.cost, point.worth) == [5, 0.5]
    assert values(point.gain) == [0.0]  # half at random: also 0.5
    wrong = data.misroutes(SCORES >= 0.5)
    assert values(wrong.wasted, wrong.wasted_cost, wrong.lost, wrong.lost_worth) == [0.5, 4.5, 0.25, 0.25]
    (best,) = data.points([0.5], np.array([1.0, 1.0, 0.0, 1.0]))
    assert values(best.cost, best.worth, best.gain) == [3, 0.75, 0.25]


def test_an_unsure_answer_costs_both():
    data = JudgedPrompts(FOUR, Costs(1, 9), means)
    (point,) = data.points([-1.0], np.array([one.small_logprob for one in FOUR]), both=True)
    assert values(point.cost, point.worth, point.gain) == [5.5, 0.75, 0.25]


def test_costs_are_those_of_the_data_if_each_line_has_them():
    told = [
        LabelledPrompt(
            small_right=True, large_right=True, small_logprob=-1.0, small_cost=number, large_cost=2.0 * number
        )
        for number in (1.0, 3.0)
    ]
    assert JudgedPrompts(told, Costs(7, 8), means).small_cost.tolist() == [1, 3]
    assert JudgedPrompts([*told, FOUR[0]], Costs(7, 8), means).small_cost.tolist() == [7, 7, 7]
    with pytest.raises(ConfigError, match="large_right is missing"):
        JudgedPrompts([LabelledPrompt(small_right=True, small_logprob=-1.0)], Costs(1, 2), means)


def test_first_tokens_by_chance_gain_nothing_and_true_ones_do():
    draw = random.Random(7)
    (route,) = config_of(tomllib.loads(BASE + config())).difficulty
    right = [draw.random() < 0.5 for _ in range(300)]

    def evaluated(logprob):
        told = [LabelledPrompt(small_right=one, large_right=True, small_logprob=logprob(one)) for one in right]
        return evaluate(route, told, Costs(0.1, 1), means)

    found = evaluated(lambda is_right: -draw.uniform(0.1, 0.9) - (not is_right))
    assert found.chosen.gain.low > 0.15
    assert values(found.chosen.worth, found.misroutes.wasted, found.misroutes.lost) == [1, 0, 0]
    costs = [point.cost.value for point in found.by_first_tokens]
    assert costs == sorted(costs, reverse=True)
    assert (found.by_first_tokens[0].share_small, found.by_first_tokens[-1].share_small) == (0.0, 1.0)
    found = evaluated(lambda is_right: -draw.uniform(0.1, 1.9))
    assert found.chosen.gain.low < 0.05
    assert found.chosen.gain.value < 0.05


def test_the_columns_of_means_have_the_intervals_of_each():
    draw = np.random.default_rng(3)
    columns = draw.normal(size=(80, 2)) * [1.0, 3.0] + [5.0, -2.0]
    for found, column in zip(means(columns), columns.T, strict=True):
        error = column.std(ddof=1) / np.sqrt(len(column))
        assert found.value == pytest.approx(column.mean())
        assert found.value - found.low == pytest.approx(2 * error, rel=0.15)
        assert found.high - found.value == pytest.approx(2 * error, rel=0.15)


def shell(folder, *arguments: str) -> subprocess.CompletedProcess:
    return forked.run(["gateway", "evaluate", *arguments], folder)


def test_from_a_shell(tmp_path):
    lines(tmp_path / "labels.jsonl")
    text = upstream("a", "http://127.0.0.1:1", "big", "small") + config('{ labels = "labels.jsonl", at_most = 0.5 }')
    (tmp_path / "g.toml").write_text(text)
    done = shell(tmp_path, "g.toml", "labels.jsonl", "--large-cost", "10", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["prompts"], told["always_large"]["cost"]["value"], told["at_most"]) == (80, 10, 0.5)
    assert told["always_small"]["worth"]["value"] == told["chosen"]["share_small"] == 0.5
    assert (told["chosen"]["threshold"], told["expected"]["quality"]) == (-0.5, 1.0)
    words = shell(tmp_path, "g.toml", "labels.jsonl").stdout
    for each in ("always small", "always large", "best possible", "chosen", "80 labels promise a worth of 0.9"):
        assert each in words
    assert "large for nothing: 0.0%" in words
    (tmp_path / "few.toml").write_text(
        text.replace('labels = "labels.jsonl", at_most = 0.5', "below = -1.0, at_most = 0.1")
    )
    words = shell(tmp_path, "few.toml", "labels.jsonl").stdout
    assert "50% would be asked anew, and at_most lets 10%: the rest is kept" in words
