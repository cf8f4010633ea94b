"""What is known of the parts of tokenizers: whether texts can be tokenised piece by piece, and in a bounded time.

Long texts are tokenised piece by piece where that is exact: in little memory, and no further than is needed.

A text may be cut between a letter and the space before the next letter (`word| word`, ASCII) if no token of any kind
can lie across such a place and the pieces are cut into words as the whole would be. That holds for byte-level BPE
behind the splits listed in `gguf_splits` and the packaged model's: in all of them a run of letters ends before a space,
a word takes at most one space before it, and nothing looks back. Added tokens must not span such a place, nor swallow
white space. What is not listed is not cut: it is tokenised whole (a test compares both, for every split).
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers
from tokenizers import models

from splittime.text.gguf_splits import SPLITS
from splittime.text.token_bound import described

PIECE_CHARS = 16_384
MOST_WRITTEN = 16  # characters that a harmless normalizer puts in the place of one
_QUICK = {"NFC", "NFKC", "NFD", "NFKD", "Lowercase", "ByteLevel", "Metaspace", "Digits"}
_CUT = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])", re.ASCII)
_PACKAGED = r" {2,}|\n+| ?[\p{L}_]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|\s"
KNOWN_SPLITS = {pattern for split in SPLITS.values() for pattern in split.patterns} | {_PACKAGED}


def can_be_cut(backend: tokenizers.Tokenizer) -> bool:
    """Whether the pieces' tokens are the whole's."""
    if backend.normalizer is not None or not _is_byte_level(backend):
        return False
    added = backend.get_added_tokens_decoder().values()
    return not any(token.lstrip or token.rstrip or re.search(r"\s", token.content) for token in added)


def is_quick(backend: tokenizers.Tokenizer) -> bool:
    """Whether its time is in proportion to the text, whatever the text: BPE behind parts that are known, of which none
    is a regular expression of somebody's own, or writes much for little."""
    parts = [*described(backend.normalizer, "normalizers"), *described(backend.pre_tokenizer, "pretokenizers")]
    return isinstance(backend.model, models.BPE) and all(map(_is_quick, parts))


def _is_quick(part: Mapping[str, Any]) -> bool:
    match part["type"]:
        case "Replace":
            return "String" in part["pattern"] and len(part["content"]) <= MOST_WRITTEN
        case "Prepend":
            return len(part["prepend"]) <= MOST_WRITTEN
        case kind:
            return kind in _QUICK or _is_known(part)


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    if not isinstance(backend.model, models.BPE) or backend.model.dropout:
        return False
    *cutters, last = described(backend.pre_tokenizer, "pretokenizers") or [{"type": ""}]
    has_words = bool(cutters) or last.get("use_regex", False)
    return last["type"] == "ByteLevel" and has_words and all(map(_is_known, cutters))


def _is_known(part: Mapping[str, Any]) -> bool:
    if part["type"] == "Digits":
        return True
    is_plain = part["type"] == "Split" and part["behavior"] == "Isolated" and not part["invert"]
    return is_plain and part["pattern"].get("Regex") in KNOWN_SPLITS


def pieces(text: str) -> Iterator[str]:
    """The text in parts of `PIECE_CHARS` or a little more."""
    begin = 0
    while begin < len(text):
        cut = _CUT.search(text, begin + PIECE_CHARS)
        end = cut.start() if cut else len(text)
        yield text[begin:end]
        begin = end
