"""The bytes that each token of a vocabulary stands for in a text.

Byte-level BPE and sentencepiece-style vocabularies (byte fallback) spell a text as the concatenation of their tokens'
bytes, so that `text.output` decodes nothing twice. Vocabularies of another kind have no such bytes (`is_by_token` is
false) and are decoded in small windows.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from splittime.text.token_bound import byte_alphabet

_PLAIN_DECODERS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
_BYTES = byte_alphabet()


class TokenBytes(dict[int, bytes]):
    """The bytes of each token that was asked for so far; any other is spelled when it is asked for."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._backend = backend
        self._decoders = _flatten(backend.decoder)

    @property
    def is_byte_level(self) -> bool:
        return {decoder["type"] for decoder in self._decoders} == {"ByteLevel"}

    @property
    def is_by_token(self) -> bool:
        """Text is the concatenation of the tokens' bytes."""
        kinds = {decoder["type"] for decoder in self._decoders}
        replaces = [d for d in self._decoders if d["type"] == "Replace"]
        is_plain = bool(kinds) and kinds <= _PLAIN_DECODERS and all("String" in d["pattern"] for d in replaces)
        return self.is_byte_level or is_plain

    @property
    def strips_leading_space(self) -> bool:
        """The vocabulary writes a space before a text's first word, and decoding takes it away again."""
        for decoder in self._decoders:
            if decoder["type"] == "Strip" and decoder["content"] == " " and decoder["start"] >= 1:
                return True
            if decoder["type"] == "Metaspace":
                return decoder.get("prepend_scheme", "always") != "never"
        return False

    def __missing__(self, token_id: int) -> bytes:
        self[token_id] = spelled = self._spell(token_id)
        return spelled

    def _spell(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if not self.is_by_token:
            return self._backend.decode([token_id], skip_special_tokens=False).encode()
        return _byte_level_bytes(token) if self.is_byte_level else _plain_bytes(token, self._decoders)


def _byte_level_bytes(token: str) -> bytes:
    """A token whose characters all stand for bytes is those bytes; any other (an added one) is its own text."""
    if all(character in _BYTES for character in token):
        return bytes(_BYTES[character] for character in token)
    return token.encode()


def _plain_bytes(token: str, decoders: Sequence[Mapping[str, Any]]) -> bytes:
    """Apply a sentencepiece-style chain of decoders to one token."""
    for decoder in decoders:
        if decoder["type"] == "ByteFallback" and len(token) == 6 and token.startswith("<0x") and token[5] == ">":
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                continue
        elif decoder["type"] == "Replace":
            token = token.replace(decoder["pattern"]["String"], decoder["content"])
        elif decoder["type"] == "Metaspace":
            token = token.replace(decoder["replacement"], " ")
    return token.encode()


def _flatten(decoder: Any) -> list[dict[str, Any]]:
    """The decoder's parts as plain data, in order. No decoder is a part of its own: it joins tokens with spaces."""
    if decoder is None:
        return [{"type": "none"}]
    described = json.loads(decoder.__getstate__())
    return described["decoders"] if described["type"] == "Sequence" else [described]
