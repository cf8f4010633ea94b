"""Texts: from files to documents, and from documents to the windows that both models read.

A document is what one author wrote in one go: a file, a line of JSONL, a part between `<|endoftext|>`, an article of
WikiText (` = Title = `). Documents are the unit of all resampling, so one long file without such marks is one document
and can give no verdict. Documents that are nearly the same are one (`distinct`): copies would count an author twice.

`plan` draws windows of a length in turns, one of each document, then another of each, until the budget of tokens is
spent: many documents with one window say more than one document with many. Which window of a document, and which
document goes first, is drawn from a fixed seed: the first ones would be licences and imports. The same files give the
same windows. A window of length L scores the tokens from `first` on, those whose context the next shorter length did
not see; it begins with what the tokenizer puts before a text (begin of sequence).
"""

import gzip
import hashlib
import json
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import zip_longest
from pathlib import Path
from random import Random
from typing import Any, Protocol
from zlib import crc32

from splittime.core.errors import ConfigError

SEPARATOR = "<|endoftext|>"
_ARTICLE = re.compile(r"^(?= = [^=].*[^=] = *$)", re.MULTILINE)
_THIRD_PARTY = {"site-packages", "dist-packages"}
HELD_OUT = 20  # the packaged model's training held out one of so many files, by the hash of their names
SEED = 0
RUN, SKETCH, ALIKE = 8, 64, 0.8
MIN_SCORED = 16  # tokens of a window; a shorter rest is not worth its pass


class Encoder(Protocol):
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


@dataclass(frozen=True)
class Document:
    name: str
    text: str


@dataclass(frozen=True)
class DocumentTokens:
    """A document's ids, without what goes before each window."""

    name: str
    ids: list[int]


@dataclass(frozen=True)
class TextWindow:
    """document: its number. DocumentTokens at positions `first` and later are scored."""

    document: int
    token_ids: tuple[int, ...]
    first: int


def read_documents(paths: Sequence[Path]) -> list[Document]:
    """Returns the documents of files and of all `.txt`, `.md`, `.py` and `.jsonl` files in folders. Raises
    `ConfigError`."""
    found: dict[str, Document] = {}
    for path in paths:
        for file in _files(path):
            for document in _of_file(file):
                found.setdefault(document.text, document)  # a text that is there twice is one document
    if not found:
        raise ConfigError("the texts hold no text", param="text", value=", ".join(map(str, paths)))
    return list(found.values())


def python_documents(most: int) -> list[Document]:
    """Returns documents from this machine's Python library: the files that the packaged model's training held out, by
    the hash of their names, which is the rule of `training/corpus.py`."""
    root = Path(sysconfig.get_path("stdlib"))
    names = sorted((path.relative_to(root).as_posix(), path) for path in root.rglob("*.py"))
    held_out = [(name, path) for name, path in names if not _THIRD_PARTY & set(path.parts) and _is_held_out(name)]
    documents = [Document(name, text) for name, path in held_out if (text := _text_or_none(path)).strip()]
    return documents[:most]


def _is_held_out(name: str) -> bool:
    return int.from_bytes(hashlib.sha256(name.encode()).digest(), "big") % HELD_OUT == 0


def _text_or_none(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.suffix in (".txt", ".md", ".py", ".jsonl"))
    if not path.is_file():
        raise ConfigError(f"no such text: {path}", param="text", value=str(path), hint="a file or a folder of files")
    return [path]


def read_text(path: Path, param: str) -> str:
    """A file's text, unpacked if its name ends in .gz."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return data.decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", param=param, value=str(path)) from None


def json_lines(path: Path, param: str) -> Iterator[tuple[int, Any]]:
    """Each line of a JSONL file with its number from 1; empty lines are left out."""
    for number, line in enumerate(read_text(path, param).split("\n"), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{path}:{number} is not JSON: {error}", param=param, value=line) from None


def _of_file(path: Path) -> Iterator[Document]:
    if path.name.removesuffix(".gz").endswith(".jsonl"):
        for number, record in json_lines(path, "text"):
            text = record.get("text") if isinstance(record, dict) else None
            if not isinstance(text, str):
                raise ConfigError(f'{path}:{number} has no "text"', param="text", value=str(record)[:200])
            yield Document(f"{path.name}:{number}", text)
        return
    text = read_text(path, "text")
    parts = text.split(SEPARATOR) if SEPARATOR in text else _ARTICLE.split(text)
    kept = [part.strip("\n") for part in parts if part.strip()]
    for number, part in enumerate(kept, 1):
        yield Document(path.name if len(kept) == 1 else f"{path.name}#{number}", part)


def tokenized(documents: Iterable[Document], encoder: Encoder) -> list[DocumentTokens]:
    """Documents of at least `MIN_SCORED` tokens."""
    found = (DocumentTokens(one.name, encoder.encode(one.text, add_special_tokens=False)) for one in documents)
    return [tokens for tokens in found if len(tokens.ids) >= MIN_SCORED]


def distinct(documents: Sequence[DocumentTokens]) -> list[DocumentTokens]:
    """The documents without those that are nearly an earlier one: of the `SKETCH` smallest hashes of their runs of
    `RUN` tokens, `ALIKE` are the same (Broder, On the resemblance and containment of documents, 1997)."""
    kept: list[DocumentTokens] = []
    holders: dict[int, list[int]] = {}
    for document in documents:
        runs = {crc32(repr(document.ids[i : i + RUN]).encode()) for i in range(max(1, len(document.ids) - RUN + 1))}
        sketch = nsmallest(SKETCH, runs)
        shared = Counter(holder for value in sketch for holder in holders.get(value, ()))
        if shared and max(shared.values()) >= ALIKE * len(sketch):
            continue
        for value in sketch:
            holders.setdefault(value, []).append(len(kept))
        kept.append(document)
    return kept


def prefix_of(encoder: Encoder) -> tuple[int, ...]:
    """Returns what the tokenizer puts before a text."""
    plain, whole = encoder.encode("a", add_special_tokens=False), encoder.encode("a")
    places = [i for i in range(len(whole) - len(plain) + 1) if whole[i : i + len(plain)] == plain]
    return tuple(whole[: places[0]]) if places else ()


def longest_length(documents: Sequence[DocumentTokens], limit: int, shorter: int, least_documents: int) -> int | None:
    """The longest context that `least_documents` of the documents fill, at most `limit`; None if that is no more than
    twice `shorter`, which would say little that `shorter` does not."""
    lengths = sorted((len(document.ids) for document in documents), reverse=True)
    if len(lengths) < least_documents:
        return None
    length = min(limit, lengths[least_documents - 1])
    return length if length >= 2 * shorter else None


def plan(
    documents: Sequence[DocumentTokens],
    length: int,
    shorter: int,
    prefix: tuple[int, ...],
    most_tokens: int,
    seed: int = SEED,
) -> list[TextWindow]:
    """Windows of at most `length` tokens that score what lies beyond `shorter`; `shorter` 0 scores all but the first.

    A window that ends with its document counts if it fills half of what is beyond `shorter`, or `shorter` is 0.
    """
    room = length - len(prefix)
    least = MIN_SCORED if shorter == 0 else (length + shorter) // 2 - len(prefix)
    cut = [
        [document.ids[i : i + room] for i in range(0, len(document.ids), room) if len(document.ids) - i >= least]
        for document in documents
    ]
    first = max(1, len(prefix), shorter)
    drawn = Random(seed)
    for pieces in cut:
        drawn.shuffle(pieces)
    order = drawn.sample(range(len(documents)), len(documents))
    windows: list[TextWindow] = []
    spent = 0
    for turn in zip_longest(*(cut[number] for number in order)):
        for number, ids in zip(order, turn, strict=True):
            if ids is not None and spent < most_tokens:
                windows.append(TextWindow(number, (*prefix, *ids), first))
                spent += len(prefix) + len(ids)
    return windows
