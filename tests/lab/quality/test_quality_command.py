"""`splittime quality` as a user runs it: what is printed where, what is refused, and exit codes."""

import json
import shutil
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from benchmarks.scenarios.quality_gate import PACKAGED, write_four_bits
from splittime.cli.main import app
from splittime.lab.quality.documents import python_documents

pytestmark = pytest.mark.timeout(600)  # processes of its own, on a busy machine

RUN = CliRunner()
FEW = ("--tokens", "1600", "--length", "128", "--num-threads", "1", "--max-model-len", "256")


def quality(*words):
    return RUN.invoke(app, ["quality", *words])


def test_a_pass_with_its_reports(tmp_path):
    page = tmp_path / "deep" / "q.html"
    result = quality("code", "code", *FEW, "--html", str(page))
    assert result.exit_code == 0, result.output
    assert "PASS" in result.stdout
    assert "KL, mean" in result.stdout
    assert page.read_text().startswith("<!doctype html>")


def test_a_failure_says_why_on_standard_output(tmp_path):
    """Of a short text: the whole of the usual one takes seconds to tokenise."""
    text = tmp_path / "text.txt"
    text.write_text("<|endoftext|>".join(one.text for one in python_documents(60)[:24]))
    few = (*FEW, "--text", str(text))
    result = quality("code", "code", "--candidate-quantization", "int4", *few, "--margin-kl", "1e-6", "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert (report["verdict"], report["base"]["name"]) == ("FAIL", "code")
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
    (("code", "code", "--candidate-quantization", "int3"), "quantization = 'int3' is none of"),
    (("code", "code", "--candidate-kv-cache-dtype", "int4"), "kv_cache_dtype = 'int4' is none of"),
    (("code", "code", "--length", "short,tall"), "--length has 'tall'"),
    (("code", "code", "--text", "none.txt"), "no such text: none.txt"),
    (("code", "code", "--choices", "none.csv"), "cannot read none.csv"),
    (("code", "http://127.0.0.1:9", "--candidate-quantization", "int8"), "cannot be set of the server"),
    (("http://127.0.0.1:9", "http://127.0.0.1:9"), "two servers need --tokenizer"),
    (("code", "code", "--margin-top1", "2", *FEW), "the margin of top1 is 2"),
])  # fmt: skip
@pytest.mark.sample(6)
def test_what_cannot_be_run_is_no_verdict(words, told):
    result = quality(*words)
    assert result.exit_code == 2
    assert told in result.stderr
    assert result.stdout == ""


@pytest.fixture(scope="module")
def four_bits_in_words(tmp_path_factory):
    """The packaged model, all of it in floats, whose config says 4 bits and excepts every linear weight by name."""
    folder = write_four_bits(tmp_path_factory.mktemp("words"))
    shutil.copy(PACKAGED / "model.safetensors", folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["self_attn", "mlp"]
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("words", [
    ("serve", "CLAIMS", "--port", "0"), ("generate", "CLAIMS", "-p", "x"), ("quality", "code", "CLAIMS", *FEW),
])  # fmt: skip
@pytest.mark.sample(1)
def test_four_bits_that_are_only_said_are_refused_by_every_command(four_bits_in_words, words):
    command = [sys.executable, "-m", "splittime.cli.main", *words]
    command[command.index("CLAIMS")] = four_bits_in_words
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    said = "quantization_config says awq, 4 bits, and no weight in the files has them: model.layers.0.mlp.down_proj"
    assert said in " ".join(done.stderr.split())


@pytest.mark.sweep
def test_the_claim_of_a_candidate_is_its_file_s(tmp_path):
    result = quality("code", str(write_four_bits(tmp_path / "four")), *FEW, "--json")
    assert result.exit_code in (0, 2), result.output
    candidate = json.loads(result.stdout)["candidate"]
    assert candidate["claims"] == ["weights.int4"]
    assert candidate["facts"]["stored"] == "awq, 4 bits: 28 of 28 linear weights of the layers"
    assert "rounded to nearest" not in result.stdout  # progress names its arms by it


def test_a_tokenizer_with_400_ids_exchanged_is_no_verdict(tmp_path):
    shutil.copytree(PACKAGED, tmp_path / "swapped")
    values = json.loads((PACKAGED / "tokenizer.json").read_text())
    vocab = values["model"]["vocab"]
    rare = sorted(vocab, key=vocab.__getitem__)[-400:]
    for one, other in zip(rare[::2], rare[1::2], strict=True):
        vocab[one], vocab[other] = vocab[other], vocab[one]
    (tmp_path / "swapped" / "tokenizer.json").write_text(json.dumps(values))
    result = quality("code", str(tmp_path / "swapped"), *FEW)
    assert result.exit_code == 2
    assert "different tokenizers (400 ids of their vocabularies" in " ".join(result.stderr.split())


def test_help_names_every_measure():
    text = quality("--help").stdout
    for flag in ("--text", "--choices", "--answers", "--needle", "--candidate-kv-cache-dtype", "--margin-kl"):
        assert flag in text
    assert "Examples:" in text
