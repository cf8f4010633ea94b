"""Needles: where the fact lies in each prompt, what is asked, and that a candidate that forgets early text fails."""

import numpy as np
import pytest
from tables import Bytes, Table, random_logits, silent

from splittime.lab.quality import needle as needles
from splittime.lab.quality.documents import DocumentTokens
from splittime.lab.quality.margins import Margins

TEXTS = [DocumentTokens(str(n), Bytes().encode("lorem ipsum dolor sit amet " * 8)) for n in range(3)]
LENGTH = 400


@pytest.fixture(scope="module")
def trials():
    return needles.trials(TEXTS, Bytes(bos=True), (0,), LENGTH)


def test_the_fact_lies_at_each_depth_and_is_asked_for_at_the_end(trials):
    trial = trials[0]
    asked = Bytes().encode("\nThe pass code of Kestrel is")
    fact = (*asked, *trial.answer)
    for prompt, depth in zip(trial.prompts, needles.DEPTHS, strict=False):
        assert len(prompt) + len(trial.answer) == LENGTH
        assert prompt[0] == 0
        assert prompt[-len(asked) :] == tuple(asked)
        places = [i for i in range(len(prompt)) if prompt[i : i + len(fact)] == fact]
        assert len(places) == 1
        assert places[0] / (LENGTH - len(fact) - len(asked)) == pytest.approx(depth / 100, abs=0.05)


def test_the_last_prompt_has_no_fact(trials):
    for trial in trials:
        prompt = trial.prompts[-1]
        assert len(prompt) + len(trial.answer) == LENGTH
        assert not any(prompt[i : i + 6] == trial.answer for i in range(len(prompt)))


def test_no_two_trials_ask_for_the_same(trials):
    assert len({trial.answer for trial in trials}) == needles.TRIALS
    assert needles.trials(TEXTS, Bytes(bos=True), (0,), LENGTH) == trials


class Finding(Table):
    """Finds what stood after the question's words earlier on, in its last `sight` tokens."""

    def __init__(self, sight):
        super().__init__(random_logits())
        self.sight = sight

    def continuations(self, prompt, endings):
        seen = tuple(prompt[-self.sight :])
        whole = [tuple(prompt[-5:]) + tuple(ending) for ending in endings]
        is_there = [any(seen[i : i + len(one)] == one for i in range(len(seen))) for one in whole]
        return [
            -0.1 * len(ending) if found else -5.0 * len(ending) for found, ending in zip(is_there, endings, strict=True)
        ]


def asked_of(model, trials):
    return needles.ask(model, trials, silent)


def test_who_forgets_early_text_fails_at_the_depths_that_lie_there(trials):
    base = asked_of(Finding(LENGTH), trials)
    assert np.allclose(base[:, :-1], -0.1)
    assert np.allclose(base[:, -1], -5.0)
    same, check = needles.compare_needle(LENGTH, base, base, Margins())
    assert (check.verdict, same.found.value) == ("PASS", pytest.approx(4.9))
    lost, check = needles.compare_needle(LENGTH, base, asked_of(Finding(200), trials), Margins())
    assert check.verdict == "FAIL"
    assert [one.depth for one in lost.depths if one.difference.value < -1] == [0, 25, 50]


def test_a_base_that_finds_nothing_is_told(trials):
    base = asked_of(Finding(1), trials)
    _, check = needles.compare_needle(LENGTH, base, base, Margins())
    assert "does not find the needle either" in check.note
