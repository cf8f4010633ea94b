"""Text to token ids and back, read from a model's folder (`tokenizer_files`) or a GGUF file (`gguf_tokenizer`).

A tokenizer also knows the *bytes* of each token (`TokenBytes`). Byte-level BPE and sentencepiece-style vocabularies
(byte fallback) spell a text as the concatenation of their tokens' bytes, so that `text.output` turns tokens into text
one by one and decodes nothing twice. Vocabularies of another kind have no such bytes (`is_by_token` is false) and are
decoded in small windows.

`encode` follows Hugging Face: the post-processor in `tokenizer.json` adds begin-of-sequence; `add_bos_token` of
`tokenizer_config.json`, where it stands, overrules it. A prompt rendered from a chat template gets nothing added,
since the template writes its own special tokens. A tokenizer's own wish to cut texts short, or to fill them up, is not
heeded: it is meant for training. Encoding one text with `encode_batch_fast` looks odd and is on purpose: `encode` holds
the interpreter's lock for as long as it runs (0.5 s for 400 kB), the batch form lets go of it, and the fast one makes
no offsets, which nobody reads and which take most of the memory.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from splittime.core.errors import RequestError
from splittime.text.chat_template import ChatTemplate
from splittime.text.foreign_code import (
    PIECE_CHARS,
    TokenBound,
    byte_alphabet,
    can_be_cut,
    is_quick,
    pieces,
    require_at_most,
    token_bound,
    tokenizer_faults,
)
from splittime.text.tokenizer_files import read_folder, special_tokens

_PLAIN_DECODERS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
_BYTES = byte_alphabet()


class _Description(msgspec.Struct):
    """All that makes a tokenizer, to make an equal one in another process."""

    backend: str
    config: dict[str, Any]
    chat_template: str | None


class Tokenizer:
    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        config: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        config = config or {}
        self.special_tokens = special_tokens(config)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.added_tokens = {token.content: token_id for token_id, token in added.items()}
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")
        self._add_bos: bool | None = config.get("add_bos_token")
        self.bytes_of_tokens = TokenBytes(backend)
        self._template = None if chat_template is None else ChatTemplate(chat_template, self.special_tokens)

    @classmethod
    def load(cls, folder: str | Path, chat_template: str | None = None) -> "Tokenizer":
        """Read a model's folder; `chat_template` stands in for the model's own. Raises `ConfigError` naming the file
        that is missing or cannot be understood."""
        found = read_folder(Path(folder), chat_template)
        return cls(found.backend, config=found.config, chat_template=found.chat_template)

    def describe(self) -> bytes:
        """For `described`, in another process."""
        config: dict[str, Any] = {**self.special_tokens, "add_bos_token": self._add_bos}
        source = None if self._template is None else self._template.source
        return msgspec.msgpack.encode(_Description(self._backend.to_str(), config, source))

    @classmethod
    def described(cls, description: bytes) -> "Tokenizer":
        read = msgspec.msgpack.decode(description, type=_Description)
        backend = tokenizers.Tokenizer.from_str(read.backend)
        return cls(backend, config=read.config, chat_template=read.chat_template)

    def to_json(self) -> str:
        """Returns the tokenizer as a tokenizer.json holds it."""
        return self._backend.to_str()

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return self._backend.token_to_id(token) if token else None

    # ---- text to ids

    @cached_property
    def bound(self) -> TokenBound | None:
        """Returns how few tokens a text can be, where that can be proved."""
        return token_bound(self._backend)

    def encode(self, text: str, *, add_special_tokens: bool = True, most_tokens: int | None = None) -> list[int]:
        """Token ids of `text`. Other threads run meanwhile. Raises `RequestError` as soon as they are known to be more
        than `most_tokens`; where a text cannot be worked on in pieces that is when it is done."""
        if most_tokens is not None and self.bound is not None:
            require_at_most(self.bound.least_tokens(text), most_tokens)
        with tokenizer_faults():
            is_whole = len(text) <= PIECE_CHARS or not self._can_be_cut
            ids = (
                self._ids(text, add_special_tokens)
                if is_whole
                else self._in_pieces(text, add_special_tokens, most_tokens)
            )
        ids = self._with_bos(ids) if add_special_tokens and self._add_bos is not None else ids
        if most_tokens is not None:
            require_at_most(len(ids), most_tokens)
        return ids

    def encode_pair(self, one: str, other: str, most_tokens: int | None = None) -> tuple[int, ...]:
        """Token ids of two texts as one prompt, with the special tokens that the vocabulary puts around a pair. Raises
        `RequestError` where they are more than `most_tokens`."""
        with tokenizer_faults():
            ids = self._backend.encode_batch_fast([(one, other)], add_special_tokens=True)[0].ids
        if most_tokens is not None:
            require_at_most(len(ids), most_tokens)
        return tuple(ids)

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def _in_pieces(self, text: str, add_special_tokens: bool, most_tokens: int | None) -> list[int]:
        before, after = self._ends if add_special_tokens else ([], [])
        ids = [*before]
        for piece in pieces(text):
            ids += self._ids(piece, False)
            if most_tokens is not None:
                require_at_most(len(ids) - 1, most_tokens)  # `add_bos_token` may take one away
        return [*ids, *after]

    @cached_property
    def is_quick(self) -> bool:
        """A short text surely takes a short time."""
        return is_quick(self._backend)

    @property
    def shortcuts(self) -> str:
        """Says in words which shortcuts with a text this tokenizer allows."""
        bound = self.bound
        said = (
            "no text is refused by its length: no bound is proved"
            if bound is None
            else f"refused by length: a token has at most {bound.most_bytes} bytes",
            "long ones in pieces" if self._can_be_cut else "long ones whole: no place to cut is proved",
            "short ones on the event loop" if self.is_quick else "none on the event loop: parts may be slow",
        )
        return "; ".join(said)

    @cached_property
    def _can_be_cut(self) -> bool:
        return can_be_cut(self._backend)

    @cached_property
    def _ends(self) -> tuple[list[int], list[int]]:
        """Returns what the post-processor puts before and after a text."""
        plain, whole = self._ids("a", False), self._ids("a", True)
        at = next(i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
        return whole[:at], whole[at + len(plain) :]

    def _with_bos(self, ids: list[int]) -> list[int]:
        """Make the ids begin with begin-of-sequence or not, as `add_bos_token` says."""
        bos = self.bos_token_id
        if bos is None:
            return ids
        has_bos = bool(ids) and ids[0] == bos
        if self._add_bos and not has_bos:
            return [bos, *ids]
        return ids[1:] if has_bos and not self._add_bos else ids

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def chat_templates(self) -> dict[str, str]:
        """The Jinja source by name: of the default one, the only one that is used."""
        return {} if self._template is None else {"default": self._template.source}

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The prompt's text for `messages`, by `ChatTemplate.render`; encode it with `add_special_tokens=False`."""
        if self._template is None:
            raise RequestError(
                "this model has no chat template",
                code="no_chat_template",
                param="messages",
                hint="use /v1/completions, or start the server with --chat-template FILE",
            )
        return self._template.render(messages, **options)

    @property
    def merges(self) -> list[Any] | None:
        """The merges of byte-level BPE, in order; None for other vocabularies, whose merges a GGUF file makes up."""
        model = json.loads(self._backend.to_str())["model"]
        return model.get("merges") if self.bytes_of_tokens.is_byte_level else None

    # ---- ids to text

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        with tokenizer_faults():
            return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it (`Ġthe`, `▁the`, `<0x0A>`)."""
        return self._backend.id_to_token(token_id)

    @property
    def has_token_bytes(self) -> bool:
        """Text is the concatenation of `token_bytes`."""
        return self.bytes_of_tokens.is_by_token

    @property
    def strips_leading_space(self) -> bool:
        """The vocabulary writes a space before a text's first word, and decoding takes it away again."""
        return self.bytes_of_tokens.strips_leading_space

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that this token stands for in a text (of its name, for a special token)."""
        return self.bytes_of_tokens[token_id]


# ---- the bytes of tokens


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
