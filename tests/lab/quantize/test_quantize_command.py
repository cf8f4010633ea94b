"""`splittime quantize` as a user runs it: tables, JSON, errors and exit codes."""

import json

import pytest
import typer
from tiny import make_model
from typer.testing import CliRunner

from splittime.cli import quantize as command

app = typer.Typer(rich_markup_mode=None)
app.command(name="quantize", epilog=command.EXAMPLES)(command.quantize)


@pytest.fixture
def model(tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 60)
    return make_model(tmp_path / "model")


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_the_table_has_every_kind_and_what_was_kept(model, tmp_path):
    words = ("--calibrate", tmp_path / "text.txt", "--samples", 8, "--length", 32, "--group-size", 32)
    found = run(model, "--scheme", "awq", *words, "--out", tmp_path / "out")
    assert found.exit_code == 0, found.stderr
    for kind in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
        assert kind in found.stdout
    assert "Relative error of outputs, 3 layers" in found.stdout
    assert "256 tokens of text, 0.1 MB of hidden states kept" in found.stdout
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize(
    "words", [("int8",), ("w8a8", "--smooth", 0), ("w4a16", "--group-size", 32)], ids=lambda w: w[0]
)
def test_each_scheme_of_plain_rounding_is_made(words, model, tmp_path):
    found = run(model, "--scheme", *words, "--out", tmp_path / "out", "--json")
    assert found.exit_code == 0, found.stderr
    assert json.loads(found.stdout)["settings"]["scheme"] == words[0]


def test_json_is_one_document(model, tmp_path):
    found = run(model, "--prune", "2:4", "--out", tmp_path / "out", "--json")
    values = json.loads(found.stdout)
    assert (values["layers"], values["error_of"], values["settings"]["metric"]) == (3, "weights", "magnitude")
    assert "No kernel" in values["honest"]
    assert values["bytes_after"] > 0
    assert values["errors"][0]["kind"] == "q_proj"


def test_pruning_says_that_it_is_not_faster(model, tmp_path):
    found = run(model, "--prune", "unstructured", "--sparsity", "0.3", "--out", tmp_path / "out")
    assert "No kernel here skips zeros" in " ".join(found.stdout.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--scheme", "awq", "--group-size", 32], "give --calibrate FILE"),
        (["--scheme", "awq", "--group-size", 128, "--calibrate", "TEXT"], "has 2,640 tokens; 128 samples of 128 need"),
        (["--scheme", "awq", "--length", 4096, "--calibrate", "TEXT"], "beyond the model's context of 128"),
        (["--scheme", "w4a16"], "--group-size 32 fits this model"),
        ([], "give either --scheme"),
        (["--scheme", "int8", "--seed", -1], "from 0 on"),
        (["--scheme", "int8", "--samples", 4], "--samples 4: it belongs to --calibrate FILE"),
    ],
)
def test_what_cannot_be_done_is_told_with_the_way_out(words, said, model, tmp_path):
    words = [tmp_path / "text.txt" if word == "TEXT" else word for word in words]
    found = run(model, *words, "--out", tmp_path / "out")
    assert found.exit_code == 2
    assert said in " ".join(found.stderr.split())
    assert not (tmp_path / "out").exists()


def test_help_has_examples_and_the_schemes():
    text = " ".join(run("--help").stdout.split())
    for word in ("Examples:", "--act-order", "SmoothQuant", "Exit codes", "repeat the command"):
        assert word in text
