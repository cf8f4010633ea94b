"""Tokenizers out of GGUF metadata: ids as llama.cpp lists them for its own vocabularies, as transformers gives them for
the same vocabulary, and errors that name the key."""

import base64
import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splittime.core.errors import ConfigError
from splittime.models.gguf.config import FAMILIES
from splittime.models.gguf.file import GgufFile
from splittime.text.gguf_splits import SPLITS
from splittime.text.gguf_tokenizer import build
from splittime.text.tokenizer import Tokenizer

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
VOCABULARIES = DATA / "tokenizers" / "gguf"
STORIES = DATA / "models" / "stories260K" / "tokenizer.json"
needs_data = pytest.mark.skipif(not VOCABULARIES.exists(), reason=f"no vocabularies in {VOCABULARIES}")
NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6


def byte_level(**changes):
    """All bytes, then some merges of them, then two control tokens and one of the user's."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w"]
    tokens = [*alphabet, *(merge.replace(" ", "") for merge in merges), "<s>", "</s>", "<tool>"]
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": np.array([NORMAL] * (len(tokens) - 3) + [CONTROL, CONTROL, USER], np.int32),
        "merges": merges,
        "bos_token_id": len(tokens) - 3,
        "eos_token_id": len(tokens) - 2,
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


def sentencepiece(**changes):
    words = ["▁", "h", "e", "l", "o", "he", "ll", "hell", "hello", "▁hello"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    values = {
        "model": "llama",
        "tokens": tokens,
        "scores": np.array([0.0] * 259 + [float(-number) for number in range(len(words))], np.float32),
        "token_type": np.array([UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(words), np.int32),
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | changes
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


@needs_data
@pytest.mark.parametrize("name", ["gpt-2", "mpt"])
def test_ids_are_llama_cpp_s(name):
    path = VOCABULARIES / f"ggml-vocab-{name}.gguf"
    tokenizer = build(GgufFile(path).metadata)
    texts = Path(f"{path}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    lines = Path(f"{path}.out").read_text().split("\n")[: len(texts)]
    assert len(texts) == 47
    for text, line in zip(texts, lines, strict=True):
        ids = [int(token) for token in line.split()]
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids) == text


@needs_data
def test_a_bert_vocabulary_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.model is 'bert', must be one of gpt2, llama"):
        build(GgufFile(VOCABULARIES / "ggml-vocab-bert-bge.gguf").metadata)


@needs_data
@given(st.text("aehilnorstuw .,", max_size=60) | st.text(max_size=20))
@settings(max_examples=60, deadline=None)
def test_a_vocabulary_with_scores_splits_as_its_tokenizer_json_does(text):
    assert scored().encode(text) == Tokenizer.load(STORIES.parent).encode(text)


def scored():
    """The stories' vocabulary as GGUF has it: a merge's score is its rank, of its first pair."""
    model = json.loads(STORIES.read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(model["merges"]):
        ranks.setdefault("".join(merge.split(" ") if isinstance(merge, str) else merge), rank)
    scores = np.array([-float(ranks.get(token, 1e6)) for token in tokens], np.float32)
    kinds = [BYTE if token.startswith("<0x") else NORMAL for token in tokens]
    kinds[:3] = [UNKNOWN, CONTROL, CONTROL]
    return build(sentencepiece(tokens=tokens, scores=scores, token_type=np.array(kinds, np.int32)))


def test_byte_level_text_comes_back():
    tokenizer = build(byte_level())
    ids = tokenizer.encode("hello world <tool> ünï\n")
    assert [tokenizer.id_to_token(token) for token in ids[:2]] == ["hello", "Ġw"]
    assert tokenizer.decode(ids, skip_special_tokens=False) == "hello world <tool> ünï\n"
    assert b"".join(tokenizer.token_bytes(token) for token in ids).decode() == "hello world <tool> ünï\n"
    assert tokenizer.special_ids == {tokenizer.bos_token_id, tokenizer.eos_token_id}


def test_sentencepiece_text_comes_back():
    tokenizer = build(sentencepiece())
    ids = tokenizer.encode("hello hell ü")
    assert [tokenizer.id_to_token(token) for token in ids[:4]] == ["<s>", "▁hello", "▁", "hell"]
    assert [tokenizer.id_to_token(token) for token in ids[-2:]] == ["<0xC3>", "<0xBC>"]
    assert tokenizer.decode(ids) == "hello hell ü"
    assert tokenizer.strips_leading_space
    plain = build(sentencepiece(add_space_prefix=False))
    assert plain.encode("hello")[1:] == [tokenizer._backend.token_to_id("hello")]
    assert not plain.strips_leading_space


@pytest.mark.parametrize(("scores", "pieces"), [((-5, -1), ["a", "bc"]), ((-1, -5), ["ab", "c"])])
def test_the_best_score_is_joined_first(scores, pieces):
    vocabulary = {
        "tokens": ["<unk>", "a", "b", "c", "ab", "bc"],
        "scores": np.array([0, -9, -9, -9, *scores], np.float32),
        "token_type": np.array([UNKNOWN] + [NORMAL] * 5, np.int32),
        **{"bos_token_id": None, "eos_token_id": None, "add_space_prefix": False},
    }
    tokenizer = build(sentencepiece(**vocabulary))
    assert [tokenizer.id_to_token(token) for token in tokenizer.encode("abc")] == pieces


@pytest.mark.parametrize(
    ("make", "changes", "begins", "ends"),
    [
        (byte_level, {}, False, False),
        (byte_level, {"pre": "llama-bpe"}, True, False),
        (byte_level, {"pre": "llama-bpe", "add_bos_token": False}, False, False),
        (byte_level, {"add_bos_token": True, "add_eos_token": True}, True, True),
        (sentencepiece, {}, True, False),
        (sentencepiece, {"add_bos_token": False, "add_eos_token": True}, False, True),
        (sentencepiece, {"bos_token_id": None}, False, False),
    ],
)
def test_a_text_begins_and_ends_as_the_file_says(make, changes, begins, ends):
    tokenizer = build(make(**changes))
    ids, plain = tokenizer.encode("hello"), tokenizer.encode("hello", add_special_tokens=False)
    bos, eos = [tokenizer.bos_token_id] * begins, [tokenizer.eos_token_id] * ends
    assert ids == [*bos, *plain, *eos]


def test_chat_templates_by_name():
    metadata = byte_level() | {
        "tokenizer.chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",
        "tokenizer.chat_template.tool_use": "tools",
        "tokenizer.chat_templates": ["tool_use"],
    }
    tokenizer = build(metadata)
    assert tokenizer.render_chat([{"role": "user", "content": "hello"}]) == "<s>hello</s>"
    assert not build(byte_level()).has_chat_template


def test_a_file_without_a_split_is_read_as_llama_cpp_does():
    assert build(byte_level(pre=None)).encode("1234 a") == build(byte_level(pre="default")).encode("1234 a")


@pytest.mark.parametrize("name", SPLITS)
def test_every_split_loses_nothing(name):
    tokenizer = build(byte_level(pre=name))
    text = " Hello  world's 12345 ÄÖ漢字\r\n\n\t'LL …!?  \n x"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("text", "pre", "pieces"),
    [
        ("12345", "llama-bpe", ["123", "45"]),
        ("12345", "qwen2", ["1", "2", "3", "4", "5"]),
        ("12345", "smollm", ["1", "2", "3", "4", "5"]),
        ("12345", "gpt-2", ["12345"]),
        ("I'LL go", "llama-bpe", ["I", "'LL", "Ġgo"]),
        ("I'LL go", "gpt-2", ["I", "'", "LL", "Ġgo"]),
        ("camelCase", "tekken", ["camel", "Case"]),
        ("a\n\nb", "qwen2", ["a", "ĊĊ", "b"]),
        ("I'LL 12345", "glm4", ["I", "'LL", "Ġ", "123", "45"]),
        ("I'LL 12345", "exaone4", ["I", "'", "LL", "Ġ12345"]),
        ("camelCase'S 12345", "gpt-4o", ["camel", "Case'S", "Ġ", "123", "45"]),
        ("a!\n\nb 12", "seed-coder", ["a", "!", "ĊĊ", "b", "Ġ", "1", "2"]),
        ("\u4e2d\u3042\u30aba", "hunyuan-dense", ["\u00e4\u00b8\u0143\u00e3\u0123\u0124\u00e3\u0124\u00ab", "a"]),
        ("12345.com a\u0301", "hunyuan-dense", ["123", "45", ".com", "Ġa\u00cc\u0123"]),
    ],
)
def test_splits_are_those_of_the_models(text, pre, pieces):
    backend = build(byte_level(pre=pre))._backend
    assert [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)] == pieces


@pytest.mark.parametrize(("pre", "pieces"), [("glm4", ["hew"]), ("dbrx", ["he", "w"]), ("gpt-4o", ["he", "w"])])
def test_a_piece_that_is_a_token_is_that_token_whatever_the_merges(pre, pieces):
    metadata = byte_level(pre=pre, token_type=None)
    metadata["tokenizer.ggml.tokens"].append("hew")  # no merge makes it
    tokenizer = build(metadata)
    assert [tokenizer.id_to_token(token) for token in tokenizer.encode("hew")] == pieces


CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
OF_TOKENIZER_JSON = {
    "glm4": [CL100K],
    "dbrx": [CL100K],
    "seed-coder": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "gpt-4o": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "hunyuan-dense": [
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
}
"""As the models' own files have them, and llama.cpp quotes them beside its own."""
LETTERS = (
    "aBzÄß\u0301\u093e\u4e2d\u3042\u30ab\u01c5\u02b0'sSLlTD019\u0664\u00bd \t\r\n\u3000.,!/_-$\u20ac+\u2026\U0001f680"
)


def pieces_of(backend, text):
    return [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]


@cache
def ours_and_theirs(name):
    from tokenizers import Regex, pre_tokenizers

    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in OF_TOKENIZER_JSON[name]]
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return build(byte_level(pre=name))._backend, pre_tokenizers.Sequence([*cuts, as_bytes])


@pytest.mark.parametrize("name", OF_TOKENIZER_JSON)
@given(text=st.text(LETTERS, max_size=40) | st.text(max_size=20))
@settings(max_examples=100, deadline=None)
def test_mixed_text_is_cut_as_by_the_model_s_own_patterns(name, text):
    ours, theirs = ours_and_theirs(name)
    assert pieces_of(ours, text) == [piece for piece, _ in theirs.pre_tokenize_str(text)]


EXPECTED_IDS = VOCABULARIES.parent / "expected_ids.json"


@pytest.mark.skipif(not EXPECTED_IDS.exists(), reason=f"no {EXPECTED_IDS}")
@pytest.mark.parametrize(("name", "encoding"), [("dbrx", "cl100k_base"), ("gpt-4o", "o200k_base")])
def test_ids_are_tiktoken_s(name, encoding):
    """Each piece of the split is joined by rank, as that library does."""
    from tokenizers import pre_tokenizers

    byte_of = {chr(code): code for code in (*range(33, 127), *range(161, 173), *range(174, 256))}
    byte_of |= dict(
        zip(sorted(set(pre_tokenizers.ByteLevel.alphabet()) - byte_of.keys()), _others(byte_of), strict=True)
    )
    lines = (EXPECTED_IDS.parent / f"{encoding}.tiktoken").read_text().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(str.split, lines)}
    backend, expected = build(byte_level(pre=name))._backend, json.loads(EXPECTED_IDS.read_text())
    for text, ids in zip(expected["texts"], expected["tokenizers"][encoding]["ids"], strict=True):
        pieces = [bytes(byte_of[each] for each in piece) for piece in pieces_of(backend, text)]
        assert [number for piece in pieces for number in _joined(piece, ranks)] == ids, text


def _others(byte_of):
    return [code for code in range(256) if code not in set(byte_of.values())]


def _joined(piece, ranks):
    parts = [bytes([one]) for one in piece]
    while len(parts) > 1:
        rank, at = min((ranks.get(parts[i] + parts[i + 1], len(ranks)), i) for i in range(len(parts) - 1))
        if rank == len(ranks):
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [ranks[part] for part in parts]


SENTENCEPIECE = None
PUBLISHED = {
    "llama": (SENTENCEPIECE, "llama-bpe", "smaug-bpe", "tekken", "falcon3", "smollm", "deepseek-coder"),
    **dict.fromkeys(("qwen2", "qwen2moe"), ("qwen2", "deepseek-r1-qwen")),
    **dict.fromkeys(("qwen3", "qwen3moe", "dots1"), ("qwen2",)),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "ernie4_5", "ernie4_5-moe"), (SENTENCEPIECE,)),
    **{"smollm3": ("smaug-bpe",), "phi3": (SENTENCEPIECE, "dbrx", "gpt-4o")},
    **dict.fromkeys(("granite", "granitemoe"), ("refact", "dbrx")),
    **{"olmo2": ("dbrx",), "olmoe": ("olmo",), "seed_oss": ("seed-coder",), "exaone4": ("exaone4",)},
    **dict.fromkeys(("glm4", "glm4moe"), ("glm4",)),
    **{
        "command-r": ("command-r",),
        "cohere2": ("command-r",),
        "starcoder2": ("starcoder",),
        "hunyuan-moe": ("hunyuan",),
    },
    **{"hunyuan-dense": ("hunyuan-dense",), "mistral3": ("tekken",), "gpt-oss": ("gpt-4o",)},
}
"""What llama.cpp's converter writes as `tokenizer.ggml.pre` for the models of each family."""


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_that_is_listed_has_a_tokenizer(family):
    for name in PUBLISHED[family]:
        build(sentencepiece() if name is SENTENCEPIECE else byte_level(pre=name))


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({}, r"tokenizer\.ggml\.tokens is missing"),
        (byte_level(model="t5"), r"model is 't5', must be one of gpt2, llama"),
        (byte_level(pre="unheard-of"), r"pre is 'unheard-of', must be one of gpt-2"),
        (byte_level(tokens=["a", "b", "a"], token_type=None), r"tokens is 'a', must be a list without repetitions"),
        (byte_level(tokens=[]), r"tokens is 0 values"),
        (byte_level(token_type=np.array([1, 1], np.int32)), r"token_type is 2 values, must be one number for each"),
        (byte_level(token_type=["x"]), r"token_type is 1 values, must be one number"),
        (byte_level(merges=["h x e"]), r"merges"),
        (byte_level(merges=["he"]), r"merges"),
        (byte_level(merges=None), r"merges is missing"),
        (byte_level(bos_token_id=1 << 31), r"bos_token_id is 2147483648, must be the id of one of"),
        (byte_level(eos_token_id=True), r"eos_token_id is True"),
        (byte_level(add_bos_token=1), r"add_bos_token is 1, must be a truth value"),
        (sentencepiece(scores=None), r"scores is missing"),
        (sentencepiece(remove_extra_whitespaces=True), r"remove_extra_whitespaces is True, must be false"),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_key(metadata, said):
    with pytest.raises(ConfigError, match=said):
        build(metadata)
