"""Text: what is learnt from and what is held out, and documents as one stream of tokens.

Without a text of its own to measure on, one document in ten is held out, by the SHA-256 of what it says: adding a
document never moves another one. A held-out text is never learnt from, whatever the files are called.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from splittime.core.errors import ConfigError
from splittime.lab.quality.documents import Document, DocumentTokens, Encoder, prefix_of, tokenized

HELD_OUT_ONE_IN = 10
LEAST_HELD_OUT = 2


@dataclass(frozen=True)
class DocumentSplit:
    """learnt: of the text. held_out: documents that only measure. dropped: how many were in both and are not learnt."""

    learnt: list[Document]
    held_out: list[Document]
    dropped: int = 0


def split(documents: Sequence[Document], held_out: Sequence[Document] = ()) -> DocumentSplit:
    """Raises `ConfigError` where too few are left to measure on, or nothing to learn from."""
    if held_out:
        measured = {document.text for document in held_out}
        learnt = [document for document in documents if document.text not in measured]
        found = DocumentSplit(learnt, list(held_out), len(documents) - len(learnt))
    else:
        held = [document for document in documents if _is_held_out(document.text)]
        found = DocumentSplit([document for document in documents if not _is_held_out(document.text)], held)
    _refuse(found)
    return found


def _refuse(found: DocumentSplit) -> None:
    if len(found.held_out) < LEAST_HELD_OUT:
        said = f"{len(found.held_out)} documents are held out to measure on, too few to say how documents differ"
        hint = "give --held-out FILE, or more documents: files, lines of JSONL, or parts between <|endoftext|>"
        raise ConfigError(said, param="held_out", value=len(found.held_out), limit=LEAST_HELD_OUT, hint=hint)
    if not found.learnt:
        hint = "give other files as --text than as --held-out"
        raise ConfigError("no document is left to learn from", param="text", value=0, limit=1, hint=hint)


def _is_held_out(text: str) -> bool:
    return int.from_bytes(hashlib.sha256(text.encode()).digest(), "big") % HELD_OUT_ONE_IN == 0


def encode(documents: Iterable[Document], encoder: Encoder) -> list[DocumentTokens]:
    """Raises `ConfigError` where no document is long enough to be used."""
    found = tokenized(documents, encoder)
    if not found:
        raise ConfigError("no document of the text is long enough", param="text", value=0, hint="give more text")
    return found


def stream(documents: Iterable[DocumentTokens], encoder: Encoder, end: Sequence[int]) -> np.ndarray:
    """One stream of ids: before each document what the tokenizer puts there, after it the token that ends a text."""
    prefix = prefix_of(encoder)
    parts = [np.array([*prefix, *document.ids, *end], dtype=np.uint32) for document in documents]
    return np.concatenate(parts)


def digest(tokens: np.ndarray) -> str:
    return hashlib.sha256(tokens.astype("<u4").tobytes()).hexdigest()
