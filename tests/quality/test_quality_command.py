"""`splittime quality` as a user runs it: what is printed where, what is refused, and exit codes."""

import json

import pytest
from typer.testing import CliRunner

from splittime.cli.main import app

RUN = CliRunner()
FEW = ("--tokens", "1600", "--length", "128", "--num-threads", "1", "--max-model-len", "256")


def quality(*words):
    return RUN.invoke(app, ["quality", *words])


def test_a_pass_with_its_reports(tmp_path):
    page = tmp_path / "deep" / "q.html"
    result = quality("code", "code", *FEW, "--json", str(tmp_path / "q.json"), "--html", str(page))
    assert result.exit_code == 0, result.output
    assert "PASS" in result.stdout
    assert "KL, mean" in result.stdout
    report = json.loads((tmp_path / "q.json").read_text())
    assert (report["verdict"], report["base"]["name"]) == ("PASS", "code")
    assert page.read_text().startswith("<!doctype html>")


def test_a_failure_says_why_on_standard_output():
    result = quality("code", "code", "--candidate-quantization", "int4", *FEW, "--margin-kl", "1e-6", "--json", "-")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["verdict"] == "FAIL"
    assert report["margins"]["kl"] == 1e-6
    assert any("KL, mean is beyond its margin" in reason for reason in report["reasons"])


def test_two_halves_of_a_short_text_give_no_verdict(tmp_path):
    (tmp_path / "a.txt").write_text("def f(x):\n    return x\n" * 9 + "<|endoftext|>" + "class A:\n    pass\n" * 9)
    result = quality("code", "code", "--text", str(tmp_path / "a.txt"), *FEW)
    assert result.exit_code == 2
    assert "INCONCLUSIVE" in result.stdout
    assert "2 documents are too few" in result.stdout


@pytest.mark.parametrize(("words", "told"), [
    (("code", "no-such-folder"), "no folder 'no-such-folder'"),
    (("code", "code", "--candidate-quantization", "int3"), "quantization is 'int3'"),
    (("code", "code", "--candidate-kv-cache-dtype", "int4"), "kv_cache_dtype is 'int4'"),
    (("code", "code", "--length", "short,tall"), "--length has 'tall'"),
    (("code", "code", "--text", "none.txt"), "no such text: none.txt"),
    (("code", "code", "--choices", "none.csv"), "cannot read none.csv"),
    (("code", "http://127.0.0.1:9", "--candidate-quantization", "int8"), "cannot be set of the server"),
    (("code", "http://127.0.0.1:9", "--text", "pyproject.toml"), "cannot ask http://127.0.0.1:9"),
    (("http://127.0.0.1:9", "http://127.0.0.1:9"), "two servers need --tokenizer"),
    (("code", "code", "--margin-top1", "2", *FEW), "the margin of top1 is 2"),
])  # fmt: skip
def test_what_cannot_be_run_is_no_verdict(words, told):
    result = quality(*words)
    assert result.exit_code == 2
    assert told in result.stderr
    assert result.stdout == ""


def test_help_names_every_measure():
    text = quality("--help").stdout
    for flag in ("--text", "--choices", "--answers", "--needle", "--candidate-kv-cache-dtype", "--margin-kl"):
        assert flag in text
    assert "Examples:" in text
