"""The tokenizer: any text round-trips, and a prompt is cut as the same text is cut in training."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from training.export import PACKAGED
from training.tokenizer import END_OF_TEXT, END_OF_TEXT_ID, load_tokenizer, train_tokenizer

CODE = "class A:\n    def f(self, x):\n        return self.value + x  # 1234\n\n"


@cache
def packaged() -> Tokenizer:
    return load_tokenizer(PACKAGED / "code")


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_any_unicode_text_round_trips(text: str) -> None:
    if END_OF_TEXT not in text:
        assert packaged().decode(packaged().encode(text).ids) == text


@settings(max_examples=200, deadline=None)
@given(st.binary())
def test_any_bytes_round_trip_through_latin_1(data: bytes) -> None:
    text = data.decode("latin-1")
    assert packaged().decode(packaged().encode(text).ids) == text


def test_every_byte_has_a_token() -> None:
    every_utf8_byte = "".join(map(chr, range(0x800))) + "\U00010000\U0010ffff\uffff"
    assert packaged().decode(packaged().encode(every_utf8_byte).ids) == every_utf8_byte


def test_an_indentation_is_one_token() -> None:
    for width in (4, 8, 12, 16):
        tokens = packaged().encode("\n" + " " * width + "return").tokens
        assert len(tokens) == 3


@pytest.mark.parametrize("prompt", ["def f(x):\n", "def f(x):\n    ", "    self.", "import os\n\n\n", "x = ["])
def test_a_prompt_is_cut_as_the_start_of_a_longer_text(prompt: str) -> None:
    alone = packaged().encode(prompt).ids
    assert packaged().encode(prompt + "value").ids[: len(alone)] == alone


def test_end_of_text_is_one_token() -> None:
    assert packaged().encode(END_OF_TEXT).ids == [END_OF_TEXT_ID]


def test_both_models_have_one_tokenizer() -> None:
    files = [PACKAGED / name / "tokenizer.json" for name in ("code", "code-draft")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_training_twice_gives_one_tokenizer() -> None:
    assert train_tokenizer([CODE], 300).to_str() == train_tokenizer([CODE], 300).to_str()
