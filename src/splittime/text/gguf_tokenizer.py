"""A `Tokenizer` from the metadata of a GGUF file (`tokenizer.ggml.*`, `tokenizer.chat_template`).

    tokenizer.ggml.model   the vocabulary                                      built as
    gpt2                   byte-level BPE: tokens, merges, how to cut a text   BPE over bytes (`gguf_splits`)
    llama                  sentencepiece: tokens with scores, bytes as <0x0A>  BPE, its merges made from the scores

A sentencepiece text is joined by always making the token of the best score from two neighbours. That is BPE whose
merges are every pair of tokens that is a token, the best score first. (Where two different tokens have the same score,
sentencepiece takes the leftmost in the text and we the lower id; trained vocabularies number their scores.)

Control tokens are special, user-defined ones are found in a text and are not; begin and end of sequence are added as
the file says. Unknown kinds are refused by name; so is a vocabulary with one token twice, whose ids are ambiguous.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from splittime.core.errors import ConfigError
from splittime.text.gguf_splits import SPLITS
from splittime.text.tokenizer import Tokenizer

PREFIX = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
SPECIAL_NAMES = ("bos", "eos", "unknown", "padding", "eot", "eom")
SPACE = "▁"
MAX_CHARACTERS = 1 << 24  # of a sentencepiece vocabulary, which is cut at each of them: 8 times the largest published


def build(metadata: Mapping[str, Any], chat_template: str | None = None) -> Tokenizer:
    """chat_template: instead of the file's own. Raises `ConfigError` naming the key that is missing or cannot be
    served."""
    found = _Vocabulary(metadata)
    kind = found.text("model")
    makers = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in makers:
        raise _bad("model", kind, f"one of {', '.join(makers)}")
    backend, adds_bos = makers[kind](found)
    added = [found.added(number) for number, each in enumerate(found.kinds) if each in (CONTROL, USER_DEFINED)]
    backend.add_tokens(added)
    _add_ends(backend, found, adds_bos)
    config = {f"{name}_token": found.tokens[number] for name, number in found.special.items()}
    own = metadata.get(TEMPLATE)
    template = chat_template or (own if isinstance(own, str) else None)
    return Tokenizer(backend, config=config, chat_template=template)


class _Vocabulary:
    """The checked metadata. kinds: of each token. special: ids by "bos", "eos", ..., where the file names one."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata
        self.tokens: list[str] = self._texts("tokens")
        self.ids = {token: number for number, token in enumerate(self.tokens)}
        if len(self.ids) < len(self.tokens):
            twice = next(token for number, token in enumerate(self.tokens) if self.ids[token] != number)
            raise _bad("tokens", twice, "a list without repetitions")
        self.kinds: list[int] = self._numbers("token_type") or [NORMAL] * len(self.tokens)
        pairs = [(name, self._id(f"{name}_token_id")) for name in SPECIAL_NAMES]
        self.special = {name: number for name, number in pairs if number is not None}

    def added(self, number: int) -> AddedToken:
        return AddedToken(self.tokens[number], special=self.kinds[number] == CONTROL, normalized=False)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._metadata.get(PREFIX + key, default)
        if not isinstance(value, str):
            raise _bad(key, value, "a text")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._metadata.get(PREFIX + key, default)
        if not isinstance(value, bool):
            raise _bad(key, value, "a truth value")
        return value

    def merges(self) -> list[tuple[str, str]]:
        pairs = [merge.partition(" ") for merge in self._texts("merges")]
        return [(left, right) for left, _, right in pairs]

    def scores(self) -> list[float]:
        found = self._numbers("scores")
        if not found:
            raise _bad("scores", None, "one number for each token")
        return found

    def _texts(self, key: str) -> list[str]:
        value = self._metadata.get(PREFIX + key)
        if not isinstance(value, list) or not value or not all(isinstance(each, str) for each in value):
            raise _bad(key, value, "a list of texts, not empty")
        return value

    def _numbers(self, key: str) -> list[Any]:
        value = self._metadata.get(PREFIX + key)
        if value is None:
            return []
        if isinstance(value, list) or not hasattr(value, "tolist") or len(value) != len(self.tokens):
            raise _bad(key, value, f"one number for each of {len(self.tokens)} tokens")
        return value.tolist()

    def _id(self, key: str) -> int | None:
        value = self._metadata.get(PREFIX + key)
        is_id = type(value) is int and 0 <= value < len(self.tokens)
        if value is not None and not is_id:
            raise _bad(key, value, f"the id of one of {len(self.tokens)} tokens")
        return value


def _byte_level(found: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    name = found.text("pre", "default")
    split = SPLITS.get(name)
    if split is None:
        raise _bad("pre", name, f"one of {', '.join(SPLITS)}")
    backend = _bpe(found, found.merges(), ignore_merges=split.ignores_merges)
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=found.flag("add_space_prefix", False), use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, as_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend, split.adds_bos


def _sentencepiece(found: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    if found.flag("remove_extra_whitespaces", False):
        raise _bad("remove_extra_whitespaces", True, "false, as decoder models have it")
    unknown = next((token for token, kind in zip(found.tokens, found.kinds, strict=True) if kind == UNKNOWN), None)
    characters = sum(map(len, found.tokens))
    if characters > MAX_CHARACTERS:
        raise _bad("tokens", characters, f"texts of at most {MAX_CHARACTERS} characters in all")
    merges = _merges_of(found.tokens, found.kinds, found.scores())
    backend = _bpe(found, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    begins = found.flag("add_space_prefix", True)
    spaces = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if begins else spaces
    chain = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*chain, *([decoders.Strip(" ", 1, 0)] if begins else [])])
    return backend, True


def _bpe(found: _Vocabulary, merges: list[tuple[str, str]], **options: Any) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(vocab=found.ids, merges=merges, **options))
    except Exception as error:  # the library raises nothing more specific
        raise _bad("merges", str(error), "pairs of tokens, with a space between, that make a token") from None


def _merges_of(tokens: Sequence[str], kinds: Sequence[int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every pair of normal tokens that is one, best score first."""
    normal = {token for token, kind in zip(tokens, kinds, strict=True) if kind == NORMAL}
    found = [
        (-score, token[:cut], token[cut:])
        for token, kind, score in zip(tokens, kinds, scores, strict=True)
        if kind == NORMAL
        for cut in range(1, len(token))
        if token[:cut] in normal and token[cut:] in normal
    ]
    found.sort(key=lambda merge: merge[0])
    return [(left, right) for _, left, right in found]


def _add_ends(backend: tokenizers.Tokenizer, found: _Vocabulary, adds_bos: bool) -> None:
    """Begin and end of sequence around a text."""
    ends = {"bos": found.flag("add_bos_token", adds_bos), "eos": found.flag("add_eos_token", False)}
    used = {name: found.special[name] for name, is_added in ends.items() if is_added and name in found.special}
    if used:
        single = " ".join([*(["bos"] if "bos" in used else []), "$A", *(["eos"] if "eos" in used else [])])
        special = [{"id": name, "ids": [number], "tokens": [found.tokens[number]]} for name, number in used.items()]
        backend.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)


def _bad(key: str, value: Any, want: str) -> ConfigError:
    shown = f"{len(value)} values" if isinstance(value, list) or hasattr(value, "tolist") else repr(value)
    said = "is missing" if value is None else f"is {shown}"
    message = f"the GGUF file's {PREFIX}{key} {said}, must be {want}"
    return ConfigError(message, param="model", value=None if value is None else shown)
