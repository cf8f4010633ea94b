"""`splittime distill` as a user runs it: table, JSON, a folder that is served, errors and exit codes."""

import json

import pytest
import typer
from schools import STUDENT, TEACHER, make_model, write_config, write_texts
from typer.testing import CliRunner

from splittime.cli import distill as command
from splittime.core.sampling import SamplingParams
from splittime.lab.distill.student import read_weights
from splittime.llm import LLM

app = typer.Typer(rich_markup_mode=None)
app.command(name="distill", epilog=command.EXAMPLES)(command.distill)


@pytest.fixture(scope="module")
def school(tmp_path_factory):
    folder = tmp_path_factory.mktemp("school")
    make_model(folder / "teacher", TEACHER)
    make_model(folder / "other", STUDENT, seed=3)
    write_config(folder / "student.json", STUDENT)
    write_texts(folder / "text.jsonl", 30)
    write_texts(folder / "held.jsonl", 3)
    return folder


def run(school, *words, teacher="teacher", student="student.json", texts="text.jsonl"):
    student = student if student == "mtp" else school / student
    fixed = (school / teacher, "--student", student, "--text", school / texts, "--workers", 1)
    return CliRunner().invoke(app, [str(word) for word in (*fixed, *words)])


def test_a_student_is_made_measured_and_served(school, tmp_path):
    out = tmp_path / "out"
    words = ("--held-out", school / "held.jsonl", "--beside", school / "other", "--step-tokens", 128)
    found = run(school, *words, "--tokens", 256, "--json", "--out", out)
    assert found.exit_code == 0, found.stderr
    result = json.loads(found.stdout)
    assert result == json.loads((out / "distillation.json").read_text())
    teacher, student, other = result["scores"]
    assert (teacher["kl"]["value"], teacher["acceptance"]["value"]) == (0, pytest.approx(1))
    assert student["documents"] == 3
    assert [gain["name"] for gain in result["gains"]] == ["student", str(school / "other")]
    for gain in result["gains"]:
        assert 1 <= gain["low"] <= gain["gain"] <= gain["high"]
        assert gain["teacher_step_ns"] > 0 < gain["student_step_ns"]
    assert 0 < student["acceptance"]["value"] < 1
    gap = result["differences"][0]["kl"]["value"]
    assert gap == pytest.approx(student["kl"]["value"] - other["kl"]["value"])
    assert result["notes"] == [
        "3 documents of the text are held out, and were not learnt from",
        "intervals of 3 held-out documents say little of how documents differ; give 10 at least, with --held-out",
    ]
    made = LLM(out, num_threads=1).generate("def f", SamplingParams(temperature=0.0, max_tokens=3))
    assert made[0].error is None


def test_a_head_is_trained_measured_and_served(school, tmp_path):
    """It learns, is written in the layout that is served, and changes no answer."""
    out, words = tmp_path / "head", ["--student", "mtp", "--text", school / "text.jsonl", "--workers", 1, "--json"]

    def made(*more):
        return CliRunner().invoke(app, [str(word) for word in (school / "teacher", *words, *more)])

    budget = ("--tokens", 24_000, "--step-tokens", 512)
    found = made("--held-out", school / "held.jsonl", *budget, "--out", out)
    assert found.exit_code == 0, found.stderr
    result = json.loads(found.stdout)
    assert result == json.loads((out / "distillation.json").read_text())
    scores = result["scores"]
    assert len(scores["by_depth"]) == 3
    assert 0 <= scores["low"] <= scores["chance"] <= scores["high"] <= 1
    assert result["gain"]["gain"] >= 1
    short = json.loads(made("--held-out", school / "held.jsonl", "--tokens", 1, "--out", tmp_path / "short").stdout)
    assert scores["chance"] > 1.3 * short["scores"]["chance"]
    asked = SamplingParams(temperature=0.0, max_tokens=24)
    answers = []
    for config in ({"method": "none"}, {"method": "mtp", "model": str(out)}):
        llm = LLM(school / "teacher", num_threads=1, speculative_config=config)
        answers.append(llm.generate("def f", asked)[0])
    assert json.loads(llm.crank.facts.settings["speculative_config"])["model"] == "head"
    assert str(tmp_path) not in str(llm.crank.facts), "where things lie is nobody's business"
    assert answers[0].token_ids == answers[1].token_ids
    refused = made("--beside", "x", *budget, "--out", tmp_path / "never")
    assert refused.exit_code != 0
    assert not (tmp_path / "never").exists()


def test_weights_to_start_from_and_a_student_that_is_no_smaller(school, tmp_path):
    words = ("--alpha", 0, "--tokens", 1, "--step-tokens", 1, "--matrix-rate", 1e-9, "--other-rate", 1e-9)
    words = (*words, "--start-from", school / "teacher", "--out", tmp_path / "out")
    found = run(school, *words, student="teacher")
    assert found.exit_code == 0, found.stderr
    said = " ".join(found.stdout.split())
    assert "it is no smaller" in said
    assert "expected acceptance" in said.replace("  ", " ") or "acceptance" in said
    before, after = (read_weights(folder, TEACHER) for folder in (school / "teacher", tmp_path / "out"))
    assert all((before[name] - after[name]).abs().max() < 1e-2 for name in before)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "needs a budget"),
        (["--tokens", 0], "--tokens is 0, must be above 0"),
        (["--tokens", 9, "--alpha", 1.5], "--alpha is 1.5"),
        (["--tokens", 9, "--temperature", 0], "--temperature is 0"),
        (["--tokens", 9, "--own-outputs", -1], "--own-outputs is -1"),
        (["--tokens", 9, "--held-out", "nowhere"], "no such text"),
        (["--tokens", 9, "--held-out", "TEXT"], "no document is left to learn from"),
        (["--tokens", 9, "--beside", "student"], "would be called as the student is"),
        (["--tokens", 9, "--start-from", "TEACHER"], "has hidden_size 32, the student 16"),
    ],
)
def test_what_cannot_be_done_is_said(school, tmp_path, words, said):
    places = {"TEXT": school / "text.jsonl", "TEACHER": school / "teacher"}
    found = run(school, *(places.get(word, word) for word in words), "--out", tmp_path / "out")
    assert (found.exit_code, said in found.stderr) == (2, True), found.stderr
    assert not list(tmp_path.glob("out*"))  # nothing was begun that a better command would trip over


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"vocab_size": 4000}, "the student has 4,000 tokens and the teacher 4,096"),
        ({"architectures": ["Qwen2ForCausalLM"]}, "cannot be trained with architectures 'Qwen2ForCausalLM'"),
        (
            {"architectures": ["Qwen3_5ForCausalLM"], "full_attention_interval": 2, "num_hidden_layers": 2},
            "cannot be trained with architectures 'Qwen3_5ForCausalLM'",
        ),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling 'linear'"),
    ],
)
def test_a_student_that_cannot_be_trained_is_said(school, tmp_path, changed, said):
    config = write_config(tmp_path / "config.json", STUDENT, **changed)
    found = run(school, "--tokens", 9, "--out", tmp_path / "out", student=config)
    assert (found.exit_code, said in found.stderr) == (2, True), found.stderr


def test_a_text_that_is_too_short_is_said(school, tmp_path):
    short = write_texts(tmp_path / "short.jsonl", 1, lines=2)
    words = ("--tokens", 9, "--held-out", school / "held.jsonl", "--out", tmp_path / "out")
    found = run(school, *words, texts=short)
    assert (found.exit_code, "too few for windows of 64" in found.stderr) == (2, True), found.stderr
    assert not list(tmp_path.glob("out*"))


def test_a_head_is_measured_on_short_documents_too(school, tmp_path):
    """Nobody trains for an hour to hear then that no document is as long as a window."""
    short = write_texts(tmp_path / "short.jsonl", 30, lines=2)
    words = ("--held-out", short, "--tokens", 1, "--step-tokens", 64, "--json", "--out", tmp_path / "head")
    found = run(school, *words, student="mtp")
    assert found.exit_code == 0, found.stderr
    result = json.loads(found.stdout)
    scores = result["scores"]
    assert scores["windows"] == 30
    assert 30 * 15 <= scores["tokens"] < 30 * 64


def test_a_head_s_figures_come_with_what_speaks_against_them(school, tmp_path):
    words = ("--held-out", school / "held.jsonl", "--tokens", 1, "--step-tokens", 64, "--out", tmp_path / "head")
    found = run(school, *words, student="mtp")
    assert found.exit_code == 0, found.stderr
    said = " ".join(found.stdout.split())
    assert "note: 3 documents of the text are held out, and were not learnt from" in said
    assert "note: intervals of 3 held-out documents say little" in said


def test_a_teacher_that_can_have_no_head_is_said(school, tmp_path):
    make_model(tmp_path / "teacher", TEACHER)
    write_config(tmp_path / "teacher" / "config.json", TEACHER, rope_scaling={"rope_type": "linear", "factor": 2.0})
    found = run(school, "--tokens", 9, "--out", tmp_path / "out", teacher=tmp_path / "teacher", student="mtp")
    assert (found.exit_code, "a head on a teacher cannot be trained with rope_scaling" in found.stderr) == (2, True)
    assert "--student CONFIG" in found.stderr
