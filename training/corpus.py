"""The corpus: the Python standard library's own sources, found on the machine that trains.

Owns which files count and which split each one is in. Promises:

* a file's split depends on its relative name alone, so adding a file never moves another one across the split;
* no two documents have equal text, so a held-out document never has an exact twin in training;
* tables of numbers (character maps, test vectors) are left out: they are data that happens to end in `.py`.

There are three splits. `train` is learnt from, `validation` picks the best checkpoint, and `heldout` is read by
`evaluate.py` alone, so that the published figure has not been selected for.
"""

import hashlib
import re
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SPLIT_BUCKETS = 20
HELDOUT_BUCKET = 0
VALIDATION_BUCKET = 1
THIRD_PARTY = {"site-packages", "dist-packages"}
NUMBER_ESCAPE = re.compile(r"\\x[0-9a-fA-F]{2}|\\[0-7]{3}|\\u[0-9a-fA-F]{4}|0x[0-9a-fA-F]+")
TABLE_LINE_SHARE = 0.4


@dataclass(frozen=True)
class Document:
    """One source file: its name relative to the standard library, and its text with `\\n` line ends."""

    name: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """The documents of each split, in the order of their names, and what was left out and why."""

    train: list[Document]
    validation: list[Document]
    heldout: list[Document]
    skipped: dict[str, int]

    def summary(self) -> dict[str, dict[str, int]]:
        """Files and UTF-8 bytes of each split, for logs and the model card."""
        splits = {"train": self.train, "validation": self.validation, "heldout": self.heldout}
        return {
            name: {"files": len(documents), "bytes": sum(len(d.text.encode()) for d in documents)}
            for name, documents in splits.items()
        }


def split_of(name: str) -> str:
    """The split of a file by the hash of its relative name: 1 in 20 held out, 1 in 20 for validation."""
    bucket = int.from_bytes(hashlib.sha256(name.encode()).digest(), "big") % SPLIT_BUCKETS
    return {HELDOUT_BUCKET: "heldout", VALIDATION_BUCKET: "validation"}.get(bucket, "train")


def is_number_table(text: str) -> bool:
    """Whether so many lines hold escaped numbers that the file is a table rather than code."""
    lines = text.splitlines()
    return sum(bool(NUMBER_ESCAPE.search(line)) for line in lines) > TABLE_LINE_SHARE * len(lines)


def source_files(root: Path) -> Iterable[tuple[str, Path]]:
    """Relative name and path of each standard library source under `root`, in the order of the names."""
    files = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    return sorted((name, path) for name, path in files.items() if not THIRD_PARTY & set(path.parts))


def read_text(path: Path) -> str | None:
    """The file's text, or None where it is not UTF-8 (the library keeps some such files to test its decoders)."""
    try:
        return path.read_bytes().decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError:
        return None


def reason_to_skip(text: str | None, seen: set[str]) -> str | None:
    """Why a file is not in the corpus, or None where it is."""
    if text is None:
        return "not_utf8"
    if not text.strip():
        return "empty"
    if text in seen:
        return "duplicate"
    return "number_table" if is_number_table(text) else None


def load_corpus(root: Path | None = None) -> Corpus:
    """Read, filter, deduplicate and split the standard library's sources (of the running interpreter by default)."""
    splits: dict[str, list[Document]] = {"train": [], "validation": [], "heldout": []}
    skipped: dict[str, int] = {}
    seen: set[str] = set()
    for name, path in source_files(root or Path(sysconfig.get_path("stdlib"))):
        text = read_text(path)
        reason = reason_to_skip(text, seen)
        if text is None or reason:
            skipped[str(reason)] = skipped.get(str(reason), 0) + 1
            continue
        seen.add(text)
        splits[split_of(name)].append(Document(name, text))
    return Corpus(**splits, skipped=skipped)
