"""Prompts cut to their last tokens, against Hugging Face's tokenizers, which cut on the left."""

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

from splittime.core.errors import RequestError
from splittime.text.process import encoded
from splittime.text.tokenizer import Tokenizer

WORDS = ["[CLS]", "[SEP]", "[UNK]", "a", *(f"w{number}" for number in range(20))]


def tokenizer(single: str, pair: str) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["[CLS]", "[SEP]"])
    made.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    return made


FORMS = {
    "bert": ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]"),
    "roberta": ("[CLS] $A [SEP]", "[CLS] $A [SEP] [SEP] $B [SEP]"),
    "plain": ("$A", "$A $B"),
    "begins": ("[CLS] $A", "[CLS] $A [CLS] $B"),
}


def kept_of(*asked: object) -> tuple[int, ...]:
    return encoded(*asked).ids


def words(count: int) -> str:
    return " ".join(f"w{number % 20}" for number in range(count))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("first", [None, 1, 5, 6, 12])
def test_what_is_kept_is_what_hugging_face_keeps(form: str, first: int | None) -> None:
    oracle, ours = tokenizer(*FORMS[form]), Tokenizer(tokenizer(*FORMS[form]))
    for count in (0, 1, 4, 5, 11):
        for kept in range(5, 28):
            oracle.enable_truncation(kept, direction="left")
            pair = (words(count),) if first is None else (words(first), words(count))
            expected = tuple(oracle.encode(*pair).ids)
            assert kept_of(ours, words(count), pair[0] if first else None, True, None, kept) == expected


def test_what_stands_around_a_text_may_leave_it_no_room() -> None:
    ours = Tokenizer(tokenizer(*FORMS["bert"]))
    assert kept_of(ours, words(9), None, True, None, 2) == (WORDS.index("w8"), 1)
    assert kept_of(ours, words(9), None, False, None, 2) == (WORDS.index("w7"), WORDS.index("w8"))
    assert kept_of(ours, words(9), words(3), True, None, 3)[-1] == 1


def test_a_bound_counts_what_is_kept() -> None:
    ours = Tokenizer(tokenizer(*FORMS["bert"]))
    assert len(kept_of(ours, words(9), None, True, 6, 6)) == 6
    for most, kept in ((5, 6), (6, None)):
        with pytest.raises(RequestError, match="at most"):
            kept_of(ours, words(9), None, True, most, kept)


def test_a_begin_of_sequence_that_a_setting_adds_is_kept() -> None:
    config = {"add_bos_token": True, "bos_token": "[CLS]"}
    ours = Tokenizer(tokenizer(*FORMS["plain"]), config=config)
    assert kept_of(ours, words(9), None, True, None, 3) == (0, WORDS.index("w7"), WORDS.index("w8"))


def test_each_text_is_encoded_once_and_its_length_told(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, lengths, encode = Tokenizer(tokenizer(*FORMS["bert"])), [], Tokenizer.encode
    monkeypatch.setattr(
        Tokenizer, "encode", lambda self, text, **how: (lengths.append(len(text)), encode(self, text, **how))[1]
    )
    monkeypatch.setattr(
        Tokenizer, "encode_pair", lambda self, *pair: (lengths.extend(map(len, pair[:2])), (0, 3, 1, 3, 1))[1]
    )
    assert encoded(ours, words(900), None, True, None, 6).whole_len == 902
    assert encoded(ours, words(900), words(700), True, None, 9).whole_len == 1603
    assert sorted(length for length in lengths if length > 1) == sorted(map(len, (words(700), words(900), words(900))))


def test_where_nothing_tells_what_stands_around_a_text_the_last_tokens_are_kept() -> None:
    made = tokenizer(*FORMS["bert"])
    made.normalizer = tokenizers.normalizers.Replace("a", "")
    assert kept_of(Tokenizer(made), words(9), None, True, None, 3) == (WORDS.index("w7"), WORDS.index("w8"), 1)
