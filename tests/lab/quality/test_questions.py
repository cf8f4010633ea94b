"""Questions: files that are read or refused, picks by length-normalised likelihood, pairs and their verdict."""

import gzip
import json

import numpy as np
import pytest
from tables import VOCAB, Bytes, Table, random_logits, silent

from splittime.core.errors import ConfigError
from splittime.lab.quality import questions as asked
from splittime.lab.quality.margins import Margins
from splittime.lab.quality.questions import AnswerQuestion, ChoiceQuestion

CSV = "subject,question,A,B,C,D,answer\nx,What?,one,two,three,four,C\ny,Which?,1,2,3,4,a\n"


def test_both_forms_of_choices(tmp_path):
    with gzip.open(tmp_path / "m.csv.gz", "wt") as file:
        file.write(CSV)
    assert asked.read_choices(tmp_path / "m.csv.gz", None) == [
        ChoiceQuestion("What?", ("one", "two", "three", "four"), 2),
        ChoiceQuestion("Which?", ("1", "2", "3", "4"), 0),
    ]
    records = [{"question": "Q", "choices": ["a", "b"], "answer": answer} for answer in (1, "B", " b")]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, records)))
    assert asked.read_choices(tmp_path / "m.jsonl", None) == [ChoiceQuestion("Q", ("a", "b"), 1)] * 3


@pytest.mark.parametrize("record", [
    {"question": "Q", "choices": ["a", "b"], "answer": 2},
    {"question": "Q", "choices": ["a", "b"], "answer": -1},
    {"question": "Q", "choices": ["a", "b"], "answer": True},
    {"question": "Q", "choices": ["a", "b"], "answer": "C"},
    {"question": "Q", "choices": ["a"], "answer": 0},
    {"question": "Q", "choices": ["a", 1], "answer": 0},
    {"question": 3, "choices": ["a", "b"], "answer": 0},
    {"choices": ["a", "b"]},
    ["Q"],
])  # fmt: skip
def test_other_choices_are_refused_by_their_line(tmp_path, record):
    (tmp_path / "m.jsonl").write_text("\n" + json.dumps(record))
    with pytest.raises(ConfigError, match=r"m\.jsonl:2 lacks"):
        asked.read_choices(tmp_path / "m.jsonl", None)


@pytest.mark.parametrize("row", ["x,What?,one,two,three,four,E", "x,What?,one,two,three,four,", "x,,a,b,c,d,A"])
def test_other_rows_are_refused_by_their_line(tmp_path, row):
    (tmp_path / "m.csv").write_text(f"subject,question,A,B,C,D,answer\n{row}\n")
    with pytest.raises(ConfigError, match=r"m\.csv:2 lacks"):
        asked.read_choices(tmp_path / "m.csv", None)


def test_a_part_of_a_file_is_spread_over_it(tmp_path):
    records = [{"question": str(n), "choices": ["a", "b"], "answer": 0} for n in range(100)]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, records)))
    found = [int(one.question) for one in asked.read_choices(tmp_path / "m.jsonl", 10)]
    assert found == list(range(0, 100, 10))


@pytest.mark.parametrize(("text", "number"), [
    ("so it is 1,200.50.", 1200.5), ("#### 18", 18), ("5 - 7 = -2", -2), ("none", None), ("3 and 4", 4),
])  # fmt: skip
def test_the_last_number_counts(text, number):
    assert asked.last_number(text) == number


def test_answers_without_a_number_are_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"question": "Q", "answer": "none"}')
    with pytest.raises(ConfigError, match="with a number at its end"):
        asked.read_answers(tmp_path / "a.jsonl", None)


def test_picks_are_by_likelihood_over_bytes():
    """Uniform but for one token: with length left in, the short choice would win whatever it says."""
    logits = np.zeros((VOCAB, VOCAB))
    logits[:, Bytes().encode("z")[0]] = 1.0
    question = ChoiceQuestion("Q", ("a", "zzzzzzzz"), 1)
    assert asked.pick_all(Table(logits), Bytes(), [question], silent) == [1]
    assert asked.pick_all(Table(logits, max_tokens=10), Bytes(), [question], silent) == [-1]


def compared(base, candidate, right=0, choices=4):
    questions = [ChoiceQuestion("Q", tuple("abcd"[:choices]), right)] * len(base)
    return asked.compare_choices("f", questions, base, candidate, Margins())


def test_pairs_and_their_verdicts():
    good, bad = [0] * 180 + [1] * 20, [1] * 120 + [0] * 60 + [1] * 20
    paired, check = compared(good, good)
    assert (paired.base_right, paired.only_base, paired.same_answer, paired.p_value) == (180, 0, 200, 1.0)
    assert check.verdict == "PASS"
    paired, check = compared(good, bad)
    assert (paired.only_base, paired.only_candidate, check.verdict) == (120, 0, "FAIL")
    assert paired.p_value < 1e-6
    assert compared(good, [1] * 4 + good[4:])[1].verdict == "INCONCLUSIVE"


def test_few_questions_and_a_base_that_guesses_give_no_verdict():
    assert "too few" in compared([0] * 30, [1] * 30)[1].note
    guessing = [0] * 52 + [1] * 148
    paired, check = compared(guessing, guessing)
    assert check.verdict == "INCONCLUSIVE"
    assert "no more than guessing" in check.note
    assert paired.guessing == 0.25


def test_questions_that_do_not_fit_one_model_are_left_out_of_both():
    paired, _ = compared([0, -1, 0, 0], [0, 0, -1, 0])
    assert (paired.questions, paired.left_out) == (2, 2)


def test_answers_are_compared_by_their_last_number():
    questions = [AnswerQuestion(f"Q{n}", f"it is {n}", float(n)) for n in range(100)]
    right = {f"Q{n}": f"so {n}.0" for n in range(100)}
    wrong = {**right, **{f"Q{n}": "7 and none" for n in range(50, 100)}}
    numbers = [asked.answer_all(Table(random_logits(), answers=one), questions, silent) for one in (right, wrong)]
    assert len(numbers[0]) == 100 - asked.SHOTS
    paired, check = asked.compare_answers("f", questions, *numbers, Margins())
    assert (paired.base_right, paired.only_base, paired.only_candidate) == (96, 50, 0)
    assert check.verdict == "FAIL"
    paired, check = asked.compare_answers("f", questions, [None] * 96, [None] * 96, Margins())
    assert (check.verdict, paired.same_answer) == ("INCONCLUSIVE", 96)
