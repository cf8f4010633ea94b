"""`gateway evaluate`: cost and worth of routing by difficulty, by hand on few prompts and from a shell on many."""

import json
import random
import re
import subprocess
import tomllib

import numpy as np
import pytest

import forked
from splittime.core.errors import ConfigError
from splittime.gateway.config_file import config_of
from splittime.gateway.routing.evaluate import Costs, JudgedPrompts, evaluate
from splittime.gateway.routing.labels import LabelledPrompt
from splittime.stats.paired import means

from .conftest import upstream
from .test_difficulty import EASY, HARD, config, judge, lines
from .test_routing import BASE

FOUR = [
    LabelledPrompt(prompt="a", small_right=True, large_right=True, small_logprob=-0.1),
    LabelledPrompt(prompt="b", small_right=True, large_right=False, small_logprob=-0.2),
    LabelledPrompt(prompt="c", small_right=False, large_right=True, small_logprob=-2.0),
    LabelledPrompt(prompt="d", small_right=False, large_right=False, small_logprob=-3.0),
]
SCORES = np.array([0.2, 0.8, 0.9, 0.1])  # c is taken for easy, a and d for hard


def values(*figures) -> list[float]:
    return [round(figure.value, 6) for figure in figures]


def test_a_point_and_its_misroutes_by_hand():
    data = JudgedPrompts(FOUR, Costs(1, 9), means)
    (point,) = data.points([0.5], SCORES)
    assert (point.threshold, point.share_small) == (0.5, 0.5)
    assert values(point.cost, point.worth) == [5, 0.5]
    assert values(point.gain) == [0.0]  # half at random: also 0.5
    wrong = data.misroutes(SCORES >= 0.5)
    assert values(wrong.wasted, wrong.wasted_cost, wrong.lost, wrong.lost_worth) == [0.5, 4, 0.25, 0.25]
    (best,) = data.points([0.5], np.array([1.0, 1.0, 0.0, 1.0]))
    assert values(best.cost, best.worth, best.gain) == [3, 0.75, 0.25]


def test_an_unsure_answer_costs_both():
    data = JudgedPrompts(FOUR, Costs(1, 9), means)
    (point,) = data.points([-1.0], np.array([one.small_logprob for one in FOUR]), both=True)
    assert values(point.cost, point.worth, point.gain) == [5.5, 0.75, 0.25]


def test_costs_are_those_of_the_data_if_each_line_has_them():
    told = [
        LabelledPrompt(prompt="a", small_right=True, large_right=True, small_cost=number, large_cost=2.0 * number)
        for number in (1.0, 3.0)
    ]
    assert JudgedPrompts(told, Costs(7, 8), means).small_cost.tolist() == [1, 3]
    assert JudgedPrompts([*told, FOUR[0]], Costs(7, 8), means).small_cost.tolist() == [7, 7, 7]
    with pytest.raises(ConfigError, match="large_right is missing"):
        JudgedPrompts([LabelledPrompt(prompt="a", small_right=True)], Costs(1, 2), means)


def test_labels_by_chance_gain_nothing_and_true_ones_do(tmp_path):
    draw = random.Random(7)
    (route,) = config_of(tomllib.loads(BASE + config(lines(tmp_path / "l")))).difficulty
    texts = [f"{text} {number}" for number in range(20, 40) for text in EASY + HARD]
    true = [LabelledPrompt(prompt=one, small_right="translate" in one, large_right=True) for one in texts]
    found = evaluate(route, judge(tmp_path / "l"), true, Costs(0.1, 1), means)
    assert found.chosen.gain.low > 0.2  # of 0.25: chance that costs as much is worth 0.75
    assert values(found.chosen.worth, found.misroutes.wasted, found.misroutes.lost) == [1, 0, 0]
    assert (found.in_labels, found.chosen_check, found.by_first_tokens) == (0, None, ())
    costs = [point.cost.value for point in found.by_text]
    assert costs == sorted(costs, reverse=True)
    assert (found.by_text[0].share_small, found.by_text[-1].share_small) == (0.0, 1.0)
    chance = [LabelledPrompt(prompt=one, small_right=draw.random() < 0.5, large_right=True) for one in texts]
    found = evaluate(route, judge(tmp_path / "l"), chance, Costs(0.1, 1), means)
    assert found.chosen.gain.low < 0 < found.chosen.gain.high


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
    path = lines(tmp_path / "labels.jsonl", large_right=True, small_logprob=-0.5)
    text = upstream("a", "http://127.0.0.1:1", "big", "small") + config(path)
    (tmp_path / "g.toml").write_text(text + "escalate = { below = -1.0 }\n")
    done = shell(tmp_path, "g.toml", "labels.jsonl", "--large-cost", "10", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["prompts"], told["in_labels"], told["always_large"]["cost"]["value"]) == (80, 80, 10)
    assert told["always_small"]["worth"]["value"] == told["chosen"]["share_small"] == 0.5
    assert told["chosen_check"]["share_small"] == 1.0
    done = shell(tmp_path, "g.toml", "labels.jsonl")
    words = done.stdout
    rows = ("always small", "always large", "best possible", "chosen by text", "chosen by tokens")
    for each in (*rows, "by tokens every prompt is checked"):
        assert each in words, done.stderr
    assert "large for nothing: 0.0%" in words
    assert "80 of them stand in the labels too" in " ".join(done.stderr.split())
    (tmp_path / "text.toml").write_text(text)
    assert "every prompt is checked" not in shell(tmp_path, "text.toml", "labels.jsonl").stdout


def test_the_curves_are_drawn(tmp_path):
    """Each point that is told has its place, the config's model is no markup, and nothing is fetched."""
    path = lines(tmp_path / "l", large_right=True, small_logprob=-0.5)
    (tmp_path / "g.toml").write_text(BASE + config(path, model="<b>auto") + "escalate = { below = -1.0 }\n")
    done = shell(tmp_path, "g.toml", "l", "--html", "curves.html", "--json")
    told, page = json.loads(done.stdout), (tmp_path / "curves.html").read_text()
    for name, curve, chosen in (("text", "by_text", "chosen"), ("tokens", "by_first_tokens", "chosen_check")):
        points = [*told[curve], told[chosen]]
        drawn = set(re.findall(r"M(\d+ \d+)h", "".join(re.findall(f'class="dots c-{name}" d="([^"]*)"', page))))
        assert len(drawn) == len({(one["cost"]["value"], one["worth"]["value"]) for one in points}) > 1
        assert f">chosen by {name}<" in page
    for name in ("always small", "always large", "best possible", "chance"):
        assert f">{name}<" in page
    assert "80 of the prompts stand in the labels too" in page
    assert not re.search(r"<b>auto|<script|http|src=", page)
    assert shell(tmp_path, "g.toml", "l", "--html", ".").returncode == 2
