"""The least number of tokens is never more than there are, and where nothing can be proved nothing is said."""

import json
import random
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from splittime.assemble import model_source
from splittime.text.foreign_code import KNOWN_SPLITS, PIECE_CHARS, byte_alphabet, num_bytes, pieces
from splittime.text.gguf_splits import SPLITS
from splittime.text.tokenizer import Tokenizer

DATA = Path(__file__).parents[3] / "shared" / "data"
PARTS = [
    "a",
    " ",
    "\n",
    "word",
    " word",
    "  ",
    "\t",
    "Ünï",
    "木",
    "🦙",
    "e\u0301",
    "\u212b",
    "ﬃ",
    "9",
    "!?",
    "<x>",
    "\u00a0",
]
TEXTS = st.lists(st.one_of(st.sampled_from(PARTS), st.text(max_size=5)), max_size=60).map("".join).map(lambda s: s * 3)


def of_bytes(*, merges: tuple[str, ...] = (), **parts: object) -> tokenizers.Tokenizer:
    vocabulary = dict(byte_alphabet())
    pairs = [tuple(merge.split("_")) for merge in merges]
    for left, right in pairs:
        vocabulary[left + right] = len(vocabulary)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    for name, value in parts.items():
        setattr(backend, name, value)
    return backend


def of_characters(**settings: object) -> tokenizers.Tokenizer:
    vocabulary = {"<unk>": 0, **{character: number for number, character in enumerate("▁abcdowr", 1)}, "▁wo": 9}
    return tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], **settings))


def with_added(backend: tokenizers.Tokenizer, *tokens: AddedToken) -> tokenizers.Tokenizer:
    backend.add_tokens(list(tokens))
    return backend


def without_text(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    template = processors.TemplateProcessing(single="[X]", pair="$A $B", special_tokens=[("[X]", 0)])
    backend.post_processor = template
    return backend


MERGES = ("a_a", "aa_aa", "aaaa_aaaa", "Ġ_Ġ", "ĠĠ_ĠĠ", "Ġ_w")
PROVED = {
    "bytes": of_bytes(merges=MERGES),
    "composed": of_bytes(merges=MERGES, normalizer=normalizers.NFC()),
    "compatible": of_bytes(merges=MERGES, normalizer=normalizers.NFKC()),
    "lower": of_bytes(merges=MERGES, normalizer=normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase()])),
    "shortened": of_bytes(merges=MERGES, normalizer=normalizers.Replace("word", "w")),
    "swallowing": with_added(of_bytes(merges=MERGES), AddedToken("<x>", lstrip=True, rstrip=True)),
    "long added": with_added(of_bytes(merges=MERGES), AddedToken("word " * 20)),
    "one unknown each": of_characters(unk_token="<unk>"),
}
UNPROVED = {
    "replaced by what no byte is written as": of_bytes(
        normalizer=normalizers.Sequence([normalizers.ByteLevel(), normalizers.Replace("a", "\u03a9")]),
        pre_tokenizer=None,
    ),
    "made white, and swallowed": with_added(
        of_bytes(normalizer=normalizers.Replace("x", " ")), AddedToken("<x>", lstrip=True, normalized=True)
    ),
    "left out by the template": without_text(of_bytes()),
    "unknown vanish": of_characters(),
    "unknown fused": of_characters(unk_token="<unk>", fuse_unk=True),
    "accents stripped": of_bytes(normalizer=normalizers.StripAccents()),
    "replaced by expression": of_bytes(normalizer=normalizers.Replace(Regex("a+"), "a")),
    "deleted": of_bytes(normalizer=normalizers.Replace(" ", "")),
    "spaces dropped": of_bytes(
        pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()])
    ),
    "removed": of_bytes(
        pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()])
    ),
    "words": tokenizers.Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>")),
}


def real_tokenizers() -> list:
    packaged = Path(str(model_source.locate("code")))
    folders = [packaged, *sorted(path.parent for path in (DATA / "models").glob("*/tokenizer.json"))]
    files = sorted((DATA / "tokenizers" / "gguf").glob("*.gguf"))
    return [pytest.param(path, id=path.name) for path in (*folders, *(f for f in files if "bert" not in f.name))]


def holds(tokenizer: Tokenizer, text: str) -> None:
    if tokenizer.bound is not None:
        assert tokenizer.bound.least_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False)), text[:200]


@pytest.mark.parametrize("name", PROVED)
def test_the_bound_never_refuses_what_would_fit(name: str) -> None:
    tokenizer = Tokenizer(PROVED[name], config={"add_bos_token": False, "bos_token": "a"})
    assert tokenizer.bound is not None

    @settings(max_examples=150, deadline=None)
    @given(TEXTS)
    def check(text: str) -> None:
        holds(tokenizer, text)

    check()
    for text in (
        "a" * 1000,
        " " * 1000,
        "word " * 200,
        "\u00e9" * 500,
        "e\u0301" * 500,
        "\u1f82" * 300,
        "<x>" + " " * 999,
    ):
        holds(tokenizer, text)


@pytest.mark.parametrize("name", UNPROVED)
def test_there_is_no_bound_where_one_token_may_stand_for_any_text(name: str) -> None:
    assert Tokenizer(UNPROVED[name]).bound is None


@pytest.mark.parametrize("path", real_tokenizers())
def test_the_bound_of_real_tokenizers_never_refuses_what_would_fit(path: Path) -> None:
    tokenizer = model_source.load_tokenizer(path)
    rng, vocabulary = random.Random(7), tokenizer.vocab_size
    longest = sorted(range(vocabulary), key=lambda number: -len(tokenizer.token_bytes(number)))[:20]
    for number in longest:  # a text of nothing but its longest tokens has the fewest
        holds(tokenizer, tokenizer.decode([number], skip_special_tokens=False) * 300)
    for _ in range(30):
        ids = [rng.randrange(vocabulary) for _ in range(200)]
        holds(tokenizer, tokenizer.decode(ids, skip_special_tokens=False))
    assert tokenizer.bound is None or tokenizer.bound.least_tokens("a" * 4_100_000) > 2047


def test_bytes_are_counted_as_utf_8() -> None:
    assert [num_bytes(text) for text in ("abc", "é", "木", "🦙")] == [3, 2, 3, 4]


# ---- pieces

WORDS = [
    "hello",
    "world",
    "don't",
    "x1",
    "12345",
    "ünï",
    "木",
    "a\n",
    "  ",
    "\n\n  ",
    "!?",
    "(",
    "the",
    "Fox",
    "<|end|>",
]


@pytest.mark.parametrize("pattern", sorted(KNOWN_SPLITS))
def test_pieces_of_a_long_text_are_the_whole(pattern: str, monkeypatch) -> None:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    check_pieces(of_bytes(merges=MERGES, pre_tokenizer=pre_tokenizers.Sequence([split, byte_level])), monkeypatch)


@pytest.mark.parametrize("adds_space", [False, True])
def test_pieces_are_the_whole_behind_gpt_2s_own_split(adds_space: bool, monkeypatch) -> None:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=adds_space)
    check_pieces(of_bytes(merges=MERGES, pre_tokenizer=byte_level), monkeypatch)


@pytest.mark.parametrize("path", real_tokenizers())
def test_pieces_are_the_whole_with_real_tokenizers(path: Path, monkeypatch) -> None:
    check_pieces(model_source.load_tokenizer(path)._backend, monkeypatch)


def check_pieces(backend: tokenizers.Tokenizer, monkeypatch) -> None:
    monkeypatch.setattr("splittime.text.foreign_code.PIECE_CHARS", 20)
    tokenizer, rng = Tokenizer(backend), random.Random(3)
    for _ in range(200):
        text = "".join(rng.choice(WORDS) + rng.choice(["", " ", " ", " ", "  ", "\n"]) for _ in range(60))
        assert "".join(pieces(text)) == text
        assert tokenizer.encode(text) == backend.encode(text).ids


def test_a_text_with_too_many_tokens_is_left_where_that_is_known(monkeypatch) -> None:
    tokenizer = Tokenizer(of_bytes(merges=MERGES))
    sizes: list[int] = []
    ids = Tokenizer._ids
    monkeypatch.setattr(
        Tokenizer, "_ids", lambda self, text, special: sizes.append(len(text)) or ids(self, text, special)
    )
    with pytest.raises(Exception, match="tokens or more") as caught:
        tokenizer.encode("hello world " * 50_000, most_tokens=80_000)
    assert caught.value.info.code == "context_length_exceeded"
    assert sum(sizes) < 80_000 + 2 * PIECE_CHARS
    assert max(sizes) < PIECE_CHARS + 20


def test_what_is_not_known_is_not_cut() -> None:
    own = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex("[a-z ]+"), "isolated"), pre_tokenizers.ByteLevel()])
    assert not Tokenizer(of_bytes(pre_tokenizer=own))._can_be_cut
    assert not Tokenizer(of_bytes(normalizer=normalizers.NFC()))._can_be_cut
    assert not Tokenizer(with_added(of_bytes(), AddedToken("a b")))._can_be_cut
    assert Tokenizer(of_bytes())._can_be_cut


def test_an_expression_of_somebody_is_not_called_quick() -> None:
    evil = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex("(a+)+$"), "isolated"), pre_tokenizers.ByteLevel()])
    assert not Tokenizer(of_bytes(pre_tokenizer=evil)).is_quick
    assert not Tokenizer(of_bytes(normalizer=normalizers.Replace(" ", "x" * 10**6))).is_quick
    assert Tokenizer(of_bytes(normalizer=normalizers.NFC())).is_quick
    assert {pattern for split in SPLITS.values() for pattern in split.patterns} <= KNOWN_SPLITS


def test_a_tokenizers_own_truncation_and_padding_are_not_heeded() -> None:
    backend = of_bytes()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    assert Tokenizer(backend).encode("hello!") == list(b"hello!")


def test_a_tokenizer_goes_to_another_process_unchanged() -> None:
    tokenizer = Tokenizer(of_bytes(merges=MERGES), config={"bos_token": "a", "add_bos_token": True}, chat_template="x")
    again = Tokenizer.described(tokenizer.describe())
    assert again.encode("hello  wor") == tokenizer.encode("hello  wor")
    assert (again.bos_token_id, again.render_chat([])) == (tokenizer.bos_token_id, "x")
    assert json.loads(again._backend.to_str()) == json.loads(tokenizer._backend.to_str())
