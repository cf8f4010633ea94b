"""Calibration text: a file of text, or of JSON lines with a `text` or chat `messages`, as windows of token ids.

All documents are tokenised one after the other, each with what the tokenizer puts in front of one, and the stream is
cut into windows of `length` tokens that do not overlap; `samples` of them are drawn by the seed. Reading stops when
there is `ENOUGH` times the text that is needed. No text comes with the package: what suits a model is text like what it
will be asked, and a wrong choice would cost quality without a sign of it.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from splittime.core.errors import ConfigError, SplittimeError
from splittime.lab.quantize.settings import QuantizeSettings
from splittime.models.config import load_config
from splittime.text.tokenizer import Tokenizer

ENOUGH = 16
MAX_PIECE_CHARS = 1 << 20
DEFAULT_LENGTH = 512


class CalibrationTokens(Protocol):
    """What is asked of a tokenizer (`text.tokenizer.Tokenizer`)."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str: ...


@dataclass(frozen=True)
class Calibration:
    """windows: int64 [samples, length]."""

    windows: Tensor

    @property
    def digest(self) -> str:
        """Returns a digest of the content, however the file is called."""
        sizes = np.array(self.windows.shape, dtype="<i8").tobytes()
        return hashlib.sha256(sizes + self.windows.numpy().astype("<i8").tobytes()).hexdigest()


def read(path: Path, tokens: CalibrationTokens, samples: int, length: int, seed: int) -> Calibration:
    """Raises `ConfigError` if the file cannot be read, or says how much text is missing."""
    stream = _stream(path, tokens, ENOUGH * samples * length)
    found = len(stream) // length
    if found < samples:
        raise ConfigError(
            f"{path} has {len(stream):,} tokens; {samples} samples of {length} need {samples * length:,}",
            param="calibrate",
            value=len(stream),
            limit=samples * length,
            hint=f"give more text, or --samples {found}"
            if found
            else f"give more text, or a shorter --length than {length}",
        )
    chosen = np.sort(np.random.default_rng(seed).permutation(found)[:samples])
    windows = np.array(stream[: found * length], dtype=np.int64).reshape(found, length)[chosen]
    return Calibration(torch.from_numpy(windows))


def read_for(model: Path, path: Path, settings: QuantizeSettings) -> Calibration:
    """Returns the text as the model's tokenizer reads it, in windows that its context takes."""
    context = load_config(model).max_position_embeddings
    length = settings.length or min(DEFAULT_LENGTH, context)
    if length > context:
        raise ConfigError(
            f"--length {length} is beyond the model's context of {context}", param="length", limit=context
        )
    return read(path, Tokenizer.load(model), settings.samples, length, settings.seed)


def _stream(path: Path, tokens: CalibrationTokens, enough: int) -> list[int]:
    stream: list[int] = []
    try:
        with path.open(encoding="utf-8") as file:
            first = file.read(1)
            file.seek(0)
            documents = _from_lines(path, file, tokens) if first == "{" else _from_text(file, tokens)
            for ids in documents:
                stream += ids
                if len(stream) >= enough:
                    break
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", param="calibrate", value=str(path)) from None
    return stream


def _from_text(file: Any, tokens: CalibrationTokens) -> Iterator[list[int]]:
    """One document, encoded in pieces that end with a line where lines are not too long."""
    is_first = True
    while piece := file.read(MAX_PIECE_CHARS) + file.readline(MAX_PIECE_CHARS):
        yield tokens.encode(piece, add_special_tokens=is_first)
        is_first = False


def _from_lines(path: Path, file: Any, tokens: CalibrationTokens) -> Iterator[list[int]]:
    for number, line in enumerate(file, 1):
        if line.strip():
            try:
                yield _document(line, tokens)
            except (ValueError, TypeError, RecursionError, SplittimeError) as error:
                raise ConfigError(f"{path}, line {number}: {error}", param="calibrate", value=number) from None


def _document(line: str, tokens: CalibrationTokens) -> list[int]:
    values = json.loads(line)
    if isinstance(values, dict) and isinstance(values.get("text"), str):
        return tokens.encode(values["text"])
    if isinstance(values, dict) and isinstance(values.get("messages"), list):
        text = tokens.render_chat(values["messages"], add_generation_prompt=False)
        return tokens.encode(text, add_special_tokens=False)
    raise ValueError('a line is {"text": ...} or {"messages": [...]}')
