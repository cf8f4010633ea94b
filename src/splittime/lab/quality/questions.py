"""Questions with right answers: several choices (by likelihood), or a number at the end of an answer (by generation).

A choice is the one with the largest log-likelihood over its length in bytes, so that long ones do not lose for being
long. Two models are compared by the questions on which only one is right (`paired.mcnemar`). A base that does no
better than guessing cannot show that a candidate lost anything: then there is no verdict.
"""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from splittime.core.errors import ConfigError
from splittime.lab.quality.documents import Encoder, json_lines, read_text
from splittime.lab.quality.margins import MIN_QUESTIONS, Check, Margins, judge
from splittime.lab.quality.model import Model
from splittime.lab.quality.texts import Tell
from splittime.stats import paired

LETTERS = "ABCDEFGHIJ"
ANSWER_TOKENS = 256
SHOTS = 4
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class ChoiceQuestion:
    question: str
    choices: tuple[str, ...]
    right: int


@dataclass(frozen=True)
class AnswerQuestion:
    question: str
    answer: str
    number: float


class Paired(msgspec.Struct, frozen=True, kw_only=True):
    """What both models made of one file. p_value: McNemar's, of no difference. left_out: too long for a model."""

    file: str
    kind: str
    questions: int
    left_out: int
    base_right: int
    candidate_right: int
    only_base: int
    only_candidate: int
    same_answer: int
    p_value: float
    guessing: float


def read_choices(path: Path, most: int | None) -> list[ChoiceQuestion]:
    """CSV with question, A, B, ..., answer (a letter), or JSONL with question, choices, answer (a letter or a place
    from 0). Raises `ConfigError`."""
    if path.name.removesuffix(".gz").endswith(".csv"):
        rows = csv.DictReader(io.StringIO(read_text(path, "choices")))
        found = [_choice_of_row(path, number, row) for number, row in enumerate(rows, 2)]
    else:
        found = [_choice_of_record(path, number, record) for number, record in json_lines(path, "choices")]
    return _spread(found, most, path, "choices")


def read_answers(path: Path, most: int | None) -> list[AnswerQuestion]:
    """JSONL with question and answer, whose last number is what counts (GSM8K's form). Raises `ConfigError`."""
    found = []
    for number, record in json_lines(path, "answers"):
        texts = [record.get(name) for name in ("question", "answer")] if isinstance(record, dict) else [None]
        result = last_number(str(texts[-1])) if all(isinstance(text, str) for text in texts) else None
        if result is None:
            raise _bad(path, number, "question and answer, with a number at its end", "answers")
        found.append(AnswerQuestion(str(texts[0]), str(texts[1]), result))
    return _spread(found, None if most is None else most + SHOTS, path, "answers")


def last_number(text: str) -> float | None:
    numbers = _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def pick_all(model: Model, encoder: Encoder, questions: Sequence[ChoiceQuestion], tell: Tell) -> list[int]:
    """The choice that the model finds likeliest a byte; -1 where a question does not fit."""
    picks = []
    for number, question in enumerate(questions):
        tell(f"choices, {model.name}", number, len(questions))
        picks.append(_pick(model, encoder, question))
    tell(f"choices, {model.name}", len(questions), len(questions))
    return picks


def _pick(model: Model, encoder: Encoder, question: ChoiceQuestion) -> int:
    prompt = encoder.encode(f"Question: {question.question}\nAnswer:")
    endings = [encoder.encode(f" {choice}", add_special_tokens=False) for choice in question.choices]
    if len(prompt) + max(map(len, endings)) > model.max_tokens:
        return -1
    likelihoods = model.continuations(prompt, endings)
    per_byte = [value / len(f" {text}".encode()) for value, text in zip(likelihoods, question.choices, strict=True)]
    return max(range(len(per_byte)), key=lambda place: per_byte[place])


def compare_choices(
    file: str, questions: Sequence[ChoiceQuestion], base: Sequence[int], candidate: Sequence[int], margins: Margins
) -> tuple[Paired, Check]:
    """base, candidate: `pick_all` of both."""
    kept = [i for i in range(len(questions)) if base[i] >= 0 and candidate[i] >= 0]
    right = [[picks[i] == questions[i].right for i in kept] for picks in (base, candidate)]
    same = sum(base[i] == candidate[i] for i in kept)
    guessing = sum(1 / len(questions[i].choices) for i in kept) / max(1, len(kept))
    return _compared(file, "choices", right, len(questions) - len(kept), same, guessing, margins)


def answer_all(model: Model, questions: Sequence[AnswerQuestion], tell: Tell) -> list[float | None]:
    """The last number of each generated answer. The first `SHOTS` of the file are worked examples, not questions."""
    shown = "".join(f"Question: {one.question}\nAnswer: {one.answer}\n\n" for one in questions[:SHOTS])
    prompts = [f"{shown}Question: {one.question}\nAnswer:" for one in questions[SHOTS:]]
    said = f"answers, {model.name}"
    texts = model.generate(prompts, ANSWER_TOKENS, ("\n\n", "Question:"), lambda done: tell(said, done, len(prompts)))
    return [last_number(text) for text in texts]


def compare_answers(
    file: str,
    questions: Sequence[AnswerQuestion],
    base: Sequence[float | None],
    candidate: Sequence[float | None],
    margins: Margins,
) -> tuple[Paired, Check]:
    """base, candidate: `answer_all` of both."""
    numbers = [one.number for one in questions[SHOTS:]]
    right = [[found == number for found, number in zip(side, numbers, strict=True)] for side in (base, candidate)]
    same = sum(one == other for one, other in zip(base, candidate, strict=True))
    return _compared(file, "answers", right, 0, same, 0.0, margins)


def _compared(
    file: str, kind: str, right: list[list[bool]], left_out: int, same: int, guessing: float, margins: Margins
) -> tuple[Paired, Check]:
    count = len(right[0])
    only_base = sum(one and not other for one, other in zip(*right, strict=True))
    only_candidate = sum(other and not one for one, other in zip(*right, strict=True))
    answers = Paired(
        file=file,
        kind=kind,
        questions=count,
        left_out=left_out,
        base_right=sum(right[0]),
        candidate_right=sum(right[1]),
        only_base=only_base,
        only_candidate=only_candidate,
        same_answer=same,
        p_value=paired.mcnemar(only_base, only_candidate),
        guessing=guessing,
    )
    difference = paired.paired_difference(only_base, only_candidate, max(1, count))
    return answers, judge("accuracy", file, difference, -margins.accuracy, _thin(answers))


def _thin(answers: Paired) -> str:
    if answers.questions < MIN_QUESTIONS:
        return f"{answers.questions} questions are too few, give {MIN_QUESTIONS} at least"
    if paired.binomial_bounds(answers.base_right, answers.questions)[0] <= answers.guessing:
        share = answers.base_right / answers.questions
        return (
            f"the base is right in {share:.1%}, no more than guessing gives ({answers.guessing:.1%}): nothing to lose"
        )
    return ""


def _choice_of_row(path: Path, number: int, row: dict[str, Any]) -> ChoiceQuestion:
    choices = [row[letter] for letter in LETTERS if row.get(letter) is not None]
    answer = str(row.get("answer") or "").strip().upper()
    if not row.get("question") or len(choices) < 2 or answer not in LETTERS[: len(choices)] or not answer:
        raise _bad(path, number, "question, A, B, ... and answer (a letter)", "choices")
    return ChoiceQuestion(row["question"], tuple(choices), LETTERS.index(answer))


def _choice_of_record(path: Path, number: int, record: Any) -> ChoiceQuestion:
    wanted = "question, choices (a list of texts) and answer (a letter, or a place from 0)"
    if not isinstance(record, dict):
        raise _bad(path, number, wanted, "choices")
    parts: list[Any] = [record.get(name) for name in ("question", "choices", "answer")]
    question, choices, answer = parts
    if isinstance(answer, str) and len(answer.strip()) == 1:
        answer = LETTERS.find(answer.strip().upper())
    is_list = isinstance(choices, list) and len(choices) > 1 and all(isinstance(one, str) for one in choices)
    is_place = isinstance(answer, int) and not isinstance(answer, bool)
    if not (isinstance(question, str) and is_list and is_place):
        raise _bad(path, number, wanted, "choices")
    found = ChoiceQuestion(question, tuple(choices), answer)
    if not 0 <= found.right < len(found.choices):
        raise _bad(path, number, wanted, "choices")
    return found


def _spread(found: list[Any], most: int | None, path: Path, param: str) -> list[Any]:
    """At most so many, evenly over the file, which may be sorted by subject."""
    if not found:
        raise ConfigError(f"{path} holds no questions", param=param, value=str(path))
    if most is None or most >= len(found):
        return found
    return [found[i * len(found) // most] for i in range(most)]


def _bad(path: Path, number: int, wanted: str, param: str) -> ConfigError:
    return ConfigError(f"{path}:{number} lacks {wanted}", param=param, value=f"{path}:{number}")
