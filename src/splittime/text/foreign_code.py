"""A tokenizer and a chat template are other people's programs: what is proved of them, and what follows a failure.

**How few tokens a text can be**, known from its length: what can never fit is refused before anybody tokenises it.

    least_tokens(text) = weight // most_bytes - 1        weight: the text's bytes, or its bytes that are no white space

`most_bytes` is proved from the tokenizer's own description, part by part: by how much its normalizer may shorten a
text, that its pre-tokenizer throws nothing away, that its model spells every text (no character vanishes, no run of
unknown ones becomes one token), and how long its longest token is. Added tokens that swallow the white space beside
them leave the other bytes to be counted. One token less allows for a begin-of-sequence that `add_bos_token` takes away.
A part that is not listed here proves nothing. Then there is no bound, and what holds is what a worker may take
(`text.process`). Unicode's normal forms decompose a character into four at most, and a character has four bytes at
most: composing shortens a text 16 times at most, decomposing four times.

**Where a text may be cut**: long texts are tokenised piece by piece where that is exact, in little memory, and no
further than is needed. A text may be cut between a letter and the space before the next letter (`word| word`, ASCII)
if no token of any kind can lie across such a place and the pieces are cut into words as the whole would be. That holds
for byte-level BPE behind the splits listed in `gguf_splits` and the packaged model's: in all of them a run of letters
ends before a space, a word takes at most one space before it, and nothing looks back. Added tokens must not span such
a place, nor swallow white space. What is not listed is tokenised whole (a test compares both, for every split).

**Failures**: the request that ran the program is told, and nobody else. `tokenizers` is written in Rust: a fault in
there arrives as `pyo3_runtime.PanicException`, which is a `BaseException`, so that `except Exception` does not see it.
Interrupts, exits and cancellations are somebody else's and go on.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import models

from splittime.core.errors import EngineError, RequestError, SplittimeError
from splittime.text.gguf_splits import SPLITS

_SHRINKS = {"NFC": 16, "NFKC": 16, "NFD": 4, "NFKD": 4, "Lowercase": 4, "Prepend": 1, "ByteLevel": 1}
_KEEPS_ALL = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"}  # pre-tokenizers that drop no text
_CUTS = {"Split", "Punctuation"}  # so do these, unless their behaviour is to remove
BYTES_OF_A_CHARACTER = 4
PIECE_CHARS = 16_384
MOST_WRITTEN = 16  # characters that a harmless normalizer puts in the place of one
_QUICK = {"NFC", "NFKC", "NFD", "NFKD", "Lowercase", "ByteLevel", "Metaspace", "Digits"}
_CUT = re.compile(r"(?<=[A-Za-z])(?= [A-Za-z])", re.ASCII)
_PACKAGED = r" {2,}|\n+| ?[\p{L}_]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|\s"
KNOWN_SPLITS = {pattern for split in SPLITS.values() for pattern in split.patterns} | {_PACKAGED}


@dataclass(frozen=True, slots=True)
class TokenBound:
    """most_bytes: of a text that one token stands for. counts_spaces: white space counts among them."""

    most_bytes: int
    counts_spaces: bool = True

    def least_tokens(self, text: str) -> int:
        counted = text if self.counts_spaces else "".join(text.split())
        return max(0, num_bytes(counted) // self.most_bytes - 1)


def num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def require_at_most(num_tokens: int, most_tokens: int, param: str = "prompt") -> None:
    """Raise `RequestError`, which names `param`, for a prompt that can never fit."""
    if num_tokens > most_tokens:
        raise RequestError(
            f"the prompt has {num_tokens} tokens or more, of which at most {most_tokens} fit the model's context",
            code="context_length_exceeded",
            param=param,
            value=num_tokens,
            limit=most_tokens,
            hint="shorten the prompt",
        )


def token_bound(backend: tokenizers.Tokenizer) -> TokenBound | None:
    """Returns what can be proved of this tokenizer, or None."""
    normalizers = described(backend.normalizer, "normalizers")
    cutters = described(backend.pre_tokenizer, "pretokenizers")
    added = backend.get_added_tokens_decoder().values()
    counts_spaces = not any(token.lstrip or token.rstrip for token in added)
    shrinks = _shrinks(normalizers)
    if shrinks is None or not all(map(_keeps_all, cutters)) or not _keeps_text(backend):
        return None
    if not counts_spaces and any(map(_makes_spaces, normalizers)):
        return None
    in_bytes = any(part["type"] == "ByteLevel" for part in (*normalizers, *cutters))
    vocabulary = backend.get_vocab(with_added_tokens=False)
    if not _spells_all(backend.model, vocabulary, in_bytes):
        return None
    sizes = map(len, vocabulary) if in_bytes else map(num_bytes, vocabulary)
    longest = max(BYTES_OF_A_CHARACTER, *sizes, *(_added_bytes(backend, token) for token in added))
    return TokenBound(longest * shrinks, counts_spaces)


def _added_bytes(backend: tokenizers.Tokenizer, token: tokenizers.AddedToken) -> int:
    """Returns the most bytes of text that an added token takes up, before or after the normalizer."""
    is_changed = token.normalized and backend.normalizer is not None
    normal = backend.normalizer.normalize_str(token.content) if is_changed else ""
    return max(num_bytes(token.content), num_bytes(normal))


def described(part: Any, inner: str) -> list[Mapping[str, Any]]:
    """A normalizer or pre-tokenizer as plain data, those of a sequence one by one."""
    return [] if part is None else _parts(json.loads(part.__getstate__()), inner)


def _parts(whole: Mapping[str, Any], inner: str) -> list[Mapping[str, Any]]:
    if whole["type"] != "Sequence":
        return [whole]
    return [part for each in whole[inner] for part in _parts(each, inner)]


def _shrinks(normalizers: Iterable[Mapping[str, Any]]) -> int | None:
    """Returns how many times shorter a text may become, in bytes; None if that is not known, as of a part behind
    `ByteLevel`: it may make characters that no byte is written as, and those vanish."""
    total, is_in_bytes = 1, False
    for part in normalizers:
        if is_in_bytes:
            return None
        is_in_bytes = part["type"] == "ByteLevel"
        factor = _replacing(part) if part["type"] == "Replace" else _SHRINKS.get(part["type"])
        if factor is None:
            return None
        total *= factor
    return total


def _replacing(part: Mapping[str, Any]) -> int | None:
    pattern, content = part["pattern"].get("String"), part["content"]
    return -(-num_bytes(pattern) // num_bytes(content)) if pattern and content else None


def _makes_spaces(part: Mapping[str, Any]) -> bool:
    """White space of other characters, which an added token may swallow."""
    return part["type"] == "Replace" and any(map(str.isspace, part["content"]))


def _keeps_text(backend: tokenizers.Tokenizer) -> bool:
    """A post-processor's template may leave the text out."""
    processors = described(backend.post_processor, "processors")
    templates = (part["single"] for part in processors if part["type"] == "TemplateProcessing")
    return all(any("Sequence" in piece for piece in template) for template in templates)


def _keeps_all(part: Mapping[str, Any]) -> bool:
    return part["type"] in _KEEPS_ALL or (part["type"] in _CUTS and part["behavior"] != "Removed")


def _spells_all(model: Any, vocabulary: Mapping[str, int], in_bytes: bool) -> bool:
    """No character vanishes, and no run of unknown characters becomes one token."""
    if isinstance(model, models.Unigram):
        return bool(json.loads(model.__getstate__()).get("byte_fallback")) and _has_all_bytes(vocabulary)
    if not isinstance(model, models.BPE):
        return False
    if model.byte_fallback and _has_all_bytes(vocabulary):
        return True
    if in_bytes and not model.continuing_subword_prefix and not model.end_of_word_suffix:
        return all(character in vocabulary for character in byte_alphabet())
    return model.unk_token is not None and str(model.unk_token) in vocabulary and not model.fuse_unk


def _has_all_bytes(vocabulary: Mapping[str, int]) -> bool:
    return all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))


def byte_alphabet() -> dict[str, int]:
    """GPT-2's: printable bytes are themselves, the others, in order, the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


# ---- texts in pieces


def can_be_cut(backend: tokenizers.Tokenizer) -> bool:
    """Returns whether the pieces' tokens are the whole's."""
    if backend.normalizer is not None or not _is_byte_level(backend):
        return False
    added = backend.get_added_tokens_decoder().values()
    return not any(token.lstrip or token.rstrip or re.search(r"\s", token.content) for token in added)


def is_quick(backend: tokenizers.Tokenizer) -> bool:
    """Returns whether its time is in proportion to the text, whatever the text: BPE behind parts that are known, of
    which none is a regular expression of somebody's own, or writes much for little."""
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


# ---- failures


def is_panic(error: BaseException) -> bool:
    return type(error).__module__ == "pyo3_runtime"


@contextmanager
def tokenizer_faults() -> Iterator[None]:
    """Raises `EngineError` for whatever goes wrong inside: the text was one, so the fault is the tokenizer's."""
    try:
        yield
    except SplittimeError:
        raise
    except MemoryError:
        raise too_costly() from None
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        said = f"the model's tokenizer failed: {str(error)[:200]}"
        raise EngineError(
            said, code="tokenizer_failed", hint="another text may do; the model's files are at fault"
        ) from error


def too_costly(limits: str = "the memory that there is") -> RequestError:
    """The text is to blame, or what the model's author does with it; to send it again would not help."""
    return RequestError(
        f"to make tokens of this prompt takes more than {limits}",
        code="prompt_too_costly",
        param="prompt",
        hint="send a shorter one, or token ids",
    )
