"""The benchmark of embeddings on an encoder that it makes: all get the same inputs, and their vectors are equal."""

import json
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from benchmarks.scenarios import embeddings
from benchmarks.scenarios.encoder_shapes import SHAPES, EncoderShape, _write_tokenizer

TINY = EncoderShape(layers=2, width=32, heads=4, inner=48, vocabulary=60)


def test_an_encoder_of_a_shape_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setitem(SHAPES, "minilm", TINY)
    monkeypatch.setattr(sys, "argv", ["embeddings", "--shape", "minilm", "--small", "--threads", "1", "--json"])
    monkeypatch.setattr(
        embeddings,
        "file_result",
        lambda name, figures, given, is_json: print(json.dumps([name, given["shape"], figures])),
    )
    embeddings.main()
    name, shape, figures = json.loads(capsys.readouterr().out)
    assert (name, shape) == ("embeddings_minilm", "minilm")
    assert figures["largest_difference"] < 1e-5
    assert figures["ratio_from"] <= figures["ratio"] <= figures["ratio_to"]


def test_texts_become_the_ids_that_the_others_get(tmp_path: Path) -> None:
    _write_tokenizer(tmp_path, TINY)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for ids in embeddings.drawn(20, 3, 30, TINY.vocabulary, with_marks=True):
        assert tokenizer.encode(" ".join(f"w{token}" for token in ids[1:-1])).ids == list(ids)


def test_a_shape_and_a_model_are_not_both_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["embeddings", "--shape", "minilm", "--model", "x"])
    with pytest.raises(SystemExit):
        embeddings.main()
