"""Two models are compared where both read a text as the same ids: by vocabularies, merges, and the texts themselves."""

import json

import pytest

from splittime.assemble.model_source import locate
from splittime.core.errors import ConfigError
from splittime.lab.quality.local import PROBE, same_tokens
from splittime.text.tokenizer import Tokenizer

PACKAGED = locate("code")


def swapped(folder, out, number):
    """The packaged model with so many pairs of rare ids exchanged in its tokenizer."""
    out.mkdir()
    for path in folder.iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    values = json.loads((folder / "tokenizer.json").read_text())
    vocab = values["model"]["vocab"]
    rare = [token for token, place in vocab.items() if place >= 4096 - 2 * number]
    for one, other in zip(rare[::2], rare[1::2], strict=True):
        vocab[one], vocab[other] = vocab[other], vocab[one]
    (out / "tokenizer.json").write_text(json.dumps(values))
    return Tokenizer.load(out)


def test_a_swapped_tokenizer_is_refused_by_its_vocabulary(tmp_path):
    own = Tokenizer.load(PACKAGED)
    other = swapped(PACKAGED, tmp_path / "swapped", 200)
    assert own.encode(PROBE) == other.encode(PROBE), "the probe does not touch what was swapped"
    with pytest.raises(ConfigError, match="400 ids of their vocabularies; id "):
        same_tokens([own, other])
    same_tokens([own, Tokenizer.load(PACKAGED)], ["import os\n"])


def test_other_merges_and_other_ids_of_the_texts_are_refused(tmp_path):
    own = Tokenizer.load(PACKAGED)
    values = json.loads((PACKAGED / "tokenizer.json").read_text())
    values["model"]["merges"].append(values["model"]["merges"].pop(100))
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="their merges"):
        same_tokens([own, Tokenizer.load(tmp_path)])
    values = json.loads((PACKAGED / "tokenizer.json").read_text())
    values["normalizer"] = {"type": "Replace", "pattern": {"String": "zebra"}, "content": "horse"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    same_tokens([own, Tokenizer.load(tmp_path)], ["import os"])
    with pytest.raises(ConfigError, match="begins with 'a zebra'"):
        same_tokens([own, Tokenizer.load(tmp_path)], ["import os", "a zebra"])
